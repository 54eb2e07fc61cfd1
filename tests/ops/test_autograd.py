"""Gradients by autograd: every rank case, both modes, second order, and none unasked."""

from __future__ import annotations

import functools
import warnings
import weakref

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from ops.samples import (
    LINEAR_SHAPES,
    MATMUL_SHAPES,
    assert_near,
    ids,
    linear,
    make,
    make_all,
    matmul,
    reference_linear,
)
from recorded_ops import RecordedOps
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from torch_cubin._ops import autograd

# A dimension of size 0 leaves numerical differentiation nothing to do; values are compared below.
CASES = [(matmul, shapes) for shapes in MATMUL_SHAPES if 0 not in sum(shapes, ())]
CASES += [
    (linear, shapes)
    for shapes in LINEAR_SHAPES
    if 0 not in sum((shape for shape in shapes if shape is not None), ())
]


def case_id(case) -> str:
    op, shapes = case
    return f"{op._qualified_op_name.split('::')[1]}-{','.join(map(ids, shapes))}"


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_gradcheck(case, device):
    op, shapes = case
    args = make_all(shapes, device, requires_grad=True)
    with warnings.catch_warnings():  # the older vmap of is_grads_batched loops, and says so
        warnings.filterwarnings("ignore", "There is a performance drop")
        assert gradcheck(
            op,
            args,
            check_forward_ad=True,
            check_batched_grad=True,
            check_batched_forward_grad=True,
            check_undefined_grad=True,
        )


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_gradgradcheck(case, device):
    op, shapes = case
    args = make_all(shapes, device, requires_grad=True)
    assert gradgradcheck(op, args, check_fwd_over_rev=True, check_rev_over_rev=True)


@pytest.mark.parametrize("shapes", MATMUL_SHAPES, ids=lambda pair: "@".join(map(ids, pair)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_matmul_gradients_as_torch(shapes, dtype, device):
    args = make_all(shapes, device, dtype, requires_grad=True)
    expected = torch.matmul(*args)
    weight = torch.randn_like(expected)
    out = matmul(*args)
    assert_near(torch.autograd.grad(out, args, weight), torch.autograd.grad(expected, args, weight))


@pytest.mark.parametrize("shapes", LINEAR_SHAPES, ids=lambda three: ",".join(map(ids, three)))
def test_linear_gradients_as_torch(shapes, device):
    args = make_all(shapes, device, requires_grad=True)
    given = [arg for arg in args if arg is not None]
    expected = reference_linear(*args)
    weight = torch.randn_like(expected)
    assert_near(
        torch.autograd.grad(linear(*args), given, weight),
        torch.autograd.grad(expected, given, weight),
    )


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (True, True)])
def test_backward_computes_only_the_needed_gradients(wanted, device):
    a = make((2, 3), device, requires_grad=wanted[0])
    b = make((3, 4), device, requires_grad=wanted[1])
    out = matmul(a, b)
    assert len([t for t in out.grad_fn.saved_tensors if t is not None]) == sum(wanted)
    with RecordedOps() as calls:
        out.sum().backward()
    products = [("_matmul", (2, 4), (4, 3))] * wanted[0] + [("_matmul", (3, 2), (2, 4))] * wanted[1]
    assert calls.ours == products
    assert (a.grad is not None, b.grad is not None) == wanted


@pytest.mark.parametrize("frozen", [True, False])
def test_a_frozen_weight_keeps_no_input_alive(frozen, device):
    leaf, w, bias = make_all(((2, 3), (4, 3), (4,)), device)
    leaf.requires_grad_()
    w.requires_grad_(not frozen)
    for op in (lambda x: linear(x, w, bias), lambda x: matmul(x, w.t())):
        x = leaf + 1
        alive = weakref.ref(x)
        out = op(x)
        del x
        assert (alive() is None) == frozen
        out.sum().backward()


@pytest.mark.parametrize("wanted", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)])
def test_linear_backward_computes_only_the_needed_gradients(wanted, device):
    shapes = ((2, 3), (4, 3), (4,))
    args = [make(s, device, requires_grad=bool(w)) for s, w in zip(shapes, wanted, strict=True)]
    out = linear(*args)
    with RecordedOps() as calls:
        out.sum().backward()
    assert len(calls.ours) == wanted[0] + wanted[1]
    assert [arg.grad is not None for arg in args] == [bool(w) for w in wanted]


def test_the_gradient_of_a_weight_is_one_product(device):
    x, w = make((5, 6, 3), device), make((3, 4), device, requires_grad=True)
    with RecordedOps() as calls:
        matmul(x, w).sum().backward()
    assert calls.ours[1:] == [("_matmul", (3, 30), (30, 4))]
    w = make((1, 3, 4), device, requires_grad=True)
    with RecordedOps() as calls:
        matmul(x, w).sum().backward()
    assert calls.ours[1:] == [("_matmul", (3, 30), (30, 4))]
    w = make((4, 3), device, requires_grad=True)
    with RecordedOps() as calls:
        linear(x, w).sum().backward()
    assert calls.ours[1:] == [("_matmul", (4, 30), (30, 3))]


def test_double_backward(device):
    a, b = make_all(((2, 3), (3, 4)), device, requires_grad=True)
    results = []
    for op in (matmul, torch.matmul):
        first = torch.autograd.grad(op(a, b).sin().sum(), (a, b), create_graph=True)
        loss = sum(g.pow(2).sum() for g in first)
        results.append(torch.autograd.grad(loss, (a, b)))
    assert_near(*results)


