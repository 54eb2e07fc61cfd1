"""Cubins, or a whole package, inside a shared library of your own: a wheel that is one file.

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

The library gets a read-only section `.torch_cubin` with the files and their sha256, laid out as
csrc/cubin/embedded.h says, by `.incbin` in one C file; that takes a C compiler, neither nvcc nor
CUDA. It is read as a file: nothing in it runs. For CMake see cmake/torch_cubin.cmake (`python -m
torch_cubin cmake-dir`), which runs this file as a program: its top imports nothing but Python's own
modules.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MAGIC = "TCBUNDLE"
NAMED = "torch_cubin_embedded_"  # TORCH_CUBIN_EMBED in torch_cubin/cubin.h
TVM_FFI = "__tvm_ffi__cubin_"  # TVM_FFI_EMBED_CUBIN in tvm/ffi/extra/cuda/cubin_launcher.h
_SYMBOL = re.compile(r"[A-Za-z_.$][\w.$]*", re.ASCII)
HEADER_BYTES, RECORD_BYTES, ALIGNMENT = 24, 64, 16
FilePath = str | os.PathLike[str]


def write_unit(
    output: FilePath,
    files: Iterable[FilePath] = (),
    package: FilePath | None = None,
    symbol: str | None = None,
    name: str | None = None,
    tvm_ffi: bool = False,
) -> None:
    """Writes a C (and C++) source that embeds `files` by their names, or the folder `package`.

    `name` is what TORCH_CUBIN_EMBED(name) of torch_cubin/cubin.h finds them by. With `tvm_ffi`,
    which takes a name and one file, TVM-FFI's TVM_FFI_EMBED_CUBIN(name) finds it, too.

    The files are found from where the compiler runs: give absolute paths where that is elsewhere.
    `symbol` is the bundle's, for `-Wl,-u,SYMBOL` where a linker drops what nothing refers to; by
    default it is made of the contents. Raises FileError [file] for a file that cannot be read,
    InputError [input] for no files or two of one name, HashError [hash] for a package whose
    manifest promises other bytes.
    """
    output = _path(output, "output")
    files = _paths(files)
    package = None if package is None else _path(package, "package")
    for what, text in (("symbol", symbol), ("name", name)):
        if text is not None and not isinstance(text, str):
            raise _wrong_type(what, "a str", text)
    if symbol is not None and not _SYMBOL.fullmatch(symbol):
        raise _fault(
            "input",
            f"the symbol {symbol!r}",
            "cannot be embedded under",
            expected="letters, digits, _, . and $, no digit first",
        )
    if name is not None:
        if not name.isidentifier() or not name.isascii():
            raise _fault(
                "input",
                f"the name '{name}'",
                "cannot be embedded under",
                expected="a name as C++ has them",
            )
        symbol = f"{NAMED}{name}"
    if tvm_ffi and (name is None or len(files) != 1):
        raise _fault(
            "input", "torch_cubin.embed argument 'tvm_ffi'", "is for one file with a name",
            expected="name= and one file", got=f"{len(files)} files",
        )  # fmt: skip
    if (package is None) == (not files):
        raise _fault(
            "input", "torch_cubin.embed", "has nothing to do", expected="files, or a package"
        )
    named = _package_files(package) if package is not None else _by_name(files)
    for path in named.values():
        if not str(path).isprintable():  # it would end the line of assembly that names it
            raise _fault(
                "input", f"file {str(path)!r}", "cannot be embedded", expected="a printable name"
            )
    contents = {file: _read(path) for file, path in named.items()}
    digest = hashlib.sha256()
    for file, content in contents.items():
        digest.update(f"{file}\0{len(content)}\0".encode() + content)
    symbol = symbol or f"{NAMED}{digest.hexdigest()[:16]}"
    body = "\n".join(
        f'    "{_escaped(line)}\\n"'
        for line in _assembly(
            symbol, named, contents, name is not None, f"{TVM_FFI}{name}" if tvm_ffi else None
        )
    )
    text = (
        "/* Made by torch_cubin.embed: files for the section .torch_cubin. */\n"
        f"__asm__(\n{body});\n"
    )
    try:
        if not output.is_file() or output.read_text() != text:  # else a build would start again
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(text)
    except OSError as error:
        raise _fault(
            "file", f"file '{output}'", "cannot be written", got=error.strerror or str(error)
        ) from error


def _assembly(
    symbol: str,
    named: dict[str, Path],
    contents: dict[str, bytes],
    hidden: bool,
    image: str | None = None,
) -> list[str]:
    """The bundle in numbers and .incbin: no labels to clash where LTO joins several units. `image`
    is a symbol of the one file's bytes."""

    def aligned(size: int) -> int:
        return -(-size // ALIGNMENT) * ALIGNMENT

    table, payload = [], []
    at = aligned(HEADER_BYTES + RECORD_BYTES * len(named))
    for name, path in named.items():
        raw, content = name.encode(), contents[name]
        start = aligned(at + len(raw))
        table.append(f".quad {at}, {len(raw)}, {start}, {len(content)}")
        table.append(".byte " + ", ".join(map(str, hashlib.sha256(content).digest())))
        payload += [f".balign {ALIGNMENT}", ".byte " + ", ".join(map(str, raw))]
        # The bytes are counted, so that a file that grows meanwhile is cut, and fails its hash.
        payload.append(f".balign {ALIGNMENT}")
        if image is not None:
            payload += [f".globl {image}", f".hidden {image}", f".type {image}, @object",
                        f".size {image}, {len(content)}", f"{image}:"]  # fmt: skip
        payload.append(f'.incbin "{_escaped(str(path))}", 0, {len(content)}')
        if image is not None:
            payload += [f".globl {image}_end", f".hidden {image}_end", f"{image}_end:"]
        at = aligned(start + len(content))
    return [
        '.pushsection .torch_cubin, "a", @progbits',
        f".balign {ALIGNMENT}",
        f".weak {symbol}",  # the same files twice in a link are no clash
        # Another library's bundle of that name is its own. Without a name nothing refers to the
        # symbol: that it is seen from outside keeps it under --gc-sections.
        *([f".hidden {symbol}"] if hidden else []),
        f".type {symbol}, @object",
        f".size {symbol}, {at}",
        f"{symbol}:",
        f'.ascii "{MAGIC}"',
        f".quad {at}, {len(named)}",
        *table,
        *payload,
        f".balign {ALIGNMENT}",
        ".popsection",
    ]


def _escaped(text: str) -> str:
    """As it stands between quotes, in C and in assembly alike."""
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _paths(files: Iterable[FilePath]) -> list[Path]:
    """The files; one path alone is one file."""
    if isinstance(files, (str, os.PathLike)):
        return [_path(files, "files")]
    if isinstance(files, (bytes, bytearray, memoryview)) or not isinstance(files, Iterable):
        raise _wrong_type("files", "paths", files)
    return [_path(file, f"files[{index}]") for index, file in enumerate(files)]


def _path(path: FilePath, what: str) -> Path:
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str):
        raise _wrong_type(what, "a path", path)
    return Path(text)


