"""inspect(): reads the contents of a device code file without a GPU and without running
anything."""

from __future__ import annotations

import os

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
    content_of,
)
from torch_cubin._inspection.files import origin_of, read_file
from torch_cubin._native import library


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
            return archive.inspect(source, origin_of(os.fsdecode(source)))
        return archive.inspect(source, "the buffer given")
    if isinstance(source, (bytes, bytearray, memoryview)):
        return content_of(library.inspect(bytes(source), "the buffer given"))
    if isinstance(source, (str, os.PathLike)):
        path = os.fspath(source)
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        return content_of(library.inspect(read_file(path), origin_of(path)))
    what, expected = "torch_cubin.inspect argument 'source'", "str, os.PathLike or bytes"
    raise errors.wrong_type(what, expected, source, "Pass the file's path, or its bytes.")


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
