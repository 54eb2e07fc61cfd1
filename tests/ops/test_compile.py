"""torch.compile: whole graphs, forward and backward, static and dynamic shapes, every backend."""

from __future__ import annotations

import pytest
import torch
import torch._inductor.config as inductor_config
from ops.samples import (
    ATEN_IS_CALLED,
    assert_near,
    linear,
    make,
    make_all,
    matmul,
    reference_linear,
)
from torch._dynamo.testing import CompileCounterWithBackend

import torch_cubin

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def model(product, affine):
    def f(x, w, bias):
        return product(affine(x, w, bias).relu(), w).sin()

    return f


def gradients(f, args):
    args = [arg.detach().clone().requires_grad_() for arg in args]
    out = f(*args)
    return [out.detach(), *torch.autograd.grad(out.sum(), args)]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_forward_and_backward(backend, device):
    args = make_all(((5, 3), (4, 3), (4,)), device)
    compiled = torch.compile(model(matmul, linear), fullgraph=True, backend=backend)
    expected = gradients(model(torch.matmul, reference_linear), args)
    assert_near(gradients(compiled, args), expected)
    with torch.no_grad():
        assert_near(compiled(*args), expected[0])
    with torch.inference_mode():
        assert_near(compiled(*args), expected[0])


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("grad", [False, True])
@inductor_config.patch(ATEN_IS_CALLED)
def test_one_graph_for_four_sizes(backend, grad, device):
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model(matmul, linear), fullgraph=True, dynamic=True, backend=counter)
    stock = model(torch.matmul, reference_linear)
    for rows, k in ((5, 3), (6, 7), (17, 12), (64, 5)):
        args = make_all(((rows, k), (4, k), (4,)), device)
        if grad:
            assert_near(gradients(compiled, args), gradients(stock, args))
        else:
            with torch.no_grad():
                assert_near(compiled(*args), stock(*args))
    assert counter.frame_count == 1


def test_dynamic_batches_and_ranks_of_one_graph(device):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(matmul, fullgraph=True, dynamic=True, backend=counter)
    for batch, m, k, n in ((2, 3, 4, 5), (7, 5, 3, 2), (3, 8, 9, 4), (5, 2, 2, 2)):
        a = make((batch, m, k), device, requires_grad=True)
        b = make((6, batch, k, n), device, requires_grad=True)
        expected = torch.matmul(a, b)
        assert_near(compiled(a, b).detach(), expected.detach())
        assert_near(
            torch.autograd.grad(compiled(a, b).sum(), (a, b)),
            torch.autograd.grad(expected.sum(), (a, b)),
        )
    assert counter.frame_count == 1


def test_marked_dynamic_dimension(device):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(matmul, fullgraph=True, backend=counter)
    w = make((3, 4), device)
    for rows in (5, 6, 9, 33):
        x = make((rows, 3), device)
        torch._dynamo.mark_dynamic(x, 0)
        assert_near(compiled(x, w), torch.matmul(x, w))
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: torch.func.grad(f),
        lambda f: torch.func.jacrev(f),
        lambda f: lambda x: torch.func.vmap(torch.func.grad(f))(torch.stack([x, 2 * x])),
        lambda f: lambda x: torch.func.jvp(f, (x,), (x,))[1],
    ],
    ids=["grad", "jacrev", "vmap of grad", "jvp"],
)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_transforms_inside_the_graph(transform, backend, device):
    x, w = make_all(((2, 3), (3, 4)), device)
    compiled = torch.compile(
        transform(lambda x: matmul(x, w).sin().sum()), fullgraph=True, backend=backend
    )
    assert_near(compiled(x), transform(lambda x: torch.matmul(x, w).sin().sum())(x))


def test_the_graph_contains_the_public_op_then_its_autograd_variant(device):
    seen = []

    def backend(graph, inputs):
        seen.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    args = make_all(((5, 3), (3, 4)), device)
    torch.compile(lambda a, b: matmul(a, b), fullgraph=True, backend=backend)(*args)
    assert seen in ([matmul], [matmul.default])


def test_checkpoint_inside_the_graph(device):
    x, w = make_all(((2, 3), (3, 3)), device, requires_grad=True)

    def f(x):
        return torch.utils.checkpoint.checkpoint(
            lambda y: matmul(matmul(y, w).sin(), w), x, use_reentrant=False
        )

    expected = torch.autograd.grad(f(x).sum(), (x, w))
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    assert_near(torch.autograd.grad(compiled(x).sum(), (x, w)), expected)


