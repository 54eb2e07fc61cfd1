"""Triton's notes beside a cubin: what errors say of them, and which folders open as modules."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import torch_cubin
from torch_cubin import errors

CACHE = Path(__file__).parents[1] / "data" / "triton" / "cache_3.6.0_sm_90a"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("add.cubin", "add.json"):
        shutil.copy(CACHE / name, tmp_path)
    return tmp_path


def change(folder: Path, **fields) -> None:
    notes = json.loads((folder / "add.json").read_text())
    (folder / "add.json").write_text(json.dumps({**notes, **fields}))


def too_few(source, count: int = 4) -> str:
    with pytest.raises(errors.ParamsError, match=f"expected 6, got {count}") as caught:
        torch_cubin.load(source)["add"](*range(count), grid=1, block=128)
    return str(caught.value)


def test_a_count_error_names_the_hidden_parameters(folder) -> None:
    change(folder, shared=4104, num_warps=8)
    text = too_few(folder / "add.cubin")
    assert "add.json': the last 2 parameters are hidden pointers to scratch memory: pass" in text
    assert "shared memory 4104 bytes, block 256" in text
    change(folder, global_scratch_size=96)
    assert "96 bytes a block are needed" in too_few(folder / "add.cubin")


@pytest.mark.parametrize("notes", ["", "{", "[]", "{}", '{"num_warps": "x", "shared": -1}'])
def test_a_cubin_needs_no_notes(folder, notes: str) -> None:
    (folder / "add.json").write_text(notes)
    assert "In a kernel of Triton's the last 2 parameters" in too_few(folder / "add.cubin")
    with pytest.raises(errors.InputError, match=r"\[input\]: file '.*add.json'"):
        torch_cubin.load(folder)


def test_without_notes_trailing_pointers_are_a_hint() -> None:
    data = (CACHE / "add.cubin").read_bytes()
    assert "the last 2 parameters are hidden pointers" in too_few(data)
    assert "the last parameter is a hidden pointer" in too_few(data, 5)
    assert "Triton" not in too_few(data, 3)
    assert "Triton" not in too_few(data, 7)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"global_scratch_size": 128}, "needs scratch memory.*got 128 bytes a block"),
        ({"profile_scratch_size": 4}, "needs scratch memory.*got 4 bytes a block"),
        ({"num_ctas": 2}, "runs in clusters.*got 2"),
        ({"name": "other"}, "does not describe the cubin beside it"),
        ({"shared": -1}, "shared.*expected an integer"),
        ({"num_warps": 1.5}, "num_warps.*expected an integer"),
    ],
)
def test_folders_that_are_refused(folder, fields: dict, message: str) -> None:
    change(folder, **fields)
    with pytest.raises(errors.InputError, match=message):
        torch_cubin.load(folder)


def test_folders_of_no_kernel_and_of_several(tmp_path) -> None:
    with pytest.raises(errors.FileError, match="holds no kernel"):
        torch_cubin.load(tmp_path)
    with pytest.raises(errors.FileError, match=r"got add\.cubin, copy_tile\.cubin\."):
        torch_cubin.load(CACHE)


def test_kernels_of_two_folders_must_agree(folder, tmp_path_factory) -> None:
    other = tmp_path_factory.mktemp("other")
    shutil.copy(folder / "add.cubin", other)
    shutil.copy(folder / "add.json", other)
    torch_cubin.load([folder, other])["add"]
    change(other, shared=8)
    with pytest.raises(errors.ParamsError, match="differently from each of two folders"):
        torch_cubin.load([folder, other])["add"]
    with pytest.raises(errors.ParamsError, match="in a file that does not"):
        torch_cubin.load([folder, other / "add.cubin"])["add"]


@pytest.mark.parametrize(("version", "hidden"), [("3.4.0", 1), ("3.6.0", 2), ("3.9.0", 2)])
def test_each_version_says_how_many_parameters_it_adds(version: str, hidden: int) -> None:
    kernel = torch_cubin.load(CACHE.parent / f"cache_{version}_sm_80")["copy_tile"]
    wanted = len(kernel.info.params) - hidden
    with pytest.raises(errors.ParamsError, match=f"expected {wanted}, got 0"):
        kernel(grid=1)
