"""Every kernel of csrc/kernels/matmul/sm90.cu, not only those that are chosen: a child process for
each tile, whose catalog holds nothing else."""

import json
from pathlib import Path

import pytest
import torch

import torch_cubin

MANIFEST = Path(torch_cubin.__file__).resolve().parent / "cubins" / "manifest.json"


def tiles() -> list[str]:
    """ "128x256", ...: the tiles of the package's sm90 kernels."""
    kernels = json.loads(MANIFEST.read_text())["kernels"] if MANIFEST.is_file() else []
    found = {tuple(k["tile"][:2]) for k in kernels if k["kind"] == "sm90"}
    return [f"{m}x{n}" for m, n in sorted(found)]


@pytest.mark.parametrize(
    "name", [pytest.param(t, marks=pytest.mark.child("tile", "sm90", t)) for t in tiles()]
)
def test_every_kernel_of_a_tile(name: str, child) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("sm90 kernels run on Hopper alone")
    answer = child.check()
    assert answer["wrong"] == []
    assert answer["unused"] == []
    assert answer["kernels"] > 0
    assert answer["calls"] > 30 * answer["kernels"]


def test_the_package_has_the_sm90_kernels() -> None:
    """The package that was built for Hopper has the kernels."""
    if torch.cuda.get_device_capability()[0] == 9:
        assert len(tiles()) >= 10
