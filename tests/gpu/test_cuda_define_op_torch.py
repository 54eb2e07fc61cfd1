"""Declared ops and PyTorch, on a GPU: graphs, threads, packages, compile, export, derivatives."""

from __future__ import annotations

import gc
import math

import pytest
import torch
from declared import (
    LAUNCH,
    affine,
    axpy,
    cube,
    cube_with_backward_op,
    cube_with_formula,
    schema,
    small,
    vec_add,
)
from gpu import hopper
from in_threads import in_threads
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, jacrev, jvp, vmap

import torch_cubin
from torch_cubin import int32 as i32

pytestmark = hopper.for_cubins


@pytest.fixture(scope="module")
def add() -> torch_cubin.Op:
    return vec_add()


@pytest.fixture(scope="module")
def formula() -> torch_cubin.Op:
    return cube_with_formula()


@pytest.fixture(scope="module")
def declarative() -> torch_cubin.Op:
    return cube_with_backward_op()


# --- graphs, threads, definitions ---


def replays_of_two_sums(graph: torch.cuda.CUDAGraph, x: Tensor, y: Tensor, out: Tensor) -> None:
    """The kernels live on without the op."""
    gc.collect()
    for _ in range(3):
        x.copy_(small(1000))
        out.fill_(math.nan)
        graph.replay()
        assert torch.equal(out, x + 2 * y)


@pytest.mark.parametrize("first", ["eager", "captured"])
def test_cuda_graphs(first: str) -> None:
    op = vec_add()
    x, y = small(1000), small(1000)
    if first == "eager":
        op(x, y)
    else:
        op.preload()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = op(op(x, y), y)
    del op
    replays_of_two_sums(graph, x, y, out)


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_a_first_call_inside_a_capture(mode: str) -> None:
    """The captured call loads the kernel; replays go on after the Python objects are gone."""
    op = vec_add()
    x, y = small(1000), small(1000)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        out = op(x, y)
        with pytest.raises(torch_cubin.errors.InputError):
            op(x, y[:999])
        out = op(out, y)
    del op
    replays_of_two_sums(graph, x, y, out)


@pytest.mark.child("declared_slots")
def test_every_slot_runs_its_own_op(child) -> None:
    assert child.check() == {"ops": 1024, "wrong": []}


def test_threads(declarative) -> None:
    op = vec_add()

    def work(seed: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            x = torch.full((1000 + seed,), float(seed), device="cuda")
            for _ in range(100):
                leaf = op(x, x).requires_grad_()
                declarative(leaf).sum().backward()
                assert leaf.grad.eq(3 * (2.0 * seed) ** 2).all(), seed
            stream.synchronize()

    in_threads(work, [(seed,) for seed in range(16)])


def test_redefinition_of_an_op() -> None:
    text = schema("f(Tensor x, Tensor y) -> Tensor")
    op = vec_add(schema=text)
    x, y = small(1000), small(1000)
    assert torch.equal(op(x, y), x + y)
    with pytest.warns(UserWarning, match="defined again"):
        vec_add(schema=text, args=lambda x, y, out: (x, x, out, i32(x.numel())))
    assert torch.equal(op(x, y), 2 * x)


def test_packages(tmp_path) -> None:
    op = cube()
    folder = torch_cubin.save_package(tmp_path / "package", [op])
    text = (folder / "manifest.json").read_text()
    space = op.name.split("::")[0]
    (folder / "manifest.json").write_text(text.replace(space, f"{space}_loaded"))
    (loaded,) = torch_cubin.load_package(folder).values()
    x = small(1000)
    assert torch.equal(loaded(x), x**3)


# --- torch.compile, export, autograd ---


def test_compile_with_dynamic_sizes(add) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, y: add(x.sin(), y) * 2, fullgraph=True, dynamic=True)
    for n in (5, 300, 100_003):
        x, y = small(n, 3), small(n, 3)
        torch.testing.assert_close(compiled(x, y), (x.sin() + y) * 2)
    with pytest.raises(Exception, match=r"torch_cubin \[input\]"):
        compiled(small(4, 3), small(5, 3))


def test_compile_reduce_overhead(add) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: add(x, x).relu(), fullgraph=True, mode="reduce-overhead")
    for _ in range(5):
        x = small(1000)
        assert torch.equal(compiled(x), (2 * x).relu())


