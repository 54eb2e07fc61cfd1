"""A kernel of a Triton cache folder, opened as a module: what its notes add to a launch."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch

import torch_cubin
from torch_cubin import errors

CACHE = Path(__file__).parents[1] / "data" / "triton" / "cache_3.6.0_sm_90a"


@pytest.fixture(autouse=True)
def device(monkeypatch) -> None:
    """Where launches go, which PyTorch's CPU build cannot say."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("add.cubin", "add.json"):
        shutil.copy(CACHE / name, tmp_path)
    return tmp_path


def change(folder: Path, **fields) -> None:
    notes = json.loads((folder / "add.json").read_text())
    (folder / "add.json").write_text(json.dumps({**notes, **fields}))


def test_a_launch_takes_the_users_arguments(driver, folder) -> None:
    change(folder, shared=512, launch_cooperative_grid=True)
    module = torch_cubin.load(folder)
    driver.declare(module)
    x = torch.zeros(64)
    for kernel in (module["add"], pickle.loads(pickle.dumps(module["add"]))):
        kernel(x, x, x, 64, grid=2)
        launch = driver.launches()[-1]
        assert launch["block"] == [128, 1, 1]
        assert launch["shared"] == 512
        assert launch["params"][3:] == ["40000000", "00" * 8, "00" * 8]
        assert launch["attributes"] == {"2": [1]}
    module["add"](x, x, x, 64, grid=2, shared_memory=1024)
    assert driver.launches()[-1]["shared"] == 1024
    with pytest.raises(errors.ParamsError, match="expected 4, got 6"):
        module["add"](x, x, x, 64, None, None, grid=2)


@pytest.mark.parametrize("opened", ["", "add.cubin"])
def test_arguments_are_multiples_of_what_the_kernel_was_compiled_for(
    driver, folder, opened: str
) -> None:
    """With 1,001 elements it would write whole vectors past the end, without an error."""
    shutil.copy(CACHE / "add.ttir", folder)
    module = torch_cubin.load(folder / opened)
    driver.declare(module)
    given = {"grid": 4, "block": 128} if opened else {"grid": 4}
    hidden = (None, None) if opened else ()
    kernel, x = module["add"], torch.zeros(1032)
    for n in (1008, 0, torch_cubin.int32(-16)):
        kernel(x, x, x, n, *hidden, **given)
    assert len(driver.launches()) == 3
    wrong = {
        "argument 3 of kernel 'add'.*a multiple of 16, got 1001": (x, x, x, 1001),
        "argument 3 .*got 1000": (x, x, x, torch_cubin.int32(1000)),
        "argument 1 of kernel 'add'": (x, x[1:1009], x, 1008),
        "argument 2 of kernel 'add'": (x, x, torch_cubin.strided(x[2:]), 1008),
    }
    for says, arguments in wrong.items():
        with pytest.raises(errors.InputError, match=says):
            kernel(*arguments, *hidden, **given)
    assert len(driver.launches()) == 3


@pytest.mark.parametrize(
    "ir",
    [
        "", "tt.func public @other(%n: i32 {tt.divisibility = 16 : i32}) {",
        "tt.func public @add(%n: i32 {tt.divisibility = 16 : i32}", "tt.func public @add(",
        'tt.func public @add(%n: i32 {tt.divisibility = 16 : i32} loc("a, b)"), %m: i32) {',
        "tt.func public @add(%x: i64, %y: i64, %z: i64, %n: i32 {tt.divisibility = 99999999}) {",
    ],
)  # fmt: skip
def test_ir_that_says_nothing_of_the_kernel(driver, folder, ir: str) -> None:
    (folder / "add.ttir").write_text(ir)
    module = torch_cubin.load(folder)
    driver.declare(module)
    x = torch.zeros(64)
    module["add"](x, x, x, 61, grid=1)
    assert len(driver.launches()) == 1


def test_the_cubin_itself_takes_every_parameter(driver, folder) -> None:
    module = torch_cubin.load(folder / "add.cubin")
    driver.declare(module)
    x = torch.zeros(64)
    module["add"](x, x, x, 64, None, None, grid=2, block=128)
    assert driver.launches()[-1]["shared"] == 0
