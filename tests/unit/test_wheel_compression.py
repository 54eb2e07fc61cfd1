"""The archive that tools/portability.py writes when it compresses a wheel anew, on small archives.

tests/unit/test_packaging.py makes the real wheel, by the same function.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import importlib.util
import os
import random
import shutil
import stat
import sys
import zipfile
import zlib
from pathlib import Path

import pytest
from programs import output_of

ROOT = Path(__file__).resolve().parents[2]

spec = importlib.util.spec_from_file_location("portability", ROOT / "tools" / "portability.py")
portability = importlib.util.module_from_spec(spec)
spec.loader.exec_module(portability)

TEXT = (ROOT / "tools" / "portability.py").read_bytes() * 4
NOISE = random.Random(0).randbytes(5000)  # deflating makes it larger
# Name, mode and content, in an order that no sorting gives. A name that ends in / is a folder.
ENTRIES = [
    ("tiny/run.sh", 0o100755, b"#!/bin/sh\necho ran\n" * 9),
    ("tiny/", 0o040755, b""),
    ("tiny/__init__.py", 0o100644, b""),
    ("tiny/text.py", 0o100664, TEXT),
    ("tiny/noise.bin", 0o100600, NOISE),
    ("tiny/one.txt", 0o100444, b"1"),
    ("tiny/größe-寸法.txt", 0o100644, b"named in UTF-8" * 20),
]

libdeflate = pytest.mark.skipif(
    importlib.util.find_spec("deflate") is None, reason="the package deflate is not installed"
)
# NOTE: find_spec("pip") is not asked. setuptools takes it for a run of pip and gives `import
# distutils` back to the standard library, and then tests that import setuptools fail.
needs_pip = pytest.mark.skipif(
    not any(importlib.metadata.distributions(name="pip")), reason="needs pip, found none"
)
with_each_compressor = pytest.mark.parametrize(
    "compressor", [pytest.param("libdeflate", marks=libdeflate), "zlib"]
)


def choose(monkeypatch: pytest.MonkeyPatch, compressor: str) -> None:
    if compressor == "zlib":
        monkeypatch.setitem(sys.modules, "deflate", None)  # `import deflate` raises ImportError


def write(path: Path, entries: list[tuple[str, int, bytes]]) -> Path:
    """An archive as Python's zipfile writes it, each entry with a time of its own."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for minute, (name, mode, data) in enumerate(entries):
            info = zipfile.ZipInfo(name, (2026, 11, 26, 23, minute, 58))
            info.external_attr = mode << 16 | (0x10 if name.endswith("/") else 0)
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, data)
    return path


def described(path: Path) -> list[tuple]:
    """All that must stay of each entry, in the archive's order."""
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        return [
            (
                *(info.filename, info.date_time, info.external_attr, info.internal_attr),
                *(info.create_system, info.create_version, info.flag_bits, info.file_size),
                archive.read(info),
            )
            for info in archive.infolist()
        ]


@with_each_compressor
def test_recompressing_changes_only_the_compression(tmp_path, monkeypatch, compressor):
    choose(monkeypatch, compressor)
    path = write(tmp_path / "tiny.whl", ENTRIES)
    before = described(path)
    portability.compress_best(path)
    assert described(path) == before
    assert [entry[0] for entry in before] == [name for name, *_ in ENTRIES]
    assert [entry[2] >> 16 for entry in before] == [mode for _, mode, _ in ENTRIES]
    assert list(tmp_path.iterdir()) == [path]


@with_each_compressor
def test_incompressible_entries_are_stored(tmp_path, monkeypatch, compressor):
    choose(monkeypatch, compressor)
    path = write(tmp_path / "tiny.whl", ENTRIES)
    portability.compress_best(path)
    with zipfile.ZipFile(path) as archive:
        stored = {
            info.filename for info in archive.infolist() if info.compress_type == zipfile.ZIP_STORED
        }
        assert all(info.compress_size <= info.file_size for info in archive.infolist())
    assert stored == {"tiny/", "tiny/__init__.py", "tiny/noise.bin", "tiny/one.txt"}


@with_each_compressor
def test_compressing_again_gives_the_same_bytes(tmp_path, monkeypatch, compressor):
    choose(monkeypatch, compressor)
    path = write(tmp_path / "tiny.whl", ENTRIES)
    portability.compress_best(path)
    once = path.read_bytes()
    portability.compress_best(path)
    assert path.read_bytes() == once


