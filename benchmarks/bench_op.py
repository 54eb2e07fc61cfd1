"""Host cost of a declared op, in microseconds, compared with the same op written by hand.

    python benchmarks/bench_op.py
    python benchmarks/bench_op.py --markdown --json result.json

z = x + y of 1,024 floats. The op of torch_cubin.define_op, an op in C++ by torch_cubin/torch.h and
handwritten_op.cpp (compiled first) do the same with the same cubin: check dtypes, shapes, layouts
and devices, allocate the output, launch on the current stream. For comparison: the kernel launched
directly into preallocated memory, the bare cuLaunchKernel loop in C, and torch.add. Contenders are
interleaved in every round, as in bench_overhead.py; each result is checked first.
"""

from __future__ import annotations

import ctypes
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import bench_launch
import common
import torch
from bench_overhead import ROUNDS, block_of, measure
from torch.utils.cpp_extension import include_paths, library_paths

TARGET = 0.5  # microseconds above the op written by hand
SETTINGS = {
    "no_grad": torch.no_grad,
    "grad mode": torch.enable_grad,
    "inference_mode": torch.inference_mode,
}


def declared() -> Callable:
    import torch_cubin

    return torch_cubin.define_op(
        "bench_op::vec_add(Tensor x, Tensor y) -> Tensor",
        kernel=f"{bench_launch.CUBIN}:vec_add",
        tensors={"x": "float32[*s]", "y": "float32[*s]", "out": "float32[*s]"},
        args=lambda x, y, out: (x, y, out, torch_cubin.int32(x.numel())),
        grid=lambda x, y: torch_cubin.cdiv(x.numel(), bench_launch.BLOCK),
        block=bench_launch.BLOCK,
    )


def handwritten() -> None:
    """Registers handwritten::vec_add."""
    (libraries, *_) = library_paths()
    source = Path(__file__).with_name("handwritten_op.cpp")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "handwritten.so"
        command = ["g++", "-std=c++20", "-O2", "-shared", "-fPIC", str(source), "-o", str(library)]
        command += ["-DTORCH_TARGET_VERSION=0x020b000000000000"]
        command += [word for path in include_paths() for word in ("-isystem", path)]
        command += [f"-L{libraries}", f"-Wl,-rpath,{libraries}"]
        subprocess.run([*command, "-ltorch_cuda", "-ltorch_cpu", "-lc10", "-ldl"], check=True)
        torch.ops.load_library(str(library))
        prepare = ctypes.CDLL(str(library)).prepare
    prepare.argtypes = [ctypes.c_char_p]
    code = prepare(bench_launch.CUBIN.read_bytes())
    if code:
        raise RuntimeError(f"the op written by hand could not load its kernel: code {code}")


def inline() -> Callable:
    """Returns the same op, written with torch_cubin/torch.h, with the same checks."""
    import torch_cubin

    source = """
        #include <torch_cubin/torch.h>
        using namespace torch_cubin;
        TORCH_CUBIN_EMBED(cubin);
        Tensor vec_add(const Tensor& x, const Tensor& y) {
          static const Kernel kernel = embedded(cubin)["vec_add"];
          const int64_t n = x.numel();
          if (x.scalar_type() != ScalarType::Float || y.scalar_type() != ScalarType::Float ||
              !x.sizes().equals(y.sizes())) {
            throw make_error("input", "vec_add", "takes two float32 tensors of one shape");
          }
          Tensor z = torch_cubin::empty_like(x);
          kernel(grid(cdiv(n, 256)), block(256), x, y, z, static_cast<int>(n));
          return z;
        }
    """
    ops = torch_cubin.cpp.load_inline(
        "bench_op_cpp", source, embed={"cubin": bench_launch.CUBIN}, functions=["vec_add"]
    )
    return ops.vec_add


def contenders(data: bench_launch.Data) -> dict[str, Callable[[], float]]:
    handwritten()
    declared()
    ops = {
        "torch.add": torch.add,
        "by hand": torch.ops.handwritten.vec_add,
        "declared": torch.ops.bench_op.vec_add,
        "by torch.h": inline(),
        "by hand, .default": torch.ops.handwritten.vec_add.default,
        "declared, .default": torch.ops.bench_op.vec_add.default,
    }
    blocks = {}
    for setting, context in SETTINGS.items():
        for name, op in ops.items():
            with context():
                if not torch.equal(op(data.x, data.y), data.x + data.y):
                    raise RuntimeError(f"{name} gives a wrong result")
            blocks[f"{setting}: {name}"] = block_of(op, (data.x, data.y), context)
    blocks["kernel(x, y, z, n, grid=, block=)"] = bench_launch.ours(data)
    blocks["bare cuLaunchKernel loop in C"] = bench_launch.bare(data)
    return blocks


def main() -> None:
    parser = common.parser(__doc__, markdown=True)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    common.begin("Host cost of an op of one kernel: two tensors in, one out")
    times = measure(contenders(bench_launch.Data()), options.rounds)
    median = {name: statistics.median(values) for name, values in times.items()}

    def over(name: str, middle: float) -> str:
        own = "declared" if "declared" in name else "by torch.h"
        by_hand = median.get(name.replace(own, "by hand")) if own in name else None
        return f"{middle - by_hand:+.2f}" if by_hand is not None else ""

    common.print_times("call", times, {"over by hand, us": over}, options.markdown)
    for setting in SETTINGS:
        difference = median[f"{setting}: declared"] - median[f"{setting}: by hand"]
        what = f"{setting}: declared - by hand"
        common.print_target(what, difference, TARGET, "{:+.2f} us")
    common.write_json(options.json, {"microseconds": times})


if __name__ == "__main__":
    main()
