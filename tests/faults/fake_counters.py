"""Counters of streamed products on the stand-in driver: whose they are, and that they are zero.

A launch whose counters are not zero, or that counts where another one does at the same time, gives
wrong sums.
"""

from __future__ import annotations

import ctypes

import c_layouts
import pytest
import torch
from fake_driver import tensors
from faults import catalogs, launch_params
from faults.forked import forked

from torch_cubin._native import library
from torch_cubin._tuning import measure

Params = c_layouts.structure(f"{c_layouts.MATMUL}/sm90_params.h", "Sm90MatmulParams")
M, N, K = 1024, 1024, 12032  # 64 tiles of 128 x 128
OF_DEVICE, OF_CHUNK, OF_STREAMS = 16384, 512, 1024  # csrc/runtime/counters.cpp


@pytest.fixture(autouse=True)
def catalog(driver, tmp_path, monkeypatch) -> None:
    kernels = catalogs.kernels_of("matmul", lambda kernel: kernel["kind"] == "sm90")
    catalogs.install(driver, tmp_path, monkeypatch, kernels)


def multiply(times: int = 1) -> None:
    """So many streamed products."""
    a = tensors.strided((M, K), (1, M), torch.bfloat16)
    b = tensors.empty(K, N, dtype=torch.bfloat16)
    with measure.watching():
        library.force_config("sm90 128x128 streamed evenly")
        for _ in range(times):
            torch.ops.cubin._matmul(a, b)


def counters(driver, *counts: int) -> list[list[int]]:
    """The addresses of the launches' counters, in lists of so many; no other launches were made."""
    params = [launch_params.read(launch, Params) for launch in driver.launches()]
    assert all(each.stream_tiles > 0 for each in params)
    addresses = iter([each.counters for each in params])
    found = [[next(addresses) for _ in range(count)] for count in counts]
    assert list(addresses) == []
    return found


def test_a_stream_has_the_same_counters_for_all_launches(driver) -> None:
    def work() -> list:
        multiply(3)
        driver.set("stream id", 7)
        multiply(3)
        driver.set("stream id", 8)
        with driver.default_streams():
            multiply(3)
        found = counters(driver, 3, 3, 3)
        zeros = [list((ctypes.c_int * 512).from_address(each[0])) for each in found]
        return [found, zeros, driver.calls("cuMemAlloc"), driver.violations()]

    found, zeros, allocations, violations = forked(work)
    assert [len(set(each)) for each in found] == [1, 1, 1]
    assert len({each[0] for each in found}) == 3
    assert zeros == [[0] * 512] * 3
    assert (allocations, violations) == (1, [])


@pytest.mark.parametrize("before", [0, 1])
def test_each_captured_launch_has_counters_until_its_graph_is_destroyed(driver, before) -> None:
    """The first launch of all may be captured: the memory is allocated during the capture."""

    def work() -> list:
        multiply(before)
        with driver.setting("capturing", 1):
            multiply(5)
        multiply()
        driver.destroy_graph()
        with driver.setting("capturing", 1):
            multiply(5)
        found = counters(driver, before, 5, 1, 5)
        return [*found, driver.calls("cuMemAlloc"), driver.violations()]

    first, captured, beside, again, allocations, violations = forked(work)
    assert len({*first, *beside}) == 1
    assert len(set(captured)) == 5
    assert not {*first, *beside} & {*captured, *again}
    assert set(again) == set(captured)
    assert (allocations, violations) == (1, [])


def test_launches_beyond_the_counters_of_a_device_fill_their_own(driver) -> None:
    def work() -> list:
        with driver.setting("capturing", 1):
            multiply(OF_DEVICE + 10)
        multiply()
        driver.destroy_graph()
        multiply()
        found = counters(driver, OF_DEVICE, 10, 1, 1)
        return [*found, driver.calls("cuMemAlloc"), driver.violations()]

    captured, beyond, beside, later, allocations, violations = forked(work)
    assert len(set(captured)) == OF_DEVICE
    assert not {*beyond, *beside} & set(captured)
    assert later[0] in captured
    assert (allocations, violations) == (OF_DEVICE / OF_CHUNK, [])


def test_streams_leave_counters_to_captures(driver) -> None:
    def work() -> list:
        for stream in range(OF_STREAMS + 1):
            driver.set("stream id", stream)
            multiply()
        driver.set("stream id", 3)
        multiply()
        return [*counters(driver, OF_STREAMS, 1, 1), driver.calls("cuMemAlloc")]

    found, beyond, fourth, allocations = forked(work)
    assert len(set(found)) == OF_STREAMS
    assert beyond[0] not in found
    assert fourth == [found[3]]
    assert allocations == OF_STREAMS / OF_CHUNK


@pytest.mark.parametrize("code", [2, 999])
@pytest.mark.parametrize(
    ("name", "captured"),
    [
        ("cuMemAlloc", 0), ("cuStreamCreate", 0), ("cuMemsetD8Async", 0),
        ("cuStreamSynchronize", 0), ("cuStreamGetId", 0), ("cuUserObjectCreate", 1),
        ("cuGraphRetainUserObject", 1),
    ],
)  # fmt: skip
def test_a_launch_fills_its_own_where_the_driver_refuses(driver, name, captured, code) -> None:
    def work() -> list:
        driver.fail(name, code)
        with driver.setting("capturing", captured):
            multiply(3)
        return [*counters(driver, 1, 2), driver.calls("cuMemFree"), driver.violations()]

    filled, found, freed, violations = forked(work)
    assert filled[0] not in found
    assert len(set(found)) == 1 + captured
    without_use = name in ("cuStreamCreate", "cuMemsetD8Async", "cuStreamSynchronize")
    assert (freed, violations) == (int(without_use), [])
