"""Host cost of a call, in microseconds: torch.ops.cubin.*, PyTorch's ops and a bare launch.

    python benchmarks/bench_overhead.py
    python benchmarks/bench_overhead.py --markdown --json result.json
    python benchmarks/bench_overhead.py --import-only      # without a GPU

64x64 bf16 operands on the GPU; attention has 4 such heads. A block of calls is submitted without
waiting (few enough that the driver's queue never fills), then the GPU is awaited outside the
measured time. All contenders are interleaved in every round, in a random order; the median over the
rounds is printed with its quartiles. The bare launch is a cuLaunchKernel loop in C, in the same
process, on the same stream.
"""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import common
import torch
import torch.nn.functional as F

CALLS = 400  # per block; the launch queue holds 1,024
ROUNDS = 40

LAUNCHER = r"""
#include <dlfcn.h>
#include <stddef.h>
#include <time.h>

/* The least a launch can cost: one empty kernel with a parameter struct of 256 bytes, as ours. */
typedef int (*Load)(void**, const void*);
typedef int (*Get)(void**, void*, const char*);
typedef int (*Launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                      void*, void**, void**);
static const char kernel_ptx[] =
    ".version 7.0\n.target sm_70\n.address_size 64\n"
    ".visible .entry empty(.param .align 8 .b8 p[256])\n{\n ret;\n}\n";
static Launch launch;
static void* function;

int prepare(void) {
  void* cuda = dlopen("libcuda.so.1", RTLD_NOW);
  void* module;
  if (!cuda) return -1;
  Load load = (Load)dlsym(cuda, "cuModuleLoadData");
  Get get = (Get)dlsym(cuda, "cuModuleGetFunction");
  launch = (Launch)dlsym(cuda, "cuLaunchKernel");
  if (!load || !get || !launch) return -2;
  int code = load(&module, kernel_ptx);
  return code ? code : get(&function, module, "empty");
}

/* Nanoseconds a launch, or a negative driver code. */
double loop(int count, void* stream) {
  char parameter[256] = {0};
  void* parameters[] = {parameter};
  struct timespec start, end;
  clock_gettime(CLOCK_MONOTONIC, &start);
  for (int i = 0; i < count; ++i) {
    int code = launch(function, 1, 1, 1, 256, 1, 1, 0, stream, parameters, NULL);
    if (code) return -code;
  }
  clock_gettime(CLOCK_MONOTONIC, &end);
  return ((end.tv_sec - start.tv_sec) * 1e9 + (end.tv_nsec - start.tv_nsec)) / count;
}
"""


def build_launcher() -> Callable[[], float] | None:
    """Returns a function that gives microseconds per bare launch; None without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("g++")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "launch.c", Path(folder) / "launch.so"
        source.write_text(LAUNCHER)
        command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
        subprocess.run(command, check=True)
        launcher = ctypes.CDLL(str(library))
    launcher.loop.restype = ctypes.c_double
    launcher.loop.argtypes = [ctypes.c_int, ctypes.c_void_p]
    code = launcher.prepare()
    if code:
        raise RuntimeError(f"the bare launcher could not load its kernel: code {code}")

    def block() -> float:
        nanoseconds = launcher.loop(CALLS, torch.cuda.current_stream().cuda_stream)
        if nanoseconds < 0:
            raise RuntimeError(f"cuLaunchKernel failed with code {-nanoseconds:.0f}")
        return nanoseconds / 1e3

    return block


def block_of(
    function: Callable, arguments: tuple, context: Callable = torch.no_grad
) -> Callable[[], float]:
    """Returns a function that runs a block of calls and gives microseconds per call."""

    def block() -> float:
        repeat = range(CALLS)
        with context():
            start = time.perf_counter()
            for _ in repeat:
                function(*arguments)
            return (time.perf_counter() - start) * 1e6 / CALLS

    return block


def contenders() -> dict[str, Callable[[], float]]:
    a, b = (torch.randn(64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    bias = torch.randn(64, device="cuda", dtype=torch.bfloat16)
    leaves = tuple(t.clone().requires_grad_() for t in (a, b))
    cubin = torch.ops.cubin
    matmuls = {
        "torch.matmul": torch.matmul,
        "torch.ops.cubin.matmul.default": cubin.matmul.default,
        "torch.ops.cubin.matmul": cubin.matmul,
        "torch.ops.cubin._matmul.default": cubin._matmul.default,
    }
    blocks = {f"no_grad: {name}": block_of(f, (a, b)) for name, f in matmuls.items()}
    for name, f in (("F.linear", F.linear), ("torch.ops.cubin.linear", cubin.linear.default)):
        blocks[f"no_grad: {name}"] = block_of(f, (a, b))
        blocks[f"no_grad: {name} + bias"] = block_of(f, (a, b, bias))
    settings = [
        ("inference_mode", torch.inference_mode, (a, b)),
        ("grad mode, no requires_grad", torch.enable_grad, (a, b)),
        ("grad mode, requires_grad", torch.enable_grad, leaves),
    ]
    for setting, context, arguments in settings:
        for name in ("torch.matmul", "torch.ops.cubin.matmul.default"):
            blocks[f"{setting}: {name}"] = block_of(matmuls[name], arguments, context)
    blocks.update(attention_contenders())
    bare = build_launcher()
    if bare is not None:
        blocks["bare cuLaunchKernel loop in C"] = bare
    return blocks


def attention_contenders() -> dict[str, Callable[[], float]]:
    """Attention of (1, 4, 64, 64), and PyTorch's with its default backend."""
    shape = (1, 4, 64, 64)
    plain = tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    leaves = tuple(t.clone().requires_grad_() for t in plain)
    settings = [
        ("no_grad", torch.no_grad, plain),
        ("inference_mode", torch.inference_mode, plain),
        ("grad mode, no requires_grad", torch.enable_grad, plain),
        ("grad mode, requires_grad", torch.enable_grad, leaves),
    ]
    blocks = {}
    for setting, context, arguments in settings:
        for name, function in (
            ("F.scaled_dot_product_attention", F.scaled_dot_product_attention),
            (
                "torch.ops.cubin.scaled_dot_product_attention.default",
                torch.ops.cubin.scaled_dot_product_attention.default,
            ),
        ):
            blocks[f"{setting}: {name}"] = block_of(function, arguments, context)
    return blocks


