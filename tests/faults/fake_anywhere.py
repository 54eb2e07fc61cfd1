"""Products whose rows begin anywhere by anywhere.cu: which are offered, parameters, grids."""

from __future__ import annotations

import ctypes

import pytest
import torch
from c_layouts import MATMUL, structure
from fake_driver import tensors
from faults import launch_params, products
from faults.forked import forked

from torch_cubin._native import library

PARAMS = structure(f"{MATMUL}/matmul_params.h", "MatmulParams")


def multiply(driver, a, b, config: str = "") -> tuple[int, int, dict, ctypes.Structure]:
    """Addresses of the operands, the launch, and its parameter."""
    first, second, _, (record,) = products.launched(driver, a, b, config)
    return first, second, record, launch_params.read(record, PARAMS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_in_one_launch(driver, catalog, dtype: torch.dtype) -> None:
    m, n, k = 2947, 2452, 42
    a, b = ((m, k), (k + 1, 1), dtype, 0, 3), ((k, n), (1, k), dtype)
    first, second, record, params = multiply(driver, a, b, "anywhere 128x128 short")
    short = {torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    assert record["kernel"] == f"anywhere_matmul_{short}_128x128_short"
    assert (params.a, params.b, params.bias, params.partial) == (first, second, 0, 0)
    assert [params.m, params.n, params.k, params.batch, params.splits] == [m, n, k, 1, 1]
    assert [params.a_stride_m, params.a_stride_k] == [k + 1, 1]
    assert [params.b_stride_n, params.b_stride_k] == [k, 1]
    assert (params.tiles_m, params.tiles_n) == (24, 20)
    assert record["grid"] == [20, 24, 1]
    assert record["block"] == [256, 1, 1]


def test_k_is_split_over_a_cluster(driver, catalog) -> None:
    m, n, k = 81, 4008, 7090
    a, b = ((m, k), (k, 1), torch.bfloat16), ((k, n), (n, 1), torch.bfloat16)
    *_, record, params = multiply(driver, a, b, "anywhere 64x128 4 splits")
    assert record["kernel"] == "anywhere_matmul_bf16_64x128"
    assert (params.tiles_m, params.tiles_n) == (2, 32)
    assert (params.splits, params.k_tiles_per_split) == (4, 28)  # of 64 elements, 111 in all
    assert record["grid"] == [32 * 4, 2, 1]
    assert record["attributes"]["4"] == [4, 1, 1]


def test_batches(driver, catalog) -> None:
    a = ((5, 50, 67), (50 * 67, 1, 50), torch.bfloat16)
    b = ((5, 67, 131), (67 * 131, 131, 1), torch.bfloat16)
    *_, record, params = multiply(driver, a, b, "anywhere 64x128")
    assert (params.m, params.batch, params.batch_size[0]) == (50, 5, 5)
    assert (params.a_batch_stride[0], params.b_batch_stride[0]) == (50 * 67, 67 * 131)
    assert [params.a_stride_m, params.a_stride_k] == [1, 50]
    assert record["grid"] == [2, 1, 5]


def test_k_of_one_has_the_stride_of_a_contiguous_dim(driver, catalog) -> None:
    a, b = ((60, 1), (7, 5), torch.bfloat16), ((1, 70), (3, 1), torch.bfloat16)
    *_, params = multiply(driver, a, b, "anywhere 64x128")
    assert (params.a_stride_m, params.a_stride_k, params.b_stride_n) == (7, 1, 1)


def configs_of(driver, *product, **options) -> set[str]:
    return products.configs_of("anywhere", *product, **options)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (((60, 64), (67, 1)), ((64, 70), (70, 1)), {"", " short"}),
        (((60, 65), (1, 61)), ((65, 70), (1, 65)), {"", " short", " 2 splits"}),
        (((60, 64), (64, 1)), ((64, 70), (70, 1)), {"", " short"}),  # A is aligned
        (((60, 64), (64, 1)), ((64, 72), (72, 1)), set()),  # both are
        (((60, 128), (129, 1)), ((128, 70), (70, 1)), {"", " short", " 2 splits"}),
        (((60, 129), (129, 1)), ((129, 70), (70, 1)), {"", " 2 splits", " 3 splits"}),  # K is long
        # None is empty.
        (((60, 257), (257, 1)), ((257, 70), (70, 1)), {"", *(f" {n} splits" for n in (2, 3, 5))}),
        (((60, 65), (131, 2)), ((65, 70), (70, 1)), set()),  # neighbours apart
    ],
)
def test_operands_that_the_kernels_take(driver, catalog, a, b, expected: set[str]) -> None:
    a, b = (*a, torch.bfloat16), (*b, torch.bfloat16)
    names = configs_of(driver, a, b)
    tiles = {name.replace("64x128", "64x64").replace("128x128", "64x64") for name in names}
    assert tiles == {f"anywhere 64x64{text}" for text in expected}
    # Of one chain of K.
    chains = {"": "64x128", " short": "128x128 short"}
    assert configs_of(driver, a, b, batch_invariant=True) == {
        f"anywhere {tile}" for text, tile in chains.items() if text in expected
    }


