"""Products with few rows or columns, and layers of one input of few rows: which kernel is
launched, and its parameters.

The stand-in driver writes tensor maps in a layout of its own, so that the test reads them back.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import re
from dataclasses import dataclass

import pytest
import torch
from c_layouts import MATMUL, structure
from fake_driver import tensors
from faults import catalogs, launch_params
from faults.forked import forked, launches_of

import torch_cubin
from torch_cubin._native import library
from torch_cubin._tuning import measure

PARAMS = structure(f"{MATMUL}/sm90_skinny_params.h", "Sm90SkinnyParams")
LIMIT = 231424  # dynamic bytes that a block can have beside the kernel's static ones


@pytest.fixture
def catalog(driver, tmp_path, monkeypatch) -> None:
    """Without the large products' kernels, whose times the stand-in's memory cannot tell apart."""
    kernels = catalogs.kernels_of("matmul", lambda k: k["kind"] not in ("sm90", "sm90_ping_pong"))
    catalogs.install(driver, tmp_path, monkeypatch, kernels)


@dataclass
class Map:
    """A tensor map: sizes and box from the innermost dim, the row stride in bytes."""

    address: int
    dims: tuple[int, int]
    stride: int
    box: tuple[int, int]

    @staticmethod
    def read(map_: ctypes.Structure) -> Map:
        found = launch_params.read_map(map_)
        assert found["data_type"] in (6, 9)  # float16, bfloat16
        assert found["rank"] == 2
        assert found["swizzle"] == 3  # 128 bytes
        (stride,) = found["strides"]
        return Map(found["address"], tuple(found["dims"]), stride, tuple(found["box"]))


@dataclass
class Launch:
    """One launch of a skinny kernel."""

    name: str
    grid: int
    cluster: int
    shared: int
    weights: Map  # of the first layer
    tokens: Map
    out_strides: tuple[int, int]
    bias_strides: tuple[int, int]
    layer: ctypes.Structure  # the first
    params: ctypes.Structure

    def layers(self) -> list[ctypes.Structure]:
        return list(self.params.layers)[: self.params.layers_count]

    def is_streamed(self) -> bool:
        return self.name.endswith(("_streamed", "_pairs"))

    def weights_size(self) -> tuple[int, int]:
        """Rows and K."""
        return self.weights.dims if "_nn_" in self.name else self.weights.dims[::-1]

    @staticmethod
    def read(record: dict) -> Launch:
        params = launch_params.read(record, PARAMS)
        layer = params.layers[0]
        return Launch(
            record["kernel"],
            record["grid"][0],
            record["attributes"].get("4", [1])[0],
            record["shared"],
            Map.read(params.weights[0]),
            Map.read(params.tokens),
            (layer.out_stride_row, layer.out_stride_token),
            (layer.bias_stride_row, layer.bias_stride_token),
            layer,
            params,
        )


def operands(m: int, n: int, k: int, layout: str, dtype=torch.bfloat16):
    a = tensors.empty(m, k, dtype=dtype)
    if layout == "nt":
        return a, tensors.strided((k, n), (1, k), dtype)
    return a, tensors.empty(k, n, dtype=dtype)


def check(launch: Launch, tokens: int, rows: list[int], k: int) -> None:
    """Properties of every launch, for any plan. `rows`: of each layer with an output."""
    sizes, kind = re.fullmatch(r".*_(\d+x\d+)(_streamed|_pairs)?", launch.name).groups()
    kernel_tokens, kernel_rows = map(int, sizes.split("x"))
    together = 2 if kind == "_pairs" else 1
    n = launch.params
    assert (n.tokens_count, n.k) == (tokens, k)
    assert [layer.rows_count for layer in launch.layers()] == rows
    assert tokens <= kernel_tokens
    halves = 2 if "_gated_" in launch.name else 1
    assert n.rows % (8 * halves) == 0
    assert n.rows <= kernel_rows
    if n.uneven:  # pairs of blocks, of 64 rows and of 32
        (of_both,) = rows
        tiles = [2 * -(-of_both // 96)]
        assert n.tiles <= 132
    else:
        tiles = [-(-each // (n.rows * together // halves)) for each in rows]
    firsts = list(itertools.accumulate(tiles, initial=0))
    assert [*(layer.first_tile for layer in launch.layers()), n.tiles] == firsts
    assert launch.cluster == (2 if n.uneven else max(n.splits, 1) * together) <= 8
    assert n.splits <= -(-k // 128)  # no block without work
    expected = n.tiles * n.splits
    if kind:
        assert (launch.grid, n.rows) == (132, kernel_rows)
        assert n.splits in (0, 1)
        assert n.tiles % (132 // together) > 0
        assert n.partial
        assert n.counters
    else:
        assert launch.grid == (expected if n.splits > 1 else min(expected, 132))
    contiguous = "_nn_" in launch.name
    stage_rows = -(-n.rows // 64) * 64 if contiguous else n.rows
    assert n.ring_bytes == n.stages * (stage_rows + kernel_tokens) * 256
    assert 2 <= n.stages <= 16
    groups = kernel_rows // 64 // halves * kernel_tokens // 8
    parts = -(-groups // n.splits) * n.splits * halves * 2048 if n.splits > 1 else 0
    beyond = (kernel_rows - stage_rows) * (256 if contiguous else 128)
    assert launch.shared == n.ring_bytes + max(parts, beyond) <= LIMIT
    assert launch.tokens.dims == (k, tokens)
    assert launch.tokens.box == (64, kernel_tokens)
    weights = [Map.read(map_) for map_ in n.weights[: len(rows) * halves]]
    for each, own in zip(weights, rows * halves, strict=True):
        assert each.dims == ((own, k) if contiguous else (k, own))
        assert each.box == ((64, 128) if contiguous else (64, n.rows // halves))
    assert len({each.address for each in weights}) == len(weights)
    if n.uneven:
        thin = Map.read(n.weights[1])
        assert (thin.address, thin.dims) == (weights[0].address, weights[0].dims)
        assert thin.box == (32, 128)
    for each in (launch.tokens, *weights):
        assert each.stride % 16 == 0
        assert each.stride >= 2 * each.dims[0]


SHAPES = (
    (4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (10240, 8192), (57344, 8192),
    (8192, 28672), (1024, 4096), (5120, 5120), (128256, 4096), (10504, 2056),
)  # fmt: skip


@pytest.mark.parametrize("layout", ["nt", "nn"])
@pytest.mark.parametrize("tokens", [5, 16, 17, 64])
def test_tokens_in_rows(driver, catalog, tokens: int, layout: str) -> None:
    def call() -> None:
        for n, k in SHAPES:
            torch.ops.cubin._matmul(*operands(tokens, n, k, layout))

    own = f"sm90_skinny_matmul_bf16_{layout}_"
    records = [record for record in launches_of(driver, call) if record["kernel"].startswith(own)]
    assert len(records) > len(SHAPES) / 2  # some run as fast on tiles
    for launch in map(Launch.read, records):
        n, k = launch.weights_size()
        assert (n, k) in SHAPES
        check(launch, tokens, [n], k)
        assert launch.out_strides == (1, n)
        assert launch.params.pairs == 1


@pytest.mark.parametrize("invariant", [False, True])
def test_two_multiprocessors_receive_as_much_as_any_two(driver, catalog, invariant: bool) -> None:
    """Of 5,473 to 6,336 columns, where tiles of 64 would be two for some pairs, one for others."""
    columns = (4224, 5120, 5568, 6144, 6400)

    def call() -> None:
        with torch_cubin.batch_invariant() if invariant else contextlib.nullcontext():
            for n in columns:
                torch.ops.cubin._matmul(*operands(8, n, 4096, "nn"))

    launches = [Launch.read(record) for record in launches_of(driver, call)]
    for launch, n in zip(launches, columns, strict=True):
        check(launch, 8, [n], 4096)
    found = [launch.params.uneven for launch in launches]
    assert found == [0, 0, invariant, invariant, 0]
    if invariant:
        assert [launch.grid for launch in launches[2:4]] == [116, 128]


@pytest.mark.parametrize("tokens", [5, 33])
def test_tokens_in_columns(driver, catalog, tokens: int) -> None:
    """A is the large operand: out's rows are the weights' rows."""
    m, k = 8192, 4096

    def call() -> None:
        a, b = operands(m, tokens, k, "nt", torch.float16)
        torch.ops.cubin._matmul(a, b)
        torch.ops.cubin._matmul(tensors.strided((m, k), (1, m), torch.float16), b)

    rows, columns = (Launch.read(record) for record in launches_of(driver, call))
    assert rows.name.startswith("sm90_skinny_matmul_f16_nt_")
    assert columns.name.startswith("sm90_skinny_matmul_f16_nn_")
    for launch in (rows, columns):
        check(launch, tokens, [m], k)
        assert launch.out_strides == (tokens, 1)
        assert launch.params.pairs == 0  # rows of out are an odd number of elements apart


def parts_of(n: int, k: int, layout: str) -> int:
    """Of K, under batch_invariant(): by the weights alone."""
    least = 512 if n <= 1024 else 1024
    most = {4: 1920, 2: 4096}
    fits = (p for p in most if n <= most[p] and k % (128 * p) == 0 and k >= least * p)
    return next(fits, 1) if layout == "nt" and (n < 3712 or k < 8192) else 1


def test_batch_invariant_products_split_k_by_the_weights_alone(driver, catalog) -> None:
    """Nor do tiles get smaller than the tensor maps' boxes of 8 rows."""
    cases = [
        (*shape, layout, tokens)
        for shape in (*SHAPES, (8, 4096))
        for layout in ("nt", "nn")
        for tokens in (8, 64)
    ]

    def call() -> None:
        with torch_cubin.batch_invariant():
            for n, k, layout, tokens in cases:
                torch.ops.cubin._matmul(*operands(tokens, n, k, layout))

    launches = [
        Launch.read(record)
        for record in launches_of(driver, call)
        if record["kernel"].startswith("sm90_skinny")
    ]
    assert len(launches) >= len(cases) - 8
    streamed = [launch for launch in launches if launch.is_streamed()]
    assert {launch.params.splits for launch in streamed} == {0}  # parts that continue one another
    for launch in launches:
        n, k = launch.weights_size()
        if not launch.is_streamed():
            assert launch.params.splits == parts_of(n, k, "nt" if "_nt_" in launch.name else "nn")
        check(launch, launch.tokens.dims[1], [n], k)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (((65, 4096), (4096, 1)), ((4096, 4096), (1, 4096))),  # too many tokens
        (((16, 4096), (1, 16)), ((4096, 4096), (1, 4096))),  # tokens whose K is not contiguous
        (((16, 4096), (4096, 1)), ((4096, 4096), (1, 0))),  # rows that are all one
    ],
)
def test_operands_without_a_tensor_map_take_other_kernels(driver, catalog, a, b) -> None:
    def call() -> None:
        torch.ops.cubin._matmul(*(tensors.strided(*each, torch.bfloat16) for each in (a, b)))

    names = [record["kernel"] for record in launches_of(driver, call)]
    assert names
    assert not any(name.startswith("sm90_skinny") for name in names[-1:])


