"""The ops over rows on the CPU: PyTorch's values, derivatives, transforms, graphs, errors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recorded_ops import RecordedOps
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

import torch_cubin  # noqa: F401  (registers the ops)

ops, raw = torch.ops.cubin, torch.ops.cubin
Inf = float("inf")


def randn(*shape: int, dtype: torch.dtype = torch.float64, grad: bool = False) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=_generator).requires_grad_(grad)


_generator = torch.Generator().manual_seed(0)
_TARGET = torch.tensor([4, -100, 3, 0])


def _weights(x: Tensor) -> Tensor:
    return torch.tensor([0.5, 2, 0, 1.25, 3], dtype=x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, shape: Any, weight: Any, eps: Any) -> Any:
    total = x + residual
    return F.rms_norm(total, shape, weight, eps), total


# Ours, PyTorch's, and the shapes of the tensors of a call.
CALLS: dict[str, tuple[Callable[..., Any], Callable[..., Any], list[tuple[int, ...]]]] = {
    "rms_norm": (lambda x: ops.rms_norm(x, (6,)), lambda x: F.rms_norm(x, (6,)), [(3, 2, 6)]),
    "rms_norm weight": (
        lambda x, w: ops.rms_norm(x, (2, 6), w, 0.1),
        lambda x, w: F.rms_norm(x, (2, 6), w, 0.1),
        [(3, 2, 6), (2, 6)],
    ),
    "add_rms_norm": (
        lambda x, y, w: ops.add_rms_norm(x, y, (6,), w, 0.1),
        lambda x, y, w: add_rms_norm(x, y, (6,), w, 0.1),
        [(3, 2, 6), (3, 2, 6), (6,)],
    ),
    "layer_norm": (
        lambda x, w, b: ops.layer_norm(x, (6,), w, b),
        lambda x, w, b: F.layer_norm(x, (6,), w, b),
        [(3, 2, 6), (6,), (6,)],
    ),
    "layer_norm bias": (
        lambda x, b: ops.layer_norm(x, (2, 6), None, b, 0.1),
        lambda x, b: F.layer_norm(x, (2, 6), None, b, 0.1),
        [(2, 6), (2, 6)],
    ),
    "softmax": (lambda x: ops.softmax(x, -1), lambda x: torch.softmax(x, -1), [(3, 5)]),
    "log_softmax": (lambda x: ops.log_softmax(x, 1), lambda x: x.log_softmax(1), [(3, 5, 2)]),
    "cross_entropy": (
        lambda x: ops.cross_entropy(x, _TARGET, label_smoothing=0.1),
        lambda x: F.cross_entropy(x, _TARGET, label_smoothing=0.1),
        [(4, 5)],
    ),
    "cross_entropy sum": (
        lambda x: ops.cross_entropy(x, _TARGET, _weights(x), -100, "sum"),
        lambda x: F.cross_entropy(x, _TARGET, _weights(x), reduction="sum"),
        [(4, 5)],
    ),
    "cross_entropy of weighted classes": (
        lambda x: ops.cross_entropy(x, _TARGET % 5, _weights(x), 3, label_smoothing=0.2),
        lambda x: F.cross_entropy(x, _TARGET % 5, _weights(x), ignore_index=3, label_smoothing=0.2),
        [(4, 5)],
    ),
    "cross_entropy none": (
        lambda x: ops.cross_entropy(x, _TARGET[0], reduction="none"),
        lambda x: F.cross_entropy(x, _TARGET[0], reduction="none"),
        [(5,)],
    ),
    **{
        f"linear_cross_entropy {name}": (
            lambda x, v, b, o=options: ops.linear_cross_entropy(x, v, _TARGET, linear_bias=b, **o),
            lambda x, v, b, o=options: F.cross_entropy(
                F.linear(x, v, b), _TARGET, **{k: o[k] for k in o if k != "recompute"}
            ),
            [(4, 3), (5, 3), (5,)],
        )
        for name, options in {
            "": {},
            "sum": {"reduction": "sum", "label_smoothing": 0.2, "recompute": True},
            "none": {"reduction": "none", "label_smoothing": 0.1},
        }.items()
    },
    "softmax of a number": (lambda x: ops.softmax(x, 0), lambda x: torch.softmax(x, 0), [()]),
}
by_call = pytest.mark.parametrize("name", CALLS)


def tensors_of(name: str, **options: Any) -> list[Tensor]:
    return [randn(*shape, **options) for shape in CALLS[name][2]]


def results(found: Any) -> tuple[Tensor, ...]:
    return (found,) if isinstance(found, Tensor) else tuple(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@by_call
def test_values_and_gradients_are_pytorchs(name: str, dtype: torch.dtype) -> None:
    ours, torchs, _ = CALLS[name]
    tensors = tensors_of(name, dtype=dtype, grad=True)
    got, want = results(ours(*tensors)), results(torchs(*tensors))
    grads = [randn(*x.shape, dtype=dtype) for x in want]
    torch.testing.assert_close(got, want)
    assert all(x.is_contiguous() for x in got)
    with torch.no_grad():
        assert all(map(torch.equal, results(ours(*tensors)), got))
    # In 16 bits PyTorch's gradients on the CPU are rounded more than once.
    wide = [x.detach().double().requires_grad_() for x in tensors]
    want = results(torchs(*wide))
    grads_wide = torch.autograd.grad(want, wide, [grad.double() for grad in grads])
    for own, other in zip(torch.autograd.grad(got, tensors, grads), grads_wide, strict=True):
        tolerance = {"atol": 0.02, "rtol": 0.02} if dtype.itemsize == 2 else {}
        torch.testing.assert_close(own, other.to(dtype), **tolerance)


@by_call
def test_derivatives_of_every_order(name: str) -> None:
    ours, tensors = CALLS[name][0], tuple(tensors_of(name, grad=True))
    assert torch.autograd.gradcheck(ours, tensors, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(ours, tensors, check_fwd_over_rev=True, fast_mode=True)


def test_torch_func() -> None:
    x, w = randn(4, 6), randn(6)

    def loss(norm: Any) -> Any:
        return lambda x, w: norm(x, (6,), w).log_softmax(-1).square().sum()

    for transform in (torch.func.grad, torch.func.hessian, torch.func.jacfwd):
        got, want = (transform(loss(norm), 1)(x, w) for norm in (ops.rms_norm, F.rms_norm))
        torch.testing.assert_close(got, want)


def test_only_what_needs_a_gradient_gets_one() -> None:
    x, w = randn(3, 6), randn(6, grad=True)
    (got,) = torch.autograd.grad(ops.layer_norm(x, (6,), w).sum(), w)
    torch.testing.assert_close(got, torch.autograd.grad(F.layer_norm(x, (6,), w).sum(), w)[0])
    y = randn(3, 6, grad=True)
    _, total = ops.add_rms_norm(x, y, (6,))
    assert torch.equal(torch.autograd.grad(total.sum(), y)[0], torch.ones(3, 6))


def test_opcheck() -> None:
    x, y, w = randn(3, 6, grad=True), randn(3, 6), randn(6, grad=True)
    _, _, mean, rstd = raw._norm(y, None, (6,), w, None, 0.1, True)
    gradient = (y, x, y, mean, rstd, w, 1, 0.1, True, True, torch.float64)
    of_class = torch.tensor([1, 2, 5])
    linear = (x, y, of_class % 3, None, None)
    for op, args in (
        (raw._norm_autograd, (x, None, (6,), w, w, None, True)),
        (raw._norm_autograd, (y, x, (6,), None, w, 0.1, False)),
        (raw._norm_backward_autograd, gradient),
        (raw._softmax_autograd, (x, False, x.dtype)),
        (raw._softmax_backward_autograd, (x, y, True, x.dtype)),
        (ops.rms_norm, (x, (6,))),
        (ops.add_rms_norm, (x, x, (6,))),
        (ops.layer_norm, (x, (6,))),
        (ops.softmax, (x, 0)),
        (ops.log_softmax, (x, 0)),
        (ops.cross_entropy, (x, of_class)),
        (raw._cross_entropy_autograd, (x, of_class, w.detach(), "mean", 2, 0.1, x.dtype)),
        (ops.linear_cross_entropy, (x, y, of_class % 3)),
        (raw._linear_cross_entropy_autograd, (*linear, "mean", 2, 0.1, x.dtype, True, True, True)),
    ):
        # torch.compile is below.
        utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(op, args, test_utils=utilities)


@pytest.mark.parametrize("in_dims", [(0, None), (2, None), (None, 0), (0, 1)])
def test_vmap(in_dims: tuple[int | None, int | None]) -> None:
    x = randn(*((3, 6) if in_dims[0] is None else (2, 3, 6))).movedim(0, in_dims[0] or 0)
    w = randn(*((6,) if in_dims[1] is None else (2, 6))).movedim(0, in_dims[1] or 0)

    def of(norm: Any) -> Any:
        def gradients(x: Tensor, w: Tensor) -> Any:
            return torch.func.grad(lambda *t: norm(t[0], (6,), t[1]).square().sum(), (0, 1))(x, w)

        return torch.vmap(lambda x, w: (norm(x, (6,), w), *gradients(x, w)), in_dims=in_dims)(x, w)

    torch.testing.assert_close(of(ops.layer_norm), of(F.layer_norm))


def test_vmap_of_softmax_and_residuals() -> None:
    x, y = randn(4, 3, 5), randn(3, 5)
    for dim in (0, -1):
        got = torch.vmap(lambda x, dim=dim: ops.softmax(x, dim), 1)(x)
        torch.testing.assert_close(got, torch.vmap(lambda x, dim=dim: torch.softmax(x, dim), 1)(x))
    assert torch.equal(torch.vmap(lambda x: ops.softmax(x, 0))(y[0]), torch.ones(5))
    got = torch.vmap(lambda x: ops.add_rms_norm(x, y, (5,)))(x)
    torch.testing.assert_close(got, torch.vmap(lambda x: add_rms_norm(x, y, (5,), None, None))(x))


def test_compile_makes_one_graph_of_all_sizes() -> None:
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True, dynamic=True)
    def call(x: Tensor, w: Tensor) -> Tensor:
        y, total = ops.add_rms_norm(x, x, (6,), w)
        return ops.softmax(ops.layer_norm(y, (6,)) + total, -1, dtype=torch.float32)

    w = randn(6, dtype=torch.float32)
    for rows in (3, 7, 11):
        x = randn(rows, 6, dtype=torch.float32)
        y, total = add_rms_norm(x, x, (6,), w, None)
        torch.testing.assert_close(call(x, w), torch.softmax(F.layer_norm(y, (6,)) + total, -1))
    assert len(graphs) == 1


@pytest.mark.parametrize("name", ["add_rms_norm", "cross_entropy", "linear_cross_entropy "])
def test_compiled_training(name: str) -> None:
    torch._dynamo.reset()
    ours, tensors = CALLS[name][0], tensors_of(name, grad=True)

    def loss(*tensors: Tensor) -> Tensor:
        return sum(x.square().sum() for x in results(ours(*tensors)))

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    got = torch.autograd.grad(compiled(*tensors), tensors)
    torch.testing.assert_close(got, torch.autograd.grad(loss(*tensors), tensors))


@pytest.mark.parametrize("autocast", [False, True])
def test_compiled_training_with_linear_cross_entropy_of_hidden_states(autocast: bool) -> None:
    """In the graph neither they nor autocast's copies of parameters require a gradient."""
    torch._dynamo.reset()
    tensors = [randn(*shape, dtype=torch.float32) for shape in ((4, 6), (6, 6), (5, 6))]

    def loss(x: Tensor, w: Tensor, head: Tensor) -> Tensor:
        return ops.linear_cross_entropy(F.linear(x, w), head, _TARGET)

    def gradients(loss: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            result = loss(*leaves)
        return torch.autograd.grad(result, leaves)

    got = gradients(torch.compile(loss, backend="aot_eager", fullgraph=True))
    torch.testing.assert_close(got, gradients(loss))


def test_linear_cross_entropy_computes_no_gradients_without_grad_mode() -> None:
    x, w = randn(4, 6, dtype=torch.float32), randn(5, 6, dtype=torch.float32)
    with torch.no_grad(), RecordedOps() as found:
        ops.linear_cross_entropy(x, w, _TARGET)
    raw = torch.ops.cubin._linear_cross_entropy.default
    assert [args[-3:] for op, args in found.calls if op is raw] == [(False, False, False)]


@by_call
def test_tangents_without_grad_mode(name: str) -> None:
    """Forward-mode derivatives do not depend on it."""
    tensors = tensors_of(name)
    directions = [torch.randn_like(tensor) for tensor in tensors]

    def tangents(call: Callable[..., Any]) -> list[Tensor | None]:
        with torch.no_grad(), forward_ad.dual_level():
            duals = map(forward_ad.make_dual, tensors, directions)
            return [forward_ad.unpack_dual(x).tangent for x in results(call(*duals))]

    ours, torchs = CALLS[name][:2]
    torch.testing.assert_close(tangents(ours), tangents(torchs))


def test_export() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return ops.log_softmax(ops.rms_norm(x, (6,)), -1)

    rows = torch.export.Dim("rows", min=2)
    exported = torch.export.export(Model(), (randn(4, 6),), dynamic_shapes=({0: rows},))
    x = randn(9, 6)
    torch.testing.assert_close(exported.module()(x), F.rms_norm(x, (6,)).log_softmax(-1))


@pytest.mark.parametrize("log", [False, True])
def test_rows_that_are_not_finite(log: bool) -> None:
    x = torch.tensor([[1, -Inf, 2], [-Inf] * 3, [Inf, 1, 1], [torch.nan, 1, -Inf]])
    ours, torchs = (ops.log_softmax, torch.log_softmax) if log else (ops.softmax, torch.softmax)
    torch.testing.assert_close(ours(x, -1), torchs(x, -1), equal_nan=True)


@pytest.mark.parametrize("shape", [(0, 6), (3, 0), (3, 1), (0,)])
def test_empty_tensors_and_rows_of_one_element(shape: tuple[int, ...]) -> None:
    x = randn(*shape, grad=True)
    torch.testing.assert_close(ops.softmax(x, -1), torch.softmax(x, -1))
    w = torch.ones(shape[-1:], dtype=x.dtype, requires_grad=True)
    got, want = (norm(x, shape[-1:], w) for norm in (ops.layer_norm, F.layer_norm))
    torch.testing.assert_close(got, want)
    for each in zip(*(torch.autograd.grad(y.sum(), (x, w)) for y in (got, want)), strict=True):
        torch.testing.assert_close(*each)


def test_dtypes() -> None:
    x = randn(3, 6, dtype=torch.bfloat16)
    w = randn(6, dtype=torch.float32)
    assert ops.softmax(x, -1, dtype=torch.float32).dtype == torch.float32
    assert ops.log_softmax(x, -1, dtype=torch.float64).dtype == torch.float64
    assert ops.layer_norm(x, (6,), w, w).dtype == torch.bfloat16
    torch.testing.assert_close(ops.layer_norm(x, (6,), w, w), F.layer_norm(x, (6,), w, w))
    y = x.clone().requires_grad_()
    ops.softmax(y, -1, dtype=torch.float32).square().sum().backward()
    assert y.grad is not None
    assert y.grad.dtype == torch.bfloat16


_X, _W = torch.randn(3, 6), torch.randn(6)


def _C(x: Tensor) -> Tensor:
    return x[:, 0].long()


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, w: ops.rms_norm(x, (5,)), "rms_norm argument 'normalized_shape'"),
        (lambda x, w: ops.rms_norm(x, ()), "rms_norm argument 'normalized_shape'"),
        (lambda x, w: ops.rms_norm(x, (6,), w[:5]), "rms_norm argument 'weight' has a wrong shape"),
        (lambda x, w: ops.rms_norm(x, (6,), w.half()), "rms_norm argument 'weight' has a wrong dt"),
        (lambda x, w: ops.rms_norm(x.int(), (6,)), "rms_norm argument 'input' has an unsupported"),
        (lambda x, w: ops.layer_norm(x, (6,), w, x), "layer_norm argument 'bias' has a wrong sha"),
        (lambda x, w: ops.add_rms_norm(x, w, (6,)), "add_rms_norm argument 'residual' has a wron"),
        (lambda x, w: ops.add_rms_norm(x, x.half(), (6,)), "'residual' has another dtype"),
        (lambda x, w: ops.softmax(x, 2), "softmax argument 'dim' is out of range"),
        (lambda x, w: ops.cross_entropy(x, x), "cross_entropy argument 'target' has a wrong dtype"),
        (lambda x, w: ops.cross_entropy(x, w.long()), "cross_entropy argument 'target' has a wron"),
        (lambda x, w: ops.cross_entropy(x[None], x), "cross_entropy argument 'input' has unsuppor"),
        (lambda x, w: ops.cross_entropy(x, _C(x), w[:5]), "argument 'weight' has a wro"),
        (lambda x, w: ops.cross_entropy(x, _C(x), reduction="x"), "'reduction' is not known"),
        (
            lambda x, w: ops.linear_cross_entropy(x, x[:, :5], _C(x)),
            "'linear_weight' does not match",
        ),
        (lambda x, w: ops.linear_cross_entropy(x, x, w.long()), "'target' has a wrong shape"),
        (
            lambda x, w: ops.linear_cross_entropy(x, x, _C(x), linear_bias=w),
            "'linear_bias' has a w",
        ),
        (
            lambda x, w: ops.linear_cross_entropy(x, x, _C(x), weight=w),
            "'weight' has a wrong shape",
        ),
        (lambda x, w: ops.linear_cross_entropy(x, x, _C(x), reduction=""), "'reduction' is not kn"),
        (lambda x, w: ops.log_softmax(x.bool(), 1), "log_softmax argument 'input' has an unsupp"),
    ],
)
def test_errors(call: Any, message: str, grad: bool, fake: bool) -> None:
    with torch.set_grad_enabled(grad), FakeTensorMode() as mode:
        tensors = [mode.from_tensor(x) for x in (_X, _W)]
        if fake:
            with pytest.raises(RuntimeError, match=rf"\[input\]: .*{message}"):
                call(*tensors)
    if not fake:
        with pytest.raises(RuntimeError, match=rf"\[input\]: .*{message}"):
            call(_X, _W)


