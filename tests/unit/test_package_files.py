"""Packages as files: paths, rights, full disks, and other processes that write the same folder."""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
import resource
import signal
import time
from pathlib import Path

import contracts
import pytest
from declared import DATA, DECLARED, vec_add
from users import unprivileged

import torch_cubin


@pytest.mark.fault_case(45)
@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_files_of_a_package_follow_the_umask(tmp_path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        package = torch_cubin.save_package(tmp_path / "package", [vec_add()])
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in package.iterdir()} == {mode}


@pytest.mark.fault_case(45)
def test_paths_that_are_no_utf_8(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe"))
    folder.mkdir()
    path = folder / os.fsdecode(b"\xc3\x28.cubin")
    path.write_bytes(DECLARED.read_bytes())
    assert torch_cubin.load(path).names == torch_cubin.load(DECLARED).names
    op = vec_add()
    torch_cubin.save_package(folder / "package", [op])
    assert torch_cubin.load_package(folder / "package")[op.name].name == op.name
    with pytest.raises(torch_cubin.Error, match=r"\[file\].*\\udcff") as caught:
        torch_cubin.load(folder / "missing.cubin")
    str(caught.value).encode()  # may be printed anywhere


@pytest.mark.fault_case(45)
def test_a_folder_without_the_right_to_write() -> None:
    op = vec_add()
    with unprivileged() as folder:
        (folder / "package").mkdir(mode=0o555)
        with pytest.raises(torch_cubin.Error, match=r"\[file\].*cannot be written \(Permission"):
            torch_cubin.save_package(folder / "package", [op])
        assert list((folder / "package").iterdir()) == []


@pytest.mark.fault_case(45)
def test_a_full_disk_leaves_no_package(tmp_path: Path) -> None:
    """The system refuses to write past a limit, as on a full disk."""
    op = vec_add()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal_before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        with pytest.raises(torch_cubin.Error, match=r"\[file\].*cannot be written"):
            torch_cubin.save_package(tmp_path / "package", [op])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, signal_before)
    assert list((tmp_path / "package").iterdir()) == []
    torch_cubin.save_package(tmp_path / "package", [op])


TWO_WRITERS = """
import os, sys
other = os.fork()
import torch_cubin
folder, name = sys.argv[1], "one" if other else "two"
(op,) = torch_cubin.load_package(f"{folder}/{name}").values()
for _ in range(150):
    torch_cubin.save_package(f"{folder}/package", [op], overwrite=True)
if other:
    assert os.waitpid(other, 0)[1] == 0
"""


@pytest.mark.fault_case(12)
def test_a_file_created_under_an_images_name_while_saving(tmp_path: Path, monkeypatch) -> None:
    """As another process does that writes a package of its own at the same time."""
    from torch_cubin._declared import package as module

    folder = tmp_path / "package"
    chosen = module._renumbered

    def choose(op, images):
        contract = chosen(op, images)
        for _, _, name in images.listed:
            folder.mkdir(exist_ok=True)
            (folder / name).write_bytes(b"another's")
        return contract

    monkeypatch.setattr(module, "_renumbered", choose)
    op = vec_add()
    torch_cubin.save_package(folder, [op])
    (entry,) = json.loads((folder / "manifest.json").read_text())["images"]
    assert entry["file"].startswith(f"{entry['sha256']}.")
    name = entry["file"].removeprefix(f"{entry['sha256']}.")
    assert (folder / name).read_bytes() == b"another's"
    assert torch_cubin.load_package(folder)[op.name].name == op.name
    assert len(list(folder.iterdir())) == 3


@pytest.mark.fault_case(12)
def test_two_processes_that_write_one_folder(tmp_path: Path, torch_python) -> None:
    """At any time a reader finds no package, or a complete one of either."""
    other = tmp_path / contracts.SEVERAL.name  # another image of that name
    other.write_bytes((DATA / "vec_add.sm_90a.cuda124.cubin").read_bytes())
    for name, image in (("one", contracts.SEVERAL), ("two", other)):
        definition = contracts.vec_add(f"two_writers::add_{name}")
        contracts.write_package(tmp_path / name, definition, files=[image])
    pool = concurrent.futures.ThreadPoolExecutor(1)
    writers = pool.submit(torch_python.run, TWO_WRITERS, argv=["-c", str(tmp_path)])
    seen = set()
    manifest = tmp_path / "package" / "manifest.json"
    while not writers.done():
        if not manifest.exists():
            time.sleep(0.001)
            continue
        content = json.loads(manifest.read_text())
        seen.add(content["ops"][0]["schema"])
        for entry in content["images"]:
            data = (manifest.parent / entry["file"]).read_bytes()
            assert hashlib.sha256(data).hexdigest() == entry["sha256"]
    done = writers.result()
    assert done.returncode == 0, done.stderr
    assert seen
    assert [path.name for path in manifest.parent.iterdir() if path.name.startswith(".")] == []
