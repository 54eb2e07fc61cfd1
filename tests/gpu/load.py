"""Load: threads that call ops, launch, load and unload kernels and replay graphs, for minutes.

    python tests/gpu/load.py [--threads 24] [--seconds 240] [--seed 0] [--only graph] [--json FILE]

Every result is compared with what it must be, bit by bit: operands are small integers. At the end
host memory, device memory and open files must be what they were at some time after the first fifth,
and no module of the threads be left. What PyTorch and the driver keep on the host for each graph of
their own is measured first, and allowed for each graph. Exit status 1 where anything differs.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import gc
import json
import os
import random
import sys
import threading
import time
import traceback
import weakref
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch_cubin  # noqa: E402

DATA = ROOT / "tests" / "data"
LAUNCH = DATA / "launch.sm_90a.cuda130.cubin"
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

# PyTorch's graphs are made by one thread at a time, as its documentation asks.
capturing = threading.Lock()


def add_op() -> torch_cubin.Op:
    return torch_cubin.define_op(
        "load_test::add(Tensor x, Tensor y) -> Tensor",
        kernel=f"{LAUNCH}:vec_add",
        tensors=dict.fromkeys(("x", "y", "out"), "float32[*s]"),
        args=lambda x, y, out: (x, y, out, torch_cubin.int32(x.numel())),
        grid=lambda x: torch_cubin.cdiv(x.numel(), 256),
        block=256,
    )


def integers(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(-3, 4, shape, device="cuda", generator=generator).to(dtype)


def same(out: torch.Tensor, expected: torch.Tensor) -> None:
    if not torch.equal(out, expected.to(out.dtype)):
        raise AssertionError(f"wrong: {tuple(out.shape)} {out.dtype}")


class Worker:
    """What a thread does, again and again, on a stream of its own."""

    def __init__(self, seed: int, op: torch_cubin.Op, only: list[str]) -> None:
        self.random = random.Random(seed)
        # PyTorch's own generator refuses to work beside a thread that captures.
        self.generator = torch.Generator("cuda").manual_seed(seed)
        self.op = op
        self.stream = torch.cuda.Stream()
        self.shared = torch_cubin.load(LAUNCH)
        self.actions = [self.product, self.linear, self.attention, self.declared]
        self.actions += [self.launch, self.load_and_unload, self.graph]
        if only:
            self.actions = [getattr(self, name) for name in only]
        self.done: collections.Counter[str] = collections.Counter()

    def size(self, most: int = 300) -> int:
        return self.random.choice((1, 7, 8, 16, 64, 128, 200, most))

    def product(self) -> None:
        dtype = self.random.choice(DTYPES)
        m, n, k = self.size(), self.size(), self.size()
        a = integers(self.generator, m, k, dtype=dtype)
        b = integers(self.generator, n, k, dtype=dtype).t()
        same(torch.ops.cubin.matmul(a, b), a.double() @ b.double())

    def linear(self) -> None:
        dtype = self.random.choice(DTYPES)
        x = integers(self.generator, self.size(), 64, dtype=dtype)
        w = integers(self.generator, 96, 64, dtype=dtype)
        bias = integers(self.generator, 96, dtype=dtype)
        same(torch.ops.cubin.linear(x, w, bias), F.linear(x.double(), w.double(), bias.double()))

    def attention(self) -> None:
        """Values that do not differ along the keys: any weights give them back."""
        dtype = self.random.choice(DTYPES[:2])
        length, heads, dim = self.size(), 2, self.random.choice((32, 64, 128))
        q, k = (integers(self.generator, 1, heads, length, dim, dtype=dtype) for _ in range(2))
        v = integers(self.generator, 1, heads, 1, dim, dtype=dtype).expand(-1, -1, length, -1)
        with torch.no_grad():
            out = torch.ops.cubin.scaled_dot_product_attention(
                q, k, v, is_causal=self.random.random() < 0.5
            )
        torch.testing.assert_close(out.float(), v.float(), rtol=1e-2, atol=1e-2)

    def declared(self) -> None:
        x, y = (integers(self.generator, self.size(10_000), dtype=torch.float32) for _ in range(2))
        n = min(x.numel(), y.numel())
        x, y = x[:n].contiguous(), y[:n].contiguous()
        same(self.op(x, y), x + y)

    def launch(self, module: torch_cubin.Module | None = None) -> None:
        x, y = (integers(self.generator, 3000, dtype=torch.float32) for _ in range(2))
        out = torch.empty_like(x)
        kernel = (module or self.shared)["vec_add"]
        kernel(x, y, out, 3000, grid=12, block=256)
        same(out, x + y)
        kernel = (module or self.shared)["reverse"]
        n = self.random.choice((1, 12_288, 20_000))
        x = integers(self.generator, n, dtype=torch.float32)
        out = torch.empty_like(x)
        kernel(x, out, n, grid=1, block=256, shared_memory=4 * n)
        same(out, x.flip(0))

    def load_and_unload(self) -> None:
        module = torch_cubin.load(LAUNCH)
        alive.add(module)
        self.launch(module)
        with capturing:  # unloading waits for the device, which a capture forbids
            if not module.unload():
                raise AssertionError("a module that no graph captured stayed loaded")

    def graph(self) -> None:
        a = integers(self.generator, 64, 64, dtype=torch.bfloat16)
        x, y = (integers(self.generator, 3000, dtype=torch.float32) for _ in range(2))
        out = torch.empty_like(x)
        torch.ops.cubin.matmul(a, a)
        graph = torch.cuda.CUDAGraph()
        with capturing:
            self.stream.synchronize()
            graph.capture_begin(capture_error_mode="thread_local")
            product = torch.ops.cubin.matmul(a, a)
            self.shared["vec_add"](x, y, out, 3000, grid=12, block=256)
            graph.capture_end()
        for _ in range(3):
            a.copy_(integers(self.generator, 64, 64, dtype=torch.bfloat16))
            x.copy_(integers(self.generator, 3000, dtype=torch.float32))
            graph.replay()
            same(product, a.double() @ a.double())
            same(out, x + y)

    def stock_graph(self) -> None:
        """A graph of PyTorch's own kernels."""
        a = integers(self.generator, 64, 64, dtype=torch.bfloat16)
        torch.matmul(a, a)
        graph = torch.cuda.CUDAGraph()
        with capturing:
            self.stream.synchronize()
            graph.capture_begin(capture_error_mode="thread_local")
            product = torch.matmul(a, a)
            product + 1
            graph.capture_end()
        graph.replay()

    def run(self, ends: list[float], rest: threading.Barrier, errors: list[str]) -> None:
        """One thread for all parts: what PyTorch keeps by thread, as cuBLAS's memory, stays."""
        for end in ends:
            try:
                with torch.cuda.stream(self.stream):
                    while time.monotonic() < end and not errors:
                        action = self.random.choice(self.actions)
                        action()
                        self.done[action.__name__] += 1
            except Exception:
                errors.append(traceback.format_exc())
            rest.wait()  # all are at rest
            rest.wait()  # what they use was looked at


