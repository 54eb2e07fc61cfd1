"""Arguments for the tests of attention: shapes, layouts, and the formula of its results."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from ops.samples import make, random_layout
from torch import Tensor

ops = torch.ops.cubin
attention = ops.scaled_dot_product_attention
stock = F.scaled_dot_product_attention

# query, key, value: plain, cross, other head_dim of value, any rank, broadcast, sizes of 0 and 1.
SHAPES = [
    ((2, 3, 5, 8), (2, 3, 5, 8), (2, 3, 5, 8)),
    ((2, 3, 4, 8), (2, 3, 7, 8), (2, 3, 7, 5)),
    ((1, 1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1)),
    ((4, 8), (7, 8), (7, 5)),
    ((3, 4, 8), (3, 7, 8), (3, 7, 8)),
    ((2, 2, 3, 4, 8), (2, 2, 3, 7, 8), (2, 2, 3, 7, 8)),
    ((4, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
    ((2, 3, 4, 8), (7, 8), (7, 8)),
    ((2, 3, 4, 8), (2, 1, 7, 8), (2, 1, 7, 8)),
    ((1, 3, 4, 8), (2, 3, 7, 8), (2, 1, 7, 8)),
    ((2, 1, 3, 4, 8), (5, 3, 7, 8), (1, 1, 7, 8)),
    ((2, 3, 0, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
    ((2, 3, 4, 8), (2, 3, 0, 8), (2, 3, 0, 8)),
    ((0, 3, 4, 8), (0, 3, 7, 8), (0, 3, 7, 8)),
    ((2, 0, 4, 8), (2, 0, 7, 8), (2, 0, 7, 8)),
    ((2, 3, 4, 0), (2, 3, 7, 0), (2, 3, 7, 8)),
    ((2, 3, 4, 8), (2, 3, 7, 8), (2, 3, 7, 0)),
]

# With enable_gqa=True.
SHARED = [
    ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6)),
    ((2, 4, 5, 8), (2, 1, 7, 8), (2, 1, 7, 8)),
    ((6, 5, 8), (3, 7, 8), (3, 7, 8)),
    ((2, 6, 5, 8), (1, 3, 7, 8), (1, 3, 7, 8)),
    ((2, 6, 5, 8), (2, 3, 7, 8), (2, 2, 7, 8)),
]


def case_id(shapes: object) -> str:
    return ",".join("x".join(map(str, shape)) for shape in shapes)


def make_qkv(shapes: tuple, device: str, dtype: torch.dtype = torch.float32, **options) -> list:
    return [make(shape, device, dtype, **options) for shape in shapes]


def _repeat(tensor: Tensor, heads: int) -> Tensor:
    return tensor.repeat_interleave(heads // tensor.shape[-3], -3)


def logits(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    bottom_right: bool = False,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    product: Callable[[Tensor, Tensor], Tensor] = torch.matmul,
) -> Tensor:
    """What the softmax gets, of query and key in float64 with as many heads."""
    rows, columns = query.shape[-2], key.shape[-2]
    factor = 1 / math.sqrt(max(query.shape[-1], 1)) if scale is None else scale
    scores = product(query, key.mT) * factor
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    i = torch.arange(rows, device=query.device)[:, None]
    j = torch.arange(columns, device=query.device)
    if alibi_slopes is not None:
        slopes = alibi_slopes.double()[..., None, None]
        scores = scores - slopes * (i + columns - rows - j).abs()
    visible = torch.ones(rows, columns, dtype=torch.bool, device=query.device)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        visible = attn_mask
    elif attn_mask is not None:
        scores = scores + attn_mask.double()
    ahead = j - i - (columns - rows if bottom_right else 0)
    if is_causal:
        window_right = 0
    if window_right >= 0:
        visible = visible & (ahead <= window_right)
    if window_left >= 0:
        visible = visible & (ahead >= -window_left)
    return torch.where(visible, scores, -math.inf)


def formula(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    kept: Tensor | None = None,
    *,
    enable_gqa: bool = False,
    sinks: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """out and logsumexp by the definition, in float64. `kept`: what dropout multiplies by.

    `options` are those of logits().
    """
    query, key, value = query.double(), key.double(), value.double()
    if enable_gqa:
        key, value = (_repeat(x, query.shape[-3]) for x in (key, value))
    scores = logits(query, key, attn_mask, is_causal, **options)
    joined = scores
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(*scores.shape[:-1], 1)
        joined = torch.cat([scores, column], -1)
    logsumexp = torch.logsumexp(joined, -1) if joined.shape[-1] else scores.sum(-1) - math.inf
    weights = torch.exp(scores - logsumexp.unsqueeze(-1))
    weights = torch.where((logsumexp == -math.inf).unsqueeze(-1), 0.0, weights)
    if kept is not None:
        weights = weights * kept
    return weights @ value, logsumexp.expand(*logsumexp.shape)


def packed_formula(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Sequence[int],
    columns: Sequence[int],
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """The same of sequences with so many rows and keys, one behind the other, whose last row is at
    the last key: (rows, heads, head_dim) and (heads, rows)."""
    parts = [
        formula(*(x.transpose(0, 1) for x in part), enable_gqa=True, bottom_right=True, **options)
        for part in zip(
            query.split(list(rows)), key.split(list(columns)), value.split(list(columns)),
            strict=True,
        )
    ]  # fmt: skip
    outs, sums = zip(*parts, strict=True)
    return torch.cat([out.transpose(0, 1) for out in outs]), torch.cat(sums, 1)


def reference(*args, **options) -> Tensor:
    """torch's attention, except for sizes of 0: 0 heads crash torch 2.11 on the CPU."""
    if all(tensor.numel() for tensor in args[:3]):
        return stock(*args, **options)
    return formula(*args, **options)[0].to(args[0].dtype)


