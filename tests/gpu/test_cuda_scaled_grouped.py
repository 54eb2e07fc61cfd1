"""scaled_grouped_matmul on a GPU: exact on small integers for any sizes of groups, wrong ends,
graphs, and layers of experts of 8-bit floats. Memory is full of NaN, so that what a kernel must not
read would show.
"""

from __future__ import annotations

import itertools

import grouped_options
import numerics
import pytest
import scaled_cases as cases
import torch
from scaled_cases import BLOCK_128X128, ROW
from torch import Tensor

import torch_cubin

pytestmark = pytest.mark.usefixtures("nan_memory")

op = torch.ops.cubin.scaled_grouped_matmul
RECIPES = cases.OF_GROUPS
# Sizes of groups, rows that follow them, N, K: whole tiles and tails, groups without rows, many of
# one row, more groups than threads of a block, several waves, groups of several bands of tiles, odd
# N (outputs without a tensor map).
CASES = [
    ((5, 0, 130, 17, 64), 9, 264, 272), ((0, 0, 300), 0, 130, 70), ((1,) * 70, 3, 64, 128),
    ((1000, 500, 1500), 5, 1032, 256), ((64,) * 128, 0, 512, 128), ((0,) * 40, 7, 64, 64),
    ((2600, 40), 0, 1040, 144), ((33, 31) * 40, 1, 200, 16), ((700, 0, 1), 2, 8, 1040),
    ((2, 0, 1, 1) * 300, 5, 48, 32), ((257, 255), 0, 129, 129),
]  # fmt: skip


