"""Attention's forward on Hopper gives the same bits ten thousand times, beside other work: each
rule of visibility, packed sequences, masks, options, e4m3, caches. The backward's calls are
in test_cuda_attention_repeats_backward.py: another process runs them meanwhile."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from gpu import attention_cases as ac
from gpu import hopper
from gpu.repeats import count_different
from gpu.test_cuda_attention_e4m3 import LONG as LONG_E4M3
from gpu.test_cuda_kv_cache import LONG as LONG_CACHES
from ops import e4m3_cases, kv_cache_cases
from torch import Tensor

pytestmark = hopper.for_kernels

HEAD_DIMS = (64, 128, 256)
LENGTHS = [300, 1, 0, 700, 129, 64, 400]  # of packed sequences
KINDS = ("causal", "window", "packed", "boolean mask", "added mask", "options")


def documents(rows: int) -> Tensor:
    """A mask that hides whole tiles, and parts of others."""
    i = torch.arange(rows, device=ac.DEVICE)
    return i[:, None] // 170 == i // 170


def options_of(kind: str, rows: int, heads: int, g: torch.Generator) -> dict:
    """What makes a call one of this kind."""
    lengths = torch.tensor([0, *LENGTHS], device=ac.DEVICE).cumsum(0).int()
    packed = {"cu_seqlens_q": lengths, "cu_seqlens_k": lengths}
    window = {"window_left": 150, "window_right": 20}
    random = torch.randn(rows, rows, generator=g, device=ac.DEVICE)
    return {
        "causal": {"is_causal": True},
        "window": window,
        "packed": {"is_causal": True, **packed},
        "boolean mask": {"attn_mask": documents(rows)},
        "added mask": {"attn_mask": torch.where(documents(rows), random, -torch.inf)},
        "options": ac.score_options("all", 1, heads, g),
    }[kind]  # fmt: skip


def make(kind: str, head_dim: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor, dict]:
    """Query, key and value, a gradient, and options. Two heads of queries share one of keys."""
    g = ac.generator(f"{kind} {head_dim}")
    rows, batch, heads = 700, 1, 4
    options = options_of(kind, rows, heads, g)
    shapes = [(batch, heads, rows, head_dim), *[(batch, heads // 2, rows, head_dim)] * 2]
    if kind == "packed":
        shapes = [(sum(LENGTHS), n, head_dim) for n in (heads, heads // 2, heads // 2)]
    args = [ac.draw(shape, dtype, g) for shape in shapes]
    return args, ac.gradient(args[0], g), {"enable_gqa": True, **options}


def check(call: Callable[[], list[Tensor]]) -> None:
    with torch.no_grad():
        first = [x.clone() for x in call()]
        assert all(bool(x.isfinite().any()) for x in first)
        assert count_different(call, first) == 0


# float16 takes the same paths through the same sources: it has the plain kernels.
CASES = [
    *itertools.product(KINDS, HEAD_DIMS, ["bfloat16"]),
    *itertools.product(["causal"], HEAD_DIMS, ["float16"]),
]


@pytest.mark.parametrize(("kind", "head_dim", "name"), CASES)
def test_forward(kind: str, head_dim: int, name: str) -> None:
    args, _, options = make(kind, head_dim, ac.DTYPES[name])
    check(lambda: list(torch.ops.cubin.attention_forward(*args, **options)))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kind", ["causal", "packed"])
def test_forward_of_e4m3(kind: str, head_dim: int) -> None:
    torch.manual_seed(0)
    args = e4m3_cases.make(ac.DEVICE, **{"dim": head_dim} | LONG_E4M3[kind])
    check(lambda: [torch.ops.cubin.flash_attention(**args)])


@pytest.mark.parametrize("kind", ["one", "long and short", "many queries", "e4m3 in pages"])
def test_decoding(kind: str) -> None:
    """Parts of a sequence are joined in their order, whichever is ready first."""
    torch.manual_seed(0)
    args = kv_cache_cases.make(ac.DEVICE, **LONG_CACHES[kind])
    check(lambda: [torch.ops.cubin.flash_attention_with_kvcache(**args)])
