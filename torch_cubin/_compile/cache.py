"""What was compiled before, on disk, by content.

One file an entry, written at once under a name of its own: any number of processes may read, write
and evict side by side. An entry that is damaged counts as absent. The folder is bounded: what was
used longest ago goes first.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from torch_cubin._declared.package import write_file

MOST_BYTES = 512 << 20
MOST_FILES = 4096
_SUFFIX = ".compiled"


def folder() -> Path | None:
    """TORCH_CUBIN_CACHE, or one in the user's cache folder; None where it is turned off ("0")."""
    named = os.environ.get("TORCH_CUBIN_CACHE")
    if named == "0":
        return None
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "torch_cubin"


def key(facts: dict[str, Any]) -> str:
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def find(name: str) -> tuple[dict[str, Any], bytes] | None:
    """An entry's facts and bytes."""
    root = folder()
    if root is None:
        return None
    path = root / f"{name}{_SUFFIX}"
    try:
        content = path.read_bytes()
        head, _, body = content.partition(b"\n")
        facts = json.loads(head)
        if not isinstance(facts, dict) or facts["sha256"] != hashlib.sha256(body).hexdigest():
            return None
    except (OSError, ValueError, KeyError, RecursionError):
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # the time of its last use
    return facts, body


def keep(name: str, facts: dict[str, Any], body: bytes) -> None:
    """Adds an entry. A folder that cannot be written is no error: then all is compiled again."""
    root = folder()
    if root is None:
        return
    head = json.dumps({**facts, "sha256": hashlib.sha256(body).hexdigest()})
    try:
        root.mkdir(parents=True, exist_ok=True)
        write_file(root / f"{name}{_SUFFIX}", head.encode() + b"\n" + body)
        _evict(root)
    except OSError:
        return


def _evict(root: Path) -> None:
    entries = []
    with os.scandir(root) as found:
        for entry in found:
            if entry.name.endswith(_SUFFIX):
                with contextlib.suppress(OSError):  # another process evicts, too
                    facts = entry.stat()
                    entries.append((facts.st_mtime_ns, facts.st_size, entry.path))
    total = sum(size for _, size, _ in entries)
    count = len(entries)
    if count <= MOST_FILES and total <= MOST_BYTES:
        return
    for _, size, path in sorted(entries):
        with contextlib.suppress(OSError):
            os.unlink(path)
        count, total = count - 1, total - size
        if count <= MOST_FILES * 3 // 4 and total <= MOST_BYTES * 3 // 4:
            return
