"""What torch_cubin.moe launches, on the stand-in driver."""

from __future__ import annotations

import pytest
import torch
from c_layouts import MATMUL, structure
from fake_driver import tensors
from faults import catalogs, launch_params
from faults.forked import forked

GROUPED = structure(f"{MATMUL}/sm90_grouped_params.h", "Sm90GroupedParams")
ORDER = structure("csrc/kernels/experts/order_params.h", "ExpertOrderParams")
SUM = structure("csrc/kernels/experts/sum_params.h", "ExpertSumParams")
GATE = structure("csrc/kernels/experts/gate_params.h", "ExpertGateParams")
GROUP_ROWS = structure(f"{MATMUL}/group_rows_params.h", "GroupRowsParams")
SCALED = structure(f"{MATMUL}/sm90_scaled_params.h", "Sm90ScaledParams")
QUANTIZE = structure("csrc/kernels/quantize/quantize_params.h", "QuantizeParams")
GATHER, SILU, INTERLEAVED = 16, 4, 256
op = torch.ops.cubin._moe


@pytest.fixture
def catalog(driver, tmp_path, monkeypatch) -> dict[str, dict]:
    families = ("grouped", "experts", "scaled", "groups", "quantize")
    kernels = [kernel for family in families for kernel in catalogs.kernels_of(family)]
    catalogs.install(driver, tmp_path, monkeypatch, kernels)
    return {kernel["symbol"]: kernel for kernel in kernels}


def arguments(
    tokens: int, experts: int = 16, dtype: torch.dtype = torch.bfloat16
) -> list[torch.Tensor]:
    hidden, inner, k = 256, 384, 4
    return [
        tensors.empty(tokens, hidden, dtype=dtype),
        tensors.empty(tokens, k, dtype=torch.int64),
        tensors.empty(tokens, k, dtype=torch.float32),
        tensors.empty(experts, 2 * inner, hidden, dtype=dtype),
        tensors.empty(experts, hidden, inner, dtype=dtype),
    ]


def launches_of(driver, args: list[torch.Tensor], interleaved: bool = False) -> list[dict]:
    def run() -> list:
        op(*args, "silu", interleaved)
        return driver.launches()

    return forked(run)


@pytest.mark.parametrize(("tokens", "chunks"), [(1, 1), (256, 1), (257, 2), (5000, 20)])
def test_the_kernels_of_a_layer(driver, catalog, tokens, chunks) -> None:
    args = arguments(tokens)
    launches = launches_of(driver, args)
    kinds = [catalog[launch["kernel"]]["kind"] for launch in launches]
    orders = 1 if chunks == 1 else 2
    assert kinds == [*["order"] * orders, "sm90_grouped", "sm90_grouped", "sum"]
    order = launch_params.read(launches[orders - 1], ORDER)
    assert [launch["grid"][0] for launch in launches[:orders]] == [chunks] * orders
    assert (order.size, order.k, order.experts) == (4 * tokens, 4, 16)
    assert order.wide_ids
    assert not order.counts_only

    first, second = (launch_params.read(launch, GROUPED) for launch in launches[orders:-1])
    assert first.flags & GATHER
    assert first.flags >> 5 & 7 == SILU
    assert (first.rows, first.ends) == (order.tokens, order.ends)
    assert (first.a_height, first.k, first.m, first.n) == (tokens, 256, 4 * tokens, 384)
    assert first.half_columns == 384
    assert 2 * first.tile_columns == catalog[launches[orders]["kernel"]]["tile"][1]
    assert not second.flags & GATHER
    assert second.flags >> 5 & 7 == 0
    assert (second.m, second.n, second.ends) == (4 * tokens, 256, order.ends)

    total = launch_params.read(launches[-1], SUM)
    assert (total.rows, total.places) == (second.out, order.places)
    assert (total.tokens, total.k, total.columns, total.elements) == (tokens, 4, 256, 8)