def test_autocast_inside_the_graph(device):
    x, w = make_all(((2, 3), (3, 4)), device, torch.float32, requires_grad=True)

    def f(x):
        with torch.autocast(device, dtype=torch.bfloat16):
            return matmul(x, w)

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    assert compiled(x).dtype == torch.bfloat16
    assert_near(compiled(x).detach(), f(x).detach())
    assert_near(*(torch.autograd.grad(g(x).sum(), (x, w)) for g in (compiled, f)))


def test_mistakes_inside_the_graph_name_the_op(device):
    x = make((2, 3), device)
    compiled = torch.compile(lambda x: matmul(x, x), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"torch_cubin \[input\].*\(2, 3\) and \(2, 3\)"):
        compiled(x)


def test_an_input_error_that_depends_on_a_symbol(device):
    x, w = make((5, 3), device), make((4, 7), device)
    compiled = torch.compile(matmul, fullgraph=True, dynamic=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"torch_cubin \[input\].*cannot be multiplied"):
        compiled(x, w)


@pytest.mark.parametrize("invariant", [False, True])
def test_compiled_autograd_of_eager_calls(invariant, device):
    """It asks each node of the graph what it may be remembered by."""
    from torch._dynamo import compiled_autograd

    enable = getattr(compiled_autograd, "_enable", None) or compiled_autograd.enable
    ops = torch.ops.cubin
    leaves = [
        torch.randn(shape, device=device, requires_grad=True)
        for shape in ((3, 4), (5, 4), (5,), (2, 2, 3, 8), (3, 3))
    ]
    x, weight, bias, q, mask = leaves

    def loss():
        outs = (
            ops.matmul(weight, x.t()),
            ops.linear(x, weight, bias, activation="gelu"),
            ops.addmm(bias, x, weight.t(), beta=0.5),
            ops.scaled_dot_product_attention(q, q, q, is_causal=True),
            ops.scaled_dot_product_attention(q, q, q, mask),
        )
        return sum(out.sin().sum() for out in outs)

    with torch_cubin.batch_invariant(invariant):
        expected = torch.autograd.grad(loss(), leaves)
        with enable(torch.compile(backend="eager")):
            loss().backward()
    for leaf, gradient in zip(leaves, expected, strict=True):
        torch.testing.assert_close(leaf.grad, gradient, rtol=1e-4, atol=1e-4)


def _products_of_some_rows(x, keep, weight, bias):
    rows = x[keep]
    return (
        linear(rows, weight, bias),
        torch.ops.cubin.addmm(bias, rows, weight.t()),
        torch.ops.cubin.addmm(rows[:, :1], rows, weight.t()),
        matmul(rows.t(), rows),
    )


def _attention_of_some_rows(x, keep, weight, bias):
    heads = x[keep].unflatten(-1, (2, 4)).transpose(0, 1)[None]
    mask = bias[:1].expand(heads.shape[2], heads.shape[2])
    attention = torch.ops.cubin.scaled_dot_product_attention
    return attention(heads, heads, heads), attention(heads, heads, heads, mask)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("function", [_products_of_some_rows, _attention_of_some_rows])
def test_a_data_dependent_number_of_rows(function, grad, device):
    """One graph, forward and backward, for every number of rows that a mask leaves."""
    x, weight, bias = make_all(((8, 8), (6, 8), (6,)), device)
    counter = CompileCounterWithBackend("aot_eager")
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(function, fullgraph=True, backend=counter)
        for count in (5, 6, 1, 0):
            keep = torch.arange(8, device=device) < count
            leaves = [leaf.detach().requires_grad_(grad) for leaf in (x, weight, bias)]
            args = (leaves[0], keep, *leaves[1:])
            outs, expected = compiled(*args), function(*args)
            assert_near(outs, expected)
            if grad:
                sums = [sum(out.sin().sum() for out in each) for each in (outs, expected)]
                of = leaves if function is _products_of_some_rows else leaves[::2]
                assert_near(torch.autograd.grad(sums[0], of), torch.autograd.grad(sums[1], of))
    assert counter.frame_count == 1
