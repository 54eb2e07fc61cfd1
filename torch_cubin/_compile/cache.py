"""The on-disk cache of compiled code, keyed by content.

Each entry is one file, written atomically, so any number of processes can read, write and evict
concurrently. A damaged entry counts as missing. The cache also has the folders in which
torch_cubin.cpp.load_inline builds, NAME_HASH with a file "lock". Its total size is limited: the
least recently used entries are evicted first, and so are temporary files of processes that ended
while writing.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from pathlib import Path
from typing import IO, Any

from torch_cubin._native.files import write_file

MOST_BYTES = 512 << 20
MOST_FILES = 4096
_SUFFIX = ".compiled"
_BUILD_FOLDER = re.compile(r"\w+_[0-9a-f]{16}")
# Names that write_file and evict_folder use temporarily, for a short time.
_TEMPORARY = re.compile(rf"\.(?:[0-9a-f]+{re.escape(_SUFFIX)}|evicted)\.[0-9a-f]{{16}}")
_TEMPORARY_SECONDS = 3600


def folder() -> Path | None:
    """TORCH_CUBIN_CACHE, or a folder in the user's cache folder; None if it is disabled ("0")."""
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


def locked_folder(path: Path) -> IO[str]:
    """Creates a folder in which only one process at a time builds; returns its open lock file.

    Another process may evict the folder while this one waits, so the locked file is compared with
    the one that is then at the path.
    """
    while True:
        path.mkdir(parents=True, exist_ok=True)
        try:
            lock = (path / "lock").open("w")
        except FileNotFoundError:  # evicted since
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(lock.fileno()), os.stat(path / "lock")):
                return lock
        except FileNotFoundError:
            pass
        except BaseException:
            lock.close()
            raise
        lock.close()


def evict() -> None:
    """Brings the cache below its limits. Does not report files that cannot be removed."""
    root = folder()
    if root is not None:
        with contextlib.suppress(OSError):
            _evict(root)


def _evict(root: Path) -> None:
    entries = []
    with os.scandir(root) as found:
        for entry in found:
            with contextlib.suppress(OSError):  # another process is evicting too
                facts = entry.stat(follow_symlinks=False)
                if _TEMPORARY.fullmatch(entry.name):
                    if time.time() - facts.st_mtime > _TEMPORARY_SECONDS:
                        _remove(Path(entry.path))
                elif entry.name.endswith(_SUFFIX):
                    entries.append((facts.st_mtime_ns, facts.st_size, entry.path))
                elif _is_build_folder(entry):
                    # If another process has emptied the folder since, it counts with the folder's
                    # time of last use.
                    files = [file.stat() for file in os.scandir(entry.path)]
                    used = max((file.st_mtime_ns for file in files), default=facts.st_mtime_ns)
                    entries.append((used, sum(file.st_size for file in files), entry.path))
    total = sum(size for _, size, _ in entries)
    count = len(entries)
    if count <= MOST_FILES and total <= MOST_BYTES:
        return
    for _, size, path in sorted(entries):
        try:
            _remove(Path(path)) if path.endswith(_SUFFIX) else _evict_folder(Path(path))
        except FileNotFoundError:
            pass  # another process was first
        except OSError:
            continue  # in use, or not ours
        count, total = count - 1, total - size
        if count <= MOST_FILES * 3 // 4 and total <= MOST_BYTES * 3 // 4:
            return


def _is_build_folder(entry: os.DirEntry[str]) -> bool:
    is_named = _BUILD_FOLDER.fullmatch(entry.name) is not None
    return is_named and entry.is_dir(follow_symlinks=False) and Path(entry.path, "lock").is_file()


def _evict_folder(path: Path) -> None:
    """Unless a process builds in it. It goes at once, so that none meets a part of it."""
    with (path / "lock").open("r") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        gone = path.with_name(f".evicted.{secrets.token_hex(8)}")
        path.rename(gone)
        _remove(gone)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink()