def test_a_missing_tensor_and_a_sparse_one() -> None:
    with pytest.raises(RuntimeError, match=r"\[input\]: rms_norm argument 'input' is missing"):
        ops.rms_norm(None, (6,))
    with pytest.raises(RuntimeError, match=r"unsupported layout.*functional.softmax"):
        ops.softmax(_X.to_sparse(), 1)


@pytest.mark.parametrize("smoothing", [Inf, -Inf, torch.nan])
def test_smoothing_that_is_no_number_in_json(smoothing: float) -> None:
    for device in ("cpu", "meta"):
        x, target = _X.to(device), torch.zeros(len(_X), dtype=torch.long, device=device)
        with pytest.raises(RuntimeError, match=r"\[input\]: .*'label_smoothing' is out of range"):
            ops.cross_entropy(x, target, label_smoothing=smoothing)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_cross_entropy_of_classes_that_are_masked_out(smoothing: float) -> None:
    x = randn(3, 5)
    x[0, 2] = x[1, 4] = -Inf  # the target of the first row, another class of the second
    target = torch.tensor([2, 0, 1])
    got, want = (
        call(x, target, reduction="none", label_smoothing=smoothing)
        for call in (ops.cross_entropy, F.cross_entropy)
    )
    assert got[0] == Inf
    torch.testing.assert_close(got, want)


