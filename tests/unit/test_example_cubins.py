"""The committed cubins of examples/kernels and examples/cpp are what the documented commands make
of their sources."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import real_cubins

KERNELS = real_cubins.ROOT / "examples" / "kernels"
NAMES = sorted(path.stem for path in KERNELS.glob("*.cu"))
CPP = real_cubins.ROOT / "examples" / "cpp" / "kernels"
RELEASE = re.compile(rb"Cuda compilation tools, release [\d.]+, V([\d.]+)")


def command(name: str) -> list[str]:
    """The line of examples/kernels/README.md that makes one."""
    (line,) = re.findall(r"^nvcc .*$", (KERNELS / "README.md").read_text(), re.MULTILINE)
    return shlex.split(line.replace("NAME", name))


def assembled(folder: Path, options: list[str], made: Path, committed: bytes) -> bytes:
    """What nvcc makes with these options, if it is of the release that made the committed image:
    another one may write other code for the same source."""
    compiler = real_cubins.nvcc()
    if compiler is None:
        pytest.skip("needs nvcc")
    release = RELEASE.search(committed)
    assert release, "the image does not say what made it"
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    if release[1] not in re.findall(rb"\bV([\d.]+)", version):
        pytest.skip(f"needs nvcc {release[1].decode()}, which made the image")
    subprocess.run([compiler, *options, made], cwd=folder, check=True)
    return made.read_bytes()


def test_every_source_has_its_cubin() -> None:
    assert NAMES
    assert {path.name for path in KERNELS.glob("*.cubin")} == {f"{n}.sm_90a.cubin" for n in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_cubin_is_of_its_source(name: str, tmp_path: Path) -> None:
    _, *options, target = command(name)
    committed = (KERNELS / target).read_bytes()
    found = assembled(KERNELS, options, tmp_path / target, committed)
    assert found == committed, f"make it again: cd {KERNELS}; {' '.join(command(name))}"
    # The source says the same command, where it says one.
    for said in re.findall(r"nvcc -cubin .*", (KERNELS / f"{name}.cu").read_text()):
        assert said == " ".join(command(name))


@pytest.mark.parametrize("source", sorted(CPP.glob("*.cu")), ids=lambda path: path.stem)
def test_image_of_a_cpp_example_is_of_its_source(source: Path, tmp_path: Path) -> None:
    """By the line in the source; what became an array in C++ is read back from there."""
    (line,) = re.findall(r"nvcc (-.*)", source.read_text())
    *options, target = shlex.split(line)
    array = CPP.parent / f"{source.stem}_sm90a.cubin.cpp"
    if array.is_file():
        numbers = re.search(r"\{(.*?)\}", array.read_text(), re.S)[1]
        committed = bytes(int(number, 16) for number in numbers.split(","))
    else:
        committed = (CPP / target).read_bytes()
    found = assembled(CPP, options, tmp_path / target, committed)
    assert found == committed, f"make it again: cd {CPP}; nvcc {line}"
