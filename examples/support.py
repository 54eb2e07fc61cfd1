"""Shared by the examples: finding torch_cubin and the kernels, the GPU, timing."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ROOT / "examples" / "kernels"
sys.path.append(str(ROOT))  # a checkout that is not installed

if sys.argv[1:] in (["-h"], ["--help"]):  # the examples take no other arguments
    argparse.ArgumentParser(description=sys.modules["__main__"].__doc__).parse_args()


def cubin(name: str) -> str:
    """Returns the compiled kernels/NAME.cu: the committed cubin for compute capability 9.0.

    For another GPU it is compiled, which needs nvcc.
    """
    committed = KERNELS / f"{name}.sm_90a.cubin"
    nvcc = shutil.which("nvcc")
    if not torch.cuda.is_available() or nvcc is None:
        return str(committed)
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) == (9, 0):
        return str(committed)
    out = ROOT / "build" / "examples" / f"{name}.sm_{major}{minor}.cubin"
    out.parent.mkdir(parents=True, exist_ok=True)
    command = [nvcc, "-cubin", f"-arch=sm_{major}{minor}", KERNELS / f"{name}.cu", "-o", out]
    subprocess.run(command, check=True)
    return str(out)


def require_gpu(major: int = 0) -> None:
    """Ends the program with status 0 if there is no GPU of that compute capability."""
    if not torch.cuda.is_available():
        print("No GPU here: nothing was launched.")
        sys.exit(0)
    if torch.cuda.get_device_capability() < (major, 0):
        print(f"{torch.cuda.get_device_name()} has none of what this shows (9.0 and later have).")
        sys.exit(0)


def compare(what: str, ours: torch.Tensor, theirs: torch.Tensor, limit: float = 0) -> int:
    """Prints the difference of two tensors; returns 0 if it is at most `limit`, else 1."""
    difference = (ours.double() - theirs.double()).abs().max().item() if ours.numel() else 0.0
    right = ours.shape == theirs.shape and difference <= limit  # False for NaN
    verdict = "right" if right else "WRONG"
    print(f"{what}: largest difference from PyTorch {difference:.3g}: {verdict}")
    return 0 if right else 1


def microseconds(call: Callable[[], object], count: int = 50) -> float:
    """GPU microseconds per call."""
    for _ in range(5):
        call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count * 1e3
