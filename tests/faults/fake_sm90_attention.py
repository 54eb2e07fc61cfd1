"""What the sm90 attention kernels are launched with, on the stand-in driver: maps, bands, grids.

Longer than files should be: all tests read the parameters of the same launches.
"""

from __future__ import annotations

import itertools
import math
from functools import partial

import c_layouts
import pytest
import torch
from attention_steps import step_of, tile_of
from fake_driver import tensors
from faults import catalogs, launch_params
from faults.forked import forked
from faults.launch_params import read_map

import torch_cubin

NO_BOUND = 1 << 30
ROUND_ROBIN, IN_PAIRS, BY_QUERIES = 0, -1, -2


Params = c_layouts.structure(f"{c_layouts.ATTENTION}/sm90/forward_params.h", "Sm90AttentionParams")
Gather = c_layouts.structure(f"{c_layouts.ATTENTION}/decode/gather_params.h", "DecodeGatherParams")


def launches_of(driver, calls) -> list[dict]:
    """The one launch that each call makes, in a process of their own."""

    def run() -> list:
        for call in calls:
            call()
        return driver.launches()

    launches = forked(run)
    assert len(launches) == len(calls), [x["kernel"] for x in launches]
    return launches


def params_of(launch: dict) -> Params:
    assert launch["kernel"].startswith("sm90_attention_"), launch["kernel"]
    return launch_params.read(launch, Params)


