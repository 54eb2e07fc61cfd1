"""The products for graphs: _linear_glu, _linears, _linear_activation_aux and _backward.

Values rounded once, derivatives of every order, vmap, autocast, errors; on the CPU's references.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from ops.test_opcheck import CHECKS
from torch import Tensor

import torch_cubin

ops = torch.ops.cubin
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x.clone(),
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}
SMOOTH = [name for name in ACTIVATIONS if name != "relu"]
ROWS = [(5,), (), (2, 3), (0,), (1,)]


def glu(x: Tensor, gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    return ACTIVATIONS[activation](F.linear(x, gate)) * F.linear(x, up)


def aux(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> tuple[Tensor, Tensor]:
    sums = F.linear(x, weight, bias)
    return ACTIVATIONS[activation](sums), sums


def backward(grad: Tensor, weight: Tensor, before: Tensor, activation: str) -> Tensor:
    before = before.detach().requires_grad_()
    with torch.enable_grad():
        out = ACTIVATIONS[activation](before)
    return torch.autograd.grad(out, before, grad @ weight)[0]


def draw(*shapes: tuple[int, ...], dtype=torch.float64, requires_grad=False) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype).requires_grad_(requires_grad) for shape in shapes]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_values(rows, activation) -> None:
    x, gate, up, bias, weight = draw((*rows, 6), (8, 6), (8, 6), (8,), (4, 8))
    out = ops._linear_glu(x, gate, up, activation)
    torch.testing.assert_close(out, glu(x, gate, up, activation))
    torch.testing.assert_close(
        ops._linear_glu_aux(x, gate, up, activation), (out, F.linear(x, gate), F.linear(x, up))
    )
    results = ops._linear_activation_aux(x, gate, bias, activation)
    torch.testing.assert_close(results, aux(x, gate, bias, activation))
    (grad,) = draw((*rows, 4))
    torch.testing.assert_close(
        ops._linear_activation_backward(grad, weight, results[1], activation),
        backward(grad, weight, results[1], activation),
    )
    for result in (out, *results):
        assert result.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_results_are_rounded_once(dtype) -> None:
    x, gate, up, weight = draw((32, 64), (48, 64), (48, 64), (24, 48), dtype=dtype)
    x /= 16  # GELU's tails lose digits in float32
    grad, before = draw((32, 24), (32, 48), dtype=dtype)
    wide = [tensor.double() for tensor in (x, gate, up)]
    for out, expected in (
        (ops._linear_glu(x, gate, up, "silu"), glu(*wide)),
        (ops._linear_activation_aux(x, gate, None, "gelu")[0], aux(*wide[:2], None, "gelu")[0]),
        (
            ops._linear_activation_backward(grad, weight, before, "gelu"),
            backward(grad.double(), weight.double(), before.double(), "gelu"),
        ),
    ):
        rounded = expected.to(dtype)
        assert (out == rounded).double().mean() > 0.99
        assert out.dtype == dtype


def test_linears() -> None:
    x, a, b, c, bias = draw((2, 5, 6), (8, 6), (3, 6), (1, 6), (3,))
    outs = ops._linears(x, [a, b, c], [None, bias, bias[:1]])
    expected = [F.linear(x, a), F.linear(x, b, bias), F.linear(x, c, bias[:1])]
    torch.testing.assert_close(outs, expected)
    torch.testing.assert_close(ops._linears(x, [a, b], []), [F.linear(x, a), F.linear(x, b)])
    assert len({out.untyped_storage().data_ptr() for out in outs}) == 3


@pytest.mark.parametrize(
    ("activation", "requires_grad"),
    [*((name, True) for name in ACTIVATIONS), ("gelu", False)],
)
def test_opcheck(activation, requires_grad) -> None:
    shapes = ((5, 6), (8, 6), (8, 6), (8,), (5, 3), (3, 8), (5, 8))
    x, gate, up, bias, grad, weight, before = draw(*shapes, requires_grad=requires_grad)
    for op, args in (
        (ops._linear_glu, (x, gate, up, activation)),
        (ops._linear_glu_aux, (x, gate, up, activation)),
        (ops._linear_activation_aux, (x, gate, bias, activation)),
        (ops._linear_activation_backward, (grad, weight, before, activation)),
    ):
        torch.library.opcheck(op.default, args, test_utils=CHECKS)


@pytest.mark.parametrize("requires_grad", [True, False])
def test_opcheck_of_linears(requires_grad) -> None:
    x, a, b, bias = draw((5, 6), (8, 6), (3, 6), (8,), requires_grad=requires_grad)
    for biases in ([bias, None], []):
        torch.library.opcheck(ops._linears.default, (x, [a, b], biases), test_utils=CHECKS)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_derivatives(activation) -> None:
    shapes = ((5, 6), (8, 6), (8, 6), (8,), (5, 3), (3, 8), (5, 8))
    x, gate, up, bias, grad, weight, before = draw(*shapes, requires_grad=True)
    for function, args in (
        (lambda *a: ops._linear_glu(*a, activation), (x, gate, up)),
        (lambda *a: ops._linear_glu_aux(*a, activation), (x, gate, up)),
        (lambda *a: ops._linear_activation_aux(*a, activation), (x, gate, bias)),
        (lambda *a: ops._linear_activation_backward(*a, activation), (grad, weight, before)),
        (lambda x, a, b, c: ops._linears(x, [a, b], [c, None]), (x, gate, up, bias)),
    ):
        torch.autograd.gradcheck(function, args, check_forward_ad=True, check_batched_grad=True)
        if activation in SMOOTH:
            torch.autograd.gradgradcheck(function, args, fast_mode=True)


@pytest.mark.parametrize("inner", [torch.func.jacrev, torch.func.jacfwd])
@pytest.mark.parametrize("outer", [torch.func.jacrev, torch.func.jacfwd])
@pytest.mark.parametrize("activation", SMOOTH)
def test_second_order_of_every_mode(activation, outer, inner) -> None:
    x, gate, up, grad, weight = draw((2, 3), (4, 3), (4, 3), (2, 3), (3, 4))
    for ours, own in (
        (
            lambda x: ops._linear_glu(x, gate, up, activation).sum(),
            lambda x: glu(x, gate, up, activation).sum(),
        ),
        (
            lambda x: ops._linear_activation_aux(x, gate, None, activation)[0].sum(),
            lambda x: aux(x, gate, None, activation)[0].sum(),
        ),
        (
            lambda x: ops._linear_activation_backward(grad, weight, F.linear(x, up), activation)
            .square()
            .sum(),
            lambda x: torch.func.vjp(ACTIVATIONS[activation], F.linear(x, up))[1](grad @ weight)[0]
            .square()
            .sum(),
        ),
    ):
        torch.testing.assert_close(outer(inner(ours))(x), outer(inner(own))(x))


DIMS = [dims for dims in itertools.product((0, None), repeat=3) if dims != (None, None, None)]


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_vmap(dims) -> None:
    x, gate, up, bias = draw((4, 5, 6), (4, 8, 6), (4, 8, 6), (4, 8))
    grad, weight, before = draw((4, 5, 3), (4, 3, 8), (4, 5, 8))

    def check(function: Callable, own: Callable, *args: Tensor) -> None:
        args = tuple(x if dim == 0 else x[0] for x, dim in zip(args, dims, strict=True))
        outs = torch.vmap(function, dims)(*args)
        torch.testing.assert_close(outs, torch.vmap(own, dims)(*args))

    check(lambda *a: ops._linear_glu(*a, "gelu"), lambda *a: glu(*a, "gelu"), x, gate, up)
    check(
        lambda *a: ops._linear_glu_aux(*a, "silu"),
        lambda x, g, u: (glu(x, g, u), F.linear(x, g), F.linear(x, u)),
        *(x, gate, up),
    )
    check(
        lambda *a: ops._linear_activation_aux(*a, "silu"), lambda *a: aux(*a, "silu"), x, gate, bias
    )
    check(
        lambda x, w, b: tuple(ops._linears(x, [w, w[:3]], [b, None])),
        lambda x, w, b: (F.linear(x, w, b), F.linear(x, w[:3])),
        *(x, gate, bias),
    )
    check(
        lambda *a: ops._linear_activation_backward(*a, "silu"),
        lambda g, w, a: torch.ops.aten.silu_backward(g @ w, a),
        *(grad, weight, before),
    )


def test_autocast() -> None:
    x, gate, up, bias = draw((5, 6), (8, 6), (8, 6), (8,), dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        outs = [
            ops._linear_glu(x, gate, up, "silu"),
            *ops._linears(x, [gate, up], [bias, None]),
            *ops._linear_activation_aux(x, gate, bias, "gelu"),
        ]
    assert {out.dtype for out in outs} == {torch.bfloat16}


def test_compiled_training() -> None:
    x, gate, up, bias = draw((5, 6), (8, 6), (8, 6), (8,), requires_grad=True)

    def step(x: Tensor, gate: Tensor, up: Tensor, bias: Tensor) -> Tensor:
        a, b = ops._linears(x, [gate, up], [bias, None])
        out, before = ops._linear_activation_aux(x, gate, bias, "gelu")
        return (ops._linear_glu(x, gate, up, "silu") + a * b + out + before).square().sum()

    leaves = (x, gate, up, bias)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    ours = torch.autograd.grad(compiled(*leaves), leaves)
    torch.testing.assert_close(ours, torch.autograd.grad(step(*leaves), leaves))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_errors(mode) -> None:
    x, gate, up, bias, weight = draw((5, 6), (8, 6), (7, 6), (8,), (3, 8))
    cases = [
        (lambda: ops._linear_glu(x, gate, up, "silu"), "_linear_glu argument 'up'", "(7, 6)"),
        (lambda: ops._linear_glu(x, gate, gate[0], "silu"), "_linear_glu", "up with 2"),
        (lambda: ops._linear_glu(x, gate.float(), gate, "silu"), "'gate'", "float32"),
        (lambda: ops._linear_glu(x, gate, gate, "swish"), "'activation'", "'swish'"),
        (lambda: ops._linear_activation_aux(x, gate, bias, "no"), "'activation'", "'no'"),
        (lambda: ops._linears(x, [], []), "_linears", "0 and 0"),
        (lambda: ops._linears(x, [gate], [bias, None]), "_linears", "1 and 2"),
        (lambda: ops._linears(x, [gate, gate[:, :5]], []), "weights[1].size(-1) == 6", "5"),
        (lambda: ops._linears(x, [gate, gate], [None, bias[:3]]), "'biases[1]'", "(3,)"),
        (lambda: ops._linears(x, [gate, up.float()], []), "'weights[1]'", "float32"),
        (
            lambda: ops._linear_activation_backward(x[:, :3], weight, x, "silu"),
            "_linear_activation_backward argument 'aux'",
            "(5, 6)",
        ),
        (lambda: ops._linear_activation_backward(x, weight, x, "silu"), "weight.size(-2)", "3"),
    ]
    for call, *parts in cases:
        with mode(), pytest.raises(RuntimeError, match=r"torch_cubin \[input\]") as caught:
            call()
        for part in parts:
            assert part in str(caught.value)


def test_a_sparse_weight_is_refused() -> None:
    x, gate = draw((5, 6), (8, 6))
    with pytest.raises(RuntimeError, match=r"\[input\]: linears argument 'weights'"):
        ops._linears(x, [gate, gate.to_sparse()], [])


def test_batch_invariant_rows() -> None:
    x, gate, up = draw((37, 64), (48, 64), (48, 64), dtype=torch.float32)
    with torch_cubin.batch_invariant():
        whole = ops._linear_glu(x, gate, up, "gelu")
        one = ops._linear_glu(x[5:6], gate, up, "gelu")
    assert torch.equal(whole[5:6], one)
