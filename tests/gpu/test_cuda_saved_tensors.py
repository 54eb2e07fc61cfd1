"""Gradients where hooks return saved tensors with other strides and at other addresses, at which a
kernel that reads vectors would fault, and for gradients like that."""

from __future__ import annotations

import pytest
import saved_tensors
import torch
from torch import Tensor

import torch_cubin

TOLERANCE = {torch.bfloat16: 0.03, torch.float16: 0.005, torch.float32: 2e-3}


def check(function, inputs: list[Tensor], tolerance: float) -> None:
    out = function(*inputs)
    grad = torch.linspace(-1, 1, out.numel(), device="cuda").to(out.dtype).view(out.shape)
    expected = torch.autograd.grad(out, inputs, grad)
    for how, move in saved_tensors.MOVES.items():
        with saved_tensors.saved_elsewhere(move):
            out = function(*inputs)
        found = torch.autograd.grad(out, inputs, move(grad))
        torch.cuda.synchronize()
        for i, (own, other) in enumerate(zip(found, expected, strict=True)):
            off, size = (x.float().abs().max() for x in (own.double() - other.double(), other))
            assert off <= tolerance * size, f"{how}: gradient {i}"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", saved_tensors.CASES)
def test_gradients_of_saved_tensors_that_hooks_moved(name: str, dtype: torch.dtype) -> None:
    check(
        saved_tensors.CASES[name][0],
        saved_tensors.inputs_of(name, dtype, "cuda"),
        TOLERANCE[dtype],
    )


@pytest.mark.parametrize("head_dim", [64, 128])
def test_attention_of_8_bit_floats(head_dim: int, generator: torch.Generator) -> None:
    sizes = ((2, 4, 200, head_dim), (2, 2, 200, head_dim), (2, 2, 200, head_dim))
    inputs = [
        torch.randn(size, dtype=torch.bfloat16, device="cuda", generator=generator)
        for size in sizes
    ]
    for tensor in inputs:
        tensor.requires_grad_()
    check(torch_cubin.float8_attention, inputs, 0.01)


def test_a_layer_of_8_bit_floats(generator: torch.Generator) -> None:
    layer = torch_cubin.float8(torch.nn.Linear(256, 384), training=True).cuda().bfloat16()
    x = torch.randn(192, 256, dtype=torch.bfloat16, device="cuda", generator=generator)
    inputs = [x.requires_grad_(), layer.weight, layer.bias]
    check(lambda x, *_: layer(x), inputs, 0.01)
