"""cubin::scaled_gated_matmul on the CPU: its reference, checks and rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scaled_cases import BLOCK_1X128, BLOCK_128X128, gated_by_steps
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

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


def halves(args: list[Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The same product with gates and ups in two matrices, of 128 columns each."""
    a, b, a_scale, b_scale = args
    own = [a, b[:, :128], a_scale, b_scale[:, :1]]
    return own, {"mat_up": b[:, 128:256], "scale_up": b_scale[:, 1:2]}


def assert_same(results: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    for out, right in zip(results, wanted, strict=True):
        assert (out.dtype, out.shape, out.stride()) == (right.dtype, right.shape, right.stride())
        assert torch.equal(out.float(), right.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("groups", [0, GROUPS])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_it_is_the_product_and_the_quantisation_of_its_gate(
    power_of_two: bool, groups: int, dtype
) -> None:
    args = arguments(groups)
    offs = {"offs": torch.tensor([4, 4, M])} if groups else {}
    out = op(*args, dtype=dtype, power_of_two=power_of_two, **offs)
    assert_same(out, gated_by_steps(args, dtype, power_of_two, **offs))
    data, scale = out
    assert scale.log2().frac().eq(0).all() == power_of_two
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_gates_and_ups_in_two_matrices(dtype) -> None:
    a, b, a_scale, b_scale = arguments()
    args, ups = halves([a, b, a_scale, b_scale])
    out = op(*args, dtype=dtype, **ups)
    assert_same(out, op(a, b[:, :256], a_scale, b_scale[:, :2], dtype=dtype))
    b, up = (ops.quantize(torch.randn(N, K), BLOCK_128X128) for _ in range(2))
    out = op(a, b[0].t(), a_scale, b[1], dtype=dtype, mat_up=up[0].t(), scale_up=up[1])
    product = [
        ops.scaled_matmul(a, w.t(), a_scale, BLOCK_1X128, s, BLOCK_128X128, output_dtype=dtype)
        for w, s in (b, up)
    ]
    assert_same(out, ops.quantize(torch.cat(product, 1), BLOCK_1X128, gate="silu"))
    with FlopCounterMode(display=False) as flops:
        op(*args, **ups)
    assert flops.get_total_flops() == 2 * M * K * 256


def test_rules() -> None:
    for groups in (0, GROUPS):
        offs = {"offs": torch.tensor([4, 4, M])} if groups else {}
        torch.library.opcheck(
            torch.ops.cubin._scaled_gated_matmul, tuple(arguments(groups)), offs, test_utils=CHECKS
        )
    own, ups = halves(arguments())
    torch.library.opcheck(torch.ops.cubin._scaled_gated_matmul, tuple(own), ups, test_utils=CHECKS)
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


def test_errors_of_ups() -> None:
    a, b, a_scale, b_scale = arguments()
    args, ups = halves([a, b, a_scale, b_scale])
    cases: list[tuple[dict[str, Any], str]] = [
        ({"mat_up": ups["mat_up"]}, "argument 'scale_up' is missing"),
        ({"scale_up": ups["scale_up"]}, "argument 'mat_up' is missing"),
        ({**ups, "offs": torch.tensor([M])}, "argument 'mat_up' is not supported"),
        ({**ups, "mat_up": ups["mat_up"][:, 1:]}, "argument 'mat_up' has a wrong shape"),
    ]
    for options, message in cases:
        with pytest.raises(RuntimeError, match=rf"\[input\]: scaled_gated_matmul {message}"):
            op(*args, **options)
