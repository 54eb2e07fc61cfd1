"""Randomised differential tests of scaled_matmul, scaled_grouped_matmul and quantize against
float64 of the dequantised operands.

Sizes, recipes, types, layouts, addresses, scales, bias and outputs are drawn. Half of the products
hold small integers and must come out bit-exact; the errors of the others are compared with the
roundings that they may have. A failure prints the seed and the case.
"""

from __future__ import annotations

import random

import numerics
import pytest
import scaled_cases as cases
import torch
import torch.nn.functional as F
from gpu.seeds import seeds
from torch import Tensor

import torch_cubin  # noqa: F401  (registers the ops)

pytestmark = pytest.mark.usefixtures("nan_memory")

CASES = 50  # a seed and test
M = (1, 2, 7, 15, 16, 33, 64, 100, 128, 129, 200, 300, 520)
N = (1, 8, 16, 31, 64, 100, 128, 136, 264, 300, 520, 1000)
K = (1, 5, 16, 64, 100, 127, 128, 129, 256, 300, 640, 1088, 1152)
LAYOUTS = ("dense", "dense", "transposed", "wide", "shifted")


def placed(x: Tensor, layout: str) -> Tensor:
    """The same matrix with other strides, or an address that is no multiple of 16 bytes."""
    if layout == "transposed":
        return x.t().contiguous().t()
    before, after = {"dense": (0, 0), "wide": (0, 16), "shifted": (3, 2)}[layout]
    wide = x.new_empty(x.shape[0], before + x.shape[1] + after)
    return wide[:, before : before + x.shape[1]].copy_(x)


def scale_of(recipe: int, rows: int, k: int, exact: bool, generator: torch.Generator) -> Tensor:
    shape = cases.scale_shape(recipe, rows, k)
    if exact:
        return cases.powers(shape, generator)
    return torch.rand(shape, generator=generator, device="cuda") + 0.5


@pytest.mark.parametrize("seed", seeds(4))
def test_random_products(seed: int) -> None:
    source, generator = random.Random(seed), torch.Generator("cuda").manual_seed(seed)
    for index in range(CASES):
        m, n, k = source.choice(M), source.choice(N), source.choice(K)
        recipes, exact = source.choice(cases.PAIRS), source.random() < 0.5
        types = source.choice(cases.TYPES) if recipes in cases.WHOLE else cases.TYPES[0]
        layouts, dtype = source.choices(LAYOUTS, k=2), source.choice(cases.OUT_DTYPES)
        fast, biased = source.random() < 0.3, source.random() < 0.3
        operands = []
        for rows, type_, layout in zip((m, n), types, layouts, strict=True):
            if exact:
                x = cases.integers((rows, k), generator)
            else:
                x = torch.randn(rows, k, generator=generator, device="cuda") * 8
            operands.append(placed(x.to(type_), layout))
        scales = [
            scale_of(recipe, rows, k, exact, generator)
            for recipe, rows in zip(recipes, (m, n), strict=True)
        ]
        if source.random() < 0.3:  # at an address that is a multiple of 4 bytes alone
            scales = [F.pad(s.reshape(-1), (1, 0))[1:].view(s.shape) for s in scales]
        bias = cases.integers((n,), generator).to(dtype) if biased else None
        args = (operands[0], operands[1].t(), scales[0], recipes[0], scales[1], recipes[1])
        out = torch.ops.cubin.scaled_matmul(
            *args, bias=bias, output_dtype=dtype, use_fast_accum=fast
        )
        wanted = cases.expected(*args, bias)
        label = f"seed {seed}, case {index}: {m} {n} {k} {recipes} {types} {layouts} {dtype} {fast}"
        if exact:
            numerics.check_exact(out, wanted, label)
        else:
            squares = cases.expected(*map(squared, args))
            check_rounding(out, wanted, squares, fast, label)


def squared(x: Tensor | int) -> Tensor | int:
    """Of operands and scales; recipes stay."""
    return x.float().square() if isinstance(x, Tensor) else x


def check_rounding(out: Tensor, wanted: Tensor, squares: Tensor, fast: bool, label: str) -> None:
    """Tensor cores add with 14 bits of the largest addend: a part of K, or all of it."""
    typical = squares.mean().sqrt()  # of a sum of addends with random signs
    error = (out.double() - wanted).square().mean().sqrt()
    limit = (1e-2 if fast else 1e-3) * typical + torch.finfo(out.dtype).eps * wanted.abs().max()
    assert error <= limit, label


