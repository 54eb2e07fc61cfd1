"""Declared ops in compiled graphs whose operands are parts of buffers: those begin at addresses
that the ops refuse, where eager code has copies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from declared import LAUNCH, cube, cube_backward, schema

import torch_cubin

Function = Callable[..., torch.Tensor]
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture(scope="module")
def op():
    backward = schema("cube_backward(Tensor grad_out, Tensor x) -> (Tensor grad_x)")
    return cube(backward=cube_backward(schema=backward).name)


def of_a_clone(op: Function, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return op(x[1:].clone())


def of_a_clone_of_a_product(op: Function, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return op((x @ w)[1:].clone())


def of_a_chain(op: Function, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return op(op(x[1:3].clone())) + op(x[:3].clone())[1:]


def whose_gradient_is_a_part(op: Function, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.cat([x[:3].detach(), op(x)]) @ w


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "call", [of_a_clone, of_a_clone_of_a_product, of_a_chain, whose_gradient_is_a_part]
)
def test_a_compiled_program_computes_what_eager_code_does(call, dynamic: bool, op) -> None:
    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic)
    for rows in (4, 7) if dynamic else (4,):
        x, w = (torch.randn(n, 5, requires_grad=True) for n in (rows, 5))
        with torch.no_grad():
            torch.testing.assert_close(compiled(op, x, w), call(op, x, w))
        found = []
        for function in (call, compiled):
            x.grad = w.grad = None
            function(op, x, w).square().sum().backward()
            found.append([x.grad, w.grad])
        torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("layout", ["dense", "strided"])
def test_operands_keep_their_strides(layout: str, dynamic: bool) -> None:
    """In another order of dims, with which the op has other results here."""
    op = cube(
        tensors={"x": f"float32[m, n] {layout}", "out": "float32[m, n]"},
        cpu=lambda x: x.clone() if x.is_contiguous() else x.t().contiguous().t() * 2,
    )

    def function(x: torch.Tensor) -> torch.Tensor:
        return op(x[1:].clone().t()) + op(x.t()[:, 1:].clone())

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)
    for rows in (4, 7) if dynamic else (4,):
        x = torch.randn(rows, 5)
        assert torch.equal(compiled(x), function(x))


@pytest.mark.parametrize("begins", [4, 16])
def test_gradients_that_are_given_begin_anywhere(begins: int, op) -> None:
    """Those that somebody gives to backward() are no part of a graph."""
    x = torch.randn(3, 5, requires_grad=True)
    given = torch.randn(3 * 5 + begins // 4)[begins // 4 :].view(3, 5)
    found = []
    for function in (op, torch.compile(lambda x: op(x), fullgraph=True)):
        x.grad = None
        function(x).backward(given)
        found.append(x.grad)
    torch.testing.assert_close(found[1], found[0])


def _add(x: torch.Tensor, y: torch.Tensor) -> None:
    x.add_(y)


@pytest.fixture(scope="module")
def add() -> Callable[..., None]:
    return torch_cubin.define_op(
        schema("add_(Tensor(a!) x, Tensor y) -> ()"),
        kernel=(LAUNCH, "vec_add"),
        tensors={"x": "float32[*s]", "y": "float32[*s]"},
        args=lambda x, y: (x, y, x, torch_cubin.int32(x.numel())),
        grid=lambda x: torch_cubin.cdiv(x.numel(), 256),
        block=256,
        cpu=_add,
    )


def to_a_clone(add: Function, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    part = x[1:].clone()
    add(part, y[1:].clone())
    return part


def to_a_clone_at_an_even_address(add: Function, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    part = x[4:].clone()
    add(part, y[4:].clone())
    return part


def to_a_clone_of_a_product(add: Function, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    product = x @ y[:5]
    part = product[1:].clone()
    add(part, y[1:].clone())
    return part * product[1:]


def to_an_argument(add: Function, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    add(x, y[:1].expand(7, 5).clone())
    return x[1:] * 2


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "call", [to_a_clone, to_a_clone_at_an_even_address, to_a_clone_of_a_product, to_an_argument]
)
def test_an_op_that_writes_to_parts(call, dynamic: bool, add) -> None:
    """Inductor clones other elements of the buffer than the program does."""
    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic)
    x, y = torch.randn(7, 5), torch.randn(7, 5)
    found = []
    for function in (call, compiled):
        own = x.clone()
        found.append([function(add, own, y), own])
    torch.testing.assert_close(found[1], found[0])


def test_a_built_in_op_that_writes_to_a_part() -> None:
    def function(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        part = x[1:].clone()
        torch.ops.cubin.addmm_into(part, g, g)
        return part

    x, g = torch.randn(6, 5), torch.randn(5, 5)
    torch.testing.assert_close(torch.compile(function)(x, g), function(x, g))


def test_operands_that_begin_where_the_pattern_says_are_not_copied(op) -> None:
    from torch._inductor.utils import run_and_get_code

    small = cube(tensors={"x": "float32[*s] align=4", "out": "float32[*s]"})

    def code_of(function: Function) -> str:
        with torch.no_grad():
            return "".join(run_and_get_code(torch.compile(function), torch.randn(4, 5))[1])

    assert "cpp_fused" not in code_of(lambda x: small(x[1:].clone()))
    assert "cpp_fused" not in code_of(lambda x: op(x[:2].clone()))
    assert "cpp_fused" in code_of(lambda x: op(x[1:].clone()))
