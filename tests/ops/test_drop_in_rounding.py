"""addmm and related functions in 16 bits: PyTorch rounds once, after factors and sum; so must
drop_in()."""

from __future__ import annotations

import pytest
import torch
from drop_in_cases import integers, run, same

HALVES = [torch.float16, torch.bfloat16]


def test_a_factor_keeps_the_product_finite(device) -> None:
    a = torch.full((1, 1, 64), 200.0, dtype=torch.float16, device=device)
    zero = torch.zeros(1, 1, 1, dtype=torch.float16, device=device)
    result, ops, _ = run(lambda: torch.baddbmm(zero, a, a.mT, beta=0, alpha=1 / 64))
    assert result.item() == 40000
    assert ops.cubin() == 1


@pytest.mark.parametrize("autocast", [False, True])
def test_a_sum_keeps_the_product_finite(autocast, device) -> None:
    dtype = torch.float32 if autocast else torch.float16
    a = torch.full((2, 64), 200.0, dtype=dtype, device=device)
    b = torch.full((64, 2), 8.0, dtype=dtype, device=device)
    minus = torch.full((2, 2), -60000.0, dtype=dtype, device=device)
    with torch.autocast(device, dtype=torch.float16, enabled=autocast):
        whole, ops, _ = run(lambda: torch.addmm(minus, a, b))
        row, fused, _ = run(lambda: torch.addmm(minus[0], a, b))
    for result in (whole, row):
        same(result, torch.full((2, 2), 42400.0, dtype=torch.float16, device=device))
    assert (ops.cubin(), fused.cubin()) == (1, 1)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_differences_are_as_accurate_as_pytorchs(dtype, device) -> None:
    a = torch.randn(16, 256, device=device).to(dtype)
    b = torch.randn(256, 16, device=device).to(dtype)
    near = -(a @ b)
    result, ops, _ = run(lambda: torch.addmm(near, a, b))
    assert ops.cubin() == 1
    # NOTE: on an H200 with torch 2.11 cuBLAS rounds the product first, here and up to K = 1024 at
    # least, whatever allow_bf16_reduced_precision_reduction says: there nothing is left of it.
    exact = near.double() + a.double() @ b.double()
    assert exact.abs().max() > 0.001
    torch.testing.assert_close(result.double(), exact, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_autocast_to_16_bits_casts_all_three(dtype, device) -> None:
    a = integers(4, 4, dtype=dtype, device=device)
    double = a.double()
    with torch.autocast(device, dtype=torch.bfloat16):
        expected = torch.addmm(a, a, a, beta=2)
        result, ops, _ = run(lambda: torch.addmm(a, a, a, beta=2))
        _, wide, _ = run(lambda: torch.addmm(double, double, double, beta=2))
    same(result, expected)
    assert (ops.cubin(), wide.cubin()) == (1, 1)
