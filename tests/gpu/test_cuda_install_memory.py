"""A lack of memory under install() is PyTorch's own error."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_cubin


def layer_norm(x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:])


def attention(x: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(*[x.view(1, 1, -1, 64)] * 3)


# The operator, a shape, a call, and what install() is given.
ALL, INVARIANT = {"policy": "all"}, {"batch_invariant": True}
LARGE = [
    ("aten::mm", (120_000, 8), lambda x: x @ x.t(), ALL),
    ("aten::bmm", (120_000, 8), lambda x: torch.bmm(x[None], x.t()[None]), ALL),
    ("aten::addmm", (120_000, 8), lambda x: torch.addmm(x[0, 0], x, x.t()), ALL),
    ("aten::native_layer_norm", (1_000_000, 1024), layer_norm, ALL),
    ("aten::_scaled_dot_product_flash_attention", (16_000_000, 64), attention, ALL),
    ("aten::_softmax", (1_000_000, 1024), lambda x: x.softmax(-1), INVARIANT),
    ("aten::native_layer_norm", (1_000_000, 1024), layer_norm, INVARIANT),
    ("aten::sum.dim_IntList", (1_000_000_000, 1), lambda x: x.sum(-1), INVARIANT),
]


@pytest.mark.parametrize(("function", "shape", "call", "options"), LARGE, ids=[x[0] for x in LARGE])
def test_a_lack_of_memory_raises_pytorchs_type(function: str, shape, call, options) -> None:
    """Programs catch it, to try again with less; the next call is served."""
    operand = torch.ones(shape, device="cuda", dtype=torch.bfloat16)
    total = torch.cuda.get_device_properties(0).total_memory
    # Memory that objects of an earlier test hold, were it freed later, would serve this call.
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 1e9) / total)
    try:
        with torch_cubin.install(**options):
            with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory"):
                call(operand)
            call(operand[:64])
            assert function in {row.function for row in torch_cubin.report().served}
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
