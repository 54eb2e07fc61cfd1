"""Global variables of modules: their image, the modules loaded for them, and refused lookups."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from unit import elf_builder

import torch_cubin
from torch_cubin import errors

DATA = Path(__file__).resolve().parents[1] / "data"
SEVERAL = DATA / "several.sm_90a.cuda130.cubin"
x = torch.zeros(64)


def test_global_tensors(driver, several):
    driver.declare_global("table", 64)
    kernel = several["vec_add"]
    kernel(x, x, x, 64, grid=1, block=64)
    table = several.global_tensor("table", torch.float32, (4, 4), device=0)
    table.fill_(3)
    again = several.global_tensor("table", torch.bfloat16, [32], "cuda:0")
    assert table.shape == (4, 4)
    assert again.shape == (32,)
    assert torch.equal(again, torch.full((16,), 3.0).view(torch.bfloat16))
    loaded = driver.libraries()
    with pytest.warns(RuntimeWarning, match="2 tensors over its global variables"):
        assert several.unload() is False
    with pytest.raises(errors.ClosedError):
        several["vec_add"]
    with pytest.raises(errors.ClosedError):
        kernel(x, x, x, 64, grid=1, block=64)
    part = again[4:8].view(torch.uint8)
    del table, again
    with pytest.warns(RuntimeWarning, match="1 tensor over its global"):
        assert several.unload() is False
    del part
    assert several.unload() is True
    assert driver.libraries() == loaded - 1


def image(
    kernel: str = "", variables: tuple[str, ...] = (), sm: int = 90, *sections: elf_builder.Section
) -> bytes:
    """A cubin with a kernel of that name, if any, and variables of 8 bytes."""
    info = elf_builder.param(0, 0, 8) + elf_builder.value(0x19, 8)
    kernels = [elf_builder.Kernel(kernel, info)] if kernel else []
    cubin = elf_builder.Cubin(kernels=kernels, flags=0x06000004 | sm << 8)
    section = 4 + 2 * len(kernels)
    cubin.sections = [elf_builder.Section(".nv.global", elf_builder.NOBITS, size=64), *sections]
    cubin.symbols = [
        elf_builder.Symbol(name, section, size=8, info=0x11, other=0) for name in variables
    ]
    return cubin.build()


def value_of(module, name: str) -> int:
    return module.global_tensor(name, torch.int64, (), device=0).item()


def test_a_variable_that_two_images_have(driver):
    """Each image's kernels see their own, so that neither can be meant."""
    images = [image("a", ("twice",)), image("b", ("twice",))]
    driver.declare_global("twice", 8)
    module = torch_cubin.load(images)
    with pytest.raises(errors.ImageError, match="'twice' is in two images.*Load them apart"):
        value_of(module, "twice")
    assert value_of(torch_cubin.load(images[0]), "twice") == 0
    arrays = (", ".join(f"0x{byte:02x}" for byte in content) for content in images)
    one_file = "".join(f"unsigned char cubin_{i}[] = {{{a}}};\n" for i, a in enumerate(arrays))
    with pytest.raises(errors.ImageError, match="'twice' is in two images.*another name"):
        value_of(torch_cubin.load(one_file.encode()), "twice")


def test_images_without_the_variable_are_not_loaded(driver):
    """Their symbols decide; an image that cannot be loaded fails no variable of another."""
    driver.declare_global("x", 8)
    module = torch_cubin.load([image("a", ("xx",)), image("b", ("x",)), image("c"), image("x_")])
    libraries = driver.libraries()
    driver.fail("cuLibraryLoadData", 1, after=1, times=10)
    assert value_of(module, "x") == 0
    with pytest.raises(errors.NoKernelError, match="'none' is not in"):
        value_of(module, "none")
    assert driver.libraries() == libraries + 1


def test_variables_of_a_compilers_cubin(driver):
    """Whose symbols are local, and among many others."""
    module = torch_cubin.load([SEVERAL, DATA / "launch.sm_90a.cuda130.cubin"])
    libraries = driver.libraries()
    for name in ("table", "counter"):
        driver.declare_global(name, 8)
        assert value_of(module, name) == 0
    assert driver.libraries() == libraries + 1