def test_cross_entropy_of_ignored_rows_and_of_no_class() -> None:
    x = randn(3, 5, grad=True)
    none = torch.full((3,), -100)
    assert ops.cross_entropy(x, none).isnan()
    assert not torch.autograd.grad(ops.cross_entropy(x, none, reduction="sum"), x)[0].any()
    with pytest.raises(RuntimeError, match=r"\[input\]: cross_entropy .*no class.*0 to 4.*got 5"):
        ops.cross_entropy(x, torch.tensor([1, 5, 2]))


def test_a_second_backward_of_linear_cross_entropy() -> None:
    x, w = randn(4, 3, grad=True), randn(5, 3, grad=True)
    loss = ops.linear_cross_entropy(x, w, _TARGET)
    first = torch.autograd.grad(loss, (x, w), torch.tensor(2.0), retain_graph=True)
    again = torch.autograd.grad(loss, (x, w), torch.tensor(2.0), retain_graph=True)
    torch.testing.assert_close(first, again)
    (own,) = torch.autograd.grad(loss, w)
    torch.testing.assert_close(first[1], own * 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_linear_cross_entropy_of_another_dtype(dtype: torch.dtype) -> None:
    x, w = randn(4, 3).to(dtype).requires_grad_(), randn(5, 3).to(dtype)
    (want,) = torch.autograd.grad(ops.linear_cross_entropy(x, w, _TARGET), x)
    for of_loss in (torch.float64, torch.float16):
        call = functools.partial(
            ops.linear_cross_entropy, linear_weight=w, target=_TARGET, dtype=of_loss
        )
        for recompute in (False, True):
            (got,) = torch.autograd.grad(call(x, recompute=recompute), x)
            torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)
        loss, tangent = torch.func.jvp(call, (x.detach(),), (torch.ones_like(x),))
        assert loss.dtype == tangent.dtype == of_loss