def family(name: str) -> str:
    """The group in which a contender is compared: its setting and the op."""
    for op in ("linear", "attention"):
        if op in name:
            return f"{name.split(': ')[0]}, {op}"
    return name.split(": ")[0]


def measure(blocks: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in blocks}
    order = list(blocks)
    shuffle = random.Random(0).shuffle
    for number in range(rounds + 3):
        shuffle(order)
        for name in order:
            torch.cuda.synchronize()
            value = blocks[name]()
            torch.cuda.synchronize()
            if number >= 3:  # the rounds before are warm-up
                times[name].append(value)
    return times


IMPORTS = 5


def imports() -> Iterator[tuple[float, float]]:
    """Milliseconds of `import torch_cubin` after `import torch`, in fresh processes: the time, and
    that of the CPU, which other processes lengthen less. One before them has compiled the modules:
    without its files an import takes twice as long."""
    paths = [str(common.ROOT)]
    code = (
        f"import sys, time; sys.path += {paths!r}; import torch; "
        "start, cpu = time.perf_counter(), time.process_time(); import torch_cubin; "
        "print((time.perf_counter() - start) * 1e3, (time.process_time() - cpu) * 1e3)"
    )
    command = [sys.executable, "-c", code]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    for number in range(IMPORTS + 1):
        child = subprocess.run(
            command, capture_output=True, text=True, check=True, env=environment
        )  # fmt: skip
        wall, cpu = map(float, child.stdout.split())
        print(f"import torch_cubin after torch: {wall:.1f} ms, of the CPU {cpu:.1f}", flush=True)
        if number > 0:
            yield wall, cpu


def measure_imports(write: Callable[[dict[str, list[float]]], None]) -> None:
    """Calls `write` with the times so far after every process."""
    times: dict[str, list[float]] = {"import_milliseconds": [], "import_cpu_milliseconds": []}
    for measured in imports():
        for column, value in zip(times.values(), measured, strict=True):
            column.append(value)
        write(times)
    wall, cpu = times.values()
    print(
        f"import torch_cubin after torch, of {len(wall)} fresh processes: "
        f"{statistics.median(wall):.1f} ms ({min(wall):.1f}-{max(wall):.1f}), of the CPU "
        f"{statistics.median(cpu):.1f} ms ({min(cpu):.1f}-{max(cpu):.1f})"
    )


def main() -> None:
    parser = common.parser(__doc__, markdown=True)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--import-only", action="store_true", help="the time of the import alone")
    options = parser.parse_args()
    if options.import_only:
        measure_imports(lambda found: common.write_json(options.json, found))
        return
    common.require_gpu()
    import torch_cubin  # noqa: F401  (registers the ops)

    common.print_machine("Host cost of a call, 64x64 bf16")
    times = measure(contenders(), options.rounds)
    theirs = (": torch.matmul", ": F.linear", ": F.scaled_dot_product_attention")
    baseline = {
        family(name): statistics.median(values)
        for name, values in times.items()
        if name.endswith(theirs)
    }

    def share(name: str, middle: float) -> str:
        key = family(name)
        return f"{middle / baseline[key]:.2f}" if key in baseline else ""

    common.print_times("call", times, {"of torch's": share}, options.markdown)
    measure_imports(lambda found: common.write_json(options.json, {"microseconds": times, **found}))


if __name__ == "__main__":
    main()
