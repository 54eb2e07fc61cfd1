"""torch_cubin.inspect: the parser's facts as Python objects, and files that are none."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from pathlib import Path

import containers
import cubin_check
import pytest
import real_cubins
from elf_builder import Cubin, Kernel
from users import unprivileged

import torch_cubin
from torch_cubin import errors
from torch_cubin._inspection.inspect import Container, Image, Ptx
from torch_cubin._native import library as _library

SEVERAL = real_cubins.DATA / "several.sm_90a.cuda130.cubin"


@pytest.mark.parametrize("path", real_cubins.COMMITTED, ids=lambda path: path.stem)
def test_inspect_gives_the_parsers_facts(path: Path) -> None:
    image = torch_cubin.inspect(path)
    assert json.loads(json.dumps(image.to_dict())) == cubin_check.facts(path)


@pytest.mark.parametrize("path", containers.COMMITTED, ids=lambda path: path.name)
def test_inspect_gives_the_facts_of_every_kind(path: Path) -> None:
    found = torch_cubin.inspect(path)
    assert json.loads(json.dumps(found.to_dict())) == cubin_check.inspect(path)
    assert found == torch_cubin.inspect(path.read_bytes())


def test_inspect_reads_arrays(tmp_path: Path) -> None:
    source = tmp_path / "kernels.cpp"
    arrays = {"a_cubin": containers.CUBIN.read_bytes(), "b_cubin": SEVERAL.read_bytes()}
    source.write_text(containers.tensorrt_llm(arrays))
    found = torch_cubin.inspect(source)
    assert (found.kind, found.machine) == ("c_source", None)
    assert [entry.name for entry in found.entries] == list(arrays)
    assert found.images() == [torch_cubin.inspect(data) for data in arrays.values()]
    text = str(found)
    assert text.startswith(f"C source, {source.stat().st_size} bytes, 2 arrays\n")
    assert "array 1 'b_cubin': cubin for sm_90a, CUDA 13.0, 18232 bytes, 8 kernels" in text


def test_container_gives_images_and_types() -> None:
    library = torch_cubin.inspect(containers.FOLDER / "vec_add.object")
    assert isinstance(library, Container)
    assert isinstance(library.entries[0].content, Container)
    cubin, ptx = library.images()
    assert isinstance(cubin, Image)
    assert isinstance(ptx, Ptx)
    assert cubin["vec_add"].param_bytes == 28
    assert [p.type for p in ptx["vec_add"].params] == ["u64", "u64", "u64", "u32"]
    with pytest.raises(errors.NoKernelError, match="in the PTX"):
        ptx["vec_ad"]
    assert not cubin.relocatable
    assert torch_cubin.inspect(containers.FOLDER / "vec_add.relocatable").relocatable
    assert len({library, torch_cubin.inspect(containers.FOLDER / "vec_add.object")}) == 1


def test_container_prints_a_table_of_its_entries() -> None:
    lines = str(torch_cubin.inspect(containers.FOLDER / "vec_add.zstd.fatbin")).splitlines()
    assert lines[0] == "fatbin, 3520 bytes, 4 entries"
    titles = ["#", "kind", "arch", "offset", "stored", "size", "compression", "flags", "name"]
    assert lines[2].split() == [*titles, "options"]
    first = ["0", "cubin", "sm_80", "96", "710", "2920", "zstd", "0x8013", "vec_add.cu"]
    assert lines[3].split() == first
    assert lines[6].split()[1:3] == ["ptx", "sm_80"]
    assert lines[6].endswith("vec_add.cu  -O3 -v")
    assert lines[8] == "entry 0 'vec_add.cu': cubin for sm_80, CUDA 11.8, 2920 bytes, 1 kernel"
    assert "    param type   size  align  kind     name" in lines
    nested = str(torch_cubin.inspect(containers.FOLDER / "vec_add.object")).splitlines()
    assert nested[0] == "host ELF file (x86-64), 6888 bytes, 1 fatbin"
    assert nested[1] == "cubins for sm_80; PTX for sm_80; 1 kernel"
    assert nested[6] == "fatbin 0 '.nv_fatbin': fatbin, 1496 bytes, 2 entries"
    relocatable = str(torch_cubin.inspect(containers.FOLDER / "vec_add.relocatable"))
    assert relocatable.startswith("relocatable cubin (link it before loading) for sm_90a, CUDA 13")


def test_a_damaged_entry_is_shown_beside_the_others() -> None:
    data = bytearray((containers.FOLDER / "vec_add.zstd.fatbin").read_bytes())
    found = torch_cubin.inspect(bytes(data))
    at = found.entries[1].offset
    data[at : at + 4] = b"oops"
    damaged = torch_cubin.inspect(bytes(data))
    assert damaged.entries[1].content is None
    assert damaged.entries[1].error.tag == "image"
    assert set(damaged.to_dict()["entries"][1]["error"]) == {"tag", "message"}
    assert len({damaged, torch_cubin.inspect(bytes(data))}) == 1
    assert damaged.images() == [image for image in found.images() if image.arch != "sm_90a"]
    assert (
        "entry 1 'vec_add.cu': torch_cubin [image]: entry 1 of the buffer given is damaged"
        in str(damaged)
    )


def test_control_characters_in_names_within_containers_are_escaped(tmp_path: Path) -> None:
    kernel = Cubin(kernels=[Kernel(name=b"\x1b[2J\nk")]).build()
    source = containers.tensorrt_llm({"k": kernel, "cut": kernel[:-8]})
    text = str(torch_cubin.inspect(source.encode()))
    assert all(line.isprintable() for line in text.splitlines())


def test_inspect_takes_paths_and_bytes(tmp_path: Path) -> None:
    data = SEVERAL.read_bytes()
    odd = tmp_path / "größe \udcff.cubin"
    odd.write_bytes(data)
    image = torch_cubin.inspect(SEVERAL)
    for source in (str(SEVERAL), odd, data, bytearray(data), memoryview(data)):
        assert torch_cubin.inspect(source) == image
    with pytest.raises(TypeError, match=r"torch_cubin \[input\]: .*got int"):
        torch_cubin.inspect(3)


def test_image_is_frozen_and_hashable() -> None:
    image = torch_cubin.inspect(SEVERAL)
    with pytest.raises(dataclasses.FrozenInstanceError):
        image.arch = "sm_80"
    assert len({image, torch_cubin.inspect(SEVERAL)}) == 1


def test_image_finds_kernels_by_name() -> None:
    image = torch_cubin.inspect(SEVERAL)
    kernel = image["static_shared"]
    assert (kernel.static_shared, kernel.max_block, kernel.cluster) == (1024, (128, 1, 1), None)
    assert image["cluster"].cluster == (2, 1, 1)
    with pytest.raises(errors.NoKernelError) as caught:
        image["vec_ad"]
    assert caught.value.tag == "no_kernel"
    assert isinstance(caught.value, LookupError)


def test_image_prints_every_fact() -> None:
    text = str(torch_cubin.inspect(SEVERAL))
    assert text.startswith("cubin for sm_90a, CUDA 13.0, 18232 bytes, 8 kernels")
    structs = text.split("kernel structs\n")[1].split("\n\n")[0].splitlines()
    assert structs[0] == "  8 registers"
    assert structs[1].split() == ["param", "offset", "size", "kind"]
    rows = [line.split() for line in structs[2:]]
    assert rows == [
        ["0", "0", "4", "value"],
        ["1", "4", "12", "value"],
        ["2", "48", "128", "value"],
        ["3", "176", "8", "unknown"],
    ]
    static = text.split("kernel static_shared\n")[1].splitlines()[0]
    assert static == "  12 registers, 1024 B static shared, 1 barrier, block at most 128x1x1"
    assert "kernel no_params\n  4 registers\n  no parameters" in text
    assert "cluster 2x1x1" in text


@pytest.mark.fault_case(15)
def test_control_characters_in_names_are_escaped() -> None:
    image = torch_cubin.inspect(Cubin(kernels=[Kernel(name=b"\x1b[2J\nk\xff")]).build())
    assert image.kernels[0].name == "\x1b[2J\nk�"
    assert all(line.isprintable() for line in str(image).splitlines())
    with pytest.raises(errors.NoKernelError) as caught:
        image["\x1b[2J"]
    assert str(caught.value).isprintable()


@pytest.mark.fault_case(2)
def test_truncated_bytes_are_an_image_error() -> None:
    data = SEVERAL.read_bytes()
    for size in (0, 1, 63, 64, len(data) // 2, len(data) - 1):
        with pytest.raises(errors.ImageError, match=r"^torch_cubin \[image\]: the buffer given "):
            torch_cubin.inspect(data[:size])


def file_error(path: object) -> errors.FileError:
    with pytest.raises(errors.FileError, match=r"^torch_cubin \[file\]: file '") as caught:
        torch_cubin.inspect(path)
    assert isinstance(caught.value, OSError)
    return caught.value


@pytest.mark.fault_case(1, 2)
def test_file_errors(tmp_path: Path) -> None:
    assert "No such file" in str(file_error(tmp_path / "missing.cubin"))
    assert "directory" in str(file_error(tmp_path))
    assert "null" in str(file_error("nul\0name"))
    assert "device" in str(file_error("/dev/zero"))
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    file_error(loop)
    file_error(tmp_path / ("x" * 5000))
    file_error("")


@pytest.mark.fault_case(1)
def test_fifo_does_not_block(tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    done = threading.Event()

    def look() -> None:
        assert "pipe" in str(file_error(path))
        done.set()

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(10)
    assert done.is_set(), "inspect of a FIFO blocked or failed"


@pytest.mark.fault_case(1)
def test_unreadable_file() -> None:
    with unprivileged() as folder:
        path = folder / "secret.cubin"
        path.write_bytes(b"x")
        path.chmod(0)
        assert "ermission" in str(file_error(path))


@pytest.mark.fault_case(9)
def test_too_large_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.cubin"
    with open(path, "wb") as file:
        file.truncate(5 << 30)  # sparse: takes no space
    with pytest.raises(errors.ImageError, match="too large"):
        torch_cubin.inspect(path)


def test_missing_library_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "_C.so"
    monkeypatch.setattr(_library, "PATH", broken)
    with pytest.raises(ImportError, match=r"torch_cubin \[file\]: library .* is missing: .*make"):
        _library.load.__wrapped__()
    broken.write_bytes(b"not a library")
    with pytest.raises(ImportError, match=r"torch_cubin \[file\]: library .* cannot be loaded"):
        _library.load.__wrapped__()


def test_library_of_older_sources_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a pull, before it is built again."""
    monkeypatch.setitem(_library.functions.FUNCTIONS, "of_tomorrow", (None, []))
    with pytest.raises(ImportError, match=r"torch_cubin \[file\]: .*torch_cubin_of_tomorrow.*make"):
        _library.load.__wrapped__()


def test_inspect_never_touches_the_driver(torch_python) -> None:
    """In a fresh process, so that no other test has opened the driver."""
    program = f"""
import torch_cubin
torch_cubin.inspect({str(SEVERAL)!r})
maps = open("/proc/self/maps").read()
assert "libcuda.so" not in maps, "libcuda was loaded"
"""
    torch_python.output(program)


def test_names_may_be_as_long_as_templates_make_them() -> None:
    """Through the library itself: the parser's other tests compile its files one by one."""
    entry = f".visible .entry {'k' * 60000}(.param .u64 p) {{ ret; }}"
    text = f".version 8.0\n.target sm_80\n.address_size 64\n{entry}\n"
    (kernel,) = torch_cubin.inspect(text.encode()).kernels
    assert len(kernel.name) == 60000
