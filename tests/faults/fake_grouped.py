"""What the kernels of groups are launched with, on the stand-in driver."""

from __future__ import annotations

from collections.abc import Callable

import grouped_sizes
import pytest
import torch
from c_layouts import MATMUL, structure
from fake_driver import tensors
from faults import catalogs, launch_params
from faults.forked import forked, launches_of
from faults.launch_params import read_map
from gpu import cases

PARAMS = structure(f"{MATMUL}/sm90_grouped_params.h", "Sm90GroupedParams")
PORTABLE = structure(f"{MATMUL}/groups_params.h", "GroupedMatmulParams")
WIDE, PAIR, ZERO_REST, UNALIGNED = 1, 2, 4, 8
CONTRACT, GATHER = 8, 16
op = torch.ops.cubin._grouped_matmul


@pytest.fixture
def catalog(driver, tmp_path, monkeypatch) -> dict[str, dict]:
    """A catalog of the grouped kernels, by name."""
    kernels = catalogs.kernels_of("grouped")
    catalogs.install(driver, tmp_path, monkeypatch, kernels)
    return {kernel["symbol"]: kernel for kernel in kernels}


def only_launch(driver, call: Callable[[], object]):
    (launch,) = launches_of(driver, call)
    return launch


def launch_of(driver, catalog, call: Callable[[], object]):
    """The only launch's kernel, its grid and its parameter."""
    launch = only_launch(driver, call)
    return catalog[launch["kernel"]], launch["grid"], launch_params.read(launch, PARAMS)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return tensors.empty(*shape, dtype=dtype)


def weights(groups: int, k: int, n: int, layout: str, dtype: torch.dtype) -> torch.Tensor:
    """(groups, k, n), contiguous along k in "nt", else along n."""
    strides = (n * k, 1, k) if layout == "nt" else (n * k, n, 1)
    return tensors.strided((groups, k, n), strides, dtype)