def test_k_of_all_tiles_is_divided_evenly_where_they_fill_no_whole_waves(driver, catalog) -> None:
    """Nor where they are few, or their rows begin within lines of the cache, nor of weights whose
    tiles may have any number of rows. Under batch_invariant() a part continues the one before."""

    def offered(n: int, layout: str = "nn", *, switch: bool = False, tokens: int = 16) -> list[str]:
        with measure.watching(), torch_cubin.batch_invariant(switch):
            torch.ops.cubin._matmul(*operands(tokens, n, 4096, layout))
            plan = library.watched_plans()[-1]  # others are of copied operands
        return sorted(each["name"] for each in plan["configs"] if "streamed" in each["name"])

    few, more = "sm90_skinny 64 rows streamed", "sm90_skinny 128 rows streamed"
    pairs = "sm90_skinny 64 rows streamed in pairs"

    def run() -> list:
        with measure.watching():
            for tokens, config in ((16, few), (33, pairs)):
                library.force_config(config)
                torch.ops.cubin._matmul(*operands(tokens, 28736, 4096, "nn"))
                library.force_config("")
        launches = driver.launches()
        sizes = [offered(n) for n in (28672, 132 * 64, 66 * 64, 67 * 64, 28680)]
        sizes += [offered(n, tokens=33) for n in (28672, 132 * 64, 66 * 64, 67 * 64)]
        return [launches, sizes, offered(28672, "nt"), offered(28672, switch=True)]

    records, sizes, other_layout, invariant = forked(run)
    alone, paired = map(Launch.read, records)
    check(alone, 16, [28736], 4096)
    check(paired, 33, [28736], 4096)
    assert alone.name.endswith("_nn_16x64_streamed")
    assert paired.name.endswith("_nn_64x64_pairs")
    assert (alone.params.tiles, paired.params.tiles) == (449, 225)
    assert sizes[:5] == [[more, few], [], [], [few], []]
    assert sizes[5:] == [[pairs], [], [], [pairs]]
    assert (other_layout, invariant) == ([], [more, few])


