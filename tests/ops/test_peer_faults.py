"""Sizes, layouts and ends that other libraries refuse, get wrong or crash on (torch 2.11 and
DeepGEMM 54e2261, one H200, 2026-11-26), each with what happens there. Small integers, so that
results are exact.
"""

from __future__ import annotations

import numerics
import pytest
import scaled_cases as cases
import torch
from scaled_cases import BLOCK_1X128, BLOCK_128X128, ROW, TENSOR, expected, operands
from torch import Tensor

import torch_cubin  # noqa: F401  (registers the ops)

scaled = torch.ops.cubin.scaled_matmul
scaled_groups = torch.ops.cubin.scaled_grouped_matmul
grouped = torch.ops.cubin.grouped_matmul
BLOCKS = (BLOCK_1X128, BLOCK_128X128)


@pytest.fixture
def generator(device: str) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


def integers(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return cases.integers(shape, generator).bfloat16()


def moved(x: Tensor) -> Tensor:
    """The same rows at an address and with a stride that are 8 bytes past a multiple of 16."""
    before = 8 // x.element_size()
    wide = x.new_zeros(x.shape[0], x.shape[1] + 24 // x.element_size())
    wide = wide[:, before : before + x.shape[1]]
    return wide.copy_(x)


@pytest.mark.parametrize("k", [1088, 1152])
def test_blocks_of_k_that_are_no_multiple_of_four(k: int, generator) -> None:
    """torch._scaled_mm: rms error 0.32, no word; F.scaled_mm wants scales padded to four."""
    args = list(operands(32, 64, k, BLOCKS, generator))
    wanted = expected(*args)
    numerics.check_exact(scaled(*args), wanted, "as they are")
    padded = args[4].new_full((1, 12), torch.nan).t()
    padded[:9] = args[4]
    args[4] = padded
    numerics.check_exact(scaled(*args), wanted, "padded")


@pytest.mark.parametrize("m", [1, 2, 7, 15])
@pytest.mark.parametrize("recipes", cases.BLOCKS, ids=str)
def test_few_rows_with_scales_of_blocks(m: int, recipes, generator) -> None:
    """CUBLAS_STATUS_NOT_SUPPORTED at 1 and 7 rows; nobody has 128x128 of both operands."""
    args = operands(m, 136, 320, recipes, generator)
    numerics.check_exact(scaled(*args), expected(*args), f"{m}")


@pytest.mark.parametrize("n", [63, 250])
@pytest.mark.parametrize("k", [508, 1032])
def test_sizes_that_are_no_multiples_of_16(n: int, k: int, generator) -> None:
    """8-bit products are refused; 1032 of K is an invalid value for DeepGEMM, and bfloat16's
    grouped_mm refuses 508."""
    for recipes in ((TENSOR, TENSOR), (ROW, ROW), BLOCKS):
        args = operands(20, n, k, recipes, generator)
        numerics.check_exact(scaled(*args), expected(*args), f"{recipes}")
    a, b = integers((20, k), generator), integers((2, k, n), generator)
    offs = torch.tensor([7, 20], device=a.device, dtype=torch.int32)
    out = grouped(a, b, offs=offs)
    wanted = torch.cat([a[:7].double() @ b[0].double(), a[7:].double() @ b[1].double()])
    numerics.check_exact(out, wanted, "groups")


def test_addresses_that_are_no_multiples_of_16(generator) -> None:
    """CUBLAS_STATUS_NOT_SUPPORTED, of scales of rows for some starts of a part of a batch."""
    for recipes in ((ROW, ROW), BLOCKS):
        a, b, a_scale, _, b_scale, _ = args = operands(200, 64, 320, recipes, generator)
        wanted = expected(*args)
        out = scaled(moved(a), moved(b.t()).t(), a_scale, recipes[0], b_scale, recipes[1])
        numerics.check_exact(out, wanted, f"operands {recipes}")
        for start in (31, 107):
            own = a[start:], b, a_scale[start:], recipes[0], b_scale, recipes[1]
            numerics.check_exact(scaled(*own), wanted[start:], f"from row {start}")


@pytest.mark.parametrize("dtype", [*cases.OUT_DTYPES, cases.E4M3])
def test_outputs_of_every_recipe(dtype: torch.dtype, generator) -> None:
    """torch has e4m3 with scales of tensors alone, DeepGEMM bfloat16."""
    for recipes in ((TENSOR, TENSOR), (ROW, ROW), BLOCKS):
        args = operands(5, 24, 16, recipes, generator)
        out = scaled(*args, output_dtype=dtype)
        assert out.dtype == dtype
        assert torch.equal(out.float(), expected(*args).clamp(-448, 448).to(dtype).float())


def test_no_group(generator) -> None:
    """grouped_mm and its scaled form: a floating point exception ends the process."""
    none = torch.zeros(0, dtype=torch.int32, device=generator.device)
    a, b = integers((6, 64), generator), integers((1, 64, 32), generator)
    assert grouped(a[:0], b[:0], offs=none).shape == (0, 32)
    assert grouped(a, b[:0], offs=none).shape == (6, 32)
    for recipes in cases.OF_GROUPS:
        args = cases.groups(recipes, 6, 1, 32, 64, generator)
        args[1], args[4] = args[1][:0], args[4][:0]
        assert scaled_groups(*args, offs=none).shape == (6, 32)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_groups_begin_anywhere(dtype: torch.dtype, generator) -> None:
    """DeepGEMM: rms error 1.05 for groups that begin at no multiple of 128; it and PyTorch refuse
    64-bit ends."""
    sizes = (33, 0, 1, 100, 7)
    offs = torch.tensor(sizes, device=generator.device).cumsum(0).to(dtype)
    for recipes in cases.OF_GROUPS:
        args = cases.groups(recipes, sum(sizes), len(sizes), 40, 144, generator)
        numerics.check_exact(
            scaled_groups(*args, offs=offs), cases.expected_of_groups(args, sizes), f"{recipes}"
        )
    for recipe, _ in cases.OF_K:  # PyTorch: a device-side assertion ends the context
        args = cases.groups_of_k(recipe, len(sizes), 24, 40, sum(sizes) + 3, generator)
        out = scaled_groups(*args, offs=offs)
        numerics.check_exact(out, cases.expected_of_k(args, sizes), f"of K, {recipe}")
    # Groups of columns, the first operand's columns contiguous: the same assertion there.
    a, b = integers((5, 16, 40), generator), integers((sum(sizes), 40), generator).t()
    out = grouped(a, b, offs=offs)
    parts = [x.double() @ y for x, y in zip(a, b.double().split(sizes, 1), strict=True)]
    numerics.check_exact(out, torch.cat(parts, 1), "columns")


@pytest.mark.parametrize("ends", [(50, 101), (-1, 100), (60, 50)])
def test_an_end_past_the_rows_costs_no_context(ends: tuple[int, int], generator) -> None:
    """PyTorch: a device-side assertion; DeepGEMM: no word."""
    offs = torch.tensor(ends, device=generator.device, dtype=torch.int32)
    right = ends[0] if ends[0] > 0 else 0
    a, b = integers((100, 64), generator), integers((2, 64, 32), generator)
    out = grouped(a, b, offs=offs)
    numerics.check_exact(out[:right], a[:right].double() @ b[0].double(), "bfloat16")
    assert out[right:].isnan().all()
    for recipes in cases.OF_GROUPS:
        args = cases.groups(recipes, 100, 2, 32, 64, generator)
        out = scaled_groups(*args, offs=offs)
        wanted = cases.expected_of_groups(args, (right,))
        numerics.check_exact(out[:right], wanted, f"{recipes}")
        assert out[right:].isnan().all()


def test_missing_ends_are_refused(generator) -> None:
    a, b = integers((6, 64), generator), integers((2, 64, 32), generator)
    with pytest.raises(RuntimeError, match=r"\[input\].*'offs' is missing"):
        grouped(a, b)


def test_weights_of_groups_in_any_layout(generator) -> None:
    """8-bit weights must be transposed views for PyTorch; every second matrix is an assertion for
    DeepGEMM."""
    for recipes in cases.OF_GROUPS:
        args = cases.groups(recipes, 10, 2, 40, 144, generator)
        wanted, offs = cases.expected_of_groups(args, (4, 6)), torch.tensor([4, 10])
        weights = args[1]
        spaced = torch.stack([weights.mT, weights.mT], 1).flatten(0, 1)[::2].mT
        for own in (weights.contiguous(), spaced):
            args[1] = own
            out = scaled_groups(*args, offs=offs.to(generator.device))
            numerics.check_exact(out, wanted, f"{recipes}")
