"""cubin::scaled_grouped_matmul on the CPU: its reference, checks and rules."""

from __future__ import annotations

import itertools
from typing import Any

import grouped_options
import pytest
import torch
from scaled_cases import call_with_options
from torch import Tensor

import torch_cubin

op = torch_cubin.ops.scaled_grouped_matmul
raw = torch.ops.cubin._scaled_grouped_matmul
ROW, BLOCK_1X128, BLOCK_128X128 = 1, 4, 5
# Not test_schema, which compares arguments, and PyTorch cannot compare 8-bit floats on the CPU.
CHECKS = ("test_autograd_registration", "test_faketensor")
SIZES = [3, 0, 5]
M, N, K = sum(SIZES) + 2, 130, 272


def arguments(blocks: bool) -> list[Any]:
    """Without the ends."""
    torch.manual_seed(0)
    recipes = (BLOCK_1X128, BLOCK_128X128) if blocks else (ROW, ROW)
    a, a_scale = torch.ops.cubin.quantize(torch.randn(M, K), recipes[0])
    parts = [torch.ops.cubin.quantize(torch.randn(N, K), recipes[1]) for _ in SIZES]
    b = torch.stack([data for data, _ in parts]).mT
    b_scale = torch.stack([s if blocks else s.view(-1) for _, s in parts])
    return [a, b, a_scale if blocks else a_scale.view(-1), recipes[0], b_scale, recipes[1]]


def ends(dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(SIZES).cumsum(0).to(dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("blocks", [False, True])
def test_each_group_is_a_product_of_its_own(blocks: bool, dtype: torch.dtype) -> None:
    a, b, a_scale, a_recipe, b_scale, b_recipe = args = arguments(blocks)
    out = op(*args, offs=ends(dtype), output_dtype=torch.float32)
    start = 0
    for group, size in enumerate(SIZES):
        rows = slice(start, start + size)
        own = (a[rows], b[group], a_scale[rows], a_recipe, b_scale[group], b_recipe)
        right = torch_cubin.ops.scaled_matmul(*own, output_dtype=torch.float32)
        torch.testing.assert_close(out[rows], right)
        start += size


def arguments_of_k() -> list[Any]:
    torch.manual_seed(1)
    sizes = (M, N)
    (a, _), (b, _) = (torch.ops.cubin.quantize(torch.randn(size, K), ROW) for size in sizes)
    a_scale, b_scale = (torch.rand(3, size) + 0.5 for size in sizes)
    return [a, b.t(), a_scale, ROW, b_scale, ROW]


def test_groups_of_k_have_an_output_each() -> None:
    a, b, a_scale, _, b_scale, _ = args = arguments_of_k()
    offs, start = [100, 100, 237], 0
    out = op(*args, offs=torch.tensor(offs), output_dtype=torch.float32)
    assert out.shape == (3, M, N)
    for group, end in enumerate(offs):
        wide = a[:, start:end].double() * a_scale[group, :, None]
        right = wide @ (b[start:end].double() * b_scale[group])
        torch.testing.assert_close(out[group].double(), right, rtol=1e-4, atol=0.1)
        start = end
    out = op(*args, offs=torch.tensor([100, 90, 237]))
    assert out[1:].isnan().all()
    assert not out[0].isnan().any()
    torch.library.opcheck(
        torch.ops.cubin._scaled_grouped_matmul, args, {"offs": torch.tensor(offs)},
        test_utils=CHECKS,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="argument 'scale_a' is of another number of groups"):
        op(*args[:2], a_scale[:2], *args[3:], offs=torch.tensor(offs))


def test_blocks_of_k_may_belong_to_several_groups() -> None:
    torch.manual_seed(2)
    (a, a_scale), (b, b_scale) = (
        torch.ops.cubin.quantize(torch.randn(size, K), BLOCK_1X128) for size in (M, N)
    )
    offs, start = [100, 100, 237], 0
    args = (a, b.t(), a_scale, BLOCK_1X128, b_scale, BLOCK_1X128)
    out = op(*args, offs=torch.tensor(offs), output_dtype=torch.float32)
    wide = [
        x.double() * scale.double().repeat_interleave(128, 1)[:, :K]
        for x, scale in ((a, a_scale), (b, b_scale))
    ]
    for group, end in enumerate(offs):
        right = wide[0][:, start:end] @ wide[1][:, start:end].t()
        torch.testing.assert_close(out[group].double(), right, rtol=1e-4, atol=1e-3)
        start = end
    a_scale[:, 0] = torch.nan  # of a block in which the group without elements begins
    assert op(*args, offs=torch.tensor(offs))[1].eq(0).all()


def test_rules() -> None:
    args = [*arguments(True)]
    torch.library.opcheck(
        torch.ops.cubin._scaled_grouped_matmul,
        args,
        {"offs": torch.tensor([4, 4, M], dtype=torch.int32)},
        test_utils=CHECKS,
    )
    assert op(*args, offs=ends()).dtype == torch.bfloat16
    none = [args[0][:0], args[1], args[2][:0], *args[3:]]
    assert op(*none, offs=ends() * 0).shape == (0, N)
    with pytest.raises(RuntimeError, match=r"\[input\]: scaled_grouped_matmul has no rule"):
        torch.vmap(lambda a: op(a, *args[1:], offs=ends()))(torch.stack([args[0]] * 2))


@pytest.mark.parametrize("wrong", [[3, 1, 8], [3, 11, 8], [-1, 3, 8]])
def test_what_follows_a_wrong_end_is_nan(wrong: list[int], monkeypatch) -> None:
    args, offs = arguments(False), torch.tensor(wrong)
    first = wrong[0] if wrong[0] >= 0 else 0
    out = op(*args, offs=offs)
    assert out[first:].isnan().all()
    assert not out[:first].isnan().any()
    monkeypatch.setenv("TORCH_CUBIN_CHECK", "1")
    group = 0 if wrong[0] < 0 else 1
    with pytest.raises(RuntimeError, match=rf"scaled_grouped_matmul .* wrong end of group {group}"):
        op(*args, offs=offs)


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (1, lambda b: b[0], "does not have these recipes: .* for groups that divide K"),
        (1, lambda b: b[None], "argument 'mat_b' has a wrong rank"),
        (3, lambda _: BLOCK_128X128, "does not have these recipes"),
        (4, lambda s: s[:2], "argument 'scale_b' is of another number of groups"),
        (4, lambda s: s[0], "argument 'scale_b' has a wrong rank"),
        (4, lambda s: s[:, :1], "argument 'scale_b' has a shape that its recipe does not have"),
        (2, lambda s: s[:1], "argument 'scale_a' has a shape that its recipe does not have"),
    ],
)
def test_errors(index: int, change: Any, message: str) -> None:
    args = arguments(True)
    args[index] = change(args[index])
    with pytest.raises(RuntimeError, match=rf"\[input\]: scaled_grouped_matmul {message}"):
        op(*args, offs=ends())
    with pytest.raises(RuntimeError, match="'offs' has a wrong shape"):
        op(*arguments(True), offs=ends()[:2])


