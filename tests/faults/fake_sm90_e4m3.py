"""What attention_forward_e4m3 launches, on the stand-in driver: values, maps, factors."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from c_layouts import ATTENTION, structure
from fake_driver import tensors
from faults import catalogs, launch_params
from faults.forked import forked, launches_of
from faults.launch_params import read_map

import torch_cubin

E4M3 = torch.float8_e4m3fn
Params = structure(f"{ATTENTION}/sm90/e4m3_params.h", "Sm90E4m3Params")
ValuesParams = structure(f"{ATTENTION}/sm90/e4m3_values_params.h", "Sm90E4m3ValuesParams")


def attend(b: int, h: int, s: int, d: int, kv_heads: int, keys: int, **options) -> None:
    """Of (batch, rows, heads, columns) in memory."""

    def made(heads: int, rows: int) -> torch.Tensor:
        return tensors.strided((b, heads, rows, d), (rows * heads * d, d, heads * d, 1), E4M3)

    descale = tensors.strided((b, kv_heads), (0, 1), torch.float32)
    operands = (made(h, s), made(kv_heads, keys), made(kv_heads, keys))
    torch.ops.cubin.attention_forward_e4m3(*operands, k_descale=descale, **options)


def maps_of(params: Params) -> tuple:
    return params.q, params.k, params.v


def check_main(kernel: dict, launch: dict, d: int) -> Params:
    params = launch_params.read(launch, Params)
    panel, keys = 64 if d <= 64 else 128, kernel["tile"][1]
    boxes = [[panel, 64, 1, 1, 1], [panel, keys, 1, 1, 1], [128, kernel["tile"][2], 1, 1, 1]]
    swizzles = [panel, panel, 128]
    if kernel["transposes_values"]:
        boxes[2], swizzles[2] = boxes[1], panel
    for map_, box, swizzle in zip(maps_of(params), boxes, swizzles, strict=True):
        found = read_map(map_)
        assert found["box"] == box
        assert found["swizzle"] == {64: 2, 128: 3}[swizzle]
    assert params.q_descale.data == params.v_descale.data == 0
    assert params.k_descale.data != 0
    assert list(params.k_descale.stride) == [0, 1]
    assert params.unit == pytest.approx(math.log2(math.e) / math.sqrt(d), rel=1e-6)
    return params


@pytest.mark.parametrize(
    ("b", "h", "s", "d", "kv_heads", "keys"),
    [(8, 32, 4096, 256, 2, 777), (1, 16, 16384, 128, 16, 16384), (3, 8, 520, 256, 1, 16000)],
)
def test_launch_parameters(driver, attention_catalog, b, h, s, d, kv_heads, keys) -> None:
    before, launch = launches_of(driver, partial(attend, b, h, s, d, kv_heads, keys))
    assert not attention_catalog[launch["kernel"]]["transposes_values"]
    assert before["kernel"] == "sm90_e4m3_values_attention"
    values = launch_params.read(before, ValuesParams)
    padded = -(-keys // 16) * 16
    batch = keys * kv_heads * d if b > 1 else 0
    head = d if kv_heads > 1 else 0
    assert list(values.stride) == [batch, head, kv_heads * d]
    assert (values.cu_seqlens, values.seqlen, values.heads) == (0, keys, kv_heads)
    assert (values.columns, values.keys, values.granule) == (d, padded, 16)
    assert before["grid"] == [b * kv_heads * values.blocks, 1, 1]
    # A thread for each 16 keys and 4 columns, eight neighbours in 128 keys.
    assert values.blocks * 256 >= -(-padded // 128) * 8 * (d // 4) > (values.blocks - 1) * 256
    params = check_main(attention_catalog[launch["kernel"]], launch, d)
    maps = [read_map(map_) for map_ in maps_of(params)]
    assert maps[0]["dims"] == [d, s, h, b, 1]
    assert maps[1]["dims"] == [d, keys, kv_heads, b, 1]
    assert maps[2]["dims"] == [padded, d, kv_heads, b, 1]
    assert maps[0]["strides"][:2] == [h * d, d]  # rows, heads
    assert maps[2]["strides"][0] == padded
    assert kv_heads == 1 or maps[2]["strides"][1] == padded * d
    assert b == 1 or maps[2]["strides"][2] == padded * d * kv_heads
    assert params.lengths.cu_seqlens_q == 0
    assert (params.batch, params.heads, params.group) == (b, h, h // kv_heads)


@pytest.mark.parametrize(
    ("b", "h", "s", "d", "kv_heads", "keys"),
    [
        (2, 2, 33, 48, 2, 100),
        (8, 32, 4096, 64, 2, 777),
        (32, 32, 512, 64, 32, 512),
        (1, 32, 16384, 64, 32, 16384),
        (4, 8, 128, 128, 2, 777),
        (4, 16, 4096, 128, 16, 4096),
        (8, 8, 2048, 256, 8, 2048),
    ],
)
def test_blocks_transpose_values_of_few_keys(
    driver, attention_catalog, b, h, s, d, kv_heads, keys
) -> None:
    (launch,) = launches_of(driver, partial(attend, b, h, s, d, kv_heads, keys, is_causal=True))
    assert attention_catalog[launch["kernel"]]["transposes_values"]
    params = check_main(attention_catalog[launch["kernel"]], launch, d)
    _, of_keys, of_values = (read_map(map_) for map_ in maps_of(params))
    assert of_keys["dims"] == [d, keys, kv_heads, b, 1]
    assert of_values == of_keys | {"address": of_values["address"]}
    assert params.next == 0


@pytest.mark.parametrize(
    ("d", "heads", "most", "transposes"),
    [(128, 4, 400, True), (256, 4, 400, True), (256, 64, 6000, False)],
)
def test_packed_sequences(
    driver, attention_catalog, d: int, heads: int, most: int, transposes: bool
) -> None:
    def call() -> None:
        q = tensors.empty(1000, heads, d, dtype=E4M3)
        k, v = (tensors.empty(3 * most, 2, d, dtype=E4M3) for _ in range(2))
        offsets = tensors.empty(6, dtype=torch.int32)
        descale = tensors.strided((5, 2), (0, 1), torch.float32)
        torch.ops.cubin.attention_forward_e4m3(
            q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=300,
            max_seqlen_k=most, k_descale=descale,
        )  # fmt: skip

    *before, order, launch = launches_of(driver, call)
    assert order["kernel"] == "sm90_order_attention_queries"
    params = check_main(attention_catalog[launch["kernel"]], launch, d)
    maps = [read_map(map_) for map_ in maps_of(params)]
    rows = [(maps[0], heads), (maps[1], 2)]
    assert bool(attention_catalog[launch["kernel"]]["transposes_values"]) == transposes
    if transposes:
        assert before == []
        rows.append((maps[2], 2))
    else:
        values = launch_params.read(before[0], ValuesParams)
        keys = (-(-3 * most // 128) + 5) * 128
        assert (values.seqlen, values.total, values.sequences) == (most, 3 * most, 5)
        assert (values.keys, values.granule, list(values.stride)) == (keys, 128, [0, d, 2 * d])
        assert maps[2]["dims"] == [keys, d, 2, 1, 1]
    for found, own_heads in rows:
        row = own_heads * d
        assert found["strides"] == [row, d, row, 2**35 - row]  # the last one wraps around
    assert params.order != 0
    assert params.lengths.cu_seqlens_q != 0


@pytest.mark.parametrize(
    ("dim", "b", "s", "tile"),
    [
        (64, 1, 16384, [192, 128, 64]),
        (64, 1, 128, [128, 128, 64]),
        (64, 64, 256, [128, 64, 64]),
        (128, 1, 16384, [192, 128, 128]),
        (128, 1, 128, [128, 128, 128]),
    ],
)
def test_tiles(driver, attention_catalog, dim: int, b: int, s: int, tile: list[int]) -> None:
    """Long sequences have the large tiles, many short ones of 64 columns two teams."""
    *_, launch = launches_of(driver, partial(attend, b, 2048 // dim, s, dim, 2048 // dim, s))
    assert attention_catalog[launch["kernel"]]["tile"] == tile


def test_other_gpus_have_no_kernel(driver, tmp_path, monkeypatch) -> None:
    kernels = catalogs.kernels_of("attention", lambda k: k["dtype"] != "float8_e4m3fn")
    catalogs.install(driver, tmp_path, monkeypatch, kernels)

    def run() -> str:
        with pytest.raises(RuntimeError) as caught:
            attend(1, 2, 64, 64, 2, 64)
        return str(caught.value)

    assert "[no_kernel]: attention_forward_e4m3 has no kernel for float8_e4m3fn" in forked(run)


def test_kernels_that_do_not_say_who_transposes_are_refused(driver, tmp_path, monkeypatch) -> None:
    kernels = [dict(kernel) for kernel in catalogs.kernels_of("attention")]
    for kernel in kernels:
        kernel.pop("transposes_values", None)
    catalogs.install(driver, tmp_path, monkeypatch, kernels)

    def run() -> str:
        with pytest.raises(RuntimeError) as caught:
            attend(1, 2, 64, 64, 2, 64)
        return str(caught.value)

    assert "[no_kernel]" in forked(run)


def test_partial_tiles_in_front(driver, attention_catalog) -> None:
    """Of causal rows, in tiles of 192 queries."""
    calls = [(4096, True, 128), (4096, False, 0), (3840, True, 0)]

    def run() -> list:
        for rows, causal, _ in calls:
            attend(4, 32, rows, 64, 32, rows, is_causal=causal)
        with torch_cubin.batch_invariant():
            attend(4, 32, 4096, 64, 32, 4096, is_causal=True)
        return [x for x in driver.launches() if x["kernel"].startswith("sm90_e4m3_attention_")]

    found = forked(run)
    assert [attention_catalog[x["kernel"]]["tile"][0] for x in found] == [192] * 4
    fewer = [launch_params.read(x, Params).fewer for x in found]
    assert fewer == [wanted for _, _, wanted in calls] + [0]


def test_tiles_whose_last_one_is_skipped_in_part(driver, attention_catalog) -> None:
    """Of 1,024 full rows, tiles of 192 queries leave 64, of which one consumer alone has rows, for
    half of the time; of 512 they leave 128."""

    def kernel_of(rows: int) -> str:
        (launch,) = launches_of(driver, partial(attend, 16384 // rows, 16, rows, 128, 16, rows))
        return launch["kernel"]

    assert kernel_of(1024) == "sm90_e4m3_attention_rows_192x128x128"
    assert kernel_of(512) == "sm90_e4m3_attention_128x128x128"
