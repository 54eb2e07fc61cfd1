# Where there is a mask, transformers' attention "sdpa" copies keys and values for the heads that
# share them, and PyTorch makes numbers of a boolean one, before any operator that install() and
# drop_in() serve. So its function is wrapped, and calls our op with the heads and the mask as they
# are.
"""transformers' "sdpa" under install() and drop_in(): attention with a mask reads shared heads
unrepeated, and a boolean mask."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from torch_cubin._drop_in import aten_kernels, report, transformers_hooks
from torch_cubin._pytorch import transforms

_NAME = "sdpa"
_REPORTED = "transformers attention"  # as huggingface.py counts its own


def _wrap_in(module: ModuleType) -> None:
    interface = getattr(module, "AttentionInterface", None)  # transformers 4.53 and newer have it
    if interface is None:
        return
    own = interface().get(_NAME)
    if own is getattr(module, "sdpa_attention_forward", None):  # not a program's own function
        interface.register(_NAME, _wrapped(own))


def _wrapped(sdpa: Any) -> Any:
    @functools.wraps(sdpa)
    def attention(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **options: Any,
    ) -> Any:
        # In compiled graphs the fold pass does so.
        compiling = torch.compiler.is_compiling()
        given = (query, key, value, attention_mask)
        if compiling or dropout != 0 or not _serves(module, *given, **options):
            return sdpa(module, *given, dropout=dropout, scaling=scaling, **options)
        out = torch.ops.cubin.scaled_dot_product_attention(
            *given, 0.0, False, scale=scaling, enable_gqa=True
        )
        report.count_served(_REPORTED, (query, key), out)
        return out.transpose(1, 2).contiguous(), None

    return attention


def _serves(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> bool:
    """Whether transformers would repeat the heads, or PyTorch change many queries' mask, PyTorch
    take a kernel that is served, and no derivative or transformation of the call be asked for."""
    groups = getattr(module, "num_key_value_groups", 1)
    policy = aten_kernels.policy_of_thread() or transformers_hooks.policy
    if mask is None or position_bias is not None or policy == "off":
        return False
    many = query.shape[2] >= aten_kernels.QUERIES_OF_BOOLEAN_MASKS
    if groups == 1 and not (many and mask.dtype == torch.bool):
        return False
    tensors = (query, key, value, mask)
    if any(type(tensor) is not Tensor for tensor in tensors):
        return False
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return False
    if transforms.transforms_active() or transforms.dual_level_is_open(*tensors):
        return False
    shared = (query.shape[0], query.shape[1] // groups)
    shaped = key.shape[:2] == value.shape[:2] == shared and key.shape[2] == value.shape[2]
    return (
        shaped
        and mask.dim() == 4
        and mask.shape[3] == key.shape[2]
        and query.dtype == key.dtype == value.dtype
        and _by_a_kernel_with_masks()
        and not torch.jit.is_tracing()  # type: ignore[attr-defined]
        and aten_kernels.serves_attention(query, mask, policy)
    )


def _by_a_kernel_with_masks() -> bool:
    """Whether PyTorch may choose its efficient kernel or cuDNN's: see torch.nn.attention's
    sdpa_kernel()."""
    backends = torch.backends.cuda
    return backends.mem_efficient_sdp_enabled() or backends.cudnn_sdp_enabled()


HOOKS: tuple[transformers_hooks.Hook, ...] = (("transformers.modeling_utils", _wrap_in, False),)

__all__ = ["HOOKS"]
