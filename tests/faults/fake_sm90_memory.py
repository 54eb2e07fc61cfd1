"""Choices among the kernels for Hopper on GPUs with other memories: an H200's, an H100's.

Products of few rows read their weights once, whichever kernel runs them, so that all models must
know the same memory: with an H200's, the tiles looked quicker on an H100 than the kernels for few
rows, which then never ran.
"""

from __future__ import annotations

import pytest
import torch
from fake_driver import tensors
from faults import catalogs
from faults.forked import forked

from torch_cubin._native import library
from torch_cubin._tuning import measure

H200 = {"memory_clock": 3201000, "memory_bus": 6144}  # kHz, bits
H100 = {"memory_clock": 2619000, "memory_bus": 5120}
# (M, N, K) that run as fast as the weights come.
FEW_ROWS = [
    (m, n, k)
    for m in (1, 16)
    for n, k in ((6144, 4096), (28672, 4096), (4096, 14336), (57344, 8192))
]


@pytest.fixture
def catalog(driver, tmp_path, monkeypatch) -> None:
    catalogs.install(driver, tmp_path, monkeypatch, catalogs.kernels_of("matmul"))


def plans(driver, memory: dict[str, int], shapes: list[tuple[int, int, int]]) -> list[dict]:
    """Of every shape, NT: the config that a GPU with that memory takes, and the times of all."""

    def run() -> list[dict]:
        for name, value in memory.items():
            driver.set(name, value)
        found = []
        for m, n, k in shapes:
            a = tensors.empty(m, k, dtype=torch.bfloat16)
            with measure.watching():
                torch.ops.cubin._matmul(a, tensors.strided((k, n), (1, k), torch.bfloat16))
                (plan,) = (p for p in library.watched_plans() if p["product"]["n"] == n)
            times = {config["name"]: config["microseconds"] for config in plan["configs"]}
            found.append({"chosen": plan["chosen"], "times": times})
        return found

    return forked(run)


def test_few_rows_run_on_their_own_kernels_whatever_the_memory(driver, catalog) -> None:
    for memory in (H200, H100):
        for shape, plan in zip(FEW_ROWS, plans(driver, memory, FEW_ROWS), strict=True):
            own = ("sm90_skinny ", "dot ", "axpy ")
            assert plan["chosen"].startswith(own), f"{shape} of {memory}"


def test_predicted_times_of_long_reads_follow_the_bandwidth(driver, catalog) -> None:
    shapes = [(8, 57344, 8192)]
    (fast,), (slow,) = plans(driver, H200, shapes), plans(driver, H100, shapes)
    rate = 3201 * 6144 / (2619 * 5120)
    config = "sm90_skinny 112 rows 1 splits"
    assert slow["times"][config] / fast["times"][config] == pytest.approx(rate, rel=0.05)
    # An H200's memory is nearly as fast as the ports of all pairs of multiprocessors together,
    # which bound the loads of tiles (cost.h): its tiles gain less.
    config = "sm90 64x128 share_a"
    assert 1.2 < slow["times"][config] / fast["times"][config] < rate * 0.95


def test_compute_bound_products_do_not_depend_on_bandwidth(driver, catalog) -> None:
    shapes = [(1024, 1024, 1024), (4096, 4096, 4096)]
    for fast, slow in zip(*(plans(driver, each, shapes) for each in (H200, H100)), strict=True):
        assert fast["chosen"] == slow["chosen"]
        config = fast["chosen"]
        assert slow["times"][config] / fast["times"][config] == pytest.approx(1, rel=0.03)


def test_clusters_share_the_operand_that_would_be_read_again(driver, catalog) -> None:
    """Two rows of tiles of 128: pairs along M read the weights once (on an H100 194 us; pairs along
    N, which share the tokens, 219)."""
    (plan,) = plans(driver, H100, [(256, 8192, 28672)])
    assert plan["times"]["sm90 128x128 share_b"] < plan["times"]["sm90 128x128 share_a"]
