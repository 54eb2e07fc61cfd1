"""Reads files of device code: refuses folders, pipes, and files that are too large."""

from __future__ import annotations

import os
import stat

from torch_cubin import errors
from torch_cubin._inspection.facts import shown

MAX_BYTES = 1 << 30  # csrc/cubin/elf.h refuses more, so larger files are not read


def origin_of(path: str) -> str:
    """What errors call a file."""
    return f"file '{shown(path, limit=4096)}'"


def read_file(path: str, *, is_device_code: bool = True) -> bytes:
    """The bytes of a regular file. Opens without blocking: a FIFO would wait for a writer."""

    def refuse(problem: str, advice: str) -> errors.Error:
        return errors.fault("file", origin_of(path), problem, advice=advice)

    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise refuse(f"cannot be opened ({reason})", "Check the path and its rights.") from error
    try:
        facts = os.fstat(handle)
        if not stat.S_ISREG(facts.st_mode):
            kind = "a directory" if stat.S_ISDIR(facts.st_mode) else "a pipe, socket or device"
            advice = "Pass the file itself."
            if stat.S_ISDIR(facts.st_mode):
                advice = _advice_for_folder(path)
            raise refuse(f"is {kind}, not a regular file", advice)
        cubin = os.path.splitext(path)[0] + ".cubin"
        if (
            is_device_code
            and path.endswith((".json", ".ttir", ".ttgir", ".llir"))
            and os.path.isfile(cubin)
        ):
            raise refuse(
                "is a compiler's note, no device code",
                f"The cubin beside it is '{shown(os.path.basename(cubin))}'; where Triton compiled"
                " it, torch_cubin.producers.triton.read takes both.",
            )
        if facts.st_size > MAX_BYTES:
            raise errors.fault(
                "image",
                origin_of(path),
                "is too large",
                expected=f"at most {MAX_BYTES} bytes",
                got=f"{facts.st_size} bytes",
                advice="Take the part that you want out of it.",
            )
        with open(handle, "rb", closefd=False) as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        if isinstance(error, errors.Error):
            raise
        reason = error.strerror or str(error)
        raise refuse(f"cannot be read ({reason})", "Copy it again.") from error
    finally:
        os.close(handle)


def _advice_for_folder(path: str) -> str:
    """Advice for a path that is a folder: the cubins in it."""
    try:
        cubins = sorted(name for name in os.listdir(path) if name.endswith(".cubin"))
    except OSError:
        cubins = []
    if not cubins:
        return "Pass the file itself."
    listed = ", ".join(f"'{shown(name)}'" for name in cubins[:3])
    more = f" and {len(cubins) - 3} more" if len(cubins) > 3 else ""
    notes = any(os.path.isfile(os.path.join(path, name[:-6] + ".json")) for name in cubins)
    triton = " Of Triton's cache: torch_cubin.producers.triton.read(folder)." if notes else ""
    return f"It holds {listed}{more}: pass the file itself.{triton}"
