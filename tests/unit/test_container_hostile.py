"""inspect_to_json on containers that are damaged or lie: facts or [image], never more.

Under AddressSanitizer and UBSan (cubin_check.py), each input in a heap block of exactly its size.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import containers
import cubin_check
import pytest
from containers import CUBIN, FOLDER

DATA = CUBIN.read_bytes()


def source_file(tmp_path: Path) -> Path:
    path = tmp_path / "source.cpp"
    path.write_text(containers.triton_aot(DATA[:600]) + containers.tensorrt_llm({"k": DATA})[-400:])
    return path


def inspect(tmp_path: Path, data: bytes) -> dict:
    path = tmp_path / "input"
    path.write_bytes(data)
    return cubin_check.inspect(path)


def refused(tmp_path: Path, data: bytes, *words: str) -> str:
    facts = inspect(tmp_path, data)
    assert set(facts) == {"error"}, f"accepted: {str(facts)[:500]}"
    message = facts["error"]["message"]
    assert facts["error"]["tag"] == "image", message
    for word in words:
        assert word in message, message
    return message


def tally(*command: object) -> dict:
    lines = cubin_check.run(command, timeout=900)
    assert len(lines) == 1, lines[:10]
    return json.loads(lines[0])


@pytest.mark.parametrize("path", containers.COMMITTED, ids=lambda path: path.name)
def test_every_truncation_gives_facts_or_an_error(path: Path) -> None:
    found = tally("truncate_inspect", path)
    assert found["refused"] + found["accepted"] == path.stat().st_size
    if path.name != "vec_add.ptx":  # whose last bytes are blank lines
        assert found["accepted"] <= 8  # the padding of a fatbin's last entry is not checked
    assert found["seconds"] < 2


@pytest.mark.parametrize("path", containers.COMMITTED, ids=lambda path: path.name)
def test_random_bit_flips_are_survived(path: Path) -> None:
    found = tally("flip_inspect", path, 20261121, 400)
    assert found["refused"] + found["accepted"] == 400
    assert found["seconds"] < 2


@pytest.mark.parametrize("name", ["lz4.fatbin", "zstd.fatbin", "relocatable.fatbin", "lto.fatbin"])
def test_every_edit_of_a_fatbins_headers_is_survived(name: str) -> None:
    found = tally("edit_inspect", FOLDER / f"vec_add.{name}", 16 + 112)
    assert found["refused"] > 100
    assert found["accepted"] > 100  # damage within an entry is that entry's error
    assert found["seconds"] < 2


def test_sources_are_survived(tmp_path: Path) -> None:
    path = source_file(tmp_path)
    found = tally("truncate_inspect", path)
    assert found["refused"] + found["accepted"] == path.stat().st_size
    found = tally("flip_inspect", path, 5, 500)
    assert found["refused"] + found["accepted"] == 500


def entry(
    payload: bytes = DATA,
    *,
    kind: int = 2,
    header: int = 64,
    padded: int | None = None,
    compressed: int = 0,
    flags: int = 0x11,
    size: int = 0,
    name: tuple[int, int] = (0, 0),
    options: int = 0,
    tail: bytes = b"",
    arch: int = 80,
) -> bytes:
    """A fatbin's entry; omitted fields are valid."""
    body = payload + b"\0" * (-len(payload) % 8)
    fixed = struct.pack(
        "<HHIQIIHHIIIQQQ",
        *(kind, 0x101, header, len(body) if padded is None else padded, compressed, options),
        *(8, 1, arch, *name, flags, 0, size),
    )
    return fixed + tail + body


def fatbin(*entries: bytes, version: int = 1, header: int = 16, size: int | None = None) -> bytes:
    body = b"".join(entries)
    start = struct.pack("<IHHQ", 0xBA55ED50, version, header, len(body) if size is None else size)
    return start + body


def test_a_fatbin_of_the_builder_is_accepted(tmp_path: Path) -> None:
    """The base of the wrong ones below: each differs from an accepted file in one thing."""
    facts = inspect(tmp_path, fatbin(entry(), entry(arch=86)))
    assert [e["error"] for e in facts["entries"]] == [None, None]
    assert inspect(tmp_path, fatbin())["entries"] == []


