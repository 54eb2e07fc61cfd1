"""Packages: declared ops in a folder. docs/manifest.md says what it holds."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch_cubin import _declared, _lib, _module, errors
from torch_cubin._declared import Op

MANIFEST = "manifest.json"
FORMAT = "torch_cubin package"


def save_package(
    folder: str | os.PathLike[str], ops: Sequence[Op | str], *, overwrite: bool = False
) -> Path:
    """Writes ops with their kernels into a folder, for load_package and TORCH_CUBIN_PACKAGES.

    `ops`: what define_op returned, or names. The folder is made if there is none. The manifest is
    written last and at once, so a reader sees the old package or the new one. What is Python stays
    out: `cpu=` and register_autograd; `backward="ns::op"` goes along, its op only if it is listed.

    Raises InputError [input] for what is no declared op, and for a folder that holds a package
    already, unless `overwrite`; FileError [file] where it cannot be written.
    """
    path = Path(folder)
    listed = [ops] if isinstance(ops, (Op, str)) else list(ops)
    if not listed:
        raise _refuse(path, "would have no op", "ops=[...]")
    images: dict[str, tuple[bytes, str]] = {}  # by sha256: bytes, file
    contracts = []
    for one in listed:
        op = _declared.find(one) if isinstance(one, str) else one
        if not isinstance(op, Op):
            raise _refuse(path, "would hold what is no declared op", "an Op or its name", repr(one))
        if any(contract["schema"] == op.contract["schema"] for contract in contracts):
            raise _refuse(path, "would hold an op twice", "each once", op.name)
        contracts.append(_renumbered(op, images))
    manifest = {
        "format": FORMAT,
        "version": 1,
        "images": [{"file": name, "sha256": digest} for digest, (_, name) in images.items()],
        "ops": contracts,
    }
    text = json.dumps(manifest, indent=2, allow_nan=False) + "\n"
    try:
        path.mkdir(parents=True, exist_ok=True)
        old = path / MANIFEST
        if old.exists() and not overwrite:
            raise _refuse(
                path, "holds a package already", "an empty folder, or overwrite=True", MANIFEST
            )
        for data, name in images.values():
            _write(path / name, data)
        _write(old, text.encode())
    except OSError as error:
        if isinstance(error, errors.Error):
            raise
        reason = error.strerror or str(error)
        raise errors.fault("file", f"folder '{path}'", f"cannot be written ({reason})") from error
    return path


def load_package(folder: str | os.PathLike[str]) -> dict[str, Op]:
    """Registers a package's ops, all or none, and returns them by name.

    `folder` is what save_package wrote, or a shared library with packages embedded in it. Needs no
    GPU, no source and no compiler. Loading the same content again does nothing.

    Raises FileError [file] for a missing manifest or image, HashError [hash] for an image with
    other bytes, InputError [input] for a manifest that is malformed, of an unknown version, with an
    unknown field or a path that leads out of the folder, and for an op that is there already with
    other content.
    """
    return _adopt(_lib.load_package(os.path.abspath(os.fsdecode(folder))))


def adopt_environment() -> None:
    """At import: the ops of TORCH_CUBIN_PACKAGES, which the library has loaded with itself."""
    _lib.packages_error()
    _adopt(_lib.defined_ops())


def _adopt(answers: list[dict[str, Any]]) -> dict[str, Op]:
    return {
        answer["name"]: _declared.adopt(
            answer["contract"], answer.get("state", "same"), package=answer["package"]
        )
        for answer in answers
    }


def _renumbered(op: Op, images: dict[str, tuple[bytes, str]]) -> dict[str, Any]:
    """The op's contract with its images' places in the new package, where they are added."""
    places = []
    taken = {name for _, name in images.values()}
    for data, origin in _images_of(op):
        digest = hashlib.sha256(data).hexdigest()
        if digest not in images:
            name = _file_name(data, origin)
            while name in taken:
                name = f"{digest[:8]}.{name}"
            taken.add(name)
            images[digest] = data, name
        places.append(list(images).index(digest))
    kernels = [
        {**kernel, "images": [places[place] for place in kernel["images"]]}
        for kernel in op.contract["kernels"]
    ]
    return {**op.contract, "kernels": kernels}


def _images_of(op: Op) -> list[tuple[bytes, str]]:
    """The bytes, and origin, of every image that the op's contract numbers."""
    if op._images is not None:
        return op._images
    path = Path(op._package or "")
    if not path.is_dir():
        raise _refuse(path, f"is where op '{op.name}' came from, and is no folder now", "a folder")
    manifest = json.loads(_module._read_file(str(path / MANIFEST)))
    out = []
    for image in manifest["images"]:
        file = str(path / image["file"])
        data = _module._read_file(file)
        if hashlib.sha256(data).hexdigest() != image["sha256"]:
            raise errors.fault(
                "hash",
                f"file '{file}'",
                "is not what the manifest promises",
                expected=image["sha256"],
            )
        out.append((data, f"file '{file}'"))
    return out


def _file_name(data: bytes, origin: str) -> str:
    """A plain file name for an image: its own, or one by what it is."""
    match = re.fullmatch(r"file '(.*)'", origin)
    name = os.path.basename(match[1]) if match else ""
    if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,100}", name) and name != MANIFEST:
        return name
    facts = _lib.inspect(data, origin)
    suffix = {"cubin": "cubin", "ptx": "ptx"}.get(facts["kind"], "bin")
    kernels = [kernel["name"] for kernel in facts.get("kernels", [])]
    stem = re.sub(r"\W", "_", kernels[0])[:40] if kernels else "image"
    arch = facts.get("arch")
    return ".".join([stem, *([arch] if arch else []), suffix])


def _write(path: Path, data: bytes) -> None:
    """At once: a reader sees the old file or the new one."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "wb") as file:
            file.write(data)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _refuse(path: Path, problem: str, expected: str, got: str = "") -> errors.Error:
    return errors.fault("input", f"package '{path}'", problem, expected=expected, got=f"{got:.120}")


__all__ = ["adopt_environment", "load_package", "save_package"]
