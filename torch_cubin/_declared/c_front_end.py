"""C and C++ text, parsed by libclang: for a 64-bit Linux host, with g++'s include folders.

Text that clang does not compile is refused with clang's message; nothing is guessed. libclang is an
optional extra, imported only here, at first use.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import dataclasses
import functools
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

from torch_cubin import errors
from torch_cubin._declared import c_builtin

_FOLDER = "/torch_cubin-c-text"  # the folder of in-memory files
MAIN = f"{_FOLDER}/text.h"
_ADDED, _STAND_INS = f"{_FOLDER}/added.h", f"{_FOLDER}/include"
_SKIP_BODIES, _WARNING, _ERROR = 0x40, 2, 3
_MOST_ROUNDS = 8  # of names that only show once others are declared
# Attributes that clang ignores may affect g++'s layout.
_IGNORED = {"-Wunknown-attributes", "-Wignored-attributes", "-Wignored-pragmas"}
# Names of clang, which the user's files do not see, and of g++, whose values they see instead.
_OF_COMPILER = re.compile(
    r"\b__(?:clang\w*__|llvm__|has_feature|has_extension|GNUC(?:_MINOR|_PATCHLEVEL)?__)(?!\w)"
    r"|\b__has_cpp_attribute(?=\s*\(\s*clang\s*::)"
)
_GCC = (12, 2, 0)  # where g++ is not installed
# Macros of nvcc, and their values for texts that use them.
_OF_NVCC = re.compile(r"\b__(?:CUDACC|NVCC|CUDA_ARCH|CUDACC_VER_MAJOR)__\b")
_AS_NVCC = (
    *("-DTORCH_CUBIN__CUDACC__=1", "-DTORCH_CUBIN__NVCC__=1", "-DTORCH_CUBIN__CUDA_ARCH__=900"),
    "-DTORCH_CUBIN__CUDACC_VER_MAJOR__=13",
)
_UNDECLARED = re.compile(
    r"unknown type name '(?:\w+::)*(\w+)'|use of undeclared identifier '(\w+)'"
    r"|no (?:type|member) named '(\w+)' in the global namespace"
)


@functools.cache
def cindex() -> Any:
    """The module clang.cindex, extended by functions that its Python does not declare."""
    try:
        from clang import cindex as module

        library = module.conf.lib
    except Exception as error:  # ImportError, or its LibclangError
        raise errors.fault(
            "input", "torch_cubin.c_struct", f"needs libclang ({str(error)[:80]})",
            expected="the package libclang", got="none",
            advice="Run pip install libclang, or install torch_cubin[c]; a ctypes.Structure or a"
            " NumPy dtype needs neither.",
        ) from None  # fmt: skip
    pointer = ctypes.c_void_p
    for name, result, arguments in (
        ("clang_getCursorPrettyPrinted", module._CXString, [module.Cursor, pointer]),
        ("clang_Cursor_Evaluate", pointer, [module.Cursor]),
        ("clang_EvalResult_getKind", ctypes.c_int, [pointer]),
        ("clang_EvalResult_isUnsignedInt", ctypes.c_uint, [pointer]),
        ("clang_EvalResult_getAsUnsigned", ctypes.c_ulonglong, [pointer]),
        ("clang_EvalResult_getAsLongLong", ctypes.c_longlong, [pointer]),
        ("clang_EvalResult_getAsDouble", ctypes.c_double, [pointer]),
        ("clang_EvalResult_dispose", None, [pointer]),
        ("clang_isVirtualBase", ctypes.c_uint, [module.Cursor]),
        ("clang_Cursor_isAnonymousRecordDecl", ctypes.c_uint, [module.Cursor]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    library.clang_getCursorPrettyPrinted.errcheck = module._CXString.from_result
    return module


def evaluate(cursor: Any) -> int | float | None:
    """The value of a constant expression; None if it is not a constant number."""
    library = cindex().conf.lib
    result = library.clang_Cursor_Evaluate(cursor)
    if not result:
        return None
    try:
        kind = library.clang_EvalResult_getKind(result)
        if kind == 1:
            if library.clang_EvalResult_isUnsignedInt(result):
                return library.clang_EvalResult_getAsUnsigned(result)
            return library.clang_EvalResult_getAsLongLong(result)
        return library.clang_EvalResult_getAsDouble(result) if kind == 2 else None
    finally:
        library.clang_EvalResult_dispose(result)


def pretty(cursor: Any) -> str:
    """A declaration as clang prints it, with macros expanded."""
    return cindex().conf.lib.clang_getCursorPrettyPrinted(cursor, None)


@functools.cache
def _gcc() -> tuple[tuple[str, ...], tuple[int, ...]]:
    """g++'s include folders, in its order, and its version; no folders without g++."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        return (), _GCC
    try:
        said = subprocess.run(
            [compiler, "-E", "-v", "-x", "c++", os.devnull], capture_output=True, text=True,
            timeout=60, env={**os.environ, "LC_ALL": "C"},
        ).stderr  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return (), _GCC
    found = re.search(r"#include <\.\.\.> search starts here:\n(.*?)\nEnd of search", said, re.S)
    version = re.search(r"^gcc version (\d+)\.(\d+)\.(\d+)", said, re.M)
    folders = tuple(line.strip() for line in found[1].splitlines()) if found else ()
    return folders, tuple(map(int, version.groups())) if version else _GCC


