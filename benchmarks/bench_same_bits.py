"""What install(batch_invariant=True) costs: a model of 1.1 billion weights with and without it.

    python benchmarks/bench_same_bits.py [--json benchmarks/results/same_bits.json] [--seconds 60]

"generation" is one decoding step with a cache, captured in a CUDA graph, for batches of sequences;
"training step" is an eager forward and backward. "attention" is F.scaled_dot_product_attention
alone. The contenders run interleaved in one process: PyTorch's kernels ("torch"), install() and
install(batch_invariant=True) ("same bits"), whose time the others' are divided by.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import common  # before same_bits, whose folder it adds to the path
import same_bits
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_cubin

BATCHES, CONTEXT = (1, 8, 32, 128), 1024
TRAINING = (4, 1024)
# batch, rows, keys; 32 heads of 64 columns, 8 of keys.
ATTENTION = [(1, 4096, 4096), (4, 2048, 2048), (32, 1, 1024), (8, 1, 8192), (128, 1, 1024)]
CONTENDERS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "torch": nullcontext,
    "install": torch_cubin.install,
    "same bits": lambda: torch_cubin.install(batch_invariant=True),
}


def captured(call: Callable[[], torch.Tensor]) -> dict[str, Callable[[], object]]:
    """A CUDA graph of the call for each contender."""
    runs: dict[str, Callable[[], object]] = {}
    for name, context in CONTENDERS.items():
        with context():
            graph, _ = common.graph_of([call])
        runs[name] = graph.replay
    return runs


def eager(call: Callable[[], object]) -> dict[str, Callable[[], object]]:
    def run_in(context: Callable[[], AbstractContextManager[Any]]) -> Callable[[], object]:
        def run() -> None:
            with context():
                call()

        return run

    return {name: run_in(context) for name, context in CONTENDERS.items()}


@torch.no_grad()
def generation(model: same_bits.Llama, batch: int) -> dict[str, Callable[[], object]]:
    cache = same_bits.Cache(model, batch, CONTEXT)
    for pair in cache.layers:
        for each in pair:
            each.normal_()
    ids = torch.randint(model.embed.num_embeddings, (batch, 1), device="cuda")

    @torch.no_grad()
    def step() -> torch.Tensor:
        cache.length = CONTEXT - 1
        return model(ids, cache)

    return captured(step)


def training(model: same_bits.Llama) -> dict[str, Callable[[], object]]:
    ids = torch.randint(model.embed.num_embeddings, TRAINING, device="cuda")

    def step() -> None:
        model.zero_grad(set_to_none=True)
        logits = model(ids)
        F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()).backward()

    return eager(step)


def attention(batch: int, rows: int, keys: int) -> dict[str, Callable[[], object]]:
    def draw(heads: int, length: int) -> torch.Tensor:
        return torch.randn(batch, heads, length, 64, device="cuda").bfloat16()

    q, k, v = draw(32, rows), draw(8, keys), draw(8, keys)

    @torch.no_grad()
    def call() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=rows > 1, enable_gqa=True)

    return captured(call)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=1e9)
    arguments = parser.parse_args()
    common.begin("The cost of batch invariance, microseconds of a call")
    end = time.monotonic() + arguments.seconds
    model = same_bits.make(large=True)
    training_step = "{} x {}".format(*TRAINING)
    cases: list[tuple[str, str, int, Callable[[], dict[str, Callable[[], object]]]]] = [
        *(("generation", f"batch {n}", n, lambda n=n: generation(model, n)) for n in BATCHES),
        *(
            (
                "attention",
                "{} x {} of {}".format(*sizes),
                sizes[0] * sizes[1],
                lambda sizes=sizes: attention(*sizes),
            )
            for sizes in ATTENTION
        ),
        ("training step", training_step, TRAINING[0] * TRAINING[1], lambda: training(model)),
    ]
    found: list[dict[str, Any]] = []
    for group, case, tokens, make in cases:
        if time.monotonic() > end:
            print(f"{group}, {case}: skipped, out of time")
            continue
        times = common.interleaved(make(), 60, rounds=5, settle_ms=20)
        torch.cuda.empty_cache()
        rates = {who: round(tokens / each * 1e6) for who, each in times.items()}
        for peer, title in (("install", group), ("torch", f"{group}, PyTorch")):
            value = round(times[peer] / times["same bits"], 4)
            found.append({"group": title, "case": case, "value": value})
            print(f"{title:24} {case:16} {value:.3f}", flush=True)
        found[-1] |= {"microseconds": times, "tokens_a_second": rates}
    common.write_json(arguments.json, found)


if __name__ == "__main__":
    main()
