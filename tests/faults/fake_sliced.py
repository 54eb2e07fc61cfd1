"""float32 products of few rows, whose warps share K out: launches in clusters, and the shared
memory that spreads blocks evenly over the multiprocessors. And those of batch_invariant()."""

from __future__ import annotations

import pytest
import torch
from c_layouts import MATMUL, structure
from faults import catalogs, launch_params, products
from faults.forked import forked

PARAMS = structure(f"{MATMUL}/matmul_params.h", "MatmulParams")
IN_CHAINS = 2  # kFlagInChains
OF_MULTIPROCESSOR = 228 << 10
OF_BLOCK = 1 << 10  # that the driver takes


def launches_of(driver, a, b, batch_invariant: bool = False) -> list[dict]:
    return products.launched(driver, a, b, "", batch_invariant, tf32=False)[-1]


def rows(m: int, k: int) -> tuple:
    return (m, k), (k, 1)


def columns(k: int, n: int) -> tuple:
    return (k, n), (1, k)


@pytest.mark.parametrize(("n", "held"), [(4096, 2), (6272, 3)])
@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_two_blocks_of_a_cluster_share_k_and_spread_evenly(
    driver, catalog, layout: str, n: int, held: int
) -> None:
    k = 4096
    b = rows(k, n) if layout == "nn" else columns(k, n)
    (record,) = launches_of(driver, rows(64, k), b)
    assert record["kernel"] == f"sliced_matmul_f32_{layout}_64x32x64"
    assert record["grid"] == [n // 32 * 2, 1, 1]
    assert record["attributes"]["4"] == [2, 1, 1]
    params = launch_params.read(record, PARAMS)
    assert (params.splits, params.k_tiles_per_split) == (2, 32)
    assert (params.tiles_m, params.tiles_n, params.partial) == (1, n // 32, 0)
    # As many fit as each has to hold, and no more.
    assert OF_MULTIPROCESSOR // (record["shared"] + OF_BLOCK) == held
    assert held == -(-record["grid"][0] // 132)


def test_no_cluster_is_launched_where_the_device_runs_none(driver, catalog) -> None:
    """If a process may use only few multiprocessors, as under MPS, clusters do not fit."""

    def run() -> list[dict]:
        torch.backends.cuda.matmul.allow_tf32 = False
        driver.set("largest_cluster", 1)
        products.multiply(rows(64, 4096), columns(4096, 4096))
        return driver.launches()

    launches = forked(run)
    assert launches
    assert all(x["attributes"].get("4", [1, 1, 1]) == [1, 1, 1] for x in launches)


def check_chains(launches: list[dict]) -> str:
    """A batch-invariant product's kernel, which adds each 256 terms from zero: of all of K, or of
    one such chain, which another kernel adds to those before."""
    first, *reduce = [each for each in launches if not each["kernel"].startswith("transpose")]
    entries = {kernel["symbol"]: kernel for kernel in catalogs.kernels_of("matmul")}
    entry, params = entries[first["kernel"]], launch_params.read(first, PARAMS)
    assert entry["chain"] == 256
    assert len(reduce) == (params.splits > 1)
    if reduce:
        assert params.k_tiles_per_split * entry["tile"][2] == entry["chain"]
        assert reduce[0]["kernel"] == "reduce_matmul_f32"
        assert launch_params.read(reduce[0], PARAMS).splits == -params.splits
    return first["kernel"].split("_f32_")[1]


@pytest.mark.parametrize("layout", ["nn", "nt"])
@pytest.mark.parametrize("m", [1, 16, 64, 65, 300, 4096])
def test_batch_invariant_products_are_added_up_in_chains_of_256_terms(
    driver, catalog, m: int, layout: str
) -> None:
    for k, n in ((2040, 4096), (4096, 4096), (7168, 128)):
        b = rows(k, n) if layout == "nn" else columns(k, n)
        assert check_chains(launches_of(driver, rows(m, k), b, batch_invariant=True))


@pytest.mark.parametrize(("n", "tile"), [(4096, "64x32x16"), (6144, "64x48x16")])
@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_chains_of_few_tiles_are_divided_among_the_warps_of_a_block(
    driver, catalog, layout: str, n: int, tile: str
) -> None:
    k = 4096
    b = rows(k, n) if layout == "nn" else columns(k, n)
    (record,) = launches_of(driver, rows(64, k), b, batch_invariant=True)
    assert record["kernel"] == f"sliced_matmul_f32_{layout}_{tile}"
    assert (record["grid"], record["block"]) == ([128, 1, 1], [256, 1, 1])
    assert record["attributes"].get("4", [1, 1, 1]) == [1, 1, 1]
    params = launch_params.read(record, PARAMS)
    assert (params.splits, params.tiles_m, params.tiles_n) == (1, 1, 128)


def test_large_products_are_added_up_in_chains_by_the_tiles_of_others(driver, catalog) -> None:
    n = 4096
    copies, record = launches_of(driver, rows(n, n), columns(n, n), batch_invariant=True)
    assert copies["kernel"].startswith("transpose")
    assert record["kernel"] == "simt_matmul_f32_tn_chains_128x128x8"
    *_, without = launches_of(driver, rows(n, n), columns(n, n))
    assert without["kernel"] == "simt_matmul_f32_tn_128x128x8"
    assert record["grid"] == without["grid"]


@pytest.mark.parametrize("a", [((8, 4094), (4095, 1)), ((8, 4096), (1, 8))])
def test_operands_of_other_layouts_have_a_kernel_of_few_rows(driver, catalog, a: tuple) -> None:
    launches = launches_of(driver, a, columns(a[0][1], 4096), batch_invariant=True)
    assert check_chains(launches) == "any_16x32x64"


@pytest.mark.parametrize(("m", "tile"), [(16, "16x32x64"), (32, "32x32x64")])
def test_few_rows_have_tiles_of_as_many_rows(driver, catalog, m: int, tile: str) -> None:
    """With the bits that batch_invariant() asks for, and as exact as PyTorch's without it."""
    b = rows(4096, 4096)
    assert check_chains(launches_of(driver, rows(m, 4096), b, batch_invariant=True)) == f"nn_{tile}"
    without, *_ = launches_of(driver, rows(m, 4096), b)
    assert without["kernel"] == f"simt_matmul_f32_nn_{tile}"


@pytest.mark.parametrize(("k", "chains"), [(4094, 1), (4096, 4), (4098, 4), (16384, 4)])
def test_batch_invariant_float64_has_four_chains_of_a_long_k(
    driver, catalog, k: int, chains: int
) -> None:
    def launches(m: int, n: int) -> list[dict]:
        a, b = (*rows(m, k), torch.float64), (*rows(k, n), torch.float64)
        return launches_of(driver, a, b, batch_invariant=True)

    few, *reduce = launches(64, 1024)
    of_chain = launch_params.read(few, PARAMS).k_tiles_per_split
    assert len(reduce) == (chains > 1)
    assert [launch_params.read(each, PARAMS).splits for each in reduce] == [-4] * len(reduce)
    (many,) = launches(4096, 4096)
    params = launch_params.read(many, PARAMS)
    assert (params.splits, params.flags) == (1, IN_CHAINS if chains > 1 else 0)
    if chains > 1:
        assert params.k_tiles_per_split == of_chain
        assert few["grid"][1] == chains
