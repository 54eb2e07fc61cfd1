"""What a child process of the GPU tests prints: its answer, and the kernels that it launched."""

from __future__ import annotations

import json
import sys


def kernels_launched() -> list[str]:
    """The package's kernels that this process has launched; empty if it has no package."""
    if "torch_cubin" not in sys.modules:
        return []
    from torch_cubin._native import library

    try:
        return sorted({kernel["name"] for kernel in library.catalog()["loaded"]})
    except RuntimeError:  # a scenario's package may be broken
        return []


def give(answer: dict) -> None:
    """As the last line of output: see run_child."""
    print("\n" + json.dumps({**answer, "kernels_launched": kernels_launched()}), flush=True)
