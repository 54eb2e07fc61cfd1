"""What the sm90 kernels of attention's backward are launched with, on the stand-in driver."""

from __future__ import annotations

import itertools
import math

import c_layouts
import pytest
import torch
from attention_steps import step_of
from fake_driver import tensors
from faults import launch_params
from faults.forked import forked
from faults.launch_params import read_map

import torch_cubin

NO_BOUND = 1 << 30
H100, H200 = 50 << 20, 60 << 20  # bytes of the L2 cache, by which heads side by side are chosen
PARAMS_HEADER = f"{c_layouts.ATTENTION}/sm90/backward_params.h"
Params = c_layouts.structure(PARAMS_HEADER, "Sm90BackwardParams")


def made(b: int, h: int, s: int, d: int, dtype=torch.bfloat16) -> torch.Tensor:
    """(batch, heads, rows, columns), in memory (batch, rows, heads, columns)."""
    return tensors.strided((b, h, s, d), (s * h * d, d, h * d, 1), dtype)


def launches_of(driver, q, k, v, l2_bytes: int = H200, **options) -> list[dict]:
    b, h, s, _ = q.shape

    def run() -> list:
        driver.set("l2_bytes", l2_bytes)
        grad, out = (made(b, h, s, v.shape[-1], q.dtype) for _ in range(2))
        logsumexp = tensors.empty(b, h, s, dtype=torch.float32)
        torch.ops.cubin.attention_backward(
            grad, q, k, v, out, logsumexp, enable_gqa=True, **options
        )
        return driver.launches()

    return forked(run)


# batch, heads, heads of key, rows, keys, head_dim, options, heads of keys together
CALLS = [
    (2, 4, 4, 4096, 4096, 128, {}, 8),
    (1, 16, 16, 16384, 16384, 64, {"is_causal": True}, 8),
    (3, 6, 3, 1000, 777, 64, {"is_causal": True, "bottom_right": True}, 9),
    (1, 8, 1, 520, 520, 96, {"window_left": 100, "window_right": 30, "scale": 0.5}, 1),
    (8, 16, 2, 2048, 2048, 128, {"is_causal": True}, 16),  # 9 fill the device, and leave 7
    (2, 4, 2, 300, 700, 200, {"is_causal": True}, 4),
    (8, 8, 8, 2048, 2048, 256, {"is_causal": True}, 16),  # a band has half of each head in use
    (1, 8, 8, 16384, 16384, 256, {"window_left": 1023, "window_right": 0}, 8),
]


