"""Device code in a host file's data, found by symbols: TVM-FFI, ld -b binary, CuTe DSL, arrays."""

from __future__ import annotations

import random
import shutil
import struct
import subprocess
import time
from pathlib import Path

import pytest
import real_cubins

import torch_cubin
from torch_cubin import embed, errors
from torch_cubin._native import library

CUBIN = real_cubins.DATA / "vec_add.sm_80.cuda118.cubin"
OTHER = real_cubins.DATA / "vec_add.sm_90a.cuda124.cubin"
FATBIN = next((real_cubins.DATA / "containers").glob("*.fatbin"), None)
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def compiled(folder: Path, source: str, *options: str) -> Path:
    (folder / "unit.c").write_text(source)
    out = folder / "made"
    subprocess.run(["cc", *options, str(folder / "unit.c"), "-o", str(out)], check=True)
    return out


def incbin(symbol: str, path: Path, section: str = ".rodata", end: bool = False) -> str:
    tail = f"{symbol}_end:\\n" if end else ""
    size = "" if end else f".size {symbol}, . - {symbol}\\n"
    return (
        f'__asm__(".pushsection {section}, \\"a\\", @progbits\\n.balign 16\\n{symbol}:\\n'
        f'.incbin \\"{path}\\"\\n{tail}{size}.byte 7\\n.popsection\\n");\n'
    )


def entries(path: Path) -> list[tuple[str, str, int]]:
    facts = library.inspect(path.read_bytes(), str(path))
    return [(e["name"], e["kind"], e["size"]) for e in facts["entries"]]


@needs_compiler
@pytest.mark.parametrize("how", ["object", "library"])
def test_images_by_symbols(how: str, tmp_path: Path) -> None:
    """Local and global symbols, with sizes and without, in an object and in a library."""
    array = ",".join(map(str, OTHER.read_bytes()))
    source = (
        incbin("__tvm_ffi__cubin_mine", CUBIN, end=True)
        + f"const unsigned char other[] __attribute__((aligned(16))) = {{{array}}};\n"
        + (incbin("kernels_binary", FATBIN, ".lrodata") if FATBIN else "")
        + 'const char text[] = "\\x50\\xed\\x55\\xba\\1\\0 no fatbin at all, but a signature";\n'
    )
    options = ["-c"] if how == "object" else ["-shared", "-fPIC"]
    found = {entry[0]: entry[1:] for entry in entries(compiled(tmp_path, source, *options))}
    assert found["__tvm_ffi__cubin_mine"] == ("cubin", CUBIN.stat().st_size)
    assert found["other"] == ("cubin", OTHER.stat().st_size)
    if FATBIN:
        assert found["kernels_binary"][0] == "fatbin"
    assert found.keys() <= {"__tvm_ffi__cubin_mine", "other", "kernels_binary"}
    module = torch_cubin.load(tmp_path / "made")
    assert "vec_add" in module
    assert {"sm_80", "sm_90a"} <= {image.arch for image in module.images}


@needs_compiler
@pytest.mark.skipif(shutil.which("ld") is None, reason="needs ld")
def test_arrays_that_the_linker_wraps(tmp_path: Path) -> None:
    shutil.copy(CUBIN, tmp_path / "vec.cubin")
    subprocess.run(["ld", "-r", "-b", "binary", "-o", "made.o", "vec.cubin"], cwd=tmp_path,
                   check=True)  # fmt: skip
    assert entries(tmp_path / "made.o") == [
        ("_binary_vec_cubin_start", "cubin", CUBIN.stat().st_size)
    ]


@needs_compiler
def test_tvm_ffis_symbols_are_emitted_and_linked(tmp_path: Path) -> None:
    """As TVM_FFI_EMBED_CUBIN(mine) declares them; the bundle is there, too."""
    embed.write_unit(tmp_path / "unit_of_embed.c", [CUBIN], name="mine", tvm_ffi=True)
    main = (
        "#include <stdio.h>\n"
        "extern const char __tvm_ffi__cubin_mine[];\n"
        "extern const char __tvm_ffi__cubin_mine_end[];\n"
        'int main() { printf("%d %d\\n", __tvm_ffi__cubin_mine[1],'
        " (int)(__tvm_ffi__cubin_mine_end - __tvm_ffi__cubin_mine)); return 0; }\n"
    )
    made = compiled(tmp_path, main, str(tmp_path / "unit_of_embed.c"))
    said = subprocess.run([str(made)], capture_output=True, text=True, check=True).stdout
    assert said.split() == [str(ord("E")), str(CUBIN.stat().st_size)]
    assert entries(made) == [(CUBIN.name, "cubin", CUBIN.stat().st_size)]
    for files, more in (([CUBIN, OTHER], {"name": "mine"}), ([CUBIN], {})):
        with pytest.raises(errors.InputError, match="is for one file with a name"):
            embed.write_unit(tmp_path / "wrong.c", files, tvm_ffi=True, **more)


