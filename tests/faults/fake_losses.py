"""Launches of the kernels of cross entropy on the stand-in driver: threads, blocks, kernels."""

from __future__ import annotations

import pytest
import torch
from c_layouts import ROWS, structure
from faults import catalogs
from faults.row_launches import empty, launches_of

import torch_cubin  # noqa: F401  (registers the ops)

LOSSES = structure(f"{ROWS}/losses_params.h", "LossesParams")
ops = torch.ops.cubin


@pytest.fixture(autouse=True)
def catalog(driver, tmp_path, monkeypatch) -> None:
    catalogs.install(driver, tmp_path, monkeypatch, catalogs.kernels_of("rows"))


def test_losses_of_rows_and_their_gradients(driver) -> None:
    logits, targets = empty(64, 131072), empty(64, dtype=torch.int64)
    each, one = empty(64, dtype=torch.float32), empty(dtype=torch.float32)
    options = ("mean", -100, 0.1)

    def call() -> None:
        ops._cross_entropy(logits, targets, None, *options, torch.bfloat16)
        ops._cross_entropy_backward(one, logits, targets, None, one, each, each, *options)

    (losses, total, gradient) = launches_of(driver, call, LOSSES)
    assert [launch["grid"][0] for launch, _ in (losses, total, gradient)] == [64 * 2, 1, 64 * 16]
    assert [params.cluster for _, params in (losses, total, gradient)] == [2, 1, 16]
    assert (total[1].columns, total[1].classes, total[1].mean) == (64, 131072, 1)
    assert not losses[1].total
    assert gradient[1].total


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("rows", "threads"), [(1, 1), (5, 8), (100, 128), (4096, 1024)])
def test_threads_that_sum_losses(driver, rows: int, threads: int, smoothing: float) -> None:
    """As many as there are losses: each that a thread adds alone is a wait for memory."""
    logits, targets = empty(rows, 64), empty(rows, dtype=torch.int64)

    def call() -> None:
        ops._cross_entropy(logits, targets, None, "mean", -100, smoothing, torch.bfloat16)

    (losses, total) = launches_of(driver, call, LOSSES)
    assert losses[0]["kernel"] == f"losses_rows{'_general' if smoothing else ''}_bf16"
    assert total[1].threads == threads
    assert total[0]["block"] == [max(threads, 128), 1, 1]


@pytest.mark.parametrize(
    ("rows", "columns", "name"),
    [
        *((264, 32000, "_few_bf16"), (265, 32000, "_bf16"), (264, 8192, "_bf16")),
        *((132, 128256, "_few_bf16"), (133, 128256, "_bf16"), (8, 32001, "_general_bf16")),
    ],
)
def test_losses_of_few_long_rows(driver, rows: int, columns: int, name: str) -> None:
    """As many blocks as the GPU has at a time, for what one block would read in several turns."""
    logits, targets = empty(rows, columns), empty(rows, dtype=torch.int64)

    def call() -> None:
        ops._cross_entropy(logits, targets, None, "none", -100, 0.0, torch.bfloat16)

    ((launch, params),) = launches_of(driver, call, LOSSES)
    assert launch["kernel"] == f"losses_rows{name}"
    assert params.threads == 256


def test_losses_of_rows_that_begin_anywhere(driver) -> None:
    """A thread has two vectors at a time, so two blocks share a row that would be one block's."""
    targets = empty(64, dtype=torch.int64)

    def call() -> None:
        for columns in (50257, 50264):
            arguments = targets, None, "none", -100, 0.0, torch.bfloat16
            ops._cross_entropy(empty(64, columns), *arguments)

    odd, aligned = launches_of(driver, call, LOSSES)
    assert [params.cluster for _, params in (odd, aligned)] == [2, 1]
    assert [launch["grid"][0] for launch, _ in (odd, aligned)] == [64 * 2, 64]
