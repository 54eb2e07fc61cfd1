"""What attention_backward_e4m3 launches, on the stand-in driver."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from c_layouts import ATTENTION, structure
from fake_driver import tensors
from faults import launch_params
from faults.forked import forked, launches_of
from faults.launch_params import read_map

E4M3 = torch.float8_e4m3fn
Params = structure(f"{ATTENTION}/sm90/e4m3_backward_params.h", "Sm90E4m3BackwardParams")


def differentiate(b: int, h: int, s: int, d: int, kv_heads: int, keys: int, **options) -> None:
    """Of (batch, rows, heads, columns) in memory."""

    def made(heads: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
        return tensors.strided((b, heads, rows, d), (rows * heads * d, d, heads * d, 1), dtype)

    descale = tensors.strided((b, kv_heads), (0, 1), torch.float32)
    out, grad_out = (made(h, s, torch.bfloat16) for _ in range(2))
    torch.ops.cubin.attention_backward_e4m3(
        grad_out, made(h, s, E4M3), made(kv_heads, keys, E4M3), made(kv_heads, keys, E4M3), out,
        tensors.empty(b, h, s, dtype=torch.float32), k_descale=descale, **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("b", "h", "s", "d", "kv_heads", "keys"),
    [
        (2, 4, 1000, 64, 2, 777),
        (2, 4, 4096, 64, 4, 4096),
        (1, 16, 4096, 128, 16, 4096),
        (2, 4, 300, 128, 4, 1024),
        (3, 8, 520, 112, 1, 1023),
        (3, 8, 520, 112, 1, 896),
        (2, 4, 300, 128, 4, 2049),
    ],
)
def test_launch_parameters(driver, attention_catalog, b, h, s, d, kv_heads, keys) -> None:
    delta, main, convert = launches_of(driver, partial(differentiate, b, h, s, d, kv_heads, keys))
    assert delta["kernel"] == "sm90_e4m3_backward_delta_attention"
    assert convert["kernel"] == "sm90_e4m3_backward_convert_attention"
    rows, columns, width = attention_catalog[main["kernel"]]["tile"]
    tiles = -(-s // rows) * b * h
    assert delta["grid"] == [tiles * rows // attention_catalog[delta["kernel"]]["tile"][0], 1, 1]
    assert convert["grid"] == [-(-tiles * rows // 8 * (width // 64) // 8), 1, 1]
    params = launch_params.read(main, Params)
    # Blocks of 128 columns work in pairs, each of which loads half of the keys, but of few and an
    # odd number of tiles of keys.
    pairs = width == 128 and (keys > 1024 or -(-keys // 128) % 2 == 0)
    assert attention_catalog[main["kernel"]]["cluster"] == ([2, 1, 1] if pairs else [1, 1, 1])
    loaded = columns // 2 if pairs else columns
    panel = 64 if width == 64 else 128
    sizes = {
        "q": (s, h, panel, rows), "grad_bytes": (s, h, panel, rows), "grad_out": (s, h, 64, rows),
        "k": (keys, kv_heads, panel, loaded), "v": (keys, kv_heads, panel, loaded),
    }  # fmt: skip
    for name, (outer, heads, *box) in sizes.items():
        found = read_map(getattr(params, name))
        assert found["dims"] == [d, outer, heads, b, 1], name
        assert found["box"] == [*box, 1, 1, 1], name
    assert read_map(params.grad_bytes)["address"] == params.grad_rows
    # With many keys the kernel before makes q in bfloat16.
    wide = keys > (1280 if pairs else 2048)
    assert ("wide" in main["kernel"]) == wide == bool(params.wide_query)
    if params.wide_query:
        found = read_map(params.wide_q)
        assert (found["address"], found["dims"]) == (params.wide_query, [d, s, h, b, 1])
        assert found["box"] == [64, rows, 1, 1, 1]
    # A row's logsumexp, delta and inverse factor.
    assert params.row_factors - params.sums >= 4 * 3 * rows * tiles
    assert params.unit == pytest.approx(math.log2(math.e) / math.sqrt(d), rel=1e-6)
    assert list(params.k_descale.stride) == [0, 1]
    assert (params.tile_rows, params.tile_keys, params.tile_columns) == (rows, columns, width)
    assert (params.parts, params.sets, params.query_tiles) == (1, 1, tiles)


@pytest.mark.parametrize("d", [72, 256])
def test_other_head_dims_have_no_kernel(driver, attention_catalog, d) -> None:
    def run() -> str:
        with pytest.raises(RuntimeError) as caught:
            differentiate(1, 2, 64, d, 2, 64)
        return str(caught.value)

    assert "[no_kernel]: attention_backward_e4m3 has no kernel for this call" in forked(run)
