"""Mixtures of experts that bench_grouped.py --moe measures: torch_cubin's and transformers'."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import torch_cubin

TOKENS = (1, 16, 128, 1024, 8192)
# Name, experts, experts of a token, hidden size, inner size.
MODELS = (
    ("Qwen3-30B-A3B", 128, 8, 2048, 768),
    ("DeepSeek-V3", 256, 8, 7168, 2048),
)
# Layers that are trained; DeepSeek-V3's and its gradients do not fit twice.
TRAINED_MODELS, TRAINED_TOKENS = MODELS[:1], (128, 1024, 8192)
DTYPE = torch.bfloat16
OURS_FLOAT8 = "ours, 8-bit floats"
# Weights are quantised once for so many steps.
MICRO_BATCHES = 4
KEPT_FLOAT8 = f"ours, 8-bit floats, weights kept for {MICRO_BATCHES}"
# batched_mm copies the weights of every token's experts.
MOST_BATCHED_TOKENS = 16

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


def experts_of(experts: int, k: int, hidden: int, inner: int) -> torch.nn.Module:
    """transformers' experts of these sizes."""
    from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen

    config = qwen.Qwen3MoeConfig(
        num_experts=experts,
        num_experts_per_tok=k,
        hidden_size=hidden,
        moe_intermediate_size=inner,
    )
    with torch.device("cuda"):
        torch.set_default_dtype(DTYPE)
        layer = qwen.Qwen3MoeExperts(config).requires_grad_(False)
        torch.set_default_dtype(torch.float32)
    for weight in layer.parameters():
        weight.normal_(std=weight.shape[-1] ** -0.5)
    torch_cubin.huggingface.register()
    return layer


def routed(tokens: int, experts: int, k: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, their experts and the experts' weights, as a router of softmax and top-k gives them."""
    rows = torch.randn(tokens, hidden, device="cuda", dtype=DTYPE)
    scores = torch.randn(tokens, experts, device="cuda").softmax(-1)
    weights, ids = scores.topk(k)
    return rows, ids, (weights / weights.sum(-1, keepdim=True)).to(DTYPE)


def contenders(layer: Any, tokens: int, compiles: bool) -> dict[str, Layer]:
    def implementation(name: str) -> Layer:
        def run(*args: Tensor) -> Tensor:
            layer.config._experts_implementation = name
            return layer(*args)

        return run

    found = {"ours": implementation("cubin"), "grouped_mm": implementation("grouped_mm")}
    if tokens <= MOST_BATCHED_TOKENS:
        found["batched_mm"] = implementation("batched_mm")
    if compiles:
        from transformers.integrations import moe

        forward = functools.partial(moe.grouped_mm_experts_forward, layer)
        found["grouped_mm, compiled"] = torch.compile(forward, dynamic=False)
    return found


def steps(layer: Any, rows: Tensor, ids: Tensor, weights: Tensor) -> dict[str, Callable[[], Any]]:
    """Forward and backward of ours, also in 8-bit floats, and of transformers' "grouped_mm": the
    gradients of the rows, of the tokens' weights and of the layer's."""
    layer.requires_grad_(True)
    rows, weights = rows.requires_grad_(), weights.requires_grad_()
    wanted, grad = [rows, weights, *layer.parameters()], torch.randn_like(rows)

    def step(forward: Layer) -> Tensor:
        return torch.autograd.grad(forward(rows, ids, weights), wanted, grad)[0]

    def float8(*args: Tensor) -> Tensor:
        return torch_cubin.moe(*args, layer.gate_up_proj, layer.down_proj, recipe="block")

    forwards = {**contenders(layer, MOST_BATCHED_TOKENS + 1, False), OURS_FLOAT8: float8}
    return {who: functools.partial(step, forward) for who, forward in forwards.items()}


def kept(step: Callable[[], Any]) -> Callable[[], None]:
    """MICRO_BATCHES steps, whose weights keep their 8-bit copies."""

    def run() -> None:
        with torch_cubin.keep_float8_weights():
            for _ in range(MICRO_BATCHES):
                step()

    return run


def loop(layer: Any) -> Layer:
    """transformers' own loop over experts, which waits for the GPU."""

    def run(*args: Tensor) -> Tensor:
        layer.config._experts_implementation = "eager"
        return layer(*args)

    return run
