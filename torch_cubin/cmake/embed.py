"""Writes the C file that puts cubins, or a package, into a library: torch_cubin.embed's own work.

A program, too, which torch_cubin.cmake runs: it needs nothing but Python, and lies beside that file
so that the folders cmake, include and lib can be copied to where there is no package torch_cubin.
The section that it makes is laid out as csrc/cubin/embedded.h says.
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
    output = checked_path(output, "output")
    files = checked_paths(files)
    package = None if package is None else checked_path(package, "package")
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
    named = package_files(package) if package is not None else _by_name(files)
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
    write_file(output, text.encode())


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


def checked_paths(files: Iterable[FilePath]) -> list[Path]:
    """The files; one path alone is one file."""
    if isinstance(files, (str, os.PathLike)):
        return [checked_path(files, "files")]
    if isinstance(files, (bytes, bytearray, memoryview)) or not isinstance(files, Iterable):
        raise _wrong_type("files", "paths, or a Module", files)
    return [checked_path(file, f"files[{index}]") for index, file in enumerate(files)]


def write_file(path: Path, content: bytes) -> None:
    """Leaves a file that holds it already as it is: a build would start again."""
    try:
        if not path.is_file() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    except OSError as error:
        raise _fault(
            "file", f"file '{path}'", "cannot be written", got=error.strerror or str(error)
        ) from error


def checked_path(path: FilePath, what: str) -> Path:
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


def package_files(folder: Path) -> dict[str, Path]:
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


__all__ = ["checked_path", "checked_paths", "package_files", "write_file", "write_unit"]

if __name__ == "__main__":
    sys.exit(main())
