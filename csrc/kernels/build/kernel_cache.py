"""The cache of a build: files, each beside a .key with the hash of what it was made from.

In a git worktree, files of the main checkout's cache are copied, which saves minutes in each new
one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Iterator

import kernel_table


def replace_file(path: pathlib.Path, data: bytes) -> None:
    """Writes atomically; does not touch a file that already has these bytes."""
    if path.is_file() and path.read_bytes() == data:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_bytes(data)
    os.replace(part, path)


@contextlib.contextmanager
def locked(folder: pathlib.Path) -> Iterator[None]:
    """Locks the cache: a second build waits."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def stamp(output: pathlib.Path, key: str) -> str:
    """What a cached file's .key holds: the hash of its inputs, and its own, so that a file from
    another cache is noticed."""
    return f"{key}\n{kernel_table.digest(output.read_bytes())}\n"


def has_key(output: pathlib.Path, key: str) -> bool:
    """Whether a cached file was made from inputs with this hash, and is still that file."""
    try:
        kept = output.with_suffix(".key").read_text()
        return kept.startswith(f"{key}\n") and kept == stamp(output, key)
    except OSError:
        return False


def main_checkout(root: pathlib.Path) -> pathlib.Path | None:
    """The main checkout of a git worktree; None if `root` is not a worktree."""
    with contextlib.suppress(OSError):
        git = pathlib.Path((root / ".git").read_text().removeprefix("gitdir:").strip())
        common = git / (git / "commondir").read_text().strip()
        return common.resolve().parent
    return None


class Cache:
    """The files below `root`, by their paths in it."""

    def __init__(self, root: pathlib.Path, shares: bool):
        """`shares`: whether files are copied from the main checkout."""
        self.root = root
        self.main_checkout = main_checkout(root) if shares else None

    def fresh(self, output: pathlib.Path, key: str) -> bool:
        """Whether the file is up to date, or was copied from the main checkout now."""
        if has_key(self.root / output, key):
            return True
        theirs = self.main_checkout / output if self.main_checkout else None
        if theirs is None or not has_key(theirs, key):
            return False
        parts = [theirs.with_suffix(s) for s in (output.suffix, ".log")]
        found = {path.name: path.read_bytes() for path in parts if path.is_file()}
        if not has_key(theirs, key):  # a build there is running: it removes the key first
            return False
        self.begin(output)
        for name, data in found.items():
            replace_file((self.root / output).with_name(name), data)
        self.finish(output, key)
        return True

    def begin(self, output: pathlib.Path) -> None:
        """Before the file is made: until finish(), it is stale."""
        (self.root / output).parent.mkdir(parents=True, exist_ok=True)
        (self.root / output.with_suffix(".key")).unlink(missing_ok=True)

    def finish(self, output: pathlib.Path, key: str) -> None:
        text = stamp(self.root / output, key)
        replace_file(self.root / output.with_suffix(".key"), text.encode())
