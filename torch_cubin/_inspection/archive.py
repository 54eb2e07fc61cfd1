"""Device code in zip archives: AOTInductor's `.pt2`, with the launches in its C++ wrapper.

Nothing is unpacked to disk, and no name in an archive is used as a path. Sizes are checked against
bounds before anything is unpacked; an entry that exceeds them is an error of that entry.
"""

from __future__ import annotations

import collections
import dataclasses
import io
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from typing import IO, Any, NamedTuple

from torch_cubin import errors
from torch_cubin._inspection.facts import (
    ArchivedFile,
    Container,
    Fault,
    Launch,
    content_of,
    shown,
)
from torch_cubin._native import library

MAGIC = b"PK\x03\x04"
# The same bounds as for other containers (docs/inspect.md), for all unpacked data of an archive.
FREE_BYTES, BYTES_A_BYTE, MOST_BYTES = 16 << 20, 32, 1 << 30
MOST_DIRECTORY_BYTES = 8 << 20  # some 60,000 entries
MOST_TEXT_BYTES = 64 << 20  # of the wrappers
_CODE = (".cubin", ".fatbin")
# May contain device code, as AOTInductor's libraries do (embed_kernel_binary): opened if no file
# has one of the names above.
_OTHERS = re.compile(r".*\.(?:so(?:\.\d+)*|o|a|ptx)", re.DOTALL)
_KINDS = {zipfile.ZIP_STORED: "none", zipfile.ZIP_DEFLATED: "deflate"}
_DAMAGED = (
    *(zipfile.BadZipFile, zlib.error, EOFError, struct.error, ValueError, OverflowError),
    *(RuntimeError, NotImplementedError, OSError, UnicodeError),
)

Source = str | bytes


class Member(NamedTuple):
    """A file in an archive, which load() may read more than once."""

    archive: Source
    name: str