def test_a_bias_runs_along_the_columns_of_out(driver, catalog) -> None:
    def call() -> None:
        for m, n in ((16, 8192), (8192, 16)):
            x = tensors.empty(m, 4096, dtype=torch.bfloat16)
            weight = tensors.empty(n, 4096, dtype=torch.bfloat16)
            bias = tensors.strided((n,), (2,), torch.bfloat16)
            torch.ops.cubin._linear(x, weight, bias)

    rows, columns = (Launch.read(record) for record in launches_of(driver, call))
    assert rows.bias_strides == (2, 0)
    assert columns.bias_strides == (0, 2)


# q, k and v of a few heads; more layers than tiles; rows of one tile alone.
@pytest.mark.parametrize("sizes", [(2048, 512, 512), (8, 16, 4096, 72), (57344, 57344)], ids=str)
def test_layers_of_one_input_are_one_launch(driver, catalog, sizes: tuple[int, ...]) -> None:
    tokens = (1, 17, 64)

    def call() -> None:
        for rows in tokens:
            x = tensors.empty(1, rows, 2048, dtype=torch.float16)
            weights = [tensors.empty(n, 2048, dtype=torch.float16) for n in sizes]
            biases = [tensors.empty(n, dtype=torch.float16) for n in sizes]
            torch.ops.cubin._linears(x, weights, [None, *biases[1:]])

    launches = list(map(Launch.read, launches_of(driver, call)))
    assert len(launches) == len(tokens)
    for launch, rows in zip(launches, tokens, strict=True):
        check(launch, rows, list(sizes), 2048)
        assert [bool(layer.bias) for layer in launch.layers()] == [False] + [True] * (
            len(sizes) - 1
        )
        assert len({layer.out for layer in launch.layers()}) == len(sizes)
        for layer, n in zip(launch.layers(), sizes, strict=True):
            assert (layer.out_stride_row, layer.out_stride_token) == (1, n)


