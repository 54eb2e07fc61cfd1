"""Small products whose rows begin anywhere: which go to unaligned.cu, and its parameters."""

from __future__ import annotations

import ctypes

import pytest
import torch
from c_layouts import MATMUL, structure
from fake_driver import tensors
from faults import launch_params, products
from faults.forked import forked

import torch_cubin
from torch_cubin._native import library
from torch_cubin._tuning import measure

PARAMS = structure(f"{MATMUL}/matmul_params.h", "MatmulParams")


def multiply(driver, a, b, config: str = "", batch_invariant: bool = False, bias: int = 0) -> list:
    """Addresses of the operands, and what was launched."""

    def run() -> list:
        x, y = (tensors.strided(*each) for each in (a, b))
        library.watch_plans(True)
        library.force_config(config)
        if batch_invariant:
            with torch_cubin.batch_invariant():
                torch.ops.cubin._matmul(x, y)
        elif bias:
            torch.ops.cubin._linear(x, y, tensors.empty(bias, dtype=x.dtype))
        else:
            torch.ops.cubin._matmul(x, y)
        return [x.data_ptr(), y.data_ptr(), driver.launches()]

    return forked(run)


def params_of(record: dict) -> ctypes.Structure:
    return launch_params.read(record, PARAMS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_small_odd_product_is_one_launch(driver, catalog, dtype: torch.dtype) -> None:
    m, n, k = 97, 156, 66
    a, b = ((m, k), (k + 1, 1), dtype, 0, 3), ((k, n), (n + 1, 1), dtype)
    first, second, (record,) = multiply(driver, a, b)
    short = {torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    assert record["kernel"] == f"unaligned_matmul_{short}_nn_32x64"
    params = params_of(record)
    assert (params.a, params.b, params.bias, params.partial) == (first, second, 0, 0)
    assert [params.m, params.n, params.k, params.batch, params.splits] == [m, n, k, 1, 1]
    assert [params.a_stride_m, params.b_stride_k] == [k + 1, n + 1]
    assert (params.tiles_m, params.tiles_n, params.k_tiles_per_split) == (4, 3, 1)
    assert record["grid"] == [12, 1, 1]
    assert record["block"] == [256, 1, 1]


def test_k_is_split_over_a_cluster(driver, catalog) -> None:
    m, n, k = 134, 34, 2385
    a, b = ((m, k), (k, 1), torch.bfloat16), ((k, n), (1, k), torch.bfloat16)
    *_, (record,) = multiply(driver, a, b, config="unaligned 64x64 4 splits")
    assert record["kernel"] == "unaligned_matmul_bf16_nt_64x64"
    params = params_of(record)
    assert (params.tiles_m, params.tiles_n) == (3, 1)
    assert (params.splits, params.k_tiles_per_split) == (4, 5)  # of 128: 5, 5, 5 and 4
    assert record["grid"] == [3 * 4, 1, 1]
    assert record["attributes"]["4"] == [4, 1, 1]


def test_batches_that_share_an_operand(driver, catalog) -> None:
    a = ((5, 50, 67), (50 * 67, 67, 1), torch.bfloat16)
    b = ((5, 67, 33), (0, 33, 1), torch.bfloat16)
    *_, (record,) = multiply(driver, a, b, config="unaligned 32x64")
    params = params_of(record)
    # One matrix for all of them: their rows are one product's.
    assert (params.m, params.batch) == (250, 1)
    b = ((5, 67, 33), (67 * 33, 33, 1), torch.bfloat16)
    *_, (record,) = multiply(driver, a, b, config="unaligned 32x64")
    params = params_of(record)
    assert (params.m, params.batch, params.batch_size[0]) == (50, 5, 5)
    assert (params.a_batch_stride[0], params.b_batch_stride[0]) == (50 * 67, 67 * 33)
    assert record["grid"] == [2 * 5, 1, 1]


def configs_of(driver, *product, **options) -> set[str]:
    return products.configs_of("unaligned", *product, **options)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (((60, 65), (65, 1)), ((65, 70), (70, 1)), True),
        (((60, 65), (65, 1)), ((65, 70), (1, 65)), True),
        (((60, 64), (64, 1)), ((64, 70), (70, 1)), True),  # A is aligned
        (((60, 64), (64, 1)), ((64, 72), (72, 1)), False),  # both are
        (((60, 65), (1, 61)), ((65, 70), (70, 1)), False),  # A along M
        (((60, 65), (131, 2)), ((65, 70), (70, 1)), False),  # neighbours apart
        (((1300, 1301), (1301, 1)), ((1301, 1300), (1300, 1)), False),  # too large
    ],
)
def test_operands_that_the_kernels_take(driver, catalog, a, b, expected: bool) -> None:
    a, b = (*a, torch.bfloat16), (*b, torch.bfloat16)
    assert bool(configs_of(driver, a, b)) == expected
    found = configs_of(driver, a, b, batch_invariant=True)
    assert found == ({"unaligned 32x64 in order"} if expected else set())


