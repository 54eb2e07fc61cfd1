"""Built-in kernels as they are launched: here by a catalog in which one of them has a cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from fake_driver import tensors
from faults.forked import error_of, forked

CUBINS = Path(__file__).resolve().parents[2] / "torch_cubin" / "cubins"


@pytest.fixture
def clustered(driver, tmp_path, monkeypatch) -> None:
    """A catalog whose bfloat16 kernels of tensor cores launch clusters of two blocks."""
    manifest = json.loads((CUBINS / "manifest.json").read_text())
    kernels = [k for k in manifest["kernels"] if k["arch"] == "sm_90a" and k["kind"] == "mma"]
    kernels = [k for k in kernels if k["family"] == "matmul" and k["math"] == "bfloat16"]
    if not kernels:
        pytest.skip("the kernels are not built for sm_90a")
    for kernel in kernels:
        kernel["cluster"] = [2, 1, 1]
        driver.declare_kernel(kernel["symbol"], [param["size"] for param in kernel["params"]])
    (tmp_path / "sm_90a").symlink_to(CUBINS / "sm_90a")
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "kernels": kernels}))
    monkeypatch.setenv("TORCH_CUBIN_CATALOG", str(tmp_path))


def test_a_built_in_grid_is_a_whole_number_of_clusters(driver, clustered):
    """Or refused by name: a driver says no more than that some value is invalid."""

    def multiply(batch: int) -> None:  # a tile for each
        a = tensors.empty(batch, 8, 64, dtype=torch.bfloat16)
        b = tensors.empty(batch, 64, 8, dtype=torch.bfloat16)
        torch.ops.cubin._matmul(a, b)

    def run() -> list:
        error = error_of(lambda: multiply(3))
        refused = driver.launches()
        multiply(4)
        return [error, refused, driver.launches()]

    (_, message), refused, launches = forked(run)
    assert "[launch]" in message
    assert "a multiple of 2 blocks in x, got grid (3, 1, 1), cluster (2, 1, 1)" in message
    assert refused == []
    assert [launch["grid"] for launch in launches] == [[4, 1, 1]]
    assert [launch["attributes"]["4"] for launch in launches] == [[2, 1, 1]]  # the cluster
