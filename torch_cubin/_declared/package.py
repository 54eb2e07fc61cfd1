"""Packages: declared ops in a folder, in the format of docs/manifest.md."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch_cubin import errors
from torch_cubin._declared import op as _op
from torch_cubin._declared import signing
from torch_cubin._declared.op import Op
from torch_cubin._declared.package_images import MANIFEST
from torch_cubin._kernels.module import Module
from torch_cubin._native import library
from torch_cubin._native.files import write_file

FORMAT = "torch_cubin package"


@errors.named_keywords
def save_package(
    folder: str | os.PathLike[str],
    ops: Sequence[Op | str | Module],
    *,
    overwrite: bool = False,
    key: Any = None,
) -> Path:
    """Writes ops with their kernels into a folder, for load_package and TORCH_CUBIN_PACKAGES.

    `ops`: results of define_op, or names; and modules (compile(), load()), whose images are
    included for C++'s Module::from_file(folder). The folder is created if it is missing. Only the
    manifest is replaced, last and atomically: a reader sees the old package or the new one. An
    image whose name is taken by another file is named by its sha256. Python objects are not saved:
    `cpu=` and register_autograd; `backward="ns::op"` is saved, its op only if it is listed.

    `key` signs the manifest, and with it the images' hashes: an Ed25519 private key, as the file of
    an unencrypted PEM (`openssl genpkey -algorithm ed25519`) or as an object of the package
    cryptography, which signing needs. load_package(trusted=) takes its public key.

    Raises InputError [input] for objects that are not declared ops, for a folder with a package,
    unless `overwrite`, and for an op whose package has changed since it was loaded; HashError
    [hash] for an image that has changed; FileError [file] if one cannot be read or written.
    """
    path = Path(_path("save_package", folder))
    if not isinstance(ops, (Op, str, Iterable)):
        raise _refuse(
            path, "would hold an object that is no declared op", "an Op or its name", repr(ops)
        )
    listed = [ops] if isinstance(ops, (Op, str, Module)) else list(ops)
    if not listed:
        raise _refuse(path, "would have no op", "ops=[...]")
    signer = None if key is None else signing.private_key(key)
    images = _PackageImages(path)
    contracts = []
    schemas = set()
    for one in listed:
        if isinstance(one, Module):
            for data in one._image_bytes():
                images.place(data, f"an image of {one.origin}")
            continue
        op = _op.find(one) if isinstance(one, str) else one
        if not isinstance(op, Op):
            raise _refuse(
                path, "would hold an object that is no declared op", "an Op or its name", repr(one)
            )
        if op.contract["schema"] in schemas:
            raise _refuse(path, "would hold an op twice", "each once", op.name)
        schemas.add(op.contract["schema"])
        contracts.append(_renumbered(op, images))
    listed_ops = json.dumps(contracts, allow_nan=False)  # before writing any file
    try:
        path.mkdir(parents=True, exist_ok=True)
        if (path / MANIFEST).exists() and not overwrite:
            raise _refuse(
                path, "holds a package already", "an empty folder, or overwrite=True", MANIFEST
            )
        manifest = {
            "format": FORMAT,
            "version": 1,
            "images": [
                {"file": _write_image(path, name, data, digest), "sha256": digest}
                for digest, data, name in images.listed
            ],
            "ops": json.loads(listed_ops),
        }
        text = (json.dumps(manifest, indent=2) + "\n").encode()
        # The signature is written first; its name has the manifest's hash, so both change
        # atomically.
        signature = signing.file_name(text)
        if signer is not None:
            write_file(path / signature, signing.signature(signer, text))
        write_file(path / MANIFEST, text)
        for old in path.glob("manifest.*.sig"):
            if signer is None or old.name != signature:
                old.unlink(missing_ok=True)
    except OSError as error:
        if isinstance(error, errors.Error):
            raise
        reason = error.strerror or str(error)
        raise errors.fault("file", f"folder '{path}'", f"cannot be written ({reason})") from error
    return path


@errors.named_keywords
def load_package(
    folder: str | os.PathLike[str], *, trusted: Iterable[Any] | None = None
) -> dict[str, Op]:
    """Registers a package's ops, all or none, and returns them by name.

    `folder` was written by save_package, or is a shared library with packages embedded in it. Needs
    no GPU, no source and no compiler. Loading the same content again does nothing.

    `trusted`: public keys, one of which must have signed the package (save_package's `key`); each
    is 64 hex digits, the file of a PEM, or an object of the package cryptography.
    TORCH_CUBIN_TRUSTED, hex digits separated by commas, requires the same for every package of the
    process, in C++ too. Without either, no signature is required.

    Raises FileError [file] for a missing manifest or image, an unknown format or version, and a
    path that leads out of the folder; HashError [hash] for an image with other bytes and for a
    package without a trusted signature; InputError [input] for a manifest that is malformed or has
    an unknown field, and for an op that is already defined with other content.
    """
    path = _path("load_package", folder)
    try:
        path = os.path.abspath(path)
    except OSError as error:  # a relative path in a working directory that was removed
        reason = f"cannot be found ({error.strerror}: the working directory)"
        raise errors.fault(
            "file", f"package '{path}'", reason, advice="Give its full path."
        ) from error
    if "\0" in path:  # C++ would read a truncated name
        raise _refuse(Path(path), "has a NUL in its name", "a folder, or a library")
    return _Ops(_op.load(path, None if trusted is None else signing.public_keys(trusted)))


class _Ops(dict[str, Op]):
    """Ops by name; the error for an unknown name lists the nearest ones."""

    def __missing__(self, name: object) -> Op:
        names = [key for key in self if key.partition("::")[2] == name]
        known = f"'{names[0]}'" if names else errors.nearest(str(name), list(self))
        raise KeyError(f"no op of the package is called {name!r:.80}: expected {known}")


def _path(function: str, folder: Any) -> str:
    if isinstance(folder, (str, bytes, os.PathLike)):
        return os.fsdecode(folder)
    what = f"torch_cubin.{function} argument 'folder'"
    advice = "It comes first: save_package(folder, ops)." if function == "save_package" else ""
    raise errors.wrong_type(what, "a str or os.PathLike", folder, advice)


class _PackageImages:
    """The images of a new package, without duplicates."""

    def __init__(self, folder: Path) -> None:
        self.listed: list[tuple[str, bytes, str]] = []  # sha256, bytes, file
        self._folder = folder
        self._places: dict[str, int] = {}  # index in `listed`, by sha256
        self._names: set[str] = set()

    def place(self, data: bytes, origin: str) -> int:
        """The index of an image; a new one is added."""
        digest = hashlib.sha256(data).hexdigest()
        if digest not in self._places:
            name = _file_name(data, origin)
            # Use a name for these bytes alone, taken neither by another image nor by the user's
            # files.
            if name in self._names or not _is_free(self._folder / name, data):
                name = f"{digest}.{name}"
            self._names.add(name)
            self._places[digest] = len(self.listed)
            self.listed.append((digest, data, name))
        return self._places[digest]


def _renumbered(op: Op, images: _PackageImages) -> dict[str, Any]:
    """The op's contract with the image indices of the new package, adding its images."""
    contract, known = op.contract, op._images
    if known is None:
        raise _refuse(
            Path(op._package or ""),
            f"is where op '{op.name}' came from, and cannot be copied",
            "a folder with the manifest that was loaded",
        )
    numbers = sorted({number for kernel in contract["kernels"] for number in kernel["images"]})
    places = {each: images.place(known[each].read(), known[each].origin) for each in numbers}
    kernels = [
        {**kernel, "images": [places[number] for number in kernel["images"]]}
        for kernel in contract["kernels"]
    ]
    return {**contract, "kernels": kernels}


def _is_free(path: Path, data: bytes) -> bool:
    """Whether a file of that name can hold the bytes: it does not exist, or holds them already."""
    if not os.path.lexists(path):
        return True
    try:
        return path.is_file() and not path.is_symlink() and path.read_bytes() == data
    except OSError:
        return False


def _file_name(data: bytes, origin: str) -> str:
    """A plain file name for an image: its own, or one derived from its content."""
    match = re.fullmatch(r"file '(.*)'", origin)
    name = os.path.basename(match[1]) if match else ""
    if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,100}", name) and name != MANIFEST:
        return name
    facts = library.inspect(data, origin)
    suffix = {"cubin": "cubin", "ptx": "ptx"}.get(facts["kind"], "bin")
    kernels = [kernel["name"] for kernel in facts.get("kernels", [])]
    stem = re.sub(r"\W", "_", kernels[0])[:40] if kernels else "image"
    arch = facts.get("arch")
    return ".".join([stem, *([arch] if arch else []), suffix])


def _write_image(folder: Path, name: str, data: bytes, digest: str) -> str:
    """Writes the image and returns its name; another process may have taken `name` in the
    meantime."""
    if not _is_free(folder / name, data):
        name = f"{digest}.{name.removeprefix(f'{digest}.')}"
    if os.path.lexists(folder / name) and _is_free(folder / name, data):
        return name
    try:
        write_file(folder / name, data, replace=name.startswith(digest))
    except FileExistsError:
        return _write_image(folder, name, data, digest)
    return name


def _refuse(path: Path, problem: str, expected: str, got: str = "") -> errors.Error:
    return errors.fault("input", f"package '{path}'", problem, expected=expected, got=f"{got:.120}")


__all__ = ["load_package", "save_package"]
