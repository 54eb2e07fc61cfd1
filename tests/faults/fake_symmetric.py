"""Launches of symmetric products on the stand-in driver: which calls take the kernels of the lower
triangle, which are mirrored, and which merely look alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from c_layouts import MATMUL, structure
from fake_driver import tensors
from faults import catalogs, launch_params
from faults.forked import forked, launches_of
from faults.launch_params import read_map

import torch_cubin
from torch_cubin._native import library
from torch_cubin._tuning import measure

PARAMS = structure(f"{MATMUL}/sm90_params.h", "Sm90MatmulParams")
MIRROR = structure(f"{MATMUL}/mirror_params.h", "MirrorParams")
BATCHED, SERPENTINE, ADD_VECTORS, LONE = 1, 16, 1024, 2048  # sm90_params.h
N = 4096
ops = torch.ops.cubin


@pytest.fixture(autouse=True)
def catalog(driver, tmp_path, monkeypatch) -> dict[str, dict]:
    kernels = catalogs.kernels_of("matmul") + catalogs.kernels_of("mirror")
    catalogs.install(driver, tmp_path, monkeypatch, kernels)
    return {kernel["symbol"]: kernel for kernel in kernels}


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return tensors.empty(*shape, dtype=dtype)


def view(base: torch.Tensor, of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A view of a tensor that nothing can be computed with."""
    meta = torch.empty_strided(base.shape, base.stride(), device="meta", dtype=base.dtype)
    return tensors.part(base, of(meta))


def transposed(base: torch.Tensor) -> torch.Tensor:
    return view(base, lambda x: x.mT)


