"""drop_in() serves torch._scaled_mm and F.scaled_mm, and leaves what has no kernel to PyTorch."""

from __future__ import annotations

import contextlib
import functools

import pytest
import scaled_cases as cases
import torch
import torch.nn.functional as F
from scaled_cases import BLOCK_1X128, BLOCK_128X128, E4M3, ROW, TENSOR, expected, operands

import torch_cubin
from torch_cubin import ops

ONE = torch.ones(())
SEVERAL = "several scales of an operand"
NAMES = ("scale_a", "recipe_a", "swizzle_a", "scale_b", "recipe_b", "swizzle_b")


def served(call):
    """The result in drop_in(), and the functions that were served and left."""
    torch_cubin.report(reset=True)
    with torch_cubin.drop_in():
        out = call()
    report = torch_cubin.report()
    return out, [row.function for row in report.served], [row.reason for row in report.declined]


def case(m: int, n: int, k: int, recipes: tuple[int, int]):
    return operands(m, n, k, recipes, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("recipes", [(TENSOR, TENSOR), (ROW, ROW), *cases.BLOCKS], ids=str)
def test_scaled_mm(recipes) -> None:
    """K / 128 is no multiple of 4, for which PyTorch's _scaled_mm has wrong numbers (torch 2.11,
    an H200) or needs padded scales."""
    a, b, scale_a, _, scale_b, _ = args = case(32, 384, 1152, recipes)
    wanted = expected(*args).bfloat16()
    recipe_a, recipe_b = map(F.ScalingType, recipes)
    out, own, left = served(lambda: F.scaled_mm(a, b, scale_a, recipe_a, scale_b, recipe_b))
    assert (own, left) == (["torch._scaled_mm_v2"], [])
    assert torch.equal(out, wanted)
    scales = {
        TENSOR: lambda s: s, ROW: lambda s: s.view(-1, 1),
        BLOCK_1X128: lambda s: s, BLOCK_128X128: lambda s: s.t(),
    }  # fmt: skip
    first, second = scales[recipes[0]](scale_a), scales[recipes[1]](scale_b).t()
    call = lambda: torch._scaled_mm(a, b, first, second, out_dtype=torch.bfloat16)  # noqa: E731
    out, own, left = served(call)
    assert (own, left) == (["torch._scaled_mm"], [])
    assert torch.equal(out, wanted)


def test_options_and_a_compiled_call() -> None:
    a, b, scale_a, _, scale_b, _ = args = case(32, 64, 256, (TENSOR, TENSOR))
    bias = torch.ones(64)
    options = {"bias": bias, "out_dtype": torch.float32, "use_fast_accum": True}

    def call():
        return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, **options)

    for function in (call, torch.compile(call, backend="eager", fullgraph=True)):
        out, own, left = served(function)
        assert (own, left) == (["torch._scaled_mm"], [])
        assert torch.equal(out, expected(*args, bias).float())


def test_outputs_of_8_bits() -> None:
    """The default of torch._scaled_mm; with a scale it is left to PyTorch."""
    a, b, scale_a, _, scale_b, _ = args = case(32, 64, 256, (TENSOR, TENSOR))
    out, own, left = served(lambda: torch._scaled_mm(a, b, scale_a, scale_b))
    assert (own, left) == (["torch._scaled_mm"], [])
    assert torch.equal(out.float(), expected(*args).clamp(-448, 448).to(E4M3).float())
    out, own, left = served(lambda: torch._scaled_mm(a, b, scale_a, scale_b, scale_result=ONE))
    assert out.dtype == E4M3
    assert (own, left) == ([], ["argument scale_result"])


def test_other_forms_of_the_calls() -> None:
    """Keywords and the dtypes' default are served; destinations and lists are left, and right."""
    a, b, scale_a, _, scale_b, _ = args = case(32, 64, 256, (TENSOR, TENSOR))
    wanted, dtype = expected(*args), torch.bfloat16
    v2, lists = torch._scaled_mm_v2, ([scale_a], [TENSOR], [], [scale_b], [TENSOR], [])
    tensor, plain = F.ScalingType.TensorWise, F.SwizzleType.NO_SWIZZLE
    recipes = (scale_a, tensor, scale_b, tensor)
    destination = a.new_empty(32, 64, dtype=dtype)
    for call in (
        lambda: v2(a, b, *lists, bias=None, out_dtype=dtype),
        lambda: v2(
            input=a, mat2=b, **dict(zip(NAMES, lists, strict=True)), bias=None, out_dtype=dtype
        ),
        lambda: F.scaled_mm(a, b, *recipes, plain, [plain]),
        lambda: F.scaled_mm(a, b, [scale_a], [tensor], [scale_b], [tensor]),
        lambda: torch._scaled_mm(a, mat2=b, scale_b=scale_b, scale_a=scale_a, out_dtype=dtype),
        lambda: torch._scaled_mm(a, b, scale_a, scale_b, None, None, dtype, True),
    ):
        out, own, left = served(call)
        assert (len(own), left) == (1, [])
        assert torch.equal(out, wanted.to(dtype))
    out, own, left = served(lambda: F.scaled_mm(a, b, *recipes, output_dtype=None))
    assert (len(own), left, out.dtype) == (1, [], E4M3)
    for call, reason in (
        (lambda: v2(a, b, *lists, None, dtype, out=destination), "out= was given"),
        (
            lambda: torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=dtype, out=destination),
            "out= was given",
        ),
        (
            lambda: F.scaled_mm(a, b, *recipes, contraction_dim=(1, 0)),
            "argument contraction_dim",
        ),
    ):
        out, own, left = served(call)
        assert (own, left) == ([], [reason])
        assert torch.equal(out, wanted.to(dtype))
    for change, reason in (
        ({"recipe_a": [TENSOR] * 2, "scale_a": [scale_a] * 2}, SEVERAL),
        ({"scale_a": [], "recipe_a": []}, SEVERAL),
        ({"swizzle_a": [1]}, "swizzled scales"),
        ({"recipe_a": [3], "recipe_b": [3]}, "scales that it does not take"),
        ({"recipe_a": [ROW], "scale_a": [torch.ones(4, 8)]}, "scales that it does not take"),
    ):
        given = dict(zip(NAMES, lists, strict=True)) | change
        torch_cubin.report(reset=True)
        with torch_cubin.drop_in(), contextlib.suppress(RuntimeError, ValueError):
            v2(a, b, **given, bias=None, out_dtype=dtype)
        assert [row.reason for row in torch_cubin.report().declined] == [reason]


