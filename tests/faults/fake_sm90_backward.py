"""What the sm90 kernels of attention's backward are launched with, on the stand-in driver."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch
from fake_driver import tensors
from faults import catalogs
from faults.fake_sm90_attention import Lengths, ScoreRule
from faults.fake_sm90_launch import read_map
from faults.forked import forked

NO_BOUND = 1 << 30
NAMES = (
    *("sums", "dq_sum", "turns", "out", "grad_out_rows", "logsumexp", "order", "dq", "dk", "dv"),
)


class Params(ctypes.Structure):
    """Sm90BackwardParams of csrc/kernels/attention/sm90_backward_params.h."""

    _fields_ = [
        ("maps", ctypes.c_uint64 * 16 * 4),
        *[(name, ctypes.c_uint64) for name in NAMES],
        *[(name, ctypes.c_int64 * 3) for name in (
            "out_stride", "grad_out_stride", "dq_stride", "dk_stride", "dv_stride")],
        ("logsumexp_stride", ctypes.c_int64 * 2), ("lengths", Lengths),
        *[(name, ctypes.c_int) for name in (
            "batch", "heads", "group", "head_dim", "head_dim_v", "tile_rows", "tile_columns",
            "tiles", "key_tiles", "together")],
        *[(name, ctypes.c_float) for name in ("scale", "unit", "logsumexp_unit")],
        ("score", ScoreRule),
    ]  # fmt: skip


@pytest.fixture
def catalog(driver, tmp_path, monkeypatch) -> dict[str, dict]:
    """The attention kernels for Hopper, by name."""
    kernels = catalogs.kernels_of("attention")
    catalogs.install(driver, tmp_path, monkeypatch, kernels)
    return {kernel["name"]: kernel for kernel in kernels}


def made(b: int, h: int, s: int, d: int, dtype=torch.bfloat16) -> torch.Tensor:
    """(batch, heads, rows, columns), in memory (batch, rows, heads, columns)."""
    return tensors.strided((b, h, s, d), (s * h * d, d, h * d, 1), dtype)


def launches_of(driver, q, k, v, **options) -> list[dict]:
    b, h, s, _ = q.shape

    def run() -> list:
        grad, out = (made(b, h, s, v.shape[-1], q.dtype) for _ in range(2))
        logsumexp = tensors.empty(b, h, s, dtype=torch.float32)
        torch.ops.cubin.attention_backward(
            grad, q, k, v, out, logsumexp, enable_gqa=True, **options
        )
        return driver.launches()

    return forked(run)


# batch, heads, heads of key, rows, keys, head_dim, options, heads together
CALLS = [
    (2, 4, 4, 4096, 4096, 128, {}, 8),
    (1, 16, 16, 16384, 16384, 64, {"is_causal": True}, 8),
    (3, 6, 3, 1000, 777, 64, {"is_causal": True, "bottom_right": True}, 9),
    (1, 8, 1, 520, 520, 96, {"window_left": 100, "window_right": 30, "scale": 0.5}, 1),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_what_the_three_launches_hold(driver, catalog, call, dtype: torch.dtype) -> None:
    """Boxes bring what the kernel's barriers wait for, or it would hang; the rest is the call."""
    b, h, kv_heads, s, keys, d, options, together = call
    q, k, v = (
        made(b, n, rows, d, dtype) for n, rows in ((h, s), (kv_heads, keys), (kv_heads, keys))
    )
    launches = launches_of(driver, q, k, v, **options)
    kinds = [catalog[x["kernel"]]["kind"] for x in launches]
    assert kinds == ["sm90_backward_delta", "sm90_backward", "sm90_backward_convert"]
    assert len({x["params"][0] for x in launches}) == 1
    params = Params.from_buffer_copy(bytes.fromhex(launches[0]["params"][0]))
    delta, kernel, convert = (catalog[x["kernel"]] for x in launches)
    rows, columns, width = kernel["tile"]
    assert {x["dtype"] for x in (delta, kernel, convert)} == {str(dtype).removeprefix("torch.")}
    assert (columns, width) == (128, 64 if d <= 64 else 128)
    for index, (heads, length, box) in enumerate(
        [(h, s, rows), (kv_heads, keys, 128), (kv_heads, keys, 128), (h, s, rows)]
    ):
        found = read_map(params.maps[index])
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
    assert params.together == together
    scale = options.get("scale", 1 / math.sqrt(d))
    assert math.isclose(params.scale, scale, rel_tol=1e-6)
    assert math.isclose(params.unit, scale * math.log2(math.e), rel_tol=1e-6)
    assert (params.tile_rows, params.tile_columns) == (rows, width)
    assert (params.tiles, params.key_tiles) == (-(-s // rows), -(-keys // 128))
    tiles = b * h * params.tiles
    assert [x["grid"] for x in launches] == [
        [tiles * rows // delta["tile"][0], 1, 1],
        [b * kv_heads * params.key_tiles, 1, 1],
        [-(-tiles * (rows // 8) * (width // 64) // 8), 1, 1],
    ]
    # TMA's addresses, and memory that does not overlap.
    assert params.dq_sum % 16 == params.sums % 16 == 0
    assert params.sums == params.dq_sum + 4 * tiles * rows * width
    assert params.turns == params.sums + 8 * tiles * rows
    assert list(params.dq_stride)[1:] == [d, h * d]


@pytest.mark.parametrize("what", ["head_dim", "mask", "float32"])
def test_what_is_left_to_the_portable_kernels(driver, catalog, what: str) -> None:
    d = 136 if what == "head_dim" else 128
    dtype = torch.float32 if what == "float32" else torch.bfloat16
    q, k, v = (made(2, 4, 300, d, dtype) for _ in range(3))
    options: dict = {}
    if what == "mask":
        options["attn_mask"] = tensors.empty(300, 300, dtype=torch.bool)
    kernels = [x["kernel"] for x in launches_of(driver, q, k, v, **options)]
    assert kernels
    assert not any(name.startswith("sm90_") for name in kernels), kernels


@pytest.mark.parametrize("options", [{"softcap": 30.0}, {"scale": -1.0}], ids=str)
def test_options_have_kernels_of_their_own(driver, catalog, options: dict) -> None:
    q, k, v = (made(2, 4, 300, 128) for _ in range(3))
    kernels = [x["kernel"] for x in launches_of(driver, q, k, v, **options)]
    assert any(name.startswith("sm90_backward_attention_bf16_general_") for name in kernels)
