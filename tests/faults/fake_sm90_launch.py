"""What the sm90 matmul kernels are launched with, on the stand-in driver: maps, flags, grids. Over
500 lines, since all of it is read by the same flags and checked by one function."""

from __future__ import annotations

from functools import partial

import c_layouts
import pytest
import torch
from fake_driver import tensors
from faults import catalogs, launch_params
from faults.forked import forked
from faults.launch_params import read_map

import torch_cubin
from torch_cubin._native import library
from torch_cubin._tuning import measure

BATCHED, OVER_K, SERPENTINE, GROUP_N, GENERAL = 1, 8, 16, 32, 64
ALONG_N, ALONG_M, ALONG_K = 1, 21, 27  # the first of two bits
CLUSTER = 3 << ALONG_N | 3 << ALONG_M | OVER_K
OUT_FLOAT, OUT_UNALIGNED, FINISH, ACTIVATE = 1 << 8, 1 << 15, 1 << 16, 1 << 17
SPLIT_K, READ_A, READ_B, TRANSPOSED = 1 << 18, 1 << 19, 1 << 20, 1 << 23
SUMS, KEEP_OUT = 1 << 24, 1 << 26
ROWS_INSIDE, COLUMNS_INSIDE = 1 << 29, 1 << 30
L2_BYTES = 60 << 20  # of the stand-in
BIAS_ROW = 128


Params = c_layouts.structure(f"{c_layouts.MATMUL}/sm90_params.h", "Sm90MatmulParams")


@pytest.fixture
def sm90(driver, tmp_path, monkeypatch) -> list[dict]:
    """A catalog of the sm90 kernels alone."""
    kinds = ("sm90", "sm90_ping_pong", "sm90_parts")
    kernels = catalogs.kernels_of("matmul", lambda k: k["kind"] in kinds)
    catalogs.install(driver, tmp_path, monkeypatch, kernels)
    return kernels


def launches_of(driver, calls) -> list[tuple[dict, Params]]:
    """The one launch of an sm90 kernel that each call makes, in a process of their own."""

    def run() -> list:
        for call in calls:
            call()
        return driver.launches()

    launches = [x for x in forked(run) if x["kernel"].startswith("sm90_")]
    assert len(launches) == len(calls)
    return [(x, launch_params.read(x, Params)) for x in launches]


def test_beside_kernels_of_inductor_that_start_early(driver, sm90, monkeypatch) -> None:
    """They read what the kernel before the previous one wrote, without waiting."""
    a = tensors.empty(512, 512, dtype=torch.bfloat16)

    def starts_early() -> bool:
        torch.ops.cubin.matmul(a, a)
        return "6" in driver.launches()[-1]["attributes"]  # programmatic stream serialization

    for value, early in ((None, True), ("0", True), ("1", False)):
        if value is not None:
            monkeypatch.setenv("TORCHINDUCTOR_ENABLE_PDL", value)
        assert forked(starts_early) == early


SHAPES = [
    (4096, 4096, 4096), (128, 4096, 4096), (512, 1024, 1000), (64, 512, 520), (8, 8, 8),
    (3000, 2056, 136), (8192, 4096, 64), (504, 4744, 2856), (2912, 176, 5944), (6384, 376, 4184),
]  # fmt: skip


@pytest.mark.parametrize("layout", ["nt", "nn", "tn", "tt"])
def test_boxes_of_a_stage_have_the_bytes_that_its_barrier_expects(
    driver, sm90, layout: str
) -> None:
    """What a stage's boxes bring is what its barrier waits for, or the kernel would hang; and the
    blocks are a whole number of clusters."""

    def multiply(m: int, n: int, k: int) -> None:
        a = tensors.strided((m, k), (k, 1) if layout[0] == "n" else (1, m), torch.bfloat16)
        b = tensors.strided((k, n), (1, k) if layout[1] == "t" else (n, 1), torch.bfloat16)
        torch.ops.cubin._matmul(a, b)

    found = launches_of(driver, [partial(multiply, *shape) for shape in SHAPES])
    for shape, (launch, params) in zip(SHAPES, found, strict=True):
        check_launch(sm90, layout, shape, launch, params)


