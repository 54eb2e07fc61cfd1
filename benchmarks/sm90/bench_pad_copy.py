"""The kernels of csrc/kernels/matmul/pad.cu: bit-exactness, and bandwidth compared with a copy.

python benchmarks/sm90/bench_pad_copy.py torch_cubin/cubins/sm_90a
"""

from __future__ import annotations

import random
import statistics
import sys

import cubin_launch as driver
import torch
from kernel_params import PadParams


def job(source: torch.Tensor, to: torch.Tensor) -> dict[str, int]:
    """Both are [batch, rows, columns] with contiguous rows; the rows of `to` are aligned."""
    size = source.element_size()
    batch, rows, columns = source.shape
    chunks = to.stride(1) * size // 16
    last = sum((n - 1) * s for n, s in zip(source.shape, source.stride())) + 1
    return {
        "from": source.data_ptr(), "to": to.data_ptr(),
        "row_stride": source.stride(1), "batch_stride": source.stride(0),
        "to_row_stride": chunks, "to_batch_stride": to.stride(0) * size // 16,
        "low": source.data_ptr(), "high": source.data_ptr() + last * size,
        "chunks": chunks, "rows": rows, "columns": columns, "total": chunks * rows * batch,
    }  # fmt: skip


def prepare(function, *jobs: dict[str, int]):
    blocks = [-(-job["total"] // 1024) for job in jobs]
    p = PadParams(first_blocks=blocks[0])
    for place, job in zip(p.jobs, jobs, strict=True):
        for name, value in job.items():
            setattr(place, name, value)
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
