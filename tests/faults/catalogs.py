"""Catalogs for the stand-in driver: the package's kernels for sm_90a, or some of them."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

import torch_cubin

CUBINS = Path(torch_cubin.__file__).resolve().parent / "cubins"


@functools.cache
def _manifest() -> dict:
    path = CUBINS / "manifest.json"
    return json.loads(path.read_text()) if path.is_file() else {"kernels": []}


@functools.cache
def _family(family: str) -> str:
    """Its entries for sm_90a as JSON, because tests change what kernels_of() returns."""
    entries = _manifest()["kernels"]
    return json.dumps([k for k in entries if k["family"] == family and k["arch"] == "sm_90a"])


def kernels_of(family: str, keep: Callable[[dict], bool] = lambda kernel: True) -> list[dict]:
    """The manifest's entries for sm_90a; skips the test where the kernels are not built for it."""
    kernels = [kernel for kernel in json.loads(_family(family)) if keep(kernel)]
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
    (folder / "sm_90a").symlink_to(CUBINS / "sm_90a")
    (folder / "manifest.json").write_text(json.dumps({**_manifest(), "kernels": kernels}))
    monkeypatch.setenv("TORCH_CUBIN_CATALOG", str(folder))
