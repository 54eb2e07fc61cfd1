"""Kernels of Triton as a table: what each is called with, by Triton's launcher and as an op.

tests/unit/test_triton.py compiles them with the Triton that is there and defines the ops;
tests/gpu/test_cuda_producers.py runs them and compares bits with Triton's own launches. Importing
this needs Triton. Longer than files should be: one table, and the kernels that its lines name.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

import torch_cubin
import torch_cubin.producers.triton as tct

VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])


@dataclasses.dataclass(frozen=True)
class Case:
    """`inputs` are the op's arguments; `launch` is how Triton launches, for a fresh output."""

    kernel: Any
    signature: Any
    schema: str
    tensors: dict[str, str]
    inputs: Callable[[], tuple[Any, ...]]
    launch: Callable[..., tuple[tuple[int, ...], tuple[Any, ...]]]  # grid, arguments
    args: dict[str, Any]
    grid: Any
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    out: Callable[..., torch.Tensor] | None = None  # its output; like the first input by default
    least: tuple[int, int] = (3, 4)  # version of Triton
    archs: tuple[str, ...] = ("sm_80", "sm_90a")


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    made = torch.randn(*shape, generator=generator, device=device)
    return (made * 4).to(dtype) if dtype.is_floating_point else (made * 20).to(dtype)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


CASES: dict[str, Case] = {}

# --- elementwise: alignment, masks, dtypes ---


@triton.jit
def add(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.load(y_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, x + y, mask=mask)


def elementwise(dtype: str, n: int, hints: str, start: int = 0, triton_dtype: str = "") -> Case:
    torch_dtype = getattr(torch, dtype)
    pointer, number = hints.split(",")
    kind = triton_dtype or {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}[dtype]

    def inputs() -> tuple[Any, ...]:
        return random(n + start, dtype=torch_dtype)[start:], random(n, dtype=torch_dtype, seed=1)

    return Case(
        add,
        f"*{kind}{pointer}, *{kind}:16, *{kind}:16, i32{number}, 256",
        "add(Tensor x, Tensor y) -> Tensor",
        dict.fromkeys(("x", "y", "out"), f"{dtype}[*shape]"),
        inputs,
        lambda out, x, y: ((cdiv(n, 256),), (x, y, out, n, 256)),
        {"x_ptr": "x", "y_ptr": "y", "out_ptr": "out", "n": lambda x: x.numel()},
        lambda x, BLOCK: torch_cubin.cdiv(x.numel(), BLOCK),
        out=lambda x, y: torch.empty_like(y),
    )


CASES["add"] = elementwise("float32", 4096, ":16,:16")
CASES["add of an odd length"] = elementwise("float32", 1001, ":16,")
CASES["add of an unaligned address"] = elementwise("float32", 1024, ",:16", start=1)
CASES["add fp16"] = elementwise("float16", 1024, ":16,:16")
CASES["add bf16"] = elementwise("bfloat16", 1024, ":16,:16")
CASES["add fp64"] = elementwise("float64", 1024, ":16,:16", triton_dtype="fp64")
CASES["add int8"] = elementwise("int8", 1024, ":16,:16", triton_dtype="i8")
CASES["add uint8"] = elementwise("uint8", 1024, ":16,:16", triton_dtype="u8")
CASES["add int64"] = elementwise("int64", 1024, ":16,:16", triton_dtype="i64")


@triton.jit
def invert(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n, other=0)
    tl.store(out_ptr + offsets, x == 0, mask=offsets < n)


CASES["bools in memory"] = Case(
    invert,
    "*i1:16, *i1:16, i32:16, 128",
    "invert(Tensor x) -> Tensor",
    {"x": "bool[n]", "out": "bool[n]"},
    lambda: (random(112) > 0,),
    lambda out, x: ((1,), (x, out, 112, 128)),
    {"x_ptr": "x", "out_ptr": "out"},
    1,
)


@triton.jit
def widen(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets).to(tl.float32))


