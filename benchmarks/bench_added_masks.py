"""Attention with masks that are added to the logits, compared with cuDNN through PyTorch.

    python benchmarks/bench_added_masks.py [--json FILE]

bfloat16, 8 sequences of 2,048 rows, heads * head_dim = 2,048. Masks: causal and padding (zeros and
-inf), numbers shared by all heads in bfloat16 and float32, and numbers per head. Prints
microseconds of `attention_forward` and `attention_backward`, and of F.scaled_dot_product_attention
with the cuDNN backend and its backward: medians of five interleaved rounds. "dense" is ours
without a mask.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from pathlib import Path

import common
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_cubin  # noqa: F401

BATCH, ROWS, COLUMNS = 8, 2048, 2048
ROUNDS, CALLS = 5, 6


def masks(heads: int) -> dict[str, torch.Tensor]:
    i = torch.arange(ROWS, device="cuda")
    lengths = torch.linspace(640, 2040, BATCH, device="cuda").long()
    zeros = torch.zeros(1, 1, ROWS, ROWS, device="cuda", dtype=torch.bfloat16)
    numbers = torch.randn(1, heads, ROWS, ROWS, device="cuda")
    hidden = (i[None] >= lengths[:, None])[:, None, None]
    return {
        "causal": zeros.masked_fill(i[:, None] < i, -math.inf),
        "padding": zeros.expand(BATCH, -1, -1, -1).masked_fill(hidden, -math.inf),
        "numbers": numbers[:, :1].bfloat16().contiguous(),
        "numbers, float32": numbers[:, :1].contiguous(),
        "numbers of each head": numbers.bfloat16(),
    }


def calls(q, k, v, grad, mask: torch.Tensor | None) -> dict[str, Callable[[], object]]:
    forward = torch.ops.cubin.attention_forward
    out, logsumexp = forward(q, k, v, mask)
    backward = torch.ops.cubin.attention_backward
    found = {
        "forward": lambda: forward(q, k, v, mask),
        "backward": lambda: backward(grad, q, k, v, out, logsumexp, mask),
    }
    if mask is None:
        return found
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        theirs = F.scaled_dot_product_attention(*leaves, mask)

    def cudnn() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, mask)

    found["cuDNN's forward"] = cudnn
    found["cuDNN's backward"] = lambda: torch.autograd.grad(theirs, leaves, grad, retain_graph=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    common.require_gpu()
    common.print_machine("masks that are added, us")
    rows = []
    for head_dim in (64, 128, 256):
        heads = COLUMNS // head_dim
        shape = (BATCH, heads, ROWS, head_dim)
        operands = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
        for name, mask in {"dense": None, **masks(heads)}.items():
            all_calls = calls(*operands, mask)
            for call in all_calls.values():
                call()
            times: dict[str, list[float]] = {which: [] for which in all_calls}
            for _ in range(ROUNDS):
                for which, call in all_calls.items():
                    times[which].append(common.milliseconds(call, CALLS) / CALLS * 1e3)
            found = {which: statistics.median(each) for which, each in times.items()}
            rows.append({"head_dim": head_dim, "mask": name, **found})
            text = ", ".join(f"{which} {value:.0f}" for which, value in found.items())
            print(f"head_dim {head_dim}, {name}: {text}", flush=True)
    if options.json:
        common.write_json(options.json, rows)


if __name__ == "__main__":
    main()
