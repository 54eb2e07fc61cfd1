"""Catalogs for the stand-in driver: the package's kernels for sm_90a, or some of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import torch_cubin

CUBINS = Path(torch_cubin.__file__).resolve().parent / "cubins"


def kernels_of(family: str, keep: Callable[[dict], bool] = lambda kernel: True) -> list[dict]:
    """The manifest's entries for sm_90a; skips the test where the kernels are not built for it."""
    path = CUBINS / "manifest.json"
    entries = json.loads(path.read_text())["kernels"] if path.is_file() else []
    kernels = [k for k in entries if k["family"] == family and k["arch"] == "sm_90a" and keep(k)]
    if not kernels:
        pytest.skip("the kernels are not built for sm_90a")
    return kernels


def declare(driver, kernels: list[dict]) -> None:
    """Passes their parameters to the stand-in."""
    for kernel in kernels:
        driver.declare_kernel(kernel["symbol"], [param["size"] for param in kernel["params"]])


def install(driver, folder: Path, monkeypatch, kernels: list[dict]) -> None:
    """A catalog of those entries in a folder, for the library to use."""
    declare(driver, kernels)
    manifest = json.loads((CUBINS / "manifest.json").read_text())
    (folder / "sm_90a").symlink_to(CUBINS / "sm_90a")
    (folder / "manifest.json").write_text(json.dumps({**manifest, "kernels": kernels}))
    monkeypatch.setenv("TORCH_CUBIN_CATALOG", str(folder))