@with_each_compressor
def test_local_headers_agree_with_the_central_directory(tmp_path, monkeypatch, compressor):
    """Readers that stream an archive know the local headers alone."""
    choose(monkeypatch, compressor)
    path = write(tmp_path / "tiny.whl", ENTRIES)
    portability.compress_best(path)
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        local, central = 0, archive.start_dir
        for info in archive.infolist():
            name = info.filename.encode()
            assert info.header_offset == local
            assert data[local : local + 4] == b"PK\3\4"
            assert data[local + 4 : local + 30] == data[central + 6 : central + 32]
            assert data[local + 30 : local + 30 + len(name)] == name
            local += 30 + len(name) + info.compress_size
            central += 46 + len(name)
        assert local == archive.start_dir  # nothing lies between the entries and the directory
        assert central == len(data) - 22


def test_an_empty_archive(tmp_path):
    path = write(tmp_path / "empty.whl", [])
    portability.compress_best(path)
    assert described(path) == []
    assert path.stat().st_size == 22


@libdeflate
def test_libdeflate_packs_no_worse_than_zlib(tmp_path, monkeypatch, capsys):
    path = write(tmp_path / "tiny.whl", ENTRIES)
    portability.compress_best(path)
    by_libdeflate = path.stat().st_size
    assert capsys.readouterr().out == ""
    choose(monkeypatch, "zlib")
    portability.compress_best(path)
    assert by_libdeflate < path.stat().st_size


def test_using_zlib_instead_of_libdeflate_prints_a_note(tmp_path, monkeypatch, capsys):
    choose(monkeypatch, "zlib")
    portability.compress_best(write(tmp_path / "tiny.whl", ENTRIES))
    (line,) = capsys.readouterr().out.splitlines()
    assert "zlib" in line
    assert "`deflate`" in line
    packed = portability.best_deflate()(TEXT)
    assert zlib.decompress(packed, -zlib.MAX_WBITS) == TEXT
    assert len(packed) < len(zlib.compress(TEXT))


def test_archives_that_need_zip64_are_refused(tmp_path, monkeypatch):
    path = write(tmp_path / "tiny.whl", ENTRIES)
    before = path.read_bytes()
    monkeypatch.setattr(portability, "ZIP_MAX_ENTRIES", len(ENTRIES) - 1)
    with pytest.raises(SystemExit, match=rf"too large: .*{len(ENTRIES)}"):
        portability.compress_best(path)
    monkeypatch.undo()
    size = sum(len(data) for _, _, data in ENTRIES)
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", size - 1)
    with pytest.raises(SystemExit, match=rf"too large: .*{size}"):
        portability.compress_best(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_wheel_is_kept_if_its_new_archive_is_broken(tmp_path, monkeypatch):
    path = write(tmp_path / "tiny.whl", ENTRIES)
    before = path.read_bytes()
    wrong = zlib.compress(b"other bytes")[2:-4]
    monkeypatch.setattr(portability, "best_deflate", lambda: lambda data: wrong)
    with pytest.raises(SystemExit, match=r"tiny/run\.sh decompresses to other bytes"):
        portability.compress_best(path)
    assert path.read_bytes() == before


def tiny_wheel(folder: Path) -> Path:
    """A wheel of ENTRIES, with the three files that pip asks of one."""
    info = "tiny-1.0.dist-info"
    about = [
        (f"{info}/METADATA", b"Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n"),
        (f"{info}/WHEEL", b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"),
    ]
    entries = ENTRIES + [(name, 0o100644, data) for name, data in about]
    record = ""
    for name, _, data in entries:
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        if not name.endswith("/"):
            record += f"{name},sha256={digest},{len(data)}\n"
    record += f"{info}/RECORD,,\n"
    entries.append((f"{info}/RECORD", 0o100644, record.encode()))
    return write(folder / "tiny-1.0-py3-none-any.whl", entries)


@with_each_compressor
@needs_pip
def test_pip_installs_the_wheel(tmp_path, monkeypatch, compressor):
    choose(monkeypatch, compressor)
    wheel, site = tiny_wheel(tmp_path), tmp_path / "site"
    portability.compress_best(wheel)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    command += ["--no-compile", "--target", str(site), str(wheel)]
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    output_of(command, env=environment)
    for name, _, data in ENTRIES:
        if not name.endswith("/"):
            assert (site / name).read_bytes() == data
    assert (site / "tiny" / "run.sh").stat().st_mode & stat.S_IXUSR
    assert not (site / "tiny" / "text.py").stat().st_mode & stat.S_IXUSR


@with_each_compressor
@pytest.mark.skipif(shutil.which("unzip") is None, reason="needs unzip, found none")
def test_unzip_reads_the_wheel(tmp_path, monkeypatch, compressor):
    choose(monkeypatch, compressor)
    path = write(tmp_path / "tiny.whl", ENTRIES)
    portability.compress_best(path)
    output_of(["unzip", "-tq", str(path)])
