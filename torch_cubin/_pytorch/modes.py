"""PyTorch's state that drop_in() checks: active modes and hooks, and fused fast paths."""

from __future__ import annotations

from typing import Any

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
# The active function modes of this thread, innermost last.
function_modes = NESTED.find("overrides._get_current_function_mode_stack", list)

FUSED_LAYERS = Feature(
    "report() of layers that PyTorch fuses", "layers served by PyTorch as a whole are not listed"
)
_FUSED = ("_transformer_encoder_layer_fwd", "_native_multi_head_attention")
fused_layers: dict[str, Any] = {
    f"torch.{name}": function
    for name, function in ((name, FUSED_LAYERS.find(name, None)) for name in _FUSED)
    if function is not None
}

FAST_PATHS = Feature(
    "PyTorch's fused attention layers inside drop_in()",
    "they may multiply with PyTorch's own kernels, which report() then lacks",
)
FAST_PATHS.find("backends.mha._is_fastpath_enabled", None)
FAST_PATHS.find("overrides._get_current_function_mode_stack", None)
pop_mode = FAST_PATHS.find("overrides._pop_mode", None)
push_mode = FAST_PATHS.find("overrides._push_mode", None)


def fast_path_is_on() -> bool:
    """PyTorch's process-wide switch of the fused transformer layers."""
    return mha._is_fastpath_enabled


def saves_tensors_by_hooks() -> bool:
    """Whether saved-tensor hooks are active, as under activation checkpointing."""
    return _top_hooks(True) is not None
