"""Cost of trainable attention sinks in a training step: forward and backward, through autograd.

    python benchmarks/bench_trained_sinks.py [--json FILE]

bfloat16, causal; the sizes of GPT-OSS (64 query heads of head_dim 64, 8 key heads; a window of 128
in every other layer) and 16 heads of head_dim 128. Lines are interleaved, in another order each
round; medians of five rounds. "composed" is attention composed from PyTorch ops, which served
sinks that require grad before the fused kernels did, and still serves trainable slopes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import common
import torch

from torch_cubin._ops import attention_compose

BLOCK_MS = 30
# name: query heads, key heads, head_dim, rows, window
SIZES = {
    "64 heads of 64, 8 of keys, 8192 rows": (64, 8, 64, 8192, None),
    "the same, window 128": (64, 8, 64, 8192, 128),
    "the same, 2048 rows, full": (64, 8, 64, 2048, None),
    "16 heads of 128, 8192 rows": (16, 16, 128, 8192, None),
    "the same, 2048 rows": (16, 16, 128, 2048, None),
}
COMPOSED_ROWS = 2048  # maximum: the composed path keeps the scores in memory


def step(call: Callable, options: dict, tensors: list[torch.Tensor], sinks: torch.Tensor | None):
    """`tensors` are query, key, value and the gradient of the output."""
    learns = [x for x in (*tensors[:3], sinks) if x is not None and x.requires_grad]
    if sinks is not None:
        options = {**options, "sinks": sinks}

    def run() -> None:
        out, _ = call(*tensors[:3], **options)
        torch.autograd.grad(out, learns, tensors[3])

    return run


def lines(size: tuple) -> dict[str, Callable[[], None]]:
    heads, kv_heads, head_dim, rows, window = size
    tensors = [
        torch.randn(1, rows, h, head_dim, device="cuda", dtype=torch.bfloat16)
        .transpose(1, 2)
        .requires_grad_(i < 3)
        for i, h in enumerate((heads, kv_heads, kv_heads, heads))
    ]
    options = {"is_causal": True, "enable_gqa": True}
    if window is not None:
        options["window_left"] = window - 1
    sinks = torch.randn(heads, device="cuda")
    op = torch.ops.cubin.attention_forward
    learning = sinks.clone().requires_grad_()
    made = {
        "no sinks": step(op, options, tensors, None),
        "sinks": step(op, options, tensors, sinks),
        "sinks that learn": step(op, options, tensors, learning),
    }
    if rows <= COMPOSED_ROWS:
        made["composed"] = step(attention_compose.attention, options, tensors, learning)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    common.require_gpu()
    common.print_machine("Attention forward and backward: us (share of the time without sinks)")
    results = {}
    for name, size in SIZES.items():
        times = results[name] = common.interleaved(lines(size), BLOCK_MS)
        shown = ", ".join(f"{x} {t:.0f} ({t / times['no sinks']:.2f})" for x, t in times.items())
        print(f"{name}: {shown}")
    if arguments.json:
        arguments.json.write_text(
            json.dumps({**common.machine(), "microseconds": results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
