"""Fake kernels: what the raw ops return, without data, for torch.compile, export and meta tensors.

The public ops need none: they forward to these. Outputs are contiguous, as on every device.
"""

from __future__ import annotations

import torch

from torch_cubin import _checks


def _matmul(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return self.new_empty(_checks.check_matmul(self, other))


def _linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return input.new_empty(_checks.check_linear(input, weight, bias))


def register(library: torch.library.Library) -> None:
    for name, fake in (("matmul", _matmul), ("linear", _linear)):
        torch.library.register_fake(f"cubin::_{name}", fake, lib=library)
        torch.library.register_fake(f"cubin::_{name}_autograd", fake, lib=library)
