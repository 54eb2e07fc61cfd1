"""Launches of the kernels over rows on the stand-in driver: threads, sizes, strides."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from c_layouts import ROWS, structure
from fake_driver import tensors
from faults import catalogs
from faults.forked import forked
from faults.row_launches import empty, launches_of

import torch_cubin
from torch_cubin._drop_in import aten_kernels, row_kernels
from torch_cubin._native import library

NORM = structure(f"{ROWS}/norm_params.h", "NormParams")
SUMS_OF_COLUMNS = structure(f"{ROWS}/column_sums_params.h", "ColumnSumsParams")
SOFTMAX = structure(f"{ROWS}/softmax_params.h", "RowsSoftmaxParams")
ops = torch.ops.cubin


@pytest.fixture(autouse=True)
def catalog(driver, tmp_path, monkeypatch) -> None:
    catalogs.install(driver, tmp_path, monkeypatch, catalogs.kernels_of("rows"))


def norm(*args: Any, weight: Any = None) -> Callable[[], object]:
    residual = args[1] if len(args) > 1 else None
    return lambda: ops._norm(args[0], residual, args[0].shape[-1:], weight, None, None, False)


@pytest.mark.parametrize(
    ("columns", "block", "threads", "cluster"),
    [
        *((1, 256, 1, 1), (16, 256, 1, 1), (17, 256, 4, 1), (4096, 256, 128, 1)),
        *((2048, 256, 64, 1), (2056, 256, 128, 1), (16392, 512, 512, 2)),
        *((520, 256, 32, 1), (1024, 256, 32, 1)),
        *((8192, 256, 256, 1), (16384, 512, 512, 1), (65536, 512, 512, 4), (2**20, 512, 512, 8)),
    ],
)
def test_threads_of_a_row(driver, columns: int, block: int, threads: int, cluster: int) -> None:
    rows, wide = empty(64, columns), empty(columns, dtype=torch.float32)
    for call in (norm(rows, weight=wide), norm(rows, rows, weight=wide)):
        ((launch, params),) = launches_of(driver, call, NORM)
        assert launch["kernel"] == f"norm_rows_bf16_{block}"
        assert (params.threads, params.cluster, params.columns) == (threads, cluster, columns)
        assert (params.rows, params.x_stride) == (64, columns)
        of_block = max(threads, 128)  # blocks are no wider than a row needs
        assert launch["block"] == [of_block, 1, 1]
        assert launch["grid"][0] == max(1, 64 * threads // of_block) * cluster


@pytest.mark.parametrize(
    ("columns", "threads"),
    [(2044, 0), (2056, 96), (2560, 96), (5120, 160), (16384, 512), (16385, 0), (16392, 0)],
)
def test_rows_in_shared_memory(driver, columns: int, threads: int) -> None:
    """Of 2,056 to 16,384 columns by vectors, of RMS norm from 4,104 on: a thread has four, and a
    block is whole warps."""
    rows = empty(64, columns)
    centered = lambda: ops._norm(rows, None, rows.shape[-1:], None, None, None, True)  # noqa: E731
    calls = [(1, centered)]
    if not 2048 < columns <= 4096:
        calls += [(1, norm(rows)), (2, norm(rows, rows))]
    for tensors_of_a_row, call in calls:
        ((launch, params),) = launches_of(driver, call, NORM)
        assert launch["kernel"].startswith("norm_staged_" if threads else "norm_rows_")
        assert (params.rows, params.columns, params.x_stride) == (64, columns, columns)
        if threads:
            assert launch["grid"] == [64, 1, 1]
            assert launch["block"] == [threads, 1, 1]
            assert launch["shared"] == tensors_of_a_row * columns * 2


WARP_WIDTHS = {
    "norm": [256, 512, 768, 1024],
    "softmax": [256, 512, 1024],
    "softmax_backward": [256, 512, 1024],
}


def warp_kernel(kind: str, columns: int) -> str:
    """The kernel whose warps have such rows in registers."""
    return f"{kind}_warp_rows_bf16_{min(x for x in WARP_WIDTHS[kind] if x >= columns)}"


@pytest.mark.parametrize("columns", [40, 64, 72, 128, 136, 256, 264, 768, 776, 1024])
def test_rows_of_a_warp(driver, columns: int) -> None:
    """Of 40 to 1,024 columns by vectors: lanes of a warp have one row, or one of each of two."""
    rows, weight = empty(1000, columns), empty(columns)
    threads = 8 if columns <= 64 else 16 if columns <= 128 else 32
    for call in (norm(rows), norm(rows, rows, weight=weight)):
        ((launch, params),) = launches_of(driver, call, NORM)
        assert launch["kernel"] == warp_kernel("norm", columns)
        assert (params.rows, params.columns, params.x_stride) == (1000, columns, columns)
        assert (params.threads, params.cluster) == (threads, 1)
        at_once = 2 if columns <= 256 else 1
        assert launch["grid"] == [-(-1000 * threads // (launch["block"][0] * at_once)), 1, 1]


@pytest.mark.parametrize(
    ("columns", "threads"),
    [(1032, 96), (1536, 96), (2040, 128), (2048, 128), (2056, 160), (4096, 256)],
)
def test_rows_in_the_registers_of_a_block(driver, columns: int, threads: int) -> None:
    """Of 1,032 to 4,096 columns by vectors, of layer norm 2,048: a thread has two, and a block is
    whole warps."""
    rows, weight = empty(64, columns), empty(columns)
    for call in (norm(rows), norm(rows, rows, weight=weight)):
        ((launch, params),) = launches_of(driver, call, NORM)
        assert launch["kernel"] == "norm_block_rows_bf16"
        assert (launch["grid"], launch["block"]) == ([64, 1, 1], [threads, 1, 1])
        assert (params.rows, params.columns, params.x_stride) == (64, columns, columns)


@pytest.mark.parametrize("columns", [32, 100, 1032, 2048])
def test_rows_that_no_warp_has(driver, columns: int) -> None:
    ((launch, _),) = launches_of(driver, norm(empty(64, columns)), NORM)
    assert not launch["kernel"].startswith("norm_warp_")


def test_parts_of_wider_rows_are_read_where_they_are(driver) -> None:
    x = tensors.strided((3, 5, 128), (5 * 384, 384, 1), torch.bfloat16)
    ((_, params),) = launches_of(driver, norm(x, empty(3, 5, 128), weight=empty(128)), NORM)
    assert (params.rows, params.x_stride, params.residual_stride) == (15, 384, 128)
    x = tensors.strided((15, 100), (385, 1), torch.bfloat16)
    ((_, params),) = launches_of(driver, norm(x), NORM)
    assert params.x_stride == 385


@pytest.mark.parametrize(
    ("columns", "cluster", "kernel"),
    [
        (4088, 1, "norm_backward_sums_rows_bf16_256"),
        (4096, 1, "norm_backward_sums_rows_bf16_512"),
        (8192, 1, "norm_backward_sums_rows_bf16_512"),
        (5120, 1, "norm_backward_sums_rows_bf16_512"),
        (8200, 2, "norm_backward_sums_rows_bf16_512_cluster"),
        (20480, 4, "norm_backward_sums_rows_bf16_512_cluster"),
        (65536, 8, "norm_backward_sums_rows_bf16_512_cluster"),
        (131072, 8, "norm_backward_rows_bf16_256"),
    ],
)
def test_gradients_of_parameters_are_summed_in_parts(
    driver, columns: int, cluster: int, kernel: str
) -> None:
    def call() -> None:
        rows, statistics = empty(4096, columns), empty(4096, 1, dtype=torch.float32)
        weight = empty(columns)
        rest = (weight, 1, None, True, True, torch.bfloat16)
        ops._norm_backward(rows, None, rows, statistics, statistics, *rest)

    launches = launches_of(driver, call, NORM)
    names = [launch["kernel"].partition("_rows_")[0] for launch, _ in launches]
    first, last = launches[0][1], launches[-1][1]
    assert launches[0][0]["kernel"] == kernel
    assert first.cluster == cluster
    assert last.grad_weight
    assert last.grad_bias
    if columns < 131072:
        # As few warps of a block as hold its part of the row, two vectors each thread; two rows of
        # 4,096 fill a block.
        threads = {4088: 256, 4096: 256, 5120: 320, 8192: 512, 8200: 288, 20480: 320, 65536: 512}
        threads = threads[columns]
        block = 2 * threads if columns == 4096 else threads
        assert launches[0][0]["block"] == [block, 1, 1]
        assert first.threads == threads
        assert names == ["norm_backward_sums", "norm_parts"]
        assert first.sums_w
        assert first.sums_b
        assert last.sums_parts * cluster == launches[0][0]["grid"][0]
        if cluster > 1:  # all of them run at a time
            assert last.sums_parts == {2: 66, 4: 30, 8: 15}[cluster]
    else:
        assert names == ["norm_backward", "norm_columns", "norm_parts"]
        assert (launches[1][1].parts, launches[1][1].sums_parts, last.sums_parts) == (16, 0, 16)


@pytest.mark.parametrize(
    ("columns", "kernel", "threads"),
    [
        (128, "256", 8),
        (512, "256", 32),
        (520, "3_vectors", 32),
        (768, "3_vectors", 32),
        (776, "256", 64),
    ],
)
def test_gradients_of_rows_that_fill_a_warp(
    driver, columns: int, kernel: str, threads: int
) -> None:
    def call() -> None:
        rows, statistics = empty(16384, columns), empty(16384, 1, dtype=torch.float32)
        rest = (empty(columns), 1, None, True, True, torch.bfloat16)
        ops._norm_backward(rows, rows, rows, statistics, statistics, *rest)

    (launch, params), (_, last) = launches_of(driver, call, NORM)
    assert launch["kernel"] == f"norm_backward_sums_rows_bf16_{kernel}"
    assert params.threads == threads
    assert last.sums_parts == launch["grid"][0]
    vectors = 3 if kernel == "3_vectors" else 2
    assert launch["shared"] == 3 * 3 * vectors * launch["block"][0] * 16


def norm_backward(rows: int, columns: int, weight: torch.dtype) -> Callable[[], object]:
    def call() -> None:
        x, statistics = empty(rows, columns), empty(rows, 1, dtype=torch.float32)
        rest = (empty(columns, dtype=weight), 1, None, True, True, torch.bfloat16)
        ops._norm_backward(x, None, x, statistics, statistics, *rest)

    return call


@pytest.mark.parametrize(
    ("rows", "columns", "cluster", "vectors"),
    [
        *((1, 4096, 1, 2), (64, 4096, 2, 2), (65, 8, 4, 1), (256, 768, 8, 3)),
        *((1024, 4096, 2, 2), (2048, 2048, 4, 2), (2048, 72, 8, 2), (4096, 1024, 8, 2)),
    ],
)
def test_gradients_of_few_rows_take_one_launch(
    driver, rows: int, columns: int, cluster: int, vectors: int
) -> None:
    call = norm_backward(rows, columns, torch.bfloat16)
    ((launch, params),) = launches_of(driver, call, NORM)
    assert launch["kernel"] == "norm_backward_few_rows_bf16"
    assert launch["block"] == [256, 1, 1]
    assert (params.rows, params.columns, params.vectors) == (rows, columns, vectors)
    assert params.cluster == cluster
    assert params.parts == -(-columns // 64) * cluster  # blocks that have columns
    of_rows = -(-rows // (256 // params.threads))
    assert launch["grid"] == [params.parts + -(-of_rows // cluster) * cluster, 1, 1]
    assert params.grad_weight
    assert params.grad_bias
    assert not params.sums_w


@pytest.mark.parametrize(
    ("rows", "columns", "weight"),
    [
        *((4097, 64, torch.bfloat16), (1025, 4096, torch.bfloat16), (64, 4104, torch.bfloat16)),
        (64, 768, torch.float32),
    ],
)
def test_gradients_of_more_rows_take_two(driver, rows: int, columns: int, weight) -> None:
    launches = launches_of(driver, norm_backward(rows, columns, weight), NORM)
    assert [launch["kernel"].partition("_rows_")[0] for launch, _ in launches] == [SUMS, LAST]


SUMS, COLUMNS, LAST = "norm_backward_sums", "norm_columns", "norm_parts"


@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize(
    ("mask", "kernels"),
    [
        ((True, True, True), [SUMS, LAST]),
        ((True, False, False), ["norm_backward"]),
        ((False, True, False), [COLUMNS, LAST]),  # without reading the gradient's rows once more
        ((False, True, True), [COLUMNS, LAST]),
        ((False, False, False), []),
    ],
)
def test_install_computes_the_gradients_that_are_asked_for(driver, kind, mask, kernels) -> None:
    def call() -> None:
        rows, weight = empty(5000, 64), empty(64)
        statistics = empty(5000, 1, dtype=torch.float32)
        with torch_cubin.install(policy="all"):
            if kind == "layer_norm":
                made = torch.ops.aten.native_layer_norm_backward(
                    rows, rows, [64], statistics, statistics, weight, weight, mask
                )
            else:
                made = torch.ops.aten._fused_rms_norm_backward(
                    rows, rows, [64], statistics, weight, mask[:2]
                )
        assert [each is not None for each in made] == [*mask[: len(made)]]

    launches = launches_of(driver, call, NORM)
    assert [launch["kernel"].partition("_rows_")[0] for launch, _ in launches] == kernels
    for _, params in launches:
        assert bool(params.grad_x) == mask[0]
        assert bool(params.sums_w) == mask[1]
        assert bool(params.sums_b) == (mask[2] and kind == "layer_norm")


@pytest.mark.parametrize("of_input", [False, True])
def test_batch_invariant_gradients_of_weights_have_one_order_of_sums(driver, of_input) -> None:
    """Whether or not the input takes a gradient, on which the kernels depend without the switch."""

    def call() -> None:
        rows, weight = empty(5000, 64), empty(64)
        statistics = empty(5000, 1, dtype=torch.float32)
        mask = (of_input, True, True)
        backward = row_kernels.SERVED["native_layer_norm_backward"]
        made = backward(rows, rows, [64], statistics, statistics, weight, weight, mask)
        assert [each is not None for each in made] == list(mask)

    launches = launches_of(driver, call, NORM)
    assert [launch["kernel"].partition("_rows_")[0] for launch, _ in launches] == [SUMS, LAST]


@pytest.mark.parametrize(
    ("rows", "mask", "reason"),
    [
        (4096, (True, True, False), None),
        (4096, (False, True, True), "no gradient of the input"),
        (128, (True, True, True), None),  # in one launch
        (127, (True, True, True), "few"),
        (4095, (True, True, True), None),
    ],
)
def test_gradients_that_fastest_serves(rows: int, mask, reason) -> None:
    def call() -> list[str]:
        known = {"gpu": "Fake GPU", "kinds": ["norm"], "dtypes": ["bfloat16"]}
        x, weight = empty(rows, 64), empty(64)
        statistics = empty(rows, 1, dtype=torch.float32)
        with torch_cubin.install(), contextlib.suppress(RuntimeError):  # PyTorch's norm is none
            library.set_known_speed(json.dumps({"rows": [known]}))
            aten_kernels.register_over_rows("norm")
            torch.ops.aten.native_layer_norm_backward(
                x, x, [64], statistics, statistics, weight, weight, mask
            )
        return [row.reason for row in torch_cubin.report().declined]

    found = forked(call)
    assert len(found) == (reason is not None)
    assert all(each.startswith(reason) for each in found)


def test_a_cluster_does_not_depend_on_which_op_came_first(driver) -> None:
    """Under MPS, a process may have too few multiprocessors for clusters of eight wide blocks."""
    logits, targets = empty(8, 2**20), empty(8, dtype=torch.int64)
    calls = {
        "norm": norm(logits, weight=empty(2**20, dtype=torch.float32)),
        "losses": lambda: ops._cross_entropy(
            logits, targets, None, "mean", -100, 0.0, torch.bfloat16
        ),
    }

    def clusters_in_order(names: list[str]) -> dict[str, int]:
        driver.set("largest_cluster_threads", 2048)
        found = {}
        for name in names:
            before = len(driver.launches())
            calls[name]()
            (launch,) = (x for x in driver.launches()[before:] if f"{name}_rows" in x["kernel"])
            found[name] = launch["attributes"]["4"][0]
        return found

    for names in (["norm", "losses"], ["losses", "norm"]):
        found = forked(lambda names=names: clusters_in_order(names))
        assert found == {"norm": 4, "losses": 8}, names


@pytest.mark.parametrize(
    ("columns", "cluster", "threads"),
    [
        (8200, 1, 288),
        (16384, 1, 512),
        (16392, 0, 0),
        (65536, 8, 256),
        (128256, 8, 512),
        (131080, 0, 0),
    ],
)
def test_gradients_of_softmax_in_shared_memory(
    driver, columns: int, cluster: int, threads: int
) -> None:
    rows = empty(64, columns)
    call = lambda: ops._softmax_backward(rows, rows, False, torch.bfloat16)  # noqa: E731
    ((launch, params),) = launches_of(driver, call, SOFTMAX)
    kind = "staged_rows_bf16" if cluster else "rows_bf16_"
    assert launch["kernel"].startswith(f"softmax_backward_{kind}")
    if cluster:
        assert params.cluster == cluster
        assert launch["grid"] == [64 * cluster, 1, 1]
        assert launch["block"] == [threads, 1, 1]
        assert launch["shared"] == -(-columns // (8 * cluster)) * 16 * 2


@pytest.mark.parametrize(
    ("columns", "kernel", "cluster", "block"),
    [
        *((2044, "rows_bf16_256", 1, 256), (2048, "staged_rows_bf16", 1, 64)),
        *((4096, "staged_rows_bf16", 1, 128), (16384, "staged_rows_bf16", 1, 512)),
        *((16392, "cluster_rows_bf16", 2, 256), (32776, "cluster_rows_bf16", 4, 256)),
        *((65544, "cluster_rows_bf16", 8, 160), (131072, "cluster_rows_bf16", 8, 256)),
        *((131080, "rows_bf16_512", 8, 512), (50257, "rows_bf16_512", 8, 512)),
    ],
)
def test_softmax_of_longer_rows(
    driver, columns: int, kernel: str, cluster: int, block: int
) -> None:
    """Of 2,048 to 16,384 columns by vectors: in shared memory; to 131,072 in the registers of a
    cluster, which has as few blocks as hold the row."""
    rows = empty(64, columns)
    call = lambda: ops._softmax(rows, False, torch.bfloat16)  # noqa: E731
    ((launch, params),) = launches_of(driver, call, SOFTMAX)
    assert launch["kernel"] == f"softmax_{kernel}"
    assert (launch["grid"], launch["block"]) == ([64 * cluster, 1, 1], [block, 1, 1])
    assert (params.rows, params.columns, params.cluster) == (64, columns, cluster)
    shared = columns * 2 if kernel.startswith("staged") else 0
    assert launch["shared"] == shared


@pytest.mark.parametrize(
    ("columns", "kernel", "block"),
    [
        *((1024, "warp_rows_bf16_1024", 128), (1032, "block_rows_bf16_4096", 160)),
        *((2040, "block_rows_bf16_4096", 256), (4096, "block_rows_bf16_4096", 512)),
        *((4104, "block_rows_bf16_8192", 288), (8192, "block_rows_bf16_8192", 512)),
        *((8200, "staged_rows_bf16", 288), (4100, "rows_bf16_512", 512)),
    ],
)
def test_gradients_of_softmax_in_registers(driver, columns: int, kernel: str, block: int) -> None:
    """Of 1,032 to 8,192 columns by vectors: a thread has one or two, and a block is whole warps."""
    rows = empty(1000, columns)
    call = lambda: ops._softmax_backward(rows, rows, False, torch.bfloat16)  # noqa: E731
    ((launch, params),) = launches_of(driver, call, SOFTMAX)
    assert launch["kernel"] == f"softmax_backward_{kernel}"
    assert launch["block"] == [block, 1, 1]
    assert (params.rows, params.columns) == (1000, columns)
    if columns > 1024 and columns % 8 == 0:
        assert launch["grid"] == [1000, 1, 1]


@pytest.mark.parametrize("columns", [40, 128, 256, 264, 1024, 1032, 2040])
def test_softmax_of_rows_of_a_warp(driver, columns: int) -> None:
    rows = empty(1000, columns)

    def call() -> None:
        ops._softmax(rows, False, torch.bfloat16)
        ops._softmax_backward(rows, rows, False, torch.bfloat16)

    forward, backward = launches_of(driver, call, SOFTMAX)
    if columns > 1024:  # so many vectors leave registers for few warps
        assert forward[0]["kernel"] == "softmax_rows_bf16_256"
        return
    threads = 8 if columns <= 64 else 16 if columns <= 128 else 32
    assert forward[0]["kernel"] == warp_kernel("softmax", columns)
    assert forward[0]["grid"][0] == -(-1000 * threads // (128 * (2 if columns <= 256 else 1)))
    assert forward[1].threads == threads
    assert backward[0]["kernel"] == warp_kernel("softmax_backward", columns)
    assert backward[0]["grid"][0] == -(-1000 * threads // 128)


def test_softmax_writes_float32_of_16_bits(driver) -> None:
    def call() -> None:
        ops._softmax(empty(64, 100, dtype=torch.float16), True, torch.float32)

    ((_, params),) = launches_of(driver, call, SOFTMAX)
    assert (params.x_dtype, params.out_dtype, params.log) == (0, 2, 1)


@pytest.mark.parametrize("shape", [(0, 8), (8, 0)])
def test_nothing_launches_nothing(driver, shape: tuple[int, int]) -> None:
    def call() -> None:
        ops._softmax(empty(*shape), False, torch.bfloat16)

    assert launches_of(driver, call, SOFTMAX) == []


def test_float64_is_refused(driver) -> None:
    with pytest.raises(RuntimeError, match=r"\[no_kernel\]: softmax .*bfloat16 or float32"):
        ops._softmax(empty(8, 8, dtype=torch.float64), False, torch.float64)


@pytest.mark.parametrize(
    ("rows", "columns", "parts", "launches"),
    [
        *(
            (512, 768, 1, 1),
            (513, 768, 8, 1),
            (4096, 72, 8, 1),
        ),  # a cluster's blocks add their parts
        *((4097, 768, 33, 2), (12608, 768, 33, 2), (2048, 100, 16, 2)),
    ],
)
def test_sums_over_rows(driver, rows: int, columns: int, parts: int, launches: int) -> None:
    def call() -> None:
        x = empty(rows, columns)
        with torch_cubin.install(policy="all"):
            x.sum(0)

    (launch, params), *rest = launches_of(driver, call, SUMS_OF_COLUMNS)
    assert launch["kernel"] == "column_sums_rows_bf16"
    assert (params.parts, params.joins) == (parts, int(launches == 1 and parts > 1))
    strips = -(-columns // (64 if columns % 8 == 0 else 8))
    assert launch["grid"] == [strips * parts, 1, 1]
    assert len(rest) == launches - 1
    for _, last in rest:
        assert (last.rows, last.parts, last.joins) == (parts, 1, 0)
