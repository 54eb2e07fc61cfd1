# Checks this installation and this machine, one line per fact. Changes nothing, and loads only the
# kernels that the last check runs.
"""python -m torch_cubin doctor: versions, what works, and the remedy for what does not."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import pkgutil
import platform
import re
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import torch_cubin
from torch_cubin import _pytorch, cpp, errors
from torch_cubin._compile import compile as _compile
from torch_cubin._compile import nvrtc
from torch_cubin._drop_in import aten_kernels
from torch_cubin._native import library
from torch_cubin._pytorch.aten_kernels import SUMS, has_cuda, registered_at
from torch_cubin._pytorch.internals import FEATURES
from torch_cubin.errors import counted

# One line of a check: passed (None for a mere fact), and its text.
Finding = tuple[bool | None, str]


def run(*, all: bool = False) -> int:
    """Prints all findings; returns 0 if no check failed. A missing GPU is not a failure.

    `all`: prints one line for each of PyTorch's internals, also those that were found.
    """
    well = True
    for title, check in CHECKS:
        findings = list(_findings(check))
        if check is _internals and not all:
            findings = _folded(findings)
        for good, text in findings:
            well = well and good is not False
            mark = {True: "ok", False: "BAD", None: "--"}[good]
            print(f"{title:<9} {mark:<3} {text}")
            title = ""
    print("\nEverything that is here works." if well else "\nSomething is wrong: see BAD above.")
    return 0 if well else 1


def _findings(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """A check's findings. An exception becomes a finding, so that later checks still run."""
    try:
        yield from check()
    except Exception as error:
        yield False, _said(error)


def _said(error: Exception) -> str:
    """The text of our errors; type and first line of others."""
    if isinstance(error, errors.Error):
        return str(error)
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _folded(findings: list[Finding]) -> list[Finding]:
    """One line for all passed findings, and each different one of the others."""
    fine = sum(good is True for good, _ in findings)
    line = f"{fine} of {len(findings)} names and symbols of PyTorch's are there (--all lists them)"
    others = dict.fromkeys(finding for finding in findings if finding[0] is not True)
    return [(True, line), *others]


def _versions() -> Iterator[Finding]:
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    yield None, f"torch_cubin {torch_cubin.__version__}, torch {torch.__version__} ({cuda})"
    yield None, f"Python {platform.python_version()}, {platform.platform()}"


def _library() -> Iterator[Finding]:
    library.load()
    yield True, str(library.PATH)


# docs/your_own_kernel.md, "Cost".
_WITHOUT = "kernel calls go through Python, by the same rules, some 12 us slower each; ops do not"


def _launcher() -> Iterator[Finding]:
    path = Path(library.PATH).with_name("_launch.abi3.so")
    if os.environ.get("TORCH_CUBIN_PLAIN_LAUNCH") == "1":
        yield None, f"turned off by TORCH_CUBIN_PLAIN_LAUNCH=1: {_WITHOUT}"
    elif not os.path.isfile(path):
        yield None, f"{path} is not there: {_WITHOUT}"
        yield None, "building torch_cubin makes it where a C compiler and Python's headers are"
    elif sysconfig.get_config_var("Py_GIL_DISABLED"):
        yield None, f"a free-threaded Python cannot load {path}: {_WITHOUT}"
    else:
        yield _import_launcher(path)


def _import_launcher(path: Path) -> Finding:
    try:
        importlib.import_module("torch_cubin._launch")
    except Exception as error:
        return (
            False,
            f"{path} does not load ({error}): {_WITHOUT}. Build or install it again.",
        )
    from torch_cubin._native import launcher

    if launcher.Launcher is launcher.PlainLauncher:
        return None, f"{path} does not know the tensors of this torch: {_WITHOUT}"
    return True, f"{path}: takes the common kernel calls"


def _catalog() -> Iterator[Finding]:
    catalog = library.catalog()
    kernels = catalog["kernels"]
    yield (
        bool(kernels),
        f"{counted(len(kernels), 'kernel')} in {catalog['path']} (by {catalog['compiler']})",
    )
    for arch in catalog["archs"]:
        entries = [kernel for kernel in kernels if kernel["arch"] == arch]
        cubins = [_cubin(entry) for entry in entries]
        size = sum(len(cubin) for cubin in cubins if isinstance(cubin, bytes))
        wrong = [cubin for cubin in cubins if not isinstance(cubin, bytes)]
        dtypes = ", ".join(sorted({entry["dtype"] for entry in entries} - {"any"}))
        yield (
            not wrong,
            f"{arch}: {counted(len(entries), 'kernel')}, {size / 1e6:.1f} MB: {dtypes}",
        )
        for error in dict.fromkeys(map(str, wrong)):  # kernels of one archive fail alike
            yield False, error
    for refused in catalog["refused"]:
        yield False, f"{refused['arch']}: {refused['message']}"


def _cubin(entry: dict[str, Any]) -> bytes | errors.Error:
    """The cubin of a kernel, whose sha256 is verified, or why it cannot be read."""
    try:
        return library.catalog_cubin(entry["name"], entry["arch"])
    except errors.Error as error:
        return error


def _packages() -> Iterator[Finding]:
    named = os.environ.get("TORCH_CUBIN_PACKAGES")
    if named:
        library.packages_error()
        ops = counted(len(library.defined_ops()), "op")
        yield True, f"{ops} of TORCH_CUBIN_PACKAGES={named}"


