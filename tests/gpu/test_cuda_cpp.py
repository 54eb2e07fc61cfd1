"""C++ on the GPU: cubin.h on every device of the machine, and all of examples/cpp as a user runs
them: each compares its numbers with the host's, or PyTorch's, and ends with 0 if they are right."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from programs import output_of

import torch_cubin
from torch_cubin import cpp, embed

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES, DATA = ROOT / "examples" / "cpp", ROOT / "tests" / "data"
KERNELS = EXAMPLES / "kernels"
LIBRARY = Path(cpp.library_path()) / "libtorch_cubin.so"

pytestmark = [
    pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler"),
    pytest.mark.skipif(not LIBRARY.is_file(), reason="libtorch_cubin is not built"),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9,
        reason="the kernels of the examples are for compute capability 9.0",
    ),
]


def built(folder: Path, *sources: Path, torch: bool = False, options: tuple[str, ...] = ()) -> Path:
    output = folder / sources[0].stem
    command = ["c++", "-O1", *cpp.compile_flags(torch), *options, *map(str, sources)]
    subprocess.run([*command, "-o", str(output), *cpp.link_flags(torch)], check=True)
    return output


def run(program: Path, *arguments: object, **environment: str) -> str:
    return output_of(
        [str(program), *map(str, arguments)], env={**os.environ, **environment}, timeout=200
    )


def test_cubin_h_on_every_device(tmp_path: Path) -> None:
    program = built(tmp_path, ROOT / "tests" / "cpp" / "check_gpu.cpp")
    assert run(program, DATA) == f"{torch.cuda.device_count()} GPUs: right\n"


@pytest.mark.parametrize(
    ("name", "sources", "arguments", "count"),
    [
        ("vec_add_ptx", [], [KERNELS / "vec_add.ptx"], 1),
        ("matmul_cubin", [], [KERNELS / "matmul.sm_90a.cubin"], 1),
        ("matmul_triton", [], [KERNELS], 1),
        ("matmul_triton", [], [KERNELS, "23b912ac"], 1),
        ("attention_array", ["fmha_packed_sm90a.cubin.cpp"], [], 2),
    ],
    ids=["vec_add_ptx", "matmul_cubin", "matmul_triton", "matmul_triton_128", "attention_array"],
)
def test_example(name: str, sources: list, arguments: list, count: int, tmp_path: Path) -> None:
    program = built(tmp_path, EXAMPLES / f"{name}.cpp", *(EXAMPLES / source for source in sources))
    assert run(program, *arguments).count(": right\n") == count


def test_the_extension_under_torch_compile(tmp_path: Path) -> None:
    unit = tmp_path / "embedded.cpp"
    embed.write_unit(unit, [KERNELS / "scale_add.sm_90a.cubin"], name="scale_add_cubin")
    sources = (EXAMPLES / "extension" / "ops.cpp", unit)
    library = built(tmp_path, *sources, torch=True, options=("-shared", "-fPIC"))
    assert "right" in run(Path(sys.executable), EXAMPLES / "extension" / "use.py", library)


def test_ops_of_a_program_without_python(tmp_path: Path) -> None:
    vec_add = torch_cubin.define_op(
        "cpp_package::vec_add(Tensor x, Tensor y) -> Tensor",
        kernel=(DATA / "vec_add.sm_90a.cuda124.cubin", "vec_add"),
        tensors=dict.fromkeys(("x", "y", "out"), "float32[*s]"),
        args=lambda x, y, out: (x, y, out, torch_cubin.int32(x.numel())),
        grid=lambda x: torch_cubin.cdiv(x.numel(), 256),
        block=256,
    )
    torch_cubin.save_package(tmp_path / "package", [vec_add])
    libraries = Path(torch.__file__).parent / "lib"
    # Nothing refers to libtorch_cuda, which registers itself.
    options = ("-Wl,--no-as-needed", f"-L{libraries}", "-ltorch_cuda", f"-Wl,-rpath,{libraries}")
    program = built(tmp_path, EXAMPLES / "run_ops.cpp", torch=True, options=options)
    assert run(program, tmp_path / "package").count(": right\n") == 4


def test_load_inline(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TORCH_CUBIN_CACHE", str(tmp_path))
    source = """
        #include <torch_cubin/torch.h>
        using namespace torch_cubin;
        TORCH_CUBIN_EMBED(cubin);
        Tensor vec_add(Tensor x, Tensor y) {
          static auto kernel = embedded(cubin)["vec_add"];
          Tensor z = torch_cubin::empty_like(x);
          kernel(grid(cdiv(x.numel(), 256)), block(256), x, y, z, int(x.numel()));
          return z;
        }
    """
    cubin = DATA / "vec_add.sm_90a.cuda124.cubin"
    ops = cpp.load_inline("gpu_inline", source, embed={"cubin": cubin}, functions=["vec_add"])
    for device in range(torch.cuda.device_count()):
        x, y = (torch.randn(1001, device=f"cuda:{device}") for _ in range(2))
        torch.testing.assert_close(ops.vec_add(x, y), x + y)
    graph = torch.cuda.CUDAGraph()
    x, y = (torch.randn(1001, device="cuda") for _ in range(2))
    with torch.cuda.graph(graph):
        out = ops.vec_add(x, y)
    x.fill_(1)
    graph.replay()
    torch.testing.assert_close(out, y + 1)


def test_nvrtc_from_cpp(tmp_path: Path) -> None:
    """PyTorch's CUDA builds bring NVRTC."""
    libraries = Path(torch.__file__).parents[1] / "nvidia"
    found = sorted([*libraries.glob("*/lib/libnvrtc.so.1[0-9]")])
    if not found:
        pytest.skip("this PyTorch brings no NVRTC of its own")
    program = built(tmp_path, ROOT / "tests" / "cpp" / "compile.cpp")
    assert run(program, "gpu", TORCH_CUBIN_NVRTC=str(found[-1])).endswith("right\n")
