"""Every kernel of csrc/kernels/matmul/unaligned.cu: a child process for each tile, whose catalog
holds nothing else."""

import json
from pathlib import Path

import pytest
import torch
from gpu import hopper

import torch_cubin
from torch_cubin._native import library
from torch_cubin._tuning import measure

MANIFEST = Path(torch_cubin.__file__).resolve().parent / "cubins" / "manifest.json"


def tiles() -> list[str]:
    """ "64x64", ...: the tiles of the package's kernels."""
    kernels = json.loads(MANIFEST.read_text())["kernels"] if MANIFEST.is_file() else []
    kernels = [k for k in kernels if (k["family"], k["kind"]) == ("matmul", "unaligned")]
    found = {tuple(k["tile"][:2]) for k in kernels}
    return [f"{m}x{n}" for m, n in sorted(found)]


@hopper.for_kernels
@pytest.mark.parametrize(
    "name", [pytest.param(t, marks=pytest.mark.child("unaligned", "unaligned", t)) for t in tiles()]
)
def test_every_kernel_of_a_tile(name: str, child) -> None:
    answer = child.check()
    assert answer["wrong"] == []
    assert answer["unused"] == []
    assert answer["kernels"] == {"32x64": 9, "64x64": 2}[name]
    assert answer["calls"] > 35 * answer["kernels"]
    splits = ["", *(f" {count} splits" for count in range(2, 9))]
    texts = (*splits, *([" in order"] if name == "32x64" else []))
    assert answer["configs"] == [f"unaligned {name}{text}" for text in texts]


def among_nan(shape: tuple[int, ...], pitch: int, offset: int, dtype: torch.dtype) -> torch.Tensor:
    """Small integers with NaN between the rows, and before and after all."""
    *batch, rows, _ = shape
    strides = [rows * pitch + offset] * len(batch) + [pitch, 1]
    count = offset + sum((size - 1) * step for size, step in zip(shape, strides, strict=True)) + 1
    memory = torch.full((count + 8,), torch.nan, device="cuda", dtype=dtype)
    value = memory.as_strided(shape, strides, offset)
    return value.copy_(torch.randint(-3, 4, shape, device="cuda"))


@hopper.for_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weight_gradients_of_rows_that_begin_anywhere(dtype: torch.dtype) -> None:
    """A^T B by every config: tails of all dims, gaps, offsets, batches, one row; K split."""
    shapes = [
        (64, 64, 128), (65, 63, 127), (5, 33, 3), (146, 146, 111), (200, 9, 128), (131, 75, 2001),
        (40, 194, 4099),
    ]  # fmt: skip
    wrong, ran = [], set()
    with torch.no_grad(), measure.watching():
        for number, (m, n, k) in enumerate(shapes * 3):
            batch = ((), (), (3,))[number // len(shapes)]
            gap = (0, 1, 2)[number // len(shapes)]
            a = among_nan((*batch, k, m), m + gap, 1 + number % 9, dtype).mT
            b = among_nan((*batch, k, n), n + 2 * gap, 9 - number % 9, dtype)
            expected = (a.double() @ b.double()).to(dtype)
            library.force_config("")
            torch.ops.cubin.matmul(a, b)
            plans = [p for p in library.watched_plans() if p["product"]["k"] == k]
            offered = {c["name"] for plan in plans for c in plan["configs"]}
            for config in offered & {"sm90 64x64 read", "pad ab"}:
                library.force_config(config)
                if not torch.equal(torch.ops.cubin.matmul(a, b), expected):
                    wrong.append(f"{batch} {(m, n, k)} {config}")
                ran.add(config)
    assert wrong == []
    assert ran == {"sm90 64x64 read", "pad ab"}


def test_the_package_has_the_kernels() -> None:
    if torch.cuda.get_device_capability()[0] == 9:
        assert tiles()
