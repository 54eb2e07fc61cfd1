"""Attention with masks that are added to the logits, compared with cuDNN through PyTorch.

    python benchmarks/bench_added_masks.py [--json FILE]

bfloat16, 8 sequences of 2,048 rows, heads * head_dim = 2,048. Masks: causal and padding (zeros and
-inf), numbers shared by all heads in bfloat16 and float32, and numbers per head. Prints
microseconds of `attention_forward` and `attention_backward`, and of F.scaled_dot_product_attention
with the cuDNN backend and its backward: medians of five interleaved rounds. "dense" is ours
without a mask.

Then padding in the shapes of SHORT, as transformers writes it: the lowest bfloat16 hides keys. Only
the forward, as CUDA graphs, because the host takes longer than the GPU.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import common
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_cubin  # noqa: F401

BATCH, ROWS, COLUMNS = 8, 2048, 2048
ROUNDS, CALLS = 5, 6
# (batch, heads, queries, keys, head_dim) of encoders, cross-attention and steps of decoding.
SHORT = (
    (32, 12, 512, 512, 64),
    (64, 12, 197, 197, 64),
    (8, 8, 4096, 77, 64),
    (8, 32, 512, 512, 128),
    (64, 32, 1, 192, 64),
    (16, 32, 1, 4096, 128),
)


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

    found["cuDNN's forward"] = lambda: cudnn(q, k, v, mask)
    found["cuDNN's backward"] = lambda: torch.autograd.grad(theirs, leaves, grad, retain_graph=True)
    return found


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, mask)


def short_padding(
    batch: int, heads: int, queries: int, keys: int, head_dim: int
) -> dict[str, float]:
    q, k, v = (
        torch.randn(batch, rows, heads, head_dim, device="cuda").bfloat16().transpose(1, 2)
        for rows in (queries, keys, keys)
    )
    lengths = torch.linspace(keys // 4, keys, batch, device="cuda").long()
    hidden = torch.arange(keys, device="cuda") >= lengths[:, None, None, None]
    mask = torch.zeros(batch, 1, queries, keys, device="cuda", dtype=torch.bfloat16)
    mask = mask.masked_fill(hidden, torch.finfo(torch.bfloat16).min)
    runs: dict[str, Callable[[], torch.Tensor]] = {
        "forward": lambda: torch.ops.cubin.attention_forward(q, k, v, mask)[0],
        "cuDNN's forward": lambda: cudnn(q, k, v, mask),
    }
    graphs = {which: common.graph_of([run] * CALLS)[0] for which, run in runs.items()}
    times = common.interleaved({which: graph.replay for which, graph in graphs.items()}, 4)
    return {which: us / CALLS for which, us in times.items()}


def main() -> None:
    parser = common.parser(__doc__)
    options = parser.parse_args()
    common.begin("masks that are added, us")
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
    for batch, heads, queries, keys, head_dim in SHORT:
        case = f"padding, {batch} x {queries}" + (f", {keys} keys" if keys != queries else "")
        found = short_padding(batch, heads, queries, keys, head_dim)
        rows.append({"head_dim": head_dim, "mask": case, **found})
        text = ", ".join(f"{which} {value:.1f}" for which, value in found.items())
        print(f"head_dim {head_dim}, {case}, {heads} heads: {text}", flush=True)
    if options.json:
        common.write_json(options.json, rows)


if __name__ == "__main__":
    main()
