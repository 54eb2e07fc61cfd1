"""parse_cubin on bytes that are not a whole, honest cubin: [image], never a crash or an overread.

Everything runs under AddressSanitizer and UBSan (cubin_check.py), each input in a heap block of
exactly its size.
"""

from __future__ import annotations

import gzip
import json
import struct
from pathlib import Path

import cubin_check
import pytest
import real_cubins
from elf_builder import (
    NOBITS,
    NOTE,
    NV_COMPAT,
    NV_INFO,
    PROGBITS,
    STRTAB,
    SYMTAB,
    Cubin,
    Kernel,
    Section,
    Symbol,
    attribute,
    param,
    param_v2,
    value,
)

COMMITTED = real_cubins.COMMITTED
SMALL = [path for path in COMMITTED if path.stat().st_size < 10_000]  # one of each layout


def parse(tmp_path: Path, data: bytes) -> dict:
    path = tmp_path / "input"
    path.write_bytes(data)
    return cubin_check.facts(path)


def refused(tmp_path: Path, data: bytes, *words: str) -> str:
    """The message of the [image] error, which must hold all of `words`."""
    facts = parse(tmp_path, data)
    assert "error" in facts, f"accepted: {facts}"
    message = facts["error"]["message"]
    assert facts["error"]["tag"] == "image", message
    assert message.startswith("torch_cubin [image]: the file "), message
    for word in words:
        assert word in message, message
    return message


def tally(*command: object) -> dict:
    lines = cubin_check.run(command)
    assert len(lines) == 1, lines[:10]
    return json.loads(lines[0])


@pytest.mark.fault_case(2, 3)
@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_every_truncation_is_refused(path: Path) -> None:
    assert tally("truncate", path) == {
        "refused": path.stat().st_size,
        "accepted": 0,
        "seconds": pytest.approx(0, abs=1),
    }


@pytest.mark.fault_case(3)
@pytest.mark.skipif(real_cubins.nvcc() is None, reason="needs nvcc, found none")
@pytest.mark.parametrize("arch", ["sm_75", "sm_90", "sm_121a"])
def test_every_truncation_of_a_larger_cubin_is_refused(arch: str) -> None:
    path, _ = real_cubins.compiled()[arch]
    found = tally("truncate", path)
    assert (found["refused"], found["accepted"]) == (path.stat().st_size, 0)


@pytest.mark.fault_case(4)
@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_trailing_bytes_are_refused(path: Path, tmp_path: Path) -> None:
    found = tally("append", path)
    assert (found["refused"], found["accepted"]) == (12, 0)
    refused(tmp_path, path.read_bytes() + b"\0" * 5, "5 bytes after its end")


@pytest.mark.fault_case(5)
@pytest.mark.parametrize("path", SMALL, ids=lambda path: path.stem)
def test_every_edit_of_a_field_is_survived(path: Path) -> None:
    found = tally("edit", path)
    assert found["refused"] > 1000
    assert found["accepted"] > 1000  # addresses, code sizes and the like say nothing we rely on
    assert found["seconds"] < 2


@pytest.mark.fault_case(5)
@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_random_bit_flips_are_survived(path: Path) -> None:
    found = tally("flip", path, 20240607, 500)
    assert found["refused"] + found["accepted"] == 500
    assert found["seconds"] < 2


@pytest.mark.fault_case(5)
def test_random_bytes_are_refused() -> None:
    found = tally("noise", 20240607, 5000)
    assert (found["refused"], found["accepted"]) == (5000, 0)


def real() -> bytearray:
    return bytearray((real_cubins.DATA / "vec_add.sm_120a.cuda130.cubin").read_bytes())


def with_bytes(at: int, data: bytes) -> bytes:
    file = real()
    file[at : at + len(data)] = data
    return bytes(file)


