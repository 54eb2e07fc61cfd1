"""Host cost of a launch from C++, in nanoseconds: compiles bench_cpp.cpp and runs it.

    python benchmarks/bench_cpp.py
    python benchmarks/bench_cpp.py --rounds 500 --tvm-ffi

--tvm-ffi adds the CubinKernel of the installed apache-tvm-ffi, which needs CUDA's headers and
libcudart (from CUDA_HOME).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import bench_launch
import common

from torch_cubin import cpp

TARGET = 60  # nanoseconds above the bare cuLaunchKernel loop


def tvm_ffi_flags() -> tuple[list[str], list[str]]:
    import tvm_ffi

    folder = Path(tvm_ffi.__file__).parent
    cuda = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    includes = [f"-isystem{folder / 'include'}", f"-isystem{cuda / 'include'}", "-DWITH_TVM_FFI"]
    links = [f"-L{folder / 'lib'}", "-ltvm_ffi", f"-Wl,-rpath,{folder / 'lib'}"]
    return includes, [*links, f"-L{cuda / 'lib64'}", "-lcudart", f"-Wl,-rpath,{cuda / 'lib64'}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--tvm-ffi", action="store_true")
    options = parser.parse_args()
    common.require_gpu()
    compiling, linking = tvm_ffi_flags() if options.tvm_ffi else ([], [])
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "bench_cpp"
        source = str(Path(__file__).with_name("bench_cpp.cpp"))
        command = ["c++", "-O2", *cpp.compile_flags(torch=False), *compiling, source]
        command += ["-o", str(program), *cpp.link_flags(torch=False), *linking]
        subprocess.run(command, check=True)
        print(f"target: at most {TARGET} ns over the bare loop", flush=True)
        run = [str(program), str(bench_launch.CUBIN), str(options.rounds)]
        return subprocess.run(run, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
