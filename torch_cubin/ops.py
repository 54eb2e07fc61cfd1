"""The public ops of ``torch.ops.cubin``, under names that editors and type checkers can resolve.

    from torch_cubin import ops

    c = ops.matmul(a, b)        # torch.ops.cubin.matmul itself

Each name is the op packet itself, so calls have no overhead. ``python tools/op_stubs.py`` writes
their types to ops.pyi from the schemas.
"""

import torch

add_rms_norm = torch.ops.cubin.add_rms_norm
addmm = torch.ops.cubin.addmm
addmm_into = torch.ops.cubin.addmm_into
attention_backward = torch.ops.cubin.attention_backward
attention_backward_e4m3 = torch.ops.cubin.attention_backward_e4m3
attention_forward = torch.ops.cubin.attention_forward
attention_forward_e4m3 = torch.ops.cubin.attention_forward_e4m3
cross_entropy = torch.ops.cubin.cross_entropy
flash_attention = torch.ops.cubin.flash_attention
flash_attention_with_kvcache = torch.ops.cubin.flash_attention_with_kvcache
grouped_matmul = torch.ops.cubin.grouped_matmul
layer_norm = torch.ops.cubin.layer_norm
linear = torch.ops.cubin.linear
linear_cross_entropy = torch.ops.cubin.linear_cross_entropy
log_softmax = torch.ops.cubin.log_softmax
matmul = torch.ops.cubin.matmul
quantize = torch.ops.cubin.quantize
rms_norm = torch.ops.cubin.rms_norm
scaled_dot_product_attention = torch.ops.cubin.scaled_dot_product_attention
scaled_gated_matmul = torch.ops.cubin.scaled_gated_matmul
scaled_grouped_matmul = torch.ops.cubin.scaled_grouped_matmul
scaled_matmul = torch.ops.cubin.scaled_matmul
softmax = torch.ops.cubin.softmax
symm_square = torch.ops.cubin.symm_square
syrk = torch.ops.cubin.syrk

__all__ = [
    "add_rms_norm",
    "addmm",
    "addmm_into",
    "attention_backward",
    "attention_backward_e4m3",
    "attention_forward",
    "attention_forward_e4m3",
    "cross_entropy",
    "flash_attention",
    "flash_attention_with_kvcache",
    "grouped_matmul",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "log_softmax",
    "matmul",
    "quantize",
    "rms_norm",
    "scaled_dot_product_attention",
    "scaled_gated_matmul",
    "scaled_grouped_matmul",
    "scaled_matmul",
    "softmax",
    "symm_square",
    "syrk",
]
