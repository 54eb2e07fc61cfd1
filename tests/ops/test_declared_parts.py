"""Declared ops in compiled graphs whose operands are parts of buffers: those begin at addresses
that the ops refuse, where eager code has copies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from declared import cube, cube_backward, schema

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


def test_operands_that_begin_where_the_pattern_says_are_not_copied(op) -> None:
    from torch._inductor.utils import run_and_get_code

    small = cube(tensors={"x": "float32[*s] align=4", "out": "float32[*s]"})

    def code_of(function: Function) -> str:
        with torch.no_grad():
            return "".join(run_and_get_code(torch.compile(function), torch.randn(4, 5))[1])

    assert "cpp_fused" not in code_of(lambda x: small(x[1:].clone()))
    assert "cpp_fused" not in code_of(lambda x: op(x[:2].clone()))
    assert "cpp_fused" in code_of(lambda x: op(x[1:].clone()))