WRONG = {
    "version 2": (fatbin(entry(), version=2), "another version"),
    "header too small": (fatbin(entry(), header=15), "ends past"),
    "header past the end": (fatbin(entry(), header=60000), "ends past"),
    "size past the end": (fatbin(entry(), size=1 << 20), "ends past"),
    "size that overflows": (fatbin(entry(), size=(1 << 64) - 8), "ends past"),
    "size too small": (fatbin(entry(), size=100), "the entry at offset 16"),
    "only a magic": (fatbin()[:9], "too short"),
    "entry cut short": (fatbin(entry()[:40]), "cut short"),
    "entry header too small": (fatbin(entry(header=63)), "header that ends outside"),
    "entry header too large": (fatbin(entry(header=1 << 31)), "header that ends outside"),
    "payload past the end": (fatbin(entry(padded=1 << 40)), "past the end"),
    "payload that overflows": (fatbin(entry(padded=(1 << 64) - 64)), "past the end"),
    "compressed beyond payload": (
        fatbin(entry(compressed=len(DATA) + 9, flags=0x2011, size=4000)),
        "more than its size",
    ),
    "claim of 2^60": (fatbin(entry(compressed=8, flags=0x8011, size=1 << 60)), "claims more"),
    "bytes after the end": (fatbin(entry()) + b"\1", "after its end"),
    "two fatbins": (fatbin(entry()) * 2, "after its end"),
}


@pytest.mark.parametrize("case", WRONG)
def test_damaged_fatbins_are_refused(case: str, tmp_path: Path) -> None:
    data, *words = WRONG[case]
    refused(tmp_path, data, "fatbin", *words)


DAMAGED_ENTRIES = {
    "unknown compression": (entry(compressed=100, flags=0x11, size=500), "packed by a method"),
    "lz4 of noise": (entry(compressed=100, flags=0x2011, size=500), "LZ4"),
    "zstd of noise": (entry(compressed=100, flags=0x8011, size=500), "zstd"),
    "size too small": (entry(b"\x40abcd", compressed=5, flags=0x2011, size=3), "more than"),
    "no cubin": (entry(b"hello wo"), "not a cubin"),
    "cubin cut short": (entry(DATA[:-8]), "truncated"),
    "padding": (entry(DATA + bytes(8)), "8 bytes after its end"),
    "fatbin in a fatbin": (entry(fatbin(entry())), "is a fatbin"),
    "ptx that is none": (entry(kind=1), "PTX"),
    "bomb": (entry(b"\1", compressed=1, flags=0x8011, size=1 << 29), "too large for its file"),
}


@pytest.mark.parametrize("case", DAMAGED_ENTRIES)
def test_a_damaged_entry_does_not_hide_the_others(case: str, tmp_path: Path) -> None:
    data, word = DAMAGED_ENTRIES[case]
    facts = inspect(tmp_path, fatbin(entry(), data, entry(arch=86)))
    first, wrong, last = facts["entries"]
    assert (wrong["content"], wrong["error"]["tag"]) == (None, "image")
    assert word in wrong["error"]["message"], wrong["error"]
    assert "entry 1 of the file" in wrong["error"]["message"]
    assert first["content"] == last["content"]
    assert first["content"] is not None


def test_entries_of_unknown_kinds_are_listed(tmp_path: Path) -> None:
    (found,) = inspect(tmp_path, fatbin(entry(kind=77)))["entries"]
    assert (found["kind"], found["content"], found["error"]) == ("unknown", None, None)


def test_names_and_options_cannot_leave_their_header(tmp_path: Path) -> None:
    tail = b"a.cu\0\0\0\0" + struct.pack("<II", 80, 4) + b"-O3\0\0\0\0\0"
    good = entry(header=88, name=(64, 4), options=72, tail=tail)
    (found,) = inspect(tmp_path, fatbin(good))["entries"]
    assert (found["name"], found["options"]) == ("a.cu", "-O3")
    for name in ((64, 400), (1 << 31, 8), ((1 << 32) - 4, 8), (64, (1 << 32) - 1)):
        (found,) = inspect(tmp_path, fatbin(entry(header=88, name=name, tail=tail)))["entries"]
        assert found["name"] == ""
    for options in (1 << 31, (1 << 32) - 1, 84, 64):
        (found,) = inspect(tmp_path, fatbin(entry(header=88, options=options, tail=tail)))[
            "entries"
        ]
        assert found["options"] == ""
    rude = entry(header=72, name=(64, 8), tail=b"\x1b[2J\xff\0ab")
    assert inspect(tmp_path, fatbin(rude))["entries"][0]["name"] == ""


def host(sections: list[tuple[bytes, int, bytes]], **fields: int) -> bytearray:
    """An x86-64 object; sections are (name, type, contents)."""
    names = b"\0" + b"".join(name + b"\0" for name, _, _ in sections) + b".shstrtab\0"
    body, headers, at = bytearray(64), bytearray(64), 1
    for name, kind, data in [*sections, (b".shstrtab", 3, names)]:
        headers += struct.pack("<IIQQQQIIQQ", at, kind, 2, 0, len(body), len(data), 0, 0, 8, 0)
        body += data + b"\0" * (-len(data) % 8)
        at += len(name) + 1
    count = len(sections) + 2
    body[:64] = struct.pack(
        "<4s5B7xHHIQQQIHHHHHH",
        *(b"\x7fELF", 2, 1, 1, 0, 0, 1, 62, 1, 0, 0, fields.get("table", len(body)), 0),
        *(64, 0, 0, fields.get("entry", 64), fields.get("count", count), count - 1),
    )
    return body + headers


