"""Tensor subclasses without memory of their own, which let PyTorch compute with themselves."""

from __future__ import annotations

import pytest
import torch
from declared import vec_add

import torch_cubin

ops = torch.ops.cubin


class Wrapper(torch.Tensor):
    """What it wraps it does not say to PyTorch."""

    @staticmethod
    def __new__(cls, *sizes):
        return torch.Tensor._make_wrapper_subclass(cls, sizes)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        with torch._C._DisableTorchDispatch():
            return func(*args, **(kwargs or {}))


_A, _Q, _CACHE = torch.ones(8, 8), torch.randn(1, 8, 2, 16), torch.randn(1, 32, 2, 16)
_ROWS = torch.ones(1, dtype=torch.int32)
# For a maker of tensors without memory, by sizes.
CALLS = {
    "matmul, first": lambda made: ops.matmul(made(8, 8), _A),
    "matmul, second": lambda made: ops.matmul(_A, made(8, 8)),
    "linear, input": lambda made: ops.linear(made(8, 8), _A),
    "linear, weight": lambda made: ops.linear(_A, made(8, 8)),
    "linear, bias": lambda made: ops.linear(_A, _A, made(8)),
    "linear, activation": lambda made: ops.linear(_A, _A, made(8), activation="gelu"),
    "addmm": lambda made: ops.addmm(made(8, 8), _A, _A),
    "addmm, last": lambda made: ops.addmm(_A, _A, made(8, 8)),
    "addmm_into": lambda made: ops.addmm_into(made(8, 8), _A, _A),
    "grouped_matmul": lambda made: ops.grouped_matmul(_A, made(1, 8, 8), offs=_ROWS),
    "rms_norm, weight": lambda made: ops.rms_norm(_A, (8,), made(8)),
    "softmax": lambda made: ops.softmax(made(8, 8), 0),
    "_linears, a weight": lambda made: ops._linears(_A, [_A, made(8, 8)], [None, None]),
    "_linears, a bias": lambda made: ops._linears(_A, [_A, _A], [None, made(8)]),
    "_linear_glu": lambda made: ops._linear_glu(_A, _A, made(8, 8), "silu"),
    "attention, query": lambda made: ops.scaled_dot_product_attention(made(1, 8, 2, 16), _Q, _Q),
    "attention, mask": lambda made: ops.scaled_dot_product_attention(_Q, _Q, _Q, made(2, 2)),
    "attention_forward": lambda made: ops.attention_forward(_Q, _Q, made(1, 8, 2, 16)),
    "attention_forward, sinks": lambda made: ops.attention_forward(_Q, _Q, _Q, sinks=made(8)),
    "flash_attention": lambda made: ops.flash_attention(_Q, _Q, made(1, 8, 2, 16)),
    "flash_attention_with_kvcache": lambda made: ops.flash_attention_with_kvcache(
        _Q, made(1, 32, 2, 16), _CACHE, cache_seqlens=_ROWS
    ),
    "declared": lambda made: vec_add()(made(8, 8), _A),
    "declared, as an operator": lambda made: vec_add().overload(_A, made(8, 8)),
}


NAMES = {
    "matmul, second": "matmul argument 'other'",
    "linear, bias": "linear argument 'bias'",
    "linear, activation": "argument 'bias'",
    "addmm, last": "addmm argument 'mat2'",
    "_linears, a bias": "linears argument 'biases'",
    "attention_forward, sinks": "attention_forward argument 'sinks'",
    "flash_attention_with_kvcache": "flash_attention_with_kvcache argument 'k_cache'",
    "declared, as an operator": "argument 'y'",
}


@pytest.mark.parametrize("name", NAMES)
def test_the_argument_is_named(name) -> None:
    with pytest.raises((RuntimeError, ValueError), match=NAMES[name]), torch.no_grad():
        CALLS[name](Wrapper)


# Each of these errors takes a fifth of a second: PyTorch's own has C++'s stack in its text.
@pytest.mark.parametrize(("name", "grad"), [(name, i % 2 == 0) for i, name in enumerate(CALLS)])
def test_a_wrapper_without_memory_is_named(name, grad) -> None:
    error = pytest.raises((RuntimeError, ValueError), match=r"\[input\]: .*a Wrapper")
    with error, torch.set_grad_enabled(grad):
        CALLS[name](Wrapper)


def test_a_plain_tensor_whose_storage_was_resized() -> None:
    def made(*sizes):
        tensor = torch.ones(*sizes)
        tensor.untyped_storage().resize_(0)
        return tensor

    # flash_attention: PyTorch's transpose refuses it
    for call in [call for name, call in CALLS.items() if name != "flash_attention"][::3]:
        with pytest.raises((RuntimeError, ValueError), match=r"\[input\]: .*no memory"):
            call(made)
    assert ops.matmul(torch.ones(0, 8), _A).shape == (0, 8)  # no elements need none


def test_wrappers_that_are_served_by_drop_in_or_not() -> None:
    """drop_in() leaves every subclass to PyTorch."""
    with torch_cubin.drop_in(), pytest.raises(RuntimeError, match="not allocated"):
        _ = Wrapper(8, 8) @ _A
    assert torch_cubin.report().served == ()
