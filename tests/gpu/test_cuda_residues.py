"""Every kernel of csrc/kernels/matmul/residues.cu, forced: exact on small integers among NaN."""

from __future__ import annotations

import pytest
import torch
from gpu import forced_products, hopper

from torch_cubin._native import library
from torch_cubin._tuning import measure

pytestmark = hopper.for_kernels

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
# Rows of A, columns of B, K: fewer than a tile, K of one block and of many, one more and one less
# than whole ones, rows of every residue.
SHAPES = [
    (8, 9, 3), (31, 70, 33), (67, 129, 64), (515, 64, 57), (81, 1031, 203), (1030, 257, 130),
    (600, 300, 577), (77, 140, 2051), (1100, 33, 1001), (130, 517, 65),
]  # fmt: skip


def in_batches(x: torch.Tensor, batch: int) -> torch.Tensor:
    rows, pitch = len(x) // batch, x.stride(0)
    return x.as_strided((batch, rows, x.shape[1]), (rows * pitch, pitch, 1), x.storage_offset())


def operands(
    m: int, n: int, k: int, number: int, dtype: torch.dtype, batch: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    gap, offset = number % 4, number % 9
    a = forced_products.among_nan((batch * m, k), gap, 1 + offset, dtype)
    b = forced_products.among_nan((batch * n, k), 3 - gap, 9 - offset, dtype)
    if batch > 1:
        a, b = in_batches(a, batch), in_batches(b, batch)
    return a, b.mT


@pytest.mark.parametrize("short", DTYPES)
def test_every_config(short: str) -> None:
    dtype = DTYPES[short]
    wrong, ran = [], set()
    with torch.no_grad(), measure.watching():
        for number, (m, n, k) in enumerate(SHAPES * 2):
            batch = 1 if number < len(SHAPES) else 3
            a, b = operands(m, n, k, number, dtype, batch)
            configs, failed = forced_products.check_integers("residues", a, b)
            ran |= configs
            wrong += failed
    assert wrong == []
    assert ran == {
        f"residues 128x128 of {side}{text}" for side in "ab" for text in ("", " 2 splits")
    }


@pytest.mark.parametrize("short", DTYPES)
def test_random_numbers(short: str) -> None:
    dtype = DTYPES[short]
    a = torch.randn(700, 1531, device="cuda").to(dtype)
    b = torch.randn(125, 1531, device="cuda").to(dtype).mT
    forced_products.check_random_numbers("residues", a, b, torch.matmul(a, b))


def test_a_row_of_infinities_stays_there() -> None:
    """Elements before and behind a row are its neighbours'."""
    a = torch.ones(600, 201, device="cuda", dtype=torch.bfloat16)
    b = torch.ones(120, 201, device="cuda", dtype=torch.bfloat16)
    a[300], b[65] = torch.inf, torch.nan
    with torch.no_grad(), measure.watching():
        configs = forced_products.offered("residues", a, b.mT)
        for config in configs:
            library.force_config(config)
            out = torch.ops.cubin.matmul(a, b.mT)
            assert out[:, 65].isnan().all(), config
            out[:, 65] = 201
            assert out[300].count_nonzero() == out[300].isinf().sum() + 1, config
            out[300] = 201
            assert (out == 201).all(), config
    assert configs


def test_not_where_bits_may_not_depend_on_rows() -> None:
    a = torch.randn(600, 201, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(120, 201, device="cuda", dtype=torch.bfloat16).mT
    forced_products.check_not_batch_invariant("residues", a, b)
