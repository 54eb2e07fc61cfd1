"""A kernel of Triton that lets the next kernel start at once, and writes its results much later."""

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda


@triton.jit
def _write(to, new, zero, count, loads, SIZE: tl.constexpr):
    tl_cuda.gdc_launch_dependents()
    waited = 0
    for _ in range(loads):
        waited += tl.load(zero, volatile=True)
    at = tl.arange(0, SIZE)
    tl.store(to + at, tl.load(new + at, mask=at < count) + waited, mask=at < count)


def write_late(to: torch.Tensor, new: torch.Tensor) -> None:
    """Writes `new` (int32) to `to`, some 100 us after the next kernel of the stream may start."""
    zero = torch.zeros((), dtype=torch.int32, device=to.device)
    size = triton.next_power_of_2(new.numel())
    _write[(1,)](to, new, zero, new.numel(), 200, SIZE=size, launch_pdl=True)