def test_no_autograd_graph_without_grad_mode(device):
    a, b = make_all(((2, 3), (3, 4)), device, requires_grad=True)
    with torch.no_grad():
        assert not matmul(a, b).requires_grad
    with torch.inference_mode():
        assert not matmul(a, b).requires_grad
    assert not matmul(a.detach(), b.detach()).requires_grad
    assert matmul(a, b.detach()).requires_grad


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        (lambda x, w: matmul(x, w), 2),
        (lambda x, w: linear(x, w), 2),
        (lambda x, w, bias: linear(x, w, bias), 3),
        (lambda x, w, bias: linear(x, w, bias, activation="relu"), 3),
        (lambda x, w, c: torch.ops.cubin.addmm(c, x, w), 3),
        (lambda x, w, c: torch.ops.cubin.addmm(c, x, w, torch.float64, beta=2), 3),
    ],
    ids=["matmul", "linear", "linear with a bias", "activation", "addmm", "addmm with a dtype"],
)
def test_python_runs_only_where_a_gradient_can_be_taken(op, arguments, device, monkeypatch):
    """The kernels on the Autograd key are in Python."""
    called = []
    original = autograd._requires_grad
    monkeypatch.setattr(autograd, "_requires_grad", lambda x: called.append(1) or original(x))
    shapes = {2: ((3, 3), (3, 3)), 3: ((3, 3), (3, 3), (3,))}[arguments]
    tensors = make_all(shapes, device)
    expected = op(*tensors)
    with torch.no_grad(), torch.inference_mode():
        op(*tensors)
    assert not called
    for i, tensor in enumerate(tensors):
        given = list(tensors)
        given[i] = tensor.clone().requires_grad_()
        out = op(*given)
        assert called, f"argument {i}"
        (gradient,) = torch.autograd.grad(out.sum(), given[i])
        own = torch.func.grad(lambda x, i=i: op(*tensors[:i], x, *tensors[i + 1 :]).sum())(tensor)
        assert torch.equal(own, gradient)
        assert torch.equal(out, expected)
        called.clear()


def test_no_derivative_of_aten_leaks_from_the_raw_ops(device):
    """The CPU kernels are made of ATen, whose derivatives would hide a missing one of ours."""
    a, b = make_all(((2, 3), (3, 4)), device, requires_grad=True)
    for op in (torch.ops.cubin._matmul, lambda x, y: torch.ops.cubin._linear(x, y.t())):
        out = op(a, b)
        with pytest.warns(UserWarning, match="autograd kernel was not registered"):
            out.sum().backward()
        assert a.grad is None
        assert b.grad is None
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(a.detach(), torch.ones_like(a))
            assert forward_ad.unpack_dual(op(dual, b.detach())).tangent is None


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(use_reentrant, device):
    a, b, bias = make_all(((5, 3), (4, 3), (4,)), device, requires_grad=True)

    def block(x):
        return matmul(linear(x, b, bias).sin(), b)

    expected = torch.autograd.grad(block(a).sum(), (a, b, bias))
    checkpoint(block, a, use_reentrant=use_reentrant).sum().backward()
    assert_near([a.grad, b.grad, bias.grad], expected)


def test_nested_and_selective_checkpointing(device):
    x, w = make_all(((2, 3), (3, 3)), device, requires_grad=True)

    def block(x):
        return matmul(matmul(x, w).sin(), w)

    def nested(x):
        inner = checkpoint(lambda y: matmul(y, w).sin(), x, use_reentrant=False)
        return matmul(inner, w)

    expected = torch.autograd.grad(block(x).sum(), (x, w))
    out = checkpoint(nested, x, use_reentrant=False)
    assert_near(torch.autograd.grad(out.sum(), (x, w)), expected)

    saved = [torch.ops.cubin._matmul_autograd.default]  # what a policy sees of the public op
    contexts = functools.partial(create_selective_checkpoint_contexts, saved)
    with RecordedOps() as calls:
        out = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        assert_near(torch.autograd.grad(out.sum(), (x, w)), expected)
    assert [name for name, *_ in calls.ours].count("_matmul_autograd") == 2  # none recomputed


def test_saved_tensors_hooks_and_in_place_changes(device):
    a, b = make_all(((2, 3), (3, 4)), device, requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        out = matmul(a, b)
    out.sum().backward()
    assert_near(a.grad, torch.autograd.grad(torch.matmul(a, b).sum(), a)[0])
    x = a.detach().clone()
    out = matmul(x, b)
    x.add_(1)  # saved for b's gradient
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_tangents_of_dual_tensors(device):
    shapes = ((2, 3), (3, 4))
    (a, b), (ta, tb) = make_all(shapes, device), make_all(shapes, device)
    for grad in (True, False):  # torch.mm keeps tangents under no_grad, too
        with torch.set_grad_enabled(grad), forward_ad.dual_level():
            x, y = forward_ad.make_dual(a, ta), forward_ad.make_dual(b, tb)
            both = forward_ad.unpack_dual(matmul(x, y)).tangent
            one = forward_ad.unpack_dual(matmul(a, y)).tangent
            none = forward_ad.unpack_dual(matmul(a, b)).tangent
        assert_near(both, ta @ b + a @ tb)
        assert_near(one, a @ tb)
        assert none is None


def test_tangent_of_the_bias_alone(device):
    x, w, bias = make_all(((2, 3), (4, 3), (4,)), device)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(bias, torch.ones_like(bias))
        tangent = forward_ad.unpack_dual(linear(x, w, dual)).tangent
    assert torch.equal(tangent, torch.ones(2, 4, device=device).double())


def test_tangent_of_only_the_addend_of_a_dot_product(device):
    """The tangent of a number is a number: no size to expand it to."""
    number, x, y = make_all(((), (3,), (3,)), device)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(number, torch.ones_like(number))
        out = torch.ops.cubin.addmm(dual, x, y, beta=0.5)
        tangent = forward_ad.unpack_dual(out).tangent
    assert torch.equal(tangent, torch.full((), 0.5, device=device).double())