def is_archive(source: Any) -> bool:
    """Whether the source is a zip archive, or the path of one."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        return bytes(source[:4]) == MAGIC
    if not isinstance(source, (str, os.PathLike)):
        return False
    try:
        if not os.path.isfile(source):  # a pipe would wait for a writer
            return False
        with open(source, "rb") as file:
            return file.read(4) == MAGIC
    except (OSError, ValueError):
        return False


def members(source: Any, origin: str) -> list[tuple[Member, bytes]]:
    """The files with device code in an archive, for load(). Raises for a damaged file."""
    found, given = inspect(source, origin), _source(source)
    for entry in found.entries:
        if entry.error is not None:
            raise errors.make(entry.error.tag, entry.error.message)
    with _opened(given, origin) as archive:
        return [
            (Member(given, entry.name), archive.read(archive.zip.getinfo(entry.name)))
            for entry in found.entries
        ]


def read(members: Sequence[Member], origin: str) -> list[bytes]:
    """Reads files of one archive again, opening it once."""
    with _opened(members[0].archive, origin) as archive:
        infos = {info.filename: info for info in archive.zip.infolist()}
        for member in members:
            if member.name not in infos:
                raise _damaged(origin, f"has no file '{shown(member.name)}'")
        return [archive.read(infos[member.name]) for member in members]


def inspect(source: Any, origin: str) -> Container:
    """inspect() of an archive: its files with device code.

    Raises ImageError [image] if the archive is damaged as a whole, or contains no device code.
    """
    with _opened(_source(source), origin) as archive:
        infos = [info for info in archive.zip.infolist() if not info.is_dir()]
        code = [info for info in infos if info.filename.endswith(_CODE)]
        found = [archive.entry(info) for info in code]
        if not found:
            others = [info for info in infos if _OTHERS.fullmatch(info.filename)]
            entries = [archive.entry(info) for info in others]
            found = [one for one in entries if one.error is None and one.content is not None]
            # If nothing was found, report libraries that could not be unpacked.
            found = found or [one for one in entries if one.name in archive.unread]
        if not found:
            raise errors.fault(
                "image", origin, "is a zip archive without device code in it",
                expected="files named *.cubin, as AOTInductor's .pt2 for CUDA has them",
                got=errors.counted(len(infos), "file"),
                advice="If a cubin in it has another name, unpack it and pass that.",
            )  # fmt: skip
        launches = list(archive.launches(infos))
        found = [dataclasses.replace(one, launches=_launches_of(one, launches)) for one in found]
        return Container("archive", None, archive.size, tuple(found))


def _source(source: Any) -> Source:
    if isinstance(source, (bytes, bytearray, memoryview)):
        return bytes(source)
    return os.path.abspath(os.fsdecode(source))


def _opened(source: Source, origin: str) -> _Archive:
    try:
        file = io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb")  # noqa: SIM115
    except (OSError, ValueError) as error:
        raise errors.fault("file", origin, f"cannot be opened ({error})") from error
    try:
        return _Archive(file, origin)
    except BaseException:
        file.close()
        raise


def _damaged(origin: str, problem: str, **more: str) -> errors.Error:
    return errors.fault("image", origin, problem, **more)


class _Archive:
    """An open archive, and the bytes that may still be unpacked."""

    def __init__(self, file: IO[bytes], origin: str) -> None:
        self.file, self.origin = file, origin
        self.size = file.seek(0, os.SEEK_END)
        self.left = min(FREE_BYTES + BYTES_A_BYTE * self.size, MOST_BYTES)
        directory = _directory_bytes(file, self.size)
        if directory is None or directory > MOST_DIRECTORY_BYTES:
            got = "none" if directory is None else f"{directory} bytes"
            raise _damaged(
                origin, "is a zip archive without a directory that could be read",
                expected=f"one of at most {MOST_DIRECTORY_BYTES} bytes at its end", got=got,
                advice="Copy the file again.",
            )  # fmt: skip
        try:
            self.zip = zipfile.ZipFile(file)
        except _DAMAGED as error:
            raise _damaged(origin, f"is a damaged zip archive ({shown(str(error))})") from error
        self.times = collections.Counter(info.filename for info in self.zip.infolist())
        self.unread: set[str] = set()  # names of entries that could not be unpacked

    def __enter__(self) -> _Archive:
        return self

    def __exit__(self, *exception: object) -> None:
        self.zip.close()
        self.file.close()

    def read(self, info: zipfile.ZipInfo, most: int = MOST_BYTES) -> bytes:
        """A file's bytes. Raises ImageError [image]."""
        label = f"{self.origin}: '{shown(info.filename)}'"
        if _leads_out(info.filename):
            raise _damaged(
                label, "has a name that leads out of the archive", expected="a relative path"
            )
        if info.flag_bits & 1 or info.compress_type not in _KINDS:
            raise _damaged(
                label, "is packed by a method that is not read", expected="stored, or deflate",
                got="encrypted" if info.flag_bits & 1 else f"method {info.compress_type}",
            )  # fmt: skip
        if info.file_size > min(self.left, most):
            raise _damaged(
                label, "would unpack to more than is read of one archive",
                expected=f"at most {min(self.left, most)} bytes", got=f"{info.file_size} bytes",
            )  # fmt: skip
        try:
            with self.zip.open(info) as file:
                data = file.read(info.file_size + 1)
        except _DAMAGED as error:
            raise _damaged(label, f"is damaged ({shown(str(error))})") from error
        if len(data) != info.file_size:
            raise _damaged(
                label, "is damaged", expected=f"{info.file_size} bytes", got=f"{len(data)}"
            )
        self.left -= len(data)
        return data

    def entry(self, info: zipfile.ZipInfo) -> ArchivedFile:
        content, fault, kind = None, None, "unknown"
        label = f"{self.origin}: '{shown(info.filename)}'"
        try:
            self.unread.add(info.filename)
            if self.times[info.filename] > 1:
                raise _damaged(label, "is there twice", expected="each name once")
            data = self.read(info)
            self.unread.discard(info.filename)
            content = content_of(library.inspect(data, label))
            kind = content.kind
        except errors.Error as error:
            fault = Fault(error.tag, str(error))
        return ArchivedFile(
            kind, info.filename, getattr(content, "arch", None), info.header_offset,
            info.compress_size, info.file_size, _KINDS.get(info.compress_type, "unknown"),
            0, "", content, fault,
        )  # fmt: skip

    def launches(self, infos: list[zipfile.ZipInfo]) -> Iterator[_Found]:
        """The launches in the wrappers' C++; none for an unreadable wrapper."""
        left = MOST_TEXT_BYTES
        for info in infos:
            if not info.filename.endswith((".cpp", ".cc", ".cxx")) or info.file_size > left:
                continue
            try:
                text = self.read(info, left).decode("utf-8", "replace")
            except errors.Error:
                continue
            left -= info.file_size
            yield from _launches_in(text, info.filename)


def _directory_bytes(file: IO[bytes], size: int) -> int | None:
    """The size of the archive's central directory, read before the directory itself."""
    tail_size = min(size, (1 << 16) + 22 + 76)
    file.seek(size - tail_size)
    tail = file.read(tail_size)
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or at + 22 > len(tail):
        return None
    (claimed,) = struct.unpack_from("<I", tail, at + 12)
    wide = at - 76  # zip64's record, with its locator
    if (
        wide >= 0
        and tail[wide : wide + 4] == b"PK\x06\x06"
        and tail[at - 20 : at - 16] == b"PK\x06\x07"
    ):
        (wide_claimed,) = struct.unpack_from("<Q", tail, wide + 40)
        claimed = wide_claimed if claimed == 0xFFFFFFFF else max(claimed, wide_claimed)
    return claimed


