# What `import torch_cubin` does for install() and for PyTorch's flash attention. The modules that
# serve calls are imported at first use.
"""Registers the flash attention "cubin", and reads TORCH_CUBIN_INSTALL."""

from __future__ import annotations

import os
from typing import Any

import torch

from torch_cubin import errors

# The arguments of install() for each value of TORCH_CUBIN_INSTALL; "" and "0" install nothing.
BY_ENVIRONMENT: dict[str, dict[str, Any]] = {
    "1": {},
    "fastest": {"policy": "fastest"},
    "all": {"policy": "all"},
    "batch_invariant": {"batch_invariant": True},
}


def register() -> None:
    """Adds the implementation to PyTorch's registry of flash attention, if it has one."""
    add = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if add is not None and hasattr(torch.library, "get_kernel"):
        add("cubin", register_fn=_implementation)


def _implementation() -> object:
    from torch_cubin._drop_in import flash_implementation

    return flash_implementation.Implementation()


def install_by_environment() -> None:
    """Handles ``TORCH_CUBIN_INSTALL`` at import: a policy, 1 for the default one, or
    batch_invariant."""
    value = os.environ.get("TORCH_CUBIN_INSTALL", "")
    if value in ("", "0"):
        return
    if value not in BY_ENVIRONMENT:
        raise errors.fault(
            "input", "environment variable TORCH_CUBIN_INSTALL", "has an unknown value",
            expected=", ".join([*BY_ENVIRONMENT, "0"]), got=repr(value),
        )  # fmt: skip
    from torch_cubin._drop_in.install import install

    install(**BY_ENVIRONMENT[value])
