"""Every forward kernel of 16 bits, not only those that are chosen: Hopper's (sm90.cu in
csrc/kernels/attention) and those that all architectures have (mma.cu, pair.cu). A child process for
each tile, whose catalog holds nothing else."""

import json
from pathlib import Path

import pytest
import torch

import torch_cubin

MANIFEST = Path(torch_cubin.__file__).resolve().parent / "cubins" / "manifest.json"


def tiles() -> list[tuple[str, str]]:
    """("sm90", "128x128x64"), ...: rows, columns and head_dim of the package's kernels."""
    kernels = json.loads(MANIFEST.read_text())["kernels"] if MANIFEST.is_file() else []
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    arch = "sm_" + "".join(map(str, capability))
    found = {
        (kernel["kind"], "x".join(map(str, kernel["tile"])))
        for kernel in kernels
        if kernel["arch"].rstrip("a") == arch
        and kernel["family"] == "attention"
        and kernel["kind"] in ("sm90", "mma")
        and kernel["dtype"] != "float32"
    }
    return sorted(found)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(f"{kind} {tile}", marks=pytest.mark.child("attention_tile", kind, tile))
        for kind, tile in tiles()
    ],
)
def test_every_kernel_of_a_tile(name: str, child) -> None:
    answer = child.check()
    assert answer["wrong"] == []
    assert answer["unused"] == []
    assert answer["kernels"] == 2
    assert answer["calls"] == 104


def test_there_are_tiles() -> None:
    """The package that was built for this GPU has the kernels."""
    kinds = {"mma", "sm90"} if torch.cuda.get_device_capability()[0] == 9 else {"mma"}
    for kind in kinds:
        assert {t.split("x")[2] for k, t in tiles() if k == kind} >= {"64", "128", "256"}, kind
