"""load() of fatbins, objects and PTX: the images that reach the driver, and the refused ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from faults.forked import error_of, forked

import torch_cubin
from torch_cubin import errors

DATA = Path(__file__).resolve().parents[1] / "data"
CONTAINERS = DATA / "containers"
x = torch.zeros(64)


class Stream:
    """Says on which device a kernel without tensors runs."""

    cuda_stream = 7
    device_index = 0


def kernel_name(module: torch_cubin.Module) -> str:
    (name,) = [name for name in module if "vec_add" in name]
    return name


def launch(driver, source, **options) -> list:
    """The error of a launch, if any, and what was loaded for it."""

    def run() -> list:
        module = torch_cubin.load(source, **options)
        driver.declare(module)
        kernel = module[kernel_name(module)]
        failed = error_of(lambda: kernel(x, x, x, 64, grid=1, block=64))
        return [failed, driver.images()]

    return forked(run)


@pytest.mark.parametrize("name", ["raw.fatbin", "lz4.fatbin", "zstd.fatbin", "object"])
def test_containers_with_cubins(driver, name):
    path = CONTAINERS / f"vec_add.{name}"
    for jit in (False, True):  # a cubin wins over PTX
        module = torch_cubin.load(path, jit=jit)
        plain = [image for image in module.images if image.kind == "cubin"]
        assert plain
        assert any(image.kind == "ptx" for image in module.images) <= jit
        driver.set("sm", plain[0].sm)
        error, images = launch(driver, path, jit=jit)
        assert error == []
        (image,) = images
        assert image.startswith(b"\x7fELF".hex())


@pytest.mark.fault_case(8)
def test_ptx_only_by_name(driver):
    path = CONTAINERS / "vec_add.ptx"
    with pytest.raises(errors.ImageError, match="pass jit=True"):
        torch_cubin.load(path)
    error, images = launch(driver, path, jit=True)
    assert error == []
    assert images == ["PTX"]
    module = torch_cubin.load(path, jit=True)
    assert module[kernel_name(module)].info.params[3].size == 4
    with pytest.raises(errors.ParamsError, match="does not fit its parameter"):
        module[kernel_name(module)](x, x, x, x, grid=1, block=1)


def test_ptx_for_a_later_device_is_refused(driver):
    driver.set("sm", 50)
    error, images = launch(driver, CONTAINERS / "vec_add.ptx", jit=True)
    assert error[0] == "ArchError"
    assert "PTX for sm_" in error[1]
    assert images == []


def test_an_error_quotes_the_drivers_ptx_compiler(driver):
    text = (CONTAINERS / "vec_add.ptx").read_text() + "\n// broken\n"
    error, _ = launch(driver, text.encode(), jit=True)
    assert error[0] == "ImageError"
    assert "the compiler says: ptxas fatal: unknown instruction 'broken'" in error[1]


@pytest.mark.parametrize("name", ["lto.fatbin", "relocatable.fatbin", "relocatable"])
def test_containers_with_nothing_to_load(driver, name):
    path = CONTAINERS / f"vec_add.{name}"
    with pytest.raises(errors.ImageError):
        torch_cubin.load(path)
    if name == "relocatable.fatbin":  # has PTX beside it
        assert torch_cubin.load(path, jit=True).images[0].kind == "ptx"
    else:
        with pytest.raises(errors.ImageError):
            torch_cubin.load(path, jit=True)
    assert driver.journal() == []


def test_kernels_of_several_files_in_one_module(driver):
    """Each kernel comes from the image that has it; a global from an image in use."""

    def both() -> list:
        paths = [DATA / "several.sm_90a.cuda130.cubin", DATA / "pointers.sm_90.cuda124.cubin"]
        module = torch_cubin.load(paths)
        driver.declare(module)
        counts = []
        for name in ("vec_add", "large"):
            arguments = [bytes(p.size) for p in module[name].info.params]
            block = 256 if name == "large" else 64
            module[name](*arguments, grid=1, block=block, stream=Stream())
            counts.append(len(driver.images()))
        module.preload(0)
        return [*counts, len(driver.images()), module.unload()]

    assert forked(both) == [1, 2, 2, True]
