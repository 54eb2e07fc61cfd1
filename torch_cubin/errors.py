"""The exceptions of torch_cubin: one class per tag.

C++ has a single exception type, whose text contains the tag:

    torch_cubin [tag]: <object> <what is wrong>: expected X, got Y. <what to do>

Every class here derives from `torch_cubin.Error` (a RuntimeError, the type of errors from C++) and
from the built-in class that a Python user expects for that mistake.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from torch_cubin._native import process

if process.without_torch():
    _TORCH_OUT_OF_MEMORY: tuple[type, ...] = ()
else:
    import torch

    _TORCH_OUT_OF_MEMORY = (torch.OutOfMemoryError,)


class Error(RuntimeError):
    """Any error of torch_cubin. `tag` names the kind; the text says what to do."""

    tag = "internal"

    def __init_subclass__(cls, tag: str = "", **keywords: object) -> None:
        super().__init_subclass__(**keywords)
        if tag:  # a user's subclass inherits the tag of its base
            cls.tag = tag
            CLASSES[tag] = cls


CLASSES: dict[str, type[Error]] = {}


class FileError(Error, OSError, tag="file"):
    """[file] A file is missing, unreadable or not a regular file."""


class HashError(Error, ValueError, tag="hash"):
    """[hash] A file's bytes are not the ones that the manifest promises."""


class ImageError(Error, ValueError, tag="image"):
    """[image] The bytes are not a whole, consistent cubin."""


class ArchError(Error, NotImplementedError, tag="arch"):
    """[arch] No code for this GPU's architecture."""


class DriverError(Error, tag="driver"):
    """[driver] The CUDA driver is missing, too old, or refused a call."""


class NoDeviceError(Error, tag="no_device"):
    """[no_device] There is no usable GPU."""


class NoKernelError(Error, LookupError, tag="no_kernel"):
    """[no_kernel] A cubin or the catalog has no kernel of that name or kind."""


class ParamsError(Error, TypeError, tag="params"):
    """[params] The arguments do not match the kernel's own parameter table."""


class InputError(Error, ValueError, TypeError, tag="input"):
    """[input] An argument of an op has a wrong shape, dtype, device or layout.

    A TypeError too, because torch raises either for these.
    """


class ModeError(Error, ValueError):
    """[input] A call that a mode refuses, such as ``torch_cubin.audit(strict=True)``.

    No TypeError: for one, ``a @ b`` says that its operands are unsupported, and the text is lost.
    """

    tag = "input"


class LaunchError(Error, ValueError, tag="launch"):
    """[launch] Grid, block, cluster or shared memory are out of range."""


class CaptureError(Error, tag="capture"):
    """[capture] The call cannot be made while a CUDA graph is captured."""


class ForkError(Error, tag="fork"):
    """[fork] CUDA was used before fork(): use the 'spawn' start method."""


class OutOfMemoryError(Error, *_TORCH_OUT_OF_MEMORY, tag="oom"):  # type: ignore[misc]
    """[oom] Device memory ran out. A torch.OutOfMemoryError too, so that retry helpers know it."""


class FaultError(Error, tag="fault"):
    """[fault] A kernel faulted; this process can no longer use CUDA."""


class ClosedError(Error, ValueError, tag="closed"):
    """[closed] The module was unloaded, or its context was reset."""


class InternalError(Error, tag="internal"):
    """[internal] A bug of torch_cubin."""


def make(tag: str, message: str) -> Error:
    """The exception for a tag and a complete message, as C++ builds them."""
    return CLASSES.get(tag, InternalError)(message)


def of_text(error: RuntimeError) -> Error | None:
    """The exception for an error from C++; None for one that is converted already or not ours."""
    pattern = r"(?:CUDA out of memory\. )?torch_cubin \[(\w+)\]: "
    found = None if isinstance(error, Error) else re.match(pattern, str(error))
    return make(found[1], str(error)) if found is not None else None


def fault(
    tag: str, object: str, problem: str, *, expected: str = "", got: str = "", advice: str = ""
) -> Error:
    """The exception for `tag`; builds the message by the template, like fail() in C++."""
    # An object may be a file name, which may contain line ends.
    text = f"torch_cubin [{tag}]: {re.sub(_CONTROL, _escaped, object)} {problem}"
    if expected:
        text += f": expected {expected}"
    if got:
        text += f", got {got}" if expected else f": got {got}"
    text = "\n".join(re.sub(_CONTROL, _escaped, line) for line in f"{text}. {advice}".split("\n"))
    return make(tag, text.rstrip())


# Characters that move a terminal's cursor, and unpaired surrogates, which cannot be printed.
_CONTROL = "[\\x00-\\x1f\\x7f-\\x9f\\ud800-\\udfff]"  # compiled when the first error is made


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


def wrong_type(what: str, expected: str, given: object, advice: str = "") -> Error:
    """The error for an argument of a wrong type."""
    got = type(given).__name__
    return fault("input", what, "has a wrong type", expected=expected, got=got, advice=advice)


def other_bytes(what: str, problem: str, wanted: str, found: str, advice: str = "") -> Error:
    """The error for bytes whose sha256 has changed."""
    expected, got = f"sha256 {wanted}", f"sha256 {found}"
    return fault("hash", what, problem, expected=expected, got=got, advice=advice)


def nearest(wanted: str, known: Sequence[str]) -> str:
    """For `expected`: the known names closest to the wanted one, else all."""
    found = difflib.get_close_matches(wanted, known, n=3)
    if not found:
        return ", ".join(f"'{name}'" for name in known)
    return ", ".join(f"'{name}'" for name in found) + f" (nearest of {len(known)})"


_Function = TypeVar("_Function", bound=Callable[..., object])


def check_keywords(function: str, keywords: Iterable[str], known: Sequence[str]) -> None:
    """Raises for an unknown keyword of a public function; the error lists the nearest, or all."""
    for name in keywords:
        if name not in known:
            raise fault(
                "input",
                f"torch_cubin.{function}",
                "has an unknown argument",
                expected=nearest(name, known),
                got=f"'{name}'",
            )


def named_keywords(function: _Function) -> _Function:
    """Decorates a public function, or a method `__init__`, with :func:`check_keywords`."""
    parameters = inspect.signature(function).parameters.values()
    known = [each.name for each in parameters if each.name != "self"]
    # Producers share function names; theirs are torch_cubin.producers.<producer>.NAME.
    producer = re.match(r"torch_cubin\.(?:_|producers\.)(triton|tile)\b", function.__module__)
    name = function.__qualname__.removesuffix(".__init__").removeprefix("_")
    name = f"producers.{producer[1]}.{name}" if producer else name

    @functools.wraps(function)
    def checked(*args: object, **keywords: object) -> object:
        check_keywords(name, keywords, known)
        return function(*args, **keywords)

    return checked  # type: ignore[return-value]


_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


def warn(text: str, category: type[Warning]) -> None:
    """Warns at the line of the user's code that led here."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)


def counted(count: int, noun: str) -> str:
    """1 kernel, 3 kernels, 3 entries."""
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun[:-1]}ies" if noun[-2:] == "ry" else f"{count} {noun}s"