FATBIN = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 0)
OTHER_FORMATS = {
    "empty": (b"", "is empty"),
    "one byte": (b"\x7f", "not a cubin"),
    "elf start": (b"\x7fELF", "too short"),
    "63 bytes": (bytes(real()[:63]), "too short"),
    "elf32": (with_bytes(4, b"\1"), "64-bit"),
    "big-endian": (with_bytes(5, b"\2"), "little-endian"),
    "elf version": (with_bytes(6, b"\2"), "ELF version"),
    "x86": (with_bytes(18, struct.pack("<H", 62)), "x86-64", "cuobjdump"),
    "arm": (with_bytes(18, struct.pack("<H", 183)), "aarch64"),
    "amd": (with_bytes(18, struct.pack("<H", 224)), "AMD"),
    "other machine": (with_bytes(18, struct.pack("<H", 243)), "machine 243"),
    "relocatable": (with_bytes(16, struct.pack("<H", 1)), "relocatable", "nvlink"),
    "core dump": (with_bytes(16, struct.pack("<H", 4)), "type 4"),
    "unknown layout": (with_bytes(7, b"\x41\x09"), "OS ABI 65 version 9"),
    "swapped layout": (with_bytes(7, b"\x33\x08"), "OS ABI 51 version 8"),
    "fatbin": (FATBIN, "fatbin", "cuobjdump -xelf"),
    "fatbin wrapper": (struct.pack("<II", 0x466243B1, 1), "fatbin wrapper"),
    "lto-ir": (b"\xed\x43\x4e\x7f" + b"\0" * 60, "LTO-IR", "nvJitLink"),
    "bitcode": (b"BC\xc0\xde" + b"\0" * 60, "LLVM bitcode"),
    "cutile": (b"\x7fTileIR\0" + b"\0" * 60, "cuTile"),
    "git lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    "ptx": (b".version 8.4\n.target sm_90\n", "PTX", "ptxas"),
    "ptx with comments": (b"\n//\n// NVVM\n/* a\n b */ .version 8.4\n", "PTX"),
    "endless comment": (b"/* .version", "not a cubin"),
    "hex array": (b"unsigned char k_cubin[] = { 0x7f, 0x45, 0x4c, 0x46 };", "hex array"),
    "archive": (b"!<arch>\nx", "static library"),
    "zip": (b"PK\3\4" + b"\0" * 99, "zip"),
    "gzip": (gzip.compress(bytes(real())), "gunzip"),
    "text": (b"hello", "not a cubin"),
}


@pytest.mark.fault_case(7, 8)
@pytest.mark.parametrize("case", OTHER_FORMATS)
def test_other_formats_are_named(case: str, tmp_path: Path) -> None:
    data, *words = OTHER_FORMATS[case]
    refused(tmp_path, data, *words)


def test_a_cubin_of_the_builder_is_accepted(tmp_path: Path) -> None:
    """The base of the wrong ones below: each differs from an accepted file in one thing."""
    facts = parse(tmp_path, Cubin().build())
    assert facts["arch"] == "sm_90"
    (entry,) = facts["kernels"]
    assert (entry["name"], entry["param_bytes"], len(entry["params"])) == ("k", 8, 1)


def one(info: bytes = b"", **fields: object) -> Cubin:
    return Cubin(kernels=[Kernel(info=info, **fields)])


def text(*sections: Section, **fields: object) -> Cubin:
    return Cubin(sections=list(sections), **fields)