def made(shape, order: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """(batch, heads, rows, columns), in memory in that order or as "bshd"."""
    _, h, s, d = shape
    strides = (h * s * d, s * d, d, 1) if order == "bhsd" else (s * h * d, d, h * d, 1)
    return tensors.strided(shape, strides, dtype)


def attend(shape, kv_heads: int, keys: int, order: str, dtype=torch.bfloat16, **options) -> None:
    b, _, _, d = shape
    q = made(shape, order, dtype)
    k, v = (made((b, kv_heads, keys, d), order, dtype) for _ in range(2))
    torch.ops.cubin.attention_forward(q, k, v, enable_gqa=True, **options)


# shape of query, heads and rows of key, options
CALLS = [
    ((2, 4, 4096, 128), 4, 4096, {}),
    ((2, 4, 4096, 128), 2, 4096, {"is_causal": True}),
    ((3, 6, 1000, 64), 3, 777, {}),
    ((40, 8, 700, 64), 8, 700, {"is_causal": True}),
    ((1, 16, 2048, 256), 1, 300, {"scale": 0.5}),
    ((2, 8, 520, 96), 8, 520, {"window_left": 100, "window_right": 30}),
    ((2, 8, 520, 128), 8, 2000, {"is_causal": True, "bottom_right": True}),
]


@pytest.mark.parametrize("order", ["bhsd", "bshd"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_launch_parameters(driver, attention_catalog, order: str, dtype: torch.dtype) -> None:
    """Boxes bring what the kernel's barriers wait for, or it would hang; the rest is the call."""
    calls = [
        partial(attend, shape, kv_heads, keys, order, dtype, **options)
        for shape, kv_heads, keys, options in CALLS
    ]
    for call, launch in zip(CALLS, launches_of(driver, calls), strict=True):
        (b, h, s, d), kv_heads, keys, options = call
        params, kernel = params_of(launch), attention_catalog[launch["kernel"]]
        rows, columns, width = kernel["tile"]
        assert kernel["dtype"] == str(dtype).removeprefix("torch.")
        assert width == next(x for x in (64, 96, 128, 192, 256) if x >= d), call
        for map_, heads, length, box in (
            (params.q, h, s, 64),
            (params.k, kv_heads, keys, columns),
            (params.v, kv_heads, keys, columns),
        ):
            found = read_map(map_)
            assert found["swizzle"] == 3  # 128 bytes
            assert found["dims"] == [d, length, heads, b, 1]
            assert found["box"] == [64, box, 1, 1, 1]
            row, head = (d, length * d) if order == "bhsd" else (heads * d, d)
            want = [2 * row, 2 * head, 2 * heads * length * d]  # and any of the fifth dim
            sizes_and_strides = zip(found["dims"][1:4], found["strides"][:3], want, strict=True)
            for size, stride, expected in sizes_and_strides:
                assert stride == expected or size == 1, (call, found)
        shift = keys - s if options.get("bottom_right") else 0
        last = 0 if options.get("is_causal") else options.get("window_right", NO_BOUND)
        first = -options["window_left"] if "window_left" in options else -NO_BOUND
        assert params.lengths.first == (first + shift if first > -NO_BOUND else first)
        assert params.lengths.last == (last + shift if last < NO_BOUND else last)
        assert (params.batch, params.heads, params.group) == (b, h, h // kv_heads)
        assert (params.lengths.seqlen_q, params.lengths.seqlen_k, params.head_dim_v) == (s, keys, d)
        assert (params.lengths.cu_seqlens_q, params.order) == (0, 0)
        scale = options.get("scale", 1 / math.sqrt(d))
        assert math.isclose(params.unit, scale * math.log2(math.e), rel_tol=1e-6)
        assert (params.has_rule, params.mask.words) == (0, 0)
        assert params.tiles == -(-s // rows)
        assert launch["grid"] == [min(132, params.tiles * b * h), 1, 1]
        assert params.logsumexp != 0


def test_softcaps_beyond_the_short_formula_take_other_kernels(driver, attention_catalog) -> None:
    def run(softcap: float) -> list[str]:
        attend((1, 2, 512, 64), 2, 512, "bhsd", softcap=softcap)
        return [launch["kernel"] for launch in driver.launches()]

    assert forked(partial(run, 128.0))[-1].startswith("sm90_attention_")
    assert not any(name.startswith("sm90_") for name in forked(partial(run, 129.0)))


def test_schedules_of_tiles(driver, attention_catalog) -> None:
    """Equal tiles: round robin; in pairs if keys are loaded slowly and a head's second tile finds
    them in shared memory. Causal: long tiles balanced one by one, short ones in pairs, or by
    queries if pairs would leave blocks idle. Balanced tiles are in equal sets of heads. Windows: by
    queries, while few heads' keys fit in the L2 cache together."""
    cases = [
        ((1, 16, 16384, 128), {}, ROUND_ROBIN),
        ((1, 16, 16384, 128), {"is_causal": True}, 4),
        ((1, 16, 1 << 20, 128), {"is_causal": True}, IN_PAIRS),  # more work than is counted
        ((2, 16, 8192, 128), {"is_causal": True}, 8),  # sets of 6 heads would leave one of 2
        ((1, 14, 8192, 128), {"is_causal": True}, 7),
        ((4, 16, 4096, 128), {"is_causal": True}, 13),
        ((8, 8, 2048, 256), {"is_causal": True}, 22),
        ((8, 16, 2048, 128), {"is_causal": True}, IN_PAIRS),
        ((32, 16, 512, 128), {"is_causal": True}, IN_PAIRS),
        ((1, 16, 1024, 128), {"is_causal": True}, ROUND_ROBIN),  # a tile a block
        ((8, 9, 2048, 64), {"is_causal": True}, BY_QUERIES),  # 3.3 of 4 rounds of pairs
        ((64, 9, 2048, 128), {"is_causal": True, "scale": 1.0}, IN_PAIRS),
        ((64, 16, 256, 72), {}, IN_PAIRS),
        ((64, 16, 256, 80), {}, ROUND_ROBIN),  # rows of whole sectors
        ((64, 16, 300, 72), {}, ROUND_ROBIN),  # three blocks of keys in a ring of two
        ((1, 140, 256, 72), {}, ROUND_ROBIN),  # 2.1 of 3 rounds; 1.1 of 2 rounds of pairs
        ((1, 16, 4096, 128), {"window_left": 256, "window_right": 256}, ROUND_ROBIN),
        ((1, 16, 16384, 128), {"is_causal": True, "window_left": 1023}, BY_QUERIES),
        ((1, 32, 16384, 64), {"is_causal": True, "window_left": 1023}, BY_QUERIES),
        ((1, 64, 16384, 64), {"is_causal": True, "window_left": 1023}, ROUND_ROBIN),
        ((1, 16, 16384, 128), {"is_causal": True, "window_left": 4095}, ROUND_ROBIN),
    ]
    calls = [partial(attend, shape, shape[1], shape[2], "bshd", **o) for shape, o, _ in cases]
    for case, launch in zip(cases, launches_of(driver, calls), strict=True):
        assert params_of(launch).schedule == case[2], case


def key_blocks(ends: list[int], keys: int, shift: int, columns: int) -> int:
    """Of causal tiles whose queries end there."""
    return sum(max(1, -(-min(keys, end + shift) // columns)) for end in ends)


def test_partial_tiles_in_front(driver, attention_catalog) -> None:
    """Of causal rows, where that saves blocks of keys: tiles of 192 queries and not of 128, whose
    blocks have as many keys. Never with a mask, with ALiBi, or where a row's bits must not depend
    on the number of rows."""
    slopes = tensors.empty(32, dtype=torch.float32)
    mask = tensors.empty(1, 1, 4096, 4096, dtype=torch.bool)
    cases = [
        ((4, 32, 4096, 64), 4096, {"is_causal": True}, 128),
        ((8, 32, 2048, 64), 2048, {"is_causal": True}, 64),
        ((8, 32, 2000, 64), 3000, {"is_causal": True, "bottom_right": True}, 112),
        ((4, 32, 3840, 64), 3840, {"is_causal": True}, 0),  # 20 whole tiles
        ((4, 32, 4096, 64), 4096, {}, 0),
        ((4, 32, 4096, 64), 4096, {"is_causal": True, "window_left": 4000}, 0),
        ((4, 32, 4096, 64), 4096, {"is_causal": True, "alibi_slopes": slopes}, 0),
        ((4, 32, 4096, 64), 4096, {"window_right": 0, "attn_mask": mask}, 0),
        ((1, 16, 4096, 128), 4096, {"is_causal": True}, 0),
        ((1, 16, 4000, 128), 4000, {"is_causal": True}, 0),
        ((1, 8, 4032, 256), 4032, {"is_causal": True}, 64),
    ]

    def run() -> list:
        for shape, keys, options, _ in cases:
            attend(shape, shape[1], keys, "bshd", **options)
        with torch_cubin.batch_invariant():
            attend((4, 32, 4096, 64), 32, 4096, "bshd", is_causal=True)
        return [x for x in driver.launches() if x["kernel"].startswith("sm90_attention_")]

    *launches, invariant = forked(run)
    assert params_of(invariant).fewer == 0
    for (shape, keys, options, fewer), launch in zip(cases, launches, strict=True):
        params, (rows, columns, _) = params_of(launch), attention_catalog[launch["kernel"]]["tile"]
        assert params.fewer == fewer, (shape, options, launch["kernel"])
        if fewer == 0:
            continue
        tiles = -(-shape[2] // rows)
        assert fewer == tiles * rows - shape[2], shape
        ends = [(tile + 1) * rows for tile in range(tiles)]
        shift = keys - shape[2]
        in_front = key_blocks([end - fewer for end in ends], keys, shift, columns)
        assert in_front < key_blocks([min(end, shape[2]) for end in ends], keys, shift, columns)


@pytest.mark.parametrize(("l2_bytes", "wide"), [(60 << 20, 16), (50 << 20, 13), (128 << 20, 32)])
def test_keys_of_balanced_heads_fit_in_the_cache(driver, attention_catalog, l2_bytes, wide) -> None:
    """Equal sets, the fewest that fit in 5/8 of it: 64 heads of 256 columns, of 2 MB each. Heads
    that share keys take less. In a list, many blocks share a longer head's keys, which need not
    fit."""
    mask = tensors.empty(8, 1, 1, 2048, dtype=torch.bool)
    cases = [
        ((8, 8, 2048, 256), 8, {"attn_mask": mask}, wide),
        ((8, 8, 2048, 256), 2, {"attn_mask": mask}, 32),
        ((8, 16, 2048, 128), 16, {"attn_mask": mask}, 26),
        ((1, 14, 8192, 128), 14, {"is_causal": True}, 7),
        ((1, 16, 16384, 256), 16, {"is_causal": True}, 4),  # 67 MB
    ]

    def run() -> list:
        driver.set("l2_bytes", l2_bytes)
        for shape, kv_heads, options, _ in cases:
            attend(shape, kv_heads, shape[2], "bshd", **options)
        return [x for x in driver.launches() if x["kernel"].startswith("sm90_attention")]

    for case, launch in zip(cases, forked(run), strict=True):
        assert params_of(launch).schedule == case[3], case


def test_short_rows_take_blocks_of_two_teams(driver, attention_catalog) -> None:
    """Of 64 or 96 keys, whichever the rows fill better. Longer rows take larger tiles, which share
    keys, and rows of 128 take no more blocks of 64. With 32 columns two teams serve all rows. One
    team is quicker where all tiles run at a time, and the longest of them alone: few tiles, and
    causal ones."""
    cases = [
        ((64, 12, 197, 64), {}, "2x128x64x64"),
        ((64, 12, 256, 64), {}, "2x128x64x64"),
        ((32, 16, 257, 64), {}, "2x128x96x64"),
        ((32, 16, 577, 64), {}, "2x128x64x64"),
        ((32, 16, 512, 64), {}, "192x128x64"),
        ((128, 12, 128, 64), {}, "128x128x64"),
        ((32, 16, 512, 64), {"is_causal": True}, "2x128x64x64"),
        ((2, 16, 1024, 64), {"is_causal": True}, "128x128x64"),
        ((64, 12, 256, 32), {}, "2x128x128x32"),
        ((8, 16, 2048, 32), {"is_causal": True}, "2x128x128x32"),
        ((1, 8, 2048, 32), {}, "128x128x32"),
        ((2, 12, 1024, 32), {"is_causal": True}, "128x128x32"),
    ]
    calls = [partial(attend, shape, shape[1], shape[2], "bshd", **o) for shape, o, _ in cases]
    for (shape, options, tile), launch in zip(cases, launches_of(driver, calls), strict=True):
        kernel = attention_catalog[launch["kernel"]]
        assert tile_of(kernel) == tile, (shape, options)
        teams, rows = kernel["cost"].get("teams", 1), kernel["tile"][0]
        assert kernel["block"] == [128 * (teams * rows // 64 + 1), 1, 1]
        assert launch["grid"] == [min(132, -(-shape[2] // rows) * shape[0] * shape[1]), 1, 1]


def test_tiles_of_two_teams_are_never_balanced(driver, tmp_path, monkeypatch) -> None:
    """More teams than the scheduler can balance."""
    kernels = [k for k in catalogs.kernels_of("attention") if k["cost"].get("teams") == 2]
    catalogs.install(driver, tmp_path, monkeypatch, kernels)
    call = partial(attend, (1, 16, 16384, 64), 16, 16384, "bshd", is_causal=True)
    (launch,) = launches_of(driver, [call])
    assert params_of(launch).schedule == IN_PAIRS


def test_batch_dims_that_do_not_merge_take_a_launch_each(driver, attention_catalog) -> None:
    def call() -> None:
        strides = (10 * 64 * 2 * 3 * 128, 64 * 2 * 3 * 128 * 2, 64 * 128, 128, 1)
        q = tensors.strided((5, 3, 2, 64, 128), strides, torch.bfloat16)
        torch.ops.cubin.attention_forward(q, q, q)

    def run() -> list:
        call()
        return driver.launches()

    launches = forked(run)
    bases = [params_of(x).logsumexp for x in launches]
    assert len(launches) in (3, 5)
    batch = 15 // len(launches)
    steps = {b - a for a, b in itertools.pairwise(bases)}
    assert steps == {batch * 2 * 64 * 4}
    assert {params_of(x).batch for x in launches} == {batch}


def kernels_of_a_call(driver, what: str, general: dict) -> list[str]:
    def run() -> list:
        rows = 1 if what == "decode" else 4096  # few rows go to kernels that split the keys
        dtype = torch.float32 if what == "float32" else torch.bfloat16
        q = made((2, 4, rows, 128), "bshd", dtype)
        k, v = (made((2, 4, 4096, 128), "bshd", dtype) for _ in range(2))
        masks = {"boolean mask": torch.bool, "added mask": dtype}
        if what in masks:
            mask = tensors.empty(rows, 4096, dtype=masks[what])
            torch.ops.cubin.scaled_dot_product_attention(q, k, v, mask)
        else:
            torch.ops.cubin.attention_forward(q, k, v, **general.get(what, {}))
        return driver.launches()

    kernels = [x["kernel"] for x in forked(run)]
    assert kernels
    return kernels


@pytest.mark.parametrize("what", ["decode", "float32"])
def test_calls_for_the_portable_kernels(driver, attention_catalog, what: str) -> None:
    kernels = kernels_of_a_call(driver, what, {})
    assert not any(name.startswith("sm90_") for name in kernels), kernels


GENERAL = {"softcap": {"softcap": 30.0}, "scale": {"scale": -1.0}}


@pytest.mark.parametrize("what", ["boolean mask", "added mask", *GENERAL])
def test_options_have_kernels_of_their_own(driver, attention_catalog, what: str) -> None:
    *before, kernel = kernels_of_a_call(driver, what, GENERAL)
    layout = {"boolean mask": "masked", "added mask": "added"}.get(what, "general")
    assert kernel.startswith(f"sm90_attention_bf16_{layout}_")
    masks = {"boolean mask": ["sm90_mask_attention"], "added mask": ["sm90_added_mask_attention"]}
    assert before == masks.get(what, [])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "layout"), [(40, "masked_"), (64, "masked_"), (128, ""), (256, "")]
)
def test_sinks_alone_need_no_kernel_of_their_own(
    driver, attention_catalog, head_dim: int, layout: str, packed: bool
) -> None:
    """Those of 64 columns without a mask do not take them. None is given a mask, or a rule."""
    sinks = tensors.empty(4, dtype=torch.float32)

    def run() -> list:
        if packed:
            q, k, v = (tensors.empty(9600, 4, head_dim, dtype=torch.bfloat16) for _ in range(3))
            at = tensors.empty(9, dtype=torch.int32)
            named = {"cu_seqlens_q": at, "cu_seqlens_k": at, "max_seqlen_q": 1200}
            named["max_seqlen_k"] = 1200
        else:
            q, k, v = (made((8, 4, 1200, head_dim), "bhsd", torch.bfloat16) for _ in range(3))
            named = {}
        torch.ops.cubin.attention_forward(q, k, v, sinks=sinks, **named)
        return driver.launches()

    *before, launch = forked(run)
    assert [x["kernel"] for x in before] == ["sm90_order_attention_queries"] * packed
    width = max(64, head_dim)
    assert launch["kernel"].startswith(f"sm90_attention_bf16_{layout}")
    assert attention_catalog[launch["kernel"]]["tile"][2] == width
    assert ("plain" in attention_catalog[launch["kernel"]]["takes"]) == (not layout)
    params = params_of(launch)
    assert params.score.sinks == sinks.data_ptr()
    assert params.has_rule == params.mask.classes == params.mask.words == 0


def test_a_mask_whose_copy_would_take_gigabytes_is_not_copied(driver, attention_catalog) -> None:
    """A number of each query for all keys would be copied for each key: 8 GiB here."""

    def run() -> list:
        q, k, v = (made((4, 1, 32768, 64), "bhsd", torch.bfloat16) for _ in range(3))
        mask = tensors.empty(4, 1, 32768, 1, dtype=torch.bfloat16)
        torch.ops.cubin.attention_forward(q, k, v, mask)
        return driver.launches()

    kernels = [x["kernel"] for x in forked(run)]
    assert kernels
    assert not any(name.startswith("sm90_") for name in kernels), kernels


# Keys, the mask's dims of size 1, and whether it is read directly.
@pytest.mark.parametrize(
    ("keys", "broadcast", "read"),
    [
        (4096, (), True),
        (4096, (1,), True),
        (4096, (0, 1, 2), True),
        (4098, (), False),  # rows that do not begin with whole vectors
        (4096, (3,), False),
    ],
)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("floats", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 20.0])
def test_a_mask_that_is_added_is_read_as_it_is_or_copied(
    driver, attention_catalog, softcap, floats, head_dim, keys, broadcast, read
) -> None:
    shape = (2, 4, 1024, keys)
    sizes = [1 if n in broadcast else size for n, size in enumerate(shape)]
    mask_dtype = torch.float32 if floats else torch.bfloat16

    def run() -> tuple:
        q = made((2, 4, 1024, head_dim), "bhsd", torch.bfloat16)
        k, v = (made((2, 4, keys, head_dim), "bhsd", torch.bfloat16) for _ in range(2))
        mask = tensors.empty(*sizes, dtype=mask_dtype)
        torch.ops.cubin.attention_forward(q, k, v, mask, softcap=softcap)
        return driver.launches(), mask.data_ptr()

    (before, launch), address = forked(run)
    assert before["kernel"] == "sm90_added_mask_attention"
    takes = attention_catalog[launch["kernel"]]["takes"]
    assert "unmasked" not in takes
    assert ("rule" in takes) == (softcap > 0)
    params = params_of(launch)
    assert params.mask.words == 0
    assert params.mask.classes % 4 == 0
    assert params.added.floats == floats
    assert params.added.values % 16 == 0
    assert params.added_scale == (1.0 if softcap else pytest.approx(head_dim**-0.5))
    row = -(-keys // 8) * 8 if not floats else -(-keys // 4) * 4
    if read:
        assert params.added.values == address
        row = keys
    planes = [1 if n in broadcast else size for n, size in enumerate(shape[:3])]
    strides = [0 if planes[2] == 1 else row, 0, 0]
    strides[1] = 0 if planes[1] == 1 else planes[2] * row
    strides[2] = 0 if planes[0] == 1 else planes[1] * planes[2] * row
    assert list(params.added.stride) == strides[::-1]


@pytest.mark.parametrize("rows", [1, 3, 500])
def test_blocks_of_keys_are_equal_for_every_number_of_rows_under_the_switch(
    driver, attention_catalog, rows
) -> None:
    """With a single query, the heads that share keys are the rows of one tile."""
    shape, options = (2, 8, rows, 128), {"is_causal": True, "bottom_right": True}

    def call() -> None:
        with torch_cubin.batch_invariant():
            attend(shape, 2, 4096, "bhsd", **options)

    (launch,) = launches_of(driver, [call])
    params = params_of(launch)
    assert attention_catalog[launch["kernel"]]["tile"] == [8 if rows < 8 else 128, 128, 128]
    assert (params.heads, params.group, params.lengths.seqlen_q) == (
        (2, 1, 4) if rows == 1 else (8, 4, rows)
    )
    assert read_map(params.q)["dims"][1] == (4 if rows == 1 else rows)


def test_tiles_of_few_queries_serve_the_switch_alone(driver, attention_catalog) -> None:
    few = {name for name, kernel in attention_catalog.items() if kernel["tile"][0] < 64}
    few = {name for name in few if step_of(attention_catalog[name]) == "sm90 forward"}
    assert len(few) == 4
    for rows in (1, 4, 64):
        for launch in launches_of(driver, [partial(attend, (1, 2, rows, 64), 2, 200, "bhsd")]):
            assert launch["kernel"] not in few


@pytest.mark.parametrize("pages", [False, True])
def test_a_cache_is_packed_under_the_switch(driver, attention_catalog, pages) -> None:
    q = tensors.empty(3, 1, 8, 128, dtype=torch.bfloat16)
    options = {"cache_seqlens": tensors.empty(3, dtype=torch.int32), "causal": True}
    sizes = (3, 256, 2, 128)
    if pages:
        options["block_table"] = tensors.empty(3, 16, dtype=torch.int32)
        sizes = (48, 16, 2, 128)
    caches = [tensors.empty(*sizes, dtype=torch.bfloat16) for _ in range(2)]

    def run() -> list:
        with torch_cubin.batch_invariant():
            torch.ops.cubin.flash_attention_with_kvcache(q, *caches, **options)
        return driver.launches()

    launches = forked(run)
    names = [launch["kernel"] for launch in launches]
    assert names[0] == "decode_gather_attention_bf16"
    assert names[-1].startswith("sm90_attention_bf16_")
    gathered = launch_params.read(launches[0], Gather)
    assert (gathered.batch, gathered.capacity, gathered.kv_heads) == (3, 256, 2)
    assert (gathered.page_size, gathered.pages) == ((16, 48) if pages else (0, 0))
    assert launches[0]["grid"][1] == 3


def test_tiles_of_more_queries_where_keys_are_loaded_slowly(driver, attention_catalog) -> None:
    """Rows of 72 columns begin within sectors of 32 bytes; those of 80 do not. Under
    batch_invariant() all calls have the same blocks of keys."""

    def chosen(batch: int, rows: int, d: int) -> list[int]:
        call = partial(attend, (batch, 16, rows, d), 16, rows, "bshd")
        return attention_catalog[launches_of(driver, [call])[0]["kernel"]]["tile"]

    assert chosen(8, 1024, 72) == chosen(32, 729, 72) == [192, 96, 96]
    assert chosen(8, 1024, 80) == chosen(64, 256, 72) == [128, 128, 96]
    with torch_cubin.batch_invariant():
        assert chosen(8, 1024, 72) == [128, 128, 96]


def test_few_tiles_are_not_split_where_the_second_kernel_costs_more(
    driver, attention_catalog
) -> None:
    """The portable kernels split keys among blocks, and a second kernel combines the parts:
    1 x 1024 with 8 heads of 32 took 17.3 us instead of 11.1 (H200)."""

    def chosen(heads: int, d: int) -> str:
        def run() -> str:
            attend((1, heads, 1024, d), heads, 1024, "bhsd")
            return driver.launches()[-1]["kernel"]

        return forked(run)

    assert chosen(8, 32) == "sm90_attention_bf16_128x128x32"
    assert chosen(4, 128) == "sm90_attention_bf16_128x128x128"
    assert chosen(1, 128) == "combine_attention_bf16"


def test_as_few_warps_combine_a_row_as_load_its_parts_at_once(driver, attention_catalog) -> None:
    """Eight parts each: the number of blocks decides the time of the kernel that combines them."""

    def grids() -> list[list[int]]:
        for keys in (2048, 4096, 8192, 16384):  # in parts of 256
            attend((1, 1, 128, 128), 1, keys, "bhsd")
        return [x["grid"] for x in driver.launches() if x["kernel"] == "combine_attention_bf16"]

    assert forked(grids) == [[128 * warps // 8, 1, 1] for warps in (1, 2, 4, 8)]


def test_one_query_of_few_keys_is_not_split(driver, attention_catalog) -> None:
    """A mask costs Hopper's kernels another one before; the decode kernels read it directly."""

    def chosen(d: int, keys: int, **options) -> str:
        def run() -> str:
            attend((4, 8, 1, d), 8, keys, "bhsd", **options)
            return driver.launches()[-1]["kernel"]

        return forked(run)

    for d in (64, 128):
        assert chosen(d, 512).startswith("sm90_attention_")
        assert chosen(d, 1024) == "combine_attention_bf16"
        mask = tensors.empty(4, 1, 1, 256, dtype=torch.bool)
        assert chosen(d, 256, attn_mask=mask).startswith("decode_attention_")
