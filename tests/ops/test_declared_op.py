"""Declared ops on the CPU and under fake tensors: checks, autograd, compile, export, opcheck.

What runs here through `cpu=` runs on CUDA through csrc/declared (tests/gpu/test_cuda_define_op.py).
"""

from __future__ import annotations

import pytest
import torch
from declared import (
    DECLARED,
    affine,
    axpy,
    copy_dense,
    cube,
    cube_with_backward_op,
    cube_with_formula,
    misaligned,
    repeat,
    schema,
)
from declared import vec_add as make_vec_add
from in_threads import in_threads
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import torch_cubin
from torch_cubin import errors


@pytest.fixture(scope="module")
def vec_add() -> torch_cubin.Op:
    return make_vec_add()


@pytest.fixture(scope="module")
def formula() -> torch_cubin.Op:
    return cube_with_formula()


@pytest.fixture(scope="module")
def declarative() -> torch_cubin.Op:
    return cube_with_backward_op()


X = torch.tensor([[1.0, -2.0, 3.0], [0.5, 4.0, -1.0]])


# --- calls that the definition does not allow ---

WRONG_CALLS = {
    "fp16": (lambda x, y: (x.half(), y), "float32"),
    "strided": (lambda x, y: (x.mT.contiguous().mT, y), "contiguous"),
    "shorter": (lambda x, y: (x, y[:1]), "*s = (2, 3) in (*s,), got shape (1, 3)"),
    "longer": (lambda x, y: (x[:1], y), "*s = (1, 3) in (*s,), got shape (2, 3)"),
    "of other dims": (lambda x, y: (x, y.view(-1)), "*s = (2, 3) in (*s,), got shape (6,)"),
    "misaligned": (lambda x, y: (x, misaligned(2, 3)), "16 bytes"),
    "meta beside cpu": (lambda x, y: (x, y.to("meta")), "device"),
    "sparse": (lambda x, y: (x.to_sparse(), y), ""),
}


@pytest.mark.parametrize("case", WRONG_CALLS)
def test_wrong_calls(vec_add, case: str) -> None:
    arguments, says = WRONG_CALLS[case]
    expected = (errors.InputError, NotImplementedError) if case == "sparse" else errors.InputError
    with pytest.raises(expected) as caught:
        vec_add(*arguments(X, X))
    assert says in str(caught.value)


def test_cpu_tensors_without_a_cpu_function() -> None:
    op = make_vec_add(cpu=None)
    with pytest.raises(errors.InputError, match="cuda, got cpu"):
        op(X, X)
    with pytest.raises(Exception, match=r"torch_cubin \[input\]"):
        torch.compile(op, backend="eager", fullgraph=True)(X, X)


def test_a_cpu_function_is_checked_against_the_definition() -> None:
    for wrong in (
        lambda x, y: (x + y).half(),
        lambda x, y: (x + y).view(-1),
        lambda x, y: [x, y],
        lambda x, y: None,
    ):
        with pytest.raises(errors.InputError, match="what cpu= returns"):
            make_vec_add(cpu=wrong)(X, X)
    same = make_vec_add(cpu=lambda x, y: x)
    assert same(X, X).data_ptr() != X.data_ptr()
    turned = make_vec_add(cpu=lambda x, y: (x + y).mT.contiguous().mT)
    assert turned(X, X).is_contiguous()


def test_every_kind_of_argument() -> None:
    op = affine()
    assert torch.equal(op(X, None, 2.0), 2 * X)
    assert torch.equal(op(X, X, 2.0, 5), 3 * X + 5)
    assert torch.equal(op(X, X, 2.0, relu=True, mode="negative"), (-3 * X).relu())
    assert torch.equal(op(X, None, 1.0, dtype=torch.float16), X + 100)
    with pytest.raises(errors.InputError, match="'bias'"):
        op(X, X[:1], 2.0)
    for arguments, more in (((X, X, 2.0, 5), {"relu": True}), ((X, None, 1.5), {})):
        torch.library.opcheck(op.overload, arguments, more)


