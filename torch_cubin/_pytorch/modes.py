"""What drop_in() asks of PyTorch: modes and hooks that are on, and its fused fast paths."""

from __future__ import annotations

from typing import Any

import torch
from torch.backends import mha

from torch_cubin._pytorch.internals import Feature

CHECKPOINTS = Feature(
    "drop_in() beside activation checkpointing",
    "products that need a gradient save a tensor more, checkpointed or not",
)
_top_hooks = CHECKPOINTS.find(
    "_C._autograd._top_saved_tensors_default_hooks", lambda ignore_internal: True
)

NESTED = Feature(
    "report() of a drop_in() inside another", "a call left to PyTorch counts once in each"
)
_modes = NESTED.find("overrides._get_current_function_mode_stack", list)

FUSED_LAYERS = Feature(
    "report() of layers that PyTorch fuses", "layers served by PyTorch as a whole are not listed"
)
_FUSED = ("_transformer_encoder_layer_fwd", "_native_multi_head_attention")
fused_layers: dict[str, Any] = {
    f"torch.{name}": function
    for name, function in ((name, FUSED_LAYERS.find(name, None)) for name in _FUSED)
    if function is not None
}

FUSED_PATHS = Feature(
    "drop_in() entered inside a function that torch.compile traces",
    "PyTorch fuses its transformer layers there, unseen",
)
_HAS_SWITCH = FUSED_PATHS.find("backends.mha._is_fastpath_enabled", None) is not None


def traced_fastpath() -> bool:
    """mha.get_fastpath_enabled(), for code that torch.compile traces."""
    return _HAS_SWITCH and mha._is_fastpath_enabled


def set_traced_fastpath(enabled: bool) -> None:
    """mha.set_fastpath_enabled(), for code that torch.compile traces."""
    if _HAS_SWITCH:
        mha._is_fastpath_enabled = enabled


def saves_tensors_by_hooks() -> bool:
    """Whether saved tensors go through hooks now, as under activation checkpointing."""
    return _top_hooks(True) is not None


def function_modes() -> list[torch.overrides.TorchFunctionMode]:
    """Those that are on in this thread, the innermost last."""
    return _modes()
