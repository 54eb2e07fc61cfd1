# Models of transformers write out their RMS norm and their SwiGLU, and "grouped_mm" experts are a
# dozen operators around two products: PyTorch runs each of these operators by itself, and
# install(), which stands below them, cannot join them. So the functions are wrapped. A call that is
# not served runs transformers' function as if there were no wrapper.
"""transformers' layers under install(): norms, gated linear layers and experts in few kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_cubin import huggingface
from torch_cubin._drop_in import aten_kernels, report, transformers_hooks
from torch_cubin._drop_in.why_not import SHAPES, why_not
from torch_cubin._ops.batch_invariant import is_batch_invariant
from torch_cubin._pytorch import transforms
from torch_cubin._pytorch.compiler import assume_constant_result, is_exporting
from torch_cubin._pytorch.modules import is_product

_EXPERTS = "grouped_mm"
_NAME_OF_EXPERTS = "transformers experts"

# Rows of a gated layer from which its backward, in Python, does not bound the host. A training step
# of a Llama of 1 B, on an H200: 4 x 2048 tokens 1.20 of stock PyTorch's speed, 1.19 without gated
# layers, which keep 2.1 GB more; 128 tokens 1.23 and 1.40.
_ROWS_WITH_GRADIENTS = 2048


@assume_constant_result
def _serves_type(device: torch.device, dtype: torch.dtype, policy: str, kind: str) -> bool:
    return aten_kernels.serves_type(device, dtype, policy, kind)


def _why_not(kind: str, x: Any, *others: Any) -> str | None:
    """The reason to leave a call with these tensors to transformers, or None."""
    for other in others:
        reason = why_not(x, other)
        if reason:
            return reason
    if torch.is_autocast_enabled(x.device.type):
        return "autocast"
    if x.dtype is torch.float64:
        return "dtype float64"
    if transforms.transforms_active() or transforms.dual_level_is_open(x, *others):
        return "a transform of torch.func"
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        return "torch.jit.trace"
    if not _serves_type(x.device, x.dtype, transformers_hooks.policy, kind):
        return "not known to be quicker"
    return None if x.numel() else SHAPES


# --- layers that models write out ---
# In compiled graphs Inductor fuses the norm, and the fold pass does the gated layer.


def _written_norm(self, hidden_states):  # type: ignore[no-untyped-def]
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return self.weight * hidden_states.to(input_dtype)


def _norm(layer: Any, x: Any) -> Tensor | str:
    """PyTorch's operator, which install() serves. It rounds once, where the layer rounds twice."""
    weight, epsilon = layer.weight, layer.variance_epsilon
    reason = _why_not("norm", x, weight)
    if reason:
        return reason
    if weight.dim() != 1 or x.shape[-1:] != weight.shape:
        return SHAPES
    if not isinstance(epsilon, float):
        return "an epsilon that is no float"
    return F.rms_norm(x, weight.shape, weight, epsilon)


def _written_gate(self, x):  # type: ignore[no-untyped-def]
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return down_proj


def _gated(layer: Any, x: Any) -> Tensor | str:
    """Gate and up in one product, rounded once."""
    gate, up = layer.gate_proj, layer.up_proj
    if not is_product(gate) or not is_product(up):
        return "gate_proj or up_proj is no plain nn.Linear without a bias"
    activation = huggingface.activation_name(layer.act_fn)
    if activation is None:
        return f"activation {type(layer.act_fn).__name__}"
    tensors = (x, gate.weight, up.weight)
    reason = _why_not("product", *tensors)
    if reason:
        return reason
    if x.dim() == 0 or gate.weight.shape != up.weight.shape or gate.weight.dim() != 2:
        return SHAPES
    if x.shape[-1:] != gate.weight.shape[1:]:
        return SHAPES
    has_gradients = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    # Served calls round otherwise than calls that are left.
    if is_batch_invariant():
        return "batch invariance"
    if has_gradients and x.numel() < _ROWS_WITH_GRADIENTS * x.shape[-1]:
        return f"fewer than {_ROWS_WITH_GRADIENTS} rows with gradients"
    hidden = torch.ops.cubin._linear_glu(*tensors, activation)
    report.count_served(_NAME_OF_GATED, tensors, hidden)
    result: Tensor = layer.down_proj(hidden)
    return result


