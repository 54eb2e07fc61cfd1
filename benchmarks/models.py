"""The configurations of public models: the products of their blocks and heads, and the blocks.

The number of tokens is a batch size times the length at which the model is used: 64 images of 197
patches, 8 recordings of 1,500 frames, two sequences of 4,096 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """`mlp`: "gelu", or "glu" if gate and up projection are one weight. `head`: rows of the matrix
    that computes the logits; 0 if there is none."""

    name: str
    batch: int
    length: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int = 0  # default: heads
    head_dim: int = 0  # default: hidden / heads
    mlp: str = "gelu"
    norm: str = "layer_norm"
    bias: bool = True
    qkv_bias: bool | None = None  # default: bias
    causal: bool = False
    head: int = 0
    head_tokens: int = 4096

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def width(self) -> int:
        """The width of a head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def keys(self) -> int:
        return self.kv_heads or self.heads


@dataclass(frozen=True)
class ModelProduct:
    """`[tokens, inputs] @ [outputs, inputs].t()`, as F.linear computes it."""

    model: str
    tokens: int
    inputs: int
    outputs: int
    bias: bool

    def __str__(self) -> str:
        bias = ", bias" if self.bias else ""
        return f"{self.model} {self.tokens} x {self.inputs} -> {self.outputs}{bias}"


def _decoder(name: str, batch: int, length: int, hidden: int, intermediate: int, heads: int,
             kv_heads: int, head: int, **others: object) -> Model:  # fmt: skip
    """A model like Llama: RMSNorm, SwiGLU, no biases, causal."""
    return Model(
        *(name, batch, length, hidden, intermediate, heads, kv_heads),
        **{"mlp": "glu", "norm": "rms_norm", "bias": False, "causal": True, "head": head, **others},
    )


MODELS = (
    # Encoders
    Model("BERT-base", 64, 512, 768, 3072, 12, head=30522),
    Model("BERT-large", 32, 512, 1024, 4096, 16),
    Model("MiniLM-L6", 64, 256, 384, 1536, 12),
    Model("ModernBERT-large", 8, 2048, 1024, 2624, 16, mlp="glu", bias=False, head=50368),
    # Vision
    Model("ViT-B/16", 64, 197, 768, 3072, 12),
    Model("ViT-L/16 384", 32, 577, 1024, 4096, 16),
    Model("ViT-H/14", 32, 257, 1280, 5120, 16),
    Model("SigLIP-So400m", 16, 729, 1152, 4304, 16),
    Model("DINOv2-g", 16, 257, 1536, 4096, 24, mlp="glu"),
    # Diffusion
    Model("DiT-XL/2", 64, 256, 1152, 4608, 16),
    Model("SD3-medium", 2, 4250, 1536, 6144, 24),
    Model("FLUX.1", 1, 4608, 3072, 12288, 24),
    Model("SDXL 64x64", 4, 4096, 640, 2560, 10, mlp="glu", qkv_bias=False),
    Model("SDXL 32x32", 8, 1024, 1280, 5120, 20, mlp="glu", qkv_bias=False),
    # Speech
    Model("Whisper-small", 16, 1500, 768, 3072, 12),
    Model("Whisper-large-v3", 8, 1500, 1280, 5120, 20, head=51866),
    Model("wav2vec2-large", 8, 1499, 1024, 4096, 16),
    # Decoders
    Model("GPT-2", 16, 1024, 768, 3072, 12, causal=True, head=50257),
    Model("GPT-2 XL", 8, 1024, 1600, 6400, 25, causal=True),
    _decoder("SmolLM-135M", 8, 2048, 576, 1536, 9, 3, 49152),
    _decoder("Qwen2.5-0.5B", 8, 2048, 896, 4864, 14, 2, 151936, qkv_bias=True),
    _decoder("Llama-3.2-1B", 4, 2048, 2048, 8192, 32, 8, 128256),
    _decoder("Gemma-2-2B", 2, 4096, 2304, 9216, 8, 4, 256000, head_dim=256, head_tokens=2048),
    _decoder("Phi-3-mini", 2, 4096, 3072, 8192, 32, 32, 32064),
    _decoder("Qwen2.5-7B", 2, 4096, 3584, 18944, 28, 4, 152064, qkv_bias=True),
    _decoder("Llama-3-8B", 2, 4096, 4096, 14336, 32, 8, 0),
    _decoder("Qwen2.5-32B", 1, 4096, 5120, 27648, 40, 8, 0, qkv_bias=True),
    _decoder("Llama-3-70B", 1, 4096, 8192, 28672, 64, 8, 128256, head_tokens=2048),
)  # fmt: skip


def products_of(model: Model) -> Iterator[ModelProduct]:
    qkv_bias = model.bias if model.qkv_bias is None else model.qkv_bias
    heads, keys = model.heads * model.width, model.keys * model.width
    up = model.intermediate * (2 if model.mlp == "glu" else 1)
    for inputs, outputs, bias in (
        (model.hidden, heads + 2 * keys, qkv_bias),
        (model.hidden, heads, qkv_bias),
        (heads, model.hidden, model.bias),
        (model.hidden, up, model.bias),
        (model.intermediate, model.hidden, model.bias),
    ):
        yield ModelProduct(model.name, model.tokens, inputs, outputs, bias)
    if model.head:
        yield ModelProduct(model.name, model.head_tokens, model.hidden, model.head, False)


def products() -> list[ModelProduct]:
    """Each product once, attributed to the first model that has it."""
    found: dict[tuple[int, int, int, bool], ModelProduct] = {}
    for model in MODELS:
        for x in products_of(model):
            found.setdefault((x.tokens, x.inputs, x.outputs, x.bias), x)
    return list(found.values())
