"""Every forward kernel of 16 bits, not only those that are chosen: Hopper's (sm90/forward.cu in
csrc/kernels/attention). A child process for each tile, whose catalog holds nothing else. Those that
all architectures have (mma.cu, pair.cu) are in test_cuda_attention_tiles_portable.py: another
process runs them meanwhile."""

import json
from pathlib import Path

import pytest
import torch
from attention_steps import step_of, tile_of

import torch_cubin

MANIFEST = Path(torch_cubin.__file__).resolve().parent / "cubins" / "manifest.json"


def tiles(step: str) -> list[str]:
    """ "128x128x64", ...: tile_of() of the package's kernels for this GPU."""
    kernels = json.loads(MANIFEST.read_text())["kernels"] if MANIFEST.is_file() else []
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    arch = "sm_" + "".join(map(str, capability))
    found = {
        tile_of(kernel)
        for kernel in kernels
        if kernel["arch"].rstrip("a") == arch
        and kernel["family"] == "attention"
        and step_of(kernel) == step
        and kernel["dtype"] != "float32"
        # Kernels of additive masks alone are in test_cuda_attention_sm90_added.py.
        and {"plain", "rule"} & set(kernel["takes"])
    }
    return sorted(found)


def of_tiles(step: str) -> list:
    """A parameter for each tile, with its child process."""
    mark = pytest.mark.child
    return [pytest.param(tile, marks=mark("attention_tile", step, tile)) for tile in tiles(step)]


def check_tile(answer: dict) -> None:
    assert answer["wrong"] == []
    assert answer["unused"] == []
    assert answer["kernels"] == 2
    assert answer["calls"] == 104


@pytest.mark.parametrize("name", of_tiles("sm90 forward"))
def test_every_kernel_of_a_tile(name: str, child) -> None:
    check_tile(child.check())


@pytest.mark.parametrize("step", ["forward", "sm90 forward"])
def test_the_package_has_kernels_of_all_tiles(step: str) -> None:
    """The package that was built for this GPU has the kernels."""
    if step == "forward" or torch.cuda.get_device_capability()[0] == 9:
        assert {t.split("x")[-1] for t in tiles(step)} >= {"64", "128", "256"}
