"""Inputs of the GPU tests of attention: tensors, memory, random calls.

Tensors are placed as in cases.py: everything beside them in memory is NaN. What results are held
against is in attention_reference.py.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from gpu import cases
from torch import Tensor

DEVICE = "cuda"
DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
SHORT = {"float16": "f16", "bfloat16": "bf16"}  # in the names of kernels
HALVES = tuple(SHORT)
FUSED = (*HALVES, "float32")


def generator(seed: int | str) -> torch.Generator:
    """A generator of DEVICE whose numbers depend on `seed` alone."""
    number = seed if isinstance(seed, int) else sum(seed.encode())
    return torch.Generator(DEVICE).manual_seed(number)


def draw(shape, dtype: torch.dtype, g: torch.Generator, layout: cases.Layout | None = None):
    """Normal numbers in NaN guards."""
    value = torch.randn(tuple(shape), generator=g, device=DEVICE).to(dtype)
    return cases.place(value, layout or cases.Layout())


SCORE_KINDS = ("softcap", "alibi", "sinks", "scale", "no scale", "dropout", "all")


def score_options(kind: str, batch: int, heads: int, g: torch.Generator) -> dict:
    """What makes weights of scores otherwise than a softmax alone."""
    numbers = torch.rand(heads, generator=g, device=DEVICE)
    of_batches = torch.rand(batch, heads, generator=g, device=DEVICE) / 10
    dropout = {"dropout_p": 0.3, "dropout_seed": torch.tensor([77 + (5 << 40)], device=DEVICE)}
    return {
        "softcap": {"softcap": 3.0},
        "alibi": {"alibi_slopes": of_batches},
        "sinks": {"sinks": numbers * 4},
        "scale": {"scale": -0.1},
        "no scale": {"scale": 0.0},
        "dropout": dropout,
        "all": {
            "softcap": 5.0, "alibi_slopes": numbers / 10, "sinks": numbers, "scale": 0.3, **dropout,
        },
    }[kind]  # fmt: skip


def sm90_backward_tile(head_dim: int) -> str:
    """Queries, keys and head_dim of Hopper's kernel."""
    tiles = {64: "96x128x64", 96: "64x128x96", 128: "48x128x128", 256: "64x128x256"}
    return tiles[min(width for width in tiles if width >= head_dim)]


def poison_pools(megabytes: int = 64) -> None:
    """Leaves NaN in the free blocks of the caching allocator, small ones and large ones.

    For calls under torch's default settings, where fresh memory is not filled.
    """
    blocks = [
        torch.full((1 << 17,), torch.nan, device=DEVICE) for _ in range(2 * min(megabytes, 64))
    ]
    blocks.append(torch.full((megabytes << 18,), torch.nan, device=DEVICE))


# Random calls.

LENGTHS = (1, 1, 2, 3, 7, 16, 17, 31, 33, 64, 65, 96, 100, 128, 129, 200, 257, 300)
HEAD_DIMS = (1, 3, 8, 8, 16, 20, 24, 40, 64, 64, 64, 72, 80, 96, 100, 128, 128, 160, 192, 256, 264)
MASKS = ("bool", "own", "float32")


@dataclass(frozen=True)
class Case:
    """One random call."""

    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    v_shape: tuple[int, ...]
    layouts: tuple[cases.Layout, cases.Layout, cases.Layout]
    mask: str
    mask_shape: tuple[int, ...]
    mask_layout: cases.Layout
    is_causal: bool
    scale: float | None
    enable_gqa: bool
    backward: bool

    def options(self) -> dict:
        return {"is_causal": self.is_causal, "scale": self.scale, "enable_gqa": self.enable_gqa}


def _layout(
    r: random.Random, dims: int, mask: bool = False, equal_rows: bool = True
) -> cases.Layout:
    order = list(range(dims))
    kind = r.random()
    if kind < 0.35 and dims >= 3:
        order[-2], order[-3] = order[-3], order[-2]  # (batch, rows, heads, columns) in memory
    elif kind < 0.5:
        order[:-1] = r.sample(order[:-1], dims - 1)
    elif kind < 0.6:
        r.shuffle(order)
    expandable = dims if mask else dims - 1 if equal_rows else dims - 2
    return cases.Layout(
        order=tuple(order),
        pad=r.choice((0, 0, 0, 8, 16, 1, 3)),
        step=r.choice((1,) * 10 + (2, 3)),
        offset=r.choice((0, 0, 0, 8, 16, 1, 5)),
        expand=tuple(d for d in range(expandable) if r.random() < (0.15 if mask else 0.06)),
        negate=not mask and r.random() < 0.03,
    )


def random_length(r: random.Random) -> int:
    return 0 if r.random() < 0.02 else r.choice(LENGTHS)


