"""C++ programs on the stand-in driver, linked with libtorch_cubin as a user's would be; and all of
examples/cpp, whose launches are recorded and compared, and whose kernels the stand-in computes
(tests/fake_driver/fake_kernels.h), so that each program's own check of its numbers holds."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from built_once import BUILD, built_once
from fake_driver.build import build
from programs import output_of

import torch_cubin
from torch_cubin import cpp

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "torch_cubin"
SHARED = PACKAGE / "lib" / "libtorch_cubin.so"
CHECKS = ROOT / "tests" / "cpp" / "check_cubin.cpp"
DATA = ROOT / "tests" / "data"
EXAMPLES = ROOT / "examples" / "cpp"
KERNELS = EXAMPLES / "kernels"
TRITON = sorted(KERNELS.glob("triton_matmul.*.cubin"))
TORCH_LIBRARIES = Path(torch.__file__).parent / "lib"

pytestmark = [
    pytest.mark.skipif(not SHARED.is_file(), reason="not a built checkout"),
    # As in test_faults.py: libcudart does not accept the stand-in as a driver.
    pytest.mark.skipif(torch.version.cuda is not None, reason="needs a CPU build of torch"),
]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fake_driver")
    missing = build(path)
    if missing:
        pytest.skip(missing)
    return path


@pytest.fixture(scope="session")
def checks() -> Path:
    """The object, compiled once with AddressSanitizer, which also finds leaks."""
    digest = hashlib.sha256(CHECKS.read_bytes())
    for header in sorted((PACKAGE / "include" / "torch_cubin").glob("*.h")):
        digest.update(header.read_bytes())
    output = BUILD / f"check_cubin-{digest.hexdigest()[:16]}.o"
    with built_once(output) as unfinished:
        if unfinished is not None:
            command = ["g++", "-std=c++17", "-O0", "-g1", "-Wall", "-Wextra", "-Wpedantic"]
            command += ["-Werror", "-fsanitize=address", f"-I{PACKAGE / 'include'}"]
            subprocess.run([*command, "-c", str(CHECKS), "-o", str(unfinished)], check=True)
    return output


def run(program: Path, folder: Path, *arguments: str, **environment: str) -> str:
    return output_of(
        [str(program), *arguments],
        env={**os.environ, "LD_LIBRARY_PATH": str(folder), "FAKE_CUDA_DEVICES": "2", **environment},
        timeout=300,
    )


@pytest.mark.parametrize("linkage", ["shared", "static"])
def test_cubin_h(linkage: str, checks: Path, folder: Path, tmp_path: Path) -> None:
    """Launches as the driver gets them, two devices, bad input of every kind; nothing leaks."""
    link = [f"-L{SHARED.parent}", "-ltorch_cubin", f"-Wl,-rpath,{SHARED.parent}"]
    if linkage == "static":
        link = [str(SHARED.with_suffix(".a"))]
    program = tmp_path / "check_cubin"
    command = ["g++", "-fsanitize=address", str(checks), "-o", str(program), *link]
    subprocess.run([*command, "-ldl", "-pthread"], check=True)
    assert run(program, folder, str(DATA), ASAN_OPTIONS="detect_leaks=1") == "right\n"


@pytest.mark.skipif(shutil.which("ld") is None, reason="needs ld (binutils)")
@pytest.mark.parametrize("compiler", ["g++", "clang++-19"])  # the latter knows C23's #embed
def test_all_forms_of_embedding_an_image(compiler: str, tmp_path: Path, monkeypatch) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"needs {compiler}")
    monkeypatch.chdir(tmp_path)
    content = (DATA / "several.sm_90a.cuda130.cubin").read_bytes()
    Path("several.cubin").write_bytes(content)
    numbers = ", ".join(map(str, content))
    array = f"unsigned char several_cubin[] = {{ {numbers} }};\n"
    Path("xxd.h").write_text(f"{array}unsigned int several_cubin_len = {len(content)};\n")
    Path("list.h").write_text(numbers)
    padded = content + bytes(-len(content) % 8)
    words = struct.unpack(f"<{len(padded) // 8}Q", padded)
    Path("words.h").write_text(
        f"#include <cstdint>\nconst uint64_t words[] = {{ {', '.join(f'{w}u' for w in words)} }};\n"
    )
    Path("other.cpp").write_text(
        'extern "C" {\nextern const unsigned char other_cubin[];\n'
        "extern const unsigned other_cubin_len;\n"
        f"const unsigned char other_cubin[] = {{ {numbers} }};\n"
        f"const unsigned other_cubin_len = {len(content)};\n}}\n"
    )
    torch_cubin.embed.write_unit("embed.cpp", ["several.cubin"], name="by_embed")
    subprocess.run(["ld", "-r", "-b", "binary", "several.cubin", "-o", "binary.o"], check=True)
    command = [compiler, "-O1", *cpp.compile_flags(torch=False), "-I.", "--embed-dir=."]
    command = [flag for flag in command if compiler != "g++" or "embed-dir" not in flag]
    command += [str(ROOT / "tests" / "cpp" / "embedded.cpp"), "embed.cpp", "other.cpp", "binary.o"]
    # The object of ld -r asks for nothing of the stack, which newer linkers warn of.
    command += ["-Wl,-z,noexecstack", "-o", "embedded", *cpp.link_flags(torch=False)]
    subprocess.run(command, check=True)
    done = subprocess.run(["./embedded"], capture_output=True, text=True)
    assert done.stdout.count(": right\n") == 10, done.stdout
    assert ("#embed" in done.stdout) == (compiler != "g++")
    assert "WRONG" not in done.stdout
    assert done.returncode == 0


# --- the examples ---


@pytest.fixture(scope="session")
def examples() -> Path:
    """Built by their one CMake project, once for these sources and headers."""
    if shutil.which("cmake") is None:
        pytest.skip("needs CMake, found none")
    digest = hashlib.sha256(str(ROOT).encode())
    sources = [path for path in EXAMPLES.rglob("*") if path.is_file()]
    sources += [*(PACKAGE / "cmake").glob("*.*"), *(PACKAGE / "include").rglob("*.h")]
    for path in [*sorted(sources), SHARED.with_suffix(".a")]:
        digest.update(path.read_bytes())
    output = BUILD / f"examples_cpp-{digest.hexdigest()[:16]}"
    with built_once(output) as unfinished:
        if unfinished is not None:
            command = ["cmake", "-S", str(EXAMPLES), "-B", str(unfinished), "-G", "Ninja"]
            command += [f"-Dtorch_cubin_DIR={cpp.cmake_path()}"]
            command += [f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_BUILD_TYPE=Release"]
            command += ["-DCMAKE_CXX_FLAGS=-Wall -Wextra -Wpedantic -Werror"]
            command += ["-DCMAKE_CXX_FLAGS_RELEASE=-O0"]  # half the time
            environment = {
                **os.environ,
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            }
            for step in (command, ["cmake", "--build", str(unfinished), "-j2"]):
                output_of(step, env=environment)
    return output


def declarations(*files: Path) -> str:
    """FAKE_CUDA_DECLARE: the sizes of parameters, which a driver reads from the file."""
    kernels = {}
    for file in files:
        for image in torch_cubin.load(file, jit=True).images:
            for kernel in image.kernels:
                kernels[kernel.name] = ",".join(str(param.size) for param in kernel.params)
    return ";".join(f"{name}:{sizes}" for name, sizes in kernels.items())


def launches(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


CASES = {
    "vec_add_ptx": (
        [KERNELS / "vec_add.ptx"],
        [str(KERNELS / "vec_add.ptx")],
        [("_Z6vecAddPKfS0_Pfi", [391, 1, 1], [256, 1, 1], 0)],
    ),
    "matmul_cubin": (
        [KERNELS / "matmul.sm_90a.cubin"],
        [str(KERNELS / "matmul.sm_90a.cubin")],
        [("matmul_fp16", [8, 8, 1], [512, 1, 1], 0)],
    ),
    "matmul_triton": (
        TRITON,
        [str(KERNELS)],
        [("matmul_kernel", [8, 8, 1], [128, 1, 1], 24576)],
    ),
    "matmul_triton 23b912ac": (
        TRITON,
        [str(KERNELS), "23b912ac"],
        [("matmul_kernel", [4, 8, 1], [128, 1, 1], 36864)],
    ),
    "attention_array": (
        [EXAMPLES / "fmha_packed_sm90a.cubin.cpp"],
        [],
        [("fmha_packed", [20, 3, 2], [128, 1, 1], 0)] * 2,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_example(name: str, examples: Path, folder: Path, tmp_path: Path) -> None:
    files, arguments, expected = CASES[name]
    record = tmp_path / "launches"
    printed = run(
        examples / name.split()[0],
        folder,
        *arguments,
        FAKE_CUDA_COMPUTE="1",
        FAKE_CUDA_DECLARE=declarations(*files),
        FAKE_CUDA_LAUNCHES=str(record),
    )
    assert printed.count(": right\n") == len(expected)
    found = [(x["kernel"], x["grid"], x["block"], x["shared"]) for x in launches(record)]
    assert found == expected


def test_an_example_reports_missing_and_wrong_files(examples: Path, folder: Path) -> None:
    """A wrong hash, no file: the program's last words are the error."""
    for program, arguments, text in (
        ("matmul_triton", [str(KERNELS), "00000000"], "[no_kernel]: the family 'triton_matmul."),
        ("matmul_triton", [str(DATA), "6f267976"], "expected a member"),
        ("vec_add_ptx", ["/nowhere"], "[file]: file '/nowhere'"),
    ):
        environment = {**os.environ, "LD_LIBRARY_PATH": str(folder), "FAKE_CUDA_DEVICES": "1"}
        command = [str(examples / program), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 1
        assert text in done.stdout


def test_the_extension_from_python(examples: Path, folder: Path) -> None:
    code = f"""if True:
        import ctypes, struct, sys
        sys.path.insert(0, {str(ROOT / "tests")!r})
        ctypes.CDLL("libtorch_cuda.so", mode=ctypes.RTLD_GLOBAL)
        import torch
        from fake_driver import tensors
        from fake_driver.control import FakeDriver
        driver = FakeDriver()
        driver.declare_kernel("scale_add", [8, 8, 8, 4, 4])
        torch.ops.load_library({str(examples / "libcpp_example_ops.so")!r})
        torch.library.register_fake("cpp_example::scale_add", lambda x, y, s: torch.empty_like(x))
        x, y = tensors.empty(100, 3), tensors.empty(100, 3)
        for tensor, first in ((x, 1), (y, 1000)):
            floats = (ctypes.c_float * 300).from_address(tensor.data_ptr())
            floats[:] = [float(first + i) for i in range(300)]
        out = torch.ops.cpp_example.scale_add(x, y, 0.5)
        numbers = (ctypes.c_float * 300).from_address(out.data_ptr())
        assert list(numbers) == [0.5 * (1 + i) + 1000 + i for i in range(300)]
        (launch,) = driver.launches()
        assert (launch["grid"], launch["stream"]) == ([2, 1, 1], 0x5000), launch
        try:
            torch.ops.cpp_example.scale_add(x, tensors.empty(7), 1.0)
        except RuntimeError as error:
            assert "torch_cubin [input]: scale_add takes" in str(error), error
        with torch._subclasses.FakeTensorMode():
            fake = torch.empty(4, 5, device="cuda")
            assert torch.ops.cpp_example.scale_add(fake, fake, 1.0).shape == (4, 5)
        print("right")
    """
    assert run(Path(sys.executable), folder, "-c", code, FAKE_CUDA_COMPUTE="1") == "right\n"


def test_ops_of_a_program_without_python(examples: Path, folder: Path, tmp_path: Path) -> None:
    cubin = DATA / "vec_add.sm_90a.cuda124.cubin"
    vec_add = torch_cubin.define_op(
        "cpp_package::vec_add(Tensor x, Tensor y) -> Tensor",
        kernel=(cubin, "vec_add"),
        tensors=dict.fromkeys(("x", "y", "out"), "float32[*s]"),
        args=lambda x, y, out: (x, y, out, torch_cubin.int32(x.numel())),
        grid=lambda x: torch_cubin.cdiv(x.numel(), 256),
        block=256,
    )
    torch_cubin.save_package(tmp_path / "package", [vec_add])
    manifest = json.loads((PACKAGE / "cubins" / "manifest.json").read_text())
    declared = [declarations(cubin)]
    for kernel in manifest["kernels"]:
        sizes = ",".join(str(param["size"]) for param in kernel["params"])
        declared.append(f"{kernel['symbol']}:{sizes}")
    record = tmp_path / "launches"
    preload = [TORCH_LIBRARIES / "libtorch_cpu.so", folder / "libtorch_cuda.so"]
    preload += [folder / "fake_tensors.so"]
    run(
        examples / "run_ops",
        folder,
        str(tmp_path / "package"),
        "--launch-only",
        LD_LIBRARY_PATH=f"{folder}:{TORCH_LIBRARIES}",
        LD_PRELOAD=":".join(map(str, preload)),
        FAKE_CUDA_DECLARE=";".join(declared),
        FAKE_CUDA_LAUNCHES=str(record),
    )
    found = launches(record)
    assert found[0]["kernel"] == "vec_add"
    assert found[0]["grid"] == [12, 1, 1]
    assert {each["stream"] for each in found} == {0x5000}
    names = " ".join(each["kernel"] for each in found[1:])
    assert "matmul" in names
    assert "attention" in names
