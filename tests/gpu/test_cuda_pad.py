"""Operands whose rows begin anywhere (csrc/kernels/matmul/pad.cu): copied first where that pays."""

from __future__ import annotations

import pytest
import torch
from gpu import cases

pytestmark = pytest.mark.usefixtures("nan_memory")

# K is odd, N is odd, both; rows of several chunks and of less than one.
SHAPES = ((1031, 1033, 2049), (2048, 2056, 4095), (1536, 3001, 1024), (4097, 520, 1025))
ALIGNED, RAGGED, OFFSET = cases.Layout(), cases.Layout(pad=1), cases.Layout(offset=3)
COLUMNS = cases.Layout(order=(1, 0), pad=1)


def names_of(profile: torch.profiler.profile) -> set[str]:
    return {event.name for event in profile.events() if event.device_type.name == "CUDA"}


@pytest.mark.parametrize("mode", ["float16", "bfloat16", "tf32"])
def test_products_are_exact_on_small_integers(mode: str, generator: torch.Generator) -> None:
    wrong = []
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with cases.math_mode(mode) as dtype, torch.profiler.profile(activities=activities) as profile:
        for m, n, k in SHAPES:
            for a_layout in (ALIGNED, RAGGED, OFFSET, COLUMNS):
                for b_layout in (ALIGNED, OFFSET, COLUMNS):
                    a = cases.place(cases.draw((m, k), dtype, True, generator), a_layout)
                    b = cases.place(cases.draw((k, n), dtype, True, generator), b_layout)
                    expected = (a.double() @ b.double()).to(dtype)
                    cases.poison(m * n, dtype)
                    if not torch.equal(torch.ops.cubin.matmul(a, b), expected):
                        wrong.append(f"{mode} {(m, n, k)} {a_layout} {b_layout}")
        torch.cuda.synchronize()
    assert wrong == []
    assert f"pad_matmul_{dtype.itemsize}_bytes" in names_of(profile)


def test_batches_and_broadcasts(generator: torch.Generator) -> None:
    a = cases.draw((3, 1024, 1025), torch.bfloat16, True, generator)
    b = cases.draw((1025, 1030), torch.bfloat16, True, generator)
    gap = torch.full((3, 1024 * 1025 + 7), torch.nan, device="cuda", dtype=torch.bfloat16)
    gap[:, : 1024 * 1025] = a.flatten(1)
    a = gap.as_strided((3, 1024, 1025), (1024 * 1025 + 7, 1025, 1))
    for right in (b, b.expand(3, -1, -1), b.expand(3, -1, -1).contiguous()):
        out = torch.ops.cubin.matmul(a, right)
        assert torch.equal(out, (a.double() @ right.double()).to(torch.bfloat16))


def test_in_a_graph(generator: torch.Generator) -> None:
    """The copies lie in the graph's own memory."""
    a = cases.draw((1025, 1025), torch.bfloat16, True, generator)
    b = cases.draw((1025, 1025), torch.bfloat16, True, generator)
    torch.ops.cubin.matmul(a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = torch.ops.cubin.matmul(a, b)
    for _ in range(3):
        a.copy_(cases.draw((1025, 1025), torch.bfloat16, True, generator))
        graph.replay()
        assert torch.equal(out, (a.double() @ b.double()).to(torch.bfloat16))