def test_host_sections_are_checked(tmp_path: Path) -> None:
    whole = fatbin(entry())
    facts = inspect(tmp_path, host([(b".text", 1, b"x"), (b".nv_fatbin", 1, whole * 2)]))
    assert [e["name"] for e in facts["entries"]] == [".nv_fatbin"] * 2
    gap = inspect(tmp_path, host([(b".nv_fatbin", 1, whole + bytes(24) + whole)]))
    assert len(gap["entries"]) == 2
    refused(tmp_path, host([(b".nv_fatbin", 8, whole)]), "without device code")  # SHT_NOBITS
    refused(tmp_path, host([(b".nv_fatbin2", 1, whole)]), "without device code")
    refused(tmp_path, host([(b".nv_fatbin", 1, b"")]), "without device code")
    refused(tmp_path, host([(b".nv_fatbin", 1, b"\0\0\1" + whole)]), "no fatbin at offset")
    refused(tmp_path, host([(b".nv_fatbin", 1, whole[:-8])]), "ends past")
    refused(tmp_path, host([(b".nv_fatbin", 1, whole)], table=1 << 40), "section headers end past")
    refused(tmp_path, host([(b".nv_fatbin", 1, whole)], table=(1 << 64) - 64), "end past")
    refused(tmp_path, host([(b".nv_fatbin", 1, whole)], count=65535), "end past")
    refused(tmp_path, host([(b".nv_fatbin", 1, whole)], entry=40), "wrong size")
    refused(tmp_path, bytes(host([]))[:40], "too short")
    moved = host([(b".nv_fatbin", 1, whole)])
    (table,) = struct.unpack_from("<Q", moved, 40)
    struct.pack_into("<Q", moved, table + 64 + 24, (1 << 64) - 8)
    refused(tmp_path, moved, "section 1 ends past")


def test_the_amount_of_work_is_bounded(tmp_path: Path) -> None:
    """Overlapping sections, armies of entries, sources of braces: none takes long."""
    start = cubin_check.processor_seconds()
    many = host([(b".nv_fatbin", 1, fatbin(entry()) * 100)] * 1)
    (table,) = struct.unpack_from("<Q", many, 40)
    section = bytes(many[table + 64 : table + 128])
    crowd = many[:table] + bytes(64) + section * 5000 + bytes(many[table + 128 :])
    struct.pack_into("<HH", crowd, 60, 5002, 5001)
    refused(tmp_path, crowd, "overlap")
    refused(tmp_path, fatbin(*[entry(b"", kind=77)] * 100_001), "more than 100000 entries")
    refused(tmp_path, bytes(host([(b".nv_fatbin", 1, fatbin() * 100_001)])), "100000 fatbins")
    refused(tmp_path, b"int a[] = {" * 100_000, "not a cubin")
    refused(tmp_path, b"unsigned char a[] = {0x7f, " * 100_000, "not a cubin")
    refused(tmp_path, b"#define A B\n" * 400_000, "not a cubin")
    refused(tmp_path, b"a " * 2_000_000, "not a cubin")
    refused(tmp_path, b"/*" * 2_000_000, "not a cubin")
    refused(tmp_path, b'"' * 2_000_001, "not a cubin")
    head = b".version 8.4\n.target sm_90\n"
    refused(tmp_path, head + b".entry k(" * 300_000)
    refused(tmp_path, head + b"{" * 2_000_000, "ends within")
    assert len(inspect(tmp_path, head + b".entry k(){}\n" * 20_000)["kernels"]) == 20_000
    # A thousandfold: each entry may be unpacked alone, not all of them.
    blocks = b"".join(
        struct.pack("<I", (1 << 17) << 3 | 2 | (i == 63))[:3] + b"z" for i in range(64)
    )
    frame = struct.pack("<IBI", 0xFD2FB528, 0xA0, 1 << 23) + blocks
    bomb = entry(frame, compressed=len(frame), flags=0x8011, size=1 << 23)
    facts = inspect(tmp_path, fatbin(*[bomb] * 50))
    messages = [e["error"]["message"] for e in facts["entries"]]
    assert "not a cubin" in messages[0]
    assert sum("not unpacked" in message for message in messages) > 40
    assert 0 < cubin_check.processor_seconds() - start < 40
