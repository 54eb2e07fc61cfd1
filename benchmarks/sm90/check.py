"""Checks every kernel of a folder: exact small integers, tails, epilogues, repeats.

python benchmarks/sm90/check.py FOLDER [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.nn.functional as F
from harness import TYPES, Epilogue, How, Launch, Workspace, load


def operand(
    kind: str, batch: tuple[int, ...], rows: int, columns: int, transposed: bool, exact: bool
):
    """Makes an operand that is [*batch, rows, columns] in memory, or its transpose."""
    dtype = TYPES[kind][1]
    shape = (*batch, columns, rows) if transposed else (*batch, rows, columns)
    # Rows are padded to multiples of 16 bytes, so that every size can have a tensor map.
    pad = -shape[-1] % 8
    full = (*shape[:-1], shape[-1] + pad)
    if exact:
        t = torch.randint(-2, 3, full, device="cuda").to(dtype)
    else:
        t = torch.randn(full, device="cuda").to(dtype)
    t[..., shape[-1] :] = float("nan")  # must not be read
    t = t[..., : shape[-1]]
    return t.mT if transposed else t


def case(kernels, workspace, name, how, shape, batch_a=(), batch_b=(), exact=True, epilogue=None,
         out_dtype=None, odd_out=False, repeats=1, transposed=False):  # fmt: skip
    kernel = kernels[name]
    kind, layout = kernel.facts["type"], kernel.facts["layout"]
    m, n, k = shape
    a = operand(kind, batch_a, m, k, layout[0] == "t", exact)
    b = operand(kind, batch_b, k, n, layout[1] == "t", exact)
    sizes = torch.broadcast_shapes(batch_a, batch_b)
    dtype = out_dtype or TYPES[kind][1]
    rows, columns = (n, m) if transposed else (m, n)  # of the output in memory
    pad = (1 if columns % 2 == 0 else 0) if odd_out else -columns % 8
    store = torch.full((*sizes, rows + 2, columns + pad), float("nan"), device="cuda", dtype=dtype)
    out = store[..., :rows, :columns]
    if transposed:
        out = out.mT
    reference = torch.matmul(a.double(), b.double())
    scale = k**0.5
    if epilogue is not None:
        e = epilogue
        reference = e.alpha * reference
        if e.bias is not None:
            reference = reference + (e.bias.double()[:, None] if e.bias_row else e.bias.double())
        acts = {None: lambda x: x, "relu": F.relu, "gelu_erf": F.gelu, "silu": F.silu,
                "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}  # fmt: skip
        reference = acts[e.activation](reference)
        if e.addend is not None:
            reference = reference + e.beta * e.addend.double()
    launch = Launch(kernel, how, a, b, out, workspace, epilogue)
    first = None
    for _ in range(repeats):
        store.fill_(float("nan"))
        launch()
        if repeats > 1:
            bits = out.contiguous().view(torch.int16 if dtype.itemsize == 2 else torch.int32)
            if first is None:
                first = bits.clone()
            elif not torch.equal(first, bits):
                return "DIFFERENT BITS"
    torch.cuda.synchronize()
    outside = (store[..., rows:, :], store[..., columns:])
    if not all(torch.isnan(x).all() for x in outside):
        return "WROTE OUTSIDE"
    if exact and (epilogue is None or epilogue.activation in (None, "relu")):
        expected = reference.to(dtype)
        if not torch.equal(out, expected):
            wrong = ~(out == expected)
            at = tuple(wrong.nonzero()[0].tolist())
            return (f"WRONG {int(wrong.sum())} of {out.numel()}, first {at}: {out[at].item()} "
                    f"instead of {expected[at].item()}")  # fmt: skip
        return ""
    eps = torch.finfo(dtype).eps
    if kind == "tf32":  # twice torch's error
        torch.backends.cuda.matmul.allow_tf32 = True
        own, exact_product = torch.matmul(a, b).double(), torch.matmul(a.double(), b.double())
        torch.backends.cuda.matmul.allow_tf32 = False
        eps = 2 * ((own - exact_product).abs() / (scale + exact_product.abs())).max().item()
    error = ((out.double() - reference).abs() / (scale + reference.abs())).max().item()
    if kind == "tf32" and epilogue is None:
        print(f"tf32 {shape}: error {error:.2e}, torch's {eps / 2:.2e}")
    return "" if error <= eps else f"ERROR {error:.2e} over {eps:.2e}"


def cases(kernels, quick=False):
    """Yields (label, name, how, shape, keywords)."""
    clusters = ("", "m", "n")
    for name, kernel in kernels.items():
        bm, bn = kernel.tile
        for cluster in clusters:
            how = How(cluster=cluster)
            yield name, how, (bm * 3 + 8, bn * 3 + 8, 200), {}
            yield (
                name,
                How(cluster=cluster, stream=True),
                (bm * 15, bn * 17 - 24, 1000),
                {"repeats": 5},
            )
        yield name, How(cluster="k"), (bm * 2 + 5, bn * 3 - 3, 520), {}
        yield name, How(), (1, 8, 8), {}
        yield name, How(), (63, bn + 1, 64), {}
        yield (
            name,
            How(cluster="m", blocks=128, skew=False, serpentine=False),
            (bm * 9, bn * 40, 320),
            {},
        )
        yield name, How(stream=True), (bm * 3 + 1, bn * 7, 4096), {"repeats": 5}
        yield name, How(cluster="n", stream=True), (bm, bn, 8192), {"repeats": 5}
        yield name, How(stream=True, polls=0), (bm * 3 + 1, bn * 7, 4096), {"repeats": 5}
        yield name, How(cluster="m", stream=True, polls=0), (bm * 15, bn * 17, 2048), {"repeats": 5}
        yield name, How(group=3, group_n=True), (bm * 7, bn * 11, 130), {}
        yield name, How(), (bm + 9, bn + 9, 136), {"batch_a": (3, 2), "batch_b": (1, 2)}
        yield (
            name,
            How(cluster="m"),
            (bm + 9, bn + 9, 136),
            {"batch_a": (2, 1, 3), "batch_b": (4, 1)},
        )
        yield (
            name,
            How(cluster="n", stream=True),
            (bm + 9, bn + 9, 264),
            {"batch_a": (), "batch_b": (5,)},
        )
        yield name, How(), (bm * 2, bn * 2 + 1, 4096), {"exact": False}
        yield (
            name,
            How(pdl=True, stream=True),
            (bm * 5, bn * 7, 2048),
            {"exact": False, "repeats": 20},
        )
        yield name, How(), (bm + 3, bn + 5, 96), {"odd_out": True}
        yield name, How(), (bm + 3, bn + 8, 96), {"out_dtype": torch.float32}
        m, n = bm + 7, bn + 24
        dtype = TYPES[kernel.facts["type"]][1]

        def ints(*shape, dtype=dtype):
            return torch.randint(-3, 4, shape, device="cuda").to(dtype)

        yield name, How(), (m, n, 192), {"epilogue": Epilogue(bias=ints(n))}
        yield (
            name,
            How(),
            (m, n, 192),
            {"epilogue": Epilogue(bias=ints(m), bias_row=True, activation="relu")},
        )
        yield name, How(), (m, n, 192), {
            "epilogue": Epilogue(addend=ints(m, n), alpha=2.0, beta=-3.0)}  # fmt: skip
        row = ints(n + 1).expand(m, -1)
        yield name, How(), (m, n + 1, 192), {
            "epilogue": Epilogue(addend=row, alpha=0.5, beta=2.0)}  # fmt: skip
        for activation in ("gelu_erf", "gelu_tanh", "silu"):
            yield name, How(stream=True), (m, n, 192), {"exact": False, "epilogue": Epilogue(
                bias=torch.randn(n, device="cuda").to(dtype), activation=activation)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json")
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    kernels = {k: v for k, v in load(arguments.folder).items() if arguments.only in k}
    everything = list(cases(kernels))
    # Kernels that read A from registers can also write a transposed output.
    everything += [
        (name, how, shape, {**keywords, "transposed": True})
        for name, how, shape, keywords in everything
        if kernels[name].facts["type"] == "tf32" and kernels[name].facts["a_mn"]
    ]
    workspace = Workspace()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    results, bad, start = [], 0, time.time()
    for name, how, shape, keywords in everything:
        facts = kernels[name].facts
        if (how.stream and not facts["streams"]) or (how.cluster == "k" and not facts["pairs"]):
            continue
        try:
            verdict = case(kernels, workspace, name, how, shape, **keywords)
        except (RuntimeError, AssertionError) as error:
            verdict = f"RAISED {error}"
            if "launch failure" in verdict or "illegal" in verdict or "trap" in verdict:
                print(name, how, shape, keywords, verdict, flush=True)
                sys.exit(1)
            traceback.print_exc(limit=2)
        what = f"{name} [{how}] {shape} { {k: v for k, v in keywords.items() if k != 'epilogue'} }"
        results.append((what, verdict))
        if verdict:
            bad += 1
            if bad <= 40:
                e = keywords.get("epilogue")
                parts = "" if e is None else (e.activation, e.bias_row, e.addend is not None)
                print(what, parts, verdict, flush=True)
    if int(workspace.counters.abs().sum()) != 0:
        print("COUNTERS not zero")
        bad += 1
    print(f"check: {len(results)} cases, {bad} bad, {time.time() - start:.1f} s")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=1))
    sys.exit(bad != 0)


if __name__ == "__main__":
    main()
