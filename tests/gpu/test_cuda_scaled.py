"""scaled_matmul on a GPU: exact on small integers for every recipe, type and size, errors of random
operands against float64, layouts, NaN. Memory is full of NaN, so that what a kernel must not read
would show.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence
from typing import Any

import numerics
import pytest
import scaled_cases as cases
import torch
from scaled_cases import BLOCK_1X128, BLOCK_128X128, E4M3, ROW, TENSOR, expected, operands
from torch import Tensor

import torch_cubin  # noqa: F401  (registers the ops)
from torch_cubin._native import library
from torch_cubin._tuning import measure

pytestmark = pytest.mark.usefixtures("nan_memory")

op = torch.ops.cubin.scaled_matmul
# M, N, K: whole tiles and tails, few rows, K that is no multiple of 128, of 16, or K / 128 of 4,
# odd N (outputs without a tensor map), several waves.
SIZES = [
    (256, 512, 512), (1, 512, 1152), (7, 264, 1088), (15, 129, 100), (64, 32, 16), (300, 200, 1032),
    (130, 1, 5), (1, 1, 1), (1000, 1000, 300), (2048, 4096, 640), (2000, 4104, 512),
    (70, 8192, 256), (129, 77, 1280),
]  # fmt: skip


@pytest.mark.parametrize("recipes", cases.PAIRS, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_small_integers_are_exact(sizes, recipes, generator: torch.Generator) -> None:
    for types in cases.TYPES if recipes in cases.WHOLE else cases.TYPES[:1]:
        args = operands(*sizes, recipes, generator, types)
        bias = cases.integers((sizes[1],), generator)
        wanted, biased = expected(*args), expected(*args, bias)
        for dtype in cases.OUT_DTYPES:
            label = f"{sizes} {recipes} {types} {dtype}"
            numerics.check_exact(op(*args, output_dtype=dtype), wanted, label)
            own = bias.to(dtype)
            out = op(*args, bias=own, output_dtype=dtype)
            numerics.check_exact(out, biased, f"bias, {label}")
            if recipes in cases.WHOLE:
                out = op(*args, output_dtype=dtype, use_fast_accum=True)
                numerics.check_exact(out, wanted, f"fast, {label}")


def test_outputs_of_8_bits(generator: torch.Generator) -> None:
    """Rounded once, and saturated; rows at even and odd addresses."""
    for m, n, k in ((256, 512, 512), (7, 264, 1088), (15, 129, 100), (1000, 1000, 300)):
        for recipes in ((TENSOR, ROW), (BLOCK_1X128, BLOCK_128X128)):
            args = operands(m, n, k, recipes, generator)
            args[0].view(torch.uint8)[m // 2, k // 2] = 0x7F  # NaN
            wanted = expected(*args)
            for fast in (False, True)[: 1 + (recipes in cases.WHOLE)]:
                out = op(*args, output_dtype=E4M3, use_fast_accum=fast).float()
                right = wanted.clamp(-448, 448).to(E4M3).float()
                label = f"{m} {n} {k} {recipes} {fast}"
                assert torch.equal(out.nan_to_num(500), right.nan_to_num(500)), label


def random_operands(
    m: int, n: int, k: int, recipes: tuple[int, int], generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, int, Tensor, int]:
    def positive(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device="cuda") + 0.5

    a, b = (
        (torch.randn(rows, k, generator=generator, device="cuda") * 8).to(E4M3) for rows in (m, n)
    )
    scale_a, scale_b = (
        positive(*cases.scale_shape(recipe, rows, k))
        for recipe, rows in zip(recipes, (m, n), strict=True)
    )
    return a, b.t(), scale_a, recipes[0], scale_b, recipes[1]


def relative_error(out: Tensor, wanted: Tensor) -> float:
    return float((out.double() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())


def test_random_sizes_have_small_errors(generator: torch.Generator) -> None:
    """1.3e-4 is DeepGEMM's and cuBLASLt's error of exact recipes in float32."""
    source = random.Random(0)
    for _ in range(60):
        m, n = (source.choice([1, 3, 16, 64, 100, 128, 300, 700, 1024]) for _ in range(2))
        k, recipes = source.choice([16, 130, 512, 1152, 2048, 7168]), source.choice(cases.PAIRS)
        args = random_operands(m, n, k, recipes, generator)
        wanted = expected(*args)
        error = relative_error(op(*args, output_dtype=torch.float32), wanted)
        assert error < 2e-4, (m, n, k, recipes, error)
        if recipes in cases.WHOLE:
            fast = op(*args, output_dtype=torch.float32, use_fast_accum=True)
            assert relative_error(fast, wanted) < 5e-3, (m, n, k, recipes)


@pytest.mark.parametrize("recipes", [(TENSOR, ROW), (BLOCK_1X128, BLOCK_128X128)], ids=str)
def test_layouts(recipes, generator: torch.Generator) -> None:
    """Either operand contiguous along any dim, unaligned or with gaps; scales at odd addresses."""
    m, n, k = 70, 136, 400
    a, b, scale_a, _, scale_b, _ = args = operands(m, n, k, recipes, generator)
    wanted = expected(*args)

    def others(x: Tensor) -> list[Tensor]:
        rows, columns = x.shape
        odd = x.new_empty(rows, columns + 16)[:, 1 : columns + 1]
        gaps = x.new_empty(rows, 2 * columns)[:, ::2]
        return [odd.copy_(x), gaps.copy_(x), x.t().contiguous().t()]

    for x in others(a):
        numerics.check_exact(op(x, b, scale_a, recipes[0], scale_b, recipes[1]), wanted, "a")
    for y in others(b.t()):
        numerics.check_exact(op(a, y.t(), scale_a, recipes[0], scale_b, recipes[1]), wanted, "b")
    odd_scales = [s.new_empty(s.numel() + 1)[1:].view(s.shape).copy_(s) for s in (scale_a, scale_b)]
    out = op(a, b, odd_scales[0], recipes[0], odd_scales[1], recipes[1])
    numerics.check_exact(out, wanted, "scales")


def test_rows_of_a_larger_batch(generator: torch.Generator) -> None:
    """PyTorch's row scales at these starts: CUBLAS_STATUS_NOT_SUPPORTED (torch 2.11, an H200)."""
    for recipes in ((ROW, ROW), (BLOCK_1X128, BLOCK_128X128)):
        a, b, scale_a, _, scale_b, _ = args = operands(4096, 256, 512, recipes, generator)
        wanted = expected(*args)
        for start in (31, 1404, 2955, 3007):
            out = op(a[start:], b, scale_a[start:], recipes[0], scale_b, recipes[1])
            numerics.check_exact(out, wanted[start:], f"{recipes} {start}")


