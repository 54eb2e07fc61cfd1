"""Host cost of launching a custom kernel, in microseconds: torch_cubin and its peers.

    python benchmarks/bench_launch.py
    python benchmarks/bench_launch.py --markdown --json result.json

One kernel, vec_add of three tensors and an int (1,024 floats), from one cubin. Every contender that
can be imported takes part; missing ones are listed. A block of calls is submitted without waiting
(few enough that the driver's queue never fills); contenders are interleaved in every round, in a
random order; the median over the rounds is printed with its quartiles. A ratio is the median of
the per-round ratios, because the processor's clock may change during a run. The bare launch is a
cuLaunchKernel loop in C, in the same process, on the same stream. Each contender's result is
checked first.
"""

from __future__ import annotations

import ctypes
import importlib
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from operator import truediv
from pathlib import Path

import common
import torch
from bench_overhead import CALLS, ROUNDS, block_of, measure

CUBIN = common.ROOT / "tests" / "data" / "vec_add.sm_90a.cuda124.cubin"
N, BLOCK = 1024, 256
GRID = N // BLOCK
SOURCE = """extern "C" __global__ void vec_add(const float* x, const float* y, float* z, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) z[i] = x[i] + y[i];
}
"""
BARE = r"""
#include <dlfcn.h>
#include <stddef.h>
#include <time.h>

/* What a launch costs in the driver alone. */
typedef int (*Load)(void**, const void*);
typedef int (*Get)(void**, void*, const char*);
typedef int (*Launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                      void*, void**, void**);
static Launch launch;
static void* function;

int prepare(const void* image) {
  void* cuda = dlopen("libcuda.so.1", RTLD_NOW);
  void* module;
  if (!cuda) return -1;
  Load load = (Load)dlsym(cuda, "cuModuleLoadData");
  Get get = (Get)dlsym(cuda, "cuModuleGetFunction");
  launch = (Launch)dlsym(cuda, "cuLaunchKernel");
  if (!load || !get || !launch) return -2;
  int code = load(&module, image);
  return code ? code : get(&function, module, "vec_add");
}

/* Nanoseconds a launch, or a negative driver code. */
double loop(int count, void* stream, void* x, void* y, void* z, int n, int grid, int block) {
  struct timespec start, end;
  clock_gettime(CLOCK_MONOTONIC, &start);
  for (int i = 0; i < count; ++i) {
    void* parameters[] = {&x, &y, &z, &n};
    int code = launch(function, grid, 1, 1, block, 1, 1, 0, stream, parameters, NULL);
    if (code) return -code;
  }
  clock_gettime(CLOCK_MONOTONIC, &end);
  return ((end.tv_sec - start.tv_sec) * 1e9 + (end.tv_nsec - start.tv_nsec)) / count;
}
"""

Block = Callable[[], float]  # returns microseconds per call


class Data:
    def __init__(self) -> None:
        self.x, self.y = (torch.randn(N, device="cuda") for _ in range(2))
        self.z = torch.empty(N, device="cuda")
        self.image = CUBIN.read_bytes()

    def check(self, name: str, run: Callable[[], object]) -> None:
        self.z.fill_(torch.nan)
        run()
        torch.cuda.synchronize()
        if not torch.equal(self.z, self.x + self.y):
            raise RuntimeError(f"{name} gives a wrong result")


def bare(data: Data) -> Block:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise RuntimeError("no C compiler")
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "launch.c", Path(folder) / "launch.so"
        source.write_text(BARE)
        command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
        subprocess.run(command, check=True)
        launcher = ctypes.CDLL(str(library))
    pointer = ctypes.c_void_p
    launcher.prepare.argtypes = [ctypes.c_char_p]
    launcher.loop.restype = ctypes.c_double
    launcher.loop.argtypes = [
        *(ctypes.c_int, pointer, pointer, pointer, pointer),
        *(ctypes.c_int, ctypes.c_int, ctypes.c_int),
    ]
    code = launcher.prepare(data.image)
    if code:
        raise RuntimeError(f"the cubin could not be loaded: code {code}")
    pointers = [tensor.data_ptr() for tensor in (data.x, data.y, data.z)]

    def run(count: int = CALLS) -> float:
        stream = torch.cuda.current_stream().cuda_stream
        nanoseconds = launcher.loop(count, stream, *pointers, N, GRID, BLOCK)
        if nanoseconds < 0:
            raise RuntimeError(f"cuLaunchKernel failed with code {-nanoseconds:.0f}")
        return nanoseconds / 1e3

    data.check("the bare loop", lambda: run(1))
    return run


def ours(data: Data) -> Block:
    import torch_cubin

    kernel = torch_cubin.load(data.image)["vec_add"]
    x, y, z = data.x, data.y, data.z

    def call() -> None:
        kernel(x, y, z, N, grid=GRID, block=BLOCK)

    data.check("torch_cubin", call)
    return block_of(call, ())


