"""The images of a declared op, for packages: bytes of this process, or files of a package."""

from __future__ import annotations

import dataclasses
import hashlib

from torch_cubin import errors
from torch_cubin._inspection.files import origin_of, read_file

MANIFEST = "manifest.json"


@dataclasses.dataclass(frozen=True)
class Image:
    """`origin` names it in errors. Its bytes are `data`, or those of `file`, whose sha256 is
    checked."""

    origin: str
    data: bytes | None = None
    file: str = ""
    sha256: str = ""

    def read(self) -> bytes:
        """Raises FileError [file], and HashError [hash] if the file has changed since it was
        loaded."""
        if self.data is not None:
            return self.data
        data = read_file(self.file)
        found = hashlib.sha256(data).hexdigest()
        if found != self.sha256:
            problem = "is not the one that was loaded"
            raise errors.other_bytes(self.origin, problem, self.sha256, found)
        return data


def of_package(files: list[dict[str, str]] | None) -> list[Image] | None:
    """The images of a package's contract, by index; None if they are not files."""
    if files is None:
        return None
    return [
        Image(origin_of(entry["file"]), file=entry["file"], sha256=entry["sha256"])
        for entry in files
    ]


__all__ = ["MANIFEST", "Image", "of_package"]
