"""What the graphs in PyTorch's caches on disk depend on beside what PyTorch puts into their keys.

PyTorch traces an op's rules, such as its derivative, before it compiles, and identifies the op by
its name. Without these keys a graph would keep the rules of another version of this package, or
those that a declared op had before its derivative was mended.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from pathlib import Path
from typing import Any

from torch_cubin._native import library


@functools.cache
def of_package() -> str:
    """A digest of this package's Python code and of its library."""
    return digest_of_code(library.PATH.parent)


def digest_of_code(root: Path) -> str:
    hashed = hashlib.sha256()
    for path in [*sorted(root.rglob("*.py")), root / library.PATH.name]:
        content = path.read_bytes()
        hashed.update(f"{path.relative_to(root)}\0{len(content)}\0".encode() + content)
    return hashed.hexdigest()


def of_declared_ops() -> str:
    """A digest of what the process's declared ops are traced by."""
    module: Any = sys.modules.get("torch_cubin._declared.op")  # most processes have none
    return "" if module is None else module.digest_of_traces()


def of_graphs() -> tuple[str, ...]:
    return of_package(), of_declared_ops()