alive: weakref.WeakSet = weakref.WeakSet()


class MallocUsage(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    ]  # fmt: skip


def allocated() -> float:
    """MiB that malloc has given out and not got back, in all arenas and by mmap."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = MallocUsage
    now = mallinfo2()
    return (now.uordblks + now.hblkhd) / 2**20


def usage() -> dict[str, float]:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return {
        "host MiB": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        "allocated MiB": allocated(),
        "device MiB": (total - free) / 2**20,
        "tensors MiB": torch.cuda.memory_allocated() / 2**20,
        "files": len(os.listdir("/proc/self/fd")),
        "modules": len(alive),
    }


def host_memory_of_a_graph(worker: Worker) -> float:
    """MiB that PyTorch and the driver keep for each graph that is made and freed."""
    count = 200
    before = 0.0
    with torch.cuda.stream(worker.stream):
        for index in range(2 * count):
            if index == count:  # everything that is allocated once exists now
                before = usage()["allocated MiB"]
            worker.stock_graph()
    return max(usage()["allocated MiB"] - before, 0) / count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=[], metavar="ACTION")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    op = add_op()
    errors: list[str] = []
    workers = [Worker(options.seed * 1000 + i, op, options.only) for i in range(options.threads)]
    seen = []
    a_graph = host_memory_of_a_graph(workers[0])
    ends = [time.monotonic() + tenth * options.seconds / 10 for tenth in range(2, 11)]
    rest = threading.Barrier(options.threads + 1)
    threads = [threading.Thread(target=w.run, args=(ends, rest, errors)) for w in workers]
    for thread in threads:
        thread.start()
    for _ in ends:
        rest.wait()
        graphs = sum(w.done["graph"] + w.done["stock_graph"] for w in workers)
        seen.append({**usage(), "graphs": graphs})
        rest.wait()
    for thread in threads:
        thread.join()
    done = sum((worker.done for worker in workers), collections.Counter())
    limits = {
        "host MiB": 64,
        "allocated MiB": 32,
        "device MiB": 8,
        "tensors MiB": 0.1,
        "files": 0,
        "modules": 0,
    }
    kept = a_graph * (seen[-1]["graphs"] - seen[0]["graphs"])
    limits["host MiB"] += kept
    limits["allocated MiB"] += kept
    # Other processes may start and end on the device meanwhile: compare with the minimum.
    least = {name: min(sample[name] for sample in seen) for name in limits}
    grown = {
        name: seen[-1][name] - least[name]
        for name, limit in limits.items()
        if seen[-1][name] - least[name] > limit
    }
    result = {
        "gpu": torch.cuda.get_device_name(),
        "threads": options.threads,
        "seconds": options.seconds,
        "seed": options.seed,
        "done": dict(done),
        "usage after each tenth from the second on": seen,
        "host MiB that PyTorch's own graphs leave, each": a_graph,
        "errors": errors,
        "grown": grown,
    }
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if errors or grown or len(alive) else 0


if __name__ == "__main__":
    sys.exit(main())
