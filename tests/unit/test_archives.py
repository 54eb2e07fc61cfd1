"""Cubins in archives: what the build writes, and what the library reads of it."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from kernel_sources import KERNELS
from preloaded import PreloadedPython
from real_cubins import COMMITTED

sys.path.insert(0, str(KERNELS / "build"))
import archives

# Reads the kernel k of one catalog after the other, and prints its sha256 or the error.
READ = """
import hashlib, json, os, sys
from torch_cubin import errors
from torch_cubin._native import library

def attempt(read):
    try:
        return read()
    except errors.Error as error:
        return {"tag": error.tag, "text": str(error)}

for folder in sys.argv[1:]:
    os.environ["TORCH_CUBIN_CATALOG"] = folder
    kernels = attempt(lambda: library.catalog()["kernels"])
    if isinstance(kernels, dict):
        print(json.dumps(kernels))
        continue
    found = {}
    for kernel in kernels:
        cubin = attempt(lambda: library.catalog_cubin(kernel["name"], kernel["arch"]))
        if isinstance(cubin, bytes):
            cubin = hashlib.sha256(cubin).hexdigest()
        found[kernel["name"]] = cubin
    print(json.dumps(found))
"""


def entry_of(cubin: Path) -> dict:
    """A kernel's entry of a manifest, of as much as is needed to read it."""
    name = cubin.stem.replace(".", "_")
    return {
        "name": name,
        "family": "none",
        "kind": "none",
        "params_header": "none",
        "arch": "sm_90a",
        "file": f"sm_90a/{name}.cubin",
        "sha256": hashlib.sha256(cubin.read_bytes()).hexdigest(),
        "symbol": name,
        "block": [32, 1, 1],
        "cluster": [1, 1, 1],
        "dynamic_shared": 0,
        "params": [],
    }


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of the committed cubins, one file each, with a file of an older build."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "sm_90a").mkdir()
    entries = [entry_of(cubin) for cubin in COMMITTED]
    for cubin, entry in zip(COMMITTED, entries, strict=True):
        shutil.copyfile(cubin, folder / entry["file"])
    (folder / "sm_90a" / "old.cubin").write_bytes(b"old")
    manifest = {"version": 1, "compiler": "none", "kernels": entries}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.fixture(scope="module")