def test_interleaved_gates_are_neighbours_of_their_ups(driver, catalog) -> None:
    launches = launches_of(driver, arguments(256), interleaved=True)
    first = launch_params.read(launches[1], GROUPED)
    assert first.flags & INTERLEAVED
    assert first.flags >> 5 & 7 == SILU
    width = catalog[launches[1]["kernel"]]["tile"][1]
    assert (first.n, first.tile_columns, first.half_columns) == (384, width // 2, width // 2)


def test_the_kernels_of_a_trained_layer(driver, catalog) -> None:
    x, ids, weights, w13, w2 = arguments(256)

    def run() -> list:
        _, before, order = torch.ops.cubin._moe_forward(x, ids, weights, w13, w2, "gelu", False)
        forward = len(driver.launches())
        args = (x, x, weights, w13, w2, before, order, "gelu", False)
        torch.ops.cubin._moe_backward(*args, True, True, True)
        return [driver.launches(), forward]

    launches, forward = forked(run)
    kinds = [catalog[launch["kernel"]]["kind"] for launch in launches]
    assert kinds[:forward] == ["order", "sm90_grouped", "gate", "sm90_grouped", "sum"]
    backward = ["sum", "sm90_grouped", "gate_backward", "sm90_grouped"]  # and of w2
    assert kinds[forward:] == [*backward, "sm90_grouped", "sum", "sum", "sm90_grouped"]
    order = launch_params.read(launches[0], ORDER)
    grouped = [
        launch_params.read(launch, GROUPED)
        for launch, kind in zip(launches, kinds, strict=True)
        if kind == "sm90_grouped"
    ]
    assert {each.ends for each in grouped} == {order.ends}
    assert [(each.m, each.n) for each in grouped] == [
        *((1024, 768), (1024, 256)),  # forward
        *((1024, 384), (256, 384), (1024, 256), (768, 256)),  # gradients of rows and of weights
    ]
    gate = launch_params.read(launches[2], GATE)
    assert (gate.before, gate.places) == (grouped[0].out, order.places)
    assert (gate.slots, gate.row_count, gate.inner, gate.elements) == (1024, 1024, 384, 8)


@pytest.mark.parametrize(("tokens", "align", "k"), [(256, 16, 1280), (1024, 128, 6144)])
def test_the_kernels_of_a_layer_trained_in_8_bits(driver, catalog, tokens, align, k) -> None:
    """Rows are gathered where they are quantised, and nothing is set to zero."""
    x, ids, weights, w13, w2 = arguments(tokens)
    rows = 4 * tokens

    def as_strided(x, size, stride, offset=None) -> torch.Tensor:
        return tensors.part(x, torch.empty(0, device="meta").as_strided(size, stride, offset or 0))

    def view(x, size) -> torch.Tensor:
        like = torch.empty_strided(x.shape, x.stride(), device="meta")
        return tensors.part(x, like.view(size))

    def run() -> list:
        # A CPU build has no kernels for views of a GPU's memory.
        aten = torch.library.Library("aten", "IMPL")
        aten.impl("as_strided", as_strided, "CUDA")
        aten.impl("view", view, "CUDA")
        args = (x, ids, weights, w13, w2)
        _, before, order = torch.ops.cubin._moe_forward(*args, "silu", False, "block")
        forward = len(driver.launches())
        args = (x, x, weights, w13, w2, before, order, "silu", False)
        torch.ops.cubin._moe_backward(*args, True, True, True, "block")
        return [driver.launches(), forward]

    launches, forward = forked(run)
    kinds = [catalog[launch["kernel"]]["kind"] for launch in launches]
    product = ["tiles", "group_rows", "sm90_scaled"]  # of a weight, and by it
    first = kinds.index("rows")
    assert kinds[first:forward] == ["rows", *product, "rows", *product, "sum"]
    assert kinds[forward:] == [
        *("group_rows", "tiles", *product, "gate_backward"),
        *("tiles", "sm90_scaled", "tiles", *product, "sum", "tiles", "sm90_scaled"),
    ]
    order = launch_params.read(launches[first - 1], ORDER)
    own = launch_params.read(launches[first], QUANTIZE)
    assert (own.numbers, own.rows, own.x_rows) == (order.tokens, rows, tokens)
    table = launch_params.read(launches[forward], GROUP_ROWS)
    assert (table.ends, table.limit, table.align, table.of_k) == (order.ends, rows, align, 1)
    assert table.blocks == table.rows + 17 * 16
    tiles = [
        launch_params.read(launch, QUANTIZE)
        for launch, kind in zip(launches[forward:], kinds[forward:], strict=True)
        if kind == "tiles"
    ]
    of_groups = [own for own in tiles if own.blocks]
    assert [own.blocks for own in of_groups] == [table.blocks] * 4
    assert [own.columns for own in of_groups] == [256, 384, 768, 256]  # grad, inside, before, x
    assert [own.data_stride for own in of_groups] == [k] * 4
    assert [bool(own.row_data) for own in of_groups] == [True, False, True, False]
    assert [own.numbers for own in of_groups] == [order.tokens, 0, 0, order.tokens]
    gradients = [launch_params.read(launches[forward:][i], SCALED) for i in (7, -1)]
    assert [(own.m, own.n, own.rows) for own in gradients] == [
        *((256, 384, table.rows), (768, 256, table.rows)),
    ]


def test_what_a_layer_keeps_may_come_back_anywhere(driver, catalog) -> None:
    """Hooks on saved tensors return parts of larger ones. Kernels read vectors of 16 bytes."""
    x, _, weights, w13, w2 = arguments(256)
    order = tensors.empty(2 * 1024 + 16, dtype=torch.int32)

    def gate_of(before: torch.Tensor, order: torch.Tensor) -> list:
        args = (x, x, weights, w13, w2, before, order, "gelu", False)
        torch.ops.cubin._moe_backward(*args, False, False, False)
        (launch,) = [x for x in driver.launches() if "gate" in catalog[x["kernel"]]["kind"]]
        gate = launch_params.read(launch, GATE)
        return [gate.before, gate.elements]

    def kept(offset: int) -> torch.Tensor:
        return tensors.strided((1024, 768), (768, 1), torch.bfloat16, offset=offset)

    for before in (kept(0), kept(8)):
        assert forked(lambda x=before: gate_of(x, order)) == [before.data_ptr(), 8]
    # Copies, for which the stand-in has no kernel.
    apart = tensors.strided(tuple(order.shape), (2,), torch.int32)

    def error_of(before: torch.Tensor, order: torch.Tensor) -> str:
        with pytest.raises(RuntimeError) as caught:
            gate_of(before, order)
        return str(caught.value)

    for before, own, copy in ((kept(1), order, "clone"), (kept(0), apart, "contiguous")):
        error = forked(lambda x=before, o=own: error_of(x, o))
        assert f"PyTorch's aten::{copy} failed" in error


def test_the_kernels_of_a_layer_of_float32(driver, catalog) -> None:
    """Their products have no options."""
    launches = launches_of(driver, arguments(256, dtype=torch.float32))
    kinds = [catalog[launch["kernel"]]["kind"] for launch in launches]
    assert kinds == ["order", "sum", "groups_simt", "gate", "groups_simt", "sum"]


def test_what_no_kernel_takes_is_refused(driver, catalog) -> None:
    with pytest.raises(
        RuntimeError, match=r"\[no_kernel\]: moe has more experts .* 1024, got 1025"
    ):
        op(*arguments(8, experts=1025), "silu", False)
    with pytest.raises(RuntimeError, match=r"\[no_kernel\]: moe has no kernels for this dtype"):
        op(*arguments(8, dtype=torch.float64), "silu", False)