def host(data: bytes, symbols: bytes, names: bytes) -> bytearray:
    """An x86-64 object with .rodata, .symtab and .strtab."""
    text = b"\0.rodata\0.symtab\0.strtab\0.shstrtab\0"
    body, headers = bytearray(64), bytearray(64)
    for name, kind, flags, content, link in (
        (1, 1, 2, data, 0), (9, 2, 0, symbols, 3), (17, 3, 0, names, 0), (25, 3, 0, text, 0),
    ):  # fmt: skip
        headers += struct.pack(
            "<IIQQQQIIQQ", name, kind, flags, 0, len(body), len(content), link, 0, 8, 24
        )
        body += content + b"\0" * (-len(content) % 8)
    body[:64] = struct.pack(
        "<4s5B7xHHIQQQIHHHHHH",
        *(b"\x7fELF", 2, 1, 1, 0, 0, 1, 62, 1, 0, 0, len(body), 0, 64, 0, 0, 64, 5, 4),
    )
    return body + headers


def symbol(name: int, value: int, size: int, kind: int = 1, section: int = 1) -> bytes:
    return struct.pack("<IBBHQQ", name, kind, 0, section, value, size)


def opened(file: bytes) -> dict:
    return library.inspect(bytes(file), "file")


def test_symbols_are_checked() -> None:
    image = CUBIN.read_bytes()
    size = len(image)

    def names(*symbols: bytes, data: bytes = image + bytes(64)) -> list[str]:
        return [e["name"] for e in opened(host(data, b"".join(symbols), b"\0one\0two"))["entries"]]

    assert names(symbol(1, 0, size)) == ["one"]
    assert names(symbol(1, 0, 0, kind=0)) == ["one"]  # its size is the image's
    assert names(symbol(1, 0, size), symbol(5, 0, size)) == ["one"]  # two names of one
    assert names(symbol(99, 0, size)) == [""]
    for wrong in (
        symbol(1, 1, size), symbol(1, size + 64, size), symbol(1, 1 << 63, size),
        symbol(1, 0, size, kind=2), symbol(1, 0, size, section=0), symbol(1, 0, size, section=2),
        symbol(1, 0, size, section=500), b"",
    ):  # fmt: skip
        with pytest.raises(errors.ImageError, match="without device code"):
            names(wrong)
    # A truncated symbol with a size is listed with its error.
    (entry,) = opened(host(image[:500], symbol(1, 0, 500), b"\0one\0"))["entries"]
    assert entry["error"]["tag"] == "image"
    with pytest.raises(errors.ImageError, match="without device code"):
        names(symbol(1, 0, 0), data=image[:500])


def test_a_damaged_array_leaves_the_others_loadable() -> None:
    """A program's data may hold what its tests want damaged; inspect() shows it with its error."""
    image = CUBIN.read_bytes()
    beside = symbol(1, 0, len(image)) + symbol(5, len(image), 1000)
    file = bytes(host(image + image[:1000] + bytes(64), beside, b"\0one\0two"))
    assert "vec_add" in torch_cubin.load(file)
    one, two = opened(file)["entries"]
    assert one.get("error") is None
    assert "is truncated" in str(two["error"])
    with pytest.raises(errors.ImageError, match="is truncated"):
        torch_cubin.load(bytes(host(image[:1000], symbol(1, 0, 1000), b"\0one\0")))


@pytest.mark.parametrize("apart", [0, 64], ids=["one place", "many places"])
def test_many_symbols_of_costly_tables(apart: int) -> None:
    """The work is bound by the file's size, not by its symbols times its headers."""
    count, sections = 20000, 7000
    data = bytearray(64 * count)
    for at in range(0, len(data), 64):  # headers of cubins, which share one table
        struct.pack_into("<4sBB12xH20xQ", data, at, b"\x7fELF", 2, 1, 190, len(data) - at)
        struct.pack_into("<HH", data, at + 58, 64, sections)
    table = struct.pack("<II56x", 0, 1) * (sections - 1)
    data += table + struct.pack("<II16xQ32x", 0, 1, 1 << 40)  # its last section lies outside
    file = host(bytes(data), b"".join(symbol(0, i * apart, 0) for i in range(count)), b"\0")
    begin = time.process_time()
    with pytest.raises(errors.ImageError, match="overlap" if apart else "without device code"):
        opened(file)
    assert time.process_time() - begin < 1


def test_many_symbols_of_many_fatbins() -> None:
    """What .nv_fatbin holds is not gone through for each symbol that names a place in it."""
    fatbin = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 8) + bytes(8)
    count = 20000
    file = host(fatbin * count, symbol(0, len(fatbin) * (count - 1), 0) * (5 * count), b"\0")
    file = file.replace(b"\0.rodata\0.symtab\0.strtab\0", b"\0.nv_fatbin\0mtab\0.strtab\0")
    begin = time.process_time()
    assert len(opened(file)["entries"]) == count
    assert time.process_time() - begin < 3


def test_damaged_files_are_refused_or_read() -> None:
    image = CUBIN.read_bytes()
    whole = host(image + bytes(8), symbol(1, 0, len(image)) * 3, b"\0one\0")
    random_ = random.Random(5)
    for _ in range(2000):
        file = bytearray(whole)
        for _ in range(random_.randrange(1, 5)):
            begin = random_.choice([0, len(image), len(image)])
            file[random_.randrange(begin, len(file))] = random_.choice([0, 1, 2, 8, 127, 255])
        try:
            opened(file if random_.random() < 0.8 else file[: random_.randrange(len(file))])
        except errors.Error as error:
            if error.tag not in ("image", "input"):
                raise