def _leading(r: random.Random, batch: list[int], heads: int, broadcast: bool) -> list[int]:
    """The dims before the rows: all, some of size 1, or the last ones alone."""
    sizes = [*(1 if broadcast and r.random() < 0.3 else n for n in batch), heads]
    if broadcast and r.random() < 0.2:
        return sizes[r.randrange(len(sizes)) :]
    return sizes


def random_case(r: random.Random, backward: bool) -> Case:
    """A case so small that thousands run in some seconds."""
    while True:
        rank = r.choice((2, 3, 4, 4, 4, 4, 4, 5))
        batch = [0 if r.random() < 0.01 else r.choice((1, 2, 3)) for _ in range(rank - 3)]
        kv_heads, group = r.choice((1, 1, 2, 3)), r.choice((1, 2, 3, 4, 8))
        enable_gqa = rank > 2 and r.random() < 0.35
        heads = kv_heads * group if enable_gqa else r.choice((1, 2, 3, 4, 6))
        broadcast = r.random() < 0.2

        def leading(own: int, rank=rank, batch=batch, broadcast=broadcast, gqa=enable_gqa):
            if rank == 2:
                return []
            if broadcast and not gqa and r.random() < 0.3:
                own = 1
            return _leading(r, batch, own, broadcast)

        rows, columns = random_length(r), random_length(r)
        head_dim = r.choice(HEAD_DIMS)
        head_dim_v = head_dim if r.random() < 0.7 else r.choice(HEAD_DIMS)
        shared = kv_heads if enable_gqa else heads
        q_shape = (*leading(heads), rows, head_dim)
        k_shape = (*leading(shared), columns, head_dim)
        v_shape = (*leading(shared), columns, head_dim_v)
        count = max(math.prod(batch) * heads, 1) if rank > 2 else 1
        if count * rows * columns * (head_dim + head_dim_v) <= 2**27:
            break
    scores = (*_out_shape(q_shape, k_shape, v_shape, enable_gqa)[:-1], columns)
    mask = r.choice(("", "", "", *MASKS))
    mask_shape: tuple[int, ...] = ()
    if mask:
        sizes = [1 if r.random() < 0.3 else n for n in scores]
        # PyTorch's masks have the two last dims.
        first = r.choice((0, 0, r.randrange(len(sizes) - 1)))
        mask_shape = tuple(sizes[first:])
    scale = None
    if r.random() < 0.3:
        scale = r.choice((0.0, -0.5, 2.0, 0.3)) / math.sqrt(head_dim)
    return Case(
        q_shape=q_shape,
        k_shape=k_shape,
        v_shape=v_shape,
        # With equal keys dq is 0 by cancellation, and rounding errors are meaningless.
        layouts=tuple(
            _layout(r, len(shape), equal_rows=not backward) for shape in (q_shape, k_shape, v_shape)
        ),
        mask=mask,
        mask_shape=mask_shape,
        mask_layout=_layout(r, len(mask_shape), mask=True) if mask else cases.Layout(),
        is_causal=not mask and r.random() < 0.4,
        scale=scale,
        enable_gqa=enable_gqa,
        backward=backward,
    )


def _out_shape(q_shape, k_shape, v_shape, enable_gqa: bool) -> tuple[int, ...]:
    if enable_gqa:
        heads = q_shape[-3]
        k_shape, v_shape = ((*shape[:-3], heads, *shape[-2:]) for shape in (k_shape, v_shape))
    leading = torch.broadcast_shapes(q_shape[:-2], k_shape[:-2], v_shape[:-2])
    return (*leading, q_shape[-2], v_shape[-1])


def random_mask(case: Case, dtype: torch.dtype, g: torch.Generator) -> Tensor | None:
    """The mask of a case; for backward without fully masked rows, where PyTorch varies."""
    if not case.mask:
        return None
    if case.mask == "bool":
        value = torch.rand(case.mask_shape, generator=g, device=DEVICE) > 0.3
    else:
        # Numbers of the tensors' dtype, so that a float32 mask means the same to PyTorch.
        value = torch.randn(case.mask_shape, generator=g, device=DEVICE).to(dtype)
        hidden = torch.rand(case.mask_shape, generator=g, device=DEVICE) < 0.2
        value = value.masked_fill(hidden, -math.inf)
        value = value.float() if case.mask == "float32" else value
    if case.backward and case.mask_shape[-1] > 0:
        value[..., 0] = True if case.mask == "bool" else 0.5
    return cases.place(value, case.mask_layout)


def inputs(case: Case, dtype: torch.dtype, g: torch.Generator) -> list[Tensor]:
    """query, key and value of the case."""
    shapes = (case.q_shape, case.k_shape, case.v_shape)
    return [
        draw(shape, dtype, g, layout) for shape, layout in zip(shapes, case.layouts, strict=True)
    ]


def gradient(out: Tensor, g: torch.Generator) -> Tensor:
    """A gradient for `out`, in its layout."""
    grad = torch.empty_like(out)
    return grad.copy_(torch.randn(out.shape, generator=g, device=DEVICE))
