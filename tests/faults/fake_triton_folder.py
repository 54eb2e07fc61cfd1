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


def test_the_cubin_itself_takes_every_parameter(driver, folder) -> None:
    module = torch_cubin.load(folder / "add.cubin")
    driver.declare(module)
    x = torch.zeros(64)
    module["add"](x, x, x, 64, None, None, grid=2, block=128)
    assert driver.launches()[-1]["shared"] == 0
