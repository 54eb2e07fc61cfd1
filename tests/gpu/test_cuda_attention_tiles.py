"""Every forward kernel of 16 bits, not only those that are chosen: Hopper's (sm90/forward.cu in
csrc/kernels/attention). A child process for each tile, whose catalog holds nothing else. Those that
all architectures have (mma.cu, pair.cu) are in test_cuda_attention_tiles_portable.py: another
process runs them meanwhile."""

import json
from pathlib import Path

import pytest
import torch

import torch_cubin

MANIFEST = Path(torch_cubin.__file__).resolve().parent / "cubins" / "manifest.json"


def tiles(kind: str) -> list[str]:
    """ "128x128x64", ...: rows, columns and head_dim of the package's kernels for this GPU."""
    kernels = json.loads(MANIFEST.read_text())["kernels"] if MANIFEST.is_file() else []
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    arch = "sm_" + "".join(map(str, capability))
    found = {
        "x".join(map(str, kernel["tile"]))
        for kernel in kernels
        if kernel["arch"].rstrip("a") == arch
        and (kernel["family"], kernel["kind"]) == ("attention", kind)
        and kernel["dtype"] != "float32"
        # Kernels of additive masks alone are in test_cuda_attention_sm90_added.py.
        and {"plain", "rule"} & set(kernel["takes"])
    }
    return sorted(found)


def of_tiles(kind: str) -> list:
    """A parameter for each tile, with its child process."""
    mark = pytest.mark.child
    return [pytest.param(tile, marks=mark("attention_tile", kind, tile)) for tile in tiles(kind)]


def check_tile(answer: dict) -> None:
    assert answer["wrong"] == []
    assert answer["unused"] == []
    assert answer["kernels"] == 2
    assert answer["calls"] == 104


@pytest.mark.parametrize("name", of_tiles("sm90"))
def test_every_kernel_of_a_tile(name: str, child) -> None:
    check_tile(child.check())


@pytest.mark.parametrize("kind", ["mma", "sm90"])
def test_the_package_has_kernels_of_all_tiles(kind: str) -> None:
    """The package that was built for this GPU has the kernels."""
    if kind == "mma" or torch.cuda.get_device_capability()[0] == 9:
        assert {t.split("x")[2] for t in tiles(kind)} >= {"64", "128", "256"}
