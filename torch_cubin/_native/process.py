"""Checks of the process before the import: it runs in the main interpreter, with one copy of the
library; and whether it has PyTorch.

Must not import torch at module level: in a subinterpreter that would fail midway and crash the
process.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

# What this process imports of the package is of this time: _inductor/keys.py asks.
BEGAN_NS = time.time_ns()


def require_main_interpreter() -> None:
    """Raises ImportError in a subinterpreter, where PyTorch cannot be imported."""
    try:
        interpreters = importlib.import_module(
            "_interpreters" if sys.version_info >= (3, 13) else "_xxsubinterpreters"
        )
    except ImportError:
        return
    if interpreters.get_current() != interpreters.get_main():
        raise ImportError(
            "torch_cubin [internal]: torch_cubin cannot be imported: expected the process's main "
            "interpreter, got a subinterpreter. PyTorch works in the main one alone."
        )


@contextlib.contextmanager
def without_collecting() -> Iterator[None]:
    """Keeps Python's garbage collector from running, which would take a tenth of the import: what
    an import allocates stays."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def other_library(path: Path) -> str:
    """The file of another copy of the library that this process has loaded; "" if there is none.

    A second copy would register the ops again, which ends the process.
    """
    try:
        lines = Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
    except OSError:  # not Linux: a second copy is not detected
        return ""
    deleted = " (deleted)"  # the file was replaced: the process still has the old one loaded
    for file in {line.split(None, 5)[5] for line in lines if f"/{path.name}" in line}:
        there = file.removesuffix(deleted)
        if os.path.basename(os.path.dirname(there)) != path.parent.name:
            continue
        if os.path.basename(there) == path.name and not (
            there == file and os.path.samefile(file, path)
        ):
            return file
    return ""


def hidden_package(path: Path) -> str:
    """The folder of an installed package that the sources at `path`, without a library, shadow; ""
    if there is none. This happens in a clone beside an installed wheel.
    """
    for folder in sys.path:
        package = Path(folder, path.parent.name)
        if (package / path.name).is_file():
            return str(package)
    return ""


def is_command_line() -> bool:
    """Whether this import is the first step of `python -m torch_cubin`."""
    return _command() is not None


def _command() -> list[str] | None:
    """The arguments of `python -m torch_cubin` if this import is its first step, else None."""
    following = sys.orig_argv[sys.orig_argv.index("-m") + 1 :] if "-m" in sys.orig_argv else []
    if getattr(sys, "argv", [])[:1] == ["-m"] and following[:1] == ["torch_cubin"]:
        return following[1:]
    return None


# Commands and options that do not need PyTorch, whose import takes seconds.
_COMMANDS_WITHOUT_TORCH = ("inspect", "cmake-dir", "--version", "--help", "-h")


@functools.cache
def without_torch() -> bool:
    """Whether this process runs without PyTorch: it is not installed, or the command needs none.

    Decided when torch_cubin is imported; the answer does not change afterwards.
    """
    command = _command()
    if command is not None and (not command or command[0] in _COMMANDS_WITHOUT_TORCH):
        return True
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "torch":  # PyTorch is installed, but misses a module itself
            raise
        return True
    return False


__all__ = [
    "hidden_package",
    "is_command_line",
    "other_library",
    "require_main_interpreter",
    "without_torch",
]
