"""cubin::_weight_and_bias_gradient: the op itself, and where linear's derivative takes it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from recorded_ops import RecordedOps

import torch_cubin  # noqa: F401  (registers the ops)

op = torch.ops.cubin._weight_and_bias_gradient
linear = torch.ops.cubin.linear
NAME = "cubin::_weight_and_bias_gradient"


def layer(shape: tuple[int, ...] = (5, 6)) -> list[torch.Tensor]:
    torch.manual_seed(0)
    sizes = [shape, (4, shape[-1]), (4,)]
    return [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_op(dtype: torch.dtype) -> None:
    grad, input = torch.randn(7, 4, dtype=dtype), torch.randn(7, 6, dtype=dtype)
    torch.library.opcheck(op, (grad, input))
    weight, bias = op(grad, input)
    torch.testing.assert_close(weight, grad.t() @ input)
    torch.testing.assert_close(bias, grad.sum(0))
    assert weight.is_contiguous()
    assert bias.is_contiguous()


def test_op_of_no_rows_gives_zeros() -> None:
    weight, bias = op(torch.empty(0, 4), torch.empty(0, 6))
    assert torch.equal(weight, torch.zeros(4, 6))
    assert torch.equal(bias, torch.zeros(4))


@pytest.mark.parametrize(
    ("grad", "input"),
    [((7, 4), (8, 6)), ((7,), (7, 6)), ((2, 7, 4), (2, 7, 6))],
    ids=str,
)
def test_op_refuses_other_shapes(grad, input) -> None:
    with pytest.raises(RuntimeError, match=r"\[input\]: _weight_and_bias_gradient"):
        op(torch.randn(grad), torch.randn(input))


def test_op_refuses_other_dtypes() -> None:
    with pytest.raises(RuntimeError, match=r"\[input\]"):
        op(torch.randn(7, 4), torch.randn(7, 6, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(5, 6), (2, 3, 6), (6,)], ids=str)
@pytest.mark.parametrize("frozen", [None, 0, 1, 2], ids=["none", "input", "weight", "bias"])
def test_linear_uses_the_fused_gradient_if_both_are_needed(shape, frozen: int | None) -> None:
    leaves = layer(shape)
    wanted = [x for i, x in enumerate(leaves) if i != frozen]
    grad = torch.randn(*shape[:-1], 4, dtype=torch.float64)
    out = linear(*(x if i != frozen else x.detach() for i, x in enumerate(leaves)))
    with RecordedOps() as calls:
        ours = torch.autograd.grad(out, wanted, grad)
    assert (NAME in calls.names) == (frozen not in (1, 2) and len(shape) > 1)
    expected = torch.autograd.grad(F.linear(*leaves), wanted, grad)
    for x, y in zip(ours, expected, strict=True):
        torch.testing.assert_close(x, y)


def test_a_bias_of_one_number_is_summed() -> None:
    input, weight, _ = layer()
    bias = torch.randn(1, dtype=torch.float64, requires_grad=True)
    (ours,) = torch.autograd.grad(linear(input, weight, bias).sum(), bias)
    assert ours.shape == (1,)
    torch.testing.assert_close(ours, torch.full((1,), 20.0, dtype=torch.float64))


def test_derivatives_of_the_derivative() -> None:
    leaves = layer()
    assert torch.autograd.gradgradcheck(lambda *x: linear(*x), leaves)


def test_a_batch_of_gradients() -> None:
    leaves = layer()
    out, own = linear(*leaves), F.linear(*leaves)
    grads = torch.randn(3, *out.shape, dtype=torch.float64)
    ours = torch.autograd.grad(out, leaves, grads, is_grads_batched=True)
    expected = torch.autograd.grad(own, leaves, grads, is_grads_batched=True)
    for x, y in zip(ours, expected, strict=True):
        torch.testing.assert_close(x, y)


def test_compiled_training_takes_it() -> None:
    leaves = layer()
    compiled = torch.compile(lambda *x: linear(*x).square().sum(), backend="aot_eager")
    loss = compiled(*leaves)
    with RecordedOps() as calls:
        ours = torch.autograd.grad(loss, leaves)
    assert NAME in calls.names
    expected = torch.autograd.grad(F.linear(*leaves).square().sum(), leaves)
    for x, y in zip(ours, expected, strict=True):
        torch.testing.assert_close(x, y)
