"""Static libraries (`ar`): their objects' device code, listed and loaded; damaged ones."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from pathlib import Path

import containers
import pytest

import torch_cubin
from torch_cubin import errors

OBJECT = containers.FOLDER / "vec_add.object"


def member(name: bytes, content: bytes) -> bytes:
    header = b"%-16s%-12d%-6d%-6d%-8s%-10d`\n" % (name, 0, 0, 0, b"644", len(content))
    return header + content + b"\n" * (len(content) & 1)


def library(*members: tuple[bytes, bytes]) -> bytes:
    return b"!<arch>\n" + b"".join(member(*each) for each in members)


def test_archives_of_ar(tmp_path: Path) -> None:
    if shutil.which("ar") is None:
        pytest.skip("needs ar")
    names = ["a.o", "an_object_whose_name_is_longer_than_sixteen_characters.o", "text.txt"]
    for name in names[:2]:
        (tmp_path / name).write_bytes(OBJECT.read_bytes())
    (tmp_path / names[2]).write_text("hello")
    subprocess.run(["ar", "rc", "libk.a", *names], cwd=tmp_path, check=True)
    found = torch_cubin.inspect(tmp_path / "libk.a")
    inner = torch_cubin.inspect(OBJECT)
    assert (found.kind, found.machine) == ("static_library", "x86-64")
    assert [entry.name for entry in found.entries] == [f"{n}: .nv_fatbin" for n in names[:2]]
    assert [entry.content for entry in found.entries] == [inner.entries[0].content] * 2
    assert "static library (x86-64)" in str(found)
    data = (tmp_path / "libk.a").read_bytes()
    for entry in found.entries:
        stored = data[entry.offset : entry.offset + entry.stored_size]
        assert torch_cubin.inspect(stored) == entry.content
    assert list(torch_cubin.load(tmp_path / "libk.a")) == ["vec_add"]
    assert torch_cubin.load(tmp_path / "libk.a")["vec_add"].name == "vec_add"


@pytest.mark.parametrize(
    "members",
    [
        [(b"/", b"\0\0\0\0"), (b"//", b"a_long_name_of_an_object.o/\n"), (b"/0", OBJECT)],
        [(b"__.SYMDEF", b"\0\0\0\0"), (b"#1/20", b"name.o" + bytes(14), OBJECT)],
        [(b"/SYM64/", b"\0" * 8), (b"vec.cubin/", containers.CUBIN)],
    ],
    ids=["gnu", "bsd", "cubin"],
)
def test_other_layouts(members: list) -> None:
    parts = [
        (name, b"".join(p.read_bytes() if isinstance(p, Path) else p for p in parts))
        for name, *parts in members
    ]
    module = torch_cubin.load(library(*parts))
    assert list(module) == ["vec_add"]
    (entry,) = torch_cubin.inspect(library(*parts)).entries
    assert entry.name.split(":")[0] in ("a_long_name_of_an_object.o", "name.o", "vec.cubin")


def test_a_library_in_a_library() -> None:
    inner = library((b"text/", b"odd"), (b"a.o/", OBJECT.read_bytes()))
    data = library((b"none.a/", library()), (b"inner.a/", inner))
    (entry,) = torch_cubin.inspect(data).entries
    assert entry.name == "inner.a: a.o: .nv_fatbin"
    assert torch_cubin.inspect(data[entry.offset :][: entry.stored_size]) == entry.content
    assert list(torch_cubin.load(data)) == ["vec_add"]
    for _ in range(12):
        data = library((b"l.a/", data))
    with pytest.raises(errors.ImageError, match="nested too deeply"):
        torch_cubin.inspect(data)


GOOD = library((b"a.o/", OBJECT.read_bytes()))
HOSTILE = {
    "cut short": (GOOD[:40], "is cut short"),
    "cut in a member": (GOOD[:-10], "ends past the end"),
    "no header": (GOOD[:66] + b"xx" + GOOD[68:], "has no header"),
    "no size": (GOOD[:56] + b"abcdefghij" + GOOD[66:], "has no header"),
    "a name outside": (library((b"/99", OBJECT.read_bytes())), "name outside its table"),
    "a name longer than it": (library((b"#1/99999999", OBJECT.read_bytes())), "shorter than its"),
    "no device code": (library((b"a.txt/", b"hello")), "without device code"),
    "empty": (b"!<arch>\n", "without device code"),
    "thin": (b"!<thin>\n", "thin static library"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_damaged_libraries_are_refused(name: str) -> None:
    data, what = HOSTILE[name]
    for take in (torch_cubin.inspect, torch_cubin.load):
        with pytest.raises(errors.ImageError, match=what):
            take(data)


def test_a_damaged_member_is_named() -> None:
    content = bytearray(OBJECT.read_bytes())
    content[40:48] = b"\xff" * 8  # where the section headers are
    with pytest.raises(errors.ImageError, match=r"member 'a\.o' of .*section headers"):
        torch_cubin.inspect(library((b"a.o/", bytes(content))))


@pytest.mark.parametrize("step", [1, 2, 3])
def test_every_cut_is_refused_or_read(step: int) -> None:
    for end in range(8, len(GOOD), 97 * step):
        with contextlib.suppress(errors.ImageError):
            torch_cubin.inspect(GOOD[:end])