TWO = param(0, 0, 8) + param(1, 8, 4)
CONTRADICTIONS = {
    "parameter gap": (one(param(0, 0, 8) + param(2, 8, 8)), "skips or repeats"),
    "parameter repeated": (one(param(0, 0, 8) + param(0, 8, 8)), "skips or repeats"),
    "parameter in both forms": (one(param(0, 0, 8) + param_v2(0, 8, 8)), "skips or repeats"),
    "parameters overlap": (one(param(0, 0, 8) + param(1, 4, 8)), "overlapping"),
    "parameters out of order": (one(param(0, 8, 8) + param(1, 0, 8)), "overlapping"),
    "parameters past the total": (one(TWO + value(0x19, 8)), "total"),
    "parameters short of the total": (one(TWO + value(0x19, 16)), "total"),
    "two totals": (
        one(TWO + value(0x19, 12) + attribute(0x0A, struct.pack("<IHH", 0, 0x210, 16))),
        "two sizes",
    ),
    "parameter record too short": (one(attribute(0x17, b"\0" * 8)), "wrong size"),
    "block record too long": (one(attribute(0x10, b"\0" * 16)), "wrong size"),
    "attribute cut short": (one(b"\4\x17\x0c"), "cut short"),
    "attribute past its section": (one(b"\4\x17\x0c\0\0\0"), "outside its section"),
    "attribute format 5": (one(b"\5\x17\0\0"), "format"),
    "attribute format 0": (one(b"\0\0\0\0"), "format"),
    "registers of no symbol": (
        Cubin(module_info=attribute(0x2F, struct.pack("<II", 99, 8))),
        "symbol that does not exist",
    ),
    "kernel twice": (
        Cubin(symbols=[Symbol("k", 4, 16)]),
        "two kernels named 'k'",
    ),
    "kernel without a name": (Cubin(symbols=[Symbol("", 4, 16)]), "without a name"),
    "kernel without code": (Cubin(symbols=[Symbol("j", 4, 16)]), "no code for kernel 'j'"),
    "kernel of no bytes": (one(code=b""), "no code"),
    "kernel in no section": (Cubin(symbols=[Symbol("j", 77, 16)]), "no code"),
    "kernel without parameter table": (
        text(Section(".text.j", PROGBITS, b"\0" * 16), symbols=[Symbol("j", 6, 16)]),
        "no parameter table of kernel 'j'",
    ),
    "another kernel's parameter table": (
        text(
            Section(".text.j", PROGBITS, b"\0" * 16),
            Section(".nv.info.j", NV_INFO, b"", info=4),
            symbols=[Symbol("j", 6, 16)],
        ),
        "no parameter table of kernel 'j'",
    ),
    "parameter table twice": (text(Section(".nv.info.k", NV_INFO)), "two sections"),
    "code twice": (text(Section(".text.k", PROGBITS)), "two sections"),
    "module attributes twice": (
        text(Section(".nv.info", NV_INFO), Section(".nv.info", NV_INFO)),
        "two sections",
    ),
    "shared memory of 2^40": (one(shared=1 << 40), "static shared memory"),
    "no symbol table": (Cubin(symbol_section=False, kernels=[]), "no symbol table"),
    "two symbol tables": (text(Section(".symtab2", SYMTAB, link=2)), "two symbol tables"),
    "arch 0": (Cubin(flags=0x06000004), "sm_0"),
    "toolkit note cut short": (text(Section(".note.nv.tkinfo", NOTE, b"\0" * 8)), "note cut short"),
    "toolkit note past its section": (
        text(Section(".note.nv.tkinfo", NOTE, struct.pack("<III", 12, 99, 2000) + b"N" * 12)),
        "note that ends outside",
    ),
}


@pytest.mark.fault_case(6, 16)
@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradictions_are_refused(case: str, tmp_path: Path) -> None:
    cubin, *words = CONTRADICTIONS[case]
    refused(tmp_path, cubin.build(), *words)


def note(command: str) -> Section:
    strings = b"\0ptxas\0release\0build\0"
    words = struct.pack("<6I", 2, 0, 1, 7, 15, len(strings))
    desc = words + strings + command.encode() + b"\0"
    data = struct.pack("<III", 12, len(desc), 2000) + b"NVIDIA Corp\0" + desc
    return Section(".note.nv.tkinfo", NOTE, data)


COMPAT_A = Section(".nv.compat", NV_COMPAT, struct.pack("<BBH", 2, 9, 1))
COMPAT_PLAIN = Section(".nv.compat", NV_COMPAT, struct.pack("<BBH", 2, 9, 0))
V1 = {"os_abi": 0x33, "abi_version": 7, "version": 124}


@pytest.mark.parametrize(
    ("cubin", "arch"),
    [
        (text(), "sm_90"),
        (text(COMPAT_A), "sm_90a"),
        (text(COMPAT_PLAIN), "sm_90"),
        (text(note("-arch sm_90a -m 64 ")), "sm_90a"),
        (text(note("-arch=sm_90a")), "sm_90a"),
        (text(note("-arch sm_90 -m 64 ")), "sm_90"),
        (text(note("-arch sm_80a ")), "sm_90"),  # another arch's word counts for nothing
        (text(note("-arch sm_90abc ")), "sm_90"),
        (text(note("-arch sm_100f "), flags=0x06006402), "sm_100f"),
        (text(COMPAT_A, note("-arch sm_100f "), flags=0x06006402), "sm_100a"),  # the stricter
        (text(flags=0x5A0D5A, **V1), "sm_90a"),
        (text(flags=0x5A055A, **V1), "sm_90"),
        (text(flags=0x500D50, **V1), "sm_80"),  # the bit means nothing before sm_90
    ],
)
def test_arch_suffix(cubin: Cubin, arch: str, tmp_path: Path) -> None:
    assert parse(tmp_path, cubin.build()).get("arch") == arch


