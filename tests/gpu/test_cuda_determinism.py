"""The same inputs give the same bits, a thousand times, whatever else the GPU is doing."""

from __future__ import annotations

import numerics
import pytest
import torch
from gpu import cases

REPEATS = 1000

# Split-K territory (few output tiles, deep K) first: that is where an order of sums could vary.
SHAPES = [
    (64, 64, 16384),
    (16, 4096, 4096),
    (1, 4096, 8192),
    (4, 1000, 5000),
    (300, 300, 4100),
    (1024, 1024, 256),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mode", cases.MODES)
def test_a_thousand_repeats_have_the_same_bits(
    mode: str, shape: tuple[int, int, int], generator: torch.Generator
) -> None:
    m, n, k = shape
    noise = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
    side = torch.cuda.Stream()
    with cases.math_mode(mode) as dtype, torch.no_grad():
        a = cases.draw((m, k), dtype, False, generator)
        weight = cases.draw((n, k), dtype, False, generator)
        bias = cases.draw((n,), dtype, False, generator)
        first = torch.ops.cubin.linear(a, weight, bias)
        changed = torch.zeros((), dtype=torch.int64, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        for repeat in range(REPEATS):
            if repeat % 8 == 0:
                # Other work on the GPU moves blocks in time and between multiprocessors.
                with torch.cuda.stream(side):
                    torch.mm(noise, noise)
            out = torch.ops.cubin.linear(a, weight, bias)
            changed += (numerics.bits(out) != numerics.bits(first)).any()
        assert int(changed) == 0, f"{int(changed)} of {REPEATS} repeats differ: {mode} {shape}"


@pytest.mark.parametrize("mode", cases.MODES)
def test_bits_do_not_depend_on_the_address_or_the_stream(
    mode: str, generator: torch.Generator
) -> None:
    with cases.math_mode(mode) as dtype, torch.no_grad():
        for m, n, k in SHAPES:
            a = cases.draw((m, k), dtype, False, generator)
            b = cases.draw((k, n), dtype, False, generator)
            first = torch.ops.cubin.matmul(a, b)
            torch.cuda.synchronize()
            with torch.cuda.stream(torch.cuda.Stream()):
                again = torch.ops.cubin.matmul(a.clone(), b.clone())
            torch.cuda.synchronize()
            numerics.check_bits(again, first, f"{mode} {(m, n, k)}")


def test_deterministic_algorithms_change_nothing(nan_memory, generator: torch.Generator) -> None:
    a = cases.draw((64, 16384), torch.bfloat16, False, generator)
    b = cases.draw((16384, 64), torch.bfloat16, False, generator)
    strict = torch.ops.cubin.matmul(a, b)
    torch.use_deterministic_algorithms(False)
    numerics.check_bits(torch.ops.cubin.matmul(a, b), strict)
