"""inspect(): reads the contents of a device code file without a GPU and without running
anything."""

from __future__ import annotations

import os
import stat
from typing import Any

from torch_cubin import errors
from torch_cubin._inspection import archive
from torch_cubin._inspection.facts import (
    ArchivedFile,
    Container,
    Entry,
    Fault,
    Image,
    Kernel,
    Launch,
    Param,
    Ptx,
    PtxKernel,
    PtxParam,
    Variable,
    shown,
)
from torch_cubin._native import library

MAX_BYTES = 1 << 30  # csrc/cubin/elf.h refuses more, so larger files are not read


@errors.named_keywords
def inspect(
    source: str | os.PathLike[str] | bytes | bytearray | memoryview,
) -> Image | Ptx | Container:
    """Reads a file of device code: archs, kernels, parameters, registers, shared memory.

    `source` is a path, or the bytes themselves. Returns an `Image` for a cubin, relocatable or not,
    a `Ptx` for PTX text, and a `Container` for a fatbin (LZ4 and zstd are decompressed), for an
    object, library or program with fatbins of nvcc or images of torch_cubin.embed, for C or C++
    source with device code in arrays of bytes, and for a zip archive of such files, such as
    AOTInductor's `.pt2`, with the launches in its C++ code. All have `kind` and `to_dict()`, and
    print as tables. Needs no GPU, never touches the driver, and is safe on any file: every offset
    and size in it is checked, and time and memory are proportional to its size.

    Raises FileError [file] for a path that is missing, unreadable or not a regular file, and
    ImageError [image] for bytes that are damaged or of another kind; the text names the kind
    (LTO-IR, LLVM bitcode, cuTile bytecode, an AMD code object, a Git LFS pointer, an archive, ...)
    and what to do. A damaged entry of a container has the error as its `error`. A `source` of
    another type raises InputError [input], which is a TypeError.
    """
    if archive.is_archive(source):
        if isinstance(source, (str, os.PathLike)):
            return archive.inspect(source, _origin(os.fsdecode(source)))
        return archive.inspect(source, "the buffer given")
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _content(library.inspect(bytes(source), "the buffer given"))
    if isinstance(source, (str, os.PathLike)):
        path = os.fspath(source)
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        return _content(library.inspect(_read(path), _origin(path)))
    what, expected = "torch_cubin.inspect argument 'source'", "str, os.PathLike or bytes"
    raise errors.wrong_type(what, expected, source, "Pass the file's path, or its bytes.")


def _origin(path: str) -> str:
    return f"file '{shown(path, limit=4096)}'"


def _read(path: str, *, is_device_code: bool = True) -> bytes:
    """The bytes of a regular file. Opens without blocking: a FIFO would wait for a writer."""

    def refuse(problem: str, advice: str) -> errors.Error:
        return errors.fault("file", _origin(path), problem, advice=advice)

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
                _origin(path),
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


def _content(facts: dict[str, Any]) -> Image | Ptx | Container:
    """The dataclass for a JSON object of csrc/cubin/inspect.cpp, by its kind."""
    if "entries" in facts:
        entries = []
        for entry in facts["entries"]:
            content, error = entry.pop("content"), entry.pop("error")
            entries.append(
                Entry(
                    content=_content(content) if content is not None else None,
                    error=Fault(**error) if error is not None else None,
                    **entry,
                )
            )
        return Container(**{**facts, "entries": tuple(entries)})
    classes: tuple[Any, Any, Any] = (
        (Ptx, PtxKernel, PtxParam) if facts["kind"] == "ptx" else (Image, Kernel, Param)
    )
    image, kernel, param = classes
    kernels = []
    for entry in facts.pop("kernels"):
        params = tuple(param(**fields) for fields in entry.pop("params"))
        for key in ("required_block", "max_block", "cluster"):
            value = entry.pop(key)
            entry[key] = tuple(value) if value is not None else None
        kernels.append(kernel(params=params, **entry))
    variables = tuple(Variable(**fields) for fields in facts.pop("variables"))
    if "imports" in facts:
        facts["imports"] = tuple(facts["imports"])
    return image(kernels=tuple(kernels), variables=variables, **facts)


__all__ = [
    "ArchivedFile",
    "Container",
    "Entry",
    "Fault",
    "Image",
    "Kernel",
    "Launch",
    "Param",
    "Ptx",
    "PtxKernel",
    "PtxParam",
    "Variable",
    "inspect",
]
