"""What a child process of the GPU tests prints: its answer, and the kernels that it launched."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

ENDS = "TORCH_CUBIN_TEST_ENDS"


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


def shuffle(calls: list[Any]) -> None:
    """In another order in each run that may be ended early, so that several runs together have all;
    in the same one otherwise."""
    random.Random(os.environ.get(ENDS, "0")).shuffle(calls)


class _TimeIsUp(BaseException):
    pass


def _end(*_: object) -> None:
    raise _TimeIsUp


def in_time(scenario: Callable[..., dict], *arguments: str) -> dict[str, Any]:
    """The scenario's answer; at the time of TORCH_CUBIN_TEST_ENDS (seconds since 1970), between two
    calls, one that says that it was ended, so that what has run by then counts."""
    if ENDS not in os.environ:
        return scenario(*arguments)
    signal.signal(signal.SIGALRM, _end)
    # Again and again: an exception in a callback from C is lost.
    signal.setitimer(signal.ITIMER_REAL, max(float(os.environ[ENDS]) - time.time(), 0.1), 0.5)
    try:
        answer = scenario(*arguments)
        signal.setitimer(signal.ITIMER_REAL, 0)
        return answer
    except _TimeIsUp:
        signal.setitimer(signal.ITIMER_REAL, 0)
    import torch

    torch.cuda.synchronize()
    return {"wrong": [], "was_ended": True}