def kept_weights(shape: tuple[int, ...], dropout_p: float, seed: Tensor, device: str) -> Tensor:
    """The factors by which dropout with this seed multiplies weights of this shape, from the op."""
    *leading, rows, columns = shape
    options = {"dtype": torch.float64, "device": device}
    query = torch.zeros(*leading, rows, 8, **options)
    key = torch.zeros(*leading, columns, 8, **options)
    eye = torch.eye(columns, **options).expand(*leading, columns, columns)
    out, _ = ops.attention_forward(query, key, eye, None, dropout_p, False, seed)
    return out * columns


def random_case(rng: random.Random) -> tuple[tuple, dict]:
    """Shapes that F.scaled_dot_product_attention takes, with arguments that go with them."""

    def size() -> int:
        return rng.choice((0, 1, 1, 2, 3, 4, 5))

    rank = rng.choice((2, 3, 4, 4, 4, 5))
    batch = [rng.choice((0, 1, 2, 3)) for _ in range(rank - 3)]
    heads = rng.choice((1, 2, 3, 4, 6))
    rows, columns = size(), size()
    head_dim, head_dim_v = rng.choice((0, 1, 3, 8, 8)), rng.choice((0, 1, 5, 8, 8))
    options: dict = {}
    key_heads = value_heads = heads
    if rank > 2 and rng.random() < 0.3:
        divisors = [n for n in range(1, heads + 1) if heads % n == 0]
        key_heads = rng.choice(divisors)
        value_heads = rng.choice((key_heads, key_heads, rng.choice(divisors)))
        options["enable_gqa"] = True

    def leading(own_heads: int) -> list[int]:
        if rank == 2:
            return []
        sizes = [*(rng.choice((x, x, x, 1)) for x in batch), own_heads]
        if "enable_gqa" in options:
            return sizes
        if rng.random() < 0.1:
            sizes[-1] = 1
        return sizes[rng.randrange(len(sizes)) :] if rng.random() < 0.1 else sizes

    shapes = (
        (*leading(heads), rows, head_dim),
        (*leading(key_heads), columns, head_dim),
        (*leading(value_heads), columns, head_dim_v),
    )
    if rng.random() < 0.2:
        options["is_causal"] = True
    return shapes, options


def random_qkv(rng: random.Random, shapes: tuple, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Tensors of these shapes: views of all kinds, and those that models use."""
    tensors = []
    for shape in shapes:
        kind = rng.random()
        if kind < 0.3:
            tensors.append(torch.randn(shape, dtype=dtype, device=device))
        elif kind < 0.6 and len(shape) > 2:  # dense in any order of the dims before the last
            order = list(range(len(shape) - 1))
            rng.shuffle(order)
            order.append(len(shape) - 1)
            base = torch.randn([shape[i] for i in order], dtype=dtype, device=device)
            tensors.append(base.permute([order.index(i) for i in range(len(shape))]))
        else:
            tensors.append(random_layout(rng, shape, dtype, device))
    return tensors
