"""Offsets, sizes and outputs past 2^31 elements. Each test frees its memory before the next.

Small integers make every result exact, so a wrapped 32-bit offset shows as a wrong element. Only
rows and columns at the far end, at the start and at random places are compared: the reference for
all of a 4.5 GB output would cost more than the product.
"""

from __future__ import annotations

import numerics
import pytest
import torch
from gpu import cases

import torch_cubin

pytestmark = pytest.mark.usefixtures("freed_memory")

LIMIT = 2**31
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}


def _integers(shape, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(-3, 4, shape, device="cuda").to(dtype)


def _spread(sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A small tensor with huge strides; the memory between its elements is NaN."""
    extent = 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
    assert extent > LIMIT
    cases.need_memory(extent * dtype.itemsize / 1e9)
    buffer = torch.full((extent,), torch.nan, dtype=dtype, device="cuda")
    view = buffer.as_strided(sizes, strides)
    view.copy_(_integers(sizes, dtype))
    return view


SPREADS = {
    # sizes and strides of the left operand, then its right operand's sizes
    "rows": ((130, 64), (17_000_000, 1), (64, 72)),
    "k": ((72, 130), (1, 17_000_000), (130, 64)),
    "rows unaligned": ((130, 64), (17_000_001, 1), (64, 72)),
    "both": ((40, 64), (43, 40_000_003), (64, 72)),
    "one row, k": ((1, 300), (1, 7_500_000), (300, 64)),
    "batch": ((3, 70, 64), (1_100_000_000, 64, 1), (64, 72)),
    "batch of two": ((2, 33, 64), (2_200_000_001, 64, 1), (2, 64, 72)),
}


@pytest.mark.fault_case(38)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", SPREADS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_past_2_to_31(dtype: str, name: str, side: str) -> None:
    sizes, strides, other_sizes = SPREADS[name]
    huge = _spread(sizes, strides, DTYPES[dtype])
    other = _integers(other_sizes, DTYPES[dtype])
    a, b = (huge, other) if side == "left" else (other.mT, huge.mT)
    out = torch.ops.cubin.matmul(a, b)
    numerics.check_exact(out, a.double() @ b.double(), f"{dtype} {name} {side}")


def _check_places(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Compares rows and columns of out = a @ b at both ends and at random places."""
    m, n = out.shape
    rows = torch.tensor([0, 1, m // 2, m - 2, m - 1, *torch.randint(m, (40,)).tolist()])
    columns = torch.tensor([0, 1, n // 2, n - 2, n - 1, *torch.randint(n, (40,)).tolist()])
    rows, columns = rows.cuda().clamp(0, m - 1), columns.cuda().clamp(0, n - 1)
    numerics.check_exact(out[rows], a[rows].double() @ b.double(), "rows")
    numerics.check_exact(out[:, columns], a.double() @ b[:, columns].double(), "columns")


@pytest.mark.fault_case(38)
@pytest.mark.parametrize(
    ("dtype", "m", "n"),
    [
        ("bfloat16", 50_000, 45_000),
        ("bfloat16", 46_341, 46_347),  # odd rows: no vector stores
        ("float32", 2**21 + 5, 1030),  # many row tiles
        ("float64", 1030, 2**21 + 5),
    ],
)
def test_output_past_2_to_31(dtype: str, m: int, n: int) -> None:
    assert m * n > LIMIT
    cases.need_memory(m * n * DTYPES[dtype].itemsize / 1e9 + 4)
    a, b = _integers((m, 24), DTYPES[dtype]), _integers((24, n), DTYPES[dtype])
    _check_places(torch.ops.cubin.matmul(a, b), a, b)


def test_linear_output_past_2_to_31() -> None:
    cases.need_memory(8)
    x, weight = _integers((50_000, 16), torch.bfloat16), _integers((44_000, 16), torch.bfloat16)
    bias = _integers((44_000,), torch.bfloat16)
    out = torch.ops.cubin.linear(x, weight, bias)
    rows = torch.tensor([0, 24_999, 48_806, 48_807, 49_999], device="cuda")
    numerics.check_exact(out[rows], x[rows].double() @ weight.double().t() + bias.double())


def test_batched_output_past_2_to_31() -> None:
    cases.need_memory(16)
    a = _integers((3, 30_000, 16), torch.bfloat16)
    b = _integers((3, 16, 30_011), torch.bfloat16)
    out = torch.ops.cubin.matmul(a, b)
    assert out.numel() > LIMIT
    for index in range(3):
        _check_places(out[index], a[index], b[index])


@pytest.mark.parametrize("transposed", [False, True])
def test_one_row_times_a_matrix_past_2_to_31(transposed: bool) -> None:
    """The path of one row: the matrix has 2.2e9 columns, or rows if transposed."""
    n = 2**31 + 2**26 + 3
    cases.need_memory(22)
    chunk = _integers((2, 2**20 + 7), torch.bfloat16)
    b = chunk.repeat(1, n // chunk.shape[1] + 1)[:, :n]
    if transposed:
        b = b.t().contiguous().t()
    a = torch.tensor([[2.0, -1.0]], dtype=torch.bfloat16, device="cuda")
    out = torch.ops.cubin.matmul(a, b)
    assert out.shape == (1, n)
    period = (a.double() @ chunk.double()).to(torch.bfloat16)[0]
    whole = n // period.numel() * period.numel()
    assert bool((out[0, :whole].view(-1, period.numel()) == period).all())
    numerics.check_exact(out[0, whole:], period[: n - whole])


@pytest.mark.fault_case(38)
@pytest.mark.parametrize(
    ("dtype", "k"),
    [
        (torch.bfloat16, 2**31 - 1),
        (torch.bfloat16, 2**31),
        (torch.bfloat16, 2**31 + 2**26 + 1),
        (torch.float32, 2**31 + 2**26 + 1),
    ],
    ids=str,
)
def test_k_past_2_to_31(dtype: torch.dtype, k: int) -> None:
    """A dot product of 2.2e9 elements, zero but for a thousand places, the last one included; and
    of as many as 31 bits hold, and one more."""
    cases.need_memory(2 * k * dtype.itemsize / 1e9)
    a, b = torch.zeros(k, dtype=dtype, device="cuda"), torch.zeros(k, dtype=dtype, device="cuda")
    places = torch.randint(k, (1000,), device="cuda").unique()
    ends = [0, min(2**31 - 1, k - 1), min(2**31, k - 1), k - 1]
    places = torch.cat([places, torch.tensor(ends, device="cuda")]).unique()
    a[places] = torch.randint(1, 3, places.shape, device="cuda").to(dtype)
    b[places] = torch.randint(1, 3, places.shape, device="cuda").to(dtype)
    expected = (a[places].double() * b[places].double()).sum()
    numerics.check_exact(torch.ops.cubin.matmul(a, b), expected)
    numerics.check_exact(torch.ops.cubin.matmul(a[None], b[:, None]), expected.view(1, 1))


def test_install_leaves_rows_longer_than_kernels_take_to_pytorch() -> None:
    columns = LIMIT + 8
    cases.need_memory(3 * 2 * columns / 1e9)
    rows = torch.ones(2, columns, dtype=torch.bfloat16, device="cuda")
    with torch_cubin.install(policy="all"):
        out = rows.sum(0)
        reasons = {row.function: row.reason for row in torch_cubin.report().declined}
    assert reasons == {"aten::sum.dim_IntList": "rows that are too long"}
    assert bool((out == 2).all())
