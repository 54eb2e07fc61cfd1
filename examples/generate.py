"""Text generation with a model of Hugging Face's transformers: PyTorch's attention and ours.

    python examples/generate.py                      # a Llama of 1.1 billion weights, on the GPU
    python examples/generate.py --batch 1 --prompt 512
    python examples/generate.py --device cpu         # a tiny one

The same model generates greedily from the same prompts with a static cache: once with transformers'
"sdpa", once with `torch_cubin.huggingface.register()` and "cubin". It prints tokens per second for
the prompt and for the generation, each the median of three interleaved runs, and the served calls.
The weights are random, so tokens nearly tie and bfloat16 rounding may change them. Therefore the
logits of the first steps after a padded prompt are compared with those of the float32 model for the
same tokens. The exit status says whether ours are about as accurate as those of "sdpa".
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

# The checkout's torch_cubin, unless one is installed.
sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch_cubin
from torch_cubin import huggingface

ATTENTION = ("sdpa", "cubin")
LARGE = {
    "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 16384,
}  # fmt: skip
TINY = {**LARGE, "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
MOST = 1.5  # times the error of "sdpa"
STEPS, PADDING = 4, 3  # compared tokens, and masked tokens before the prompt


def make(device: str):
    import transformers

    config = transformers.LlamaConfig(**(LARGE if device.startswith("cuda") else TINY))
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config)
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    return model.to(dtype).eval()


def seconds(call, device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--prompt", type=int, help="tokens, 4096 on a GPU")
    parser.add_argument("--new", type=int, default=32, help="tokens to generate, at least 1")
    options = parser.parse_args(arguments)
    if options.new < 1:
        parser.error("--new: at least 1")
    prompt = options.prompt or (4096 if options.device.startswith("cuda") else 24)

    model = make(options.device)
    huggingface.register()
    shape = (options.batch, prompt)
    ids = torch.randint(model.config.vocab_size, shape, device=options.device)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def generate(attention: str, count: int, given=given):
        model.set_attn_implementation(attention)
        with torch.no_grad():
            return model.generate(
                **given, max_new_tokens=count, min_new_tokens=count, do_sample=False,
                cache_implementation="static", disable_compile=True, pad_token_id=0,
                return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip

    padded = {name: x[:1].clone() for name, x in given.items()}
    padded["attention_mask"][:, :PADDING] = 0
    compared = {}
    for attention in ATTENTION:
        compared[attention] = generate(attention, STEPS, padded)
        generate(attention, 2)  # warms up
    torch_cubin.report(reset=True)
    times: dict[str, list[tuple[float, float]]] = {attention: [] for attention in ATTENTION}
    for _ in range(3):
        for attention in ATTENTION:
            first, whole = (
                seconds(lambda: generate(attention, count), options.device)  # noqa: B023
                for count in (1, 1 + options.new)
            )
            times[attention].append((first, whole - first))

    print(f"{options.batch} prompts of {prompt} tokens, {options.new} new ones,", end="")
    print(f" torch {torch.__version__}")
    print(f"{'':8}{'prompt':>12}{'generated':>12}   tokens/s")
    medians = {}
    for attention, runs in times.items():
        counts = (options.batch * prompt, options.batch * options.new)
        medians[attention] = [
            count / statistics.median(run[i] for run in runs) for i, count in enumerate(counts)
        ]
        print(f"{attention:<8}" + "".join(f"{speed:>12,.0f}" for speed in medians[attention]))
    ratios = [b / a for a, b in zip(*medians.values(), strict=True)]
    print(f"{'ratio':<8}" + "".join(f"{ratio:>12.3f}" for ratio in ratios))
    print(torch_cubin.report())

    model.float().set_attn_implementation("sdpa")
    errors = {}
    for attention, done in compared.items():
        tokens = done.sequences[:, :-1]
        mask = torch.ones_like(tokens)
        mask[:, :PADDING] = 0
        with torch.no_grad():
            exact = model(tokens, attention_mask=mask, logits_to_keep=STEPS).logits
        difference = torch.stack(done.logits, dim=1).float() - exact
        errors[attention] = float(difference.square().mean().sqrt() / exact.square().mean().sqrt())
    said = ", ".join(f"{error:.2e} by {name}" for name, error in errors.items())
    print(f"errors of the logits, as shares of their size: {said}")
    least = 100 * torch.finfo(torch.float32).eps  # if "sdpa" computes in float32 as well
    return 0 if errors["cubin"] <= MOST * max(errors["sdpa"], least) else 1


if __name__ == "__main__":
    sys.exit(main())