def test_barriers_and_registers_of_the_older_layout(tmp_path: Path) -> None:
    data = bytearray(Cubin(flags=0x500550, kernels=[Kernel(info=b"")], **V1).build())
    sections = struct.unpack_from("<Q", data, 40)[0]
    header = sections + 4 * 64  # .text.k
    struct.pack_into("<Q", data, header + 8, 3 << 20 | 6)
    struct.pack_into("<I", data, header + 44, 42 << 24 | 1)
    (entry,) = parse(tmp_path, bytes(data))["kernels"]
    assert (entry["barriers"], entry["registers"]) == (3, 42)


def section_field(index: int, offset: int, layout: str, number: int) -> bytes:
    """An honest cubin with one field of one section header replaced."""
    data = bytearray(Cubin().build())
    sections = struct.unpack_from("<Q", data, 40)[0]
    struct.pack_into(layout, data, sections + index * 64 + offset, number)
    return bytes(data)


@pytest.mark.fault_case(6)
@pytest.mark.parametrize("number", [1 << 16, (1 << 64) - 1, (1 << 64) - 64, 1 << 63])
@pytest.mark.parametrize("field", [24, 32])
@pytest.mark.parametrize("index", [1, 2, 3, 4, 5])
def test_sections_outside_the_file_are_refused(
    index: int, field: int, number: int, tmp_path: Path
) -> None:
    refused(tmp_path, section_field(index, field, "<Q", number), f"section {index}")


@pytest.mark.fault_case(6)
def test_string_tables_are_checked(tmp_path: Path) -> None:
    refused(tmp_path, section_field(4, 0, "<I", 1 << 30), "outside its string table")
    refused(tmp_path, section_field(1, 4, "<I", PROGBITS), "wrong type")
    refused(tmp_path, section_field(2, 4, "<I", PROGBITS), "without a string table")
    refused(tmp_path, section_field(3, 40, "<I", 3), "without a string table")  # links to itself
    refused(tmp_path, section_field(3, 40, "<I", 1 << 31), "without a string table")
    refused(tmp_path, section_field(3, 32, "<Q", 25), "multiple of 24 bytes")
    unended = bytearray(Cubin().build())
    end = unended.index(b".nv.info.k\0") + len(b".nv.info.k")
    unended[end] = ord("x")
    refused(tmp_path, bytes(unended), "without an end")


def test_names_of_any_bytes(tmp_path: Path) -> None:
    """A name that is no UTF-8 stays JSON; one with escape codes cannot reach a terminal."""
    facts = parse(tmp_path, Cubin(kernels=[Kernel(name=b"k\xff\xfe\xe2\x82\xacz")]).build())
    assert facts["kernels"][0]["name"] == "k��€z"
    broken = Kernel(name=b"\x1b[31mred\n\xff", info=b"\4\x17\x0c")
    message = refused(tmp_path, Cubin(kernels=[broken]).build(), r"\x1b[31mred\x0a\xff")
    assert message.isprintable()
    refused(tmp_path, Cubin(kernels=[Kernel(name="n" * 70_000)]).build(), "without an end")
    long = Cubin(kernels=[Kernel(name="n" * 60_000, info=b"\4\x17\x0c")])
    assert len(refused(tmp_path, long.build())) < 1000


