"""Calls of flash_attention_with_kvcache, and what they must give: the formula in float64."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import torch
from ops.attention_samples import formula
from torch import Tensor

E4M3 = torch.float8_e4m3fn


def rotated(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool, dtype: torch.dtype
) -> Tensor:
    """x (rows, heads, dim), rounded to `dtype`; positions past the tables have their last row."""
    at = positions.clamp(max=cos.shape[0] - 1)
    c, s = (t[at].double()[:, None, :] for t in (cos, sin))
    half = cos.shape[1]
    wide = x.double()
    if interleaved:
        a, b = wide[..., 0 : 2 * half : 2], wide[..., 1 : 2 * half : 2]
        first = torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2)
    else:
        a, b = wide[..., :half], wide[..., half : 2 * half]
        first = torch.cat((a * c - b * s, a * s + b * c), -1)
    return torch.cat((first, wide[..., 2 * half :]), -1).to(dtype)


def quantised(x: Tensor, descale: Tensor | None) -> Tensor:
    """x (rows, heads, dim) as a cache of e4m3 holds it, in float32: rounded once, at most 448."""
    scaled = x.float() if descale is None else x.float() / descale[:, None]
    return scaled.clamp(-448, 448).to(E4M3).float()


def expected(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    block_table: Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The output in float64, and both caches as they are afterwards, those of e4m3 in float32."""
    is_e4m3 = k_cache.dtype == E4M3
    if is_e4m3:
        k_cache, v_cache = k_cache.float(), v_cache.float()
    else:
        k_cache, v_cache = k_cache.clone(), v_cache.clone()
    batch, rows = q.shape[:2]
    page_size = k_cache.shape[1]
    capacity = page_size if block_table is None else block_table.shape[1] * page_size
    new = 0 if k is None else k.shape[1]
    outs = []
    for b in range(batch):
        length = capacity if cache_seqlens is None else int(cache_seqlens[b])
        length = min(max(length, 0), capacity)
        columns = torch.arange(capacity, device=q.device)
        if block_table is None:
            first = columns.new_full(
                (capacity,), b if cache_batch_idx is None else cache_batch_idx[b]
            )
            row = columns
        else:
            first, row = block_table[b].long()[columns // page_size], columns % page_size
        own = q[b]
        if k is not None:
            total = min(length + new, capacity)
            positions = torch.arange(length, length + new, device=q.device)
            keys = k[b]
            if rotary_cos is not None:
                dtype = torch.float64 if is_e4m3 else q.dtype
                keys = rotated(keys, rotary_cos, rotary_sin, positions, rotary_interleaved, dtype)
                by_row = causal or window_left >= 0 or window_right >= 0
                at = length + torch.arange(rows, device=q.device) * int(by_row)
                own = rotated(own, rotary_cos, rotary_sin, at, rotary_interleaved, q.dtype)
            values = v[b]
            if is_e4m3:
                keys = quantised(keys, None if k_descale is None else k_descale[b])
                values = quantised(values, None if v_descale is None else v_descale[b])
            written = total - length
            k_cache[first[length:total], row[length:total]] = keys[:written]
            v_cache[first[length:total], row[length:total]] = values[:written]
            length = total
        keys, values = (x[first[:length], row[:length]].double() for x in (k_cache, v_cache))
        if k_descale is not None:
            keys = keys * k_descale[b].double()[:, None]
        if v_descale is not None:
            values = values * v_descale[b].double()[:, None]
        slopes = alibi_slopes
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes[b]
        out, _ = formula(
            *(x.transpose(0, 1) for x in (own, keys, values)), is_causal=causal,
            scale=softmax_scale, enable_gqa=True, window_left=window_left,
            window_right=window_right, bottom_right=True, softcap=softcap, alibi_slopes=slopes,
            sinks=sinks,
        )  # fmt: skip
        outs.append(out.transpose(0, 1))
    return torch.stack(outs) if outs else q.double(), k_cache, v_cache


@dataclasses.dataclass
class Case:
    args: dict[str, Any]
    text: str


def make(
    device: str,
    *,
    batch: int = 3,
    rows: int = 1,
    heads: int = 4,
    shared: int = 2,
    dim: int = 64,
    dim_v: int | None = None,
    capacity: int = 96,
    page_size: int = 0,
    lengths: list[int] | None = None,
    new: int = 0,
    rotary_dim: int = 0,
    cache_batch: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    slopes: bool = False,
    sinks: bool = False,
    e4m3: bool = False,
    descale: str = "",
    **options: Any,
) -> dict[str, Any]:
    """The arguments of a call; `page_size` 0: a contiguous cache. Pages lie in random order.

    `e4m3`: the caches' dtype; `descale`: which of "k" and "v" have factors, "s": one for all heads.
    """

    def random_tensor(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    def random_cache(*shape: int) -> Tensor:
        return random_tensor(*shape).to(E4M3) if e4m3 else random_tensor(*shape)

    dim_v = dim if dim_v is None else dim_v
    args: dict[str, Any] = {"q": random_tensor(batch, rows, heads, dim)}
    if page_size:
        of_sequence = -(-capacity // page_size)
        pages = batch * of_sequence + 3
        args["k_cache"] = random_cache(pages, page_size, shared, dim)
        args["v_cache"] = random_cache(pages, page_size, shared, dim_v)
        order = torch.randperm(pages, device=device)[: batch * of_sequence]
        args["block_table"] = order.view(batch, of_sequence).int()
    else:
        args["k_cache"] = random_cache(cache_batch or batch, capacity, shared, dim)
        args["v_cache"] = random_cache(cache_batch or batch, capacity, shared, dim_v)
        if cache_batch:
            order = torch.randperm(cache_batch, device=device)[:batch]
            args["cache_batch_idx"] = order.int()
    if lengths is not None:
        args["cache_seqlens"] = torch.tensor(lengths, device=device, dtype=torch.int32)
    if new:
        args["k"] = random_tensor(batch, new, shared, dim)
        args["v"] = random_tensor(batch, new, shared, dim_v)
    if rotary_dim:
        angles = torch.rand(capacity + 8, rotary_dim // 2, device=device) * 6.3
        args["rotary_cos"], args["rotary_sin"] = angles.cos().to(dtype), angles.sin().to(dtype)
    if slopes:
        args["alibi_slopes"] = torch.rand(heads, device=device)
    if sinks:
        args["sinks"] = torch.randn(heads, device=device)
    for name in "kv":
        if name in descale:
            shape = (1, 1) if "s" in descale else (batch, shared)
            factors = torch.rand(shape, device=device) + 0.3
            args[f"{name}_descale"] = factors.expand(batch, shared)
    return args | options


CASES: dict[str, dict[str, Any]] = {
    "whole cache": {},
    "lengths": {"lengths": [0, 1, 96]},
    "lengths out of range": {"lengths": [-5, 4000, 50]},
    "new": {"lengths": [0, 17, 95], "new": 1},
    "new past the end": {"lengths": [96, 94, 3], "new": 4, "rows": 4, "causal": True},
    "several queries": {"lengths": [5, 40, 96], "rows": 3},
    "causal": {"lengths": [5, 40, 96], "rows": 3, "causal": True},
    "fully masked rows": {"lengths": [2, 0, 1], "rows": 4, "causal": True},
    "speculation": {"lengths": [0, 40, 70], "rows": 16, "new": 16, "causal": True},
    "window": {"lengths": [5, 60, 96], "rows": 2, "window_left": 20, "window_right": 1},
    "window of the past": {"lengths": [5, 60, 96], "rows": 2, "window_left": 7, "causal": True},
    "softcap": {"lengths": [5, 60, 96], "softcap": 2.0},
    "slopes": {"lengths": [5, 60, 96], "rows": 2, "slopes": True, "causal": True},
    "sinks": {"lengths": [0, 60, 96], "sinks": True},
    "scale": {"lengths": [5, 60, 96], "softmax_scale": -0.3},
    "one head": {"heads": 1, "shared": 1, "lengths": [3, 40, 96]},
    "heads alike": {"heads": 4, "shared": 4, "lengths": [3, 40, 96]},
    "a large group": {"heads": 40, "shared": 1, "lengths": [3, 40, 96], "rows": 2, "causal": True},
    "another head_dim of values": {"dim": 128, "dim_v": 64, "lengths": [3, 40, 96]},
    "narrow": {"dim": 8, "lengths": [3, 40, 96]},
    "wide": {"dim": 256, "dim_v": 192, "lengths": [3, 40, 96]},
    "float16": {"dtype": torch.float16, "lengths": [3, 40, 96], "new": 1},
    "other sequences": {"cache_batch": 7, "lengths": [3, 40, 96]},
    "new in other sequences": {"cache_batch": 7, "lengths": [3, 40, 90], "new": 2, "rows": 2},
    "pages of 16": {"page_size": 16, "lengths": [3, 40, 96]},
    "pages of 1": {"page_size": 1, "lengths": [3, 40, 90], "new": 2, "rows": 2, "causal": True},
    "pages of 7": {"page_size": 7, "capacity": 98, "lengths": [3, 40, 98]},
    "pages of 64": {"page_size": 64, "capacity": 192, "lengths": [3, 100, 190], "new": 5},
    "rotary": {"rotary_dim": 64, "lengths": [3, 40, 90], "new": 2, "rows": 2, "causal": True},
    "rotary of halves": {
        "rotary_dim": 32, "lengths": [3, 40, 90], "new": 1, "rotary_interleaved": False,
    },
    "rotary at one position": {"rotary_dim": 16, "lengths": [3, 40, 90], "new": 3, "rows": 3},
    "rotary in pages": {
        "rotary_dim": 64, "lengths": [3, 40, 90], "new": 2, "rows": 2, "causal": True,
        "page_size": 16, "rotary_interleaved": False, "dtype": torch.float16,
    },
    "e4m3": {"e4m3": True, "lengths": [3, 40, 96]},
    "e4m3 whole cache": {"e4m3": True, "descale": "kv", "dim": 128, "dtype": torch.float16},
    "e4m3 new": {
        "e4m3": True, "descale": "kv", "lengths": [3, 40, 95], "new": 3, "rows": 3, "causal": True,
    },
    "e4m3 in pages": {
        "e4m3": True, "descale": "ks", "lengths": [0, 40, 90], "new": 2, "page_size": 7,
        "capacity": 98, "dim": 256, "dim_v": 16, "sinks": True,
    },
    "e4m3 with everything": {
        "e4m3": True, "descale": "v", "lengths": [3, 40, 90], "new": 16, "rows": 16, "heads": 6,
        "dim": 96, "rotary_dim": 32, "rotary_interleaved": False, "page_size": 16,
        "window_left": 30, "causal": True, "softcap": 4.0, "slopes": True, "sinks": True,
    },
}  # fmt: skip


def at_odd_addresses(offset: int, device: str) -> dict[str, Any]:
    """A call whose contiguous tensors begin so many elements behind an aligned address.

    A part of a larger tensor may begin anywhere.
    """
    args = make(device, lengths=[3, 40, 60], new=2, rows=2, rotary_dim=32, causal=True)
    for name in ("q", "k", "v", "rotary_cos", "rotary_sin"):
        value = args[name]
        memory = torch.full((value.numel() + 16,), torch.nan, dtype=value.dtype, device=device)
        args[name] = memory[offset : offset + value.numel()].view_as(value).copy_(value)
        assert args[name].is_contiguous()
    return args


def random_case(generator: random.Random, device: str) -> dict[str, Any]:
    """Any options together."""
    pick = generator.choice
    batch, rows = generator.randint(1, 6), pick([1, 1, 1, 2, 3, 5, 8, 16, 21])
    capacity = pick([1, 15, 64, 333, 1024, 3000])
    new = pick([0, 0, 1, rows])
    shared = pick([1, 2, 3])
    page_size = pick([0, 0, 1, 3, 16, 64])
    e4m3 = generator.random() < 0.4
    dim = pick([16, 48, 64, 96, 128, 192, 256] if e4m3 else [8, 40, 64, 96, 128, 192, 256])
    options: dict[str, Any] = {}
    if e4m3:
        options = {"e4m3": True, "descale": pick(["", "k", "v", "kv", "kvs"])}
    if new and generator.random() < 0.5:
        options["rotary_dim"] = pick([n for n in (16, 32, 64) if n <= dim] or [0])
        options["rotary_interleaved"] = pick([False, True])
    if generator.random() < 0.3:
        options["window_left"] = generator.randint(0, capacity)
        options["window_right"] = pick([-1, 0, 3])
    if generator.random() < 0.2:
        options["softcap"] = 3.0
    if not page_size and generator.random() < 0.2:
        options["cache_batch"] = batch + 3
    lengths = [generator.randint(-1, capacity + 1) for _ in range(batch)]
    return make(
        device,
        batch=batch,
        rows=rows,
        heads=shared * pick([1, 2, 4, 8]),
        shared=shared,
        dim=dim,
        dim_v=pick([dim, dim, 64]),
        capacity=capacity,
        page_size=page_size,
        lengths=lengths if new or generator.random() < 0.8 else None,
        new=new,
        dtype=pick([torch.float16, torch.bfloat16]),
        slopes=generator.random() < 0.2,
        sinks=generator.random() < 0.2,
        causal=generator.random() < 0.5,
        **options,
    )
