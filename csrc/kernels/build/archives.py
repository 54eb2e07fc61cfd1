"""Joins a package's cubins to compressed archives, as wheels contain them.

Kernels of one source differ in few bytes, which a zip archive, whose entries are compressed one by
one, cannot use. So cubins that resemble each other are joined and compressed as one file, an
ordinary .lzma; the manifest's "archives" say which cubins each one contains, and their sizes, in
order. csrc/package/archived_files.h reads them. A checkout's own package has plain cubins.

LZMA, because Python's standard library writes it: zstd at level 19 makes them a quarter larger.
"""

from __future__ import annotations

import concurrent.futures
import os
import shutil
from pathlib import Path
from typing import Any

try:
    import lzma
except ImportError:  # a Python that was built without liblzma
    lzma = None

# The first use of a kernel decompresses its archive: 3 ms for one of this size (150 MB/s). With
# twice the size, all would be 10% smaller.
ARCHIVE_BYTES = 500_000
# SASS is made of instructions of 16 bytes, which lp and pb follow.
OPTIONS = {"preset": 6, "lc": 0, "lp": 3, "pb": 4, "dict_size": 1 << 20}


def resemblance(entry: dict[str, Any]) -> tuple[object, ...]:
    """A sort key: kernels of one source, tile and layout, of several types, become neighbours."""
    keys = ("arch", "family", "kind", "params_header")
    return (*(entry[key] for key in keys), entry["name"].split("_")[::-1])


def divide(entries: list[dict[str, Any]], sizes: dict[str, int]) -> list[list[dict[str, Any]]]:
    """The entries of each archive: of one architecture, together at most ARCHIVE_BYTES."""
    archives: list[list[dict[str, Any]]] = []
    left, arch = 0, None
    for entry in sorted(entries, key=resemblance):
        size = sizes[entry["file"]]
        if size > left or entry["arch"] != arch:
            archives.append([])
            left, arch = ARCHIVE_BYTES, entry["arch"]
        archives[-1].append(entry)
        left -= size
    return archives


def compress(data: bytes) -> bytes:
    filters = [{"id": lzma.FILTER_LZMA1, **OPTIONS}]
    return lzma.compress(data, format=lzma.FORMAT_ALONE, filters=filters)


def copy_plainly(source: Path, target: Path, files: list[str]) -> None:
    for name in files:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)


def write_archives(
    source: Path, target: Path, manifest: dict[str, Any], log: Any = print
) -> dict[str, Any]:
    """Writes the manifest's cubins from the folder `source` to archives in `target`. Returns the
    manifest with "archives"."""
    entries = manifest["kernels"]
    if lzma is None:
        log("torch_cubin: this Python has no lzma: the kernels are copied one by one, and a wheel")
        log("exceeds its limits; a Python with it makes archives")
        copy_plainly(source, target, [entry["file"] for entry in entries])
        return manifest
    data = {entry["file"]: (source / entry["file"]).read_bytes() for entry in entries}
    parts = divide(entries, {name: len(content) for name, content in data.items()})
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        joined = (b"".join(data[entry["file"]] for entry in part) for part in parts)
        packed = list(pool.map(compress, joined))
    archives = []
    for index, (part, content) in enumerate(zip(parts, packed, strict=True)):
        name = f"{part[0]['arch']}/kernels_{index:03}.lzma"
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(content)
        files = [{"file": entry["file"], "size": len(data[entry["file"]])} for entry in part]
        archives.append({"file": name, "files": files})
    return {**manifest, "archives": archives}