def test_lists_and_outputs() -> None:
    total = torch_cubin.define_op(
        schema("total(Tensor[] xs) -> (Tensor sum, Tensor copy)"),
        kernel=(DECLARED, "add_two"),
        tensors={"xs": "float32[n]", "sum": torch_cubin.empty((4,), "float32"), "copy": "int64[2]"},
        args=lambda xs, sum, copy: (xs[0], copy, sum, torch_cubin.int32(4)),
        grid=1,
        block=32,
        cpu=lambda xs: (xs[0] + xs[1], torch.ones(2, dtype=torch.int64)),
    )
    ones = torch.ones(4)
    out, other = total([ones, 2 * ones])
    assert torch.equal(out, 3 * ones)
    assert other.dtype == torch.int64
    torch.library.opcheck(total.overload, ([ones, ones],))
    with pytest.raises(errors.InputError, match="'xs' item 1"):
        total([ones, ones.half()])


def test_mutation() -> None:
    op, ones = axpy(), torch.ones(4)
    y = ones.clone()
    before = y._version
    assert op(ones, y, 2.0) is None
    assert torch.equal(y, 3 * ones)
    assert y._version > before
    torch.library.opcheck(op.overload, (ones, ones.clone(), 0.5))
    leaf = torch.ones(4, requires_grad=True)
    saved = leaf.exp()
    square = saved * saved
    with torch.no_grad():
        op(ones, saved, 1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.sum().backward()
    compiled = torch.compile(
        lambda x, y: (op(x, y, 1.0), y * 2)[1], fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(ones, ones.clone()), 4 * ones)
    with pytest.raises(errors.InputError, match="changes its arguments"):
        op.register_autograd(lambda ctx: None)
    with pytest.raises(errors.InputError, match="torch.func"):
        vmap(lambda x, y: op(x, y, 1.0))(X, X.clone())


@pytest.mark.parametrize("layout", ["contiguous", "turned"])
def test_outputs_like_an_argument(layout: str) -> None:
    op = copy_dense()
    x = X.clone() if layout == "contiguous" else X.mT
    assert op(x).stride() == x.stride()
    torch.library.opcheck(op.overload, (x,))
    with pytest.raises(errors.InputError, match="gaps"):
        op(torch.empty(4, 8)[:, ::2])


# --- fake tensors, compile, export ---


def test_opcheck(vec_add, formula, declarative) -> None:
    torch.library.opcheck(vec_add.overload, (X, X))
    for op in (formula, declarative):
        for x in (X, X.clone().requires_grad_(), torch.empty(0, 3)):
            torch.library.opcheck(op.overload, (x,))


def test_compile_with_dynamic_sizes(vec_add) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda x, y: vec_add(x, y) * 2, fullgraph=True, dynamic=True, backend=counter
    )
    for n in (5, 8, 300, 7):
        x = torch.randn(n, 3)
        assert torch.equal(compiled(x, x), 4 * x)
    assert counter.frame_count == 1
    with pytest.raises(Exception, match=r"torch_cubin \[input\]"):
        compiled(torch.randn(4, 3), torch.randn(5, 3))


def test_compile_with_inductor(formula) -> None:
    compiled = torch.compile(lambda x: formula(x.sin()).sum(), fullgraph=True, dynamic=True)
    for n in (4, 9):
        x = torch.randn(n, 2, requires_grad=True)
        compiled(x).backward()
        wanted = 3 * x.sin() ** 2 * x.cos()
        torch.testing.assert_close(x.grad, wanted.detach())


def test_compile_raises_where_a_derivative_would_be_lost(vec_add) -> None:
    compiled = torch.compile(vec_add, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="has no derivative"):
        compiled(X.clone().requires_grad_(), X)
    with torch.no_grad():
        assert torch.equal(compiled(X.clone().requires_grad_(), X), 2 * X)


