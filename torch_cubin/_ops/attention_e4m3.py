"""attention_forward_e4m3, the op behind flash_attention of float8_e4m3fn, and its backward, for
PyTorch: errors for calls that need a derivative or a batching rule.
"""

from __future__ import annotations

import torch

from torch_cubin._ops import refusals
from torch_cubin._ops.raw_ops import E4M3, E4M3_BACKWARD


def register(library: torch.library.Library) -> None:
    advice = "Call torch_cubin.float8_attention, or it under torch.no_grad(), or use bfloat16."
    refusals.refuse_transforms(library, E4M3, advice=advice)
    advice = "Call it under torch.no_grad(), or use bfloat16."
    refusals.refuse_transforms(library, E4M3_BACKWARD, advice=advice)
