"""cubin::scaled_gated_matmul on the CPU: its reference, checks and rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scaled_cases import BLOCK_1X128, BLOCK_128X128, gated_by_steps
from torch import Tensor

from torch_cubin import ops

op = ops.scaled_gated_matmul
CHECKS = ("test_autograd_registration", "test_faketensor")  # as in test_scaled_grouped.py
M, N, K, GROUPS = 10, 200, 272, 3


def arguments(groups: int = 0) -> list[Tensor]:
    torch.manual_seed(0)
    a, a_scale = ops.quantize(torch.randn(M, K), BLOCK_1X128)
    parts = [ops.quantize(torch.randn(2 * N, K), BLOCK_128X128) for _ in range(max(groups, 1))]
    b, b_scale = torch.stack([own.t() for own, _ in parts]), torch.stack([own for _, own in parts])
    return [a, b if groups else b[0], a_scale, b_scale if groups else b_scale[0]]


def assert_same(results: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    for out, right in zip(results, wanted, strict=True):
        assert (out.dtype, out.shape, out.stride()) == (right.dtype, right.shape, right.stride())
        assert torch.equal(out.float(), right.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("groups", [0, GROUPS])
def test_it_is_the_product_and_the_quantisation_of_its_gate(groups: int, dtype) -> None:
    args = arguments(groups)
    offs = {"offs": torch.tensor([4, 4, M])} if groups else {}
    out = op(*args, dtype=dtype, **offs)
    assert_same(out, gated_by_steps(args, dtype, **offs))
    data, scale = out
    wide = data.double() * scale.double().repeat_interleave(128, 1)[:, :N]
    a, b, a_scale, b_scale = args
    for rows, own, own_scale in (
        ((slice(0, M), b, b_scale),)
        if not groups
        else ((slice(0, 4), b[0], b_scale[0]), (slice(4, M), b[2], b_scale[2]))
    ):
        scales = own_scale.double().repeat_interleave(128, 0)[:K].repeat_interleave(128, 1)
        x = a[rows].double() * a_scale[rows].double().repeat_interleave(128, 1)[:, :K]
        gate, up = (x @ (own.double() * scales[:, : 2 * N])).chunk(2, 1)
        right = torch.nn.functional.silu(gate) * up
        assert (wide[rows] - right).norm() < 0.05 * right.norm()


def test_rules() -> None:
    for groups in (0, GROUPS):
        offs = {"offs": torch.tensor([4, 4, M])} if groups else {}
        torch.library.opcheck(
            torch.ops.cubin._scaled_gated_matmul, tuple(arguments(groups)), offs, test_utils=CHECKS
        )
    args = arguments()
    assert op(*args)[0].dtype == torch.float8_e4m3fn
    none = op(args[0][:0], args[1], args[2][:0], args[3])
    assert [own.shape for own in none] == [(0, N), (0, 2)]
    with pytest.raises(RuntimeError, match=r"\[input\]: scaled_gated_matmul has no rule"):
        torch.vmap(lambda a: op(a, *args[1:]))(torch.stack([args[0]] * 2))
    compiled = torch.compile(lambda *own: op(*own), backend="aot_eager", fullgraph=True)
    assert_same(compiled(*args), op(*args))
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(op(*args), op(*args))
    with pytest.raises(RuntimeError, match=r"\[input\]: scaled_gated_matmul has no rule for deriv"):
        op(*args[:2], args[2].requires_grad_(), args[3])


@pytest.mark.parametrize(
    ("groups", "change", "options", "message"),
    [
        (0, {}, {"gate": "gelu"}, "argument 'gate' is not known"),
        (0, {}, {"dtype": torch.float8_e4m3fn}, "argument 'dtype' is not supported"),
        (0, {1: lambda b: b[:, 1:]}, {}, "argument 'mat_b' has a wrong shape"),
        (GROUPS, {}, {}, "argument 'mat_b' has a wrong shape"),
        (0, {}, {"offs": torch.tensor([M])}, "argument 'mat_b' has a wrong shape"),
        (0, {2: lambda s: s[1:]}, {}, "argument 'scale_a' has a shape that its recipe"),
        (0, {3: lambda s: s[:, 1:]}, {}, "argument 'scale_b' has a shape that its recipe"),
        (GROUPS, {3: lambda s: s[1:]}, {"offs": torch.tensor([1, 2, M])},
         "argument 'scale_b' is of another number of groups"),
        (GROUPS, {}, {"offs": torch.tensor([1, M])}, "argument 'offs' has a wrong shape"),
    ],
)  # fmt: skip
def test_errors(groups: int, change: dict[int, Any], options: dict[str, Any], message: str) -> None:
    args = arguments(groups)
    for index, other in change.items():
        args[index] = other(args[index])
    with pytest.raises(RuntimeError, match=rf"\[input\]: scaled_gated_matmul {message}"):
        op(*args, **options)