def system_folders() -> tuple[str, ...]:
    """g++'s include folders, in its order; empty without g++."""
    return _gcc()[0]


@dataclasses.dataclass
class Parsed:
    unit: Any  # a TranslationUnit
    added: frozenset[str]  # names of c_builtin that the text leaves undeclared
    # For each attribute that clang ignores: its file, offset, line and clang's message.
    ignored: list[tuple[str, int, int, str]]


class Text:
    """A text, and the folders and options with which it is parsed."""

    def __init__(
        self, text: str, label: str, include: Sequence[Any] = (), options: Sequence[str] = ()
    ) -> None:
        self.text, self.label = _OF_COMPILER.sub(r"TORCH_CUBIN\g<0>", text), label
        self.headers: dict[str, str] = {}  # override those on the disk
        folders = [os.path.abspath(path) for path in include]
        # Headers of CUDA and g++ are system headers: their #ifs do not concern the user.
        cuda = [path for path in folders if os.path.isfile(os.path.join(path, "cuda.h"))]
        self.system = (*cuda, *system_folders())
        self.options = [
            *("-x", "c++", "-std=gnu++17", "-target", "x86_64-unknown-linux-gnu", "-nostdinc"),
            *("-ferror-limit=0", "-fno-spell-checking", "-fno-access-control"),
            *c_builtin.KEYWORDS,
            *(option for path in folders if path not in cuda for option in ("-I", path)),
            *(option for path in self.system for option in ("-isystem", path)),
            *("-idirafter", _STAND_INS),
            "-DTORCH_CUBIN__has_cpp_attribute(...)=0",
            *(f"-DTORCH_CUBIN__GNUC{part}__={number}" for part, number in
              zip(("", "_MINOR", "_PATCHLEVEL"), _gcc()[1], strict=True)),
            *options,
        ]  # fmt: skip

    def parse(self, more: str = "", options: Sequence[str] = ()) -> Parsed:
        """Compiles the text, followed by `more`. Raises InputError [input] with the line."""
        added: set[str] = set()
        for _ in range(_MOST_ROUNDS):
            unit = self._unit(more, added, options)
            if seen := self._substituted(unit, _OF_COMPILER):
                self.headers.update(seen)
                unit = self._unit(more, added, options)
            wrong = [d for d in unit.diagnostics if d.severity >= _ERROR]
            missing = {
                name
                for error in wrong
                for groups in _UNDECLARED.findall(error.spelling)
                for name in groups
                if name in c_builtin.DECLARATIONS
            }
            if not missing - added:
                break
            added |= missing
        if wrong:
            raise self._refusal(wrong[0])
        ignored = [
            (_file(d), d.location.offset, d.location.line, d.spelling)
            for d in unit.diagnostics
            if d.severity == _WARNING and d.option in _IGNORED
        ]
        return Parsed(unit, frozenset(added), ignored)

    def as_nvcc(self, parsed: Parsed) -> Text | None:
        """The text as nvcc compiles it; None if the text does not depend on the compiler.

        The user's files see nvcc's macros; CUDA's headers do not: they would need nvcc's built-ins.
        """
        changed = copy.copy(self)
        changed.text = _OF_NVCC.sub(r"TORCH_CUBIN\g<0>", self.text)
        changed.options = [*self.options, *_AS_NVCC]
        seen = self._substituted(parsed.unit, _OF_NVCC)
        changed.headers = {**self.headers, **seen}
        return changed if seen or changed.text != self.text else None

    def _substituted(self, unit: Any, names: re.Pattern[str]) -> dict[str, str]:
        """The user's headers that use some of these names, which get a prefix."""
        out = {}
        for include in unit.get_includes():
            name = include.include.name
            if name.startswith((_FOLDER, *self.system)):
                continue
            with contextlib.suppress(OSError):
                before = self.headers.get(name)
                if before is None:
                    with open(name, errors="replace") as file:
                        before = file.read()
                after = names.sub(r"TORCH_CUBIN\g<0>", before)
                if before != after:
                    out[name] = after
        return out

    def _unit(self, more: str, added: set[str], options: Sequence[str]) -> Any:
        module = cindex()
        files = [
            (MAIN, f"{self.text}\n{more}"),
            (_ADDED, c_builtin.declared(added)),
            *self.headers.items(),
            *((f"{_STAND_INS}/{name}", "") for name in c_builtin.HEADERS),
        ]
        arguments = [*self.options, *options, "-include", _ADDED]
        try:
            return module.Index.create().parse(
                MAIN, args=arguments, unsaved_files=files, options=_SKIP_BODIES
            )
        except module.TranslationUnitLoadError as error:
            raise errors.fault("input", self.label, f"cannot be read by clang ({error})",
                               expected="C++ text, and clang's options") from None  # fmt: skip

    def _refusal(self, found: Any) -> errors.Error:
        file = _file(found)
        where = f"line {found.location.line}"
        where += "" if file in (MAIN, "") else f" of '{file}'"
        advice = ""
        if found.spelling.endswith("file not found"):
            advice = "Say its folder: include=[...]."
        elif "unknown type" in found.spelling or "undeclared" in found.spelling:
            advice = "Give its header: an #include in the text, and include=[...]."
        return errors.fault("input", f"{self.label} {where}", "does not compile",
                            expected="C++ that clang takes", got=f"{found.spelling:.200}",
                            advice=advice)  # fmt: skip


def _file(diagnostic: Any) -> str:
    file = diagnostic.location.file
    return file.name if file is not None else ""
