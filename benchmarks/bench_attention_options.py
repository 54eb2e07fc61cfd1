"""Attention with options: the cost of a visible score, relative to our own dense calls.

    python benchmarks/bench_attention_options.py [--only packed,bands,scores,masks] [--json FILE]
    python benchmarks/bench_attention_options.py --portable      # without the kernels for Hopper

Every line is `attention_forward` or `attention_backward` in bfloat16: 16,384 tokens, heads *
head_dim = 2,048, laid out as (rows, heads, head_dim). TFLOP/s count visible scores only (all scores
for random masks). "share" is that rate over the rate of a dense call of 2,048 rows (windows: 16,384
rows), causal if the line is causal, in the same run: all lines of a table are interleaved, and
medians of five rounds are printed.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import common
import torch

TOKENS, COLUMNS = 16384, 2048
MIXED = [4096, 3000, 2500, 2048, 1700, 1200, 800, 512, 300, 228]  # 16,384 tokens in total
SECTIONS = ("packed", "bands", "scores", "masks")
BLOCK_MS = 12


@dataclass(frozen=True)
class Row:
    direction: str
    head_dim: int
    case: str
    microseconds: float
    tflops: float  # of visible scores
    share: float | None  # fraction of the dense call's rate


@dataclass
class Call:
    """The operands of a line, and the number of visible scores."""

    operands: tuple[torch.Tensor, ...]  # query, key, value, gradient
    options: dict
    scores: int
    baseline: str = ""  # the line whose rate `share` is relative to


def visible(lengths: list[int], causal: bool, window: int | None) -> int:
    if window is not None:
        return sum(min(i + 1, window) for n in lengths for i in range(n))
    return sum(n * (n + 1) // 2 if causal else n * n for n in lengths)


def make(lengths: list[int], head_dim: int, packed: bool, share_heads: int = 1, **options) -> Call:
    """Makes a call of sequences in a batch, all of one length, or packed."""
    heads = COLUMNS // head_dim
    shapes = [(TOKENS, heads // n, head_dim) for n in (1, share_heads, share_heads, 1)]
    operands = [torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes]
    scores = heads * visible(
        lengths,
        bool(options.get("is_causal")),
        options["window_left"] + 1 if "window_left" in options else None,
    )
    options = {"enable_gqa": True, **options}
    if packed:
        at = list(itertools.accumulate(lengths, initial=0))
        offsets = torch.tensor(at, dtype=torch.int32, device="cuda")
        options |= {f"cu_seqlens_{x}": offsets for x in "qk"}
        options |= {f"max_seqlen_{x}": max(lengths) for x in "qk"}
    else:
        operands = [x.unflatten(0, (len(lengths), lengths[0])).transpose(1, 2) for x in operands]
    return Call(tuple(operands), options, scores)


# Masks that hide whole tiles: only their visible scores are counted.
PARTIAL_MASKS = ("causal as a mask", "documents of 512", "padding")


def masks() -> dict[str, torch.Tensor]:
    """Masks for 8 sequences of 2,048 rows, with fully visible, hidden and partly visible tiles."""
    rows = torch.arange(2048, device="cuda")
    lengths = torch.arange(8, device="cuda")[:, None, None, None] * 200 + 640
    return {
        "all visible": torch.ones(8, 1, 2048, 2048, dtype=torch.bool, device="cuda"),
        "causal as a mask": (rows[:, None] >= rows).repeat(8, 1, 1, 1),
        "documents of 512": (rows[:, None] // 512 == rows // 512).repeat(8, 1, 1, 1),
        "padding": rows < lengths,
        "random, a tenth hidden": torch.rand(8, 1, 2048, 2048, device="cuda") > 0.1,
        "bfloat16, added": torch.randn(8, 1, 2048, 2048, device="cuda").bfloat16(),
    }


def cases(section: str, head_dim: int) -> dict[str, Call]:
    heads, equal, long = COLUMNS // head_dim, [2048] * 8, [TOKENS]
    calls = {"dense": make(equal, head_dim, False)}
    calls["dense, causal"] = make(equal, head_dim, False, is_causal=True)

    def add(name: str, call: Call, baseline: str | None = None) -> None:
        causal = bool(call.options.get("is_causal"))
        call.baseline = baseline or ("dense, causal" if causal else "dense")
        calls[name] = call

    numbers = torch.rand(heads, device="cuda") / 10
    if section == "packed":
        for causal in (False, True):
            end = ", causal" if causal else ""
            add(f"8 x 2048 packed{end}", make(equal, head_dim, True, is_causal=causal))
            add(f"mixed lengths packed{end}", make(MIXED, head_dim, True, is_causal=causal))
        add("mixed, GQA 8, causal", make(MIXED, head_dim, True, 8, is_causal=True))
    elif section == "bands":
        calls["dense 16384, causal"] = make(long, head_dim, False, is_causal=True)
        window = make(long, head_dim, False, is_causal=True, window_left=1023)
        add("window 1024 of 16384", window, "dense 16384, causal")
        add("GQA 8, causal", make(equal, head_dim, False, 8, is_causal=True))
    elif section == "scores":
        seed = torch.tensor([5], device="cuda")
        for name, options in (
            ("softcap", {"softcap": 30.0}),
            ("ALiBi", {"alibi_slopes": numbers}),
            ("sinks", {"sinks": numbers}),
            ("dropout 0.1", {"dropout_p": 0.1, "dropout_seed": seed}),
        ):
            add(f"{name}, causal", make(equal, head_dim, False, is_causal=True, **options))
    else:
        for name, mask in masks().items():
            call = make(equal, head_dim, False, attn_mask=mask)
            if name in PARTIAL_MASKS:
                call.scores = heads * int(mask.expand(8, 1, 2048, 2048).sum())
            add(name, call, "dense, causal" if name == "causal as a mask" else "dense")
    return calls


def forward(call: Call) -> Callable[[], object]:
    return lambda: torch.ops.cubin.attention_forward(*call.operands[:3], **call.options)


def backward(call: Call) -> Callable[[], object]:
    q, k, v, grad = call.operands
    out, logsumexp = torch.ops.cubin.attention_forward(q, k, v, **call.options)
    function = torch.ops.cubin.attention_backward
    return lambda: function(grad, q, k, v, out, logsumexp, **call.options)


def rows_of(
    section: str, head_dim: int, direction: str, skipped: tuple[str, ...] = ()
) -> list[Row]:
    """The lines of a table, except those whose names contain one of `skipped`."""
    calls = {
        name: call
        for name, call in cases(section, head_dim).items()
        if not any(word in name for word in skipped)
    }
    run_of, products = (forward, 4) if direction == "forward" else (backward, 10)
    times = common.interleaved({name: run_of(call) for name, call in calls.items()}, BLOCK_MS)
    rate = {n: products * head_dim * calls[n].scores / us / 1e6 for n, us in times.items()}
    return [
        Row(
            direction, head_dim, name, times[name], rate[name],
            rate[name] / rate[call.baseline] if call.baseline else None,
        )
        for name, call in calls.items()
    ]  # fmt: skip


def without_hopper() -> int:
    """Runs this program again with a catalog that lacks the Hopper attention kernels."""
    import torch_cubin

    package = Path(torch_cubin.__file__).resolve().parent / "cubins"
    manifest = json.loads((package / "manifest.json").read_text())
    manifest["kernels"] = [
        k for k in manifest["kernels"]
        if k["family"] != "attention" or "/sm90/" not in k["params_header"]
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for arch in {kernel["arch"] for kernel in manifest["kernels"]}:
            (Path(folder) / arch).symlink_to(package / arch)
        (Path(folder) / "manifest.json").write_text(json.dumps(manifest))
        command = [sys.executable, *(x for x in sys.argv if x != "--portable")]
        environment = {**os.environ, "TORCH_CUBIN_CATALOG": folder}
        return subprocess.run(command, env=environment, check=False).returncode


def main() -> None:
    parser = common.parser(__doc__, markdown=True)
    parser.add_argument("--only", metavar="SECTION,...", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--direction", choices=("forward", "backward"), help="both if not given")
    parser.add_argument("--portable", action="store_true", help="without the kernels for Hopper")
    options = parser.parse_args()
    sections = options.only.split(",") if options.only else list(SECTIONS)
    if not set(sections) <= set(SECTIONS):
        parser.error(f"--only takes {', '.join(SECTIONS)}")
    common.require_gpu()
    if options.portable:
        sys.exit(without_hopper())
    common.print_machine("torch.ops.cubin.attention_forward and attention_backward with options")
    torch.manual_seed(0)
    warm = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(200):
        torch.mm(warm, warm)
    rows: list[Row] = []
    with torch.no_grad():
        for section, head_dim in itertools.product(sections, (64, 128, 256)):
            for direction in ("forward", "backward"):
                if options.direction in (None, direction):
                    rows += rows_of(section, head_dim, direction)
            torch.cuda.empty_cache()
    table = [
        [r.direction, str(r.head_dim), r.case, f"{r.microseconds:.1f}", f"{r.tflops:.0f}",
         "" if r.share is None else f"{r.share:.2f}"]
        for r in rows
    ]  # fmt: skip
    headers = ["direction", "head_dim", "case", "us", "TFLOP/s", "share"]
    common.print_table(headers, table, options.markdown)
    common.write_json(options.json, [asdict(row) for row in rows])


if __name__ == "__main__":
    main()
