"""The reference attention on the CPU, compared with PyTorch's math backend. Needs no GPU.

    python benchmarks/bench_reference.py
    python benchmarks/bench_reference.py --shape 4 4 1040 64 --threads 1

Prints CPU time, the minimum of several interleaved rounds: wall time would include whatever else
the machine runs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import common  # noqa: F401  (finds the checkout's torch_cubin)
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_cubin

DTYPES = ("float32", "bfloat16", "float64")


def options_of(rows: int) -> dict[str, dict]:
    return {
        "plain": {},
        "causal": {"is_causal": True},
        "bool mask": {"attn_mask": torch.rand(rows, rows) > 0.5},
        "dropout 0.1": {"dropout_p": 0.1},
    }


def least_seconds(calls: list[Callable[[], object]], rounds: int) -> list[float]:
    times = []
    for _ in range(rounds):
        for call in calls:
            begin = time.process_time()
            call()
            times.append(time.process_time() - begin)
    return [min(times[i :: len(calls)]) for i in range(len(calls))]


def compare(qkv: list[torch.Tensor], gradients: bool, rounds: int, options: dict) -> list[float]:
    inputs = [x.clone().requires_grad_(gradients) for x in qkv]

    def run(attention: Callable) -> None:
        out = attention(*inputs, **options)
        if gradients:
            torch.autograd.grad(out, inputs, torch.ones_like(out))

    def math() -> None:
        with sdpa_kernel(SDPBackend.MATH):
            run(F.scaled_dot_product_attention)

    return least_seconds([math, lambda: run(torch.ops.cubin.scaled_dot_product_attention)], rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", type=int, nargs=4, default=[4, 4, 1040, 64])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(
        f"torch {torch.__version__}, torch_cubin {torch_cubin.__version__}, "
        f"{args.threads} threads, shape {tuple(args.shape)}, processor seconds"
    )
    for dtype in DTYPES:
        qkv = [torch.randn(args.shape, dtype=getattr(torch, dtype)) for _ in range(3)]
        for name, options in options_of(args.shape[2]).items():
            for gradients in (False, True):
                theirs, ours = compare(qkv, gradients, args.rounds, options)
                what = "forward and backward" if gradients else "forward"
                print(
                    f"{dtype:9} {name:12} {what:21} torch {theirs:7.4f}  ours {ours:7.4f}  "
                    f"times {ours / theirs:.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
