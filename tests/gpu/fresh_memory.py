"""What fresh memory holds in the GPU tests and in the processes that they start.

By default PyTorch leaves it as it comes. TORCH_CUBIN_TEST_FILL=1 fills every tensor that PyTorch or
this library allocates, workspaces too, before a kernel sees it: floats with NaN, integers with
their largest value, bool with true. What a kernel reads before anything was written there then
spoils a result. TORCH_CUBIN_TEST_FILL=0 leaves memory alone even in the tests that ask for it to be
filled, for sanitizers that know what was written.
"""

from __future__ import annotations

import os

import torch


def wanted() -> str:
    """ "1": filled everywhere; "0": nowhere; "": by the tests that ask for it."""
    return os.environ.get("TORCH_CUBIN_TEST_FILL", "")


def fill() -> None:
    """From now on. PyTorch fills under deterministic algorithms alone."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True


def fill_if_wanted() -> None:
    if wanted() == "1":
        fill()
