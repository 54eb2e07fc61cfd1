"""A reduced set of calls under compute-sanitizer, without the caching allocator.

Every tensor is then its own allocation that ends with its last element, so that memcheck sees
each byte read or written outside an operand.
"""

from __future__ import annotations

import os

import pytest


def _check(child, calls: int) -> None:
    answer = child.check()  # the tool's exit status is 86 if it found anything
    assert answer["wrong"] == []
    assert answer["calls"] >= calls
    clean = ("ERROR SUMMARY: 0 errors", "RACECHECK SUMMARY: 0 hazards")  # synccheck's is the first
    assert any(summary in child.output for summary in clean), child.output


@pytest.mark.child("sanitize", "memcheck")
def test_memcheck(child) -> None:
    _check(child, 50)


@pytest.mark.child("sanitize", "racecheck")
def test_racecheck(child) -> None:
    _check(child, 50)


@pytest.mark.skipif(
    "TORCH_CUBIN_SLOW_TESTS" not in os.environ, reason="a minute: TORCH_CUBIN_SLOW_TESTS=1"
)
@pytest.mark.parametrize(
    "tool",
    [
        pytest.param(tool, marks=pytest.mark.child("ways_sanitize", tool))
        for tool in ("memcheck", "racecheck", "synccheck")
    ],
)
def test_every_kernel_for_hopper(tool: str, child) -> None:
    _check(child, 100)


# A process for each dtype, side by side: in one they were what the whole suite waited for.
ATTENTION = [
    pytest.param(dtype, calls, marks=pytest.mark.child("attention_sanitize", "memcheck", dtype))
    for dtype, calls in (("bfloat16", 90), ("float16", 20), ("float32", 20), ("float64", 20))
]


@pytest.mark.parametrize(("dtype", "calls"), ATTENTION)
def test_memcheck_of_attention(dtype: str, calls: int, child) -> None:
    _check(child, calls)


@pytest.mark.child("attention_sanitize", "racecheck")
def test_racecheck_of_attention(child) -> None:
    _check(child, 50)
