"""Operands of scaled_matmul with scales of every recipe, and the expected result in float64."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import grouped_options
import torch
from torch import Tensor

from torch_cubin import ops

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TENSOR, ROW, BLOCK_1X128, BLOCK_128X128 = 0, 1, 4, 5  # torch.nn.functional.ScalingType's numbers
WHOLE = list(itertools.product((TENSOR, ROW), repeat=2))
BLOCKS = list(itertools.product((BLOCK_1X128, BLOCK_128X128), repeat=2))
PAIRS = [*WHOLE, *BLOCKS]
OF_GROUPS = [(ROW, ROW), (BLOCK_1X128, BLOCK_128X128)]
OF_K = [(ROW, ROW), (BLOCK_1X128, BLOCK_1X128)]  # of groups that divide K
TYPES = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)]
OUT_DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def scale_shape(recipe: int, rows: int, k: int) -> tuple[int, ...]:
    blocks = -(-k // 128)
    return {
        TENSOR: (),
        ROW: (rows, 1),
        BLOCK_1X128: (rows, blocks),
        BLOCK_128X128: (blocks, -(-rows // 128)),
    }[recipe]


def scales_of_elements(scale: Tensor, recipe: int, rows: int, k: int) -> Tensor:
    """(rows, k) or what broadcasts to it."""
    if recipe == TENSOR:
        return scale.reshape(1, 1)
    if recipe == ROW:
        return scale.reshape(rows, 1)
    if recipe == BLOCK_128X128:
        scale = scale.t().repeat_interleave(128, 0)[:rows]
    return scale.repeat_interleave(128, 1)[:, :k]


def expected(
    mat_a: Tensor,
    mat_b: Tensor,
    scale_a: Tensor,
    recipe_a: int,
    scale_b: Tensor,
    recipe_b: int,
    bias: Tensor | None = None,
) -> Tensor:
    (m, k), n = mat_a.shape, mat_b.shape[1]
    a = mat_a.double() * scales_of_elements(scale_a.double(), recipe_a, m, k)
    b = mat_b.t().double() * scales_of_elements(scale_b.double(), recipe_b, n, k)
    return a @ b.t() + (0 if bias is None else bias.double())


def integers(shape: tuple[int, ...], generator: torch.Generator, most: int = 3) -> Tensor:
    return torch.randint(
        -most, most + 1, shape, generator=generator, device=generator.device
    ).float()


def powers(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Powers of two, so that products with them are exact; of a permuted layout if 2-D."""
    exponents = torch.randint(-1, 2, shape[::-1], generator=generator, device=generator.device)
    return torch.exp2(exponents.float()).permute(tuple(reversed(range(len(shape)))))


def operands(
    m: int,
    n: int,
    k: int,
    recipes: tuple[int, int],
    generator: torch.Generator,
    types: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3),
) -> tuple[Tensor, Tensor, Tensor, int, Tensor, int]:
    """Small integers and powers of two: sums that float32 holds exactly."""
    a = integers((m, k), generator).to(types[0])
    b = integers((n, k), generator).to(types[1])
    scale_a = powers(scale_shape(recipes[0], m, k), generator)
    scale_b = powers(scale_shape(recipes[1], n, k), generator)
    return a, b.t(), scale_a, recipes[0], scale_b, recipes[1]


def groups(
    recipes: tuple[int, int], rows: int, count: int, n: int, k: int, generator: torch.Generator
) -> list[Any]:
    """What scaled_grouped_matmul takes, but the ends: `count` matrices for groups of `rows` rows
    together; sums that float32 holds exactly."""
    a, b, scale_a, _, _, _ = operands(rows, count * n, k, recipes, generator)
    scales = [powers(scale_shape(recipes[1], n, k), generator) for _ in range(count)]
    scale_b = torch.stack(scales).squeeze(-1) if recipes[1] == ROW else torch.stack(scales)
    of_groups = b.t().view(count, n, k).mT
    return [a, of_groups, scale_a, recipes[0], scale_b, recipes[1]]


