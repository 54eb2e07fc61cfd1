"""The images of a declared op, for packages: bytes of this process, or files of a package."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path, PurePosixPath
from typing import Any

from torch_cubin import errors
from torch_cubin._inspection.inspect import _origin, _read

MANIFEST = "manifest.json"


@dataclasses.dataclass(frozen=True)
class Image:
    """`origin` names it in errors. The bytes are `data`, or those of `file` with that sha256."""

    origin: str
    data: bytes | None = None
    file: str = ""
    sha256: str = ""

    def read(self) -> bytes:
        """Raises FileError [file], and HashError [hash] for other bytes than were loaded."""
        if self.data is not None:
            return self.data
        data = _read(self.file)
        found = hashlib.sha256(data).hexdigest()
        if found != self.sha256:
            raise errors.fault(
                "hash",
                self.origin,
                "is not the one that was loaded",
                expected=f"sha256 {self.sha256}",
                got=f"sha256 {found}",
            )
        return data


def manifest_of(package: str | None) -> dict[str, Any] | None:
    """A folder's manifest as far as it can be read; C++ says what is wrong with others."""
    try:
        manifest = json.loads(_read(str(Path(package or "") / MANIFEST)))
    except (errors.Error, OSError, ValueError, RecursionError):
        return None
    return manifest if isinstance(manifest, dict) else None


def of_package(package: str | None, contract: dict[str, Any]) -> list[Image] | None:
    """The images that a contract just loaded from a folder numbers; None where it is no folder.

    None, too, where the folder's manifest is another one already.
    """
    manifest = manifest_of(package)
    try:
        if manifest is None or contract not in manifest["ops"]:
            return None
        return [_of_entry(Path(str(package)), entry) for entry in manifest["images"]]
    except (KeyError, TypeError, ValueError):
        return None


def _of_entry(package: Path, entry: dict[str, Any]) -> Image:
    name = PurePosixPath(entry["file"])
    file = package / name
    if name.is_absolute() or ".." in name.parts or package not in file.resolve().parents:
        raise ValueError("a file outside of its package")
    return Image(_origin(str(file)), file=str(file), sha256=entry["sha256"])


__all__ = ["MANIFEST", "Image", "manifest_of", "of_package"]
