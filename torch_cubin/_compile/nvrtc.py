"""NVRTC by ctypes: from PyTorch's packages or a CUDA toolkit, opened on first use."""

from __future__ import annotations

import ctypes
import functools
import glob
import importlib.util
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from torch_cubin import errors

_COMPILATION = 6  # NVRTC_ERROR_COMPILATION


class Compiled(NamedTuple):
    cubin: bytes
    symbols: dict[str, str]  # by name expression
    log: str


def toolkits() -> list[Path]:
    """CUDA toolkit folders (with include and lib64); that of the environment first."""
    named = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    found = [Path(path) for path in (*named, "/usr/local/cuda") if path]
    # NOTE: pathlib's is_dir() and is_file() raise PermissionError inside an unreadable folder.
    return [path for path in dict.fromkeys(found) if os.path.isdir(path)]


def wheels() -> list[Path]:
    """Folders of NVIDIA's wheels with include and lib: nvidia/cu13, nvidia/cuda_nvrtc."""
    try:
        spec = importlib.util.find_spec("nvidia")
    except ValueError:  # some module of that name that has no spec
        spec = None
    roots = [Path(path) for path in (spec.submodule_search_locations or ())] if spec else []
    return [folder for root in roots for folder in sorted(root.glob("cu*"), reverse=True)]


def include_folders() -> list[Path]:
    """The installed folders of CUDA's own headers."""
    for root in (*toolkits(), *wheels()):
        include = root / "include"
        if os.path.isfile(include / "cuda_fp16.h"):
            return [path for path in (include, include / "cccl") if os.path.isdir(path)]
    return []


def _candidates() -> Iterator[Path]:
    """Candidate libraries on disk; those of PyTorch's CUDA version first."""
    major = str(torch.version.cuda or "13").partition(".")[0]
    folders = [folder / "lib" for folder in wheels()]
    folders += [root / sub for root in toolkits() for sub in ("lib64", "lib")]
    found = [Path(path) for folder in folders for path in glob.glob(f"{folder}/libnvrtc.so.[0-9]*")]
    yield from sorted(found, key=lambda path: path.name.split(".")[2:3] != [major])


def _functions(library: ctypes.CDLL) -> ctypes.CDLL:
    for name in (
        *("CreateProgram", "AddNameExpression", "CompileProgram", "GetProgramLogSize"),
        *("GetProgramLog", "GetLoweredName", "GetCUBINSize", "GetCUBIN", "DestroyProgram"),
        "Version",
    ):
        getattr(library, f"nvrtc{name}").restype = ctypes.c_int
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


@functools.cache
def load() -> ctypes.CDLL:
    """The library. Raises FileError [file] if there is none."""
    tried = []
    for path in _candidates():
        try:
            # NVRTC opens its builtins library by bare name, which succeeds only if it is loaded.
            for builtins in sorted(path.parent.glob("libnvrtc-builtins.so.*")):
                ctypes.CDLL(str(builtins))
            return _functions(ctypes.CDLL(str(path)))
        except OSError as error:
            tried.append(f"{path} ({error})")
    for name in ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"):
        try:
            return _functions(ctypes.CDLL(name))
        except OSError:
            tried.append(name)
    raise errors.fault(
        "file",
        "NVRTC",
        "is not here",
        expected="libnvrtc.so of PyTorch's wheels or of a CUDA toolkit",
        got=f"none of {', '.join(tried)}"[:300],
        advice="Run pip install nvidia-cuda-nvrtc, set CUDA_HOME, or pass compiler='nvcc'.",
    )


def version() -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(load().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
    return f"{major.value}.{minor.value}"


def _check(result: int, what: str) -> None:
    if result:
        said = load().nvrtcGetErrorString(result).decode("utf-8", "replace")
        raise errors.fault("internal", what, f"failed ({said})")


def compile(
    source: str,
    name: str,
    expressions: Sequence[str],
    options: Sequence[str],
    headers: dict[str, str],
) -> Compiled:
    """Compiles one program for one architecture. Raises CompileFailed for errors in the source.

    `name` is the source's name in errors and __FILE__. NVRTC searches the folder of the program's
    name for quoted headers; for a bare name that is the working folder, which the cache key does
    not cover. So the program gets a name in a folder that does not exist. (--no-source-include
    would also stop headers from including their neighbours.)
    """
    library = load()
    quoted = name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
    source = f'#line 1 "{quoted}"\n{source}'
    placed = f"/dev/null/{Path(name).name}"
    program = ctypes.c_void_p()
    contents = (ctypes.c_char_p * len(headers))(*(text.encode() for text in headers.values()))
    names = (ctypes.c_char_p * len(headers))(*(text.encode() for text in headers))
    _check(
        library.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), placed.encode(), len(headers), contents, names
        ),
        "nvrtcCreateProgram",
    )
    try:
        for expression in expressions:
            result = library.nvrtcAddNameExpression(program, expression.encode())
            _check(result, f"nvrtcAddNameExpression of '{expression}'")
        flags = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        result = library.nvrtcCompileProgram(program, len(options), flags)
        log = _text(library, program).replace(placed, name)
        if result:
            said = library.nvrtcGetErrorString(result).decode("utf-8", "replace")
            raise CompileFailed(log if result == _COMPILATION or log else said)
        symbols = {}
        for expression in expressions:
            lowered = ctypes.c_char_p()
            result = library.nvrtcGetLoweredName(
                program, expression.encode(), ctypes.byref(lowered)
            )
            _check(result, f"nvrtcGetLoweredName of '{expression}'")
            symbols[expression] = (lowered.value or b"").decode()
        size = ctypes.c_size_t()
        _check(library.nvrtcGetCUBINSize(program, ctypes.byref(size)), "nvrtcGetCUBINSize")
        cubin = ctypes.create_string_buffer(size.value)
        _check(library.nvrtcGetCUBIN(program, cubin), "nvrtcGetCUBIN")
        return Compiled(cubin.raw, symbols, log)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _text(library: ctypes.CDLL, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    if library.nvrtcGetProgramLogSize(program, ctypes.byref(size)) or size.value == 0:
        return ""
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    return log.value.decode("utf-8", "replace")


class CompileFailed(Exception):
    """Compilation failed; the argument is the compiler's log."""