def error_of(call) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


SHAPES = [
    (), (1,), (1, 1), (1, 1, 1), (6,), (6, 1), (1, 6), (2, 3), (6, 1, 1),
    (5,), (5, 1), (1, 5), (8, 1), (6, 5), (5, 6), (6, 8), (30,),
]  # fmt: skip


@pytest.mark.parametrize("recipe", [TENSOR, ROW, BLOCK_1X128, BLOCK_128X128])
def test_scales_are_served_where_the_op_takes_them(recipe) -> None:
    """Their rule stands in C++ (scale_fits), and again in Python, which torch.compile reads."""
    other = ROW if recipe in (TENSOR, ROW) else BLOCK_128X128
    a, b, _, _, scale_b, _ = case(6, 144, 640, (recipe, other))
    answers = set()
    for shape in SHAPES:
        scale = torch.ones(shape)
        call = functools.partial(ops.scaled_matmul, a, b, scale, recipe, scale_b, other)
        refused = "has a shape that its recipe does not have" in error_of(call)
        wanted = ["scales that it does not take"] if refused else []
        lists = dict(zip(NAMES, ([scale], [recipe], [0], [scale_b], [other], [0]), strict=True))
        torch_cubin.report(reset=True)
        with torch_cubin.drop_in(), contextlib.suppress(RuntimeError, ValueError, IndexError):
            torch._scaled_mm_v2(a, b, **lists, bias=None, out_dtype=torch.bfloat16)
        assert [row.reason for row in torch_cubin.report().declined] == wanted, shape
        answers.add(refused)
    assert answers == {True, False}


def test_arguments_that_require_grad_are_left() -> None:
    """PyTorch's result has a gradient that raises in backward(), if anybody calls it."""
    a, b, scale_a, _, scale_b, _ = case(32, 64, 256, (TENSOR, TENSOR))
    bias = torch.ones(64, dtype=torch.bfloat16, requires_grad=True)
    options = {"bias": bias, "out_dtype": torch.bfloat16}
    out, own, left = served(lambda: torch._scaled_mm(a, b, scale_a, scale_b, **options))
    assert (own, left) == ([], ["arguments that require grad"])
    assert out.requires_grad
    with torch.no_grad():
        _, own, left = served(lambda: torch._scaled_mm(a, b, scale_a, scale_b, **options))
    assert (own, left) == (["torch._scaled_mm"], [])


def test_errors_are_pytorchs() -> None:
    a, b, _, _, scale_b, _ = case(32, 64, 256, (TENSOR, TENSOR))
    with pytest.raises((RuntimeError, ValueError)) as error:
        served(lambda: torch._scaled_mm(a, b, torch.ones(3), scale_b, out_dtype=torch.bfloat16))
    assert "torch_cubin" not in str(error.value)


def test_groups() -> None:
    """Scales of rows, in both forms; other scales are PyTorch's, which refuses them on the CPU."""
    generator, sizes = torch.Generator().manual_seed(0), (3, 0, 20)
    args = cases.groups((ROW, ROW), 32, 3, 48, 160, generator)
    a, b, scale_a, _, scale_b, _ = args
    scale_a = scale_a.view(-1)
    offs = torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    wanted = cases.expected_of_groups(args, sizes).bfloat16()
    out, own, left = served(
        lambda: torch._scaled_grouped_mm(
            a, b, scale_a, scale_b, offs=offs, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    )
    assert (own, left) == (["torch._scaled_grouped_mm"], [])
    assert torch.equal(out[: sum(sizes)], wanted)
    rows = F.ScalingType.RowWise
    out, own, left = served(
        lambda: F.scaled_grouped_mm(a, b, scale_a, rows, scale_b, rows, offs=offs)
    )
    assert (own, left) == (["torch._scaled_grouped_mm_v2"], [])
    assert torch.equal(out[: sum(sizes)], wanted)
    for options, reason in (
        ({"offs": offs, "out_dtype": torch.float32}, "dtypes that it does not take"),
        ({"offs": offs[:2], "out_dtype": torch.bfloat16}, "shapes that it does not take"),
        ({"out_dtype": torch.bfloat16}, "offs that it does not take"),
    ):
        torch_cubin.report(reset=True)
        with torch_cubin.drop_in(), pytest.raises((RuntimeError, ValueError)):
            torch._scaled_grouped_mm(a, b, scale_a, scale_b, **options)
        assert [row.reason for row in torch_cubin.report().declined] == [reason]
