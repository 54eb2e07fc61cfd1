"""Inductor drops the clone of a tensor that an op then changes, and calls the op with one tensor
twice (pytorch#198031): that is an error that says so, never another result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from declared import LAUNCH, schema

import torch_cubin


def reverse_into(src: torch.Tensor, dst: torch.Tensor) -> None:
    """Reads `src` after it has begun to write: of one memory it gives another result."""
    for i in range(len(src)):
        dst[-1 - i] = src[i]


def attempt(function: Callable[..., Any], *args: Any) -> tuple[Any, str]:
    """What it returns, or the text of its error."""
    try:
        return torch.compile(function, backend="inductor", fullgraph=True)(*args), ""
    except RuntimeError as error:
        return None, str(error)


def changes() -> torch_cubin.Op:
    return torch_cubin.define_op(
        schema("reverse_into(Tensor src, Tensor(a!) dst) -> ()"),
        kernel=(LAUNCH, "vec_add"),
        tensors={"src": "float32[n]", "dst": "float32[n]"},
        args=lambda src, dst, n: (src, src, dst, torch_cubin.int32(n)),
        grid=1,
        block=64,
        cpu=reverse_into,
    )


def of_a_clone(op: Any, x: torch.Tensor) -> torch.Tensor:
    op(x.clone(), x)
    return x * 2.0


def of_a_clone_of_a_part(op: Any, x: torch.Tensor) -> torch.Tensor:
    op(x[:8].clone(), x[:8])
    op(x[8:].clone(), x[8:])
    return x * 2.0


def of_a_computed_one(op: Any, x: torch.Tensor) -> torch.Tensor:
    y = x + 1.0
    op(y.clone(), y)
    return y


def of_each_other(op: Any, x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    op(y, x)
    op(x.clone(), y)
    return x + y


def as_an_operator(op: Any, x: torch.Tensor) -> torch.Tensor:
    op.overload(x.clone(), x)
    return x * 2.0


def without_a_clone(op: Any, x: torch.Tensor) -> torch.Tensor:
    op(x + 0.5, x)
    return x * 2.0


CALLS = [of_a_clone, of_a_clone_of_a_part, of_a_computed_one, of_each_other, as_an_operator,
         without_a_clone]  # fmt: skip


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("call", CALLS)
def test_of_a_declared_op(call: Callable[..., Any], version: int) -> None:
    op = changes()
    eager, compiled = torch.arange(16.0), torch.arange(16.0)
    wanted = call(op, eager)
    with torch._inductor.config.patch(enable_auto_functionalized_v2=version == 2):
        got, error = attempt(call, op, compiled)
    if error:
        assert "shares memory" in error
        assert "pytorch#198031" in error
        assert call is not without_a_clone
    else:
        assert torch.equal(got, wanted)
        assert torch.equal(compiled, eager)


@pytest.mark.usefixtures("fresh_dynamo")
def test_of_a_cache() -> None:
    """A cache's new keys are a part of a clone of the cache."""

    def call(q, keys, values, lengths):
        new = keys.clone()[:, :1], values.clone()[:, :1]
        out = torch.ops.cubin.flash_attention_with_kvcache(
            q, keys, values, *new, cache_seqlens=lengths, causal=True
        )
        return out, keys.sum(), values.sum()

    torch.manual_seed(0)
    sizes = (1, 1, 2, 16), (1, 8, 2, 16), (1, 8, 2, 16)
    tensors = [torch.randn(*size).bfloat16() for size in sizes]
    arguments = [*tensors, torch.tensor([3], dtype=torch.int32)]
    eager, compiled = ([x.clone() for x in arguments] for _ in range(2))
    wanted = call(*eager)
    got, error = attempt(call, *compiled)
    if error:
        assert "pytorch#198031" in error
    else:
        torch.testing.assert_close((got, compiled), (wanted, eager))


@pytest.mark.usefixtures("fresh_dynamo")
def test_addmm_into_of_a_dropped_clone() -> None:
    """addmm_into adds a product of a clone of the sum to it."""

    def call(total, factor):
        torch.ops.cubin.addmm_into(total, total.clone(), factor)
        return total * 2.0

    torch.manual_seed(0)
    total, factor = torch.randn(8, 8), torch.randn(8, 8)
    eager, compiled = total.clone(), total.clone()
    wanted = call(eager, factor)
    got, error = attempt(call, compiled, factor)
    if error:
        assert "pytorch#198031" in error
    else:
        torch.testing.assert_close((got, compiled), (wanted, eager))
