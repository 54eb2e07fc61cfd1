"""More batches than one launch takes: in number (grid x) and in dims, and what does not fit at all.

Operands are windows into a few megabytes, so that no two batch dims can be merged or folded; only
the output has its full size.
"""

from __future__ import annotations

import contextlib
import os

import numerics
import pytest
import torch
from gpu import cases

from torch_cubin._native import library

pytestmark = pytest.mark.usefixtures("freed_memory")

MAX_GRID_X = 2**31 - 1
MODES = {"grad": contextlib.nullcontext, "no_grad": torch.no_grad}


def _windows(sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A [*sizes, 1, 1] view of small integers at these strides, 0 aside from the batch dims."""
    length = 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
    base = torch.randint(-3, 4, (length,), device="cuda").to(dtype)
    return base.as_strided((*sizes, 1, 1), (*strides, 1, 1))


@pytest.mark.fault_case(38)
@pytest.mark.skipif(
    "TORCH_CUBIN_SLOW_TESTS" not in os.environ, reason="half a minute: TORCH_CUBIN_SLOW_TESTS=1"
)
def test_more_batches_than_a_grid_has_blocks() -> None:
    dtype = torch.bfloat16
    sizes = (2**11 + 1, 2**20)
    batches = sizes[0] * sizes[1]
    assert batches > MAX_GRID_X
    cases.need_memory(10 * batches / 1e9)
    a, b = _windows(sizes, (1, 1), dtype), _windows(sizes, (2, 1), dtype)
    launches = library.launches()
    out = torch.ops.cubin.matmul(a, b)
    assert library.launches() - launches == 2
    for begin in range(0, sizes[0], 512):  # all of it, in parts: the reference takes memory too
        part = slice(begin, begin + 512)
        assert torch.equal(out[part], a[part] * b[part]), f"batches from {begin} * 2^20"


@pytest.mark.parametrize("dims", [4, 5, 6, 7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_more_batch_dims_than_a_launch_takes(dtype: torch.dtype, dims: int) -> None:
    sizes = (3, 2, 2, 3, 2, 3, 2)[-dims:]
    m, n, k = 17, 9, 7  # one k tile: nothing to split, so each part is one launch
    # Strides that no dim's neighbour continues, in either operand.
    a_strides = tuple(1000 + 7 * i for i in range(dims))
    b_strides = tuple(800 + 11 * i for i in reversed(range(dims)))
    length = 1000 * dims * 4 + m * k + n * k
    a = torch.randint(-3, 4, (length,), device="cuda").to(dtype)
    b = torch.randint(-3, 4, (length,), device="cuda").to(dtype)
    a = a.as_strided((*sizes, m, k), (*a_strides, k, 1))
    b = b.as_strided((*sizes, k, n), (*b_strides, n, 1))
    launches = library.launches()
    out = torch.ops.cubin.matmul(a, b)
    parts = 1
    for size in sizes[: dims - 4]:  # one launch for each index of the dims past the fourth
        parts *= size
    assert library.launches() - launches == parts
    numerics.check_exact(out, a.double() @ b.double())


@pytest.mark.fault_case(38)
@pytest.mark.parametrize("mode", MODES)
def test_an_output_that_no_gpu_holds_is_an_oom_error(mode: str) -> None:
    """Also below torch 2.13, where the C API does not say why an allocation failed."""
    row = torch.ones(1, device="cuda", dtype=torch.bfloat16)
    a, b = row.expand(2**22, 1), row.expand(1, 2**22)
    with MODES[mode](), pytest.raises(RuntimeError) as caught:
        torch.ops.cubin.matmul(a, b)
    text = str(caught.value)
    assert text.startswith("CUDA out of memory. torch_cubin [oom]: "), text
    assert f"{2**45} bytes" in text
    small = torch.ops.cubin.matmul(a[:3], b[:, :5])
    numerics.check_exact(small, torch.ones(3, 5, device="cuda"))


@pytest.mark.fault_case(38)
@pytest.mark.parametrize("mode", MODES)
def test_an_output_past_63_bits_is_an_input_error(mode: str) -> None:
    row = torch.ones(1, device="cuda", dtype=torch.float64)
    a, b = row.expand(2**31, 1), row.expand(1, 2**31)
    with MODES[mode](), pytest.raises(RuntimeError, match=r"torch_cubin \[input\]: .*too large"):
        torch.ops.cubin.matmul(a, b)
