"""A model with a declared op, compiled by AOTInductor, run by a C++ program without Python.

    python examples/aoti_runner/run.py [FOLDER]

1. Here: define the op, save its package, export and compile a small model around it (model.pt2).
2. One g++ line builds runner.cpp with libtorch from the installed torch.
3. The program loads torch_cubin/_C.so, the package and the model, runs it on the GPU and compares.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

import support  # noqa: E402

import torch_cubin  # noqa: E402

CUBINS = sorted((support.ROOT / "tests" / "data").glob("vec_add.*.cubin"))
LIBRARY = Path(torch_cubin.__file__).with_name("_C.so")


def define() -> torch_cubin.Op:
    return torch_cubin.define_op(
        "aoti_runner::vec_add(Tensor x, Tensor y) -> Tensor",
        kernel=(CUBINS, "vec_add"),
        tensors={"x": "float32[*s]", "y": "float32[*s]", "out": "float32[*s]"},
        args=lambda x, y, out: (x, y, out, torch_cubin.int32(x.numel())),
        grid=lambda x: torch_cubin.cdiv(x.numel(), 256),
        block=256,
    )


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.gelu(self.linear(x))
        return torch.ops.aoti_runner.vec_add(hidden, x) * 2


def export(folder: Path) -> None:
    """Writes ops/, model.pt2, and an input with what PyTorch makes of it."""
    torch_cubin.save_package(folder / "ops", [define()], overwrite=True)
    torch.manual_seed(0)
    model = Model().cuda().eval()
    x = torch.randn(37, 64, device="cuda")
    with torch.no_grad():
        rows = torch.export.Dim("rows", min=2, max=4096)
        exported = torch.export.export(model, (x[:9].clone(),), dynamic_shapes={"x": {0: rows}})
        torch._inductor.aoti_compile_and_package(
            exported,
            package_path=str(folder / "model.pt2"),
            # For one model, precompiled headers take longer than they save.
            inductor_configs={"aot_inductor.precompile_headers": False},
        )
        torch.save(x.cpu(), folder / "input.pt")
        torch.save(model(x).cpu(), folder / "expected.pt")


def build(program: Path) -> subprocess.Popen:
    """Starts the compiler on runner.cpp, with headers and libraries of the installed torch."""
    from torch.utils.cpp_extension import include_paths, library_paths

    (libraries, *_) = library_paths()
    command = ["g++", "-std=c++20", "-O0", str(HERE / "runner.cpp"), "-o", str(program)]
    command += [word for path in include_paths() for word in ("-isystem", path)]
    command += [f"-L{libraries}", f"-Wl,-rpath,{libraries}"]
    # Nothing here refers to libtorch_cuda, which registers itself, or to libtorch: the model does.
    command += ["-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-ltorch_cuda", "-lc10", "-ldl"]
    print(" ".join(command), flush=True)
    return subprocess.Popen(command)


def main() -> int:
    support.require_gpu()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else name).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        program = folder / "runner"
        with build(program) as compiler:  # meanwhile:
            export(folder)
        if compiler.returncode != 0:
            return 1
        return subprocess.run([str(program), str(LIBRARY), str(folder)], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
