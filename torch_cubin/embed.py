"""Embeds cubins, or a whole package, in your own shared library: a wheel with one file.

    # setup.py
    from setuptools import setup
    from torch_cubin.embed import CubinExtension

    setup(
        name="mine",
        version="1.0",
        packages=["mine"],
        ext_modules=[CubinExtension("mine._kernels", package="kernels")],
    )

    # mine/__init__.py
    torch_cubin.load_package(Path(__file__).with_name("_kernels.abi3.so"))

torch_cubin is not on PyPI: docs/your_own_kernel.md says how such a wheel depends on it.

The library gets a read-only section `.torch_cubin` with the files and their sha256 (layout:
csrc/cubin/embedded.h), by `.incbin` in one C file. This needs a C compiler, but neither nvcc nor
CUDA. The library is read as a file; none of its code runs. For CMake see cmake/torch_cubin.cmake
(`python -m torch_cubin cmake-dir`). Neither needs PyTorch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch_cubin.cmake import embed as _program

FilePath = str | os.PathLike[str]
# The images of a torch_cubin.Module are written beside the unit.
Files = Any  # FilePath | Module | Iterable[FilePath | Module]


def write_unit(
    output: FilePath,
    files: Files = (),
    package: FilePath | None = None,
    symbol: str | None = None,
    name: str | None = None,
    tvm_ffi: bool = False,
) -> None:
    """Writes a C (and C++) source that embeds `files` by their names, or the folder `package`.

    The images of a torch_cubin.Module among the files, e.g. from compile(), are written beside
    `output`. TORCH_CUBIN_EMBED(name) of torch_cubin/cubin.h finds the files by `name`. With
    `tvm_ffi`, which takes a name and one file, TVM-FFI's TVM_FFI_EMBED_CUBIN(name) finds it, too.

    Relative paths are resolved in the folder where the compiler runs. `symbol` names the bundle,
    for `-Wl,-u,SYMBOL` if a linker drops unreferenced objects; by default it is derived from the
    contents. Raises FileError [file] for a file that cannot be read, InputError [input] for no
    files or two of one name, HashError [hash] for a package whose manifest has other hashes.
    """
    _program.write_unit(output, _written(files, output), package, symbol, name, tvm_ffi)


def listed(files: Files) -> list[Any]:
    """The files as a list; a single path or Module becomes a list of one."""
    if isinstance(files, (str, os.PathLike)) or is_module(files):
        return [files]
    return list(files)


def is_module(value: object) -> bool:
    """Whether it is a torch_cubin.Module, without importing its file, which needs PyTorch."""
    return hasattr(type(value), "_image_files")


def _written(files: Files, output: FilePath) -> Files:
    """Writes the images of a Module beside `output`; returns all files."""
    is_text = isinstance(files, (str, bytes, bytearray, memoryview))
    if is_text or not isinstance(files, Iterable):  # a path, or refused
        return files
    paths = []
    for index, file in enumerate(listed(files)):
        if not is_module(file):
            paths.append(file)
            continue
        unit = _program.checked_path(output, "output")
        for name, content in file._image_files(f"{unit.name}.{index}").items():
            paths.append(unit.with_name(name))
            _program.write_file(paths[-1], content)
    return paths


def __getattr__(name: str) -> Any:
    if name == "CubinExtension":  # defined on first use: setuptools may be missing
        globals()[name] = _extension_class()
        return globals()[name]
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def _extension_class() -> type:
    from setuptools import Extension

    class CubinExtension(Extension):
        """A setuptools extension whose library holds cubins (or fatbins, PTX), or a package.

            CubinExtension("mine._kernels", ["vec_add.sm_80.cubin", "vec_add.sm_90a.cubin"])
            CubinExtension("mine._kernels", package="kernels")     # save_package("kernels", ...)
            CubinExtension("mine._kernels", torch_cubin.compile(source, archs=["sm_90a"]))

        builds `mine/_kernels.abi3.so`, whose path torch_cubin.load and torch_cubin.load_package
        take. It does not use Python's ABI: choose the wheel's tag (examples/embedded/setup.py).
        `sources` and all other arguments of an Extension may be added. Paths are relative to
        setup.py. The files are read when setup.py runs: create them before, or in it.

        Raises the errors of write_unit, and ImageError [image] for a file without device code.
        """

        def __init__(
            self,
            name: str,
            cubins: Files = (),
            *,
            package: FilePath | None = None,
            sources: Iterable[FilePath] = (),
            **keywords: Any,
        ) -> None:
            from torch_cubin._inspection.inspect import inspect

            unit = Path("build", "torch_cubin", f"{name}.c")
            cubins = _program.checked_paths(_written(cubins, unit))
            for path in cubins:
                inspect(path)
            write_unit(unit, cubins, package)
            if package is not None:
                cubins = _program.package_files(Path(package)).values()
            depends = [*keywords.pop("depends", ()), *map(os.fspath, cubins)]
            keywords.setdefault("py_limited_api", True)  # determines the file's name
            files = [*(os.fspath(source) for source in sources), str(unit)]
            super().__init__(name, files, depends=depends, **keywords)

    CubinExtension.__module__, CubinExtension.__qualname__ = __name__, "CubinExtension"
    return CubinExtension


__all__ = ["CubinExtension", "write_unit"]  # noqa: F822 (__getattr__ defines the first)