@pytest.mark.parametrize("seed", seeds(2))
def test_random_groups(seed: int) -> None:
    """Groups of any sizes, with and without rows behind them, of matrices that need not follow one
    another."""
    source, generator = random.Random(seed), torch.Generator("cuda").manual_seed(seed)
    for index in range(CASES):
        sizes = source.choices([0, 0, 1, 3, 16, 64, 100, 128, 257], k=source.randint(1, 24))
        rest, n, k = source.choice([0, 0, 5, 200]), source.choice(N), source.choice(K)
        recipes, exact = source.choice(cases.OF_GROUPS), source.random() < 0.5
        layouts, dtype = source.choices(LAYOUTS, k=2), source.choice(cases.OUT_DTYPES)
        fast = recipes == (cases.ROW, cases.ROW) and source.random() < 0.5
        args = cases.groups(recipes, sum(sizes) + rest, len(sizes), n, k, generator)
        if not exact:
            for place in (0, 1):
                x = torch.randn(args[place].mT.shape, generator=generator, device="cuda") * 8
                args[place] = x.to(cases.E4M3).mT
            for place in (2, 4):
                scale = torch.rand(args[place].shape, generator=generator, device="cuda")
                args[place] = scale + 0.5
        args[0] = placed(args[0], layouts[0])
        args[1] = placed(args[1].mT.reshape(-1, k), layouts[1]).unflatten(0, (-1, n)).mT
        if source.random() < 0.3:  # scales at addresses that are multiples of 4 bytes alone
            for place in (2, 4):
                own = args[place]
                args[place] = F.pad(own.reshape(-1), (1, 0))[1:].view(own.shape)
        if source.random() < 0.3:  # every second matrix
            spaced = torch.stack([args[1].mT, args[1].mT], 1).flatten(0, 1)[::2]
            args[1] = spaced.mT
        type_of_ends = source.choice([torch.int32, torch.int64])
        offs = torch.tensor(sizes, device="cuda").cumsum(0).to(type_of_ends)
        out = torch.ops.cubin.scaled_grouped_matmul(
            *args, offs=offs, output_dtype=dtype, use_fast_accum=fast
        )
        label = f"seed {seed}, case {index}: {sizes} {rest} {n} {k} {recipes} {layouts} {dtype} "
        label += str(fast)
        own, wanted = out[: sum(sizes)], cases.expected_of_groups(args, sizes)
        if exact:
            numerics.check_exact(own, wanted, label)
        elif len(own):
            squares = cases.expected_of_groups([squared(x) for x in args], sizes)
            check_rounding(own, wanted, squares, fast, label)
        assert out[len(own) :].isnan().all(), label  # not written


@pytest.mark.parametrize("seed", seeds(1))
def test_random_groups_of_k(seed: int) -> None:
    source, generator = random.Random(seed), torch.Generator("cuda").manual_seed(seed)
    for index in range(CASES):
        sizes = source.choices([0, 0, 1, 3, 16, 64, 100, 128, 257], k=source.randint(1, 24))
        m, n, rest = source.choice(M), source.choice(N), source.choice([1, 5, 200])
        (recipe, _), exact = source.choice(cases.OF_K), source.random() < 0.5
        layouts, dtype = source.choices(LAYOUTS, k=2), source.choice(cases.OUT_DTYPES)
        fast = recipe == cases.ROW and source.random() < 0.5
        args = cases.groups_of_k(recipe, len(sizes), m, n, sum(sizes) + rest, generator)
        if not exact:
            for place in (0, 1):
                x = torch.randn(args[place].shape, generator=generator, device="cuda") * 8
                args[place] = x.to(cases.E4M3)
            for place in (2, 4):
                args[place] = args[place] * 0.7
        args[0] = placed(args[0], layouts[0])
        args[1] = placed(args[1].t(), layouts[1]).t()
        type_of_ends = source.choice([torch.int32, torch.int64])
        offs = torch.tensor(sizes, device="cuda").cumsum(0).to(type_of_ends)
        out = torch.ops.cubin.scaled_grouped_matmul(
            *args, offs=offs, output_dtype=dtype, use_fast_accum=fast
        )
        label = f"seed {seed}, case {index}: {sizes} {rest} {m} {n} {recipe} {layouts} {dtype} "
        label += str(fast)
        wanted = cases.expected_of_k(args, sizes)
        if exact:
            numerics.check_exact(out, wanted, label)
        else:
            squares = cases.expected_of_k([squared(x) for x in args], sizes)
            check_rounding(out, wanted, squares, fast, label)


@pytest.mark.parametrize("seed", seeds(2))
def test_random_quantisations(seed: int) -> None:
    """The largest magnitude of each block becomes the largest number, others are within a half
    step; data and scales are the bits that the CPU's definition has."""
    source, generator = random.Random(seed), torch.Generator("cuda").manual_seed(seed)
    for index in range(CASES):
        rows, columns = source.choice(M), source.choice((*K, *N))
        recipe, transpose = source.choice(
            [(1, False), (4, False), (4, True), (5, False), (5, True)]
        )
        x = torch.randn(rows, columns, generator=generator, device="cuda")
        x *= torch.exp2(torch.randint(-40, 40, (rows, 1), generator=generator, device="cuda"))
        dtype = source.choice([torch.bfloat16, torch.float32])
        options = {
            "transpose": transpose,
            "power_of_two": source.random() < 0.3,
            "dtype": source.choice([torch.float8_e4m3fn, torch.float8_e5m2]),
        }
        own = placed(x.to(dtype), source.choice(LAYOUTS))
        data, scale = torch.ops.cubin.quantize(own, recipe, **options)
        wanted, wanted_scale = torch.ops.cubin.quantize(own.cpu(), recipe, **options)
        label = f"seed {seed}, case {index}: {rows} {columns} {recipe} {dtype} {options}"
        numerics.check_bits(data.cpu().view(torch.int8), wanted.view(torch.int8), label)
        numerics.check_bits(scale.cpu(), wanted_scale, label)