def _wrong_type(what: str, expected: str, got: object) -> BaseException:
    return _fault(
        "input",
        f"torch_cubin.embed argument '{what}'",
        "has a wrong type",
        expected=expected,
        got=type(got).__name__,
    )


def _by_name(files: list[Path]) -> dict[str, Path]:
    named: dict[str, Path] = {}
    for path in files:
        if path.name in named:
            raise _fault(
                "input", "torch_cubin.embed", "is given two files of one name", got=path.name
            )
        named[path.name] = path
    return named


def _package_files(folder: Path) -> dict[str, Path]:
    """manifest.json and the images that it lists, whose hashes are compared."""
    manifest = folder / "manifest.json"
    try:
        images = [
            (image["file"], image["sha256"]) for image in json.loads(_read(manifest))["images"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise _fault(
            "file",
            f"file '{manifest}'",
            "is no package's manifest",
            expected="what torch_cubin.save_package writes",
            got=f"{type(error).__name__}: {error}",
        ) from error
    named = {"manifest.json": manifest}
    # What save_package(key=) wrote.
    signature = folder / f"manifest.{hashlib.sha256(_read(manifest)).hexdigest()}.sig"
    if signature.is_file():
        named[signature.name] = signature
    for name, promised in images:
        named[name] = folder / name
        found = hashlib.sha256(_read(named[name])).hexdigest()
        if found != promised:
            raise _fault(
                "hash",
                f"file '{named[name]}'",
                "is not the one in the manifest",
                expected=f"sha256 {promised}",
                got=found,
                advice="Save the package again.",
            )
    return named


def _read(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise _fault(
            "file", f"file '{path}'", "cannot be read", got=error.strerror or str(error)
        ) from error
    if not content:
        raise _fault("file", f"file '{path}'", "is empty", advice="Build it again.")
    return content


def _fault(tag: str, object: str, problem: str, **parts: str) -> BaseException:
    """torch_cubin's error; as a program, which does without torch, one that ends with its text."""
    if __name__ == "__main__":
        wanted, got = parts.get("expected", ""), parts.get("got", "")
        ends = [f"expected {wanted}"] * bool(wanted) + [f"got {got}"] * bool(got)
        text = f"torch_cubin [{tag}]: {object} {problem}" + ": " * bool(ends) + ", ".join(ends)
        return SystemExit(f"{text}. {parts.get('advice', '')}".rstrip())
    from torch_cubin import errors

    return errors.fault(tag, object, problem, **parts)


def __getattr__(name: str) -> Any:
    if name == "CubinExtension":  # made when it is asked for: setuptools may be missing
        globals()[name] = _extension_class()
        return globals()[name]
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def _extension_class() -> type:
    from setuptools import Extension

    class CubinExtension(Extension):
        """A setuptools extension whose library holds cubins (or fatbins, PTX), or a package.

            CubinExtension("mine._kernels", ["vec_add.sm_80.cubin", "vec_add.sm_90a.cubin"])
            CubinExtension("mine._kernels", package="kernels")     # save_package("kernels", ...)

        gives `mine/_kernels.abi3.so`, for torch_cubin.load and torch_cubin.load_package by its
        path. It uses nothing of Python: tag the wheel as it suits you (examples/embedded/setup.py).
        `sources` and whatever else an Extension takes may be added. Paths are relative to setup.py.
        The files are read when setup.py runs: make them before, or in it.

        Raises as write_unit, and ImageError [image] for a file that is no device code.
        """

        def __init__(
            self,
            name: str,
            cubins: Iterable[FilePath] = (),
            *,
            package: FilePath | None = None,
            sources: Iterable[FilePath] = (),
            **keywords: Any,
        ) -> None:
            from torch_cubin._inspection.inspect import inspect

            cubins = _paths(cubins)
            package = None if package is None else _path(package, "package")
            for path in cubins:
                inspect(path)
            unit = Path("build", "torch_cubin", f"{name}.c")
            write_unit(unit, cubins, package)
            embedded = _package_files(package).values() if package is not None else cubins
            depends = [*keywords.pop("depends", ()), *map(os.fspath, embedded)]
            keywords.setdefault("py_limited_api", True)  # for the file's name
            files = [*(os.fspath(source) for source in sources), str(unit)]
            super().__init__(name, files, depends=depends, **keywords)

    CubinExtension.__module__, CubinExtension.__qualname__ = __name__, "CubinExtension"
    return CubinExtension


def main() -> int:
    """For cmake/torch_cubin.cmake, and for other build systems."""
    parser = argparse.ArgumentParser(description="Writes a C file that embeds FILEs or a package.")
    parser.add_argument("--output", required=True, help="the C file")
    parser.add_argument("--package", help="a folder that torch_cubin.save_package made")
    parser.add_argument("--symbol", help="of the bundle")
    parser.add_argument("--name", help="for TORCH_CUBIN_EMBED(NAME) in C++")
    parser.add_argument(
        "--tvm-ffi", action="store_true", help="for TVM_FFI_EMBED_CUBIN(NAME), too: one file"
    )
    parser.add_argument("files", nargs="*", metavar="FILE")
    options = parser.parse_args()
    write_unit(
        options.output, options.files, options.package, options.symbol, options.name,
        options.tvm_ffi,
    )  # fmt: skip
    os.utime(options.output)  # what a build looks at to see that this was run
    return 0


__all__ = ["CubinExtension", "write_unit"]  # noqa: F822 (the first is made by __getattr__)

if __name__ == "__main__":
    sys.exit(main())