_NAME_OF_GATED = "transformers gate_proj and up_proj"

Serve = Callable[[Any, Any], Tensor | str]
# The forward that a layer must have, what computes the same or says why not, and the name under
# which report() lists calls that are left. Calls of norms that are served are aten's.
_LAYERS: tuple[tuple[Callable[..., Any], Serve, str], ...] = (
    (_written_norm, _norm, "transformers norm"),
    (_written_gate, _gated, _NAME_OF_GATED),
)


def _code_of(function: Any) -> tuple[object, ...] | None:
    """What a function computes: equal for equal sources."""
    if type(function) is not FunctionType or function.__globals__.get("torch") is not torch:
        return None
    code = function.__code__
    # A docstring is the first constant, in place of None.
    constants = code.co_consts if function.__doc__ is None else (None, *code.co_consts[1:])
    return code.co_code, constants, code.co_names, code.co_varnames, code.co_argcount


def _wrap_layers(module: ModuleType) -> None:
    for layer in list(vars(module).values()):
        if not isinstance(layer, type) or layer.__module__ != module.__name__:
            continue
        own: Any = vars(layer).get("forward")
        code = None if own is None else _code_of(own)
        for written, serve, name in _LAYERS:
            if code is not None and code == _code_of(written):
                layer.forward = _wrapped(own, serve, name)  # type: ignore[attr-defined]


def _wrapped(own: Any, serve: Serve, name: str) -> Any:
    @functools.wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # The policy is read last: a graph in which it was read is compiled anew when it changes.
        if torch.compiler.is_compiling() or transformers_hooks.policy == "off":
            return own(self, *args, **kwargs)
        # torch.fx passes a Proxy: what serve() reads of the layer would become nodes of its graph.
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            return own(self, *args, **kwargs)
        out = serve(self, *args)
        if not isinstance(out, str):
            return out
        report.count_declined(name, out)
        return own(self, *args)

    return forward


# --- experts ---


def _wrap_experts(module: ModuleType) -> None:
    interface = getattr(module, "ALL_EXPERTS_FUNCTIONS", None)  # transformers 5 has it
    if interface is None:
        return
    own = interface.get(_EXPERTS)
    if own is getattr(module, "grouped_mm_experts_forward", None):  # not a program's own function
        interface.register(_EXPERTS, _wrapped_experts(own))


def _wrapped_experts(own: Any) -> Any:
    @functools.wraps(own)
    def experts(
        self: torch.nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        # torch.export makes programs for processes without torch_cubin.
        if transformers_hooks.policy == "off" or is_exporting():
            return own(self, hidden_states, top_k_index, top_k_weights)
        reason = _why_not_experts(self, hidden_states, top_k_index, top_k_weights)
        compiling = torch.compiler.is_compiling()
        if reason is not None:
            count = report.count_traced_declined if compiling else report.count_declined
            count(_NAME_OF_EXPERTS, reason)
            return own(self, hidden_states, top_k_index, top_k_weights)
        out = huggingface.experts(self, hidden_states, top_k_index, top_k_weights)
        if compiling:
            report.count_traced_served(_NAME_OF_EXPERTS, out.dtype, out.device.type)
        else:
            report.count_served(_NAME_OF_EXPERTS, (hidden_states, self.down_proj), out)
        return out

    return experts


def _why_not_experts(layer: Any, x: Tensor, ids: Tensor, weights: Tensor) -> str | None:
    if huggingface.gate_activation(layer) is None:
        return "a gate or biases of the model's own"
    reason = _why_not("experts", x, layer.gate_up_proj, layer.down_proj)
    if reason:
        return reason
    for tensor in (ids, weights):
        if type(tensor) is not Tensor or tensor.device != x.device:
            return "routing by a tensor subclass, or on another device"
    if ids.dtype not in (torch.int32, torch.int64) or not weights.is_floating_point():
        return "routing of another dtype"
    if x.dim() != 2 or ids.dim() != 2 or weights.shape != ids.shape or ids.shape[0] != x.shape[0]:
        return SHAPES
    return None


HOOKS: tuple[transformers_hooks.Hook, ...] = (
    ("transformers.models.", _wrap_layers, True),
    ("transformers.integrations.moe", _wrap_experts, False),
)

__all__ = ["HOOKS"]
