"""Layer norm, RMS norm and softmax against a copy's rate, PyTorch eager, and torch.compile.

    python benchmarks/bench_rows.py [--json FILE] [--only softmax] [--seconds 60]
    python benchmarks/bench_rows.py --only layer_norm --sizes 256x768,4096x768 --dtype float16

"copy" is the rate of `x.clone()` of a tensor of the same bytes. Calls are captured in CUDA graphs,
twelve at least, because the GPU idles between two graphs, over several sets of tensors, so that no
call finds its tensors in the L2 cache. Results rotate over
two blocks of memory, those of copies too: one of 17 MB, written again and again, would stay in the
cache (8.5 us in place of 9.6).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import common
import torch
import torch.nn.functional as F
from torch import Tensor

import torch_cubin

ops = torch.ops.cubin
ROTATED_BYTES = 400e6
CALLS = 12  # of a graph, at least
# rows, columns
NORMS = [(8192, 4096), (16384, 2048), (65536, 128), (8192, 8192), (256, 4096), (4096, 16384)]
SOFTMAXES = [(16384, 4096), (65536, 512), (8192, 8192), (2048, 128256), (128, 32000)]
# Gradients of biases: tokens, columns.
BIASES = [(16384, 384), (12608, 768), (12608, 3072), (8192, 4096), (2048, 768), (256, 1024)]
Function = Callable[..., Any]


def norm(function: str) -> tuple[Function, Function]:
    def ours(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        rest = (w, b) if function == "layer_norm" else (w, 1e-5)
        return getattr(ops, function)(x, w.shape, *rest)

    def torchs(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        rest = (w, b) if function == "layer_norm" else (w, 1e-5)
        return getattr(F, function)(x, w.shape, *rest)

    return ours, torchs


def add_ours(x: Tensor, y: Tensor, w: Tensor) -> Any:
    return ops.add_rms_norm(x, y, w.shape, w, 1e-5)


def add_torchs(x: Tensor, y: Tensor, w: Tensor) -> Any:
    total = x + y
    return F.rms_norm(total, w.shape, w, 1e-5), total


def sum_ours(x: Tensor) -> Tensor:
    with torch_cubin.drop_in(policy="all"):
        return x.sum(0)


# Name, contenders, kinds of arguments (x: rows, w: a row's parameter, t: targets), sizes, tensors
# of rows that a forward and a backward must move; 0: no such direction.
CASES: list[tuple[str, tuple[Function, Function], str, list[tuple[int, int]], int, int]] = [
    ("rms_norm", norm("rms_norm"), "xww", NORMS, 2, 3),
    ("add_rms_norm", (add_ours, add_torchs), "xxw", NORMS[:3], 4, 4),
    ("layer_norm", norm("layer_norm"), "xww", NORMS, 2, 3),
    (
        "softmax",
        (lambda x: ops.softmax(x, -1), lambda x: torch.softmax(x, -1)),
        *("x", SOFTMAXES, 2, 3),
    ),
    (
        "log_softmax",
        (lambda x: ops.log_softmax(x, -1), lambda x: torch.log_softmax(x, -1)),
        *("x", SOFTMAXES[-2:], 2, 3),
    ),
    ("cross_entropy", (ops.cross_entropy, F.cross_entropy), "xt", SOFTMAXES[-2:], 1, 2),
    ("sum of rows", (sum_ours, lambda x: x.sum(0)), "x", BIASES, 1, 0),
]


def first(results: Any) -> Tensor:
    return results if isinstance(results, Tensor) else results[0]


def capture_stream() -> torch.cuda.Stream:
    if torch.cuda.graph.default_capture_stream is None:
        torch.cuda.graph.default_capture_stream = torch.cuda.Stream()
    return torch.cuda.graph.default_capture_stream


def forward(call: Function) -> Function:
    def run(*tensors: Tensor) -> Tensor:
        with torch.no_grad():
            return first(call(*tensors))

    return run


def backwards(call: Function, sets: list[list[Tensor]], grads: list[Any]) -> list[Function]:
    """Backward calls alone: the graphs of autograd are kept.

    They run on the stream of their forward, which therefore is that of captures.
    """
    runs = []
    for own, grad in zip(sets, grads, strict=True):
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in own]
        with torch.cuda.stream(capture_stream()):
            out = call(*leaves)
        torch.cuda.synchronize()
        outs = [out] if isinstance(out, Tensor) else list(out)

        wanted = [x for x in leaves if x.requires_grad]
        # A loss' gradient is given, too: autograd would launch a kernel that fills it.
        given = [grad if x.dim() else torch.ones_like(x) for x in outs]

        def run(outs: Any = outs, leaves: Any = wanted, given: Any = given) -> Tensor:
            return torch.autograd.grad(outs, leaves, given, retain_graph=True, allow_unused=True)[0]

        runs.append(run)
    return runs


def microseconds(runs: dict[str, list[Function]]) -> dict[str, float]:
    sets = len(next(iter(runs.values())))
    times_each = -(-CALLS // sets)
    count = sets * times_each
    graphs = {who: common.graph_of(calls * times_each)[0] for who, calls in runs.items()}
    times = common.interleaved(
        {who: graph.replay for who, graph in graphs.items()}, block_ms=4, rounds=5
    )
    return {who: each / count for who, each in times.items()}


def sizes_of(text: str | None) -> list[tuple[int, int]]:
    return [
        (int(a), int(b)) for a, b in (each.split("x") for each in (text or "").split(",") if each)
    ]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--sizes", metavar="ROWSxCOLUMNS,...", help="these in place of the usual")
    arguments = parser.parse_args()
    common.begin(f"Ops over rows, {arguments.dtype}, microseconds a call")
    dtype = getattr(torch, arguments.dtype)
    end = time.monotonic() + arguments.seconds
    found: list[dict[str, Any]] = []
    for name, (ours, torchs), kinds, sizes, moved, moved_back in CASES:
        for rows, columns in sizes_of(arguments.sizes) or sizes:
            label = f"{name} {rows} x {columns}"
            if arguments.only not in label or time.monotonic() > end:
                continue
            size = dtype.itemsize * rows * columns
            count = max(1, min(CALLS, int(ROTATED_BYTES / (size * moved))))

            def draw(kind: str, rows: int = rows, columns: int = columns) -> Tensor:
                if kind == "t":
                    return torch.randint(0, columns, (rows,), device="cuda")
                shape = (rows, columns) if kind == "x" else (columns,)
                return torch.randn(shape, device="cuda").to(dtype)

            sets = [[draw(kind) for kind in kinds] for _ in range(count)]
            contenders = {"ours": ours, "torch": torchs}
            if not arguments.no_compile:
                torch._dynamo.reset()
                contenders["compiled"] = torch.compile(torchs, dynamic=False)
            for direction, tensors in (("forward", moved), ("backward", moved_back)):
                if tensors == 0:
                    continue
                if direction == "forward":
                    runs = {
                        who: [lambda c=c, own=own: forward(c)(*own) for own in sets]
                        for who, c in contenders.items()
                    }
                else:
                    grads = [draw("x") for _ in sets]
                    runs = {who: backwards(c, sets, grads) for who, c in contenders.items()}
                # A copy reads and writes: half of the bytes each.
                numel = rows * columns * tensors // 2
                froms = [torch.empty(numel, device="cuda", dtype=dtype) for _ in sets]
                runs["copy"] = [x.clone for x in froms]
                times = microseconds(runs)
                ratios = {who: each / times["ours"] for who, each in times.items() if who != "ours"}
                shown = "  ".join(f"{who} {each:.1f}" for who, each in times.items())
                rest = ", ".join(f"{ratio:.2f} of {who}" for who, ratio in ratios.items())
                print(f"{label} {direction}: {rest}  ({shown})", flush=True)
                found += [
                    {"group": f"{direction}, {who}", "case": label, "value": ratio, "us": times}
                    for who, ratio in ratios.items()
                ]
                del runs, froms
            del sets
            torch.cuda.empty_cache()
            common.write_json(arguments.json, found)


if __name__ == "__main__":
    main()