def ends_of(sizes: tuple[int, ...], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(sizes, device="cuda").cumsum(0).to(dtype)


@pytest.mark.parametrize("recipes", RECIPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_small_integers_are_exact(case, recipes, generator: torch.Generator) -> None:
    sizes, rest, n, k = case
    rows = sum(sizes) + rest
    args = cases.groups(recipes, rows, len(sizes), n, k, generator)
    wanted = cases.expected_of_groups(args, sizes)
    for dtype in cases.OUT_DTYPES:
        for fast in (False, True) if recipes[0] == ROW else (False,):
            offs = ends_of(sizes, torch.int64 if fast else torch.int32)
            out = op(*args, offs=offs, output_dtype=dtype, use_fast_accum=fast)
            label = f"{case} {recipes} {dtype} {fast}"
            numerics.check_exact(out[: len(wanted)], wanted, label)
            assert out[len(wanted) :].isnan().all(), label  # not written


# Ends, and the number of right ones before the first wrong one.
WRONG = [((50, 40, 90), 1), ((50, 70, 101), 2), ((-1, 50, 90), 0), ((50, 1 << 30, 90), 1)]


@pytest.mark.parametrize("recipes", RECIPES, ids=str)
@pytest.mark.parametrize(("ends", "right"), WRONG)
@pytest.mark.parametrize("k", [160, 4096])  # scales of blocks have another loop for long K
def test_what_follows_a_wrong_end_is_nan(k, ends, right, recipes, generator) -> None:
    args = cases.groups(recipes, 100, 3, 200, k, generator)
    offs = torch.tensor(ends, device="cuda", dtype=torch.int32)
    sizes = (50, 20)[:right]
    wanted = cases.expected_of_groups(args, sizes) if right else args[2].new_empty(0, 200)
    out = op(*args, offs=offs)
    numerics.check_exact(out[: len(wanted)], wanted, f"{ends}")
    assert out[len(wanted) :].isnan().all()


@pytest.mark.parametrize("recipes", RECIPES, ids=str)
def test_zero_sizes(recipes, generator: torch.Generator) -> None:
    """No group ends the process in PyTorch 2.11 (SIGFPE)."""
    for sizes, n, k in (((), 64, 128), ((0, 0), 64, 128), ((4, 3), 0, 128), ((4, 3), 64, 0)):
        args = cases.groups(recipes, sum(sizes), len(sizes) or 1, n, k, generator)
        args[1], args[4] = args[1][: len(sizes)], args[4][: len(sizes)]
        out = op(*args, offs=ends_of(sizes))
        assert out.shape == (sum(sizes), n)
        assert out.eq(0).all()


@pytest.mark.parametrize(("ends", "right"), WRONG)
def test_a_wrong_end_without_k(ends, right, generator: torch.Generator) -> None:
    offs = torch.tensor(ends, device="cuda", dtype=torch.int32)
    for recipes in RECIPES:
        args = cases.groups(recipes, 100, 3, 200, 0, generator)
        out, valid = op(*args, offs=offs), (0, *ends)[right]
        assert out[:valid].eq(0).all()
        assert out[valid:].isnan().all()
    for (recipe, _), fast in itertools.product(cases.OF_K, (False, True)):
        args = cases.groups_of_k(recipe, 3, 40, 24, 0, generator)
        offs = torch.tensor([0] * right + [1] + [0] * (2 - right), device="cuda")
        out = op(*args, offs=offs, use_fast_accum=fast)
        assert out[:right].eq(0).all()
        assert out[right:].isnan().all()


def test_pytorchs_functions_are_served(generator: torch.Generator) -> None:
    a, b, a_scale, _, b_scale, _ = args = cases.groups((ROW, ROW), 96, 3, 64, 320, generator)
    a_scale, sizes, row = a_scale.view(-1), (33, 0, 63), torch.nn.functional.ScalingType.RowWise
    offs, wanted = ends_of(sizes), cases.expected_of_groups(args, sizes).bfloat16()
    options = {"offs": offs, "use_fast_accum": True}
    for serving in (torch_cubin.install(policy="all"), torch_cubin.drop_in(policy="all")):
        torch_cubin.report(reset=True)
        with serving:
            outs = [
                torch._scaled_grouped_mm(
                    a, b, a_scale, b_scale, out_dtype=torch.bfloat16, **options
                ),
                torch.nn.functional.scaled_grouped_mm(a, b, a_scale, row, b_scale, row, **options),
            ]
        report = torch_cubin.report()
        assert [(x.function, x.calls) for x in report.served] == [("aten::_scaled_grouped_mm", 2)]
        assert report.declined == ()
        assert all(torch.equal(out, wanted) for out in outs)


def test_a_graph_serves_other_sizes(generator: torch.Generator) -> None:
    args = cases.groups(RECIPES[1], 500, 4, 256, 384, generator)
    offs = ends_of((100, 100, 100, 200))
    op(*args, offs=offs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op(*args, offs=offs)
    for sizes in ((0, 0, 500, 0), (1, 2, 3, 494), (125, 125, 125, 125)):
        offs.copy_(ends_of(sizes))
        graph.replay()
        numerics.check_exact(out, cases.expected_of_groups(args, sizes), f"{sizes}")


# Sizes of groups of K, K that follows them, M, N: starts at multiples of 128, of 16 and of neither,
# also where rows begin at multiples of 128 bytes, groups without K and of one element, more than
# there are threads of a block, odd sizes.
OF_K = [
    ((128, 256, 0, 384), 0, 256, 128), ((100, 0, 37, 16, 1), 6, 136, 264), ((0, 0), 32, 64, 64),
    ((500,), 12, 8, 520), ((1,) * 70, 3, 130, 70), ((16, 48, 5, 200) * 9, 0, 384, 256),
    ((2, 0, 1, 1) * 300, 8, 3, 17), ((1000, 24, 2000), 0, 512, 1032), ((129, 127), 1, 1, 1),
    ((100, 0, 37, 16, 1, 130, 200), 28, 136, 264),
]  # fmt: skip


def of_k(case, generator: torch.Generator, recipe: int = ROW) -> tuple[list, Tensor]:
    """Arguments whose operands are NaN past the groups, and the outputs."""
    sizes, rest, m, n = case
    args = cases.groups_of_k(recipe, len(sizes), m, n, sum(sizes) + rest, generator)
    wanted = cases.expected_of_k(args, sizes)
    args[0][:, sum(sizes) :] = torch.nan
    args[1][sum(sizes) :] = torch.nan
    return args, wanted


@pytest.mark.parametrize(("recipe", "_"), cases.OF_K)
@pytest.mark.parametrize("case", OF_K, ids=lambda case: f"{len(case[0])} {case[1:]}")
def test_groups_of_k_are_exact_on_small_integers(case, recipe, _, generator) -> None:
    args, wanted = of_k(case, generator, recipe)
    for dtype in cases.OUT_DTYPES:
        for fast in (False, True):
            offs = ends_of(case[0], torch.int64 if fast else torch.int32)
            out = op(*args, offs=offs, output_dtype=dtype, use_fast_accum=fast)
            numerics.check_exact(out, wanted, f"{case} {dtype} {fast}")


def test_scales_of_other_groups_are_not_read(generator: torch.Generator) -> None:
    """Of blocks of K; a group without K is zero."""
    sizes = (0, 128, 0, 256, 100)
    args, wanted = of_k((sizes, 28, 200, 160), generator, cases.BLOCK_1X128)
    args[2][:, 0] = args[4][:, 3] = torch.inf
    out = op(*args, offs=ends_of(sizes))
    numerics.check_exact(out[[0, 2, 3]], wanted[[0, 2, 3]])


@pytest.mark.parametrize("rest", [3, 15])  # with 15, rows begin at multiples of 128 bytes
def test_a_groups_nan_stays_its_own(rest: int, generator: torch.Generator) -> None:
    args, wanted = of_k(((100, 37, 60, 300), rest, 256, 128), generator)
    args[0][:, 100:137] = torch.nan
    args[1][197:497] = torch.nan
    for fast in (False, True):
        out = op(*args, offs=ends_of((100, 37, 60, 300)), use_fast_accum=fast)
        assert out[1].isnan().all()
        assert out[3].isnan().all()
        numerics.check_exact(out[::2], wanted[::2], f"{fast}")


@pytest.mark.parametrize(("ends", "right"), WRONG)
def test_outputs_from_a_wrong_end_on_are_nan(ends, right, generator: torch.Generator) -> None:
    args, wanted = of_k(((50, 20, 30), 0, 200, 160), generator)
    for fast in (False, True):
        offs = torch.tensor(ends, device="cuda")
        out = op(*args, offs=offs, use_fast_accum=fast)
        numerics.check_exact(out[:right], wanted[:right], f"{ends}")
        assert out[right:].isnan().all()


def test_a_graph_serves_other_groups_of_k(generator: torch.Generator) -> None:
    args, _ = of_k(((512,) * 4, 0, 384, 256), generator)
    offs = ends_of((512,) * 4)
    op(*args, offs=offs, use_fast_accum=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [op(*args, offs=offs, use_fast_accum=fast) for fast in (False, True)]
    for sizes in ((0, 0, 2048, 0), (1, 2, 3, 2042), (700, 5, 900, 443)):
        offs.copy_(ends_of(sizes))
        graph.replay()
        for fast, out in zip((False, True), outs, strict=True):
            assert torch.equal(out, op(*args, offs=offs, use_fast_accum=fast))


def test_pytorchs_function_of_groups_of_k_is_served(generator: torch.Generator) -> None:
    args, wanted = of_k(((48, 0, 112), 0, 96, 64), generator)
    a, b, a_scale, _, b_scale, _ = args
    options = {"offs": ends_of((48, 0, 112)), "out_dtype": torch.bfloat16, "use_fast_accum": True}
    scales = a_scale.reshape(-1), b_scale.reshape(-1)
    theirs = torch._scaled_grouped_mm(a, b, *scales, **options)
    for serving in (torch_cubin.install(policy="all"), torch_cubin.drop_in(policy="all")):
        torch_cubin.report(reset=True)
        with serving:
            out = torch._scaled_grouped_mm(a, b, *scales, **options)
        assert [x.function for x in torch_cubin.report().served] == ["aten::_scaled_grouped_mm"]
        assert torch.equal(out, wanted.bfloat16())
        assert torch.equal(out, theirs)


def test_a_rows_bits_do_not_depend_on_the_other_groups(generator: torch.Generator) -> None:
    for recipes in RECIPES:
        args = cases.groups(recipes, 700, 3, 512, 640, generator)
        args[2] = torch.rand_like(args[2]) + 0.5
        out = op(*args, offs=ends_of((300, 77, 323)))
        a, b, a_scale, a_recipe, b_scale, b_recipe = args
        own = op(a[300:377], b[1:2], a_scale[300:377], a_recipe, b_scale[1:2], b_recipe,
                 offs=ends_of((77,)))  # fmt: skip
        assert torch.equal(out[300:377], own)


@pytest.mark.parametrize("blocks", [False, True])
def test_options(blocks: bool) -> None:
    every = grouped_options.OPTIONS
    for options in (every, ("rows", "scale"), ("bias", "activation"), ("bias", "out_rows")):
        args, given, wide = cases.call_with_options(options, blocks, "cuda")
        want, stored = grouped_options.expected(*wide)
        for dtype, limit in ((torch.float32, 1e-3), (torch.bfloat16, 0.02)):
            out = torch_cubin.ops.scaled_grouped_matmul(*args, **given, output_dtype=dtype)
            assert out.dtype == dtype
            own = out[stored].double()
            torch.testing.assert_close(own, want[stored], rtol=limit, atol=limit, msg=str(options))
    given["bias"] += 1000.0
    del given["out_rows"]
    out = torch_cubin.ops.scaled_grouped_matmul(*args, **given, output_dtype=torch.float8_e4m3fn)
    assert out[:138].float().eq(448).all()


@pytest.mark.parametrize(
    "sizes", [(1, 8, 2, 256, 128), (300, 16, 4, 384, 200), (2000, 64, 8, 512, 96)], ids=str
)
def test_a_layer_of_experts(sizes, generator: torch.Generator) -> None:
    tokens, experts, k, hidden, inner = sizes
    made = {"generator": generator, "device": "cuda"}
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16, **made)
    ids = torch.rand(tokens, experts + 1, **made).argsort(-1)[:, :k]  # `experts`: no expert's
    weights = torch.rand(tokens, k, **made)
    wide, layer = [], {}
    for name, shape in (("w13", (2 * inner, hidden)), ("w2", (hidden, inner))):
        parts = [
            torch.ops.cubin.quantize(torch.randn(shape, **made) * shape[1] ** -0.5, BLOCK_128X128)
            for _ in range(experts)
        ]
        layer[name] = torch.stack([data for data, _ in parts])
        layer[f"{name}_scale"] = torch.stack([scale.t() for _, scale in parts])
        scale = layer[f"{name}_scale"].repeat_interleave(128, 1).repeat_interleave(128, 2)
        wide.append(layer[name].double() * scale[:, : shape[0], : shape[1]])
    with torch.no_grad():
        out, again = (torch_cubin.moe(x, ids, weights, **layer) for _ in range(2))
    right = torch.zeros(tokens, hidden, dtype=torch.float64, device="cuda")
    for expert in range(experts):
        token, place = torch.where(ids == expert)
        gate, up = (x[token].double() @ wide[0][expert].t()).chunk(2, -1)
        own = (torch.nn.functional.silu(gate) * up) @ wide[1][expert].t()
        right.index_add_(0, token, own * weights[token, place, None].double())
    error = (out.double() - right).norm() / right.norm()
    assert error < 0.07  # rows are rounded to 8 bits twice
    assert torch.equal(out, again)
