"""The models, with random weights, that whole_models.py measures, and what each is called with.

Those of transformers, and a diffusion transformer as in "Scalable Diffusion Models with
Transformers" (Peebles and Xie), whose block is not in transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Inputs = Callable[[int, int, torch.device], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    model: str
    build: Callable[[], nn.Module]
    what: str  # "infer", "train", or "decode": the token after `length` others, with a cache
    batch: int
    length: int
    inputs: Inputs
    modes: tuple[str, ...]
    # The layers, which are compiled one by one: they are alike, so that one is compiled.
    layers: Callable[[Any], Sequence[nn.Module]]
    tokens_of_each: int

    def __str__(self) -> str:
        return f"{self.model}, {self.what} {self.batch} x {self.length}"


def _ids(batch: int, length: int, device: torch.device) -> dict[str, Any]:
    ids = torch.randint(1000, (batch, length), device=device)
    return {"input_ids": ids, "use_cache": False}


def _padded_ids(batch: int, length: int, device: torch.device) -> dict[str, Any]:
    lengths = torch.linspace(length // 4, length, batch, device=device).long()
    mask = torch.arange(length, device=device) < lengths[:, None]
    ids = torch.randint(1000, (batch, length), device=device)
    return {"input_ids": ids, "attention_mask": mask.long()}


def _pixels(batch: int, length: int, device: torch.device) -> dict[str, Any]:
    return {"pixel_values": torch.randn(batch, 3, 224, 224, device=device)}


def _sound(batch: int, length: int, device: torch.device) -> dict[str, Any]:
    return {"input_features": torch.randn(batch, 80, 3000, device=device)}


def _latents(batch: int, length: int, device: torch.device) -> dict[str, Any]:
    side = round(length**0.5)
    return {
        "latents": torch.randn(batch, 4, 2 * side, 2 * side, device=device),
        "condition": torch.randn(batch, 256, device=device),
    }


class DiTBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.modulation = nn.Linear(width, 6 * width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        parts = self.modulation(F.silu(condition))[:, None].chunk(6, dim=-1)
        shift_a, scale_a, gate_a, shift_b, scale_b, gate_b = parts
        hidden = self.norms[0](x) * (1 + scale_a) + shift_a
        q, k, v = self.qkv(hidden).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + gate_a * self.out(attended)
        hidden = self.norms[1](x) * (1 + scale_b) + shift_b
        return x + gate_b * self.down(F.gelu(self.up(hidden), approximate="tanh"))


class DiT(nn.Module):
    """`latents` of [batch, 4, side, side], in patches of 2 x 2; `condition` stands for the sum of
    the embeddings of time and class."""

    def __init__(self, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(4, width, 2, stride=2)
        self.condition = nn.Linear(256, width)
        self.layers = nn.ModuleList(DiTBlock(width, heads) for _ in range(depth))
        self.final = nn.Linear(width, 32)

    def forward(self, latents: Tensor, condition: Tensor) -> Tensor:
        x = self.patches(latents).flatten(2).transpose(1, 2)
        condition = self.condition(condition)
        for layer in self.layers:
            x = layer(x, condition)
        return self.final(F.layer_norm(x, x.shape[-1:]))


# "graph" is the eager call in a CUDA graph; the last three are torch.compile's.
MODES = ("eager", "graph", "default", "reduce-overhead", "max-autotune-no-cudagraphs")
EAGER_AND_COMPILED = ("eager", "default")
DECODE = ("eager", "graph", "reduce-overhead")


def cases(small: bool) -> Iterator[Case]:
    """`small`: for a test without a GPU."""
    import transformers as t

    def sized(**sizes: int) -> dict[str, int]:
        return {name: 32 if small else size for name, size in sizes.items()}

    def counted(**counts: int) -> dict[str, int]:
        return {name: min(count, 2) if small else count for name, count in counts.items()}

    llama = t.LlamaConfig(
        vocab_size=1000 if small else 32000, **sized(hidden_size=2048, intermediate_size=8192),
        **counted(num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8),
    )  # fmt: skip
    bert = t.BertConfig(
        **sized(hidden_size=768, intermediate_size=3072),
        **counted(num_hidden_layers=12, num_attention_heads=12),
    )
    vit = t.ViTConfig(
        **sized(hidden_size=1024, intermediate_size=4096),
        **counted(num_hidden_layers=24, num_attention_heads=16),
    )
    whisper = t.WhisperConfig(
        **sized(d_model=768, encoder_ffn_dim=3072),
        **counted(encoder_layers=12, encoder_attention_heads=12),
    )
    moe = t.Qwen3MoeConfig(
        vocab_size=1000 if small else 32000, head_dim=16 if small else 64, num_experts_per_tok=2,
        **sized(hidden_size=1024, intermediate_size=3072, moe_intermediate_size=768),
        **counted(num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=4),
        num_experts=4 if small else 32,
    )  # fmt: skip

    def case(
        model: str, build: Callable[[], nn.Module], what: str, batch: int, length: int,
        inputs: Inputs, modes: tuple[str, ...] = EAGER_AND_COMPILED, layers: Any = None,
    ) -> Case:  # fmt: skip
        batch, length = (1, min(length, 16)) if small else (batch, length)
        tokens = {"decode": 1, "infer": length, "train": length}[what]
        layers = layers or (lambda model: model.layers)
        return Case(model, build, what, batch, length, inputs, modes, layers, tokens)

    def of_llama(what: str, batch: int, length: int) -> Case:
        decodes = what == "decode"
        # A decoding step is compiled whole: each layer has its own cache.
        layers = (lambda model: [model]) if decodes else (lambda model: model.model.layers)
        modes = DECODE if decodes else EAGER_AND_COMPILED
        build = lambda: t.LlamaForCausalLM(llama)  # noqa: E731
        return case("Llama 1 B", build, what, batch, length, _ids, modes, layers)

    yield of_llama("infer", 8, 2048)
    yield of_llama("train", 4, 2048)
    yield of_llama("infer", 1, 128)
    yield of_llama("train", 1, 128)
    for batch in (1, 16, 64):
        yield of_llama("decode", batch, 128)
    yield case("BERT-base", lambda: t.BertModel(bert), "infer", 32, 512, _padded_ids,
               (*EAGER_AND_COMPILED, "max-autotune-no-cudagraphs"),
               lambda model: model.encoder.layer)  # fmt: skip
    yield case("ViT-L", lambda: t.ViTModel(vit), "infer", 32, 197, _pixels)
    encoder = lambda: t.models.whisper.modeling_whisper.WhisperEncoder(whisper)  # noqa: E731
    yield case("Whisper", encoder, "infer", 8, 1500, _sound)
    heads, depth = (2, 2) if small else (16, 28)
    dit = lambda: DiT(32 if small else 1152, heads, depth)  # noqa: E731
    yield case("DiT-XL/2", dit, "infer", 32, 256, _latents)
    yield case("Qwen3-MoE", lambda: t.Qwen3MoeForCausalLM(moe), "infer", 8, 512, _ids,
               layers=lambda model: model.model.layers)  # fmt: skip
