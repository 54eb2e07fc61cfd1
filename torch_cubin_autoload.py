# The entry point of PyTorch's group "torch.backends", which `import torch` calls in every process:
# nothing of torch_cubin is imported where the variable is not set.
"""``TORCH_CUBIN_INSTALL=1 python program.py``: install() in a program that does not know of it."""

import os
import sys


def load() -> None:
    """Imports torch_cubin, whose import installs, unless that import is what imports PyTorch."""
    if (
        os.environ.get("TORCH_CUBIN_INSTALL", "0") not in ("", "0")
        and "torch_cubin" not in sys.modules
    ):
        import torch_cubin  # noqa: F401