def check_grid(kernel: dict, grid: list[int], params, tiles_m: int) -> None:
    """Whole clusters, no more than the tiles that groups could have."""
    pair = 2 if params.flags & PAIR else 1
    assert grid[0] % pair == 0
    assert grid[0] <= min(132, pair * tiles_m * params.tiles_n)
    assert params.tiles_n == -(-params.n // kernel["tile"][1])


@pytest.mark.parametrize("offs_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["nt", "nn"])
@pytest.mark.parametrize(("m", "groups"), [(32768, 4), (8192, 128), (1, 64), (70, 3)])
def test_rows(driver, catalog, m, groups, layout, dtype, offs_dtype) -> None:
    k, n = 1032, 520

    def call() -> None:
        b = weights(groups, k, n, layout, dtype)
        op(empty(m, k, dtype=dtype), b, empty(groups, dtype=offs_dtype), True)

    kernel, grid, params = launch_of(driver, catalog, call)
    assert (kernel["layout"], kernel["dtype"]) == (layout, str(dtype).removeprefix("torch."))
    check_grid(kernel, grid, params, -(-m // kernel["tile"][0]) + groups + 1)
    assert bool(params.flags & WIDE) == (offs_dtype == torch.int64)
    assert params.flags & ZERO_REST
    assert not params.flags & UNALIGNED
    assert (params.m, params.n, params.limit, params.groups) == (m, n, m, groups)
    assert params.k_blocks == -(-k // 64)
    a, b, out = map(read_map, (params.a, params.b, params.out_map))
    # Rows that do not exist are no part of the box.
    rows = min(m, kernel["tile"][0])
    assert (a["dims"], a["box"]) == ([k, m], [64, rows])
    assert params.stage_bytes == 2 * 64 * (rows + kernel["tile"][1])
    if layout == "nt":
        assert (b["dims"][:3], b["box"][:3]) == ([k, n, groups], [64, kernel["tile"][1] // 2, 1])
    else:
        assert (b["dims"][:3], b["box"][:3]) == ([n, k, groups], [64, 64, 1])
    assert b["strides"][1] == 2 * n * k
    assert (out["dims"][:3], out["box"][:3]) == ([n, m, 1], [64, 16, 1])
    assert (params.out, params.out_stride) == (out["address"], n)


def test_contraction(driver, catalog) -> None:
    k, m, n, groups = 4096, 768, 1024, 16

    def call() -> None:
        a = tensors.strided((m, k), (1, m), torch.bfloat16)
        op(a, empty(k, n), empty(groups, dtype=torch.int32), False)

    kernel, grid, params = launch_of(driver, catalog, call)
    assert kernel["layout"] == "tn"
    check_grid(kernel, grid, params, -(-m // kernel["tile"][0]) * groups)
    assert (params.m, params.n, params.limit, params.groups) == (m, n, k, groups)
    a, b, out = map(read_map, (params.a, params.b, params.out_map))
    assert (a["dims"], a["box"]) == ([m, k], [64, 64])
    assert params.stage_bytes == 2 * 64 * (kernel["tile"][0] + kernel["tile"][1])
    assert (b["dims"][:3], b["box"][:3]) == ([n, k, 1], [64, 64, 1])
    assert (out["dims"][:3], out["strides"][1]) == ([n, m, groups], 2 * m * n)
    assert params.out_group_stride == m * n


def test_weights_of_every_second_group_are_read_where_they_are(driver, catalog) -> None:
    def call() -> None:
        b = tensors.strided((4, 128, 256), (2 * 128 * 256, 256, 1), torch.bfloat16)
        op(empty(64, 128), b, empty(4, dtype=torch.int32), False)

    _, _, params = launch_of(driver, catalog, call)
    b = read_map(params.b)
    assert (b["dims"][:3], b["strides"][:2]) == ([256, 128, 4], [512, 2 * 2 * 128 * 256])


def test_outputs_of_unaligned_rows_have_no_map(driver, catalog) -> None:
    def call() -> None:
        b = tensors.strided((4, 128, 129), (136 * 128, 1, 128), torch.bfloat16)
        op(empty(64, 128), b, empty(4, dtype=torch.int32), False)

    _, _, params = launch_of(driver, catalog, call)
    assert params.flags & UNALIGNED
    assert (params.n, params.out_stride) == (129, 129)


def kernels_of_empty(driver, catalog, m: int, k: int, n: int, groups: int) -> list[str]:
    def run() -> list:
        op(empty(m, k), empty(groups, k, n), empty(groups, dtype=torch.int32), False)
        return [launch["kernel"] for launch in driver.launches() if launch["kernel"] in catalog]

    return forked(run)


@pytest.mark.parametrize(
    ("m", "k", "n", "groups"), [(0, 64, 64, 2), (64, 64, 0, 2), (64, 64, 64, 0)]
)
def test_nothing_to_multiply_launches_nothing(driver, catalog, m, k, n, groups) -> None:
    assert kernels_of_empty(driver, catalog, m, k, n, groups) == []


def test_groups_without_k_launch_what_finds_wrong_ends(driver, catalog) -> None:
    assert kernels_of_empty(driver, catalog, 64, 0, 64, 2) == ["sm90_grouped_matmul_bf16_nn_64x128"]


@pytest.mark.parametrize("layout", ["nt", "nn"])
@pytest.mark.parametrize("gated", [False, True])
def test_options_take_no_other_kernel(driver, catalog, layout, gated) -> None:
    m, tokens, k, n, groups = 300, 100, 128, 264, 5
    columns = 2 * n if gated else n

    def call() -> None:
        b = weights(groups, k, columns, layout, torch.bfloat16)
        numbers = [empty(m, dtype=torch.int32) for _ in range(2)]
        bias, scale = empty(groups, columns), empty(m, dtype=torch.float32)
        options = bias, scale, *numbers, "silu" if gated else "none"
        op(empty(tokens, k), b, empty(groups, dtype=torch.int32), False, *options)

    kernel, _, params = launch_of(driver, catalog, call)
    assert kernel["experts"]
    assert kernel["layout"] == layout
    assert params.flags & GATHER
    assert params.flags >> 5 & 7 == (4 if gated else 0)
    assert (params.a_height, params.k, params.m, params.n) == (tokens, k, m, n)
    assert (params.limit, params.out_stride) == (m, n)
    assert params.half_columns == (n if gated else kernel["tile"][1] // 2)
    assert len({params.bias, params.scale, params.rows, params.out_rows, 0}) == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("contracts", [False, True])
def test_wide_dtypes_are_read_where_they_are(driver, catalog, dtype, contracts) -> None:
    m, k, n, groups = 70, 33, 51, 4

    def call() -> None:
        ends = empty(groups, dtype=torch.int64)
        if contracts:
            a = tensors.strided((m, k), (1, m + 2), dtype)
            op(a, tensors.strided((k, n), (n + 1, 1), dtype), ends, False)
        else:
            b = tensors.strided((groups, k, n), (k * n + 3, 1, k), dtype)
            op(tensors.strided((m, k), (k + 5, 1), dtype), b, ends, True)

    launch = only_launch(driver, call)
    params = launch_params.read(launch, PORTABLE)
    own = params.matmul
    assert launch["kernel"] in catalog
    rows, columns, _ = catalog[launch["kernel"]]["tile"]
    tiles_m, tiles_n = -(-m // rows), -(-n // columns)
    assert (own.m, own.n, own.k, own.c_stride_m) == (m, n, k, n)
    assert (params.groups, params.m, params.tiles_n) == (groups, m, tiles_n)
    if contracts:
        assert launch["grid"] == [tiles_m * groups * tiles_n, 1, 1]
        assert (params.limit, params.flags) == (k, WIDE | CONTRACT)
        assert (own.a_stride_m, own.a_stride_k) == (1, m + 2)
        assert (own.b_stride_k, own.b_stride_n) == (n + 1, 1)
    else:
        assert launch["grid"] == [(tiles_m + groups + 1) * tiles_n, 1, 1]
        assert (params.limit, params.flags) == (m, WIDE | ZERO_REST)
        assert (own.a_stride_m, own.a_stride_k) == (k + 5, 1)
        assert (own.b_stride_k, own.b_stride_n, params.b_group_stride) == (1, k, k * n + 3)


def test_every_kernel_is_planned_for_some_sizes(driver, catalog) -> None:
    """For those of tests/gpu/test_cuda_grouped.py, which so runs every kernel."""

    def run() -> list[str]:
        for mode, dtype in cases.MODES.items():
            torch.backends.cuda.matmul.allow_tf32 = mode == "tf32"
            for m, groups, n in grouped_sizes.ROWS:
                ends = empty(groups, dtype=torch.int32)
                for layout in ("nt", "nn"):
                    op(empty(m, 72, dtype=dtype), weights(groups, 72, n, layout, dtype), ends, True)
            ends = empty(grouped_sizes.SUMMED_GROUPS, dtype=torch.int32)
            for k, m, n in grouped_sizes.SUMS:
                a = tensors.strided((m, k), (1, m), dtype)
                op(a, empty(k, n, dtype=dtype), ends, False)
        return [launch["kernel"] for launch in driver.launches()]

    assert set(forked(run)) == set(catalog)


def test_more_rows_than_kernels_count_are_refused(driver, catalog) -> None:
    """Of `rows`, which mat_a need not have."""
    rows = tensors.strided((2**30,), (0,), torch.int32)
    for dtype in (torch.bfloat16, torch.float32):
        a, b = empty(8, 64, dtype=dtype), weights(3, 64, 64, "nt", dtype)
        with pytest.raises(RuntimeError, match=r"\[no_kernel\].*has a size that no kernel takes"):
            op(a, b, empty(3, dtype=torch.int32), False, None, None, rows)