def ours_plain(data: Data) -> Block:
    import torch_cubin

    launch = torch_cubin.load(data.image)["vec_add"]._launch_plainly
    x, y, z = data.x, data.y, data.z

    def call() -> None:
        launch(x, y, z, N, grid=GRID, block=BLOCK)

    data.check("torch_cubin without its extension", call)
    return block_of(call, ())


def cuda_core(data: Data, ready: bool) -> Block:
    """`ready`: pointers are ints made in advance; otherwise each call reads tensor.data_ptr()."""
    import numpy

    try:
        core = importlib.import_module("cuda.core")
        core.launch  # noqa: B018  (older releases: cuda.core.experimental)
    except AttributeError:
        core = importlib.import_module("cuda.core.experimental")
    device = core.Device(torch.cuda.current_device())
    device.set_current()
    stream = device.create_stream(torch.cuda.current_stream())
    kernel = core.ObjectCode.from_cubin(data.image).get_kernel("vec_add")
    config = core.LaunchConfig(grid=GRID, block=BLOCK)
    launch, x, y, z, n = core.launch, data.x, data.y, data.z, numpy.int32(N)
    pointers = [tensor.data_ptr() for tensor in (x, y, z)]
    px, py, pz = pointers

    def call_ready() -> None:
        launch(stream, config, kernel, px, py, pz, n)

    def call() -> None:
        launch(stream, config, kernel, x.data_ptr(), y.data_ptr(), z.data_ptr(), n)

    chosen = call_ready if ready else call
    data.check("cuda.core", chosen)
    return block_of(chosen, ())


def cupy_raw(data: Data) -> Block:
    import cupy
    import numpy

    kernel = cupy.RawModule(path=str(CUBIN)).get_function("vec_add")
    arrays = tuple(cupy.from_dlpack(tensor) for tensor in (data.x, data.y, data.z))
    arguments = (*arrays, numpy.int32(N))
    grid, block = (GRID,), (BLOCK,)

    def call() -> None:
        kernel(grid, block, arguments)

    with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
        data.check("CuPy", call)
    return block_of(call, (), lambda: cupy.cuda.ExternalStream(_stream()))


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def compile_kernel(data: Data) -> Block:
    kernel = torch.cuda._compile_kernel(SOURCE, "vec_add")
    arguments = [data.x, data.y, data.z, N]
    grid, block = (GRID, 1, 1), (BLOCK, 1, 1)

    def call() -> None:
        kernel(grid=grid, block=block, args=arguments)

    data.check("torch.cuda._compile_kernel", call)
    return block_of(call, ())


def triton_jit(data: Data) -> Block:
    import triton_vec_add

    kernel, grid = triton_vec_add.vec_add, (GRID,)
    x, y, z = data.x, data.y, data.z

    def call() -> None:
        kernel[grid](x, y, z, N, BLOCK=BLOCK)

    data.check("Triton", call)
    return block_of(call, ())


def torch_add(data: Data) -> Block:
    x, y, z = data.x, data.y, data.z

    def call() -> None:
        torch.add(x, y, out=z)

    return block_of(call, ())


CONTENDERS: dict[str, Callable[[Data], Block]] = {
    "bare cuLaunchKernel loop in C": bare,
    "torch_cubin": ours,
    "torch_cubin without its extension": ours_plain,
    "cuda.core, pointers ready": lambda data: cuda_core(data, True),
    "cuda.core, tensor.data_ptr()": lambda data: cuda_core(data, False),
    "CuPy RawModule, CuPy arrays": cupy_raw,
    "Triton JIT": triton_jit,
    "torch.cuda._compile_kernel": compile_kernel,
    "torch.add(out=), for orientation": torch_add,
}


def main() -> None:
    parser = common.parser(__doc__, markdown=True)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    common.begin("Host cost of one kernel launch: three tensors and an int")
    data = Data()
    blocks, missing = {}, {}
    for name, prepare in CONTENDERS.items():
        try:
            blocks[name] = prepare(data)
        except Exception as error:  # the peer is missing or of an incompatible version
            missing[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
    times = measure(blocks, options.rounds)
    # cuda.core takes addresses: to launch with tensors, as ours does, it must read each data_ptr().
    references = ("bare cuLaunchKernel loop in C", "cuda.core, tensor.data_ptr()")

    def ratio(name: str, reference: str) -> float:
        return statistics.median(map(truediv, times[name], times[reference]))

    def share(reference: str) -> Callable[[str, float], str]:
        return lambda name, _: f"{ratio(name, reference):.2f}" if reference in times else ""

    columns = dict(zip(("of bare", "of cuda.core"), map(share, references), strict=True))
    common.print_times("launch", times, columns, options.markdown)
    for name, reason in missing.items():
        print(f"not measured: {name} ({reason})")
    for reference, target in zip(references, (1.7, 0.85), strict=True):
        if reference in times and "torch_cubin" in times:
            value = ratio("torch_cubin", reference)
            common.print_target(f"torch_cubin / {reference}", value, target)
    common.write_json(options.json, {"microseconds": times, "missing": missing})


if __name__ == "__main__":
    main()