def parts_of_k(params: Params) -> int:
    """Blocks of a cluster that split K."""
    return 1 << (params.flags >> ALONG_K & 3) if params.flags & OVER_K else 1


def check_launch(sm90, layout: str, shape, launch: dict, params: Params) -> None:
    m, n, k = shape
    out = [n, m]
    if params.flags & TRANSPOSED:  # the kernel's operands are B^T and A^T
        m, n = n, m
        layout = {"nt": "nt", "nn": "tt", "tn": "tn", "tt": "nn"}[layout]
    kernel = next(x for x in sm90 if x["name"] == launch["kernel"])
    assert kernel["layout"] == layout
    tile = kernel["tile"]
    per_m = 1 << (params.flags >> ALONG_M & 3)
    per_n = 1 << (params.flags >> ALONG_N & 3)
    assert per_m * per_n <= 8
    for index, (own, mn_major, size, parts) in enumerate(
        [(tile[0], layout[0] == "t", m, per_n), (tile[1], layout[1] == "n", n, per_m)]
    ):
        found = read_map((params.a, params.b)[index])
        assert found["swizzle"] == 3  # 128 bytes
        rows = 64 if mn_major else own
        assert rows % (8 * parts) == 0
        assert found["box"] == [64, rows // parts]
        assert found["dims"] == ([size, k] if mn_major else [k, size])
        # To 256 bytes, but of rows that begin within a line of the cache.
        whole_lines = (found["address"] | found["strides"][0]) % 128 == 0
        assert found["promotion"] == (3 if whole_lines else 0)
    size = parts_of_k(params) * per_m * per_n
    if size > 1:
        assert launch["attributes"]["4"] == [size, 1, 1]
        assert launch["grid"][0] % size == 0
    clusters = launch["grid"][0] // size
    assert launch["grid"][0] <= 132
    assert params.tiles_m == -(-m // (tile[0] * per_m))
    assert params.tiles_n == -(-n // (tile[1] * per_n))
    assert params.whole_tiles + params.stream_tiles == params.tiles_m * params.tiles_n
    assert params.k_blocks == -(-k // 64)
    if params.flags & OVER_K:  # one tile a cluster, and all of its blocks have some of K
        assert per_m * per_n == 1
        assert clusters == params.whole_tiles
        assert params.k_blocks >= size
    # Tiles begin sooner where none is the second one of its block, at whole vectors, and where no
    # row's place in its tile decides the order of additions.
    one_wave = params.stream_tiles == 0 and params.whole_tiles <= clusters
    contiguous = layout[0] == "t" or params.flags & TRANSPOSED
    rows = m >= tile[0] and (m % 8 == 0 or not contiguous) and parts_of_k(params) < 4
    columns = n >= tile[1] and n % 8 == 0
    assert bool(params.flags & ROWS_INSIDE) == (one_wave and rows)
    assert bool(params.flags & COLUMNS_INSIDE) == (one_wave and columns)
    assert not params.flags & GENERAL
    assert bool(params.flags & KEEP_OUT) == (2 * m * n <= L2_BYTES)
    found = read_map(params.out_map)
    assert found["dims"] == out
    if params.flags & TRANSPOSED:
        assert kernel["swaps"] == 1
        assert (found["box"], found["swizzle"]) == ([64, 32], 3)


@pytest.mark.parametrize("layout", ["nt", "nn"])
@pytest.mark.parametrize(
    ("name", "along_m", "along_n"),
    [("share_a", 1, 2), ("share_b", 2, 1), ("share_both", 2, 2), ("four_a", 1, 4), ("four_b", 4, 1),
     ("2x4", 2, 4), ("4x2", 4, 2)],
)  # fmt: skip
def test_blocks_of_a_cluster_share_operands(
    driver, sm90, layout: str, name: str, along_m: int, along_n: int
) -> None:
    m, n, k = 1000, 1096, 264

    def multiply() -> None:
        a = tensors.empty(m, k, dtype=torch.bfloat16)
        b = tensors.strided((k, n), (1, k) if layout == "nt" else (n, 1), torch.bfloat16)
        with measure.watching():
            library.force_config(f"sm90 128x64 {name}")
            torch.ops.cubin._matmul(a, b)

    [(launch, params)] = launches_of(driver, [multiply])
    assert launch["kernel"].endswith("_128x64")
    assert 1 << (params.flags >> ALONG_M & 3) == along_m
    assert 1 << (params.flags >> ALONG_N & 3) == along_n
    # Clusters that follow one another read the same rows of the operand that blocks do not share.
    assert bool(params.flags & GROUP_N) == (along_m > along_n)
    check_launch(sm90, layout, (m, n, k), launch, params)


@pytest.mark.parametrize("layout", ["nt", "nn"])
@pytest.mark.parametrize(("name", "parts"), [("split_k", 2), ("four_k", 4), ("eight_k", 8)])
def test_blocks_of_a_cluster_split_k(driver, sm90, layout: str, name: str, parts: int) -> None:
    """Where each has some of it, and the clusters are no more than run at a time."""
    m, n, k = 200, 112, 1832

    def multiply(m: int, n: int, k: int, invariant: bool = False) -> None:
        a = tensors.empty(m, k, dtype=torch.bfloat16)
        b = tensors.strided((k, n), (1, k) if layout == "nt" else (n, 1), torch.bfloat16)
        with measure.watching(), torch_cubin.batch_invariant(invariant):
            library.force_config(f"sm90 64x64 {name}")
            torch.ops.cubin._matmul(a, b)

    calls = [
        partial(multiply, m, n, k),
        partial(multiply, m, n, k, invariant=True),
        partial(multiply, m, n, 128 * parts - 8),
        partial(multiply, m, 264 // parts * 64, k),
    ]
    (launch, params), *others = launches_of(driver, calls)
    assert launch["kernel"].endswith("_64x64")
    assert parts_of_k(params) == parts
    check_launch(sm90, layout, (m, n, k), launch, params)
    assert [parts_of_k(params) == parts for _, params in others] == [False] * 3


def test_weight_gradients_split_k_over_pairs_alone(driver, sm90) -> None:
    def names() -> list[str]:
        a = tensors.strided((384, 16384), (1, 384), torch.bfloat16)
        with measure.watching():
            torch.ops.cubin._matmul(a, tensors.empty(16384, 384, dtype=torch.bfloat16))
            return [c["name"] for plan in library.watched_plans() for c in plan["configs"]]

    found = forked(names)
    assert any(name.endswith(" split_k") for name in found)
    assert not any(name.endswith(("four_k", "eight_k")) for name in found)


def test_small_weight_gradients_split_k_over_larger_clusters(driver, sm90) -> None:
    """Of tiles of one warpgroup that begin sooner where they are alone."""
    m, n, k = 72, 136, 1832
    found = launches_of(driver, [partial(weight_gradient, m, n, k, f"64x64{x}") for x in KINDS])
    for kind, (launch, params) in zip(KINDS, found, strict=True):
        assert launch["kernel"] == "sm90_matmul_bf16_tn_64x64"
        assert parts_of_k(params) == KINDS[kind]
        check_launch(sm90, "tn", (m, n, k), launch, params)


KINDS = {"": 1, " split_k": 2, " four_k": 4, " eight_k": 8}


def weight_gradient(m: int, n: int, k: int, config: str) -> None:
    a = tensors.strided((m, k), (1, m), torch.bfloat16)
    with measure.watching():
        library.force_config(f"sm90 {config}")
        torch.ops.cubin._matmul(a, tensors.empty(k, n, dtype=torch.bfloat16))


@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
@pytest.mark.parametrize("tile", ["128x192", "128x160", "128x128"])
def test_ping_pong_takes_whole_products_alone(driver, sm90, layout: str, tile: str) -> None:
    """It neither splits K nor streams tiles."""

    def multiply(m: int, n: int, k: int) -> None:
        a = tensors.strided((m, k), (k, 1) if layout[0] == "n" else (1, m), torch.bfloat16)
        b = tensors.strided((k, n), (1, k) if layout[1] == "t" else (n, 1), torch.bfloat16)
        with measure.watching():
            library.force_config(f"sm90 {tile} ping_pong share_a")
            torch.ops.cubin._matmul(a, b)
            configs = [c["name"] for plan in library.watched_plans() for c in plan["configs"]]
        own = [name for name in configs if name.startswith(f"sm90 {tile} ping_pong")]
        assert own
        assert not any(x in name for name in own for x in ("split", "streamed"))

    shape = (1000, 1096, 264)
    [(launch, params)] = launches_of(driver, [partial(multiply, *shape)])
    assert launch["kernel"].endswith(f"_{layout}_{tile}_ping_pong")
    assert not params.flags & (OVER_K | SPLIT_K | TRANSPOSED)
    check_launch(sm90, layout, shape, launch, params)


@pytest.mark.parametrize("ping_pong", ["", " ping_pong"])
@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
def test_swapped_operands_and_their_transposed_tiles(
    driver, sm90, layout: str, ping_pong: str
) -> None:
    """A tile of 128 x 192 stores one of 192 x 128, with a bias of its rows. Epilogues and outputs
    without vectors run as they are."""
    m, n, k = 1000, 1096, 264
    name = f"sm90 128x192{ping_pong} swapped share_b"

    def linear(n: int = n, activation: str = "none", invariant: bool = False) -> None:
        x = tensors.strided((m, k), (k, 1) if layout[0] == "n" else (1, m), torch.bfloat16)
        w = tensors.strided((n, k), (k, 1) if layout[1] == "t" else (1, n), torch.bfloat16)
        bias = tensors.empty(n, dtype=torch.bfloat16)
        with measure.watching():
            library.force_config(name)
            if activation != "none":
                torch.ops.cubin._linear_activation(x, w, bias, activation)
            elif invariant:
                with torch_cubin.batch_invariant():
                    torch.ops.cubin._linear(x, w, bias)
            else:
                torch.ops.cubin._linear(x, w, bias)

    calls = [linear, partial(linear, invariant=True), partial(linear, activation="relu")]
    if layout == "nt":
        calls.append(partial(linear, n=1100))
    (launch, params), (_, inside), *others = launches_of(driver, calls)
    assert inside.flags == params.flags & ~SERPENTINE
    assert launch["kernel"].endswith("_128x192" + ping_pong.replace(" ", "_"))
    assert params.flags & (TRANSPOSED | FINISH) == TRANSPOSED
    assert (params.m, params.n, params.bias_stride) == (n, m, 1)
    assert params.flags & CLUSTER == 1 << ALONG_M
    check_launch(sm90, layout, (m, n, k), launch, params)
    assert not any(params.flags & TRANSPOSED for _, params in others)


@pytest.mark.parametrize("largest", [1, 2, 4])
def test_clusters_beyond_the_devices_capacity_are_not_chosen(driver, sm90, largest: int) -> None:
    """If a process may use few multiprocessors, as under MPS, the driver reports no capacity."""

    def multiply(m: int, n: int, k: int) -> None:
        a, b = (tensors.empty(*shape, dtype=torch.bfloat16) for shape in ((m, k), (k, n)))
        torch.ops.cubin._matmul(a, b)

    # Each is quickest in a cluster, of two or of more where the device has them.
    shapes = [(128, 512, 8192), (504, 4744, 2856), (536, 6136, 6992), (256, 8192, 4096)]

    def run() -> list:
        driver.set("largest_cluster", largest)
        for shape in shapes:
            multiply(*shape)
        multiply(*shapes[0])
        launches = driver.launches()
        with measure.watching():
            multiply(*shapes[1])
            configs = {
                config["name"].split(" ", 2)[-1] for config in library.watched_plans()[0]["configs"]
            }
            library.force_config("sm90 128x128 share_both")
            multiply(*shapes[1])
        return [launches, sorted(configs), driver.launches()[-1]]

    launches, configs, forced = forked(run)
    found = [x["attributes"].get("4", [1, 1, 1])[0] for x in launches]
    assert max(found) == largest
    assert ("four_a" in configs, "share_a" in configs) == (largest >= 4, largest >= 2)
    assert forced["attributes"].get("4", [1, 1, 1])[0] == largest


def test_rows_that_begin_anywhere_are_read(driver, sm90) -> None:
    """Addresses of the rows, no reads beside the operand; aligned operands have a tensor map."""
    places = []

    def multiply(a_pitch: int, b_pitch: int, layout: str) -> None:
        a = tensors.strided((300, 61), (a_pitch, 1), torch.bfloat16, offset=3)
        b = tensors.strided(
            (61, 203), (1, b_pitch) if layout == "nt" else (b_pitch, 1), torch.bfloat16
        )
        places.append((a.data_ptr(), b.data_ptr()))
        torch.ops.cubin._matmul(a, b)

    def run() -> list:
        calls = [(61, 64, "nt"), (61, 63, "nt"), (67, 203, "nn")]
        for call in calls:
            multiply(*call)
        return [
            (call, place, x)
            for call, place, x in zip(calls, places, driver.launches(), strict=True)
        ]

    expected = [READ_A, READ_A | READ_B, READ_A | READ_B]
    for flags, ((a_pitch, b_pitch, layout), place, launch) in zip(
        expected, forked(run), strict=True
    ):
        params = launch_params.read(launch, Params)
        assert "64x64_read" in launch["kernel"]
        assert params.flags & (READ_A | READ_B | CLUSTER) == flags
        assert params.k == 61
        b_rows, b_columns = (203, 61) if layout == "nt" else (61, 203)
        for rows, address, pitch, count, columns in (
            (params.a_rows, place[0], a_pitch, 300, 61),
            (params.b_rows, place[1], b_pitch, b_rows, b_columns),
        ):
            if flags == READ_A and count == 203:
                assert not any(bytes(rows))
                continue
            end = address + ((count - 1) * pitch + columns) * 2
            assert (getattr(rows, "from"), rows.stride) == (address, pitch)
            assert (rows.low, rows.high) == (address, end)


def test_weight_gradients_whose_rows_begin_anywhere_are_read(driver, sm90) -> None:
    """Along M and N; of a few columns they are axpy.cu's."""
    columns = 129, 131, 3
    places = []

    def multiply(n: int) -> None:
        a = tensors.strided((129, 83), (1, 129), torch.bfloat16)
        b = tensors.strided((83, n), (n, 1), torch.bfloat16, offset=5)
        places.append((a.data_ptr(), b.data_ptr()))
        torch.ops.cubin._matmul(a, b)

    def run() -> list:
        for n in columns[:2]:
            multiply(n)
        with pytest.raises(RuntimeError, match="no_kernel"):
            multiply(columns[2])
        return [places[:2], driver.launches()]

    places, launches = forked(run)
    for (a, b), n, launch in zip(places, columns[:2], launches, strict=True):
        params = launch_params.read(launch, Params)
        assert launch["kernel"] == "sm90_matmul_bf16_tn_64x64_read"
        assert params.flags & (READ_A | READ_B | CLUSTER) == READ_A | READ_B
        for rows, address, size in ((params.a_rows, a, 129), (params.b_rows, b, n)):
            assert (getattr(rows, "from"), rows.stride) == (address, size)
            assert (rows.low, rows.high) == (address, address + 83 * size * 2)


def test_a_bias_of_pairs_stays_in_the_registers(driver, sm90) -> None:
    """Any other bias uses the general epilogue; rows that are not multiples of 16 bytes are stored
    without the TMA, and have no map."""
    cases = {
        "pairs": ((256, 512), 1, 0, 0),
        "odd address": ((256, 512), 1, 1, GENERAL),
        "stride": ((256, 512), 3, 0, GENERAL),
        "ragged rows": ((256, 511), 1, 0, OUT_UNALIGNED),
    }

    def add(shape: tuple[int, int], stride: int, offset: int, _: int) -> None:
        x, weight = (tensors.empty(rows, 256, dtype=torch.bfloat16) for rows in shape)
        bias = tensors.strided(shape[1:], (stride,), torch.bfloat16, offset=offset)
        torch.ops.cubin._linear(x, weight, bias)

    found = launches_of(driver, [partial(add, *case) for case in cases.values()])
    for (name, ((_, n), *_, flag)), (_, params) in zip(cases.items(), found, strict=True):
        assert params.flags & (GENERAL | OUT_UNALIGNED) == flag, name
        assert params.bias != 0, name
        assert (params.out != 0) == (flag != 0), name
        assert params.out_stride_m == (n if flag else 0), name
        assert any(params.out_map.words) == (flag == 0), name


def test_batches_are_dims_of_the_tensor_maps(driver, sm90) -> None:
    def call() -> None:
        a = tensors.strided((3, 2, 128, 64), (64 * 256, 0, 64, 1), torch.float16)
        b = tensors.strided((3, 2, 64, 256), (0, 64 * 256, 256, 1), torch.float16)
        torch.ops.cubin._matmul(a, b)

    ((_, params),) = launches_of(driver, [call])
    a, b, out = (read_map(x) for x in (params.a, params.b, params.out_map))
    assert list(params.batch) == [2, 3, 1]
    assert a["dims"] == [64, 128, 2, 3, 1]
    assert a["strides"][1:3] == [0, 64 * 256 * 2]
    assert b["strides"][1:3] == [64 * 256 * 2, 0]
    assert out["dims"] == [256, 128, 2, 3, 1]
    assert out["strides"] == [256 * 2, 128 * 256 * 2, 2 * 128 * 256 * 2, 0]


def test_batch_invariant_products_accumulate_all_of_k_in_order(driver, sm90) -> None:
    backwards, split, streamed = (4096, 4096, 4096), (512, 1024, 8192), (8192, 14336, 4096)

    def multiply(shape: tuple[int, int, int], switch: bool) -> None:
        m, n, k = shape
        a = tensors.empty(m, k, dtype=torch.bfloat16)
        b = tensors.strided((k, n), (1, k), torch.bfloat16)
        with torch_cubin.batch_invariant(switch):
            torch.ops.cubin._matmul(a, b)

    outside = launches_of(driver, [partial(multiply, x, False) for x in (backwards, split)])
    assert outside[0][1].flags & SERPENTINE
    assert outside[1][1].flags & OVER_K
    # (Outside, the last one would stream its last tiles, for which the stand-in has no memory.)
    shapes = (backwards, split, streamed)
    inside = launches_of(driver, [partial(multiply, x, True) for x in shapes])
    for _, params in inside:
        assert not params.flags & (SERPENTINE | OVER_K)
        assert params.stream_tiles == 0
    # Equal parts of K, by N and K: k blocks of a part.
    assert [params.split_blocks for _, params in inside] == [32, 32, 0]
    assert ["_parts_" in launch["kernel"] for launch, _ in inside] == [True, True, False]


def test_k_is_whole_for_all_numbers_of_rows_or_for_none(driver, sm90) -> None:
    """A row alone has the bits that it has among others whose rows begin anywhere, and a matrix
    those that it has in a batch; with tensor_parallel=, those of all numbers of columns."""
    n, k = 1024, 2048

    def multiply(*shape: int, stride: int = k, ranks: bool = False) -> None:
        strides = [stride, 1] if len(shape) == 2 else [shape[1] * k + stride - k, k, 1]
        a = tensors.strided(shape, strides, torch.bfloat16)
        b = tensors.strided((k, n), (1, k), torch.bfloat16)
        library.set_process_keeps_k_whole(ranks)
        with torch_cubin.batch_invariant():
            torch.ops.cubin._matmul(a, b)

    def parts(*shape: int, **options: int) -> list[bool]:
        run = partial(multiply, *shape, **options)
        return [params.split_blocks > 0 for _, params in launches_of(driver, [run])]

    for shape in ((1, k), (64, k), (1, 64, k), (2, 64, k)):
        assert parts(*shape) == [True]
        assert parts(*shape, ranks=True) == [False]
    for shape in ((1, k), (1, 64, k)):  # in a dim of size 1, whose stride no address depends on
        assert parts(*shape, stride=k + 8) == [True]
        assert parts(*shape, stride=k + 4) == [False]

    def multiply_batches() -> list[dict]:
        """Of more dims than a tensor map has: launched by those of the outermost."""
        x = tensors.strided((2, 2, 2, 2, 64, k), (128 * k, 0, 64 * k, 0, k, 1), torch.bfloat16)
        y = tensors.strided((2, 2, 2, 2, k, n), (0, 2 * n * k, 0, n * k, 1, k), torch.bfloat16)
        with torch_cubin.batch_invariant():
            torch.ops.cubin._matmul(x, y)
        return driver.launches()

    kernels = [launch["kernel"] for launch in forked(multiply_batches)]
    assert len(kernels) == 2
    assert all("_parts_" in kernel for kernel in kernels)


@pytest.mark.parametrize(("n", "flag"), [(512, 0), (510, OUT_UNALIGNED)])
def test_a_bias_of_tf32_rows_that_have_no_map(driver, sm90, n: int, flag: int) -> None:
    """Warps store finished panels themselves, where rows are of 2040 bytes."""

    def call() -> None:
        torch.backends.cuda.matmul.allow_tf32 = True
        x, weight = tensors.empty(2048, 2048), tensors.empty(n, 2048)
        torch.ops.cubin._linear(x, weight, tensors.empty(n))

    ((launch, params),) = launches_of(driver, [call])
    assert launch["kernel"].startswith("sm90_matmul_tf32_nt_")
    assert params.flags & (GENERAL | FINISH | OUT_UNALIGNED) == FINISH | flag
    assert any(params.out_map.words) == (flag == 0)


@pytest.mark.parametrize("layout", ["nn", "tt"])
def test_tf32_along_m_or_n_is_a_of_the_kernel(driver, sm90, layout: str) -> None:
    """If that operand is B, the product is transposed. Sums are stored in pairs, with the bias of a
    transposed product; everything else uses the general epilogue."""
    m, k = 1000, 520
    plain = FINISH if layout == "nn" else GENERAL
    cases = [
        (768, False, 1, 0),
        (768, True, 1, plain),
        (766, True, 2, GENERAL),
        (765, False, 1, GENERAL),
    ]

    def call(n: int, has_bias: bool, alpha: float, _: int) -> None:
        torch.backends.cuda.matmul.allow_tf32 = True
        a = tensors.strided((m, k), (k, 1) if layout == "nn" else (1, m))
        along_k, along_n = (n + -n % 4, 1) if layout == "nn" else (1, k)
        if alpha != 1:
            b = tensors.strided((k, n), (along_k, along_n))
            torch.ops.cubin._addmm(tensors.empty(m, n), a, b, alpha=alpha)
        else:
            weight = tensors.strided((n, k), (along_n, along_k))
            torch.ops.cubin._linear(a, weight, tensors.empty(n) if has_bias else None)

    found = launches_of(driver, [partial(call, *case) for case in cases])
    for (n, has_bias, alpha, flag), (launch, params) in zip(cases, found, strict=True):
        assert launch["kernel"].startswith("sm90_matmul_tf32_tt_")
        assert (params.m, params.n) == ((n, m) if layout == "nn" else (m, n))
        assert params.flags & (GENERAL | FINISH) == flag
        assert params.flags & (TRANSPOSED | BIAS_ROW) == (
            TRANSPOSED | BIAS_ROW if layout == "nn" else 0
        )
        assert params.out_stride_m == n
        assert (params.bias != 0) == (has_bias and alpha == 1)
        if params.addend:
            strides = params.addend_stride_m, params.addend_stride_n
            assert strides == ((1, n) if layout == "nn" else (n, 1))
        kernel = next(x for x in sm90 if x["name"] == launch["kernel"])
        sharers = 1 << (params.flags >> ALONG_N & 3), 1 << (params.flags >> ALONG_M & 3)
        boxes = [[32, 32 // sharers[0]], [32, kernel["tile"][1] // sharers[1]]]
        assert [read_map(x)["box"] for x in (params.a, params.b)] == boxes
        assert read_map(params.a)["dims"] == [params.m, k]
        assert not any(params.out_map.words)


def test_a_transposed_product_swaps_broadcasts_and_clusters_too(driver, sm90) -> None:
    """A of the kernel is B, with B's batch strides; what a cluster shares along N is B's tile."""
    m, n, k = 1100, 520, 264

    def call() -> None:
        torch.backends.cuda.matmul.allow_tf32 = True
        a = tensors.strided((3, 2, m, k), (m * k, 0, k, 1))
        b = tensors.strided((3, 2, k, n), (0, n * k, n, 1))
        with measure.watching():
            library.force_config("sm90 128x128 eight_a")
            torch.ops.cubin._matmul(a, b)

    ((launch, params),) = launches_of(driver, [call])
    assert launch["kernel"] == "sm90_matmul_tf32_tt_128x128"
    assert launch["attributes"]["4"] == [8, 1, 1]
    assert params.flags & CLUSTER == 3 << ALONG_N
    assert (params.m, params.n, params.tiles_m, params.tiles_n) == (n, m, 5, 2)
    assert list(params.batch) == [2, 3, 1]
    a, b = (read_map(x) for x in (params.a, params.b))
    assert (a["dims"], a["box"][:2]) == ([n, k, 2, 3, 1], [32, 4])  # 32 of K, split over 8
    assert (b["dims"], b["box"][:2]) == ([k, m, 2, 3, 1], [32, 128])
    assert a["strides"][1:3] == [n * k * 4, 0]
    assert b["strides"][1:3] == [0, m * k * 4]
    assert [params.out_stride_m, *params.out_batch_stride] == [n, m * n, 2 * m * n, 0]


def test_split_sums_go_to_matrices_of_their_own(driver, tmp_path, monkeypatch) -> None:
    """Whole blocks of K, no split is empty; the second kernel adds all of them."""
    kinds = ("sm90", "finish")
    kernels = catalogs.kernels_of("matmul", lambda k: k["kind"] in kinds)
    catalogs.install(driver, tmp_path, monkeypatch, kernels)

    # The stand-in's clocks make every second kernel slow, so a table names the config.
    product = {"m": 128, "n": 136, "k": 16320, "batch": 1, "math": "16_bit", "way": "split"}
    kinds = ("k_lines", "k_vectors")
    table = {"version": 1, "gpu": "Fake GPU"}
    table["products"] = [{**product, "a": a, "b": b} for a in kinds for b in kinds]

    def run() -> list:
        library.add_tuned_table(table)
        a = tensors.empty(128, 16320, dtype=torch.bfloat16)
        b = tensors.strided((16320, 136), (1, 16320), torch.bfloat16)
        torch.ops.cubin._matmul(a, b)
        return driver.launches()

    product, finish = forked(run)
    assert product["kernel"].startswith("sm90_matmul_bf16_nt_")
    assert finish["kernel"] == "finish_matmul_bf16_splits"
    params = launch_params.read(product, Params)
    assert params.flags & (SPLIT_K | SUMS) == SPLIT_K | SUMS
    assert not params.flags & (BATCHED | OVER_K | GENERAL)
    splits = params.batch[0]
    assert splits > 2
    assert params.k_blocks == 255
    assert (splits - 1) * params.split_blocks < 255 <= splits * params.split_blocks
    assert params.whole_tiles == splits * params.tiles_m * params.tiles_n
    assert params.out_batch_stride[0] == 128 * 136  # from split to split
