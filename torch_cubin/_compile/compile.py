"""compile(): CUDA C++ becomes a Module, by NVRTC or nvcc."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from torch_cubin import errors
from torch_cubin._compile import cache as _cache
from torch_cubin._compile import headers, nvrtc
from torch_cubin._inspection.files import read_file
from torch_cubin._kernels.module import Module, load

_FILE_NAME = re.compile(r"\s*[^\s;{}()]+\.(cu|cuh|cpp|cc|c|h|hpp|ptx|cubin)\s*")
_ARCH = re.compile(r"sm_\d+[af]?")


@errors.named_keywords
def compile(
    source: str | os.PathLike[str],
    *,
    names: Sequence[str] = (),
    archs: Sequence[str] | str | None = None,
    include: Sequence[str | os.PathLike[str]] = (),
    options: Sequence[str] = (),
    compiler: str = "nvrtc",
    cache: bool = True,
) -> Module:
    """Compiles CUDA C++ for each arch and opens it, as torch_cubin.load opens a cubin.

        module = torch_cubin.compile(source, names=["axpy<float, 2>"], archs=["sm_90a"])
        module["axpy<float, 2>"](y, x, grid=8, block=256)

    - `source`: the text, or a path, whose folder is searched for headers.
    - `names`: C++ names of kernels, templates with their arguments. The module finds kernels by
      these names and by symbol. Kernels that are not templates need not be listed.
    - `archs`: such as "sm_90a"; by default that of PyTorch's current GPU.
    - `include`: folders. CUDA's own are added if they are installed; NVRTC also gets minimal
      `cstdint`, `cstddef`, `climits`, `cfloat` and `cmath`.
    - `options`: compiler options, such as "-DN=4" or "--use_fast_math".
    - `compiler`: "nvrtc", the library that comes with PyTorch, or "nvcc" from PATH, which supports
      all of C++ but not `names`.
    - `cache`: caches results on disk (TORCH_CUBIN_CACHE), by the contents of source and headers,
      options, arch and compiler.

    Raises InputError [input] for a source that does not compile, with the line, and FileError
    [file] if there is no compiler.
    """
    if not isinstance(source, (str, os.PathLike)):
        raise errors.wrong_type(_argument("source"), "a str or os.PathLike", source)
    folders = [Path(os.fspath(folder)) for folder in _listed(include, "include")]
    is_file = isinstance(source, os.PathLike)
    label, name = "the source given", "source.cu"
    text = source
    if is_file:
        path = Path(os.fspath(source))
        label, name = f"file '{path}'", path.name
        text = read_file(str(path)).decode("utf-8", "replace")
        folders.insert(0, path.parent)
    assert isinstance(text, str)
    if not is_file and _FILE_NAME.fullmatch(text):
        raise errors.fault(
            "input", _argument("source"), "is a file's name",
            expected="a str of source text, or a path object", got=repr(text)[:80],
            advice=f"Pass pathlib.Path({text.strip()!r:.80}).",
        )  # fmt: skip
    if any(0xD800 <= ord(c) < 0xE000 for c in set(text)):
        raise _refuse("source", "holds half of a character", "Unicode text", "a surrogate")
    if "\0" in text:
        raise _refuse("source", "holds a NUL", "text", "'\\0'")
    expressions = _listed(names, "names")
    flags = _listed(options, "options")
    wanted = _archs(archs)
    if compiler == "nvrtc":
        compiled = [
            _nvrtc(text, name, label, expressions, a, folders, flags, cache) for a in wanted
        ]
        version = f"NVRTC {nvrtc.version()}"
    elif compiler == "nvcc":
        if expressions:
            raise _refuse("names", "is for NVRTC alone",
                          "none: nvcc keeps what the source instantiates or declares extern \"C\"",
                          ", ".join(expressions)[:80])  # fmt: skip
        compiled = [_nvcc(text, name, label, arch, folders, flags, cache) for arch in wanted]
        version = _nvcc_version()
    else:
        raise _refuse("compiler", "is unknown", "'nvrtc' or 'nvcc'", repr(compiler)[:80])
    made = load([cubin for cubin, _ in compiled])
    # A source with only variables, for global_tensor(), has no __global__ function.
    cubins = [cubin for cubin, _ in compiled]
    only_variables = "__global__" not in text and any(map(_has_variables, cubins))
    if not made.names and not expressions and not only_variables:
        raise errors.fault(
            "no_kernel", label, "compiles to no kernel", expected="one or more",
            got="none: a template is compiled for the arguments that somebody names, and static"
            " or unused functions are omitted",
            advice='Name a template\'s kernels, as names=["axpy<float, 2>"], or instantiate it in'
            " the source; a kernel is a __global__ function.",
        )  # fmt: skip
    aliases = dict(compiled[0][1])
    for symbol in made.names:  # functions that are not templates also get their plain name
        plain = _plain_name(symbol)
        if plain is not None and plain not in made.names:
            aliases.setdefault(plain, symbol)
    made._name(aliases, {"name": compiler, "version": version, "target": ", ".join(wanted)})
    made.origin = label
    return made


def _has_variables(cubin: bytes) -> bool:
    """Whether the cubin has a section for __device__ or __constant__ variables."""
    sections = (b"\0.nv.global\0", b"\0.nv.global.init\0", b"\0.nv.constant3\0")
    return any(section in cubin for section in sections)


def _plain_name(symbol: str) -> str | None:
    """The plain name of a mangled function, if it is neither in a namespace nor a template."""
    match = re.match(r"_Z(\d+)", symbol)
    if match is None:
        return None
    start, length = match.end(), int(match[1])
    is_template = symbol[start + length : start + length + 1] == "I"
    return None if is_template else symbol[start : start + length]


def _listed(values: Any, what: str) -> list[str]:
    if isinstance(values, (str, os.PathLike)):
        values = [values]
    if not isinstance(values, Iterable):
        raise errors.wrong_type(_argument(what), "a list of str", values)
    listed = list(values)
    for value in listed:
        text = os.fspath(value) if isinstance(value, os.PathLike) else value
        if not isinstance(text, str) or "\0" in text:
            raise _refuse(what, "has a wrong entry", "a str", repr(value)[:80])
    return listed


def _archs(archs: Any) -> list[str]:
    if archs is None:
        if not torch.cuda.is_available():
            raise _refuse("archs", "is missing, and there is no GPU", "archs=['sm_90a']", "None")
        major, minor = torch.cuda.get_device_capability()
        return [f"sm_{major}{minor}" + ("a" if major >= 9 else "")]
    wanted = _listed(archs, "archs")
    for arch in wanted:
        if not isinstance(arch, str) or not _ARCH.fullmatch(arch):
            raise _refuse("archs", "has a wrong entry", "'sm_80', 'sm_90a'", repr(arch)[:80])
    if not wanted:
        raise _refuse("archs", "is empty", "one or more", "[]")
    return wanted


def _nvrtc(
    text: str,
    name: str,
    label: str,
    expressions: list[str],
    arch: str,
    folders: list[Path],
    options: list[str],
    cache: bool,
) -> tuple[bytes, dict[str, str]]:
    cuda = nvrtc.include_folders()
    flags = [f"--gpu-architecture={arch}"]
    if not any(re.match(r"(--std|-std)=", option) for option in options):
        flags.append("--std=c++17")
    flags += [*(f"--include-path={folder}" for folder in (*folders, *cuda)), *options]
    every = [*folders, *cuda]
    own = {n: t for n, t in headers.OWN.items() if not any(os.path.isfile(f / n) for f in every)}
    is_known = cache and not headers.brings_files(options)
    included = headers.digest(text, every, cuda) if is_known else None
    key = None
    if included is not None:
        key = _cache.key(
            {"version": 2, "source": text, "name": name, "names": expressions, "options": flags,
             "own": own, "included": included, "compiler": f"NVRTC {nvrtc.version()}"}
        )  # fmt: skip
        found = _cache.find(key)
        if found is not None and isinstance(found[0].get("symbols"), dict):
            return found[1], found[0]["symbols"]
    try:
        made = nvrtc.compile(text, name, expressions, flags, own)
    except nvrtc.CompileFailed as failed:
        raise _does_not_compile(label, str(failed), arch) from None
    if not made.cubin:
        raise errors.fault("input", label, "gives no code for that architecture", got=arch)
    if key is not None:
        _cache.keep(key, {"symbols": made.symbols}, made.cubin)
    return made.cubin, made.symbols


# Environment variables that nvcc and its host compiler read.
_ENVIRONMENT = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN", "CPATH",
                "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH")  # fmt: skip


def _environments_options() -> list[str]:
    """The options that nvcc takes from the environment."""
    given = (os.environ.get(name, "") for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"))
    return [option for options in given for option in options.split()]


def _nvcc_path() -> str:
    found = shutil.which("nvcc")
    for root in nvrtc.toolkits():
        if found is None and os.path.isfile(root / "bin" / "nvcc"):
            found = str(root / "bin" / "nvcc")
    if found is None:
        raise errors.fault(
            "file", "nvcc", "is not here", expected="a CUDA toolkit in PATH or CUDA_HOME",
            advice='compiler="nvrtc" needs none.',
        )  # fmt: skip
    return found


def _nvcc_version() -> str:
    done = subprocess.run([_nvcc_path(), "--version"], capture_output=True, text=True, check=False)
    match = re.search(r"release [\d.]+, V([\d.]+)", done.stdout)
    return f"nvcc {match[1] if match else '?'}"


def _nvcc(
    text: str,
    name: str,
    label: str,
    arch: str,
    folders: list[Path],
    options: list[str],
    cache: bool,
) -> tuple[bytes, dict[str, str]]:
    flags = [f"-arch={arch}", "-cubin", *(f"-I{folder}" for folder in folders), *options]
    is_known = cache and not headers.brings_files([*options, *_environments_options()])
    every = [*folders, *headers.folders_of_environment()]
    included = headers.digest(text, every, ()) if is_known else None
    key = None
    if included is not None:
        key = _cache.key({"source": text, "name": name, "options": flags, "included": included,
                          "compiler": _nvcc_version(),
                          "environment": {n: os.environ.get(n) for n in _ENVIRONMENT}})  # fmt: skip
        found = _cache.find(key)
        if found is not None:
            return found[1], {}
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder) / (name if name.endswith(".cu") else f"{name}.cu"), "out.cubin"
        path.write_text(text)
        command = [_nvcc_path(), *flags, "-o", str(Path(folder) / out), str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            log = (done.stderr + done.stdout).replace(str(path), name)
            raise _does_not_compile(label, log, arch)
        cubin = (Path(folder) / out).read_bytes()
    if key is not None:
        _cache.keep(key, {}, cubin)
    return cubin, {}


_ERROR = re.compile(r"^(.+?)\((\d+)\): (?:catastrophic )?error(?: #[\w-]+)?: (.+)$", re.M)


def _does_not_compile(label: str, log: str, arch: str) -> errors.Error:
    """An error whose message is the compiler's first, followed by its first lines with carets."""
    found = list(_ERROR.finditer(log))
    if not found:
        said = " ".join(log.split())[:600]
        return errors.fault("input", label, f"does not compile for {arch}", got=said)
    first = found[0]
    ends = [match.start() for match in found[1:]] + [len(log)]
    shown = "\n".join(
        log[match.start() : end].strip() for match, end in zip(found[:4], ends, strict=False)
    )
    hint = ""
    if "cannot open source file" in first[3]:
        hint = (
            'Name the folder of that header in include=[...], or pass compiler="nvcc", which has'
            " the whole standard library.\n"
        )
    what = f"{label} line {first[2]}" if first[1] in label else f"{first[1]} line {first[2]}"
    return errors.fault(
        "input", what, f"does not compile for {arch}: {first[3].strip()}",
        advice=f"{hint}The compiler says:\n{shown[:2000]}",
    )  # fmt: skip


def _argument(name: str) -> str:
    return f"torch_cubin.compile argument '{name}'"


def _refuse(argument: str, problem: str, expected: str, got: str) -> errors.Error:
    return errors.fault("input", _argument(argument), problem, expected=expected, got=got)