def test_a_backward_that_comes_after_the_first_compile() -> None:
    op = cube()
    assert torch.equal(torch.compile(op, fullgraph=True, backend="aot_eager")(X), X**3)
    op.register_autograd(
        lambda ctx, g: 3 * ctx.saved_tensors[0] ** 2 * g,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    x = X.clone().requires_grad_()
    torch.compile(lambda x: op(x).sum(), fullgraph=True, backend="aot_eager")(x).backward()
    assert torch.equal(x.grad, 3 * X**2)


def test_export(vec_add) -> None:
    class Model(torch.nn.Module):
        def forward(self, x, y):
            return vec_add(x, y).relu()

    n = torch.export.Dim("n")
    program = torch.export.export(Model(), (X, X), dynamic_shapes=({0: n}, {0: n}))
    assert vec_add.name.split("::")[1] in str(program.graph)
    x = torch.randn(7, 3)
    assert torch.equal(program.module()(x, x), (2 * x).relu())


def test_shapes_by_arithmetic_under_symbols() -> None:
    op = repeat()
    torch.library.opcheck(op.overload, (X,))
    compiled = torch.compile(lambda x: op(op(x)), fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((2, 3), (5, 7)):
        x = torch.randn(shape)
        assert torch.equal(compiled(x), x.repeat(1, 4))
    with pytest.raises(errors.InputError, match="dims"):
        op(torch.randn(3))


def test_meta_tensors(vec_add) -> None:
    meta = torch.empty(4, 5, device="meta")
    assert vec_add(meta, meta).shape == (4, 5)
    with pytest.raises(errors.InputError):
        vec_add(meta, meta[:2])


# --- derivatives ---


def test_no_derivative_is_an_error_never_a_zero(vec_add) -> None:
    leaf = X.clone().requires_grad_()
    with pytest.raises(errors.InputError, match="has no derivative"):
        vec_add(leaf, X)
    with torch.no_grad():
        assert torch.equal(vec_add(leaf, X), 2 * X)

    def loss(x):
        return vec_add(x, X).sum()

    for transform in (grad(loss), lambda x: jvp(loss, (x,), (x,)), jacrev(loss), jacfwd(loss)):
        with pytest.raises(errors.InputError, match="has no derivative"):
            transform(X)
    with pytest.raises(errors.InputError, match="has no derivative"):
        vmap(grad(lambda x: vec_add(x, x).sum()))(X)
    with pytest.raises(errors.InputError, match="has no derivative"), forward_ad.dual_level():
        vec_add(forward_ad.make_dual(X, X), X)
    # Where nothing is differentiated, transforms change nothing.
    assert torch.equal(grad(lambda w: (w * vec_add(X, X)).sum())(X), 2 * X)
    assert torch.equal(vmap(vec_add)(X, X), 2 * X)
    assert torch.equal(vmap(vec_add, in_dims=(0, None))(X, X[0]), X + X[0])
    assert torch.equal(vmap(vmap(vec_add))(X[None], X[None]), 2 * X[None])


@pytest.mark.parametrize("which", ["formula", "declarative"])
def test_first_derivatives(request, which: str) -> None:
    op = request.getfixturevalue(which)
    wanted = 3 * X**2
    leaf = X.clone().requires_grad_()
    op(leaf).sum().backward()  # the gradient is an expanded tensor
    torch.testing.assert_close(leaf.grad, wanted)
    torch.testing.assert_close(grad(lambda x: op(x).sum())(X), wanted)
    torch.testing.assert_close(vjp(op, X)[1](X)[0], wanted * X)
    torch.testing.assert_close(vmap(grad(lambda x: op(x).sum()))(X), wanted)
    torch.testing.assert_close(jacrev(op)(X[0]), torch.diag(wanted[0]))
    torch.testing.assert_close(grad(lambda x: vmap(op)(x).sum())(X), wanted)
    with torch.inference_mode():
        torch.testing.assert_close(op(X), X**3)
    for transform in (lambda: jvp(op, (X,), (X,)), lambda: jacfwd(op)(X[0])):
        with pytest.raises(errors.InputError, match="has no derivative"):
            transform()
    with pytest.raises(errors.InputError, match="has no derivative"), forward_ad.dual_level():
        op(forward_ad.make_dual(X, X))


def test_second_derivatives_of_a_formula(formula) -> None:
    leaf = X.clone().requires_grad_()
    (first,) = torch.autograd.grad(formula(leaf).sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), leaf)
    torch.testing.assert_close(second, 6 * X)
    torch.testing.assert_close(grad(lambda x: grad(lambda z: formula(z).sum())(x).sum())(X), 6 * X)
    torch.testing.assert_close(
        jacrev(jacrev(lambda x: formula(x).sum()))(X[0]), torch.diag(6 * X[0])
    )
    with pytest.raises(errors.InputError, match="has no derivative"):
        hessian(lambda x: formula(x).sum())(X[0])  # forward over reverse


def test_second_derivatives_of_a_declarative_backward(declarative) -> None:
    leaf = X.clone().requires_grad_()
    (first,) = torch.autograd.grad(declarative(leaf).sum(), leaf, create_graph=True)
    torch.testing.assert_close(first.detach(), 3 * X**2)
    with pytest.raises(errors.InputError, match="cube_backward' has no derivative"):
        first.sum().backward()
    with pytest.raises(errors.InputError, match="cube_backward' has no derivative"):
        grad(lambda x: grad(lambda z: declarative(z).sum())(x).sum())(X)


def test_gradients_of_lists_and_several_outputs() -> None:
    op = torch_cubin.define_op(
        schema("sums(Tensor[] xs, int n, Tensor? bias) -> (Tensor sum, Tensor difference)"),
        kernel=(DECLARED, "add_two"),
        tensors={
            "xs": "float32[m]",
            "bias": "float32[m]",
            "sum": "float32[n]",
            "difference": "float32[n]",
        },
        args=lambda xs, sum, difference, n: (xs[0], difference, sum, torch_cubin.int32(n)),
        grid=1,
        block=32,
        cpu=lambda xs, n, bias: (xs[0] + xs[1], xs[0] - xs[1]),
    )
    seen = []

    def backward(ctx, sum, difference):
        seen.append(ctx.needs_input_grad)
        return [sum + difference, sum - difference], None, None

    op.register_autograd(
        backward, setup_context=lambda ctx, inputs, output: seen.append(len(inputs[0]))
    )
    a, b = torch.ones(4, requires_grad=True), torch.ones(4)
    total, difference = op([a, b], 4, None)
    (2 * total + 5 * difference).sum().backward()
    assert torch.equal(a.grad, torch.full((4,), 7.0))
    assert seen == [2, ([True, False], False, False)]
    first = grad(lambda a: op([a, b], 4, None)[1].sum())(torch.ones(4))
    assert torch.equal(first, torch.ones(4))


WRONG_BACKWARDS = [
    (lambda ctx, g: (g, g, g), "2, one for each argument, None for none, got 3"),
    (lambda ctx, g: (g, 5), "'y'"),
]


@pytest.mark.parametrize(("backward", "says"), WRONG_BACKWARDS)
def test_wrong_formulas(backward, says: str) -> None:
    op = make_vec_add()
    op.register_autograd(backward)
    leaf = X.clone().requires_grad_()
    with pytest.raises(errors.InputError, match=says):
        op(leaf, leaf).sum().backward()


def test_wrong_backward_ops() -> None:
    leaf = X.clone().requires_grad_()
    for name, says in (
        ("nowhere::at_all", "Define 'nowhere::at_all' with torch_cubin.define_op"),
        ("aten::relu", "'self'|another name"),
        (make_vec_add().name, "another name"),
    ):
        op = cube(backward=name)
        with pytest.raises(errors.InputError, match=says):
            op(leaf).sum().backward()
    with pytest.raises(errors.InputError, match="callables"):
        cube().register_autograd(5)


def test_gradients_reach_kernels_without_gaps(declarative) -> None:
    """autograd hands on slices of cat's gradient: contiguous, but not at an aligned address."""
    a, b = torch.randn(3, requires_grad=True), torch.randn(5, requires_grad=True)
    weight = torch.randn(8)
    (torch.cat([declarative(a), declarative(b)]) * weight).sum().backward()
    torch.testing.assert_close(b.grad, 3 * b.detach() ** 2 * weight[3:])
    several = torch.randn(2, 8)
    leaf = weight.requires_grad_()
    (batched,) = torch.autograd.grad(declarative(leaf), leaf, several, is_grads_batched=True)
    torch.testing.assert_close(batched, 3 * leaf.detach() ** 2 * several)


def test_threads(formula) -> None:
    def work(seed: int) -> None:
        x = torch.full((5, 3), float(seed), requires_grad=True)
        for _ in range(50):
            x.grad = None
            formula(x).sum().backward()
            assert torch.equal(x.grad, torch.full((5, 3), 3.0 * seed**2)), seed

    in_threads(work, [(seed,) for seed in range(16)])
