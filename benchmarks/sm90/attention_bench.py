"""Shared by bench_attention.py and bench_attention_backward.py: compiling a kernel, layouts of
inputs, and timing of launches. torch is imported only by the functions that use it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TOKENS, WIDTH = 16384, 2048  # b * s, h * d
NO_BOUND = 1 << 30


def compile_kernel(
    source: str, name: str, defines: dict[str, Any], extra: list[str], out: Path
) -> str:
    """Compiles csrc/kernels/attention/`source`.cu to out/`name`.cubin; returns ptxas' warnings."""
    folder = HERE.parents[1] / "csrc" / "kernels" / "attention"
    command = [
        *("nvcc", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-cubin", "-Xptxas", "-v"),
        *(f"-D{key}={value}" for key, value in defines.items()),
        *extra,
        *("-I", str(folder.parent)),
        *("-o", str(out / f"{name}.cubin"), str(folder / f"{source}.cu")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = (done.stdout + done.stderr).splitlines()
    if done.returncode:
        raise SystemExit("\n".join([name, *lines]))
    bad = [s for s in lines if "C75" in s or "error" in s or "warning" in s]
    bad += [s for s in lines if "spill" in s and ", 0 bytes spill stores" not in s]
    return "\n  ".join([name, *bad])


def laid_out(shape: tuple[int, int, int, int], layout: str, dtype):
    """A (b, h, s, d) tensor, stored in the order of the letters of `layout`; 'bhsd+' pads rows."""
    import torch

    b, h, s, d = shape
    if layout == "bhsd":
        return torch.randn(b, h, s, d, device="cuda").to(dtype)
    if layout == "bshd":
        return torch.randn(b, s, h, d, device="cuda").to(dtype).transpose(1, 2)
    wide = torch.randn(b, h, s, d + 24, device="cuda").to(dtype)
    return wide[..., 8 : 8 + d]


def milliseconds(run: Callable[[], object], count: int) -> float:
    """GPU milliseconds per run, over `count` consecutive runs."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / count