@pytest.mark.fault_case(9)
def test_many_symbols_and_kernels_take_bounded_time(tmp_path: Path) -> None:
    start = cubin_check.processor_seconds()
    symbol = struct.pack("<IBBHQQ", 0, 0, 0, 0, 0, 0)
    crowd = Cubin(symbol_section=False, kernels=[])
    crowd.sections = [Section(".symtab", SYMTAB, symbol * 1_000_001, link=2)]
    refused(tmp_path, crowd.build(), "1000001")
    # Every one an entry kernel of the same name.
    same = struct.pack("<IBBHQQ", 1, 0x12, 0x10, 3, 0, 16)
    crowd.sections = [
        Section(".text.", PROGBITS, b"\0" * 16),
        Section(".symtab", SYMTAB, same * 900_000, link=2),
    ]
    refused(tmp_path, crowd.build())
    kernels = [Kernel(name=f"kernel_{i}") for i in range(20_000)]
    assert len(parse(tmp_path, Cubin(kernels=kernels).build())["kernels"]) == 20_000
    assert 0 < cubin_check.processor_seconds() - start < 60


@pytest.mark.fault_case(9)
def test_overlapping_tables_take_bounded_time(tmp_path: Path) -> None:
    """Many parameter tables over the same bytes, and many names inside one another."""
    start = cubin_check.processor_seconds()
    info = param(0, 0, 8) + value(0x1B, 255) * 20_000
    cubin = Cubin(kernels=[Kernel(name=f"k{i}", info=b"") for i in range(2000)])
    cubin.kernels[0].info = info
    data = bytearray(cubin.build())
    sections = struct.unpack_from("<Q", data, 40)[0]
    where = struct.unpack_from("<QQ", data, sections + 5 * 64 + 24)
    for i in range(2000):
        struct.pack_into("<QQ", data, sections + (5 + 2 * i) * 64 + 24, *where)
    refused(tmp_path, bytes(data), "overlap")

    names = Cubin(kernels=[])
    names.sections = [Section("", STRTAB) for _ in range(30_000)]
    names.sections[0].name = "x" * 60_000
    data = bytearray(names.build())
    sections = struct.unpack_from("<Q", data, 40)[0]
    long_name = struct.unpack_from("<I", data, sections + 4 * 64)[0]
    for i in range(30_000):
        struct.pack_into("<I", data, sections + (4 + i) * 64, long_name + i)
    refused(tmp_path, bytes(data), "too many names")
    assert 0 < cubin_check.processor_seconds() - start < 60


def test_sections_without_bytes_may_claim_any_size(tmp_path: Path) -> None:
    """`__device__` arrays: .nv.global is as large as the program likes and takes no bytes."""
    facts = parse(tmp_path, text(Section(".nv.global", NOBITS, size=1 << 40)).build())
    assert facts["arch"] == "sm_90"


def test_message_template() -> None:
    commands = [
        ("message", "image", "cubin 'k'", "is truncated", "9 bytes", "5 bytes", "Copy it."),
        ("message", "arch", "cubin 'k'", "is wrong", "", "", ""),
        ("message", "input", "self", "has a wrong dtype", "float32", "", ""),
        ("message", "params", "", "Too few", "", "3", "Pass 4."),
    ]
    errors = [json.loads(line)["error"] for line in cubin_check.run(*commands)]
    assert [(error["tag"], error["message"]) for error in errors] == [
        (
            "image",
            "torch_cubin [image]: cubin 'k' is truncated: expected 9 bytes, got 5 bytes. Copy it.",
        ),
        ("arch", "torch_cubin [arch]: cubin 'k' is wrong."),
        ("input", "torch_cubin [input]: self has a wrong dtype: expected float32."),
        ("params", "torch_cubin [params]: Too few: got 3. Pass 4."),
    ]


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        (b"plain", "plain"),
        ("größe€😀".encode(), "größe€😀"),
        (b"\xc0\xaf\xed\xa0\x80", r"\xc0\xaf\xed\xa0\x80"),  # overlong, surrogate
        (b"\xf4\x90\x80\x80\xe2\x82", r"\xf4\x90\x80\x80\xe2\x82"),  # past U+10FFFF, cut short
        (b"\x01\x7f\x1b", r"\x01\x7f\x1b"),
        (b"a" * 300, "a" * 200 + "..."),
    ],
)
def test_printable(raw: bytes, shown: str) -> None:
    assert cubin_check.run(("printable", raw.decode("utf-8", "surrogateescape"), 200)) == [shown]
