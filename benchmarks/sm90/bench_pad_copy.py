"""The kernels of csrc/kernels/matmul/pad.cu: bit-exactness, and bandwidth compared with a copy.

python benchmarks/sm90/bench_pad_copy.py torch_cubin/cubins/sm_90a
"""

from __future__ import annotations

import ctypes
import random
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
import cubin_launch as driver


class Job(ctypes.Structure):
    _fields_ = [
        ("source", ctypes.c_void_p), ("to", ctypes.c_void_p),
        ("row_stride", ctypes.c_int64), ("batch_stride", ctypes.c_int64),
        ("to_row_stride", ctypes.c_int64), ("to_batch_stride", ctypes.c_int64),
        ("low", ctypes.c_void_p), ("high", ctypes.c_void_p),
        ("chunks", ctypes.c_uint32), ("rows", ctypes.c_uint32),
        ("columns", ctypes.c_uint32), ("total", ctypes.c_uint32),
    ]  # fmt: skip


class Params(ctypes.Structure):
    _fields_ = [("jobs", Job * 2), ("first_blocks", ctypes.c_uint32), ("pad", ctypes.c_uint32)]


def job(source: torch.Tensor, to: torch.Tensor) -> Job:
    """Both are [batch, rows, columns] with contiguous rows; the rows of `to` are aligned."""
    size = source.element_size()
    batch, rows, columns = source.shape
    chunks = to.stride(1) * size // 16
    last = sum((n - 1) * s for n, s in zip(source.shape, source.stride())) + 1
    return Job(
        source.data_ptr(), to.data_ptr(), source.stride(1), source.stride(0), chunks,
        to.stride(0) * size // 16, source.data_ptr(), source.data_ptr() + last * size, chunks, rows,
        columns, chunks * rows * batch,
    )  # fmt: skip


def prepare(function, first: Job, second: Job):
    blocks = [-(-j.total // 1024) for j in (first, second)]
    p = Params()
    p.jobs[0], p.jobs[1], p.first_blocks = first, second, blocks[0]
    return function.prepare(p, sum(blocks), 256)


def padded(like: torch.Tensor) -> torch.Tensor:
    """A NaN-filled buffer for a copy whose rows are multiples of 16 bytes."""
    step = 16 // like.element_size()
    batch, rows, columns = like.shape
    wide = -(-columns // step) * step
    return torch.full((batch, rows, wide), float("nan"), device="cuda", dtype=like.dtype)


def check(functions) -> None:
    for seed in range(200):
        r = random.Random(seed)
        dtype = r.choice([torch.bfloat16, torch.float32])
        pair = []
        for _ in range(2):
            batch, rows, columns = (
                r.choice([1, 3]),
                r.choice([1, 5, 77]),
                r.choice([1, 7, 63, 1001]),
            )
            pitch, gap, offset = columns + r.randrange(9), r.randrange(5), r.randrange(9)
            storage = torch.randn(offset + batch * (rows * pitch + gap), device="cuda").to(dtype)
            source = storage.as_strided(
                (batch, rows, columns), (rows * pitch + gap, pitch, 1), offset
            )
            pair.append((source, padded(source), storage))
        prepare(functions[dtype], job(*pair[0][:2]), job(*pair[1][:2]))()
        torch.cuda.synchronize()
        for source, to, _ in pair:
            columns = source.shape[2]
            assert torch.equal(to[:, :, :columns], source), (seed, dtype, source.shape)
            assert not to[:, :, columns:].any(), (seed, "tail")
    print("pad copy: 200 cases exact")


def time_us(run, bytes_moved: int) -> float:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            run()
    times = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / 4)
    return statistics.median(times)


def main() -> None:
    functions = {}
    for dtype in (torch.bfloat16, torch.float32):
        name = f"pad_matmul_{dtype.itemsize}_bytes"
        functions[dtype] = driver.Cubin(f"{sys.argv[1]}/{name}.cubin")[name]
    check(functions)
    for n, dtype in ((4097, torch.bfloat16), (8191, torch.bfloat16), (16385, torch.bfloat16),
                     (1001, torch.bfloat16), (8191, torch.float32)):  # fmt: skip
        a, b = (torch.randn(1, n, n, device="cuda").to(dtype) for _ in range(2))
        pa, pb = padded(a), padded(b)
        moved = 2 * (a.numel() + pa.numel()) * a.element_size()
        ours = time_us(prepare(functions[dtype], job(a, pa), job(b, pb)), moved)
        plain = a.clone(), b.clone()

        def copy(a=a, b=b, plain=plain):
            plain[0].copy_(a)
            plain[1].copy_(b)

        def torchs(a=a, b=b, pa=pa, pb=pb, n=n):
            pa[:, :, :n].copy_(a)
            pb[:, :, :n].copy_(b)

        rates = [moved / t / 1e3 for t in (ours, time_us(copy, moved), time_us(torchs, moved))]
        text = "ours {:.0f}, contiguous copies {:.0f}, torch's padding {:.0f} GB/s".format(*rates)
        print(f"{dtype} {n}x{n} twice: {ours:.1f} us: {text}", flush=True)


if __name__ == "__main__":
    main()
