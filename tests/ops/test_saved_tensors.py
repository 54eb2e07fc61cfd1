"""Gradients where hooks return saved tensors with other strides and at other addresses."""

from __future__ import annotations

import pytest
import saved_tensors
import torch

# Other lengths of rows and heads have kernels of their own on a GPU alone.
NAMES = [
    name
    for name in saved_tensors.CASES
    if not name.endswith((" 96", "256", "768", "4096", "20001"))
]


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_saved_tensors_that_hooks_moved(name: str) -> None:
    function, _ = saved_tensors.CASES[name]
    inputs = saved_tensors.inputs_of(name, torch.float64, "cpu")
    out = function(*inputs)
    grad = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    expected = torch.autograd.grad(out, inputs, grad)
    for how, move in saved_tensors.MOVES.items():
        with saved_tensors.saved_elsewhere(move):
            out = function(*inputs)
        found = torch.autograd.grad(out, inputs, move(grad))
        torch.testing.assert_close(found, expected, msg=lambda text, how=how: f"{how}: {text}")