for _fp8, _kind in (("float8_e4m3fn", "fp8e4nv"), ("float8_e5m2", "fp8e5")):
    CASES[f"{_kind} in memory"] = Case(
        widen,
        f"*{_kind}:16, *fp32:16, 128",
        "widen(Tensor x) -> Tensor",
        {"x": f"{_fp8}[128]", "out": "float32[128]"},
        lambda fp8=_fp8: (random(128).to(getattr(torch, fp8)),),
        lambda out, x: ((1,), (x, out, 128)),
        {"x_ptr": "x", "out_ptr": "out"},
        1,
        out=lambda x: torch.empty(128, device=x.device),
        archs=("sm_90a",),
    )

# --- scalars ---


@triton.jit
def integers(
    out_ptr,
    a: tl.int8,
    b: tl.int16,
    c: tl.int32,
    d: tl.int64,
    e: tl.uint8,
    f: tl.uint16,
    g: tl.uint32,
    h: tl.uint64,
):
    tl.store(out_ptr + 0, a.to(tl.int64))
    tl.store(out_ptr + 1, b.to(tl.int64))
    tl.store(out_ptr + 2, c.to(tl.int64))
    tl.store(out_ptr + 3, d)
    tl.store(out_ptr + 4, e.to(tl.int64))
    tl.store(out_ptr + 5, f.to(tl.int64))
    tl.store(out_ptr + 6, g.to(tl.int64))
    tl.store(out_ptr + 7, h.to(tl.int64))


# Triton 3.6 refuses to launch with a negative int8.
_INTS = (107, -300, -70000, -(2**40) - 3, 201, 60003, 2**31 + 5, 2**62 + 7)
CASES["integers of every width"] = Case(
    integers,
    "*i64:16, i8, i16, i32, i64, u8, u16, u32, u64",
    "integers(Tensor x, int a, int b, int c, int d, int e, int f, int g, int h) -> Tensor",
    {"x": "int64[8]", "out": "int64[8]"},
    lambda: (random(8, dtype=torch.int64), *_INTS),
    lambda out, x, *numbers: ((1,), (out, *numbers)),
    {"out_ptr": "out"},
    1,
)


@triton.jit
def floats(out_ptr, a: tl.float16, b: tl.bfloat16, c: tl.float32, d: tl.float64):
    tl.store(out_ptr + 0, a.to(tl.float64))
    tl.store(out_ptr + 1, b.to(tl.float64))
    tl.store(out_ptr + 2, c.to(tl.float64))
    tl.store(out_ptr + 3, d)


CASES["floats of every width"] = Case(
    floats,
    "*fp64:16, fp16, bf16, fp32, fp64",
    "floats(Tensor x, float a, float b, float c, float d) -> Tensor",
    {"x": "float64[4]", "out": "float64[4]"},
    lambda: (random(4, dtype=torch.float64), 1 / 3, 2 / 3, 0.1, 0.1),
    lambda out, x, *numbers: ((1,), (out, *numbers)),
    {"out_ptr": "out"},
    1,
)


@triton.jit
def switch(x_ptr, out_ptr, on, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets)
    tl.store(out_ptr + offsets, tl.where(on, x, -x))


for _on in (True, False):
    CASES[f"a bool that is {_on}"] = Case(
        switch,
        "*fp32:16, *fp32:16, u1, 128",
        "switch(Tensor x, bool on) -> Tensor",
        {"x": "float32[128]", "out": "float32[128]"},
        lambda on=_on: (random(128), on),
        lambda out, x, on: ((1,), (x, out, on, 128)),
        {"x_ptr": "x", "out_ptr": "out"},
        1,
    )


@triton.jit
def scale_by(x_ptr, out_ptr, factor, shift, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets) * factor + shift)


CASES["an int that is 1, and a 64-bit one"] = Case(
    scale_by,
    "*i64:16, *i64:16, i32:1, i64, 128",
    "scale_by(Tensor x, int factor, int shift) -> Tensor",
    {"x": "int64[128]", "out": "int64[128]"},
    lambda: (random(128, dtype=torch.int64), 1, 2**40 + 1),
    lambda out, x, factor, shift: ((1,), (x, out, factor, shift, 128)),
    {"x_ptr": "x", "out_ptr": "out"},
    1,
)