def test_export(add) -> None:
    class Model(torch.nn.Module):
        def forward(self, x, y):
            return add(x, y).relu()

    n = torch.export.Dim("n")
    x = small(7, 3)
    program = torch.export.export(Model(), (x, x), dynamic_shapes=({0: n}, {0: n}))
    y = small(100, 3)
    assert torch.equal(program.module()(y, y), (2 * y).relu())


def test_opcheck(add, formula, declarative) -> None:
    x = small(5, 3)
    torch.library.opcheck(add.overload, (x, x))
    torch.library.opcheck(affine().overload, (x, x, 2.0, 5), {"relu": True, "mode": "negative"})
    torch.library.opcheck(axpy().overload, (x, x.clone(), 2.0))
    for op in (formula, declarative):
        for leaf in (x, x.clone().requires_grad_()):
            torch.library.opcheck(op.overload, (leaf,))


@pytest.mark.parametrize("which", ["formula", "declarative"])
def test_derivatives(request, which: str) -> None:
    op = request.getfixturevalue(which)
    x = small(4, 3)
    leaf = x.clone().requires_grad_()
    op(leaf).sum().backward()
    assert torch.equal(leaf.grad, 3 * x**2)
    assert torch.equal(grad(lambda x: op(x).sum())(x), 3 * x**2)
    assert torch.equal(vmap(grad(lambda x: op(x).sum()))(x), 3 * x**2)
    assert torch.equal(jacrev(op)(x[0].clone()), torch.diag(3 * x[0] ** 2))
    with torch.no_grad():
        assert torch.equal(op(leaf), x**3)
    with pytest.raises(RuntimeError, match="no derivative"):
        jvp(op, (x,), (x,))
    compiled = torch.compile(lambda x: op(x).sum(), fullgraph=True, dynamic=True)
    leaf.grad = None
    compiled(leaf).backward()
    assert torch.equal(leaf.grad, 3 * x**2)
    (first,) = torch.autograd.grad(op(leaf).sum(), leaf, create_graph=True)
    if which == "formula":
        (second,) = torch.autograd.grad(first.sum(), leaf)
        assert torch.equal(second, 6 * x)
    else:
        with pytest.raises(RuntimeError, match="cube_backward' has no derivative"):
            first.sum().backward()


def test_no_derivative_is_an_error_never_a_zero(add) -> None:
    x = small(4, 3)

    def loss(x):
        return add(x, x).sum()

    for transform in (grad(loss), lambda x: jvp(loss, (x,), (x,)), jacrev(loss)):
        with pytest.raises(RuntimeError, match="no derivative"):
            transform(x)
    assert torch.equal(vmap(add)(x, x), 2 * x)
    level = pytest.raises(RuntimeError, match="forward-mode level")
    with torch.no_grad(), forward_ad.dual_level(), level:  # tangents pass under no_grad, too
        add(forward_ad.make_dual(x, x), x)
    with pytest.raises(Exception, match="no derivative"):
        torch.compile(add, fullgraph=True)(x.clone().requires_grad_(), x)


def test_gradients_at_any_storage_offset(declarative) -> None:
    a, b = small(3).requires_grad_(), small(5).requires_grad_()
    weight = small(8)
    (torch.cat([declarative(a), declarative(b)]) * weight).sum().backward()
    assert torch.equal(b.grad, 3 * b.detach() ** 2 * weight[3:])


def test_a_compiled_backward_takes_gradients_that_begin_anywhere(declarative) -> None:
    """Inductor aligns a graph's inputs on GPUs."""
    x = small(3, 5).requires_grad_()
    given = small(16)[1:].view(3, 5)
    found = []
    for function in (declarative, torch.compile(lambda x: declarative(x), fullgraph=True)):
        x.grad = None
        function(x).backward(given)
        found.append(x.grad)
    assert torch.equal(found[1], found[0])


def test_a_compiled_program_writes_to_a_clone_of_a_part() -> None:
    """Without the pass, Inductor clones other elements."""
    add = torch_cubin.define_op(
        schema("add_(Tensor(a!) x, Tensor y) -> ()"),
        kernel=(LAUNCH, "vec_add"),
        tensors={"x": "float32[*s]", "y": "float32[*s]"},
        args=lambda x, y: (x, y, x, i32(x.numel())),
        grid=lambda x: torch_cubin.cdiv(x.numel(), 256),
        block=256,
    )

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        part = x[1:].clone()
        add(part, y[1:].clone())
        return part

    x, y = small(5, 5), small(5, 5)
    assert torch.equal(torch.compile(function, fullgraph=True)(x, y), x[1:] + y[1:])
