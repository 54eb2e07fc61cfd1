"""The same bits for a row, whatever else is computed with it: install(batch_invariant=True).

    python examples/same_bits.py            # a small Llama-style model on a Hopper GPU
    python examples/same_bits.py --large    # one of 1.1 billion weights

A prompt's logits are computed alone, in batches, in chunks and token by token, and hashed: one
sha256. Then a step of reinforcement learning: tokens are sampled with a cache in one batch, and
trained on in batches that are cut differently. The log-probabilities of the sampler and of the
trainer are equal, and so are a sequence's gradients alone and beside others. With PyTorch's own
kernels neither holds; the example prints by how much. The exit status says whether all of it held
with ours.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

# The checkout's torch_cubin, unless one is installed.
sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch_cubin

SMALL = {"vocab": 4096, "width": 2048, "hidden": 8192, "layers": 2, "heads": 32, "kv_heads": 8}
LARGE = {"vocab": 32000, "width": 2048, "hidden": 8192, "layers": 16, "heads": 32, "kv_heads": 8}


class Cache:
    """Keys and values of the tokens so far, (batch, heads, tokens, head_dim) in each layer."""

    def __init__(self, model: Llama, batch: int, capacity: int) -> None:
        like = model.embed.weight
        sizes = (2, batch, model.layers[0].kv_heads, capacity, model.head_dim)
        self.layers = [like.new_zeros(sizes).unbind() for _ in model.layers]
        self.length = 0

    def append(self, layer: int, *new: Tensor) -> list[Tensor]:
        """Stores keys and values; returns all of them."""
        end = self.length + new[0].shape[2]
        for kept, each in zip(self.layers[layer], new, strict=True):
            kept[:, :, self.length : end] = each
        return [kept[:, :, :end] for kept in self.layers[layer]]


class Layer(nn.Module):
    def __init__(self, width: int, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, width // heads
        kv_width = kv_heads * self.head_dim
        self.norms = nn.ModuleList(nn.RMSNorm(width, eps=1e-5) for _ in range(2))
        self.q, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, kv_width, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, append: Callable[..., list[Tensor]] | None
    ) -> Tensor:
        normed = self.norms[0](x)
        layers = (self.q, self.k, self.v)
        heads = [layer(normed).unflatten(-1, (-1, self.head_dim)) for layer in layers]
        q, k = (_rotate(each, cos, sin).transpose(1, 2) for each in heads[:2])
        v = heads[2].transpose(1, 2)
        if append is not None:
            k, v = append(k, v)
        rows, keys = q.shape[2], k.shape[2]
        mask = causal_lower_right(rows, keys) if 1 < rows < keys else None
        options = {"attn_mask": mask, "is_causal": 1 < rows == keys, "enable_gqa": True}
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            y = F.scaled_dot_product_attention(q, k, v, **options)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        normed = self.norms[1](x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Llama(nn.Module):
    def __init__(
        self, vocab: int, width: int, hidden: int, layers: int, heads: int, kv_heads: int
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Layer(width, hidden, heads, kv_heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head_dim = width // heads

    def forward(self, ids: Tensor, cache: Cache | None = None) -> Tensor:
        """The logits of `ids`, which follow the tokens of the cache and are appended to it."""
        start = cache.length if cache else 0
        x = self.embed(ids)
        positions = torch.arange(start, start + ids.shape[1], device=ids.device)
        steps = torch.arange(0, self.head_dim, 2, device=ids.device) / self.head_dim
        angles = positions[:, None, None] * 10000.0**-steps
        for i, layer in enumerate(self.layers):
            append = functools.partial(cache.append, i) if cache else None
            x = layer(x, angles.cos(), angles.sin(), append)
        if cache:
            cache.length += ids.shape[1]
        return self.head(self.norm(x))


def make(large: bool = False) -> Llama:
    torch.manual_seed(0)
    with torch.device("cuda"):
        return Llama(**(LARGE if large else SMALL)).to(torch.bfloat16)


def in_chunks(model: Llama, ids: Tensor, sizes: list[int]) -> Tensor:
    cache = Cache(model, *ids.shape)
    return torch.cat([model(part, cache) for part in ids.split(sizes, 1)], 1)


def paths(model: Llama, prompt: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The logits of the prompt, by several paths."""
    length = prompt.shape[1]
    others = torch.randint(model.embed.num_embeddings, (64, length + 100), device="cuda")
    yield "alone", model(prompt)
    for batch, place in ((2, 1), (8, 3), (64, 40)):
        ids = others[:batch, :length].clone()
        ids[place] = prompt[0]
        yield f"row {place} of {batch}", model(ids)[place : place + 1]
        if batch < 64:
            steps = in_chunks(model, ids, [length - 20, *[1] * 20])
            yield f"row {place} of {batch}, 20 tokens decoded", steps[place : place + 1]
    ids = torch.cat((prompt, others[:1, length:]), 1)  # more tokens follow, or padding
    yield "with 100 tokens after it", model(torch.cat((ids, others[:3])))[:1, :length]
    yield "in chunks", in_chunks(model, prompt, [17, 64, 1, 2, length - 84])
    yield "token by token", in_chunks(model, prompt, [1] * length)