def test_block_scales_padded_as_cublas_requires(generator: torch.Generator) -> None:
    args = list(operands(64, 256, 1152, (BLOCK_1X128, BLOCK_128X128), generator))
    wanted = expected(*args)
    padded = torch.full((2, 12), torch.nan, device="cuda").t()
    padded[:9] = args[4]
    args[4] = padded
    numerics.check_exact(op(*args), wanted, "padded")


def as_quantized(args: Sequence[Any]) -> list[Any]:
    """The same with scales of 1x128 as quantize() lays them out: by rows, not along K."""
    mat_a, mat_b, *scales = args
    for i in (0, 2):
        if scales[i + 1] == BLOCK_1X128:
            scales[i] = scales[i].t().contiguous().t()
    return [mat_a, mat_b, *scales]


def test_every_kernel_is_exact(generator: torch.Generator) -> None:
    """Each one forced, for tiles and tails in every dim."""
    types, sizes = {"e4m3": E4M3, "e5m2": cases.E5M2}, (130, 0, 270)
    for kernel in library.catalog()["kernels"]:
        if kernel["family"] != "scaled" or kernel["gated"]:  # test_cuda_scaled_gated has those
            continue
        name, fast = kernel["name"], kernel["math"] == "fast"
        pairs = [(BLOCK_1X128, BLOCK_1X128)]
        if kernel["math"] != "columns":
            pairs = [(ROW, ROW), (BLOCK_1X128, BLOCK_128X128)][: 1 if fast else 2]
        for recipes in pairs:
            own = types[kernel["a"]], types[kernel["b"]]
            if recipes != (ROW, ROW) and own != (E4M3, E4M3):
                continue
            if recipes == (BLOCK_1X128, BLOCK_128X128) and kernel["grouped"] == 2:
                continue  # groups of K have scales of rows, or of 1x128
            options: dict[str, Any] = {"use_fast_accum": fast}
            if kernel["grouped"]:
                options["offs"] = torch.tensor(sizes, device="cuda").cumsum(0)
            if kernel["grouped"] == 2:
                args = cases.groups_of_k(recipes[0], len(sizes), 456, 264, 400, generator)
                calls = [(args, cases.expected_of_k(args, sizes))]
            elif kernel["grouped"]:
                # The second: several tiles a block.
                args = cases.groups(recipes, sum(sizes), len(sizes), 456, 1032, generator)
                many = cases.groups(recipes, sum(sizes), len(sizes), 12296, 512, generator)
                # The third: blocks of K from which groups with scales of blocks have another loop.
                long = [cases.groups(recipes, sum(sizes), len(sizes), 456, 4096, generator)]
                products = [args, many, *(long if kernel["math"] == "promoted" else [])]
                calls = [(each, cases.expected_of_groups(each, sizes)) for each in products]
            else:
                # The second: several tiles a block, and an even number of blocks of K.
                both = (520, 456, 1032), (2056, 2312, 512)
                products = [operands(*each, recipes, generator, own) for each in both]
                calls = [(each, expected(*each)) for each in products]
            run = torch.ops.cubin.scaled_grouped_matmul if kernel["grouped"] else op
            for args, wanted in calls:
                for each in (args, as_quantized(args)) if BLOCK_1X128 in recipes else (args,):
                    with measure.watching():
                        library.force_config(name)
                        out = run(*each, **options)
                    numerics.check_exact(out, wanted, f"{name} {recipes} {each[2].stride()}")
            assert name in {loaded["name"] for loaded in library.catalog()["loaded"]}