def test_ptx_without_the_variable_is_not_compiled(driver):
    def ptx(kernel: str, line: str) -> bytes:
        head = ".version 8.0\n.target sm_90\n.address_size 64\n"
        return f"{head}.visible .entry {kernel}() {{ ret; }}\n{line}\n".encode()

    driver.declare_global("x", 8)
    wrong = [ptx(f"k{i}", f"// broken {near}") for i, near in enumerate(("xx", "%x", "_x", "a.x"))]
    right = [
        ptx("k", line) for line in (".global .b64 x;", ".global .b8 x[8];", ".global .b64 y, x;")
    ]
    for text in right:
        driver.reset()
        module = torch_cubin.load([*wrong, text], jit=True)
        assert value_of(module, "x") == 0
        assert driver.images() == ["PTX"]


def test_variables_of_an_image_without_kernels(driver):
    """The best of those that run there: an image for each architecture has the same variables."""
    alone = ("alone",)
    driver.declare_global("alone", 8)
    module = torch_cubin.load([image("", alone, sm) for sm in (80, 90, 100)])
    assert len(module) == 0
    libraries = driver.libraries()
    module.preload(0)
    assert value_of(module, "alone") == 0
    assert driver.libraries() == libraries + 1
    with pytest.raises(errors.ArchError):
        value_of(torch_cubin.load(image("", alone, 80)), "alone")
    with pytest.raises(errors.ArchError):
        torch_cubin.load(image("", alone, 80)).preload(0)
    twice = torch_cubin.load([image("", alone), image("", alone)])
    with pytest.raises(errors.ImageError, match="'alone' is in two images"):
        value_of(twice, "alone")


def test_variables_of_an_image_beside_kernels(driver):
    driver.declare_global("alone", 8)
    variables = image("", ("alone",))
    assert value_of(torch_cubin.load([image("a"), variables]), "alone") == 0
    assert value_of(torch_cubin.load([variables, image("a"), image("", ("other",))]), "alone") == 0
    with pytest.raises(errors.ImageError, match="'alone' is in two images"):
        value_of(torch_cubin.load([variables, image("a", ("alone",))]), "alone")
    with pytest.raises(errors.NoKernelError, match="'none' is not in"):
        value_of(torch_cubin.load([image("a"), variables]), "none")


def test_variables_of_the_better_image(driver):
    """One source for sm_90 and sm_90a; only the latter has the kernel."""
    driver.declare_global("both", 8)
    only_here = elf_builder.Section(".nv.compat", elf_builder.NV_COMPAT, bytes([2, 9, 1, 0]))
    module = torch_cubin.load([image("", ("both",)), image("a", ("both",), 90, only_here)])
    assert [facts.arch for facts in module.images] == ["sm_90", "sm_90a"]
    libraries = driver.libraries()
    assert value_of(module, "both") == 0
    assert driver.libraries() == libraries + 1


def test_kernels_that_do_not_run_beside_variables_that_do(driver):
    """Variables alone must not hide that no kernel can be launched."""
    driver.declare_global("alone", 8)
    module = torch_cubin.load([image("a", ("of_a",), sm=100), image("", ("alone",))])
    libraries = driver.libraries()
    with pytest.raises(errors.ArchError):
        module.preload(0)
    assert driver.libraries() == libraries
    assert value_of(module, "alone") == 0
    with pytest.raises(errors.ArchError):
        value_of(module, "of_a")


def test_wrong_globals(driver, several):
    driver.declare_global("table", 64)
    several.preload(0)  # so that the driver is asked: the file has no such variable
    with pytest.raises(errors.NoKernelError, match="global variable 'tabel' is not in"):
        several.global_tensor("tabel", torch.float32, (16,), device=0)
    with pytest.raises(errors.InputError, match="expected 64 bytes, got 68 bytes"):
        several.global_tensor("table", torch.float32, (17,), device=0)
    with pytest.raises(errors.InputError):
        several.global_tensor("table", torch.float32, (16,), device="cpu")