def test_tf32_of_a_long_k(driver, catalog) -> None:
    """In tiles of 64x64 alone; K in parts of 32 elements."""
    a, b = ((2, 74, 346), (74 * 346, 346, 1), torch.float32), ((2, 346, 70), (346 * 70, 1, 346))
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        *_, record, params = multiply(driver, a, (*b, torch.float32), "anywhere 64x64 4 splits")
        names = configs_of(driver, a, (*b, torch.float32))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    assert record["kernel"] == "anywhere_matmul_tf32_64x64"
    assert (params.splits, params.k_tiles_per_split, params.batch) == (4, 3, 2)
    assert record["grid"] == [2 * 4, 2, 2]
    splits = ("", *(f" {n} splits" for n in (2, 3, 4, 6)), " 11 splits in memory")
    assert names == {f"anywhere 64x64{text}" for text in splits}


def test_more_splits_than_a_cluster_has_leave_their_sums_to_another_kernel(driver, catalog) -> None:
    x = ((2, 74, 1200), (74 * 1201, 1201, 1), torch.bfloat16)
    y = ((2, 1200, 74), (74 * 1201, 1, 1201), torch.bfloat16)
    config = "anywhere 64x64 10 splits in memory"

    def run() -> list:
        library.watch_plans(True)
        library.force_config(config)
        torch.ops.cubin._matmul(tensors.strided(*x), tensors.strided(*y))
        return driver.launches()

    records = forked(run)
    assert [each["kernel"] for each in records] == [
        "anywhere_matmul_bf16_64x64",
        "reduce_matmul_bf16",
    ]
    first, second = (launch_params.read(each, PARAMS) for each in records)
    assert (first.splits, first.k_tiles_per_split) == (10, 2)  # of 64 elements, 19 in all
    assert first.partial == second.partial != 0
    assert records[0]["grid"] == [2 * 10, 2, 2]
    assert records[0]["attributes"].get("4", [1, 1, 1]) == [1, 1, 1]
    # All splits run at a time, and none are offered where a cluster has as many.
    names = {name for name in configs_of(driver, x, y) if name.endswith(" in memory")}
    assert names == {f"anywhere 64x64 {count} splits in memory" for count in (10, 19)}


def test_blocks_are_priced_as_many_at_a_time_as_share_a_multiprocessor(driver, catalog) -> None:
    """Two at once take little longer than one, a third begins when these have ended."""

    def prices() -> list[float]:
        blocks = (132, 133, 264, 265)  # of 64 x 128, on 132 multiprocessors
        case = {"m": 64, "k": 257, "batch": 1, "math": "16_bit", "a": "k_elements"}
        cases = [{**case, "n": 128 * n, "b": "own_lines"} for n in blocks]
        found = []
        for plan in library.planned(cases, configs=True):
            found += [c["microseconds"] for c in plan["configs"] if c["name"] == "anywhere 64x128"]
        return found

    one_each, one_more, two_each, a_third = forked(prices)
    assert one_more > 1.1 * one_each
    assert two_each < 1.1 * one_more
    assert a_third > 1.25 * two_each
