"""Every forward kernel of 16 bits that all architectures have (csrc/kernels/attention/mma.cu and
pair.cu), not only those that are chosen: a child process for each tile, whose catalog holds
nothing else."""

import json
from pathlib import Path

import pytest
import torch

import torch_cubin

MANIFEST = Path(torch_cubin.__file__).resolve().parent / "cubins" / "manifest.json"


def tiles() -> list[str]:
    """ "128x128x64", ...: rows, columns and head_dim of the package's kernels."""
    kernels = json.loads(MANIFEST.read_text())["kernels"] if MANIFEST.is_file() else []
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    arch = "sm_" + "".join(map(str, capability))
    kernels = [k for k in kernels if k["arch"].rstrip("a") == arch]
    kernels = [k for k in kernels if (k["family"], k["kind"]) == ("attention", "mma")]
    return sorted({"x".join(map(str, k["tile"])) for k in kernels if k["dtype"] != "float32"})


@pytest.mark.parametrize(
    "name", [pytest.param(t, marks=pytest.mark.child("attention_tile", "mma", t)) for t in tiles()]
)
def test_every_kernel_of_a_tile(name: str, child) -> None:
    answer = child.check()
    assert answer["wrong"] == []
    assert answer["unused"] == []
    assert answer["kernels"] == 2
    assert answer["calls"] == 104
