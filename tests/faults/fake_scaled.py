"""What the kernels of scaled_matmul and quantize are launched with, on the stand-in driver."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from c_layouts import MATMUL, structure
from fake_driver import tensors
from faults import catalogs, launch_params
from faults.forked import error_of, forked, launches_of
from faults.launch_params import read_map
from scaled_cases import BLOCK_1X128, BLOCK_128X128, E4M3, E5M2, ROW, TENSOR, scale_shape

from torch_cubin._native import library
from torch_cubin._tuning import measure

PARAMS = structure(f"{MATMUL}/sm90_scaled_params.h", "Sm90ScaledParams")
GROUP_ROWS = structure(f"{MATMUL}/group_rows_params.h", "GroupRowsParams")
QUANTIZE = structure("csrc/kernels/quantize/quantize_params.h", "QuantizeParams")
BLOCKS, UNALIGNED, POWER_OF_TWO, WHOLE_LINES = 1, 2, 4, 8
op = torch.ops.cubin._scaled_matmul
quantize = torch.ops.cubin._quantize


@pytest.fixture
def catalog(driver, tmp_path, monkeypatch) -> dict[str, dict]:
    """A catalog of the kernels of both ops, by name."""
    families = ("scaled", "groups", "quantize")
    kernels = [kernel for family in families for kernel in catalogs.kernels_of(family)]
    catalogs.install(driver, tmp_path, monkeypatch, kernels)
    return {kernel["symbol"]: kernel for kernel in kernels}


def launches_in(catalog, driver, call: Callable[[], object]) -> list[dict]:
    return [launch for launch in launches_of(driver, call) if launch["kernel"] in catalog]


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return tensors.empty(*shape, dtype=dtype)


def multiply(m, n, k, recipes=(ROW, ROW), types=(E4M3, E4M3), **options) -> None:
    a, b = empty(m, k, dtype=types[0]), empty(n, k, dtype=types[1])
    b = tensors.strided((k, n), (1, k), types[1])
    scale_a = empty(*scale_shape(recipes[0], m, k))
    op(a, b, scale_a, recipes[0], empty(*scale_shape(recipes[1], n, k)), recipes[1], **options)


@pytest.mark.parametrize("recipes", [(TENSOR, ROW), (ROW, TENSOR), (4, 5), (5, 4), (4, 4)])
def test_parameters(driver, catalog, recipes) -> None:
    m, n, k = 300, 520, 1040
    (launch,) = launches_in(catalog, driver, lambda: multiply(m, n, k, recipes))
    kernel, params = catalog[launch["kernel"]], launch_params.read(launch, PARAMS)
    tile_m, tile_n, _ = kernel["tile"]
    a, b, out = map(read_map, (params.a, params.b, params.out_map))
    assert (a["dims"], a["box"], a["strides"]) == ([k, m], [128, tile_m], [k])
    assert (b["dims"], b["box"], b["strides"]) == ([k, n], [128, tile_n], [k])
    assert (out["dims"], out["box"]) == ([n, m], [min(tile_n, 64), 16])
    assert (params.m, params.n, params.k_blocks, params.out_stride) == (m, n, 9, n)
    assert bool(params.flags & BLOCKS) == (recipes[0] >= BLOCK_1X128)
    assert kernel["math"] == ("columns" if recipes[1] == BLOCK_1X128 else "promoted")
    blocks_m, blocks_n = -(-m // 128), -(-n // 128)
    strides = {TENSOR: (0, 0, 0), ROW: (1, 0, 0), BLOCK_1X128: (9, 1, 0)}
    sides = (
        (recipes[0], blocks_m, (params.a_stride, params.a_stride_k, params.a_shift)),
        (recipes[1], blocks_n, (params.b_stride, params.b_stride_k, params.b_shift)),
    )
    for recipe, blocks, found in sides:
        assert found == (strides[recipe] if recipe != BLOCK_128X128 else (1, blocks, 7))
    assert params.stage_bytes == 128 * (tile_m + tile_n)


def test_boxes_have_no_rows_that_do_not_exist(driver, catalog) -> None:
    (launch,) = launches_in(catalog, driver, lambda: multiply(3, 64, 256))
    params = launch_params.read(launch, PARAMS)
    assert read_map(params.a)["box"] == [128, 3]
    assert params.stage_bytes == 128 * (3 + catalog[launch["kernel"]]["tile"][1])


def test_unaligned_outputs_have_no_map(driver, catalog) -> None:
    (launch,) = launches_in(catalog, driver, lambda: multiply(64, 129, 256))
    assert launch_params.read(launch, PARAMS).flags & UNALIGNED


def test_tiles_whose_columns_are_no_multiple_of_32(driver, catalog) -> None:
    """Fast sums are stored by panels that divide the tile, others and those of two panels by whole
    ones that overlap."""
    names = [name for name, own in catalog.items() if own["tile"][1] % 32 in (8, 16)]
    fast = [catalog[name]["math"] == "fast" for name in names]
    assert set(fast) == {False, True}

    def run() -> None:
        with measure.watching():
            for name, is_fast in zip(names, fast, strict=True):
                library.force_config(name)
                for dtype in (torch.bfloat16, torch.float32):
                    multiply(300, 520, 1040, use_fast_accum=is_fast, output_dtype=dtype)
            # One scale of B is for 128 columns, which no such tile divides.
            multiply(300, 520, 1040, (BLOCK_1X128, BLOCK_128X128))

    *launches, of_blocks = launches_in(catalog, driver, run)
    found = [(one["kernel"], read_map(launch_params.read(one, PARAMS).out_map)) for one in launches]
    wanted = []
    for name, is_fast in zip(names, fast, strict=True):
        for whole in (64, 32):  # columns in 128 bytes: swizzle 3; 16 have 32, or 64 of floats
            divides = is_fast and catalog[name]["tile"][1] >= 2 * whole
            wanted.append((name, *((16, 64 // whole) if divides else (whole, 3))))
    assert [(name, out["box"][0], out["swizzle"]) for name, out in found] == wanted
    assert of_blocks["kernel"] not in names


@pytest.mark.parametrize("sizes", [(0, 64, 64), (64, 0, 64), (64, 64, 0)])
def test_nothing_to_multiply_launches_nothing(driver, catalog, sizes) -> None:
    assert launches_in(catalog, driver, lambda: multiply(*sizes)) == []


@pytest.mark.parametrize("recipes", [(ROW, ROW), (4, 5)])
@pytest.mark.parametrize(("rows", "groups"), [(300, 3), (8, 64), (40000, 4)])
def test_groups_of_rows(driver, catalog, rows, groups, recipes) -> None:
    n, k = 520, 1040
    offs = empty(groups, dtype=torch.int64)

    def run() -> None:
        b = tensors.strided((groups, k, n), (n * k, 1, k), E4M3)
        b_scale = empty(groups, *(s for s in scale_shape(recipes[1], n, k) if s != 1))
        a_scale = empty(*scale_shape(recipes[0], rows, k))
        args = (empty(rows, k, dtype=E4M3), b, a_scale, recipes[0], b_scale, recipes[1])
        torch.ops.cubin._scaled_grouped_matmul(*args, offs=offs)

    first, second = launches_in(catalog, driver, run)
    assert catalog[first["kernel"]]["kind"] == "group_rows"
    kernel, params = catalog[second["kernel"]], launch_params.read(second, PARAMS)
    found = launch_params.read(first, GROUP_ROWS)
    height = kernel["tile"][0]
    assert (found.ends, found.groups, found.limit, found.height) == (
        offs.data_ptr(), groups, rows, height,
    )  # fmt: skip
    assert found.wide_ends
    assert 1 <= found.band < 256  # bytes of the table
    assert (params.rows, params.m, params.n) == (found.rows, rows, n)
    assert kernel["grouped"] == 1
    b = read_map(params.b)
    assert b["dims"][:3] == [k, n, groups]
    assert b["strides"][:2] == [k, n * k]
    assert params.b_group_stride == (n if recipes[1] == ROW else 9 * 5)
    assert second["grid"][0] <= 132


@pytest.mark.parametrize("fast", [False, True])
def test_groups_of_k(driver, catalog, fast) -> None:
    m, n, k, groups = 1, 520, 1040, 300
    offs = empty(groups, dtype=torch.int32)

    def run() -> None:
        a, b = empty(m, k, dtype=E4M3), tensors.strided((k, n), (1, k), E4M3)
        args = (a, b, empty(groups, m), ROW, empty(groups, n), ROW)
        torch.ops.cubin._scaled_grouped_matmul(*args, offs=offs, use_fast_accum=fast)

    first, second = launches_in(catalog, driver, run)
    kernel, params = catalog[second["kernel"]], launch_params.read(second, PARAMS)
    found = launch_params.read(first, GROUP_ROWS)
    assert (found.groups, found.limit, found.of_k, found.wide_ends) == (groups, k, 1, 0)
    assert (kernel["grouped"], kernel["math"]) == (2, "fast" if fast else "promoted")
    assert (params.rows, params.m, params.n) == (found.rows, m, n)
    assert (params.tiles_m, params.tiles_n) == (1, -(-n // kernel["tile"][1]))
    assert (params.a_stride, params.b_stride, params.b_group_stride) == (1, 1, n)
    assert read_map(params.out_map)["dims"][:2] == [n, groups * m]
    assert second["grid"][0] <= 132


@pytest.mark.parametrize(
    ("tokens", "groups", "fast", "tile"),
    [
        (14592, 4, True, [128, 128]), (14592, 4, False, [192, 128]),
        # Rows that share lines of the cache: each 128 bytes are two requests.
        (14608, 4, True, [192, 192]), (14608, 4, False, [192, 128]),
        # Outputs of small groups are most of the time.
        (8192, 128, True, [192, 192]), (8192, 128, False, [192, 128]),
    ],
)  # fmt: skip
def test_tiles_of_groups_of_k(driver, catalog, tokens, groups, fast, tile) -> None:
    m, n = 4096, 7168
    offs = empty(groups, dtype=torch.int32)

    def run() -> None:
        a, b = empty(m, tokens, dtype=E4M3), tensors.strided((tokens, n), (1, tokens), E4M3)
        args = (a, b, empty(groups, m), ROW, empty(groups, n), ROW)
        torch.ops.cubin._scaled_grouped_matmul(*args, offs=offs, use_fast_accum=fast)

    _, launch = launches_in(catalog, driver, run)
    params = launch_params.read(launch, PARAMS)
    assert catalog[launch["kernel"]]["tile"][:2] == tile
    assert bool(params.flags & WHOLE_LINES) == (tokens % 128 == 0)


@pytest.mark.parametrize("of_k", [False, True])
@pytest.mark.parametrize("blocks", [False, True])
def test_groups_without_k_launch_what_finds_wrong_ends(driver, catalog, blocks, of_k) -> None:
    """A product of zeros with one scale, whatever the recipes."""
    m, n, groups = 48, 96, 3
    recipes = ((4, 4) if of_k else (4, 5)) if blocks else (ROW, ROW)
    own = () if of_k else (groups,)

    def run() -> None:
        # A CPU build has no kernel that fills memory of a GPU.
        torch.library.Library("aten", "IMPL").impl("zero_", lambda x: x, "CUDA")
        a, b = empty(m, 0, dtype=E4M3), empty(*own, 0, n, dtype=E4M3)
        a_scale = empty(m, 0) if blocks else empty(*((groups,) if of_k else ()), m)
        b_scale = empty(groups, n)
        if blocks:
            b_scale = empty(n, 0) if of_k else empty(groups, 0, 1)
        offs = empty(groups, dtype=torch.int32)
        args = (a, b, a_scale, recipes[0], b_scale, recipes[1])
        torch.ops.cubin._scaled_grouped_matmul(*args, offs=offs)

    first, second = launches_in(catalog, driver, run)
    kernel, params = catalog[second["kernel"]], launch_params.read(second, PARAMS)
    assert catalog[first["kernel"]]["kind"] == "group_rows"
    assert (kernel["math"], kernel["grouped"]) == ("promoted", 2 if of_k else 1)
    assert not params.flags & BLOCKS
    strides = (params.a_stride, params.a_stride_k, params.b_stride, params.b_stride_k)
    assert (*strides, params.b_group_stride) == (0, 0, 0, 0, 0)


@pytest.mark.parametrize("groups", [0, 3])
def test_gated(driver, catalog, groups) -> None:
    m, n, k = 300, 512, 1040
    names = [
        name for name, own in catalog.items()
        if own.get("gated") and own["grouped"] == (1 if groups else 0)
    ]  # fmt: skip
    assert names

    def run() -> None:
        of_groups = (groups,) if groups else ()
        strides = (2 * n * k, 1, k)[-2 - len(of_groups) :]
        b = tensors.strided((*of_groups, k, 2 * n), strides, E4M3)
        b_scale = empty(*of_groups, *scale_shape(BLOCK_128X128, 2 * n, k))
        a, a_scale = empty(m, k, dtype=E4M3), empty(*scale_shape(BLOCK_1X128, m, k))
        offs = {"offs": empty(groups, dtype=torch.int64)} if groups else {}
        args = (a, b, a_scale, b_scale)
        with measure.watching():
            for name in names:
                library.force_config(name)
                torch.ops.cubin._scaled_gated_matmul(*args, power_of_two=groups > 0, **offs)

    launches = launches_in(catalog, driver, run)
    launches = [own for own in launches if catalog[own["kernel"]]["kind"] != "group_rows"]
    for name, launch in zip(names, launches, strict=True):
        kernel, params = catalog[launch["kernel"]], launch_params.read(launch, PARAMS)
        assert launch["kernel"] == name
        tile_m, tile_n, _ = kernel["tile"]
        b, up = read_map(params.b), read_map(params.out_map)
        for own in (b, up):
            assert own["dims"][:2] == [k, n]
            assert own["box"][:2] == [128, tile_n // 2]
        assert up["address"] - b["address"] == n * k
        assert params.bias - params.scale_b == 4 * n // 128  # one after the other
        assert params.stage_bytes == 128 * (tile_m + tile_n)
        assert (params.m, params.n, params.out_stride, params.tiles_n) == (m, n, n, n // 128)
        assert (params.gate_stride, params.gate_stride_k) == (1, m)
        assert params.gate_scales
        assert bool(params.flags & POWER_OF_TWO) == (groups > 0)
        assert params.out_type == 0  # bfloat16, which sums are rounded to


@pytest.mark.parametrize(
    ("sizes", "tile"),
    [
        # Short K: how quickly a tile is stored decides.
        ((4096, 32768, 512), [128, 128]), ((4096, 2304, 768), [128, 128]),
        # Waves of tiles decide.
        ((512, 7168, 2048), [128, 112]), ((512, 7168, 16384), [128, 112]),
        ((2048, 2112, 7168), [192, 192]),
    ],
)  # fmt: skip
def test_tiles_of_fast_sums(driver, catalog, sizes, tile) -> None:
    """The quickest of those that were timed (H200)."""
    (launch,) = launches_in(catalog, driver, lambda: multiply(*sizes, use_fast_accum=True))
    assert catalog[launch["kernel"]]["tile"][:2] == tile


def test_every_kernel_is_planned_for_some_sizes(driver, catalog) -> None:
    sizes = [
        (16, 32), (16, 7168), (16, 16384), (256, 16384), (256, 20000), (512, 2112), (700, 2112),
        (700, 4096), (448, 7168), (512, 7168), (2048, 2112), (4096, 2112),
    ]  # fmt: skip

    def call() -> None:
        for m, n in sizes:
            for fast in (False, True):
                multiply(m, n, 2048, use_fast_accum=fast)
            multiply(m, n, 2048, (BLOCK_1X128, BLOCK_1X128))
        for m in (16, 128):
            n, k = 14336, 4096
            b = tensors.strided((k, 2 * n), (1, k), E4M3)
            scales = (
                empty(*scale_shape(BLOCK_1X128, m, k)),
                empty(*scale_shape(BLOCK_128X128, 2 * n, k)),
            )
            torch.ops.cubin._scaled_gated_matmul(empty(m, k, dtype=E4M3), b, *scales)
        for types in ((E4M3, E5M2), (E5M2, E4M3)):
            for fast in (False, True):
                multiply(64, 64, 256, types=types, use_fast_accum=fast)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            x = empty(300, 520, dtype=dtype)
            for recipe in (ROW, BLOCK_1X128, BLOCK_128X128):
                quantize(x, recipe)
            quantize(x, BLOCK_1X128, gate="silu")

    launched = {launch["kernel"] for launch in launches_in(catalog, driver, call)}
    of_groups = {
        name for name, kernel in catalog.items()
        if kernel.get("grouped") or kernel["kind"] == "group_rows"
    }  # fmt: skip
    assert launched == set(catalog) - of_groups


def test_quantize(driver, catalog) -> None:
    def call() -> None:
        quantize(empty(300, 520, dtype=torch.bfloat16), BLOCK_1X128, transpose=True)
        quantize(empty(300, 520, dtype=torch.bfloat16), BLOCK_128X128)
        quantize(empty(300, 1040, dtype=torch.bfloat16), BLOCK_1X128, gate="silu")
        quantize(empty(300, 520, dtype=torch.bfloat16), BLOCK_1X128)

    launches = launches_in(catalog, driver, call)
    params = [launch_params.read(launch, QUANTIZE) for launch in launches]
    blocks = 38 * 8 * 5  # of 38 bands of 8 rows
    grids = [15, 15, -(-blocks // 16), -(-blocks // 64)]
    assert [launch["grid"][0] for launch in launches] == grids
    assert {own.inverse_blocks for own in params[1:]} == {(2**32 - 1) // 5}
    assert [(p.rows, p.columns, p.data_stride) for p in params] == [(300, 520, 300)] + [
        (300, 520, 520)
    ] * 3
    scale_strides = [(1, 520), (5, 1), (1, 300), (1, 300)]
    assert [(p.scale_stride, p.scale_stride_k) for p in params] == scale_strides
    assert params[2].up == 520


def test_gated_rows_are_prefetched_where_they_follow_one_another(driver, catalog) -> None:
    """By the blocks of threads that are resident first; few rows are not, nor those of other
    recipes."""
    read_once, early = 128, 16  # of quantize_params.h
    sizes = [(4096, 2048), (531, 2048), (2048, 4096), (3, 20480 * 8), (16384, 2048)]

    def call() -> None:
        for rows, k in sizes:
            quantize(empty(rows, k, dtype=torch.bfloat16), BLOCK_1X128, gate="silu")
        apart = tensors.strided((4096, 2048), (2056, 1), torch.bfloat16)
        quantize(apart, BLOCK_1X128, gate="silu")
        quantize(empty(128, 4096, dtype=torch.bfloat16), BLOCK_1X128, gate="silu")
        quantize(empty(4096, 2048, dtype=torch.bfloat16), BLOCK_1X128)

    *launches, apart, few, plain = launches_in(catalog, driver, call)
    for (rows, k), launch in zip(sizes, launches, strict=True):
        flags = launch_params.read(launch, QUANTIZE).flags
        assert flags >> early == min(launch["grid"][0], 132 * 8)
        assert bool(flags & read_once) == (2 * rows * k < 20e6)
    assert launch_params.read(apart, QUANTIZE).flags >> early == 0
    for launch in (few, plain):
        flags = launch_params.read(launch, QUANTIZE).flags
        assert (flags >> early, flags & read_once) == (0, 0)


def test_more_columns_than_kernels_count_are_refused(driver, catalog) -> None:
    def call() -> list[str]:
        like = torch.empty(1, 2**32, dtype=torch.bfloat16, device="meta")
        x = tensors.part(empty(8, dtype=torch.bfloat16), like)
        return error_of(lambda: quantize(x, ROW))

    assert "has a size that no kernel takes" in forked(call)[1]


def test_rows_with_one_scale_have_threads_by_their_length(driver, catalog) -> None:
    lengths = {1: 8, 256: 8, 257: 16, 512: 16, 2048: 64, 2049: 128, 4096: 128, 4097: 256, 9000: 256}

    def call() -> None:
        for length in lengths:
            quantize(empty(300, length, dtype=torch.bfloat16), ROW)

    launches = launches_in(catalog, driver, call)
    for launch, threads in zip(launches, lengths.values(), strict=True):
        assert 1 << launch_params.read(launch, QUANTIZE).row_threads_log2 == threads
        assert launch["grid"][0] == -(-300 * threads // 256)
