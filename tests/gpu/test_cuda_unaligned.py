"""Every kernel of csrc/kernels/matmul/unaligned.cu: a child process for each tile, whose catalog
holds nothing else."""

import json
from pathlib import Path

import pytest
import torch

import torch_cubin

MANIFEST = Path(torch_cubin.__file__).resolve().parent / "cubins" / "manifest.json"


def tiles() -> list[str]:
    """ "64x64", ...: the tiles of the package's kernels."""
    kernels = json.loads(MANIFEST.read_text())["kernels"] if MANIFEST.is_file() else []
    kernels = [k for k in kernels if (k["family"], k["kind"]) == ("matmul", "unaligned")]
    found = {tuple(k["tile"][:2]) for k in kernels}
    return [f"{m}x{n}" for m, n in sorted(found)]


@pytest.mark.parametrize(
    "name", [pytest.param(t, marks=pytest.mark.child("unaligned", "unaligned", t)) for t in tiles()]
)
def test_every_kernel_of_a_tile(name: str, child) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("these kernels run on Hopper alone")
    answer = child.check()
    assert answer["wrong"] == []
    assert answer["unused"] == []
    assert answer["kernels"] == 4
    assert answer["calls"] > 40 * answer["kernels"]
    splits = ["", " 2 splits", " 4 splits", " 8 splits"]
    assert answer["configs"] == [f"unaligned {name}{text}" for text in splits]


def test_the_package_has_the_kernels() -> None:
    if torch.cuda.get_device_capability()[0] == 9:
        assert tiles()