def test_panels_that_divide_no_tile_or_overlap(generator: torch.Generator) -> None:
    """Of tiles whose columns are no multiple of a panel, in outputs of every type and alignment."""
    kernels = [
        kernel
        for kernel in library.catalog()["kernels"]
        if kernel["family"] == "scaled" and kernel["tile"][1] % 32
    ]
    assert len(kernels) == 4  # two of each kind of sums
    for kernel, n in itertools.product(kernels, (456, 457, 200, 72)):
        args = operands(200, n, 264, (ROW, ROW), generator)
        bias = cases.integers((n,), generator)
        wanted, biased = expected(*args), expected(*args, bias)
        multiply = functools.partial(op, *args, use_fast_accum=kernel["math"] == "fast")
        with measure.watching():
            library.force_config(kernel["name"])
            for dtype in cases.OUT_DTYPES:
                label = f"{kernel['name']} {n} {dtype}"
                numerics.check_exact(multiply(output_dtype=dtype), wanted, label)
                out = multiply(bias=bias.to(dtype), output_dtype=dtype)
                numerics.check_exact(out, biased, f"bias, {label}")
            right = wanted.clamp(-448, 448).to(E4M3).float()
            assert torch.equal(multiply(output_dtype=E4M3).float(), right), f"{kernel} {n}"


def test_zero_sizes(generator: torch.Generator) -> None:
    for m, n, k in ((0, 32, 64), (32, 0, 64), (0, 0, 0)):
        assert op(*operands(m, n, k, (ROW, ROW), generator)).shape == (m, n)
    bias = torch.full((48,), 3.0, device="cuda")
    for recipes in ((TENSOR, TENSOR), (BLOCK_1X128, BLOCK_128X128)):
        args = operands(32, 48, 0, recipes, generator)
        assert op(*args).eq(0).all()
        assert op(*args, bias=bias).eq(3).all()


def test_a_row_has_the_same_bits_whatever_the_other_rows(generator: torch.Generator) -> None:
    for recipes in ((ROW, ROW), (BLOCK_1X128, BLOCK_128X128), (BLOCK_1X128, BLOCK_1X128)):
        for fast in (False, True):
            a, b, scale_a, _, scale_b, _ = random_operands(4096, 2112, 2048, recipes, generator)
            options = {"output_dtype": torch.float32, "use_fast_accum": fast}
            all_rows = op(a, b, scale_a, recipes[0], scale_b, recipes[1], **options)
            for m in (1, 16, 100, 128, 700, 2048):
                own = op(a[:m], b, scale_a[:m], recipes[0], scale_b, recipes[1], **options)
                numerics.check_bits(own, all_rows[:m], f"{recipes} {fast} {m}")


def test_nan_stays_in_its_row(generator: torch.Generator) -> None:
    a, b, *rest = operands(130, 64, 300, (ROW, ROW), generator)
    a.view(torch.uint8)[77, 299] = 0x7F
    out = op(a, b, *rest)
    assert out[77].isnan().all()
    assert not out[:77].isnan().any()
    assert not out[78:].isnan().any()


def test_a_graph_is_replayed_with_other_scales(generator: torch.Generator) -> None:
    args = operands(100, 300, 384, (BLOCK_1X128, BLOCK_128X128), generator)
    op(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op(*args)
    for _ in range(2):
        args[2].mul_(2)
        graph.replay()
        numerics.check_exact(out, expected(*args), "replayed")
