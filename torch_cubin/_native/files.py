"""Atomic writes of files that other processes may read."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_file(path: Path, data: bytes, *, replace: bool = True) -> None:
    """Writes a file atomically: a reader sees the old file or the new one.

    Without `replace`, raises FileExistsError if the file exists.
    """
    name = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)  # less the umask
    try:
        with open(handle, "wb") as file:
            file.write(data)
        if replace or not _linked(name, path):
            os.replace(name, path)
        else:
            os.unlink(name)
    except BaseException:
        os.unlink(name)
        raise


def _linked(name: Path, path: Path) -> bool:
    """Hard-links a file to a new name; False if the file system has no hard links."""
    try:
        os.link(name, path)
    except FileExistsError:
        raise
    except OSError:
        return False
    return True


__all__ = ["write_file"]
