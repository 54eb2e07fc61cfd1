"""A library of attention kernels that a table describes becomes six ops.

    python examples/fmha_library.py

Vendors ship attention in this form: hundreds of kernels as arrays in C++ files, a table that
describes each kernel, and one struct by value for all. Here nvcc builds such a library from
fmha/fmha.cu, 78 kernels in 10 files; the ops are defined from the files, the table and the struct's
text only. Kernels of e4m3 write bfloat16, and therefore have ops of their own.
"""

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import support
import torch

import torch_cubin

SOURCES = Path(__file__).resolve().parent / "fmha"
LIBRARY = support.ROOT / "build" / "examples" / "fmha"
TYPES = {"BF16": torch.bfloat16, "FP16": torch.float16}
FP8 = {"E4M3": torch.float8_e4m3fn}  # Hopper only
WARPS, TILE = 4, 32  # as in fmha.cu
BYTES = {"bf16": 2, "fp16": 2, "e4m3": 1}


def make_library(
    dtypes=("bf16", "fp16", "e4m3"), head_sizes=(64, 128), archs=("sm_80", "sm_90a")
) -> Path:
    """The vendor's part: makes cubins as C++ arrays, and the table of their kernels."""
    LIBRARY.mkdir(parents=True, exist_ok=True)
    rows = []

    def compile_one(dtype: str, head: int, arch: str) -> list[str]:
        sm = arch.replace("_", "").rstrip("a")
        tma = ["-DTMA"] if sm == "sm90" else []
        name = f"fmha_{dtype}_d{head}_{sm}"
        path = LIBRARY / f"{name}.cubin"
        flags = [f"-DTYPE={dtype}", f"-DHEAD={head}", f"-DARCH={sm}", *tma]
        subprocess.run(["nvcc", "-cubin", f"-arch={arch}", "-std=c++17", *flags,
                        str(SOURCES / "fmha.cu"), "-o", str(path)], check=True)  # fmt: skip
        shared = WARPS * (2 * TILE * head * BYTES[dtype] + 8)
        data = path.read_bytes()
        path.unlink()
        text = f"unsigned char {name}_cubin[] = {{{','.join(map(hex, data))}}};\n"
        (LIBRARY / f"{name}.cubin.cpp").write_text(text)
        return [
            f'{{ DATA_TYPE_{dtype.upper()}, Layout::{layout.upper()}, {head}, {mask.upper()},'
            f' "fmha_{dtype}_{layout}_d{head}_{mask}_{sm}", {name}_cubin,'
            f" {shared if layout == 'kv' else 0}, {WARPS * 32} }},"
            for layout in ("qkv", "paged", *(["kv"] if tma else []))
            for mask in ("padding", "causal", "sliding")
        ]  # fmt: skip

    with ThreadPoolExecutor() as pool:
        jobs = [
            (t, d, a)
            for t in dtypes for d in head_sizes for a in archs if t != "e4m3" or a == "sm_90a"
        ]  # fmt: skip
        for found in pool.map(lambda job: compile_one(*job), jobs):
            rows += found
    (LIBRARY / "fmha_table.h").write_text(
        "struct FmhaKernel {\n  DataType dtype;\n  Layout layout;\n  unsigned int head_size;\n"
        "  Mask mask;\n  const char* name;\n  const unsigned char* cubin;\n"
        "  unsigned int shared_bytes, threads;\n};\n"
        "static const FmhaKernel kFmhaKernels[] = {\n" + "\n".join(rows) + "\n};\n"
    )
    return LIBRARY


PARAMS = torch_cubin.c_struct(SOURCES / "fmha_params.h", "FmhaParams")