def tiles_of(kernel: dict, n: int, in_pairs: int) -> int:
    m, width = kernel["tile"][:2]
    rows, columns = range(-(-n // m)), range(0, n, width)
    return sum(row * m + m > column for row in rows for column in columns) - in_pairs // 2


@pytest.mark.parametrize("call", ["matmul", "linear", "syrk", "addmm without an addend"])
@pytest.mark.parametrize("layout", ["nt", "tn"])
def test_a_matrix_times_its_own_transpose(driver, catalog, call: str, layout: str) -> None:
    def run() -> None:
        x = empty(N, 1024) if layout == "nt" else transposed(empty(1024, N))
        {
            "matmul": lambda: ops.matmul(x, transposed(x)),
            "linear": lambda: ops.linear(x, x),
            "syrk": lambda: ops.syrk(x),
            "addmm without an addend": lambda: ops.addmm(empty(N), x, transposed(x), beta=0),
        }[call]()

    (launch,) = launches_of(driver, run)
    kernel = catalog[launch["kernel"]]
    assert kernel["kind"] == "sm90_symmetric"
    assert kernel["layout"] == layout
    params = launch_params.read(launch, PARAMS)
    assert (
        params.tiles_m
        == params.whole_tiles + params.stream_tiles
        == tiles_of(kernel, N, params.row_parts)
    )
    assert launch["grid"][0] == min(params.tiles_m, 132)
    assert params.flags == SERPENTINE
    assert (params.m, params.n, params.tiles_n) == (N, N, 1)
    assert (params.k_blocks, params.alpha) == (16, 1)
    a, b, out = map(read_map, (params.a, params.b, params.out_map))
    assert a["address"] == b["address"] != out["address"]
    assert (out["dims"], out["strides"], out["box"]) == ([N, N], [2 * N], [64, 16])


@pytest.mark.parametrize("op", ["syrk", "symm_square"])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_batches_with_an_addend(driver, catalog, op: str, is_transposed: bool) -> None:
    def run() -> None:
        c = empty(N, N)
        getattr(ops, op)(empty(3, N, N), transposed(c) if is_transposed else c, beta=0.5, alpha=2)

    (launch,) = launches_of(driver, run)
    kernel = catalog[launch["kernel"]]
    assert (kernel["kind"], kernel["layout"]) == (
        "sm90_symmetric",
        "nt" if op == "syrk" else "nn",
    )
    params = launch_params.read(launch, PARAMS)
    assert params.whole_tiles + params.stream_tiles == 3 * params.tiles_m
    assert params.flags == BATCHED | SERPENTINE | (0 if is_transposed else ADD_VECTORS)
    assert (params.alpha, params.beta) == (2, 0.5)
    assert list(params.batch) == [3, 1, 1]
    assert list(params.addend_batch_stride) == [0, 0, 0]
    strides = (params.addend_stride_m, params.addend_stride_n)
    assert strides == ((1, N) if is_transposed else (N, 1))


def another_tensor() -> None:
    ops.matmul(empty(N, N), transposed(empty(N, N)))


def no_transpose() -> None:
    x = empty(N, N)
    ops.matmul(x, x)


def of_memory(offset: int, *strides: int) -> None:
    memory = empty(2 * N * N)
    x, y = (
        view(memory, lambda whole, at=at, by=by: whole.as_strided((N, N), by, at))
        for at, by in ((0, (N, 1)), (offset, strides))
    )
    ops.matmul(x, y)


def another_offset() -> None:
    of_memory(8, 1, N)


def other_strides() -> None:
    of_memory(0, 1, 2 * N)


def another_batch() -> None:
    x = empty(2, N, N)
    ops.matmul(x, view(x, lambda whole: whole[:1].mT.expand(2, N, N)))


def a_bias() -> None:
    x = empty(N, N)
    ops.linear(x, x, empty(N))


def an_addend() -> None:
    x = empty(N, N)
    ops.addmm(empty(N, N), x, transposed(x))


def an_activation() -> None:
    x = empty(N, N)
    ops.linear(x, x, activation="relu")


LOOK_ALIKES = [another_tensor, no_transpose, another_offset, other_strides, another_batch]
LOOK_ALIKES += [a_bias, an_addend, an_activation]


@pytest.mark.parametrize("call", LOOK_ALIKES)
def test_operands_that_merely_look_alike(driver, catalog, call: Callable[[], None]) -> None:
    launches = launches_of(driver, call)
    assert launches
    for launch in launches:
        assert catalog[launch["kernel"]]["kind"] not in ("sm90_symmetric", "mirror")


@pytest.mark.parametrize("op", ["syrk", "symm_square"])
@pytest.mark.parametrize(
    ("n", "dtype", "options"),
    [
        (65, torch.bfloat16, {}),  # as these, and few tiles
        (4097, torch.bfloat16, {}),  # rows of no whole vectors
        (N, torch.float64, {}),
        (N, torch.bfloat16, {"out_dtype": torch.float32}),
    ],
    ids=str,
)
def test_full_products_are_mirrored(driver, catalog, op: str, n: int, dtype, options) -> None:
    def run() -> None:
        getattr(ops, op)(empty(2, n, n, dtype=dtype), **options)

    *_, product, last = launches_of(driver, run)
    assert catalog[product["kernel"]]["kind"] not in ("sm90_symmetric", "mirror")
    kernel = catalog[last["kernel"]]
    assert kernel["kind"] == "mirror"
    assert kernel["alignment"] == options.get("out_dtype", dtype).itemsize
    params = launch_params.read(last, MIRROR)
    assert (params.n, params.tiles) == (n, -(-n // 64))
    assert last["grid"][0] == 2 * params.tiles**2


def test_operands_that_are_copied_first_are_not_mirrored_again(driver, catalog) -> None:
    def run() -> None:
        ops.syrk(empty(N, 1001))
        torch.backends.cuda.matmul.allow_tf32 = True
        ops.syrk(transposed(empty(1000, N, dtype=torch.float32)))
        ops.symm_square(empty(N, N, dtype=torch.float32))

    launches = launches_of(driver, run)
    kinds = [catalog[launch["kernel"]]["kind"] for launch in launches]
    assert kinds == ["pad", *["sm90_symmetric", "transpose"] * 2, "sm90_symmetric"]
    # One copy serves as both operands, but for the square, whose A is read as it is.
    maps = [launch_params.read(launch, PARAMS) for launch in launches[1::2]]
    same = [read_map(params.a)["address"] == read_map(params.b)["address"] for params in maps]
    assert same == [True, True, False]


def test_the_last_wave_is_streamed(driver, catalog) -> None:
    """Its parts are counted in memory that is zero before the launch."""

    def run() -> None:
        with measure.watching():
            library.force_config("sm90_symmetric 128x128 streamed in 4")
            ops.syrk(empty(4104, 4096))

    *_, launch = launches_of(driver, run)
    params = launch_params.read(launch, PARAMS)
    assert launch["grid"][0] == 132
    assert (params.whole_tiles, params.stream_tiles) == (4 * 132, 33)
    assert params.tiles_m == params.whole_tiles + params.stream_tiles
    assert params.stream_clusters == 4 * params.stream_tiles
    assert params.partial != 0
    assert params.counters != 0


@pytest.mark.parametrize("parts", [1, 3])
def test_a_tile_for_each_of_two_warpgroups(driver, catalog, parts: int) -> None:
    """For more tiles than multiprocessors; their last wave may be streamed, as others'."""
    config = "sm90_symmetric 128x128 ping_pong" + (f" streamed in {parts}" if parts > 1 else "")

    def run() -> None:
        with measure.watching():
            library.force_config(config)
            ops.syrk(empty(4104, 4096))
            library.force_config("sm90_symmetric 128x128 ping_pong")
            ops.syrk(empty(1024, 4096))  # 36 tiles

    *_, launch, small = launches_of(driver, run)
    kernel, params = catalog[launch["kernel"]], launch_params.read(launch, PARAMS)
    assert (kernel["tile"], kernel["ping_pong"]) == ([128, 128, 64], 1)
    assert launch["grid"][0] == 132
    streamed = 33 if parts > 1 else 0
    assert (params.whole_tiles, params.stream_tiles) == (561 - streamed, streamed)
    assert params.stream_clusters == parts * streamed
    assert catalog[small["kernel"]].get("ping_pong", 0) == 0


@pytest.mark.parametrize("n", [2816, 3840])
def test_short_products_of_three_tiles_a_block_are_of_the_triangle(
    driver, monkeypatch, n: int
) -> None:
    """Ping-pong, the third tile waits until the first one is stored, which takes longer than the
    products of 256 columns: 2816 x 256 took 11.0 us by tiles of 128x160, where cuBLAS takes 10.95
    and the triangle's tiles 9.7 (H200)."""
    monkeypatch.setenv("FAKE_CUDA_NAME", "NVIDIA H200")  # whose table of factors counts
    lines = {"a": "k_lines", "b": "k_lines", "math": "16_bit"}
    product = {"m": n, "n": n, "k": 256, "batch": 1, "symmetric": True} | lines
    (plan,) = forked(lambda: library.planned([product]))
    assert plan["chosen"].startswith("sm90_symmetric ")


@pytest.mark.parametrize(
    ("n", "k", "access", "math", "expected"),
    [
        (88, 256, "own_vectors", "16_bit", "sm90 64x64"),
        (216, 368, "own_vectors", "16_bit", "sm90 64x64"),
        (96, 1024, "own_vectors", "16_bit", "sm90 64x64 four_k"),
        (64, 952, "k_vectors", "16_bit", "sm90 64x64 four_k"),
        (129, 83, "own_elements", "16_bit", "anywhere 64x64"),
        (448, 384, "own_lines", "tf32", "transpose ab"),
        (292, 78, "k_elements", "16_bit", "unaligned 32x64"),
        (28, 240, "own_elements", "16_bit", "anywhere 64x64 4 splits"),
    ],
)
def test_small_products(driver, monkeypatch, n, k, access, math, expected) -> None:
    """Of few rows or columns, by what takes an H200 the least time."""
    monkeypatch.setenv("FAKE_CUDA_NAME", "NVIDIA H200")
    product = {"m": n, "n": n, "k": k, "batch": 1, "symmetric": True, "math": math}
    (plan,) = forked(lambda: library.planned([product | {"a": access, "b": access}]))
    assert plan["chosen"] == expected


def test_thin_last_rows_have_no_tiles(driver, catalog) -> None:
    """Tiles at the diagonal take them, where A and B are one matrix."""
    config = "sm90_symmetric 128x128 ping_pong with thin rows"

    def run() -> None:
        with measure.watching():
            library.force_config(config)
            ops.syrk(empty(4104, 1024))
            ops.symm_square(empty(4104, 4104))
            ops.syrk(transposed(empty(1024, 4104)))
            ops.syrk(empty(4120, 1024))  # 24 rows

    launch, *others = launches_of(driver, run)
    params = launch_params.read(launch, PARAMS)
    assert catalog[launch["kernel"]]["ping_pong"] == 1
    assert (params.n, params.tiles_m, params.whole_tiles, params.split_blocks) == (
        4104,
        528,
        528,
        2,
    )
    assert params.out != 0
    assert (read_map(params.a)["box"], read_map(params.b)["box"]) == ([64, 16], [64, 128])
    for other in others:
        if catalog[other["kernel"]]["kind"] == "sm90_symmetric":
            assert launch_params.read(other, PARAMS).split_blocks != 2


def test_narrow_tiles_in_pairs(driver, catalog) -> None:
    """272 tiles, 16 of which are half as wide, fill two waves of 132 multiprocessors."""

    def run() -> None:
        with measure.watching():
            library.force_config("sm90_symmetric 128x256 in pairs")
            ops.syrk(empty(N, N))

    (launch,) = launches_of(driver, run)
    params = launch_params.read(launch, PARAMS)
    assert catalog[launch["kernel"]]["tile"] == [128, 256, 64]
    assert (params.tiles_m, params.whole_tiles, params.row_parts) == (264, 264, 16)
    assert not params.flags & LONE
    assert (launch["grid"][0], params.stream_tiles) == (132, 0)
    assert read_map(params.b)["box"] == [64, 128]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_clusters_divide_k(driver, catalog, size: int) -> None:
    def run() -> None:
        with measure.watching():
            library.force_config(f"sm90_symmetric 128x128 split in {size}")
            ops.syrk(empty(2, 512, 2048))

    (launch,) = launches_of(driver, run)
    params = launch_params.read(launch, PARAMS)
    assert (params.tiles_m, params.whole_tiles, params.stream_tiles) == (10, 20, 0)
    assert launch["grid"][0] == 20 * size
    assert params.flags & LONE  # no block has a second tile
    assert launch["attributes"]["4"] == [size, 1, 1]


@pytest.mark.parametrize(("n", "k"), [(3185, 4352), (128, 2048), (713, 3072)])
def test_full_products_take_all_tiles_forwards(driver, catalog, n: int, k: int) -> None:
    """So that an element's terms are added as those of the one mirrored."""
    x, other = empty(n, k), empty(n, k)
    calls = [lambda: ops.matmul(x, transposed(x)), lambda: ops.matmul(x, transposed(other))]
    launches = [launches_of(driver, call)[-1] for call in calls]
    for launch in launches:
        assert catalog[launch["kernel"]]["kind"] in ("sm90", "sm90_ping_pong")
    own, two = (launch_params.read(launch, PARAMS) for launch in launches)
    assert two.flags & SERPENTINE
    assert not own.flags & SERPENTINE
    assert not own.stream_tiles


def test_both_operands_of_tf32_are_one_copy(driver, catalog) -> None:
    """Where they are not contiguous along K. (One of them as it is would be rounded elsewhere.)"""
    config = {"m": 1024, "n": 1024, "k": 1024, "batch": 1, "math": "tf32", "a": "own_lines",
              "b": "own_lines", "dtype": "float32"}  # fmt: skip

    def copies(symmetric: bool) -> list[str]:
        (plan,) = library.planned([{**config, "symmetric": symmetric}], True)
        return sorted(x["name"] for x in plan["configs"] if x["name"].startswith("transpose"))

    assert forked(lambda: copies(True)) == ["transpose ab"]
    assert forked(lambda: copies(False)) == ["transpose a", "transpose ab", "transpose b"]


def test_a_product_that_need_not_be_mirrored_is_not(driver, catalog) -> None:
    def run() -> None:
        x = empty(64, 64)
        ops.matmul(x, transposed(x))

    launches = launches_of(driver, run)
    assert all(catalog[launch["kernel"]]["kind"] != "mirror" for launch in launches)


def test_batch_invariant_products_run_from_the_beginning_of_k(driver, catalog) -> None:
    def run() -> None:
        x = empty(N, 1024)
        with torch_cubin.batch_invariant():
            ops.syrk(x)

    launches = launches_of(driver, run)
    if catalog[launches[0]["kernel"]]["kind"] == "sm90_symmetric":
        assert launch_params.read(launches[0], PARAMS).flags == 0
