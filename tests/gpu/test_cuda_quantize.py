"""quantize on a GPU gives the bits of the CPU's definition, for every recipe, type, size and
layout; with NaN, infinities, zeros and tiny numbers among the elements.
"""

from __future__ import annotations

import numerics
import pytest
import torch
from scaled_cases import BLOCK_1X128, BLOCK_128X128, ROW
from torch import Tensor

import torch_cubin  # noqa: F401  (registers the ops)

pytestmark = pytest.mark.usefixtures("nan_memory")

op = torch.ops.cubin.quantize
SIZES = [
    (1, 1), (3, 130), (128, 128), (129, 257), (300, 1000), (70, 4096), (1000, 72), (5, 8200),
    (9, 2047), (33, 1536), (2, 20008),
]  # fmt: skip
RECIPES = [
    (ROW, False), (BLOCK_1X128, False), (BLOCK_1X128, True),
    (BLOCK_128X128, False), (BLOCK_128X128, True),
]  # fmt: skip
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def numbers(rows: int, columns: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    x = torch.randn(rows, columns, generator=generator, device="cuda")
    x *= torch.rand(rows, 1, generator=generator, device="cuda") * 4
    x[rows // 3] = 0
    x[rows // 2, columns // 2 :] = 1e-42 if dtype == torch.float32 else 6e-8
    for at, value in ((5, torch.inf), (7, -torch.inf), (9, torch.nan), (11, 448.0), (12, -0.0)):
        x.view(-1)[(at * 7919) % x.numel()] = value
    return x.to(dtype)


def check(out: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], label: str) -> None:
    for name, own, other in zip(("data", "scale"), out, wanted, strict=True):
        assert own.stride() == other.stride(), label
        own, other = own.cpu(), other
        if name == "data":  # any NaN is right
            own, other = own.float(), other.float()
            assert torch.equal(own.isnan(), other.isnan()), label
            own, other = own.nan_to_num(), other.nan_to_num()
        numerics.check_bits(own.contiguous(), other.contiguous(), f"{name}, {label}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("recipe", "transpose"), RECIPES)
def test_bits_are_the_definitions(recipe, transpose, dtype, generator: torch.Generator) -> None:
    for number, (rows, columns) in enumerate(SIZES):
        x = numbers(rows, columns, dtype, generator)
        wide = x.new_empty(rows, columns + 3)[:, 3:].copy_(x)
        options = {
            "transpose": transpose,
            "power_of_two": number % 2 == 1,
            "dtype": torch.float8_e5m2 if number % 4 > 1 else None,
        }
        wanted = op(x.cpu(), recipe, **options)
        for name, own in (("x", x), ("unaligned", wide), ("columns", x.t().contiguous().t())):
            check(op(own, recipe, **options), wanted, f"{rows}x{columns} {name} {options}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated(dtype, generator: torch.Generator) -> None:
    """silu is rounded otherwise than on the CPU: scales differ by some ulps, data by one step."""
    for rows, columns in [(3, 130), (64, 1024), (129, 257), (7, 8)]:
        x = torch.randn(rows, 2 * columns, generator=generator, device="cuda").to(dtype)
        data, scale = op(x, BLOCK_1X128, gate="silu")
        wanted_data, wanted_scale = op(x.cpu(), BLOCK_1X128, gate="silu")
        torch.testing.assert_close(scale.cpu(), wanted_scale, rtol=1e-5, atol=0)
        steps = data.cpu().view(torch.int8).int() - wanted_data.view(torch.int8).int()
        assert steps.abs().max() <= 1
        assert (steps != 0).float().mean() < 0.01


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_infinities_are_nan_and_have_no_scale(dtype, generator: torch.Generator) -> None:
    """A warp has blocks of columns of several rows, of which one may have an infinity."""
    x = torch.randn(37, 512, generator=generator, device="cuda").to(dtype)
    bad = torch.zeros(37, 512, dtype=torch.bool, device="cuda")
    for row, column in ((3, 5), (4, 256 + 9), (9, 130), (20, 255)):
        bad[row, column] = True
    bad[11, 128:256] = True  # a block of nothing else
    x[bad] = 0  # so that the largest of a block is another one
    data, scale = op(x, BLOCK_1X128, gate="silu")
    outputs = bad[:, :256] | bad[:, 256:]
    for value in (torch.inf, -torch.inf, torch.nan):
        own, own_scale = op(x.masked_fill(bad, value), BLOCK_1X128, gate="silu")
        assert torch.equal(own.float().isnan(), outputs)
        assert torch.equal(own_scale, scale)
        assert torch.equal(own.float()[~outputs], data.float()[~outputs])


def test_zero_sizes() -> None:
    for rows, columns in ((0, 64), (64, 0), (0, 0)):
        x = torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16)
        for recipe, transpose in RECIPES:
            data, scale = op(x, recipe, transpose=transpose)
            wanted = op(x.cpu(), recipe, transpose=transpose)
            assert data.shape == wanted[0].shape
            assert torch.equal(scale.cpu(), wanted[1])


def test_quantised_operands_are_multiplied(generator: torch.Generator) -> None:
    """A linear layer and its weight gradient, with 1x128 and 128x128 scales."""
    x, w = (torch.randn(n, 1000, generator=generator, device="cuda").bfloat16() for n in (300, 520))
    (a, a_scale), (b, b_scale) = op(x, BLOCK_1X128), op(w, BLOCK_128X128)
    multiply = torch.ops.cubin.scaled_matmul
    y = multiply(a, b.t(), a_scale, BLOCK_1X128, b_scale, BLOCK_128X128)
    wanted = x.double() @ w.t().double()
    assert (y.double() - wanted).norm() / wanted.norm() < 0.06
    (a, a_scale), (b, b_scale) = op(y, BLOCK_1X128, transpose=True), op(x, BLOCK_1X128,
                                                                        transpose=True)  # fmt: skip
    gradient = multiply(a, b.t(), a_scale, BLOCK_1X128, b_scale, BLOCK_1X128)
    wanted = y.t().double() @ x.double()
    assert (gradient.double() - wanted).norm() / wanted.norm() < 0.06
