"""Built-in kernels as they are launched: here by a catalog in which one of them has a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fake_driver import tensors
from faults import catalogs
from faults.forked import error_of, forked
from unit import kernel_sources

from torch_cubin._native import library


def catalog_of(driver, folder: Path, monkeypatch, change) -> None:
    """A catalog of the bfloat16 matmul kernels of kind `mma`, each as `change` returns it."""
    kernels = catalogs.kernels_of("matmul", lambda k: (k["kind"], k["math"]) == ("mma", "bfloat16"))
    changed = [entry for kernel in kernels for entry in change(kernel)]
    catalogs.install(driver, folder, monkeypatch, changed)


@pytest.fixture
def clustered(driver, tmp_path, monkeypatch) -> None:
    """A catalog whose bfloat16 kernels of tensor cores launch clusters of two blocks."""
    catalog_of(driver, tmp_path, monkeypatch, lambda k: [{**k, "cluster": [2, 1, 1]}])


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


def product() -> None:
    a = tensors.empty(8, 64, dtype=torch.bfloat16)
    b = tensors.empty(64, 8, dtype=torch.bfloat16)
    torch.ops.cubin._matmul(a, b)


BROKEN = {
    "another kind": {"kind": "sm999"},
    "other parameters": {"params_digest": "0" * 64},
    "a field of no use": {"tile": [0, 1, 1]},
}


@pytest.mark.parametrize("case", BROKEN)
def test_an_entry_that_no_host_code_takes_disables_no_other(driver, tmp_path, monkeypatch, case):
    def change(kernel: dict) -> list[dict]:
        return [{**kernel, **BROKEN[case], "name": f"broken_{kernel['name']}"}, kernel]

    catalog_of(driver, tmp_path, monkeypatch, change)

    def run() -> list:
        product()
        return [driver.launches(), [each["name"] for each in library.catalog()["refused"]]]

    launches, refused = forked(run)
    assert len(launches) == 1
    assert refused
    assert all(name.startswith("broken_") for name in refused)


@pytest.mark.parametrize("case", BROKEN)
def test_where_all_entries_are_refused_their_error_is_reported(driver, tmp_path, monkeypatch, case):
    catalog_of(driver, tmp_path, monkeypatch, lambda kernel: [{**kernel, **BROKEN[case]}])
    _, message = forked(lambda: error_of(product))
    tag = "file" if case == "a field of no use" else "params"
    assert f"torch_cubin [{tag}]: catalog kernel '" in message


def test_a_cluster_shape_is_queried_once(driver, clustered):
    """Later launches of its shape take the fast path, and are as right."""

    def run() -> list:
        a = tensors.empty(4, 8, 64, dtype=torch.bfloat16)
        b = tensors.empty(4, 64, 8, dtype=torch.bfloat16)
        for _ in range(3):
            torch.ops.cubin._matmul(a, b)
        return [driver.calls("cuOccupancyMaxActiveClusters"), driver.launches()]

    asked, launches = forked(run)
    assert asked == 1
    assert [launch["grid"] for launch in launches] == [[4, 1, 1]] * 3
    assert [launch["attributes"]["4"] for launch in launches] == [[2, 1, 1]] * 3


@pytest.mark.parametrize(
    ("sm", "arch"), [(80, "sm_80"), (86, "sm_86"), (89, "sm_86"), (90, "sm_90a"), (120, "sm_120a")]
)
def test_which_kernels_of_a_complete_wheel_a_device_runs(driver, tmp_path, monkeypatch, sm, arch):
    """8.9 has no kernels of its own: it runs those of 8.6."""
    archs = kernel_sources.build.DEFAULT_ARCHS
    catalog_of(driver, tmp_path, monkeypatch, lambda k: [{**k, "arch": each} for each in archs])

    def run() -> str:
        driver.set("sm", sm)
        return library.device(0)["arch"]

    assert forked(run) == arch
