"""Products whose rows begin anywhere by residues.cu: which are offered, maps, grids."""

from __future__ import annotations

import ctypes

import pytest
import torch
from c_layouts import MATMUL, structure
from faults import launch_params, products
from faults.forked import forked
from faults.launch_params import read_map

from torch_cubin._native import library

PARAMS = structure(f"{MATMUL}/residues_params.h", "ResidueParams")


def multiply(driver, a, b, config: str) -> tuple[int, int, int, dict, ctypes.Structure]:
    """Addresses of the operands and of the output, the launch, and its parameter."""
    first, second, out, (record,) = products.launched(driver, a, b, config)
    return first, second, out, record, launch_params.read(record, PARAMS)


def test_rows_of_a_residue_are_a_matrix(driver, catalog) -> None:
    m, n, k, pitch, offset = 1003, 81, 203, 205, 3
    a, b = ((m, k), (pitch, 1), torch.bfloat16, 0, offset), ((k, n), (1, k), torch.bfloat16)
    first, _, out, record, params = multiply(driver, a, b, "residues 128x128 of a 2 splits")
    assert record["kernel"] == "residues_matmul_bf16_nt_128x128"
    assert (params.rows_s, params.rows_r, params.k, params.batch) == (m, n, k, 1)
    assert (params.out, params.out_stride_s, params.out_stride_r) == (out, n, 1)
    assert (params.tiles_s, params.tiles_r, params.splits) == (1, 1, 2)  # 126 rows of a residue
    assert record["grid"] == [8 * 2, 1, 1]
    assert record["attributes"]["4"] == [2, 1, 1]

    behind = first % 16 // 2
    assert (params.s.stride, params.s.offset, params.s.rows) == (pitch, behind, m)
    whole, rest = (read_map(each) for each in params.s.map)
    for map_, residues, rows in ((whole, 8, m // 8), (rest, m % 8, m // 8 + 1)):
        assert map_["address"] == first - 2 * behind
        # Nothing behind the last row's last element.
        assert map_["dims"] == [behind + (residues - 1) * pitch + k, rows]
        assert map_["strides"] == [8 * pitch * 2]
        assert (map_["box"], map_["swizzle"]) == ([64, 128], 3)
    assert (params.r.stride, params.r.rows) == (k, n)
    maps = [read_map(each) for each in params.r.map]
    assert [map_["dims"][1] for map_ in maps] == [10, 11]
    assert [(map_["box"], map_["swizzle"]) for map_ in maps] == [([64, 16], 3)] * 2


def test_the_weights_may_be_the_operand_of_residues(driver, catalog) -> None:
    m, n, k = 81, 4008, 709
    a, b = ((m, k), (k, 1), torch.float16), ((k, n), (1, k), torch.float16)
    _, second, out, record, params = multiply(driver, a, b, "residues 128x128 of b")
    assert (params.out, params.out_stride_s, params.out_stride_r) == (out, 1, n)
    assert (params.rows_s, params.rows_r) == (n, m)
    assert read_map(params.s.map[0])["address"] == second
    assert record["grid"] == [8 * 4, 1, 1]  # 501 rows of each residue


def test_batches_follow_one_another(driver, catalog) -> None:
    a = ((3, 50, 67), (50 * 67, 67, 1), torch.bfloat16)
    b = ((3, 67, 33), (0, 1, 67), torch.bfloat16)
    b_own = ((3, 67, 33), (67 * 33, 1, 67), torch.bfloat16)
    *_, params = multiply(driver, a, b_own, "residues 128x128 of a")
    assert (params.rows_s, params.batch, params.out_batch_stride) == (50, 3, 50 * 33)
    assert (params.s.rows, params.s.batch_rows) == (150, 50)
    assert (params.r.rows, params.r.batch_rows) == (99, 33)
    a_wide = ((3, 50, 67), (51 * 67, 67, 1), torch.bfloat16)  # a gap between batches
    assert not configs_of(driver, a_wide, b)


def configs_of(driver, *product, **options) -> set[str]:
    return products.configs_of("residues", *product, **options)


@pytest.mark.parametrize(
    ("a", "b", "sides"),
    [
        (((60, 65), (65, 1)), ((65, 70), (1, 65)), {"a", "b"}),
        (((60, 64), (64, 1)), ((64, 70), (1, 65)), {"a", "b"}),  # A is aligned
        (((60, 64), (64, 1)), ((64, 72), (1, 64)), set()),  # both are
        (((60, 65), (65, 1)), ((65, 70), (70, 1)), set()),  # B along N
        (((60, 65), (1, 61)), ((65, 70), (1, 65)), set()),  # A along M
        (((60, 65), (131, 2)), ((65, 70), (1, 65)), set()),  # neighbours apart
        (((60, 65), (33, 1)), ((65, 70), (1, 65)), set()),  # rows begin within others
        (((5, 65), (65, 1)), ((65, 70), (1, 65)), set()),  # residues without a row
        (((60, 65), (65, 1)), ((65, 130), (1, 65)), {"b"}),  # of N two tiles
    ],
)
def test_operands_that_the_kernels_take(driver, catalog, a, b, sides: set[str]) -> None:
    a, b = (*a, torch.bfloat16), (*b, torch.bfloat16)
    assert {name.split(" of ")[1][0] for name in configs_of(driver, a, b)} == sides
    assert not configs_of(driver, a, b, batch_invariant=True)


@pytest.mark.parametrize(("k", "expected"), [(185, {""}), (186, {"", " 2 splits"})])
def test_short_k_is_not_split(driver, catalog, k: int, expected: set[str]) -> None:
    a, b = ((60, k), (k, 1), torch.bfloat16), ((k, 70), (1, k), torch.bfloat16)
    names = configs_of(driver, a, b)
    assert {n.partition(" of a")[2] for n in names if " of a" in n} == expected


@pytest.mark.parametrize("symmetric", [False, True])
def test_not_where_the_result_is_symmetric(driver, catalog, symmetric: bool) -> None:
    """Sums of a row and a column, and of the mirror image, would be added in another order."""
    product = {"m": 100, "n": 100, "k": 651, "batch": 1, "math": "16_bit", "dtype": "bfloat16"}
    product |= {"a": "k_elements", "b": "k_elements", "symmetric": symmetric}
    (plan,) = forked(lambda: library.planned([product], True))
    assert any(c["name"].startswith("residues") for c in plan["configs"]) == (not symmetric)
