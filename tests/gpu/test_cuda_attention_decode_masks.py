"""Masks over few queries and many keys, whose numbers decode.cu requests a tile ahead."""

import math

import numerics
import pytest
import torch
from gpu import attention_cases as ac
from gpu import attention_reference as ar
from gpu import cases
from gpu.profiled import kernels_that_run

MASKS = {"bool": torch.bool, "own": torch.bfloat16, "float32": torch.float32}


def numbers(kind: str, shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    hidden = torch.rand(shape, generator=g, device=ac.DEVICE) < 0.4
    hidden[0, ..., shape[-1] // 2 :] = True  # whole tiles
    if kind == "bool":
        return ~hidden
    drawn = torch.randn(shape, generator=g, device=ac.DEVICE).to(MASKS[kind])
    return drawn.masked_fill(hidden, -math.inf)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kind", MASKS)
def test_masks_of_few_queries(kind: str, head_dim: int, nan_memory) -> None:
    """One part and several, tiles that end within a lane's pair of keys, steps between keys."""
    g = ac.generator(f"{kind} {head_dim}")
    for batch, heads, kv_heads, rows, columns, step in (
        (64, 4, 4, 1, 192, 1), (2, 4, 2, 1, 5001, 1), (3, 8, 1, 2, 1003, 2), (1, 2, 2, 5, 4097, 1),
    ):  # fmt: skip
        q = ac.draw((batch, heads, rows, head_dim), torch.bfloat16, g)
        k, v = (ac.draw((batch, kv_heads, columns, head_dim), torch.bfloat16, g) for _ in range(2))
        mask = numbers(kind, (batch, 1 if step == 1 else heads, rows, columns), g)
        mask = cases.place(mask, cases.Layout(step=step))
        what = f"{kind} {tuple(q.shape)} {tuple(k.shape)}"
        with kernels_that_run() as names:
            out, logsumexp = torch.ops.cubin.attention_forward(q, k, v, mask, enable_gqa=True)
        assert any(name.startswith("decode_attention_bf16") for name in names), (what, names)
        want = ar.reference(q, k, v, None, mask, enable_gqa=True)
        ar.check("bfloat16", what, [out], want, logsumexp)
        again = torch.ops.cubin.attention_forward(q, k, v, mask, enable_gqa=True)
        numerics.check_bits(out, again[0])
