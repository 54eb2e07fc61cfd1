"""Calls of flash_attention of float8_e4m3fn, and the expected results: the formula in float64 for
the values of the tensors."""

from __future__ import annotations

import random
from typing import Any

import torch
from ops import attention_samples
from torch import Tensor

E4M3 = torch.float8_e4m3fn


def quantised(shape: tuple[int, ...], device: str, factor: float = 1.0) -> Tensor:
    return (torch.randn(shape, device=device) * factor).to(E4M3)


def make(
    device: str,
    batch: int = 2,
    rows: int = 5,
    keys: int = 7,
    heads: int = 4,
    shared: int = 2,
    dim: int = 32,
    dim_v: int | None = None,
    lengths: list[tuple[int, int]] | None = None,
    descale: str = "",
    factor: float = 1.0,
    heads_first: bool = False,
    pad: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """The arguments of a call. `lengths`: rows and keys of packed sequences; `descale`: the letters
    of the tensors that have factors; `pad`: columns between the rows of heads."""
    if lengths is not None:
        batch = len(lengths)
        rows, keys = (sum(n) for n in zip(*lengths, strict=True))

    def tensor(length: int, own_heads: int, width: int) -> Tensor:
        shape = [batch, length, own_heads, width + pad]
        if lengths is not None:
            return quantised((length, own_heads, width + pad), device, factor)[..., :width]
        if heads_first:
            shape[1:3] = shape[2:0:-1]
        out = quantised(tuple(shape), device, factor)[..., :width]
        return out.transpose(1, 2) if heads_first else out

    args: dict[str, Any] = {
        "query": tensor(rows, heads, dim),
        "key": tensor(keys, shared, dim),
        "value": tensor(keys, shared, dim if dim_v is None else dim_v),
        **options,
    }
    if lengths is not None:
        for i, name in enumerate(("q", "k")):
            ends = torch.tensor([0, *(n[i] for n in lengths)]).cumsum(0)
            args[f"cu_seqlens_{name}"] = ends.to(device, torch.int32)
            args[f"max_seqlen_{name}"] = max(n[i] for n in lengths)
    for letter in descale:
        args[f"{letter}_descale"] = torch.rand(batch, shared, device=device) + 0.25
    return args


def formula(
    query: Tensor, key: Tensor, value: Tensor, *, bottom_right: bool = True, **options: Any
) -> tuple[Tensor, Tensor]:
    """out and logsumexp by the definition; float64 (batch, heads, rows, columns)."""
    options |= {"bottom_right": bottom_right, "enable_gqa": True}
    return attention_samples.formula(query, key, value, **options)


def expected(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """The output as flash_attention has it, and the logsumexp, in float64."""
    if cu_seqlens_q is None:
        group = query.shape[2] // max(key.shape[2], 1)

        def wide(x: Tensor, descale: Tensor | None, repeat: int = 1) -> Tensor:
            x = x.double().transpose(1, 2)
            if descale is None:
                return x
            return x * descale.double().repeat_interleave(repeat, 1)[..., None, None]

        out, logsumexp = formula(
            wide(query, q_descale, group), wide(key, k_descale), wide(value, v_descale), **options
        )
        return out.transpose(1, 2), logsumexp
    out = torch.zeros(*query.shape[:2], value.shape[2], dtype=torch.float64, device=query.device)
    logsumexp = torch.full((query.shape[1], query.shape[0]), -torch.inf, dtype=torch.float64)
    logsumexp = logsumexp.to(query.device)
    q_ends, k_ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for b in range(len(q_ends) - 1):
        q, k = slice(q_ends[b], q_ends[b + 1]), slice(k_ends[b], k_ends[b + 1])
        own = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
        own = {name: None if x is None else x[b : b + 1] for name, x in own.items()}
        one = (query[None, q], key[None, k], value[None, k])
        out[q], logsumexp[:, q] = (x[0] for x in expected(*one, **own, **options))
    return out, logsumexp


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"rows": 9, "keys": 9, "is_causal": True},
    "causal, more rows than keys": {"rows": 9, "keys": 4, "is_causal": True},
    "top left": {"rows": 4, "keys": 9, "is_causal": True, "bottom_right": False},
    "window": {"rows": 30, "keys": 40, "window_left": 5, "window_right": 2},
    "one row": {"rows": 1, "keys": 1, "heads": 1, "shared": 1},
    "factors": {"descale": "qkv"},
    "a factor": {"descale": "v", "heads": 6, "shared": 3, "is_causal": True},
    "scale": {"scale": 0.7},
    "negative scale": {"scale": -0.7, "descale": "k"},
    "no scale": {"scale": 0.0},
    "heads first": {"heads_first": True, "descale": "qk"},
    "rows between": {"pad": 16},
    "odd columns": {"dim": 24, "dim_v": 40},
    "odd strides": {"dim": 32, "pad": 3},
    "other columns": {"dim": 64, "dim_v": 16},
    "packed": {"lengths": [(3, 5), (1, 1), (7, 9)]},
    "packed, causal": {"lengths": [(3, 5), (0, 4), (7, 3), (2, 0)], "is_causal": True},
    "packed, factors": {"lengths": [(4, 4), (40, 33)], "descale": "qkv", "window_left": 9},
}


def random_case(r: random.Random, device: str) -> dict[str, Any]:
    shared, group = r.choice((1, 2, 3)), r.choice((1, 1, 2, 4))
    size = (0, 1, 2, 7, 16, 31, 64, 65, 127, 128, 129, 200, 300, 513)
    options: dict[str, Any] = {
        "heads": shared * group,
        "shared": shared,
        "dim": r.choice((8, 16, 32, 64, 64, 72, 96, 128, 128, 160, 192, 256)),
        "descale": r.choice(("", "", "k", "qk", "v", "qkv")),
        "factor": r.choice((0.3, 1.0, 1.0, 1.0, 4.0)),
        "pad": r.choice((0, 0, 0, 16, 8)),
        "bottom_right": r.random() < 0.7,
    }
    if r.random() < 0.2:
        options["dim_v"] = r.choice((16, 64, 128))
    if r.random() < 0.3:
        options["lengths"] = [(r.choice(size), r.choice(size)) for _ in range(r.choice((1, 3, 9)))]
        options["lengths"][0] = (r.choice(size[1:]), r.choice(size[1:]))
    else:
        options |= {
            "batch": r.choice((1, 2, 3)),
            "rows": r.choice(size[1:]),
            "keys": r.choice(size),
        }
        options["heads_first"] = r.random() < 0.3
    mask = r.random()
    if mask < 0.35:
        options["is_causal"] = True
    elif mask < 0.7:
        options["window_left"], options["window_right"] = (r.choice((-1, 0, 3, 100)) for _ in "lr")
    if r.random() < 0.2:
        options["scale"] = r.choice((0.01, 0.5, -0.1))
    return make(device, **options)