def _gpus() -> Iterator[Finding]:
    if torch.version.cuda is None:
        yield None, "this torch is built without CUDA: the operators run on the CPU, by PyTorch"
        return
    count = torch.cuda.device_count()
    if count == 0:
        yield None, f"torch finds none: {_driver_trouble()}"
    for index in range(count):
        try:
            facts = library.device(index)
        except errors.Error as error:
            yield False, f"{index}: {error}"
            continue
        known = f"{index}: {facts['name']} (sm_{facts['sm']}), driver for CUDA {facts['driver']}"
        if facts["arch"]:
            yield True, f"{known}: served by the kernels for {facts['arch']}"
        else:
            yield False, f"{known}: {facts['arch_error']['message']}"


def _driver_trouble() -> str:
    try:
        library.device(0)
    except errors.Error as error:
        return str(error)
    return "CUDA_VISIBLE_DEVICES may hide it"


def _products() -> Iterator[Finding]:
    for device in ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]:
        try:
            yield _product(device)
        except Exception as error:
            yield False, f"matmul on {device} fails: {_said(error)}"


def _product(device: str) -> Finding:
    a = torch.arange(12.0, device=device).view(3, 4)
    launches = library.launches()
    equal = torch.equal(torch.ops.cubin.matmul(a, a.T), torch.matmul(a, a.T))
    launched = counted(library.launches() - launches, "kernel")
    ran = "by PyTorch" if device == "cpu" else f"{launched} launched"
    return equal, f"matmul on {device} {'equals' if equal else 'differs from'} torch's ({ran})"


def _internals() -> Iterator[Finding]:
    """The uses of PyTorch's private names, symbols and layouts, and features lost without them."""
    for module in pkgutil.iter_modules(_pytorch.__path__):
        importlib.import_module(f"{_pytorch.__name__}.{module.name}")
    for feature in FEATURES:
        if feature.available:
            yield True, f"{feature.name}: {', '.join(feature.names)}"
        else:
            yield None, _lost(feature.name, ", ".join(feature.missing), feature.without)
    for symbol in library.pytorch_symbols():
        if symbol["found"]:
            yield True, f"{symbol['feature']}: {symbol['name']}"
        else:
            name = symbol["library"]
            lacks = name if symbol["found"] is None else f"{symbol['name']} in {name}"
            yield None, _lost(symbol["feature"], lacks, symbol["without"])


def _lost(feature: str, lacks: str, without: str) -> str:
    return f"{feature}: this torch lacks {lacks}, so {without}"


def _install() -> Iterator[Finding]:
    """Whether install() can serve, and which other libraries have registered kernels over
    PyTorch's."""
    if not has_cuda():
        yield None, "install() serves nothing: a CPU build of PyTorch"
        return
    before = {op: _overrides(op) for op in aten_kernels.OPERATORS}
    aten_kernels.register_for("all")
    if not aten_kernels.serves_sums():
        yield None, f"install() serves no addmm: {SUMS.without}"
    for op, others in before.items():
        if others:
            yield None, f"aten::{op} had a kernel of {others} over PyTorch's; install() replaces it"
    ours = [op for op in aten_kernels.OPERATORS if aten_kernels.is_ours(op)]
    # The others are PyTorch's own, where it lacks what ours need, or have been replaced since.
    lost = [op for op in aten_kernels.OPERATORS if op not in ours and _overrides(op)]
    if lost:
        yield False, f"install() serves no {', '.join(lost)}: another kernel stands over ours"
    else:
        yield True, f"install() can serve {', '.join(ours)}"


def _overrides(op: str) -> str:
    """Where the kernel that is called on CUDA was registered; "" if it is PyTorch's own."""
    where = registered_at(op, "CUDA")
    return "" if re.search(r"Register\w*\.cpp", where) else where


def _own_kernels() -> Iterator[Finding]:
    """Tools that only users' own kernels and ops need."""
    for what, found, lost in (
        ("C++ headers", _file(cpp.include_path(), "torch_cubin", "cubin.h"), "C++ programs"),
        ("libtorch_cubin.so", _file(cpp.library_path(), "libtorch_cubin.so"), "C++ programs"),
        ("libtorch_cubin.a", _file(cpp.library_path(), "libtorch_cubin.a"), "static linking"),
        ("a C++ compiler", _cpp_compiler, "cpp.load_inline and cpp.Extension"),
        ("nvcc", _compile._nvcc_path, 'compile(..., compiler="nvcc")'),
        ("NVRTC", lambda: nvrtc.load()._name, "torch_cubin.compile, except with nvcc"),
        ("libcrypto", _libcrypto, "load_package(trusted=), which compares signatures"),
        ("Triton", lambda: _module("triton"), "producers.triton.define_op"),
    ):
        try:
            where = found()
        except errors.Error:
            where = None
        except Exception as error:
            yield None, f"{what} cannot be found ({_said(error)}): without it no {lost}"
            continue
        if where:
            yield True, f"{what}: {where}"
        else:
            yield None, f"{what} is missing: without it no {lost}"


def _file(*parts: str) -> Callable[[], str | None]:
    path = Path(*parts)
    return lambda: str(path) if os.path.isfile(path) else None  # Path's raises PermissionError


def _cpp_compiler() -> str | None:
    return shutil.which(cpp._compiler()[0])


def _libcrypto() -> str | None:
    # In the same order as csrc/package/signature.cpp.
    for name in ("libcrypto.so.3", "libcrypto.so.1.1"):
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return name
    return None


def _module(name: str) -> str | None:
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # imported already, without a spec
        return getattr(sys.modules.get(name), "__file__", None)
    return None if spec is None else spec.origin


CHECKS: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
    ("versions", _versions),
    ("library", _library),
    ("launcher", _launcher),
    ("internals", _internals),
    ("kernels", _catalog),
    ("packages", _packages),
    ("GPUs", _gpus),
    ("products", _products),
    ("install", _install),
    ("tools", _own_kernels),
]