def test_batched_gradients_of_linear_cross_entropy() -> None:
    x, w = randn(4, 3, grad=True), randn(5, 3, grad=True)
    wanted = torch.autograd.grad(F.cross_entropy(x @ w.mT, _TARGET), (x, w))
    for dtype in (None, torch.float64):
        loss = ops.linear_cross_entropy(x, w, _TARGET, dtype=dtype)
        grads = torch.tensor([1, 2, -3]).to(loss.dtype)
        found = torch.autograd.grad(loss, (x, w), grads, is_grads_batched=True)
        for each, own in zip(found, wanted, strict=True):
            torch.testing.assert_close(each, grads.view(3, 1, 1).to(own.dtype) * own)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradients_of_linear_cross_entropy_in_parts_of_the_rows(reduction: str) -> None:
    """Of which memory has few: of 4,096 features, float32 sums of 2,048 rows."""
    rows, classes = 2100, 40
    x, w, b = randn(rows, 4096), randn(classes, 4096), randn(classes)
    tensors = [(each.float() / 8).requires_grad_() for each in (x, w, b)]
    target = torch.arange(rows) % classes
    target[7::50] = -100
    grad = torch.linspace(-1, 2, rows) if reduction == "none" else torch.tensor(3.0)
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": 0.1}
    got = ops.linear_cross_entropy(
        *tensors[:2], target, linear_bias=tensors[2], recompute=True, **options
    )
    want = F.cross_entropy(F.linear(*tensors), target, **options)
    for own, other in zip(
        *(torch.autograd.grad(x, tensors, grad) for x in (got, want)), strict=True
    ):
        torch.testing.assert_close(own, other)


def test_linear_cross_entropy_of_one_row_and_of_none() -> None:
    x, w = randn(3, grad=True), randn(5, 3, grad=True)
    for reduction in ("mean", "none"):
        got = ops.linear_cross_entropy(x, w, torch.tensor(2), reduction=reduction)
        want = F.cross_entropy(F.linear(x, w), torch.tensor(2), reduction=reduction)
        torch.testing.assert_close(got, want)
    none = ops.linear_cross_entropy(x[None][:0], w, _TARGET[:0], reduction="sum")
    assert none == 0
    assert not torch.autograd.grad(none, w)[0].any()


def test_weights_of_classes_have_no_derivative() -> None:
    w = torch.ones(5, requires_grad=True)
    for call in (
        lambda: ops.cross_entropy(torch.ones(4, 5), _TARGET, w),
        lambda: ops.linear_cross_entropy(torch.ones(4, 3), torch.ones(5, 3), _TARGET, weight=w),
    ):
        with pytest.raises(RuntimeError, match=r"\[input\]: .*'weight' has no derivative"):
            call()
