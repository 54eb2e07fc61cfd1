"""What the graphs in PyTorch's caches on disk depend on beside what PyTorch puts into their keys.

PyTorch traces an op's rules, such as its derivative, before it compiles, and identifies the op by
its name. Without these keys a graph would keep the rules of another version of this package, or
those that a declared op had before its derivative was mended.
"""

from __future__ import annotations

import functools
import hashlib
import secrets
import sys
from pathlib import Path
from typing import Any

from torch_cubin._native import library, process


@functools.cache
def of_package() -> str:
    """A digest of this package's Python code and of its library. Of no other process if the files
    are not those that it imported, or the sources are not there."""
    root = library.PATH.parent
    digest = digest_of_code(root)
    own = Path(__file__).resolve()  # as the library's, where a link leads to the package
    if own not in _files(root) or not _are_older(root, process.BEGAN_NS):
        return secrets.token_hex()
    return digest


def digest_of_code(root: Path) -> str:
    hashed = hashlib.sha256()
    for path in _files(root):
        content = path.read_bytes()
        hashed.update(f"{path.relative_to(root)}\0{len(content)}\0".encode() + content)
    return hashed.hexdigest()


def _are_older(root: Path, ns: int) -> bool:
    """Whether the code was as it is at that time. Files that a tool installs or moves there can
    have older times of modification, but not of the last change of their entries."""
    return all(path.stat().st_ctime_ns < ns for path in _files(root))


def _files(root: Path) -> list[Path]:
    return [*sorted(root.rglob("*.py")), root / library.PATH.name]


def of_declared_ops() -> str:
    """A digest of what the process's declared ops are traced by."""
    module: Any = sys.modules.get("torch_cubin._declared.op")  # most processes have none
    return "" if module is None else module.digest_of_traces()


def of_graphs() -> tuple[str, ...]:
    return of_package(), of_declared_ops()
