"""Reads the sources of load() and define_op(), paths, bytes and archives, with names for errors."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch_cubin import errors
from torch_cubin._inspection import archive
from torch_cubin._inspection.facts import Container, content_of, shown
from torch_cubin._inspection.files import origin_of, read_file
from torch_cubin._native import library

Source = str | os.PathLike[str] | bytes | bytearray | memoryview
Stored = Source | archive.Member
Known = tuple[Stored, str, str]  # the source of an image, its name for errors, its sha256


class Loaded(NamedTuple):
    """An image that has been read."""

    data: bytes
    origin: str  # its name in errors


def _loaded(source: Stored, what: str) -> Loaded:
    """The bytes of one file; `what` names bytes without a path in errors."""
    if isinstance(source, archive.Member):
        origin = _archive_origin(source.archive, what)
        return Loaded(archive.read([source], origin)[0], f"{origin}: '{shown(source.name)}'")
    if isinstance(source, (bytes, bytearray, memoryview)):
        return Loaded(bytes(source), what)
    if not isinstance(source, (str, os.PathLike)):
        expected = "str, os.PathLike or bytes, cuda.core's ObjectCode, or a list of these"
        raise errors.wrong_type("torch_cubin.load argument 'source'", expected, source)
    path = os.fsdecode(source)
    if os.path.isdir(path):
        path = library.cubin_at(path)
    data = read_file(path)
    if path.endswith((".cu", ".cuh")) and b"__global__" in data:
        raise errors.fault(
            "image", origin_of(path), "is CUDA C++, which no driver loads", expected="a cubin",
            got="source",
            advice=f"Compile it: torch_cubin.compile(pathlib.Path({path!r:.80})), or"
            " nvcc -cubin -arch=sm_XY.",
        )  # fmt: skip
    return Loaded(data, origin_of(path))


def opened(source: Any, what: str) -> list[tuple[Any, Loaded]]:
    """The files of one source of load(): for each, the source to read it again, and its content.

    For an archive these are its files with device code. `what` names bytes in errors.
    """
    if _is_object_code(source):
        source = source.code  # bytes or a path
    if not archive.is_archive(source):
        return [(source, _loaded(source, what))]
    origin = _archive_origin(source, what)
    return [
        (member, Loaded(data, f"{origin}: '{shown(member.name)}'"))
        for member, data in archive.members(source, origin)
    ]


def path_of(source: Stored) -> str:
    """The file or folder that a source names; "" for bytes and members of archives."""
    return os.fsdecode(source) if isinstance(source, (str, os.PathLike)) else ""


def read_again(known: Sequence[Known]) -> list[Loaded]:
    """Reads the same images again. Raises HashError [hash] if their bytes have changed."""
    found: list[bytes] = []
    for given, group in itertools.groupby(known, key=lambda entry: _archive(entry[0])):
        entries = list(group)
        if given is None:
            found += [_loaded(source, name).data for source, name, _ in entries]
        else:
            origin = _archive_origin(given, "the buffer given")
            members = [source for source, _, _ in entries if isinstance(source, archive.Member)]
            found += archive.read(members, origin)
    for data, (_, name, digest) in zip(found, known, strict=True):
        now = hashlib.sha256(data).hexdigest()
        if now != digest:
            problem = "is not what the kernel was loaded from"
            raise errors.other_bytes(name, problem, digest, now, "Load it again.")
    named = zip(found, known, strict=True)
    return [Loaded(data, name) for data, (_, name, _) in named]


def by_kernel(files: Sequence[Loaded]) -> dict[str, list[Loaded]]:
    """The files that contain a kernel, by its name."""
    found: dict[str, list[Loaded]] = {}
    for file in files:
        content = content_of(library.inspect(file.data, file.origin))
        images = content.images() if isinstance(content, Container) else [content]
        for name in {kernel.name for image in images for kernel in image.kernels}:
            found.setdefault(name, []).append(file)
    return found


def _archive(source: Stored) -> Any:
    """The archive that contains a source of a module; None for a plain file."""
    return source.archive if isinstance(source, archive.Member) else None


def _is_object_code(source: Any) -> bool:
    """Whether it is an ObjectCode of cuda.core: code, and symbols by the requested names."""
    return isinstance(getattr(source, "code", None), (bytes, str)) and isinstance(
        getattr(source, "symbol_mapping", None), dict
    )


def aliases_of(source: Any) -> dict[str, str]:
    """The names under which cuda.core's objects among the sources list their kernels."""

    def text(name: Any) -> str:
        return name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)

    return {
        text(alias): text(symbol)
        for one in (source if isinstance(source, (list, tuple)) else [source])
        if _is_object_code(one)
        for alias, symbol in one.symbol_mapping.items()
    }


def _archive_origin(source: Any, what: str) -> str:
    return origin_of(os.fsdecode(source)) if isinstance(source, (str, os.PathLike)) else what


__all__ = [
    "Known",
    "Loaded",
    "Source",
    "aliases_of",
    "by_kernel",
    "opened",
    "path_of",
    "read_again",
]
