"""What PyInstaller reads when it packs a program that imports torch_cubin: without it, the library,
the kernels and modules that are imported at first use stay out. Imported by PyInstaller alone."""

from __future__ import annotations

import os


def hook_dirs() -> list[str]:
    """The entry point "hook-dirs" of the group "pyinstaller40" (setup.py)."""
    return [os.path.dirname(__file__)]
