"""C++ programs on the stand-in driver, linked with libtorch_cubin as a user's would be."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

import pytest
from built_once import BUILD, built_once
from fake_driver.build import build

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "torch_cubin"
SHARED = PACKAGE / "lib" / "libtorch_cubin.so"
CHECKS = ROOT / "tests" / "cpp" / "check_cubin.cpp"
DATA = ROOT / "tests" / "data"

pytestmark = pytest.mark.skipif(not SHARED.is_file(), reason="not a built checkout")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fake_driver")
    missing = build(path)
    if missing:
        pytest.skip(missing)
    return path


@pytest.fixture(scope="session")
def checks() -> Path:
    """The object, compiled once with AddressSanitizer, which also finds what is never freed."""
    digest = hashlib.sha256(CHECKS.read_bytes())
    for header in sorted((PACKAGE / "include" / "torch_cubin").glob("*.h")):
        digest.update(header.read_bytes())
    output = BUILD / f"check_cubin-{digest.hexdigest()[:16]}.o"
    with built_once(output) as unfinished:
        if unfinished is not None:
            command = ["g++", "-std=c++17", "-O0", "-g1", "-Wall", "-Wextra", "-Wpedantic"]
            command += ["-Werror", "-fsanitize=address", f"-I{PACKAGE / 'include'}"]
            subprocess.run([*command, "-c", str(CHECKS), "-o", str(unfinished)], check=True)
    return output


def run(program: Path, folder: Path, *arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [str(program), *arguments],
        env={**os.environ, "LD_LIBRARY_PATH": str(folder), "FAKE_CUDA_DEVICES": "2", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.parametrize("way", ["shared", "static"])
def test_cubin_h(way: str, checks: Path, folder: Path, tmp_path: Path) -> None:
    """Launches as the driver gets them, two devices, bad input of every kind; nothing leaks."""
    link = [f"-L{SHARED.parent}", "-ltorch_cubin", f"-Wl,-rpath,{SHARED.parent}"]
    if way == "static":
        link = [str(SHARED.with_suffix(".a"))]
    program = tmp_path / "check_cubin"
    command = ["g++", "-fsanitize=address", str(checks), "-o", str(program), *link]
    subprocess.run([*command, "-ldl", "-pthread"], check=True)
    assert run(program, folder, str(DATA), ASAN_OPTIONS="detect_leaks=1") == "right\n"
