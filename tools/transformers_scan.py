"""Which models of transformers are right under attn_implementation="cubin", against "eager".

    python tools/transformers_scan.py [--out docs/transformers_scan.json] [model types]

Every model type that transformers knows is built from its config, made small, with random weights
of one seed, and called once with each implementation on the CPU. The outputs must be equal and,
where a model is causal under "eager", it must be causal under "cubin": another last token moves
no earlier output. "as sdpa": transformers' own "sdpa" differs from "eager" likewise. A type
that cannot be built or called so is listed with its reason.

Each type runs in a fork of its own, two at a time: a model that exhausts memory or time ends alone.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Not this folder, whose kernels.py would be the package that transformers looks for.
sys.path[0] = str(Path(__file__).resolve().parents[1])

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded, and nothing waits for it

import torch  # noqa: E402

SECONDS = 90
TOKENS = 12
VOCABULARY = 128
TOLERANCE = 2e-4  # of the largest output; float32, two layers
MOST_PARAMETERS = 200_000_000

# Names of config attributes and what they become where the default is larger.
_SIZES = {
    64: "hidden_size d_model n_embd dim embed_dim embedding_size projection_dim d_embed emb_dim "
        "hidden_dim encoder_hidden_size decoder_hidden_size width text_embed_dim",
    128: "intermediate_size ffn_dim n_inner d_ff encoder_ffn_dim decoder_ffn_dim d_inner "
         "ffn_hidden_size moe_intermediate_size "
         "shared_expert_intermediate_size feed_forward_proj_dim inner_dim "
         "encoder_intermediate_size decoder_intermediate_size",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads "
       "decoder_attention_heads attention_heads num_local_experts "
       "num_experts n_routed_experts moe_num_experts",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers depth "
       "num_encoder_layers num_decoder_layers num_key_value_heads num_experts_per_tok moe_k "
       "encoder_num_hidden_layers decoder_num_hidden_layers moe_topk",
    16: "head_dim d_kv attention_head_dim qk_nope_head_dim v_head_dim kv_lora_rank q_lora_rank "
        "index_head_dim",
    8: "qk_rope_head_dim rotary_dim patch_size",
    32: "image_size",
    VOCABULARY: "vocab_size n_positions",
}  # fmt: skip
_SMALL = {name: size for size, names in _SIZES.items() for name in names.split()}
# What can be made small where all of it together gives no valid config.
_FEWER = (
    set(_SMALL),
    {name for size in (2, 4, VOCABULARY) for name in _SIZES[size].split() if "head" not in name},
    set(_SIZES[2].split()) - {"num_key_value_heads", "num_experts_per_tok", "moe_k", "moe_topk"},
)
_TOKEN_IDS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")


def small_config(cls: type, names: set[str], depth: int = 0) -> Any:
    """A config of the class, its sub-configs too, with the fields `names` made small."""
    default = cls()
    given: dict[str, Any] = {}
    for name, value in vars(default).items():
        small = _SMALL.get(name.lstrip("_"))
        if small is not None and name in names and isinstance(value, int) and value > small:
            given[name] = small
        elif (
            "vocab_size" in names
            and name in _TOKEN_IDS
            and isinstance(value, int)
            and value >= VOCABULARY
        ):
            given[name] = _TOKEN_IDS.index(name)
    heads = getattr(default, "num_attention_heads", None)
    if getattr(default, "num_key_value_heads", None) == heads and "num_key_value_heads" in given:
        given["num_key_value_heads"] = given.get("num_attention_heads", heads)
    if depth < 3:
        for name in getattr(cls, "sub_configs", None) or {}:
            sub = getattr(default, name, None)
            if sub is not None:
                given[name] = small_config(type(sub), names, depth + 1).to_dict()
    return cls(**given)


def build(config: Any, implementation: str) -> Any:
    """A model with random weights: of causal language where the type has one, else the base."""
    from transformers import AutoModel, AutoModelForCausalLM

    torch.manual_seed(0)
    known = type(config) in AutoModelForCausalLM._model_mapping
    auto = AutoModelForCausalLM if known else AutoModel
    with torch.device("meta"):
        meta = auto.from_config(config, attn_implementation=implementation)
    parameters = sum(x.numel() for x in meta.parameters())
    if parameters > MOST_PARAMETERS:
        raise ValueError(f"is too large: {parameters} parameters")
    torch.manual_seed(0)
    model = auto.from_config(config, attn_implementation=implementation).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():  # as some begin at zero, which hides attention
            if parameter.dim() > 1 and parameter.is_floating_point():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.08)
    return model


def inputs_of(model: Any, config: Any, pixels: bool) -> dict[str, torch.Tensor]:
    """Random arguments for a model's forward, by the name of its main input; `pixels`: an image
    beside tokens, which models of two encoders want."""
    generator = torch.Generator().manual_seed(2)

    def numbers(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator)

    def image(config: Any) -> torch.Tensor:
        size = getattr(config, "image_size", None) or 32
        high, wide = (size, size) if isinstance(size, int) else tuple(size)[:2]
        return numbers(1, getattr(config, "num_channels", None) or 3, high, wide)

    name = model.main_input_name
    ids = torch.randint(5, VOCABULARY - 8, (1, TOKENS), generator=generator)
    if name == "input_ids":
        given = {name: ids}
    elif name == "pixel_values":
        given = {name: image(config)}
    elif name == "input_features":
        bins = getattr(config, "num_mel_bins", None) or 80
        length = 2 * (getattr(config, "max_source_positions", None) or 32)
        given = {name: numbers(1, bins, length)}
    elif name == "input_values":
        given = {name: numbers(1, 4000)}
    else:
        raise ValueError(f"has the main input {name!r}")
    if getattr(config, "is_encoder_decoder", False):
        given["decoder_input_ids"] = ids.flip(1)
    elif name == "pixel_values" and hasattr(config, "text_config"):
        given["input_ids"] = ids
    if pixels:
        given["pixel_values"] = image(config.vision_config)
    return given


def outputs_of(model: Any, given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    torch.manual_seed(3)
    with torch.no_grad():
        out = model(**given)
    tensors = [x for x in out.values() if isinstance(x, torch.Tensor) and x.is_floating_point()]
    if not tensors:
        raise ValueError("returns no tensor")
    return tensors


def difference(left: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    """The largest of all outputs, as a part of the largest value."""
    if [x.shape for x in left] != [x.shape for x in right]:
        return float("inf")
    worst = 0.0
    for a, b in zip(left, right, strict=True):
        if a.numel():
            nan = (a.isnan() != b.isnan()).any()
            gap = (a - b).nan_to_num(0.0).abs().max() / a.nan_to_num(0.0).abs().max().clamp(min=1)
            worst = max(worst, float("inf") if nan else float(gap))
    return worst


def moved_by_last_token(model: Any, given: dict[str, torch.Tensor]) -> float | None:
    """How far earlier outputs move where the last token changes; None where there are no tokens."""
    name = "decoder_input_ids" if "decoder_input_ids" in given else "input_ids"
    if name not in given:
        return None
    other = given[name].clone()
    other[:, -1] = (other[:, -1] + 7) % 100 + 5
    first, second = (outputs_of(model, {**given, name: x})[0] for x in (given[name], other))
    if first.dim() != 3 or first.shape[1] != TOKENS:
        return None
    return difference([first[:, :-1]], [second[:, :-1]])


def scan(model_type: str) -> dict[str, Any]:
    """One line of the list."""
    from transformers import CONFIG_MAPPING

    import torch_cubin
    from torch_cubin import errors

    config_class = CONFIG_MAPPING[model_type]
    reasons = []
    for names, pixels in itertools.product(_FEWER, (False, True)):
        step = "build"
        try:
            eager = build(small_config(config_class, names), "eager")
            given = inputs_of(eager, eager.config, pixels)
            step = "call"
            expected = outputs_of(eager, given)
            break
        except Exception as error:  # whatever a config of a stranger raises is its reason
            reasons.append(f"{step}: {_reason(error)}")
    else:
        return {"result": "not tried", "why": reasons[0]}
    # A model's own randomness (noise in forward, uninitialised buffers) is not ours to judge.
    if difference(expected, outputs_of(eager, given)) > TOLERANCE:
        return {"result": "not tried", "why": "call: two calls of eager differ"}
    try:
        cubin = build(small_config(config_class, names), "cubin")
        cubin.load_state_dict(eager.state_dict())
        torch_cubin.report(reset=True)
        got = outputs_of(cubin, given)
        served = sum(line.calls for line in _served(torch_cubin.report()))
        line = {"calls": served, "difference": float(f"{difference(expected, got):.1e}")}
        before, after = moved_by_last_token(eager, given), moved_by_last_token(cubin, given)
        causal = before is not None and before <= TOLERANCE
        line["causal"] = causal
        right = line["difference"] <= TOLERANCE and not (causal and after > TOLERANCE)
        if not right:
            try:
                sdpa = build(small_config(config_class, names), "sdpa")
                sdpa.load_state_dict(eager.state_dict())
                same = difference(outputs_of(sdpa, given), got) <= TOLERANCE
            except ValueError:  # the type does not take "sdpa"
                same = False
            return {"result": "as sdpa" if same else "wrong", **line, "moved": after}
        return {"result": "served" if served else "computes attention itself", **line}
    except errors.Error as error:
        return {"result": "refused", "why": _reason(error)}
    except (ValueError, KeyError) as error:
        return {"result": "refused by transformers", "why": _reason(error)}
    except Exception as error:
        return {"result": "error", "why": _reason(error)}


def _reason(error: Exception) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text[:160]


def _served(report: Any) -> Any:
    return [x for x in report.served if x.function.startswith("transformers")]


def _child(model_type: str, pipe: Any) -> None:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        pipe.send(scan(model_type))


def scan_all(types: list[str], jobs: int) -> Iterator[tuple[str, dict[str, Any]]]:
    fork = multiprocessing.get_context("fork")
    waiting, running = list(reversed(types)), []
    while waiting or running:
        while waiting and len(running) < jobs:
            model_type = waiting.pop()
            receive, send = fork.Pipe(duplex=False)
            process = fork.Process(target=_child, args=(model_type, send))
            process.start()
            send.close()
            running.append((model_type, process, receive, time.monotonic()))
        time.sleep(0.02)
        for entry in list(running):
            model_type, process, receive, start = entry
            late = time.monotonic() - start > SECONDS
            if not (receive.poll() or late or not process.is_alive()):
                continue
            try:
                line = receive.recv() if receive.poll() else None
            except EOFError:
                line = None
            if line is None:
                process.kill()
                line = {"result": "not tried", "why": "took too long" if late else "ended early"}
            process.join()
            running.remove(entry)
            yield model_type, line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*", help="only these; the others' lines stay")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()

    import transformers
    from transformers import CONFIG_MAPPING

    import torch_cubin.huggingface

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch_cubin.huggingface.register()
    types = options.types or sorted(CONFIG_MAPPING.keys())
    results: dict[str, dict[str, Any]] = {}
    if options.types and options.out and options.out.exists():
        results = json.loads(options.out.read_text())["models"]
    for model_type, line in scan_all(types, options.jobs):
        results[model_type] = line
        print(model_type, json.dumps(line), flush=True)
    counts: dict[str, int] = {}
    for line in results.values():
        counts[line["result"]] = counts.get(line["result"], 0) + 1
    print(counts)
    if options.out:
        found = {"transformers": transformers.__version__, "counts": counts}
        lines = ",\n".join(f'    "{k}": {json.dumps(results[k])}' for k in sorted(results))
        head = json.dumps(found, indent=2)[:-2]
        options.out.write_text(f'{head},\n  "models": {{\n{lines}\n  }}\n}}\n')
    sys.exit(any(line["result"] in ("wrong", "error") for line in results.values()))


if __name__ == "__main__":
    main()
