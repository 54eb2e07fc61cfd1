"""Checks models of transformers under attn_implementation="cubin" against "eager".

    python tools/transformers_scan.py --out docs/transformers_scan.json    (make transformers-scan)
    python tools/transformers_scan.py bloom llama

Every model type in transformers is built from a reduced config, with random weights of one seed,
and called once with each implementation on the CPU. The outputs must be equal, and a model that is
causal under "eager" must be causal under "cubin": changing the last token changes no earlier
output. "as sdpa": transformers' own "sdpa" differs from "eager" likewise. A type that cannot be
built or called is "not tried", with the reason.

Each type runs in its own forked process, as many at a time as there are CPUs, so a model that
exhausts memory or time only ends its own process. A run writes its lines to NAME.unfinished after
each type, and replaces the list once all are there; the next run continues an interrupted one that
was made by the same versions and sources. Single types are only printed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import os
import resource
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Not this folder: transformers would import its kernels.py instead of the package `kernels`.
sys.path[0] = str(ROOT)

os.environ["HF_HUB_OFFLINE"] = "1"  # prevents downloads and waiting for them

import torch  # noqa: E402

from tools.transformers_models import (  # noqa: E402
    CHOICES,
    TOKENS,
    Inputs,
    Smaller,
    build,
    small_config,
)

SECONDS = 40  # of CPU time, for a type
SOURCES = ("torch_cubin/huggingface.py", "tools/transformers_models.py",
           "tools/transformers_scan.py")  # fmt: skip
TOLERANCE = 2e-4  # relative to the largest output; float32, two layers


def outputs_of(model: Any, given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    torch.manual_seed(3)
    with torch.no_grad():
        out = model(**given)
    tensors = [x for x in out.values() if isinstance(x, torch.Tensor) and x.is_floating_point()]
    if not tensors:
        raise ValueError("returns no tensor")
    return tensors


def difference(left: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    """The maximum difference over all outputs, relative to the largest value."""
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
    """How much earlier outputs change if the last token changes; None if there are no tokens."""
    name = "decoder_input_ids" if "decoder_input_ids" in given else "input_ids"
    if name not in given:
        return None
    other = given[name].clone()
    other[:, -1] = (other[:, -1] + 7) % 100 + 5
    first, second = (outputs_of(model, {**given, name: x})[0] for x in (given[name], other))
    if first.dim() != 3 or first.shape[1] != TOKENS:
        return None
    return difference([first[:, :-1]], [second[:, :-1]])


Called = tuple[Smaller, Any, dict[str, torch.Tensor], list[torch.Tensor]]


def called(config_class: type) -> Called | str:
    """A small model under "eager" with valid inputs, and its outputs; or the reason why there is
    none: of the attempts that got furthest, the first one's."""
    reasons: dict[str, str] = {}
    start = time.process_time()
    for smaller in CHOICES:
        if reasons and time.process_time() - start > SECONDS / 2:
            break
        step = "build"
        try:
            eager = build(small_config(config_class, smaller), "eager")
            step = "call"
            inputs = Inputs(eager)
        except Exception as error:  # any exception of a third-party config is its reason
            reasons.setdefault(step, _reason(error))
            continue
        for names, layout in inputs.candidates():
            try:
                given = inputs.make(names, layout)
                return smaller, eager, given, outputs_of(eager, given)
            except Exception as error:
                reasons.setdefault("call", _reason(error))
    step = "call" if "call" in reasons else "build"
    return f"{step}: {reasons[step]}"


def scan(model_type: str) -> dict[str, Any]:
    """One line of the list."""
    from transformers import CONFIG_MAPPING

    import torch_cubin
    from torch_cubin import errors

    config_class = CONFIG_MAPPING[model_type]
    found = called(config_class)
    if isinstance(found, str):
        return {"result": "not tried", "why": found}
    smaller, eager, given, expected = found
    # A model's own randomness (noise in forward, uninitialised buffers) does not count as an error.
    if difference(expected, outputs_of(eager, given)) > TOLERANCE:
        return {"result": "not tried", "why": "call: two calls of eager differ"}
    try:
        cubin = build(small_config(config_class, smaller), "cubin")
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
                sdpa = build(small_config(config_class, smaller), "sdpa")
                sdpa.load_state_dict(eager.state_dict())
                same = difference(outputs_of(sdpa, given), got) <= TOLERANCE
            except ValueError:  # the type does not support "sdpa"
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
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
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
            running.append((model_type, process, receive))
        wait([receive for _, _, receive in running])
        for entry in list(running):
            model_type, process, receive = entry
            if not receive.poll():
                continue
            try:
                line = receive.recv()
                process.join()
            except EOFError:  # the process ended
                process.join()
                late = process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL)
                why = "took too long or too much memory" if late else "ended early"
                line = {"result": "not tried", "why": why}
            running.remove(entry)
            yield model_type, line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*", help="only these, without a list")
    parser.add_argument("--out", type=Path, help="the list of all types")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    if bool(options.types) == bool(options.out):
        parser.error("either model types, or --out for all of them")

    import transformers
    from transformers import CONFIG_MAPPING

    import torch_cubin.huggingface

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch_cubin.huggingface.register()
    sources = b"".join((ROOT / name).read_bytes() for name in SOURCES)
    made_by = {
        **{x.__name__: x.__version__ for x in (transformers, torch)},
        "sources": hashlib.sha256(sources).hexdigest()[:16],
    }
    out: Path | None = options.out
    unfinished = out.with_suffix(".unfinished") if out is not None else None
    results = lines_of(unfinished, made_by) if unfinished is not None else {}
    types = options.types or [x for x in sorted(CONFIG_MAPPING.keys()) if x not in results]
    for model_type, line in scan_all(types, options.jobs):
        results[model_type] = line
        print(model_type, json.dumps(line), flush=True)
        if unfinished is not None:
            write(unfinished, made_by, results)
    if out is not None and unfinished is not None:
        write(unfinished, made_by, results)
        unfinished.replace(out)
    print(counts(results))
    sys.exit(any(line["result"] in ("wrong", "error") for line in results.values()))


def counts(results: dict[str, dict[str, Any]]) -> dict[str, int]:
    return dict(sorted(Counter(line["result"] for line in results.values()).items()))


def lines_of(path: Path, made_by: dict[str, str]) -> dict[str, dict[str, Any]]:
    """The lines of a list that the same versions and sources made; none of any other."""
    if not path.exists():
        return {}
    found = json.loads(path.read_text())
    return found["models"] if found["made_by"] == made_by else {}


def write(out: Path, made_by: dict[str, str], results: dict[str, dict[str, Any]]) -> None:
    """Writes the whole list, one line per type."""
    lines = ",\n".join(f'    "{k}": {json.dumps(results[k])}' for k in sorted(results))
    head = json.dumps({"made_by": made_by, "counts": counts(results)}, indent=2)[:-2]
    partial = out.with_suffix(".partial")
    partial.write_text(f'{head},\n  "models": {{\n{lines}\n  }}\n}}\n')
    partial.replace(out)


if __name__ == "__main__":
    main()