def test_no_wave_is_begun_for_the_last_tiles_of_layers(driver, catalog) -> None:
    """Each layer ends with a tile of its own, so that as many tiles as multiprocessors of all
    layers together may be more of each."""
    sizes = (4096, 1032, 1032)

    def call() -> None:
        weights = [tensors.empty(n, 4096, dtype=torch.bfloat16) for n in sizes]
        torch.ops.cubin._linears(tensors.empty(8, 4096, dtype=torch.bfloat16), weights, [])

    (launch,) = map(Launch.read, launches_of(driver, call))
    check(launch, 8, list(sizes), 4096)
    assert launch.params.tiles * launch.params.splits <= 132


def test_clusters_of_layers_that_do_not_all_run_at_a_time_share_multiprocessors(
    driver, catalog
) -> None:
    """32 tiles of four parts of K are two clusters more than blocks with a multiprocessor each."""
    few, many = (768, 1024), (1024, 1024)

    def call() -> None:
        with torch_cubin.batch_invariant():
            for sizes in (few, many):
                weights = [tensors.empty(n, 8192, dtype=torch.bfloat16) for n in sizes]
                tokens = tensors.empty(64, 8192, dtype=torch.bfloat16)
                torch.ops.cubin._linears(tokens, weights, [])

    launches = list(map(Launch.read, launches_of(driver, call)))
    for launch, sizes in zip(launches, (few, many), strict=True):
        check(launch, 64, list(sizes), 8192)
        assert launch.params.splits == 4
    assert [launch.shared <= LIMIT // 2 - 1024 for launch in launches] == [False, True]


@pytest.mark.parametrize("activation", ["none", "gelu_tanh", "silu"])
@pytest.mark.parametrize("rows", [1, 33])
def test_a_gated_layer_of_few_rows_is_one_launch(driver, catalog, rows, activation) -> None:
    sizes = ((8192, 2048), (72, 4104), (28672, 8192))

    def call() -> None:
        for n, k in sizes:
            x, gate, up = (tensors.empty(m, k, dtype=torch.bfloat16) for m in (rows, n, n))
            torch.ops.cubin._linear_glu(x, gate, up, activation)

    launches = list(map(Launch.read, launches_of(driver, call)))
    for launch, (n, k) in zip(launches, sizes, strict=True):
        assert launch.name.startswith("sm90_skinny_matmul_gated_bf16_nt_")
        check(launch, rows, [n], k)
        assert launch.params.activation == {"none": 0, "gelu_tanh": 3, "silu": 4}[activation]
        assert launch.layer.bias == 0


def test_what_few_rows_share_no_launch_for(driver, catalog) -> None:
    """A K of less than a stage, and fewer columns than rows."""

    def call() -> None:
        for rows, k, n in ((16, 64, 2048), (32, 512, 8)):
            x, *weights = (tensors.empty(m, k, dtype=torch.bfloat16) for m in (rows, n, n))
            torch.ops.cubin._linears(x, weights, [])

    assert len(launches_of(driver, call)) == 4
