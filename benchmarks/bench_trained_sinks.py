"""What attention sinks that learn cost a training step: forward and backward, through autograd.

    python benchmarks/bench_trained_sinks.py [--json FILE]

bfloat16, causal; the sizes of GPT-OSS (64 heads of 64 columns, 8 of keys; a window of 128 in every
other layer) and 16 heads of 128. Lines are interleaved, in another order each round; medians of
five. "composed" is what sinks that require grad took before they had the fused kernels, and what
slopes that learn still take.
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
# name: query's heads, key's, head_dim, rows, window
SIZES = {
    "64 heads of 64, 8 of keys, 8192 rows": (64, 8, 64, 8192, None),
    "the same, window 128": (64, 8, 64, 8192, 128),
    "the same, 2048 rows, full": (64, 8, 64, 2048, None),
    "16 heads of 128, 8192 rows": (16, 16, 128, 8192, None),
    "the same, 2048 rows": (16, 16, 128, 2048, None),
}
COMPOSED_ROWS = 2048  # at most: it holds the scores


def step(call: Callable, options: dict, tensors: list[torch.Tensor], sinks: torch.Tensor | None):
    """`tensors`: query, key, value and the output's gradient."""
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