def define(types, name, arguments, layout, head_size, query, params, **tensors):
    """Defines one op of a layout's kernels. `params` gives the fields specific to the layout."""
    suffix, out = ("_fp8", "bfloat16") if types is FP8 else ("", "T")
    return torch_cubin.define_op(
        f"fmha::{name}{suffix}({arguments}, str mask, float scale, int window=1) -> Tensor",
        kernels=torch_cubin.choices(
            f"{LIBRARY}/*.cubin.cpp", table=LIBRARY / "fmha_table.h",
            where=lambda row: row.layout == layout and row.dtype[10:] in types,
            when=WHEN[query], block=lambda row: row.threads,
            shared_memory=lambda row: row.shared_bytes,
        ),
        dtypes={"T": list(types.values())},
        tensors={**tensors, "out": f"{out}[t, h, {head_size}]"},
        scratch={"counter": "int32[1] zeroed"},
        args=params, grid=lambda multiprocessors: 4 * multiprocessors,
    )  # fmt: skip


def _when(x, mask, row):
    return (x.shape[x_dim(row)] == row.head_size) & (x.dtype == {**TYPES, **FP8}[row.dtype[10:]])


def x_dim(row):
    return 3 if row.layout == "QKV" else 2


WHEN = {
    "qkv": lambda qkv, mask, row: _when(qkv, mask, row) & (mask == row.mask.lower()),
    "q": lambda q, mask, row: _when(q, mask, row) & (mask == row.mask.lower()),
}


def define_ops(types=TYPES):
    packed = define(
        types, "packed", "Tensor qkv, Tensor cu_seqlens", "QKV", "d", "qkv",
        lambda qkv, cu_seqlens, out, counter, t, h, d, scale, window: torch_cubin.struct(
            PARAMS, q=qkv.select(1, 0), k=qkv.select(1, 1), v=qkv.select(1, 2), out=out,
            cu_seqlens_q=cu_seqlens, counter=counter, q_stride=3 * h * d, kv_stride=3 * h * d,
            total_q=t, heads=h, heads_kv=h, window=window, scale_bits=torch_cubin.float32(scale)),
        qkv="T[t, 3, h, d]", cu_seqlens="int32[b + 1]",
    )  # fmt: skip
    contiguous = define(
        types, "contiguous_kv", "Tensor q, Tensor kv, Tensor cu_seqlens, Tensor seqlens_kv", "KV",
        "d", "q",
        lambda q, kv, cu_seqlens, seqlens_kv, out, counter, t, h, d, h_kv, scale, window:
        torch_cubin.struct(
            PARAMS, kv_map=torch_cubin.TensorMap(kv, box=(1, TILE, 1, 1, d)), q=q, out=out,
            cu_seqlens_q=cu_seqlens, seqlens_kv=seqlens_kv, counter=counter, q_stride=h * d,
            total_q=t, heads=h, heads_kv=h_kv, window=window,
            scale_bits=torch_cubin.float32(scale)),
        q="T[t, h, d]", kv="T[b, s, 2, h_kv, d]", cu_seqlens="int32[b + 1]",
        seqlens_kv="int32[b]",
    )  # fmt: skip
    paged = define(
        types, "paged_kv", "Tensor q, Tensor pool, Tensor block_offsets, Tensor cu_seqlens,"
        " Tensor seqlens_kv", "PAGED", "d", "q",
        lambda q, pool, block_offsets, cu_seqlens, seqlens_kv, out, counter, t, h, d, h_kv, page, n,
        scale, window: torch_cubin.struct(
            PARAMS, q=q, k=pool.select(1, 0), v=pool.select(1, 1), out=out,
            cu_seqlens_q=cu_seqlens, seqlens_kv=seqlens_kv, block_offsets=block_offsets,
            counter=counter, q_stride=h * d, kv_stride=2 * h_kv * page * d, total_q=t, heads=h,
            heads_kv=h_kv, page_size=page, pages_per_sequence=n, window=window,
            scale_bits=torch_cubin.float32(scale)),
        q="T[t, h, d]", pool="T[pages, 2, h_kv, page, d]", block_offsets="int32[b, n]",
        cu_seqlens="int32[b + 1]", seqlens_kv="int32[b]",
    )  # fmt: skip
    return packed, contiguous, paged