def test_sums_of_batch_invariant_products_are_no_parts(driver, catalog) -> None:
    a, b = ((275, 95), (95, 1), torch.bfloat16), ((95, 107), (1, 95), torch.bfloat16)
    *_, (record,) = multiply(driver, a, b, batch_invariant=True)
    assert record["kernel"] == "unaligned_matmul_bf16_nt_in_order_32x64"
    params = params_of(record)
    assert (params.splits, params.k_tiles_per_split) == (1, 1)
    assert record["grid"] == [9 * 2, 1, 1]


def test_tf32_of_rows_along_k(driver, catalog) -> None:
    a, b = ((60, 129), (129, 1), torch.float32), ((129, 70), (1, 129), torch.float32)
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        *_, (record,) = multiply(driver, a, b, config="unaligned 32x64 2 splits")
        along_n = configs_of(driver, a, ((129, 70), (70, 1), torch.float32))
        both = ((60, 64), (64, 1), torch.float32), ((64, 72), (1, 64), torch.float32)
        assert not along_n
        assert not configs_of(driver, *both)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    assert record["kernel"] == "unaligned_matmul_tf32_nt_32x64"
    params = params_of(record)
    assert (params.splits, params.k_tiles_per_split) == (2, 1)  # of 128


def test_short_k_is_not_split_further_than_its_tiles(driver, catalog) -> None:
    a, b = ((60, 300), (301, 1), torch.bfloat16), ((300, 70), (71, 1), torch.bfloat16)
    expected = {f"unaligned 32x64{text}" for text in ("", " 2 splits", " 3 splits")}
    assert configs_of(driver, a, b) == expected


@pytest.mark.parametrize("largest", [1, 2, 4])
def test_splits_beyond_the_devices_cluster_capacity_are_not_launched(
    driver, catalog, largest: int
) -> None:
    """If a process may use only few multiprocessors, as under MPS, clusters do not fit."""

    def run() -> list[dict]:
        driver.set("largest_cluster", largest)
        a, b = ((141, 3395), (3395, 1), torch.bfloat16), ((3395, 117), (1, 3395), torch.bfloat16)
        x, y = tensors.strided(*a), tensors.strided(*b)
        torch.ops.cubin._matmul(x, y)  # 7 splits, given the capacity
        last = []
        with measure.watching():
            for splits in (largest, 2 * largest):
                config = "unaligned 32x64" + (f" {splits} splits" if splits > 1 else "")
                library.force_config(config)
                torch.ops.cubin._matmul(x, y)
                last.append(driver.launches()[-1])
        return [driver.launches(), *last]

    launches, with_capacity, without = forked(run)
    assert params_of(with_capacity).splits == largest
    assert with_capacity["attributes"].get("4", [1, 1, 1]) == [largest, 1, 1]
    assert without["attributes"].get("4", [1, 1, 1])[0] <= largest
    assert all(x["attributes"].get("4", [1])[0] <= largest for x in launches)
