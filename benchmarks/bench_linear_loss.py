"""Cross entropy of a linear layer, forward and backward: time, memory and the error of dW.

    python benchmarks/bench_linear_loss.py [--json FILE]

Memory is the peak above the arguments, so the gradients count. Errors are relative to dW of float32
products without TF32.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable

import common
import torch
import torch.nn.functional as F
from torch import Tensor

import torch_cubin  # noqa: F401  (registers the ops)

SHAPES = [(8192, 4096, 128256), (4096, 2048, 151936)]  # rows, features, classes
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
op = torch.ops.cubin.linear_cross_entropy


def reference(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w), target)


def exact_gradient(x: Tensor, w: Tensor, target: Tensor, rows: int = 512) -> Tensor:
    out = torch.zeros(w.shape, device="cuda")
    wide = w.float()
    for own, targets in zip(x.split(rows), target.split(rows), strict=True):
        probs = (own.float() @ wide.t()).softmax(-1)
        probs[torch.arange(len(own), device="cuda"), targets] -= 1
        out.addmm_(probs.t(), own.float(), alpha=1 / len(x))
    return out


def measure(loss: Loss, x: Tensor, w: Tensor, target: Tensor) -> tuple[float, Tensor]:
    """The peak of memory in MiB, and dW."""
    gc.collect()  # gradients of the call before may be in a cycle: freed later, they hide a peak
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients = torch.autograd.grad(loss(x, w, target), (x, w))
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20, gradients[1]


def compare(rows: int, features: int, classes: int) -> list[dict[str, object]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    x = torch.randn(rows, features, device="cuda").bfloat16().requires_grad_()
    w = torch.randn(classes, features, device="cuda") * features**-0.5
    w = w.bfloat16().requires_grad_()
    target = torch.randint(0, classes, (rows,), device="cuda")
    losses: dict[str, Loss] = {
        "ours": op,
        "recompute": lambda *tensors: op(*tensors, recompute=True),
        "torch": reference,
        "compiled": torch.compile(reference, dynamic=False),
    }
    with torch.no_grad():
        exact = exact_gradient(x, w, target)
    size, facts = float(exact.norm()), {}
    for who, loss in losses.items():
        measure(loss, x, w, target)  # compiles
        peak, gradient = measure(loss, x, w, target)
        error = sum(
            float((own.float() - want).square().sum())
            for own, want in zip(gradient.split(4096), exact.split(4096), strict=True)
        )
        facts[who] = {"MiB": peak, "dW error": error**0.5 / size}
        del gradient
    del exact
    torch.cuda.empty_cache()

    def run(loss: Loss) -> object:
        return torch.autograd.grad(loss(x, w, target), (x, w))

    runs = {who: functools.partial(run, loss) for who, loss in losses.items()}
    times = common.interleaved(runs, block_ms=150, rounds=5)
    found: list[dict[str, object]] = []
    for who, each in facts.items():
        case = f"{rows} x {features} x {classes}"
        ratio, ms = times["compiled"] / times[who], times[who] / 1e3
        print(
            f"{case} {who}: {ratio:.3f} of compiled, {ms:.2f} ms, {each['MiB']:.0f} MiB, "
            f"error of dW {each['dW error']:.2e}",
            flush=True,
        )
        found.append({"group": who, "case": case, "value": ratio, "ms": ms, **each})
    return found


def main() -> None:
    parser = common.parser(__doc__)
    arguments = parser.parse_args()
    common.begin("Cross entropy of a linear layer, bfloat16, forward and backward")
    found = []
    for shape in SHAPES:
        found += compare(*shape)
        torch.cuda.empty_cache()
    common.write_json(arguments.json, found)


if __name__ == "__main__":
    main()
