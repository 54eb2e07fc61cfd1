"""What a C++ compiler's options name to the linker: objects, libraries, scripts."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path


def identities(options: Sequence[str]) -> Iterator[bytes]:
    """What identifies the objects and libraries that a compiler's options name: the content of
    those named by a path, and size and times of those that `-l` finds in the folders of `-L`, of
    the environment and in /usr/local/lib, which may be large."""
    folders = [folder for folder in os.environ.get("LIBRARY_PATH", "").split(os.pathsep) if folder]
    libraries: list[str] = []
    rest = _single_options(options)
    for option in rest:
        named = option.partition("=")[2]  # --version-script=FILE
        if os.path.isfile(option) or os.path.isfile(named):
            content = Path(option if os.path.isfile(option) else named).read_bytes()
            yield hashlib.sha256(content).digest()
        elif option[:2] in ("-L", "-l"):
            found = option[2:] or next(rest, "")
            (folders if option[:2] == "-L" else libraries).append(found)
    for library in libraries:
        files = [library[1:]] if library[:1] == ":" else [f"lib{library}.so", f"lib{library}.a"]
        for path in (
            Path(folder, file) for folder in [*folders, "/usr/local/lib"] for file in files
        ):
            with contextlib.suppress(OSError):
                facts = path.stat()
                times = facts.st_mtime_ns, facts.st_ctime_ns
                yield f"{path}:{facts.st_size}:{times}".encode()


def _single_options(options: Iterable[str]) -> Iterator[str]:
    """The options, those that `-Wl,` and `@FILE` hold one by one; a path may contain commas."""
    for option in options:
        if os.path.isfile(option):
            yield option
        elif option[:1] == "@" and os.path.isfile(option[1:]):
            yield from _single_options(shlex.split(Path(option[1:]).read_text()))
        elif option[:4] == "-Wl,":
            yield from _single_options(option[4:].split(","))
        else:
            yield option


__all__ = ["identities"]