def reference(q, k, v, mask, window):
    """One sequence by the formula in float64; tensors are (seqlen, heads, head_size)."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], 0) for x in (k, v))
    scores = q @ k.transpose(1, 2) * q.shape[2] ** -0.5
    rows = torch.arange(q.shape[1], device=q.device)[:, None] + k.shape[1] - q.shape[1]
    columns = torch.arange(k.shape[1], device=q.device)[None]
    seen = torch.ones_like(rows + columns, dtype=torch.bool)
    if mask != "padding":
        seen = columns <= rows
    if mask == "sliding":
        seen = seen & (columns > rows - window)
    return (scores.masked_fill(~seen, -torch.inf).softmax(2) @ v).transpose(0, 1)


def check(ops, dtype, head_size, mask) -> int:
    packed, contiguous, paged = ops
    heads, heads_kv, window, scale = 4, 2, 24, head_size**-0.5
    lengths_q, lengths_kv, page = [5, 70, 1, 33], [37, 70, 64, 100], 16

    def random(*shape):
        return torch.randn(shape, device="cuda").to(dtype)

    def starts(lengths):
        return torch.tensor([0, *lengths], device="cuda").cumsum(0).int()

    limit = 2e-3 if dtype == torch.float16 else 2e-2
    what = f"{str(dtype)[6:]} head_size {head_size} {mask}"
    qkv = random(sum(lengths_kv), 3, heads, head_size)
    found = packed(qkv, starts(lengths_kv), mask, scale, window)
    expected = [reference(*x.unbind(1), mask, window) for x in qkv.split(lengths_kv)]
    wrong = support.compare(f"packed QKV, {what}", found, torch.cat(expected), limit)

    q, kv = random(sum(lengths_q), heads, head_size), random(4, 100, 2, heads_kv, head_size)
    lengths = torch.tensor(lengths_kv, device="cuda").int()
    expected = torch.cat([
        reference(x, *kv[i, : lengths_kv[i]].unbind(1), mask, window)
        for i, x in enumerate(q.split(lengths_q))
    ])  # fmt: skip
    if torch.cuda.get_device_capability()[0] == 9:
        found = contiguous(q, kv, starts(lengths_q), lengths, mask, scale, window)
        wrong += support.compare(f"contiguous KV by TMA, {what}", found, expected, limit)

    pages = -(-100 // page)
    table = torch.randperm(4 * pages, device="cuda").int().view(4, pages)
    pool = torch.empty(4 * pages, 2, heads_kv, page, head_size, device="cuda")
    # In float32: PyTorch does not index tensors of 8-bit floats.
    padded = torch.nn.functional.pad(kv.float(), (0, 0, 0, 0, 0, 0, 0, pages * page - 100))
    pool[table.flatten().long()] = padded.view(4 * pages, page, 2, heads_kv, head_size).permute(
        0, 2, 3, 1, 4
    )
    found = paged(q, pool.to(dtype), table, starts(lengths_q), lengths, mask, scale, window)
    return wrong + support.compare(f"paged KV, {what}", found, expected, limit)


def main() -> int:
    table = LIBRARY / "fmha_table.h"
    if not table.is_file() or "E4M3" not in table.read_text():
        if shutil.which("nvcc") is None:
            print("No nvcc here: no library was made.")
            return 0
        make_library()
    ops, ops_fp8 = define_ops(), define_ops(FP8)
    for op in (*ops, *ops_fp8):
        print(f"{op.name}: {len(op.contract['kernels'])} kernels")
    support.require_gpu(8)
    hopper = torch.cuda.get_device_capability()[0] == 9
    wrong = sum(
        check(ops_fp8 if dtype in FP8.values() else ops, dtype, head_size, mask)
        for dtype in (*TYPES.values(), *(FP8.values() if hopper else ())) for head_size in (64, 128)
        for mask in ("padding", "causal", "sliding")
    )  # fmt: skip
    qkv = torch.zeros(4, 3, 4, 96, device="cuda", dtype=torch.float16)
    try:
        ops[0](qkv, torch.tensor([0, 4], device="cuda").int(), "causal", 1.0)
    except torch_cubin.Error as error:
        print(error)
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