# The same on an H100.
SMALL_CACHE_CALLS = [
    (2, 4, 4, 4096, 4096, 128, {}, 8),
    (2, 4, 2, 300, 700, 200, {"is_causal": True}, 4),
    (8, 8, 8, 2048, 2048, 256, {"is_causal": True}, 16),
    (1, 8, 8, 16384, 16384, 256, {"window_left": 1023, "window_right": 0}, 8),
    (3, 8, 2, 1000, 60, 256, {}, 6),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("l2_bytes", "call"),
    [(H200, call) for call in CALLS] + [(H100, call) for call in SMALL_CACHE_CALLS],
    ids=str,
)
def test_parameters_of_the_three_launches(
    driver, attention_catalog, l2_bytes: int, call, dtype: torch.dtype
) -> None:
    """Boxes bring what the kernel's barriers wait for, or it would hang; the rest is the call."""
    b, h, kv_heads, s, keys, d, options, together = call
    blocks = 2 if d > 128 else 1  # per work item
    q, k, v = (
        made(b, n, rows, d, dtype) for n, rows in ((h, s), (kv_heads, keys), (kv_heads, keys))
    )
    launches = launches_of(driver, q, k, v, l2_bytes, **options)
    steps = [step_of(attention_catalog[x["kernel"]]) for x in launches]
    assert steps == ["sm90 delta", "sm90 backward", "sm90 convert"]
    assert len({x["params"][0] for x in launches}) == 1
    params = launch_params.read(launches[0], Params)
    delta, kernel, convert = (attention_catalog[x["kernel"]] for x in launches)
    rows, columns, width = kernel["tile"]
    assert {x["dtype"] for x in (delta, kernel, convert)} == {str(dtype).removeprefix("torch.")}
    assert kernel["cluster"] == [blocks, 1, 1]
    widths = [64, 96, 128, 256]
    assert (columns, width) == (64 * blocks if d > 128 else 128, min(x for x in widths if x >= d))
    key_box = columns // blocks
    maps = [
        (params.q, h, s, rows),
        (params.k, kv_heads, keys, key_box),
        (params.v, kv_heads, keys, key_box),
        (params.grad_out, h, s, rows),
    ]
    if d <= 128:  # a warp's 16 keys
        maps += [(params.dk_map, kv_heads, keys, 16), (params.dv_map, kv_heads, keys, 16)]
    for map_, heads, length, box in maps:
        found = read_map(map_)
        assert found["swizzle"] == 3  # 128 bytes
        assert found["dims"] == [d, length, heads, b, 1]
        assert found["box"] == [64, box, 1, 1, 1]
        want = [2 * heads * d, 2 * d, 2 * heads * length * d, 0]
        for size, stride, expected in zip(found["dims"][1:], found["strides"], want, strict=True):
            assert stride == expected or size == 1, (call, found)
    shift = keys - s if options.get("bottom_right") else 0
    last = 0 if options.get("is_causal") else options.get("window_right", NO_BOUND)
    first = -options["window_left"] if "window_left" in options else -NO_BOUND
    assert params.lengths.first == (first + shift if first > -NO_BOUND else first)
    assert params.lengths.last == (last + shift if last < NO_BOUND else last)
    assert (params.batch, params.heads, params.group) == (b, h, h // kv_heads)
    assert (params.lengths.seqlen_q, params.lengths.seqlen_k) == (s, keys)
    assert (params.head_dim, params.head_dim_v) == (d, d)
    assert params.together == together * params.parts
    scale = options.get("scale", 1 / math.sqrt(d))
    assert math.isclose(params.scale, scale, rel_tol=1e-6)
    assert math.isclose(params.unit, scale * math.log2(math.e), rel_tol=1e-6)
    assert (params.tile_rows, params.tile_keys, params.tile_columns) == (rows, columns, width)
    assert (params.tiles, params.key_tiles) == (-(-s // rows), -(-keys // columns))
    tiles, items = b * h * params.tiles, b * kv_heads * params.key_tiles * params.parts
    panels = -(-width // 64)
    assert rows <= delta["tile"][0]
    warps = tiles * (rows // 8) * panels
    if params.parts > 1:  # of 16 keys and 32 columns, of dk and dv
        warps += items // params.parts * 2 * (columns // 16) * (width // 32)
    # A warp takes several pieces of those that the main kernel has left.
    rounds = kernel.get("rounds", 0) and params.parts == params.sets == 1
    convert_blocks = min(-(-warps // 8), 4 * 132 if rounds else 1 << 30)
    assert [x["grid"] for x in launches] == [
        [tiles, 1, 1],
        [min(132, items * blocks), 1, 1],
        [convert_blocks, 1, 1],
    ]
    # TMA's addresses, and memory that does not overlap.
    assert params.dq_sum % 16 == params.sums % 16 == params.part_sums % 16 == 0
    sets = params.sets
    assert params.query_tiles == tiles
    assert (sets - 1) * params.set_keys < params.key_tiles <= sets * params.set_keys
    assert params.sums == params.dq_sum + 4 * sets * tiles * rows * panels * 64
    assert params.turns == params.sums + 8 * tiles * rows
    assert params.ticket == params.turns + 4 * sets * tiles
    assert (params.part_sums > params.ticket) == (params.parts > 1)
    assert params.mask == params.bits.words == 0
    assert list(params.dq_stride)[1:] == [d, h * d]


# Rows: heads side by side of head dims 64, 128 and 256, full and then causal, of 16,384 tokens and
# 2,048 columns of all heads, which both GPUs' published times were measured with.
TOGETHER = {
    H200: {
        512: (128, 64, 20, 128, 64, 32),
        1024: (64, 32, 10, 64, 32, 16),
        2048: (32, 16, 5, 32, 32, 16),
        4096: (16, 8, 4, 32, 16, 8),
        8192: (8, 4, 4, 16, 8, 8),
        16384: (4, 4, 4, 8, 4, 8),
    },
    H100: {
        512: (80, 40, 20, 80, 40, 32),
        1024: (40, 20, 10, 40, 32, 16),
        2048: (20, 16, 5, 32, 32, 16),
        4096: (16, 8, 4, 32, 16, 8),
        8192: (8, 4, 4, 16, 8, 8),
        16384: (4, 4, 4, 8, 4, 8),
    },
}


@pytest.mark.parametrize("l2_bytes", TOGETHER, ids=str)
def test_heads_side_by_side(driver, attention_catalog, l2_bytes: int) -> None:
    found = {}
    for rows in TOGETHER[l2_bytes]:
        own = []
        for is_causal in (False, True):
            for d in (64, 128, 256):
                q, k, v = (made(16384 // rows, 2048 // d, rows, d) for _ in range(3))
                launches = launches_of(driver, q, k, v, l2_bytes, is_causal=is_causal)
                params = launch_params.read(launches[1], Params)
                own.append(params.together // params.parts)
        found[rows] = tuple(own)
    assert found == TOGETHER[l2_bytes]


def test_heads_side_by_side_with_a_boolean_mask(driver, attention_catalog) -> None:
    found = {}
    for rows in (512, 1024, 2048, 4096):
        q, k, v = (made(16384 // rows, 8, rows, 256) for _ in range(3))
        mask = tensors.empty(rows, rows, dtype=torch.bool)
        launch = launches_of(driver, q, k, v, H100, attn_mask=mask)[2]
        found[rows] = launch_params.read(launch, Params).together
    assert found == {512: 20, 1024: 10, 2048: 8, 4096: 4}


# batch, heads, heads of key, rows, head_dim, options; and whether several work items share a tile
# of keys on 132 multiprocessors.
SHARED = [
    ((1, 64, 8, 512, 128, {"is_causal": True}), True),
    ((1, 28, 4, 1024, 128, {}), True),
    ((4, 8, 1, 2048, 256, {"is_causal": True}), True),
    ((1, 8, 8, 2048, 64, {"is_causal": True}), True),  # tiles of queries, not heads of a group
    ((1, 1, 1, 96, 64, {}), False),  # one step
    ((2, 4, 4, 4096, 128, {}), False),  # as many as fit side by side, and alike
    ((8, 16, 16, 2048, 64, {"is_causal": True}), False),
]


@pytest.mark.parametrize(("call", "shared"), SHARED, ids=str)
def test_few_tiles_of_keys_have_several_work_items(
    driver, attention_catalog, call, shared: bool
) -> None:
    b, h, kv_heads, s, d, options = call
    q, (k, v) = made(b, h, s, d), (made(b, kv_heads, s, d) for _ in range(2))
    params = launch_params.read(launches_of(driver, q, k, v, **options)[1], Params)
    assert (params.parts > 1) == shared
    assert params.parts <= -(-s // params.tile_rows) * (h // kv_heads)


@pytest.mark.parametrize(("longest", "shared"), [(1640, False), (4096, True)])
def test_the_longest_packed_sequence_decides(
    driver, attention_catalog, longest: int, shared: bool
) -> None:
    """10 sequences of 16,400 rows: eight heads of the longest one's queries would take longer than
    all multiprocessors take for the others."""
    q, k, v = (tensors.empty(16400, n, 128, dtype=torch.bfloat16) for n in (16, 2, 2))

    def run() -> list:
        at = tensors.empty(11, dtype=torch.int32)
        named = {"cu_seqlens_q": at, "cu_seqlens_k": at}
        named |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
        logsumexp = tensors.empty(16, 16400, dtype=torch.float32)
        torch.ops.cubin.attention_backward(
            q, q, k, v, q, logsumexp, is_causal=True, enable_gqa=True, **named
        )
        return driver.launches()

    launch = next(
        x for x in forked(run) if step_of(attention_catalog[x["kernel"]]) == "sm90 backward"
    )
    assert (launch_params.read(launch, Params).parts > 1) == shared


# batch, heads, heads of key, rows, head_dim, options; and whether tiles of keys, which all begin
# with the same queries, have several sums of dq.
SETS = [
    ((2, 8, 1, 1024, 64, {}), True),
    ((1, 8, 8, 4096, 128, {}), True),
    ((2, 8, 1, 1024, 64, {"is_causal": True}), False),
    ((8, 16, 16, 2048, 64, {}), False),
    ((1, 8, 8, 96, 64, {}), False),  # one tile of keys
]


@pytest.mark.parametrize(("call", "several"), SETS, ids=str)
def test_few_heads_have_several_sums_of_dq(driver, attention_catalog, call, several: bool) -> None:
    b, h, kv_heads, s, d, options = call
    q, (k, v) = made(b, h, s, d), (made(b, kv_heads, s, d) for _ in range(2))
    params = launch_params.read(launches_of(driver, q, k, v, **options)[1], Params)
    assert (params.sets > 1) == several


def test_parts_of_a_sequence_depend_on_the_batch(driver, attention_catalog) -> None:
    found = set()
    for batch in (1, 64):
        q, (k, v) = made(batch, 8, 512, 128), (made(batch, 1, 512, 128) for _ in range(2))
        launches = launches_of(driver, q, k, v, is_causal=True)
        found.add(launch_params.read(launches[1], Params).parts)
    assert len(found) == 2


@pytest.mark.parametrize("d", [64, 256])
def test_one_order_of_steps_with_batch_invariant(driver, attention_catalog, d: int) -> None:
    """Whatever the batch and the padding behind a sequence. Without the switch, few queries of wide
    heads take the portable kernels, and few tiles of keys have several parts and sums of dq."""
    found = set()
    for batch, s, is_causal in ((1, 40, True), (1, 129, True), (7, 600, True), (1, 2000, False)):
        q, (k, v) = made(batch, 8, s, d), (made(batch, 1, s, d) for _ in range(2))
        with torch_cubin.batch_invariant():
            launches = launches_of(driver, q, k, v, is_causal=is_causal)
        steps = [step_of(attention_catalog[launch["kernel"]]) for launch in launches]
        assert steps == ["sm90 delta", "sm90 backward", "sm90 convert"]
        params = launch_params.read(launches[1], Params)
        found.add((launches[1]["kernel"], params.parts, params.sets))
    assert [each[1:] for each in found] == [(1, 1)]


@pytest.mark.parametrize("largest", [1, 16])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 20.0])
def test_pairs_run_if_clusters_fit(
    driver, attention_catalog, softcap: float, masked: bool, largest: int
) -> None:
    """With a boolean mask, too, whose bits are then of the keys of both blocks."""
    q, k, v = (made(2, 4, 300, 256) for _ in range(3))
    mask = tensors.empty(300, 300, dtype=torch.bool) if masked else None
    with driver.setting("largest_cluster", largest):
        launches = launches_of(driver, q, k, v, H100, attn_mask=mask, softcap=softcap)
    blocks = 2 if largest > 1 else 1
    kernels = [attention_catalog[x["kernel"]] for x in launches]
    main = next(x for x in kernels if step_of(x) == "sm90 backward")
    assert ("rule" in main["takes"]) == (softcap > 0)
    assert (main["tile"], main["cluster"]) == ([64, 64 * blocks, 256], [blocks, 1, 1])
    params = launch_params.read(launches[0], Params)
    assert (params.tile_keys, params.key_tiles) == (64 * blocks, -(-300 // (64 * blocks)))
    if masked:
        assert launches[0]["grid"] == [5, 1, 1]


def launches_with_a_mask(driver, head_dim: int, dtype, broadcast: tuple, softcap: float) -> tuple:
    """Of 300 queries and 500 keys. `broadcast`: dims of the mask that are 1. The launches, their
    parameter, and how many steps the mask has."""
    b, h, s, keys = 2, 4, 300, 500
    q = made(b, h, s, head_dim)
    k, v = (made(b, 2, keys, head_dim) for _ in range(2))
    sizes = [1 if n in broadcast else size for n, size in enumerate((b, h, s, keys))]
    mask = tensors.empty(*sizes, dtype=dtype)
    launches = launches_of(driver, q, k, v, attn_mask=mask, softcap=softcap)
    params = launch_params.read(launches[2], Params)
    bits = params.bits
    tiles = 1 if 2 in broadcast else -(-s // params.tile_rows)
    heads, batches = (1 if n in broadcast else size for n, size in ((1, h), (0, b)))
    assert (bits.batches, bits.heads, bits.tiles) == (batches, heads, tiles)
    assert list(params.mask_stride) == [0 if n in broadcast else mask.stride(n) for n in range(4)]
    # A step's words are one copy, or are read as vectors: their address is a multiple of 16.
    assert bits.words % 16 == 0
    return launches, params, batches * heads * tiles * params.key_tiles


def check_steps(attention_catalog, launches: list[dict], softcap: float) -> None:
    """The kernel that lays out a mask, and the backward's three."""
    kernels = [attention_catalog[x["kernel"]] for x in launches]
    steps = [f"sm90 {kind}" for kind in ("mask", "delta", "backward", "convert")]
    assert [*map(step_of, kernels)] == steps
    assert ("rule" in kernels[2]["takes"]) == (softcap > 0)


@pytest.mark.parametrize("broadcast", [(), (1,), (0, 1), (1, 2), (0, 1, 2)], ids=str)
@pytest.mark.parametrize(("head_dim", "softcap"), itertools.product([64, 128, 256], [0.0, 20.0]))
def test_a_boolean_mask_is_packed_to_bits_first(
    driver, attention_catalog, head_dim: int, softcap: float, broadcast: tuple
) -> None:
    """Words for as many batches, heads and tiles of queries as the mask has, of all keys."""
    launches, params, steps = launches_with_a_mask(driver, head_dim, torch.bool, broadcast, softcap)
    check_steps(attention_catalog, launches, softcap)
    rows, columns = params.tile_rows, params.tile_keys
    assert columns == 128  # of a pair of blocks at head_dim 256
    # A block for each 512 keys.
    assert launches[0]["grid"] == [steps // params.key_tiles, 1, 1]
    step_bytes = 2 * columns * (4 if rows // 2 <= 32 else 8)
    assert params.bits.steps == params.bits.words + steps * step_bytes
    assert params.mask_added == 0
    assert params.logsumexp_unit == (1 if softcap else pytest.approx(math.log2(math.e)))


@pytest.mark.parametrize("broadcast", [(), (1,), (0, 1, 2), (3,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("head_dim", "softcap"), itertools.product([64, 128, 256], [0.0, 20.0]))
def test_numbers_of_a_mask_are_laid_out_first(
    driver, attention_catalog, head_dim: int, softcap: float, dtype: torch.dtype, broadcast: tuple
) -> None:
    launches, params, steps = launches_with_a_mask(driver, head_dim, dtype, broadcast, softcap)
    check_steps(attention_catalog, launches, softcap)
    assert "float_mask" in attention_catalog[launches[2]["kernel"]]["takes"]
    floats = dtype == torch.float32
    assert (params.mask_added, params.mask_floats) == (1, floats)
    assert params.minus_infinity == (0xFF800000 if floats else 0xFF80)
    assert params.logsumexp_unit == 1
    assert launches[0]["grid"] == [steps, 1, 1]
    step_bytes = params.tile_rows * params.tile_keys * (4 if floats else 2)
    assert params.bits.steps == params.bits.words + steps * step_bytes


def test_mask_numbers_whose_layout_would_take_gigabytes_are_not_laid_out(
    driver, attention_catalog
) -> None:
    """8 GiB of them, of a mask that has one for all keys of a query."""
    q, k, v = (made(4, 1, 32768, 64) for _ in range(3))
    mask = tensors.empty(4, 1, 32768, 1, dtype=torch.bfloat16)
    kernels = [x["kernel"] for x in launches_of(driver, q, k, v, attn_mask=mask)]
    assert kernels
    assert not any(name.startswith("sm90_") for name in kernels), kernels


@pytest.mark.parametrize("what", ["a large softcap", "float32"])
def test_calls_for_the_portable_kernels(driver, attention_catalog, what: str) -> None:
    dtype = torch.float32 if what == "float32" else torch.bfloat16
    q, k, v = (made(2, 4, 300, 128, dtype) for _ in range(3))
    options = {"softcap": 200.0} if what == "a large softcap" else {}
    kernels = [x["kernel"] for x in launches_of(driver, q, k, v, **options)]
    assert kernels
    assert not any(name.startswith("sm90_") for name in kernels), kernels


@pytest.mark.parametrize("options", [{"softcap": 30.0}, {"scale": -1.0}], ids=str)
def test_options_have_kernels_of_their_own(driver, attention_catalog, options: dict) -> None:
    q, k, v = (made(2, 4, 300, 128) for _ in range(3))
    kernels = [x["kernel"] for x in launches_of(driver, q, k, v, **options)]
    assert any(name.startswith("sm90_backward_attention_bf16_general_") for name in kernels)
