"""A Module's bytes: image(), and modules in place of files that are embedded or saved."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest
import real_cubins

import torch_cubin
from torch_cubin import cpp, embed

DATA = real_cubins.DATA
ONE = DATA / "several.sm_90a.cuda130.cubin"
CUBINS = sorted(DATA.glob("vec_add.*.cubin"))
FATBIN = DATA / "containers" / "vec_add.zstd.fatbin"
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc, found none")


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("given", ["path", "bytes"])
def test_one_image(given) -> None:
    module = torch_cubin.load(ONE if given == "path" else ONE.read_bytes())
    assert module.image() == module.image("sm_90a") == ONE.read_bytes()


def test_image_selects_by_arch() -> None:
    module = torch_cubin.load(CUBINS)
    assert len(module.images) == len(CUBINS)
    for path in CUBINS:
        assert module.image(path.name.split(".")[1]) == path.read_bytes()
    with pytest.raises(torch_cubin.Error, match=r"\[input\].*arch= one of .*sm_80.*, got None"):
        module.image()
    with pytest.raises(torch_cubin.Error, match=r"\[input\].* 0 images for sm_75: .*'sm_75'"):
        module.image("sm_75")
    with pytest.raises(torch_cubin.Error, match=r"\[input\].*has a wrong type.*int"):
        module.image(90)


def test_two_images_of_one_arch_are_not_guessed() -> None:
    module = torch_cubin.load([ONE, DATA / "launch.sm_90a.cuda130.cubin"])
    with pytest.raises(torch_cubin.Error, match=r"\[input\].*2 images for sm_90a.*of its own"):
        module.image("sm_90a")


def test_a_cubin_is_preferred_to_ptx_of_its_arch() -> None:
    ptx = DATA / "pointers.ptx"
    alone = torch_cubin.load(ptx, jit=True)
    assert alone.image().rstrip(b"\0") == ptx.read_bytes().rstrip(b"\0")
    (arch,) = (image.arch for image in alone.images)
    cubin = next(path for path in CUBINS if path.name.split(".")[1] == "sm_80")
    both = torch_cubin.load([ptx, cubin], jit=True)
    assert both.image("sm_80") == cubin.read_bytes()
    assert arch in {image.arch for image in both.images}


def test_image_extracts_each_image_of_a_container() -> None:
    module = torch_cubin.load(FATBIN)
    for image in module.images:
        again = torch_cubin.load(module.image(image.arch))
        assert [each.arch for each in again.images] == [image.arch]
        assert set(again.names) == {kernel.name for kernel in image.kernels}


def test_a_file_that_changed_is_another_one(tmp_path) -> None:
    path = tmp_path / "k.cubin"
    path.write_bytes(ONE.read_bytes())
    module = torch_cubin.load(path)
    path.write_bytes(CUBINS[0].read_bytes())
    with pytest.raises(torch_cubin.Error, match=r"\[hash\]"):
        module.image()
    path.unlink()
    with pytest.raises(torch_cubin.Error, match=r"\[file\]"):
        module.image()


@needs_gcc
@pytest.mark.parametrize("listed", [False, True])
def test_embedded(tmp_path, listed) -> None:
    module = torch_cubin.load([path.read_bytes() for path in CUBINS])
    unit = tmp_path / "unit.c"
    embed.write_unit(unit, [module, ONE] if listed else module)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    embed.write_unit(unit, [module, ONE] if listed else module)
    assert files == {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    library = tmp_path / "unit.so"
    subprocess.run(["gcc", "-shared", "-fPIC", str(unit), "-o", str(library)], check=True)
    found = torch_cubin.load(library)
    for path in CUBINS:
        if not listed or "sm_90a" not in path.name:
            assert found.image(path.name.split(".")[1]) == path.read_bytes()
    assert len(found.images) == len(CUBINS) + listed


def test_in_an_extension(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = torch_cubin.load(ONE.read_bytes())
    made = cpp.Extension("mine._ops", ["ops.cpp"], embed={"x": module}, torch=False)
    assert made.sources == ["ops.cpp", "build/torch_cubin/mine._ops.x.cpp"]
    image = Path("build", "torch_cubin", "mine._ops.x.cpp.0.0.sm_90a.cubin")
    assert image.read_bytes() == ONE.read_bytes()
    made = embed.CubinExtension("mine._kernels", module)
    assert [Path(path).read_bytes() for path in made.depends] == [ONE.read_bytes()]


@pytest.mark.parametrize("given", ["one", "several", "among others"])
def test_in_load_inline(given) -> None:
    one, several = torch_cubin.load(ONE.read_bytes()), torch_cubin.load(CUBINS)
    images, expected = {
        "one": (one, [ONE]),
        "several": (several, CUBINS),
        "among others": ([one, CUBINS[0], CUBINS[1].read_bytes()], [ONE, *CUBINS[:2]]),
    }[given]
    assert cpp._images("x", images) == [path.read_bytes() for path in expected]


def test_in_a_package(tmp_path) -> None:
    several = torch_cubin.load(CUBINS)
    folder = torch_cubin.save_package(tmp_path / "kernels", [several, torch_cubin.load(ONE)])
    assert torch_cubin.load_package(folder) == {}
    saved = {path.name: path.read_bytes() for path in folder.glob("*.cubin")}
    assert sorted(saved.values()) == sorted(path.read_bytes() for path in [*CUBINS, ONE])
    assert "vec_add.sm_80.cubin" in saved
    alone = torch_cubin.save_package(tmp_path / "alone", several)
    assert len(list(alone.glob("*.cubin"))) == len(CUBINS)


def test_an_op_of_a_module_that_came_as_bytes_is_saved(tmp_path) -> None:
    module = torch_cubin.load(ONE.read_bytes())
    torch_cubin.define_op(
        "module_images::add(Tensor x, Tensor y) -> Tensor",
        kernel=module["vec_add"],
        tensors={"x": "float32[n]", "y": "float32[n]", "out": "float32[n]"},
        args=lambda x, y, out: (x, y, out, torch_cubin.int32(x.numel())),
        grid=lambda x, y: torch_cubin.cdiv(x.numel(), 256),
        block=256,
    )
    folder = torch_cubin.save_package(tmp_path / "p", "module_images::add")
    (image,) = folder.glob("*.cubin")
    assert digest(image.read_bytes()) == digest(module.image())