@pytest.mark.parametrize("blocks", [False, True])
def test_every_set_of_options(blocks: bool) -> None:
    subsets = [
        own
        for count in range(1, len(grouped_options.OPTIONS) + 1)
        for own in itertools.combinations(grouped_options.OPTIONS, count)
    ]
    for options in subsets:
        args, given, wide = call_with_options(options, blocks)
        out = op(*args, **given, output_dtype=torch.float32)
        want, stored = grouped_options.expected(*wide)
        torch.testing.assert_close(
            out[stored].double(), want[stored], rtol=1e-4, atol=1e-4, msg=str(options)
        )
        assert out.is_contiguous()


def test_outputs_and_errors_of_options() -> None:
    options = ("bias", "rows", "activation")
    args, given, wide = call_with_options(options, True)
    want, stored = grouped_options.expected(*wide)
    for dtype, limit in ((torch.bfloat16, 0.01), (torch.float16, 0.002)):
        out = op(*args, **{**given, "bias": given["bias"].to(dtype)}, output_dtype=dtype)
        assert out.dtype == dtype
        torch.testing.assert_close(out[stored].double(), want[stored], rtol=limit, atol=limit)
    huge = {**given, "bias": given["bias"] + 1000.0, "activation": "relu"}
    out = op(*args, **huge, output_dtype=torch.float8_e4m3fn)
    assert out.float()[stored].eq(448).all()
    torch.library.opcheck(raw, args, {**given, "output_dtype": torch.float16}, test_utils=CHECKS)
    for change, message in (
        ({"bias": given["bias"].double()}, "argument 'bias' has a wrong dtype"),
        ({"bias": given["bias"][:, :-1]}, "argument 'bias' has a wrong shape"),
        ({"out_rows": given["rows"].long()}, "argument 'out_rows' has a wrong dtype"),
        ({"scale": torch.ones(3)}, "argument 'scale' has a wrong shape"),
        ({"activation": "tanh"}, "activation"),
    ):
        with pytest.raises(RuntimeError, match=rf"\[input\]: scaled_grouped_matmul .*{message}"):
            op(*args, **{**given, **change})
    with pytest.raises(RuntimeError, match="has options of rows for groups of K"):
        op(*arguments_of_k(), offs=ends(), scale=torch.ones(M))
