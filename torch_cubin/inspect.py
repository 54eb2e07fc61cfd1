"""inspect(): what a cubin holds, read without a GPU and without running anything."""

from __future__ import annotations

import dataclasses
import os
import stat
from typing import Any

from torch_cubin import _lib, errors

MAX_BYTES = 1 << 30  # csrc/cubin/elf.h refuses more: there is no need to read it first

Triple = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class Param:
    """One parameter of a kernel. `kind` is "pointer", "value" or "unknown".

    The file tells a pointer from a 64-bit integer only where the compiler wrote it down (nvcc for
    sm_100 and later, Triton always); it never records signedness or floating point.
    """

    index: int
    offset: int  # bytes from the start of the parameter block
    size: int  # bytes
    kind: str


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One entry kernel. Blocks and cluster are None where the file records none."""

    name: str  # the symbol: C++ mangles it unless the kernel is extern "C"
    params: tuple[Param, ...]
    param_bytes: int
    registers: int  # per thread
    static_shared: int  # bytes a block, without what the driver reserves
    stack: int  # bytes per thread
    barriers: int
    required_block: Triple | None
    max_block: Triple | None
    cluster: Triple | None
    uses_dynamic_shared: bool  # a hint: False where the file does not tell

    def __str__(self) -> str:
        facts = [f"{self.registers} registers"]
        for count, what in (
            (self.static_shared, "B static shared"),
            (self.stack, "B stack"),
            (self.barriers, "barrier" if self.barriers == 1 else "barriers"),
        ):
            if count:
                facts.append(f"{count} {what}")
        if self.uses_dynamic_shared:
            facts.append("dynamic shared memory")
        for block, what in (
            (self.required_block, "block must be"),
            (self.max_block, "block at most"),
            (self.cluster, "cluster"),
        ):
            if block:
                facts.append(f"{what} {'x'.join(map(str, block))}")
        lines = [f"kernel {_shown(self.name)}", f"  {', '.join(facts)}"]
        if not self.params:
            return "\n".join([*lines, "  no parameters"])
        lines.append(f"  {'param':>5} {'offset':>7} {'size':>6}  kind")
        lines += [f"  {p.index:>5} {p.offset:>7} {p.size:>6}  {p.kind}" for p in self.params]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Image:
    """The facts in a cubin: arch, and every kernel by name."""

    arch: str  # "sm_90a"
    sm: int  # 90
    abi_version: int  # layout of the ELF header: 7 (CUDA 11 and 12) or 8
    toolkit: str  # "13.0", or "" where the file does not tell
    size: int  # bytes
    kernels: tuple[Kernel, ...]

    def __getitem__(self, name: str) -> Kernel:
        for kernel in self.kernels:
            if kernel.name == name:
                return kernel
        names = ", ".join(f"'{_shown(kernel.name)}'" for kernel in self.kernels[:3])
        more = f" and {len(self.kernels) - 3} more" if len(self.kernels) > 3 else ""
        raise errors.fault(
            "no_kernel",
            f"kernel '{_shown(name)}'",
            "is not in the cubin",
            expected=f"{names}{more}" if names else "a cubin with kernels",
            advice='Names are the symbols: C++ mangles them unless the kernel is extern "C".',
        )

    def to_dict(self) -> dict[str, Any]:
        """The same facts as plain dicts and lists, ready for json."""
        return dataclasses.asdict(self, dict_factory=_plain)

    def __str__(self) -> str:
        made = f", CUDA {self.toolkit}" if self.toolkit else ""
        count = f"{len(self.kernels)} kernel{'' if len(self.kernels) == 1 else 's'}"
        head = f"cubin for {self.arch}{made}, {self.size} bytes, {count}"
        return "\n\n".join([head, *map(str, self.kernels)])


def inspect(source: str | os.PathLike[str] | bytes | bytearray | memoryview) -> Image:
    """Reads a cubin's facts: arch, kernels, parameters, registers, shared memory.

    `source` is a path, or the bytes themselves. Needs no GPU, never touches the driver, and is safe
    on any file: what is not a whole, consistent cubin is refused.

    Raises FileError [file] for a path that is missing, unreadable or not a regular file, and
    ImageError [image] for bytes that are not a loadable cubin; the text says what they are. Of
    another type, `source` is an InputError [input], which is a TypeError.
    """
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _image(_lib.inspect(bytes(source), "the bytes given"))
    if isinstance(source, (str, os.PathLike)):
        path = os.fspath(source)
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        return _image(_lib.inspect(_read(path), _origin(path)))
    raise errors.fault(
        "input",
        "torch_cubin.inspect argument 'source'",
        "has a wrong type",
        expected="str, os.PathLike or bytes",
        got=type(source).__name__,
        advice="Pass the cubin's path, or its bytes.",
    )


def _origin(path: str) -> str:
    return f"file '{_shown(path, limit=4096)}'"


def _read(path: str) -> bytes:
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
            raise refuse(f"is {kind}, not a regular file", "Pass the cubin file itself.")
        if facts.st_size > MAX_BYTES:
            raise errors.fault(
                "image",
                _origin(path),
                "is too large",
                expected=f"at most {MAX_BYTES} bytes",
                got=f"{facts.st_size} bytes",
                advice="Split it into several cubins.",
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


def _image(facts: dict[str, Any]) -> Image:
    kernels = []
    for kernel in facts.pop("kernels"):
        params = tuple(Param(**param) for param in kernel.pop("params"))
        for key in ("required_block", "max_block", "cluster"):
            value = kernel.pop(key)
            kernel[key] = tuple(value) if value is not None else None
        kernels.append(Kernel(params=params, **kernel))
    return Image(kernels=tuple(kernels), **facts)


def _plain(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in items}


def _shown(text: str, limit: int = 200) -> str:
    """A name from outside, cut to `limit` and without what would move a terminal's cursor."""
    shown = "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:limit]
    )
    return shown + "..." if len(text) > limit else shown


__all__ = ["Image", "Kernel", "Param", "inspect"]
