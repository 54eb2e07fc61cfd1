"""Random models, batches and cuts under install(batch_invariant=True): bits of a sequence.

    python tests/same_bits_draws.py --draws 1000 --seconds 70            # on a Hopper GPU
    python tests/same_bits_draws.py --device cpu --first 17 --draws 1    # one draw again

Each draw has a seed: a model, a prompt, its place in a batch of others, how many tokens follow it,
and the lengths of the calls that a cache joins. The prompt's logits are compared with those of the
prompt alone in one call; in some draws also the gradients of its embeddings, where a difference
names the layer that has it first. On a GPU the models
are those of examples/same_bits.py; on the CPU they are made of operators whose reference has the
property. The exit status says whether no bit differs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / name) for name in ("", "examples")]

import same_bits  # noqa: E402

import torch_cubin  # noqa: E402
from torch_cubin._drop_in import aten_kernels  # noqa: E402

VOCABULARY = 160


class Plain(nn.Module):
    """A causal transformer of products, softmax, layer norms and exact functions."""

    head_dim = 8

    def __init__(self, width: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(
            nn.ModuleList(
                [nn.LayerNorm(width), *(nn.Linear(width, width) for _ in range(4)),
                 nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)]
            )
            for _ in range(layers)
        )  # fmt: skip
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor, cache: dict[int, Tensor] | None = None) -> Tensor:
        x = self.embed(ids)
        for number, (norm, q, k, v, out, norm2, up, down) in enumerate(self.layers):
            normed = norm(x)
            heads = torch.stack([each(normed) for each in (q, k, v)])
            heads = heads.unflatten(-1, (-1, self.head_dim)).transpose(2, 3)
            queries, keys = heads[0], heads[1:]
            if cache is not None:
                keys = torch.cat([*([cache[number]] if number in cache else []), keys], 3)
                cache[number] = keys
            scores = queries @ keys[0].mT
            seen = torch.ones_like(scores, dtype=torch.bool)
            seen = seen.tril(scores.shape[-1] - scores.shape[-2])
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            x = x + out((weights @ keys[1]).transpose(1, 2).flatten(2))
            x = x + down(torch.relu(up(norm2(x))))
        return self.head(x)


def make(draws: random.Random, device: str) -> tuple[nn.Module, Any]:
    """A model, and what makes a cache for its calls."""
    torch.manual_seed(draws.randrange(1 << 30))
    # On a GPU K of 2,048 and 4,096, too, which is summed in two and four parts.
    hidden = draws.choice((24, 40, 200) if device == "cpu" else (24, 200, 2048, 4096))
    layers = draws.randint(1, 2)
    if device == "cpu":
        plain = Plain(8 * draws.randint(1, 4), hidden, layers)
        return plain.to(draws.choice((torch.float32, torch.bfloat16))), lambda batch, tokens: {}
    head_dim = draws.choice((64, 64, 96, 128, 256))
    kv_heads = draws.randint(1, 3)
    heads = kv_heads * draws.randint(1, 4)
    dtype = draws.choice((torch.bfloat16, torch.float16))
    with torch.device(device):
        model = same_bits.Llama(VOCABULARY, head_dim * heads, hidden, layers, heads, kv_heads)
    model = model.to(dtype)
    return model, lambda batch, tokens: same_bits.Cache(model, batch, tokens)


def gradients(model: nn.Module, ids: Tensor, place: int, length: int) -> Tensor:
    """Of the embeddings of one sequence, for a loss of its own logits."""
    seen: list[Tensor] = []
    hook = model.embed.register_forward_hook(lambda *call: seen.append(call[2]))
    logits = model(ids)
    hook.remove()
    loss = (
        logits[place, :length].float() * torch.linspace(-1, 1, VOCABULARY, device=ids.device)
    ).sum()
    return torch.autograd.grad(loss, seen[0])[0][place, :length]


def first_difference(model: nn.Module, ids: Tensor, place: int, length: int) -> str:
    """The layer of the backward in which one sequence's gradients differ first; empty for none."""

    def gradients_of_layers(ids: Tensor, place: int) -> list[tuple[str, Tensor]]:
        found: list[tuple[str, Tensor]] = []

        def hook(name: str, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
            for what, grad in (("output", outputs[0]), ("input", inputs[0])):
                found.append((f"{what} of {name}", grad[place, :length].clone()))

        handles = [
            module.register_full_backward_hook(lambda _, *grads, name=name: hook(name, *grads))
            for name, module in model.named_modules()
            if isinstance(module, (nn.Linear, nn.LayerNorm, nn.RMSNorm))
        ]
        gradients(model, ids, place, length)
        for handle in handles:
            handle.remove()
        return found

    alone = gradients_of_layers(ids[place : place + 1, :length].clone(), 0)
    for (name, own), (_, grad) in zip(alone, gradients_of_layers(ids, place), strict=True):
        if not torch.equal(own, grad):
            count = int((own != grad).any(-1).sum())
            return f"first at the {name}, in {count} of {length} rows"
    return ""


def difference(seed: int, device: str) -> str:
    """What differs in this draw; empty for nothing."""
    draws = random.Random(seed)
    longest, most = (24, 5) if device == "cpu" else (400, 16)
    model, make_cache = make(draws, device)
    length, batch = draws.randint(2, longest), draws.randint(1, most)
    longer = draws.choice((0, 0, draws.randint(1, 20)))
    place = draws.randrange(batch)
    ids = torch.randint(VOCABULARY, (batch, length + longer), device=device)
    prompt = ids[place : place + 1, :length].clone()
    cuts = sorted(draws.sample(range(1, length), min(draws.randint(0, 3), length - 1)))
    if draws.random() < 0.5:
        cuts += range(max([*cuts, 0, length - 3]) + 1, length)  # decoded at last
    ends = [*cuts, length + longer]
    parts = [end - start for start, end in zip([0, *cuts], ends, strict=True)]
    call = f"seed {seed}: {length} + {longer} tokens at {place} of {batch}, calls of {parts}"
    with torch.no_grad():
        wanted = model(prompt)[0]
        cache = make_cache(batch, length + longer)
        logits = torch.cat([model(part, cache) for part in ids.split(parts, 1)], 1)
        if not torch.equal(logits[place, :length], wanted):
            return f"{call}: logits"
    if draws.random() < 0.3:
        own = gradients(model, prompt, 0, length)
        if not torch.equal(gradients(model, ids, place, length), own):
            return f"{call}: gradients, {first_difference(model, ids, place, length)}"
    return ""


def differences(seeds: Iterable[int], device: str, seconds: float = 1e9) -> tuple[int, list[str]]:
    """The number of draws until the time was up, and those that differ."""
    if device == "cpu":
        aten_kernels.register("CPU")
    end, count, found = time.monotonic() + seconds, 0, []
    with torch_cubin.install(batch_invariant=True):
        for seed in seeds:
            if time.monotonic() > end:
                break
            count += 1
            found.append(difference(seed, device))
    return count, [each for each in found if each]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=1e9, help="at most")
    parser.add_argument("--json", type=Path, help="a file for the result")
    options = parser.parse_args()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --device cpu draws on the CPU")
    seeds = range(options.first, options.first + options.draws)
    count, found = differences(seeds, options.device, options.seconds)
    print("\n".join([*found, f"{count} of {options.draws} draws on {options.device}: "
                     f"{len(found)} differ"]))  # fmt: skip
    if options.json:
        gpu = torch.cuda.get_device_name() if options.device == "cuda" else options.device
        result = {"device": gpu, "torch": torch.__version__, "command": sys.argv,
                  "first": options.first, "draws": count, "different": found}  # fmt: skip
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(bool(found) or count < options.draws)


if __name__ == "__main__":
    sys.exit(main())