def expected_of_groups(args: list[Any], sizes: Sequence[int]) -> Tensor:
    """Of the rows of groups, in float64."""
    a, b, scale_a, recipe_a, scale_b, recipe_b = args
    ends = list(itertools.accumulate(sizes))
    parts = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    return torch.cat(
        [
            expected(a[rows], b[group], scale_a[rows], recipe_a, scale_b[group], recipe_b)
            for group, rows in enumerate(parts)
        ]
    )


def groups_of_k(
    recipe: int, count: int, m: int, n: int, k: int, generator: torch.Generator
) -> list[Any]:
    """The same for `count` groups that divide K."""
    a, b = (integers((rows, k), generator).to(E4M3) for rows in (m, n))
    second = -(-k // 128)
    scales = [
        powers((count, rows) if recipe == ROW else (rows, second), generator) for rows in (m, n)
    ]
    return [a, b.t(), scales[0], recipe, scales[1], recipe]


def expected_of_k(args: list[Any], sizes: Sequence[int]) -> Tensor:
    """(groups, M, N), in float64."""
    a, b, scale_a, recipe, scale_b, _ = args
    wide, scales = [a.double(), b.t().double()], [scale_a.double(), scale_b.double()]
    if recipe == BLOCK_1X128:
        wide = [
            x * scales_of_elements(scale, recipe, *x.shape)
            for x, scale in zip(wide, scales, strict=True)
        ]
    rest = a.shape[1] - sum(sizes)
    parts = zip(*(x.split([*sizes, rest], 1) for x in wide), strict=True)
    outs = torch.stack([x @ y.t() for x, y in list(parts)[:-1]])
    if recipe == ROW:
        outs = outs * scales[0][:, :, None] * scales[1][:, None]
    return outs


def gated_by_steps(
    args: list[Tensor],
    dtype: torch.dtype,
    power_of_two: bool = False,
    between: Callable[[Tensor], Tensor] = lambda product: product,
    **offs: Tensor,
) -> tuple[Tensor, Tensor]:
    """What scaled_gated_matmul is, by the ops that it consists of; `between` copies the product."""
    a, b, a_scale, b_scale = args
    multiply = ops.scaled_grouped_matmul if offs else ops.scaled_matmul
    product = multiply(
        a, b, a_scale, BLOCK_1X128, b_scale, BLOCK_128X128, output_dtype=dtype, **offs
    )
    return ops.quantize(between(product), BLOCK_1X128, gate="silu", power_of_two=power_of_two)


def call_with_options(options: tuple[str, ...], blocks: bool, device: str = "cpu") -> Any:
    """Operands, keyword arguments, and both in float64 of the numbers that the operands are."""
    source = random.Random(f"{options} {blocks}")
    made = {"options": options, "dtype": torch.float32, "device": device}
    (a, b), given = grouped_options.draw(source, sizes=(3, 0, 130, 5), k=272, n=72, rest=2, **made)
    recipes = (BLOCK_1X128, BLOCK_128X128) if blocks else (ROW, ROW)
    data, scale = torch.ops.cubin.quantize(a, recipes[0])
    parts = [torch.ops.cubin.quantize(each.t(), recipes[1]) for each in b]
    weights = torch.stack([own for own, _ in parts])
    scales = torch.stack([own for _, own in parts])

    def whole(data: Tensor, scale: Tensor) -> Tensor:
        k = scale.repeat_interleave(128, -1) if blocks else scale
        return data.double() * k[..., : data.shape[-2], : data.shape[-1]]

    wide_b = whole(weights, scales.mT.repeat_interleave(128, -2) if blocks else scales)
    wide = {name: x.double() if torch.is_tensor(x) and x.is_floating_point() else x
            for name, x in given.items()}  # fmt: skip
    own_scales = (scale, scales) if blocks else (scale.view(-1), scales.squeeze(-1))
    args = [data, weights.mT, own_scales[0], recipes[0], own_scales[1], recipes[1]]
    return args, given, (whole(data, scale), wide_b.mT, wide)