def digest(logits: Tensor) -> str:
    return hashlib.sha256(logits.contiguous().view(torch.int16).cpu().numpy().tobytes()).hexdigest()


def logprobs_of(logits: Tensor, tokens: Tensor) -> Tensor:
    rows = logits.float().flatten(0, -2)
    return -F.cross_entropy(rows, tokens.flatten(), reduction="none").view(tokens.shape)


@torch.no_grad()
def sample(model: Llama, prompts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Tokens sampled with a cache, after the prompts, and their log-probabilities."""
    cache = Cache(model, prompts.shape[0], prompts.shape[1] + count)
    logits = model(prompts, cache)
    ids, logprobs = [prompts], []
    for _ in range(count):
        last = logits[:, -1]
        token = last.float().softmax(-1).multinomial(1)
        ids.append(token)
        logprobs.append(logprobs_of(last, token[:, 0]))
        logits = model(token, cache)
    return torch.cat(ids, 1), torch.stack(logprobs, 1)


def trained(model: Llama, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The log-probabilities of the last `count` tokens, and the gradients of the embeddings."""
    seen: list[Tensor] = []
    hook = model.embed.register_forward_hook(lambda *call: seen.append(call[2]))
    logits = model(ids[:, :-1])
    hook.remove()
    logprobs = logprobs_of(logits[:, -count:], ids[:, -count:])
    (grad,) = torch.autograd.grad(logprobs.sum(), seen[0])
    return logprobs.detach(), grad


def reinforce(model: Llama) -> tuple[float, float]:
    """The largest differences: of the trainer's log-probabilities from the sampler's, and of a
    sequence's gradients in a batch of one from those in a batch of six."""
    torch.manual_seed(1)
    prompts = torch.randint(model.embed.num_embeddings, (6, 50), device="cuda")
    ids, sampled = sample(model, prompts, 40)
    together, grads = trained(model, ids, 40)
    parts = [trained(model, part, 40) for part in ids.split([1, 2, 3])]
    cut, grads_cut = (torch.cat(each) for each in zip(*parts, strict=True))
    difference = max((each - sampled).abs().max().item() for each in (together, cut))
    return difference, (grads.float() - grads_cut.float()).abs().max().item()


def run(model: Llama, prompt: Tensor) -> tuple[set[str], tuple[float, float]]:
    hashes = set()
    with torch.no_grad():
        for path, logits in paths(model, prompt):
            hashes.add(digest(logits))
            print(f"  {path:32} {digest(logits)[:16]}")
    differences = reinforce(model)
    print(f"  sampler and trainer: log-probabilities differ by {differences[0]}")
    print(f"  gradients of a sequence, alone and in a batch: differ by {differences[1]}")
    return hashes, differences


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--large", action="store_true", help="1.1 billion weights")
    parser.add_argument("--tokens", type=int, default=150, help="of the prompt, 100 at least")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("This needs a Hopper GPU: nothing was computed.")
        return 0
    model = make(options.large)
    prompt = torch.randint(model.embed.num_embeddings, (1, options.tokens), device="cuda")
    print("PyTorch's kernels:")
    run(model, prompt)
    with torch_cubin.install(batch_invariant=True):
        print("install(batch_invariant=True):")
        hashes, differences = run(model, prompt)
        with torch_cubin.audit() as found:
            trained(model, prompt, 20)
    print(f"sha256 of the logits: {', '.join(sorted(hashes))}")
    print("\nThe ops of a training step, and the promise for each:\n")
    print(found)
    right = len(hashes) == 1 and differences == (0.0, 0.0) and found.batch_invariant
    print(f"\nOne hash, no difference, every op batch-invariant: {'right' if right else 'WRONG'}")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