# --- None, tuples, constants ---


@triton.jit
def add_bias(x_ptr, bias_ptr, out_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + offsets)
    tl.store(out_ptr + offsets, x)


for _with in (True, False):
    CASES["an optional tensor" if _with else "an optional tensor that is None"] = Case(
        add_bias,
        f"*fp32:16, {'*fp32:16' if _with else 'None'}, *fp32:16, 128",
        "add_bias(Tensor x, Tensor? bias=None) -> Tensor",
        {"x": "float32[128]", "bias": "float32[128]", "out": "float32[128]"},
        lambda given=_with: (random(128), random(128, seed=1) if given else None),
        lambda out, x, bias: ((1,), (x, bias, out, 128)),
        {"x_ptr": "x", "bias_ptr": "bias", "out_ptr": "out"},
        1,
    )


@triton.jit
def of_tuple(pair, strides, out_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    x = tl.load(pair[0] + offsets * strides[0])
    y = tl.load(pair[1] + offsets * strides[1])
    tl.store(out_ptr + offsets, x - y)


CASES["tuples"] = Case(
    of_tuple,
    "(*fp32:16, *fp32:16), (i32, 1), *fp32:16, 64",
    "of_tuple(Tensor x, Tensor y) -> Tensor",
    {"x": "float32[64] strided", "y": "float32[64] strided", "out": "float32[64]"},
    lambda: (random(64 * 3)[::3], random(64, seed=1)),
    lambda out, x, y: ((1,), ((x, y), (x.stride(0), y.stride(0)), out, 64)),
    {
        "pair": ("x", "y"),
        "strides": (lambda x: x.stride(0), lambda y: y.stride(0)),
        "out_ptr": "out",
    },
    1,
    out=lambda x, y: torch.empty(64, device=x.device),
)


@triton.jit
def activate(x_ptr, out_ptr, KIND: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets)
    if KIND == "exp":
        x = tl.exp(x)
    tl.store(out_ptr + offsets, x)


CASES["a string"] = Case(
    activate,
    "*fp32:16, *fp32:16, 'exp', 128",
    "activate(Tensor x, str kind) -> Tensor",
    {"x": "float32[128]", "out": "float32[128]"},
    lambda: (random(128), "exp"),
    lambda out, x, kind: ((1,), (x, out, kind, 128)),
    {"x_ptr": "x", "out_ptr": "out", "KIND": "kind"},
    1,
)


@triton.jit
def place(out_ptr, BLOCK: tl.constexpr):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at = (z * tl.num_programs(1) + y) * tl.num_programs(0) + x
    tl.store(out_ptr + at * BLOCK + tl.arange(0, BLOCK), x + 100 * y + 10000 * z)


CASES["a grid of three dims"] = Case(
    place,
    "*i32:16, 32",
    "place(Tensor x) -> Tensor",
    {"x": "int32[z, y, x_, 32]", "out": "int32[z, y, x_, 32]"},
    lambda: (random(3, 4, 5, 32, dtype=torch.int32),),
    lambda out, x: ((5, 4, 3), (out, 32)),
    {"out_ptr": "out"},
    (lambda x_: x_, lambda y: y, lambda z: z),
)

# --- reductions, products ---


@triton.jit
def softmax(x_ptr, out_ptr, stride, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + offsets, mask=offsets < columns, other=-float("inf"))
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(out_ptr + row * columns + offsets, e / tl.sum(e, axis=0), mask=offsets < columns)


CASES["softmax"] = Case(
    softmax,
    "*fp32:16, *fp32:16, i32, i32, 1024",
    "softmax(Tensor x) -> Tensor",
    {"x": "float32[rows, columns] rows", "out": "float32[rows, columns]"},
    lambda: (random(33, 777),),
    lambda out, x: ((33,), (x, out, x.stride(0), 777, 1024)),
    {"x_ptr": "x", "out_ptr": "out", "stride": lambda x: x.stride(0)},
    lambda rows: rows,
    {"num_warps": 8},
)


@triton.jit
def matmul(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_bk,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    a_at = a_ptr + rows[:, None] * stride_am + ks[None, :]
    b_at = b_ptr + ks[:, None] * stride_bk + columns[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        a = tl.load(a_at, mask=(rows[:, None] < M) & (ks[None, :] + k < K), other=0.0)
        b = tl.load(b_at, mask=(ks[:, None] + k < K) & (columns[None, :] < N), other=0.0)
        total = tl.dot(a, b, total)
        a_at += BLOCK_K
        b_at += BLOCK_K * stride_bk
    inside = (rows[:, None] < M) & (columns[None, :] < N)
    at = c_ptr + rows[:, None] * N + columns[None, :]
    tl.store(at, total.to(c_ptr.dtype.element_ty), mask=inside)


def product(dtype: str, kind: str, block: tuple[int, int, int], **options: Any) -> Case:
    torch_dtype = getattr(torch, dtype)
    out = "float32" if "float8" in dtype else dtype
    m, n, k = 192, 256, 320
    names = ", ".join(str(size) for size in block)
    out_kind = "fp32" if "float8" in dtype else kind
    return Case(
        matmul,
        f"*{kind}:16, *{kind}:16, *{out_kind}:16, i32:16, i32:16, i32:16, i32:16, i32:16, {names}",
        "matmul(Tensor a, Tensor b) -> Tensor",
        {"a": f"{dtype}[M, K] rows", "b": f"{dtype}[K, N] rows", "out": f"{out}[M, N]"},
        lambda: (random(m, k).to(torch_dtype), random(k, n, seed=1).to(torch_dtype)),
        lambda c, a, b: (
            (cdiv(m, block[0]), cdiv(n, block[1])),
            (a, b, c, m, n, k, a.stride(0), b.stride(0), *block),
        ),
        {
            "a_ptr": "a",
            "b_ptr": "b",
            "c_ptr": "out",
            "stride_am": lambda a: a.stride(0),
            "stride_bk": lambda b: b.stride(0),
        },
        (
            lambda M, BLOCK_M: torch_cubin.cdiv(M, BLOCK_M),
            lambda N, BLOCK_N: torch_cubin.cdiv(N, BLOCK_N),
        ),
        options,
        out=lambda a, b: torch.empty(m, n, device=a.device, dtype=getattr(torch, out)),
        archs=("sm_90a",) if "float8" in dtype else ("sm_80", "sm_90a"),
    )


CASES["matmul fp16"] = product("float16", "fp16", (64, 64, 32))
CASES["matmul bf16, more than 48 KB"] = product(
    "bfloat16", "bf16", (128, 128, 64), num_warps=8, num_stages=4
)
CASES["matmul fp32"] = product("float32", "fp32", (32, 32, 32), num_stages=2)
CASES["matmul fp8"] = product("float8_e4m3fn", "fp8e4nv", (64, 64, 64))
CASES["matmul in clusters of 2"] = product(
    "float16", "fp16", (128, 64, 32), num_ctas=2, num_stages=2
)
CASES["matmul in clusters of 4"] = product(
    "float16", "fp16", (128, 128, 32), num_ctas=4, num_stages=2
)
CASES["matmul with at most 128 registers"] = product("float16", "fp16", (64, 64, 32), maxnreg=128)
for _name in ("matmul in clusters of 2", "matmul in clusters of 4"):
    CASES[_name] = dataclasses.replace(CASES[_name], archs=("sm_90a",))

# --- tensor descriptors ---


@triton.jit
def copy_tile(x, out_ptr, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    row, column = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    tile = x.load([row, column])
    rows = row + tl.arange(0, BLOCK_M)
    inside = column + tl.arange(0, BLOCK_N)
    at = out_ptr + rows[:, None] * columns + inside[None, :]
    tl.store(at, tile + 1, mask=inside[None, :] < columns)


def host_descriptor(tensor: torch.Tensor, block: list[int], **more: Any) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(tensor, block, **more)


def tiles(dtype: str, kind: str, columns: int, block: tuple[int, int], **more: Any) -> Case:
    m, n = 64, columns
    grid = (m // block[0], cdiv(n, block[1]))
    return Case(
        copy_tile,
        [f"tensordesc<{kind}[{block[0]},{block[1]}]>", f"*{kind}:16", "i32:16", *block],
        "copy_tile(Tensor x) -> Tensor",
        {"x": f"{dtype}[m, columns] rows", "out": f"{dtype}[m, columns]"},
        lambda: (random(m, 2 * n, dtype=getattr(torch, dtype))[:, :n],),
        lambda out, x: (grid, (host_descriptor(x, list(block), **more), out, n, *block)),
        {"x": tct.descriptor("x", **more), "out_ptr": "out"},
        (lambda m, BLOCK_M: m // BLOCK_M,
         lambda columns, BLOCK_N: torch_cubin.cdiv(columns, BLOCK_N)),
        out=lambda x: torch.empty(m, n, device=x.device, dtype=x.dtype),
        least=(3, 5) if more else (3, 4),
    )  # fmt: skip


CASES["a host descriptor fp16"] = tiles("float16", "fp16", 144, (32, 64))
CASES["a host descriptor fp32"] = tiles("float32", "fp32", 80, (32, 32))
CASES["a host descriptor bf16, narrow"] = tiles("bfloat16", "bf16", 48, (64, 16))
CASES["a host descriptor int8"] = tiles("int8", "i8", 128, (32, 64))
CASES["a host descriptor int32"] = tiles("int32", "i32", 64, (32, 32))
CASES["a host descriptor padded with NaN"] = tiles("float32", "fp32", 80, (32, 32), padding="nan")


@triton.jit
def described_matmul(
    a, b, c, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    row, column = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        total = tl.dot(a.load([row, k]), b.load([column, k]).T, total)
    c.store([row, column], total.to(tl.float16))


@triton.jit
def specialised_matmul(
    a, b, c, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    row, column = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in tl.range(0, K, BLOCK_K, warp_specialize=True):
        total = tl.dot(a.load([row, k]), b.load([column, k]).T, total)
    c.store([row, column], total.to(tl.float16))


@triton.jit
def halved_matmul(
    a, b, c, K, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """With 128 rows and 4 warps, Triton 3.6 makes a kernel of it that never ends."""
    row, column = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in tl.range(0, K, BLOCK_K, warp_specialize=True):
        total = tl.dot(a.load([row, k]), b.load([column, k]).T, total)
    at = (row + tl.arange(0, BLOCK_M))[:, None] * N + (column + tl.arange(0, BLOCK_N))[None, :]
    tl.store(c + at, total.to(tl.float16))


def described(kernel: Any, block: tuple[int, int, int], **options: Any) -> Case:
    m, n, k = 256, 256, 512
    shapes = {"a": (block[0], block[2]), "b": (block[1], block[2]), "c": (block[0], block[1])}
    types = [f"tensordesc<fp16[{x},{y}]>" for x, y in shapes.values()]
    return Case(
        kernel,
        [*types, "i32:16", *block],
        "matmul(Tensor a, Tensor b) -> Tensor",
        {"a": "float16[M, K]", "b": "float16[N, K]", "out": "float16[M, N]"},
        lambda: (random(m, k, dtype=torch.float16), random(n, k, dtype=torch.float16, seed=1)),
        lambda out, a, b: (
            (m // block[0], n // block[1]),
            (*(host_descriptor(t, list(s)) for t, s in zip((a, b, out), shapes.values(),
               strict=True)), k, *block),
        ),
        {"c": "out"},
        (lambda M, BLOCK_M: M // BLOCK_M, lambda N, BLOCK_N: N // BLOCK_N),
        options,
        out=lambda a, b: torch.empty(m, n, device=a.device, dtype=a.dtype),
    )  # fmt: skip


CASES["matmul of host descriptors"] = described(described_matmul, (128, 128, 64))
CASES["matmul of specialised warps"] = dataclasses.replace(
    described(specialised_matmul, (64, 128, 64), num_stages=3), archs=("sm_90a",), least=(3, 6)
)


@triton.jit
def device_descriptor(x_ptr, out_ptr, rows, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, [rows, columns], [columns, 1], [BLOCK_M, BLOCK_N])
    out = tl.make_tensor_descriptor(out_ptr, [rows, columns], [columns, 1], [BLOCK_M, BLOCK_N])
    at = [tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N]
    out.store(at, x.load(at) * 2)


CASES["descriptors made on the device, in scratch"] = Case(
    device_descriptor,
    "*fp32:16, *fp32:16, i32:16, i32:16, 32, 32",
    "device_descriptor(Tensor x) -> Tensor",
    {"x": "float32[rows, columns]", "out": "float32[rows, columns]"},
    lambda: (random(96, 80),),
    lambda out, x: ((3, 3), (x, out, 96, 80, 32, 32)),
    {"x_ptr": "x", "out_ptr": "out"},
    (lambda rows, BLOCK_M: torch_cubin.cdiv(rows, BLOCK_M),
     lambda columns, BLOCK_N: torch_cubin.cdiv(columns, BLOCK_N)),
)  # fmt: skip

# --- launch attributes ---


@triton.jit
def dependent(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    tl.extra.cuda.gdc_wait()
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.extra.cuda.gdc_launch_dependents()
    tl.store(out_ptr + offsets, x * 3, mask=offsets < n)


@triton.jit
def together(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=offsets < n) * 5, mask=offsets < n)


def attributes(kernel: Any, **options: Any) -> Case:
    n = 1000
    return Case(
        kernel,
        "*fp32:16, *fp32:16, i32, 256",
        f"{kernel.__name__}(Tensor x) -> Tensor",
        {"x": "float32[n]", "out": "float32[n]"},
        lambda: (random(n),),
        lambda out, x: ((cdiv(n, 256),), (x, out, n, 256)),
        {"x_ptr": "x", "out_ptr": "out"},
        lambda n, BLOCK: torch_cubin.cdiv(n, BLOCK),
        options,
        archs=("sm_90a",),
        least=(3, 5) if kernel is dependent else (3, 4),
    )


CASES["programmatic dependent launch"] = attributes(dependent, launch_pdl=True)
CASES["a cooperative grid"] = attributes(together, launch_cooperative_grid=True)
CASES["a dependent, cooperative grid"] = attributes(
    dependent, launch_pdl=True, launch_cooperative_grid=True
)

# --- changed arguments ---


@triton.jit
def accumulate(x_ptr, total_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n, other=0)
    tl.atomic_add(total_ptr, tl.sum(x, axis=0))


CASES["atomic sums into an argument"] = Case(
    accumulate,
    "*i32:16, *i32:16, i32, 256",
    "accumulate(Tensor x, Tensor(a!) total) -> ()",
    {"x": "int32[n]", "total": "int32[1]"},
    lambda: (random(5000, dtype=torch.int32), torch.zeros(1, dtype=torch.int32,
             device="cuda" if torch.cuda.is_available() else "cpu")),
    lambda out, x, total: ((cdiv(5000, 256),), (x, out, 5000, 256)),
    {"x_ptr": "x", "total_ptr": "total"},
    lambda n, BLOCK: torch_cubin.cdiv(n, BLOCK),
    out=lambda x, total: torch.zeros_like(total),
)  # fmt: skip


# --- what the cases show ---


def _args(entry: dict[str, Any], *kinds: str) -> bool:
    return all(any(argument[0] == kind for argument in entry["args"]) for kind in kinds)


def _requires(entry: dict[str, Any], value: str, equals: Any) -> bool:
    return any(
        one.get("value", [""])[0] == value and one.get("equals") is equals
        for one in entry.get("requires", ())
    )


def _points_to(dtype: str) -> Callable[[Case, dict[str, Any]], bool]:
    return lambda case, entry: case.tensors["x" if "x" in case.tensors else "a"].startswith(dtype)


_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_FLOATS = ("float16", "bfloat16_truncated", "float32", "float64")
# What must be shown, by which cases, and by what the kernel's entry in the contract (for sm_90a)
# tells that the case is of that kind.
KINDS: dict[str, tuple[tuple[str, ...], Callable[[Case, dict[str, Any]], bool]]] = {
    "integers of every width": (
        ("integers of every width",), lambda case, entry: _args(entry, *_INTEGERS)),
    "floats of every width": (
        ("floats of every width",), lambda case, entry: _args(entry, *_FLOATS)),
    "bools": (
        ("a bool that is True", "a bool that is False"), lambda case, entry: _args(entry, "bool")),
    "None": (
        ("an optional tensor that is None",),
        lambda case, entry: _requires(entry, "defined", False)),
    "== 1": (
        ("an int that is 1, and a 64-bit one",), lambda case, entry: _requires(entry, "number", 1)),
    "tuples": (("tuples",), lambda case, entry: isinstance(case.args["pair"], tuple)),
    "scratch": (
        ("descriptors made on the device, in scratch",),
        lambda case, entry: _args(entry, "workspace")),
    "clusters": (
        ("matmul in clusters of 2", "matmul in clusters of 4"),
        lambda case, entry: entry["cluster"][0] == case.options["num_ctas"] > 1),
    "warp specialisation": (
        ("matmul of specialised warps",), lambda case, entry: entry["block"][0] > 32 * 4),
    "host descriptors": (
        ("a host descriptor fp16", "a host descriptor fp32", "a host descriptor bf16, narrow",
         "a host descriptor int8", "a host descriptor int32", "matmul of host descriptors",
         "a host descriptor padded with NaN"),
        lambda case, entry: _args(entry, "tensor_map")),
    "device descriptors": (
        ("descriptors made on the device, in scratch",),
        lambda case, entry: "make_tensor_descriptor" in inspect.getsource(case.kernel.fn)),
    "more than 48 KB": (
        ("matmul bf16, more than 48 KB", "matmul of host descriptors"),
        lambda case, entry: entry["shared_memory"] > 48 << 10),
    "programmatic dependent launch": (
        ("programmatic dependent launch", "a dependent, cooperative grid"),
        lambda case, entry: entry["programmatic_dependent_launch"]),
    "cooperative": (
        ("a cooperative grid", "a dependent, cooperative grid"),
        lambda case, entry: entry["cooperative"]),
    "fp16 arguments": (("add fp16", "matmul fp16"), _points_to("float16")),
    "bf16 arguments": (("add bf16", "matmul bf16, more than 48 KB"), _points_to("bfloat16")),
    "fp8 arguments": (
        ("fp8e4nv in memory", "fp8e5 in memory", "matmul fp8"), _points_to("float8")),
}  # fmt: skip
# Different binaries that are compared with Triton's launcher, bit for bit, at the least.
LEAST_KERNELS = 24


def different_kernels() -> set[str]:
    """The sha256 of the cubins for sm_90a of all cases that this Triton knows."""
    return {
        hashlib.sha256(kernel.cubin).hexdigest()
        for case in known().values()
        for kernel in kernels_of(case, ("sm_90a",))
    }


def known() -> dict[str, Case]:
    """The cases that this Triton compiles."""
    return {name: case for name, case in CASES.items() if case.least <= VERSION}


def kernels_of(case: Case, archs: tuple[str, ...] | None = None) -> list[tct.TritonKernel]:
    wanted = [arch for arch in case.archs if archs is None or arch in archs]
    return tct.compile(case.kernel, case.signature, wanted, **case.options)


def op_name(name: str) -> str:
    """A case's name as an op may have it."""
    return re.sub(r"\W+", "_", name)


def define(name: str, namespace: str, kernel: Any, **more: Any) -> torch_cubin.Op:
    """The op of a case, whose name in the namespace is the case's."""
    case = CASES[name]
    schema = f"{namespace}::{op_name(name)}({case.schema.partition('(')[2]}"
    return tct.define_op(
        schema, kernel=kernel, tensors=case.tensors, args=case.args, grid=case.grid, **more
    )