def archived(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same package with archives."""
    folder = tmp_path_factory.mktemp("archived")
    write(plain, folder)
    return folder


def write(plain: Path, folder: Path, log: Callable[[str], None] = print) -> dict:
    manifest = json.loads((plain / "manifest.json").read_text())
    manifest = archives.write_archives(plain, folder, manifest, log)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return manifest


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def hashes(folder: Path) -> dict[str, str]:
    kernels = json.loads((folder / "manifest.json").read_text())["kernels"]
    return {kernel["name"]: kernel["sha256"] for kernel in kernels}


def test_archives_contain_what_the_manifest_lists_and_nothing_else(plain, archived) -> None:
    manifest = json.loads((archived / "manifest.json").read_text())
    assert files_of(archived) == {"manifest.json", "sm_90a/kernels_000.lzma"}
    named = [file["file"] for each in manifest["archives"] for file in each["files"]]
    assert sorted(named) == sorted(kernel["file"] for kernel in manifest["kernels"])
    size = (archived / "sm_90a" / "kernels_000.lzma").stat().st_size
    assert size < sum((plain / name).stat().st_size for name in named) / 2


def test_an_archive_is_of_one_architecture_and_of_limited_size() -> None:
    def entry(name: str, arch: str = "sm_80") -> dict:
        kinds = {"family": "f", "kind": "k", "params_header": "p"}
        return {"name": name, "arch": arch, "file": f"{arch}/{name}", **kinds}

    entries = [entry(f"sm_{dtype}_nn_{tile}") for dtype in ("f16", "bf16") for tile in (64, 128)]
    entries += [entry("sm_f16_nn_64", "sm_90a"), entry("large"), entry("larger")]
    half = archives.ARCHIVE_BYTES // 2
    sizes = {entry["file"]: half for entry in entries}
    sizes["sm_80/large"] = sizes["sm_80/larger"] = 3 * half
    parts = [[entry["file"] for entry in part] for part in archives.divide(entries, sizes)]
    assert parts == [
        ["sm_80/sm_bf16_nn_128", "sm_80/sm_f16_nn_128"],  # of one tile, whatever their types
        ["sm_80/sm_bf16_nn_64", "sm_80/sm_f16_nn_64"],
        ["sm_80/large"],
        ["sm_80/larger"],
        ["sm_90a/sm_f16_nn_64"],
    ]


def test_the_same_cubins_make_the_same_archives(plain, archived, tmp_path) -> None:
    write(plain, tmp_path)
    name = "sm_90a/kernels_000.lzma"
    assert (tmp_path / name).read_bytes() == (archived / name).read_bytes()


def test_without_lzma_the_cubins_are_copied(plain, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(archives, "lzma", None)
    said: list[str] = []
    assert "archives" not in write(plain, tmp_path, said.append)
    assert files_of(tmp_path) == files_of(plain) - {"sm_90a/old.cubin"}
    assert "this Python has no lzma" in said[0]


@pytest.fixture(scope="module")
def read(torch_python: PreloadedPython) -> Callable[..., list[dict]]:
    """What a fresh process for each folder reads; a catalog is read once a process."""

    def answers(*folders: Path) -> list[dict]:
        found = []
        for folder in folders:
            printed = torch_python.output(READ, argv=("-c", str(folder)))
            found += [json.loads(line) for line in printed.splitlines()]
        return found

    return answers


def test_a_cubin_in_an_archive_is_the_cubin(read, plain, archived) -> None:
    assert read(plain, archived) == [hashes(plain)] * 2


def damage_of(archived: Path, folder: Path, case: str) -> Path:
    shutil.copytree(archived, folder)
    path = folder / "sm_90a" / "kernels_000.lzma"
    data = bytearray(path.read_bytes())
    if case == "missing":
        path.unlink()
        return folder
    if case == "cut":
        del data[len(data) // 2 :]
    elif case == "changed":
        data[len(data) // 2] ^= 1
    elif case == "longer":
        data += b"\0"
    elif case == "not an archive":
        data = bytearray(b"\x7fELF" * 100)
    path.write_bytes(data)
    return folder


@pytest.mark.fault_case(10)
@pytest.mark.parametrize(
    ("case", "tags"),
    [
        ("missing", {"file"}),
        ("cut", {"image"}),
        ("changed", {"image", "hash"}),
        ("longer", {"image"}),
        ("not an archive", {"image"}),
    ],
)
def test_a_damaged_archive_is_refused(case, tags, read, archived, tmp_path) -> None:
    (answer,) = read(damage_of(archived, tmp_path / "damaged", case))
    errors = [found for found in answer.values() if isinstance(found, dict)]
    # A bit that the decoder cannot see changes the bytes behind it alone.
    assert errors if case == "changed" else len(errors) == len(answer)
    for error in errors:
        assert error["tag"] in tags
        assert "sm_90a/kernels_000.lzma" in error["text"]


def listed(*files: object, file: object = "sm_90a/kernels_000.lzma") -> list[dict]:
    return [{"file": file, "files": list(files)}]


MALFORMED = {
    "no list": 3,
    "no files": [{"file": "sm_90a/kernels_000.lzma"}],
    "a file without a size": listed({"file": "a"}),
    "a negative size": listed({"file": "a", "size": -1}),
    "a size beyond the limit": listed({"file": "a", "size": 1 << 26}, {"file": "b", "size": 1}),
    "a size that overflows": listed({"file": "a", "size": 1}, {"file": "b", "size": 2**64 - 1}),
    "a size that is a fraction": listed({"file": "a", "size": 0.5}),
    "a file twice": listed({"file": "a", "size": 1}, {"file": "a", "size": 1}),
    "an archive outside": listed(file="../kernels.lzma"),
    "a file from the root": listed({"file": "/a", "size": 1}),
}


@pytest.mark.fault_case(10)
@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_list_of_archives_is_a_file_error(case, read, archived, tmp_path) -> None:
    folder = tmp_path / "malformed"
    shutil.copytree(archived, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "archives": MALFORMED[case]}))
    (answer,) = read(folder)
    assert answer["tag"] == "file"
    assert "expected a version 1 kernel manifest" in answer["text"]


@pytest.mark.fault_case(10)
def test_sizes_that_do_not_sum_to_the_archives_are_refused(read, archived, tmp_path) -> None:
    folders = []
    for more in (-1, 1):
        folder = tmp_path / str(more)
        shutil.copytree(archived, folder)
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["archives"][0]["files"][-1]["size"] += more
        (folder / "manifest.json").write_text(json.dumps(manifest))
        folders.append(folder)
    for answer in read(*folders):
        assert {found["tag"] for found in answer.values()} == {"image"}


THREADS = """
import hashlib, threading
from torch_cubin._native import library

kernels, wrong = library.catalog()["kernels"], []
start = threading.Barrier(16)

def read(first):
    start.wait()
    for kernel in kernels[first:] + kernels[:first]:
        cubin = library.catalog_cubin(kernel["name"], kernel["arch"])
        if hashlib.sha256(cubin).hexdigest() != kernel["sha256"]:
            wrong.append(kernel["name"])

threads = [threading.Thread(target=read, args=(i % len(kernels),)) for i in range(16)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(kernels), wrong)
"""


def test_threads_read_archives_at_the_same_time(plain, tmp_path, torch_python, monkeypatch) -> None:
    """More archives than stay decompressed: one for each copy of a cubin."""
    monkeypatch.setattr(archives, "ARCHIVE_BYTES", 1)
    source, folder = tmp_path / "source", tmp_path / "archived"
    shutil.copytree(plain, source)
    manifest = json.loads((source / "manifest.json").read_text())
    kernels = []
    for entry in manifest["kernels"]:
        for copy in range(12):
            kernels.append(
                {**entry, "name": f"{entry['name']}_{copy}", "file": f"{copy}/{entry['file']}"}
            )
            (source / kernels[-1]["file"]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / entry["file"], source / kernels[-1]["file"])
    assert len(kernels) > 40
    (source / "manifest.json").write_text(json.dumps({**manifest, "kernels": kernels}))
    write(source, folder)
    environment = {**os.environ, "TORCH_CUBIN_CATALOG": str(folder)}
    assert torch_python.output(THREADS, env=environment) == f"{len(kernels)} []\n"


FORKS = """
import os, signal, sys, threading, time
from torch_cubin._native import library

def read():
    return library.catalog_cubin("noise", "sm_90a")

library.catalog()
thread = threading.Thread(target=read)
thread.start()
statuses = []
for _ in range(2):
    time.sleep(0.02)
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends a child that waits for a lock
        os._exit(0 if len(read()) > 0 else 1)
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
thread.join()
print(statuses)
"""


def test_a_child_forked_while_a_thread_decompresses_reads_the_archive(
    tmp_path, torch_python
) -> None:
    """Its content cannot be compressed, so that decompressing takes a fifth of a second."""
    source, folder = tmp_path / "source", tmp_path / "archived"
    (source / "sm_90a").mkdir(parents=True)
    noise = source / "sm_90a" / "noise.cubin"
    noise.write_bytes(random.Random(0).randbytes(2 << 20))
    manifest = {"version": 1, "compiler": "none", "kernels": [entry_of(noise)]}
    (source / "manifest.json").write_text(json.dumps(manifest))
    write(source, folder)
    environment = {**os.environ, "TORCH_CUBIN_CATALOG": str(folder)}
    assert torch_python.output(FORKS, env=environment) == "[0, 0]\n"


def test_an_archive_is_an_ordinary_lzma_file(plain, archived) -> None:
    """Anybody's tools take it apart: here Python's, and xz's where it is installed."""
    import lzma

    path = archived / "sm_90a" / "kernels_000.lzma"
    manifest = json.loads((archived / "manifest.json").read_text())
    names = [file["file"] for file in manifest["archives"][0]["files"]]
    wanted = b"".join((plain / name).read_bytes() for name in names)
    assert lzma.decompress(path.read_bytes()) == wanted
    if shutil.which("xz") is not None:
        command = ["xz", "--format=lzma", "--decompress", "--stdout", path]
        assert subprocess.run(command, capture_output=True, check=True).stdout == wanted
