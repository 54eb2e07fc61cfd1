"""Layers for the library `kernels` of Hugging Face's hub (tools/hub.py), which replaces the forward
of a model's layer by that of the class of the same name here.

The forwards run with the model's layer as `self`. `kernels` refuses classes with a constructor or
with other members.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_cubin._pytorch.modules import is_product


class Linear(nn.Module):
    """torch.nn.Linear"""

    can_torch_compile = True
    weight: Tensor
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        return torch.ops.cubin.linear(input, self.weight, self.bias)


class RMSNorm(nn.Module):
    """The norm of Llama and the many models like it: `weight` and `variance_epsilon`. The product
    with the weight is rounded once with the norm; in those models the norm is rounded before."""

    can_torch_compile = True
    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        shape, eps = list(self.weight.shape), self.variance_epsilon
        if self.weight.dtype == hidden_states.dtype:
            return torch.ops.cubin.rms_norm(hidden_states, shape, self.weight, eps)
        normed = F.rms_norm(hidden_states.float(), shape, eps=eps)
        return self.weight * normed.to(hidden_states.dtype)


class SwiGLUMLP(nn.Module):
    """`down_proj(silu(gate_proj(x)) * up_proj(x))`, whose gate and up are one product where they
    are plain layers without a bias."""

    can_torch_compile = True
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj, self.up_proj
        if is_product(gate) and is_product(up):
            hidden = torch.ops.cubin._linear_glu(x, gate.weight, up.weight, "silu")
        else:
            hidden = F.silu(gate(x)) * up(x)
        result: Tensor = self.down_proj(hidden)
        return result


__all__ = ["Linear", "RMSNorm", "SwiGLUMLP"]