def _leads_out(name: str) -> bool:
    parts = name.replace("\\", "/").split("/")
    return not name or name[0] in "/\\" or ".." in parts or ":" in parts[0] or "\0" in name


# --- launches in a wrapper -----------------------------------------------------------------------

# As torch/_inductor/codegen/cpp_wrapper_gpu.py writes it: for each kernel a function with the grid,
# loadKernel("/where/it/was/HASH.cubin", "symbol", shared memory, ...), the arguments, and
# launchKernel(kernels_.name, grid_0, grid_1, grid_2, warps, shared memory, kernel_args_, stream_).
_STRING = r'"((?:[^"\\\n]|\\.){0,4096})"'
_LOAD = re.compile(
    rf"\bloadKernel\(\s*(?:{_STRING}|(\w{{1,500}}))\s*,\s*{_STRING}\s*,\s*(\d{{1,10}})\b"
)
# A value starts with a non-blank, so that the regular expression is unambiguous.
_VALUE = r"([^\s,;][^,;\n]{0,299})"
_LAUNCH = re.compile(
    rf"\blaunchKernel\(\s*[\w.>-]{{1,500}}\s*,\s*{_VALUE},\s*{_VALUE},\s*{_VALUE},"
    r"\s*(\d{1,6})\s*,\s*(\d{1,10})\s*,\s*(\w{1,100})"
)
_GRID = re.compile(r"\bgrid_([012]) = ([^;\n]{1,400});")
_DECLARED = re.compile(r"^[ \t]*([\w:*][\w:<>* ]{0,80}?[ *&])(\w{1,100}) = ([^;\n]{1,400});", re.M)
_TEXT_OF_A_LAUNCH = 1 << 20
# Keeps strings and drops comments: one contains the kernel's source. An unterminated one extends to
# the end of the text, so that it is scanned only once.
_STRING_OR_COMMENT = re.compile(
    r"""(\bR"([^()\\\s]{0,16})\((?s:.*?)(?:\)\2"|\Z)|"(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.){1,10}')"""
    r"|//[^\n]*|/\*(?s:.*?)(?:\*/|\Z)"
)


class _Found(NamedTuple):
    file: str  # name of the cubin, without its folder; "" if it is inside the library
    wrapper: str
    launch: Launch


def _launches_in(text: str, wrapper: str) -> Iterator[_Found]:
    text = _STRING_OR_COMMENT.sub(r"\1 ", text)
    before = 0
    for match in _LAUNCH.finditer(text):
        part = text[max(before, match.start() - _TEXT_OF_A_LAUNCH) : match.start()]
        before = match.end()
        loads = list(_LOAD.finditer(part))
        if not loads:
            continue
        path, _, symbol, _ = loads[-1].groups()
        grid = {f"grid_{axis}": value.strip() for axis, value in _GRID.findall(part)}
        names = [match[axis].strip() for axis in (1, 2, 3)]
        launch = Launch(
            kernel=_unescaped(symbol),
            grid=tuple(grid.get(name, name) for name in names),
            num_warps=int(match[4]),
            shared_memory=int(match[5]),
            arguments=tuple(_arguments(part, match[6])),
            wrapper=wrapper,
        )
        file = re.split(r"[/\\]", _unescaped(path))[-1] if path else ""
        yield _Found(file, wrapper, launch)


def _arguments(text: str, array: str) -> Iterator[str]:
    """ "int32_t xnumel" for each parameter: the type and the expression in the wrapper."""
    at = text.rfind(f"{array}[] = {{")
    end = text.find("};", at) if at >= 0 else -1
    if end < 0 or end - at > 1 << 16:
        return
    known = {name: (kind, value) for kind, name, value in _DECLARED.findall(text[:at])}
    for name in text[at:end].partition("{")[2].split(","):
        name = name.strip().removeprefix("&")
        kind, value = known.get(name, ("", name))
        yield f"{kind.strip()} {value.strip()}".strip()[:400]


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text)


def _launches_of(entry: ArchivedFile, launches: list[_Found]) -> tuple[Launch, ...]:
    """The launches of a file's kernels, by its name; those of a wrapper in its folder come
    first."""
    folder, _, file = entry.name.rpartition("/")
    images = entry.content.images() if isinstance(entry.content, Container) else [entry.content]
    symbols = {kernel.name for image in images if image is not None for kernel in image.kernels}
    mine = [one for one in launches if one.file in (file, "") and one.launch.kernel in symbols]
    beside = [one for one in mine if one.wrapper.rpartition("/")[0] == folder]
    return tuple(dict.fromkeys(one.launch for one in beside or mine))


__all__ = ["Member", "inspect", "is_archive", "members", "read"]
