"""The build and what comes out of it: one constant for torch, the wheel, the import, the tools.

`make test` builds first; the wheel test reuses those objects, and is skipped in a copy of the tree
that was not built where it lies (a GPU machine that was handed the library). Longer than files
should be: all tests share the one wheel, which takes seconds to make.
"""

from __future__ import annotations

import email
import hashlib
import importlib.util
import io
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from programs import output_of

ROOT = Path(__file__).resolve().parents[2]
CUBINS = ROOT / "torch_cubin" / "cubins"

built_here = pytest.mark.skipif(
    not list(ROOT.glob("build/temp.*")), reason="the library was not built in this folder"
)


def load_file(path: str) -> ModuleType:
    name = Path(path).stem
    spec = importlib.util.spec_from_file_location(f"under_test_{name}", ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def python(code: str, path: Path | None = None, **environment: str) -> subprocess.CompletedProcess:
    """Runs code in a fresh interpreter that finds torch_cubin in `path` (default: this tree)."""
    env = {**os.environ, "PYTHONPATH": str(path or ROOT), **environment}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, timeout=300)


# --- one constant for torch ---


def test_target_version_has_one_byte_per_part():
    setup = load_file("setup.py")
    assert setup.torch_target_version((2, 11)) == "0x020b000000000000"
    assert setup.torch_target_version((2, 9)) == "0x0209000000000000"


@built_here
def test_macro_is_the_constant():
    setup = load_file("setup.py")
    flags = (ROOT / "setup.py").read_text()
    assert flags.count("TORCH_TARGET_VERSION=") == 1
    (ninja, *_) = ROOT.glob("build/temp.*/build.ninja")
    used = set(re.findall(r"TORCH_TARGET_VERSION=(\w+)", ninja.read_text()))
    assert used == {setup.torch_target_version(setup.TORCH_MIN)}


def test_running_torch_is_new_enough():
    import torch

    setup = load_file("setup.py")
    assert tuple(map(int, torch.__version__.split(".")[:2])) >= setup.TORCH_MIN


# --- early errors ---


def test_missing_torch_says_no_build_isolation(tmp_path):
    site = Path(importlib.util.find_spec("setuptools").origin).parent.parent
    for pattern in ("setuptools", "setuptools-*.dist-info", "_distutils_hack"):
        for path in site.glob(pattern):
            (tmp_path / path.name).symlink_to(path)
    code = (
        f"import sys, runpy; sys.path[:0] = [{str(tmp_path)!r}]; sys.argv = ['setup.py', 'build']"
    )
    code += f"; runpy.run_path({str(ROOT / 'setup.py')!r}, run_name='__main__')"
    command = [sys.executable, "-I", "-S", "-c", code]  # -S: without site-packages
    answer = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert answer.returncode != 0
    assert "torch_cubin [file]: torch is missing" in answer.stderr
    assert "pip install --no-build-isolation ." in answer.stderr
    assert "Traceback" not in answer.stderr


def test_old_torch_is_refused(monkeypatch):
    setup = load_file("setup.py")
    monkeypatch.setattr(setup.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__="2.10.1+cpu"))
    with pytest.raises(SystemExit, match=r"\[file\]: torch is too old: expected torch >= 2\.11"):
        setup.check_torch()


def test_missing_json_header_says_how_to_get_it(monkeypatch, tmp_path):
    setup = load_file("setup.py")
    monkeypatch.setattr(setup.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install nlohmann-json"):
        setup.json_include(system=(str(tmp_path),))
    (tmp_path / "nlohmann").mkdir()
    (tmp_path / "nlohmann" / "json.hpp").touch()
    assert setup.json_include(system=(str(tmp_path),)) == []


def test_missing_compiler_says_how_to_get_one(monkeypatch):
    setup = load_file("setup.py")
    kernels = setup.kernel_build()

    def missing(*arguments, **keywords):
        raise kernels.BuildError("file", "the CUDA compiler", "is missing", do="Install one.")

    monkeypatch.setattr(kernels.cuda_toolkit, "find_toolkit", missing)
    monkeypatch.setattr(setup, "kernel_build", lambda: kernels)
    monkeypatch.setattr(setup, "json_include", list)
    with pytest.raises(SystemExit, match=r"\[file\]: the CUDA compiler is missing.*Install one"):
        setup.extension()


# --- the wheel ---


def test_a_wheel_for_some_architectures_says_which(tmp_path):
    setup, manifest = load_file("setup.py"), tmp_path / "manifest.json"
    assert setup.partial_build_number(manifest) is None
    every = setup.kernel_build().DEFAULT_ARCHS
    for archs, says in (
        (("sm_90a",), "0sm90a"),
        (("sm_90a", "sm_80"), "0sm80sm90a"),
        (every, None),
    ):
        kernels = [{"file": f"{arch}/matmul.cubin"} for arch in archs]
        manifest.write_text(json.dumps({"kernels": kernels}))
        assert setup.partial_build_number(manifest) == says


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The result of `make wheel` except for the tag: this tree, the existing kernels, `make`'s
    objects."""
    # A module that was removed since would still lie among what was collected for the last wheel.
    for lib in ROOT.glob("build/lib.*/torch_cubin"):
        shutil.rmtree(lib)
    folder = tmp_path_factory.mktemp("wheel")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # for ninja
    env = {**os.environ, "TORCH_CUBIN_SKIP_KERNELS": "1", "PATH": path}
    command = [sys.executable, "setup.py", "-q", "bdist_wheel", "--dist-dir", str(folder)]
    command += ["--compression", "stored"]  # compress_best() compresses it, once
    output_of(command, env=env, cwd=ROOT)
    (made,) = folder.glob("*.whl")
    load_file("tools/portability.py").compress_best(made)
    return made


@built_here
def test_wheel_is_for_every_python(wheel):
    # With some architectures alone, the name says which.
    assert re.fullmatch(r"torch_cubin-[\d.]+(-0sm\w+)?-py3-none-linux_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/WHEEL")]
        info = email.message_from_bytes(archive.read(name))
    assert info["Root-Is-Purelib"] == "false"
    assert info["Tag"].startswith("py3-none-linux_")


@built_here
def test_wheel_requires_the_torch_of_the_constant(wheel):
    major, minor = load_file("setup.py").TORCH_MIN
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    required = [need for need in metadata.get_all("Requires-Dist") if "; extra ==" not in need]
    assert required == [f"torch>={major}.{minor}"]
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "Apache-2.0"


@built_here
def test_wheel_holds_library_and_kernels_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        manifest = json.loads(archive.read("torch_cubin/cubins/manifest.json"))
        found, expected = {}, set()
        for each in manifest.pop("archives"):
            expected.add(f"torch_cubin/cubins/{each['file']}")
            joined = io.BytesIO(lzma.decompress(archive.read(f"torch_cubin/cubins/{each['file']}")))
            for file in each["files"]:
                data = joined.read(file["size"])
                found[file["file"]] = hashlib.sha256(data).hexdigest()
            assert joined.read() == b""
    assert manifest == json.loads((CUBINS / "manifest.json").read_text())
    assert found == {kernel["file"]: kernel["sha256"] for kernel in manifest["kernels"]}
    assert "torch_cubin/_C.so" in names
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "torch_cubin").rglob("*.py")}
    expected |= modules | {"torch_cubin/_C.so", "torch_cubin/cubins/manifest.json"}
    folder = ROOT / "torch_cubin"
    for_cpp = (
        *folder.glob("cmake/*.*"),
        *folder.glob("include/torch_cubin/*.h"),
        *folder.glob("lib/*/*"),
    )
    expected |= {str(path.relative_to(ROOT)) for path in for_cpp}
    expected |= {f"torch_cubin/lib/libtorch_cubin.{kind}" for kind in ("so", "a")}
    expected |= {"torch_cubin/ops.pyi", "torch_cubin/py.typed", "torch_cubin_autoload.py"}
    expected |= {f"torch_cubin/_drop_in/{name}.json" for name in ("audit_ops", "known_speed")}
    expected |= {"torch_cubin/_launch.abi3.so"}  # where Python's headers are, as they are here
    assert {name for name in names if ".dist-info/" not in name} == expected


@built_here
def test_wheel_is_as_small_as_it_should_be(wheel):
    """Each part, so that a wheel of some architectures differs from a complete one."""
    tool = load_file("tools/wheel_size.py")
    assert set(tool.KERNELS) == set(load_file("setup.py").kernel_build().DEFAULT_ARCHS)
    assert sum(tool.LIMITS.values()) == pytest.approx(tool.TOTAL)
    assert tool.LIMITS[tool.REST] > 0
    found = tool.sizes(wheel)
    # What no part has is the archive's end and its directory.
    assert 0 <= wheel.stat().st_size - sum(found.values()) < 1000
    limit = tool.KERNELS["sm_80"]
    assert tool.too_large({"sm_80": round(limit * tool.MB) + 1, "sm_86": 1, "sm_77": 1}) == [
        f"sm_80 takes {limit:.2f} MB, its limit is {limit:.2f}",
        "sm_77 takes 0.00 MB, its limit is 0.00",
    ]
    pytest.importorskip("deflate", reason="the limits are those of wheels packed by libdeflate")
    assert tool.too_large(found) == []


@built_here
def test_wheel_runs_from_any_folder(wheel, tmp_path, torch_python):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = """if True:
        import torch, torch_cubin
        print(torch_cubin.__file__)
        a, b = torch.randn(3, 4), torch.randn(4, 5)
        torch.testing.assert_close(torch.ops.cubin.matmul(a, b), a @ b)
    """
    path = [str(tmp_path), *(entry for entry in sys.path if "python3" in entry)]
    answer = torch_python.run(code, path=path, cwd="/")
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.startswith(str(tmp_path))


PROGRAM = """
#include <torch_cubin/cubin.h>
#include <cstdio>
TORCH_CUBIN_EMBED(my_cubin);
int main() {
  const auto module = torch_cubin::Module::embedded("my_cubin");
  std::printf("%s\\n", std::string(module["vec_add"].name()).c_str());
  try {
    module["vec_ad"];
  } catch (const torch_cubin::Error& error) {
    std::printf("%s\\n", error.tag());
  }
}
"""
CMAKE = """
cmake_minimum_required(VERSION 3.19)
project(fresh LANGUAGES CXX)
find_package(torch_cubin REQUIRED)
foreach(kind torch_cubin static)
  add_executable(with_${kind} main.cpp)
  target_link_libraries(with_${kind} PRIVATE torch_cubin::${kind})
  torch_cubin_embed(with_${kind} NAME my_cubin FILES one.cubin two.cubin)
endforeach()
"""
OPS = """
#include <torch_cubin/torch.h>
using namespace torch_cubin;
TORCH_CUBIN_EMBED(my_cubin);
Tensor vec_add(Tensor x, Tensor y) {
  static auto kernel = embedded(my_cubin)["vec_add"];
  Tensor z = torch_cubin::empty_like(x);
  kernel(grid(cdiv(x.numel(), 256)), block(256), x, y, z, int(x.numel()));
  return z;
}
STABLE_TORCH_LIBRARY(fresh, m) { m.def("vec_add(Tensor x, Tensor y) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(fresh, CUDA, m) { m.impl("vec_add", TORCH_BOX(&vec_add)); }
"""
SETUP = """
from setuptools import setup
from torch_cubin import cpp
embed = {"my_cubin": ["one.cubin", "two.cubin"]}
setup(
    name="fresh",
    version="1.0",
    packages=["fresh"],
    ext_modules=[cpp.Extension("fresh._ops", ["ops.cpp"], embed=embed)],
)
"""


@pytest.fixture
def fresh(wheel, tmp_path):
    """A folder outside of the clone, and a function that runs commands there on the wheel alone."""
    site, project = tmp_path / "site", tmp_path / "project"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (project / "fresh").mkdir(parents=True)
    cubins = sorted((ROOT / "tests" / "data").glob("vec_add.*.cubin"))
    for name, cubin in zip(("one.cubin", "two.cubin"), cubins, strict=False):
        shutil.copyfile(cubin, project / name)
    environment = {**os.environ, "PYTHONPATH": str(site)}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    def run(*command: object) -> str:
        return output_of(command, cwd=project, env=environment).strip()

    return project, run


@built_here
@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs CMake, found none")
def test_a_fresh_cmake_project_uses_the_wheel(fresh):
    project, run = fresh
    (project / "main.cpp").write_text(PROGRAM)
    (project / "CMakeLists.txt").write_text(CMAKE)
    folder = run(sys.executable, "-m", "torch_cubin", "cmake-dir")
    assert folder.startswith(str(project.parent))
    options = [f"-Dtorch_cubin_DIR={folder}", f"-DPython_EXECUTABLE={sys.executable}"]
    run("cmake", "-B", "build", "-G", "Ninja", *options)
    run("cmake", "--build", "build", "-j2")
    for kind in ("torch_cubin", "static"):
        assert run(f"build/with_{kind}") == "vec_add\nno_kernel"
    if shutil.which("pkg-config") is not None:
        found = f"--with-path={folder}/../lib/pkgconfig"
        flags = run("pkg-config", found, "--cflags", "--libs", "torch_cubin").split()
        unit = next((project / "build" / "torch_cubin").glob("with_static_*.cpp"))
        run("c++", "-std=c++17", "-O0", "main.cpp", unit, "-o", "by_pkg_config", *flags)
        assert run("./by_pkg_config") == "vec_add\nno_kernel"


@built_here
def test_a_fresh_setuptools_project_uses_the_wheel(fresh):
    project, run = fresh
    (project / "ops.cpp").write_text(OPS)
    (project / "setup.py").write_text(SETUP)
    (project / "fresh" / "__init__.py").write_text("")
    run("env", "CFLAGS=-O0", sys.executable, "setup.py", "-q", "build_ext", "--inplace")
    code = """if True:
        import torch
        torch.ops.load_library("fresh/_ops.abi3.so")
        print(torch.ops.fresh.vec_add.default._schema)
        try:
            torch.ops.fresh.vec_add(torch.zeros(3), torch.zeros(3))
        except NotImplementedError:
            print("CUDA alone")
        import torch_cubin
        print(torch_cubin.include_path())
    """
    schema, alone, include = run(sys.executable, "-c", code).splitlines()
    assert schema == "fresh::vec_add(Tensor x, Tensor y) -> Tensor"
    assert alone == "CUDA alone"
    assert include == str(project.parent / "site" / "torch_cubin" / "include")
    (image, *_) = json.loads(
        run(sys.executable, "-m", "torch_cubin", "inspect", "--json", "fresh/_ops.abi3.so")
    )["entries"]
    assert image["name"] == "one.cubin"


@built_here
def test_wheel_is_tagged_for_its_platform(wheel, tmp_path, monkeypatch):
    portability = load_file("tools/portability.py")

    def small_copy() -> Path:
        """Without what takes seconds to compress: the kernels, and the library for C++."""
        copy = tmp_path / wheel.name
        with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(copy, "w") as part:
            for info in whole.infolist():
                if not info.filename.startswith(("torch_cubin/cubins/", "torch_cubin/lib/")):
                    part.writestr(info, whole.read(info))
        return copy

    copy = small_copy()
    tagged = portability.tag(copy)
    assert "-py3-none-manylinux_2_28_" in tagged.name
    assert tagged.is_file()
    assert not copy.exists()

    monkeypatch.setitem(portability.LIMITS, "GLIBC", (2, 1))
    copy = small_copy()
    assert portability.tag(copy) == copy


# --- the import ---


def test_import_never_looks_for_the_driver():
    code = """if True:
        import sys
        import torch
        print("--- torch is imported ---", file=sys.stderr, flush=True)
        import torch_cubin
        print("--- torch_cubin is imported ---", file=sys.stderr, flush=True)
    """
    # The loader reports every library that is looked for, whether it exists or not.
    answer = python(code, LD_DEBUG="libs")
    assert answer.returncode == 0, answer.stderr[-2000:]
    during = answer.stderr.split("--- torch is imported ---")[1]
    during = during.split("--- torch_cubin is imported ---")[0]
    assert "torch_cubin/_C.so" in during, "the loader's report was not understood"
    assert re.findall(r"find library=(libcuda\S*|libnvidia\S*)", during) == []
    assert re.findall(r"calling init: (\S*libcuda\.so\S*)", during) == []


# --- the tools ---


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        *[("8.0", "sm_80"), ("8.6", "sm_86"), ("8.9", "sm_89"), ("9.0", "sm_90a")],
        *[("10.0", "sm_100a"), ("12.0", "sm_120a"), ("12.1", "sm_121a"), ("7.5", None)],
    ],
)
def test_kernels_for_a_gpu(capability, arch):
    load_file("tools/kernels.py")  # which puts csrc/kernels/build on the path
    import machine_gpus

    assert machine_gpus.arch_of(capability) == arch


def test_kernel_targets_add_to_existing_kernels(monkeypatch):
    kernels = load_file("tools/kernels.py")
    monkeypatch.setattr(kernels, "gpu_archs", lambda log: [])
    monkeypatch.setattr(kernels, "present_archs", lambda: ["sm_80"])
    monkeypatch.delenv("TORCH_CUBIN_ARCHS", raising=False)
    assert kernels.wanted_archs("demo") == ["sm_90a", "sm_80"]
    monkeypatch.setenv("TORCH_CUBIN_ARCHS", "sm_89")
    assert kernels.wanted_archs("demo") == ["sm_89"]


@pytest.mark.parametrize(
    ("variable", "gpus", "archs", "said"),
    [
        ("", ["9.0", "9.0"], ["sm_90a"], "for this machine's GPUs alone; TORCH_CUBIN_ARCHS=all"),
        ("", ["8.9", "12.0"], ["sm_89", "sm_120a"], "for this machine's GPUs alone"),
        ("", [], "all", "all, as no GPU is here"),
        ("", ["7.5"], "all", "all, as no GPU is here"),
        ("all", ["9.0"], "all", "which TORCH_CUBIN_ARCHS names"),
        ("sm_80", ["9.0"], ["sm_80"], "which TORCH_CUBIN_ARCHS names"),
    ],
)
def test_a_build_from_source_is_for_this_machine(
    monkeypatch, tmp_path, variable, gpus, archs, said
):
    setup = load_file("setup.py")
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\n" + "".join(f"echo {gpu}\n" for gpu in gpus))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("TORCH_CUBIN_ARCHS", variable)
    kernels, lines = setup.kernel_build(), []
    wanted = kernels.DEFAULT_ARCHS if archs == "all" else tuple(archs)
    assert setup.kernel_archs(kernels, lines.append) == wanted
    assert lines[-1].startswith(f"torch_cubin: building kernels for {', '.join(wanted)} (")
    assert said in lines[-1]


def test_a_wheel_is_complete():
    """What `make wheel` runs names all architectures, whatever GPU the machine has."""
    recipe = (ROOT / "Makefile").read_text().partition("\nwheel:")[2].partition("\nclean:")[0]
    assert 'TORCH_CUBIN_ARCHS="$${TORCH_CUBIN_ARCHS:-all}"' in recipe


def test_gpu_tests_run_side_by_side_where_they_can():
    tool = load_file("tools/gpu_tests.py")
    words = tool.command(16, [140_000], True, ["-v"])
    assert words[words.index("-n") + 1] == "14"
    assert words[-1] == "-v"
    words = tool.command(16, [80_000], True, [])
    assert words[words.index("-n") + 1] == "10"
    words = tool.command(32, [140_000, 80_000], True, [])
    assert words[words.index("-n") + 1] == "24"
    # NOTE: loadgroup was seen to group nothing with pytest 9, without a word.
    assert words[words.index("--dist") + 1] == "loadfile"
    assert "-n" not in tool.command(16, [140_000], False, [])
    assert "-n" not in tool.command(1, [140_000], True, [])


def test_requirements_are_pinned():
    environment = load_file("tools/environment.py")
    text = (ROOT / "requirements-dev.txt").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert len(environment.pins(text)) == len(lines)
    assert environment.torch_min() == load_file("setup.py").TORCH_MIN


@pytest.mark.skipif(
    not (ROOT / ".venv" / "ready").is_file() or not list(ROOT.glob("build/temp.*")),
    reason="this tree was not built by make",
)
def test_make_repeats_nothing():
    command = ["make", "--question", "environment", "torch_cubin/_C.so"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert answer.returncode == 0, "make would build again what it has just built"


# --- the tree ---


def tracked_files() -> list[str]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        answer = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    except (OSError, subprocess.SubprocessError):
        pytest.skip("not a git checkout")
    return [name for name in answer.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


def test_no_file_names_a_path_of_one_machine():
    pattern = re.compile(rb"(^|[^A-Za-z0-9_.])/(work|farm|root)/[a-z.]", re.M)
    names = [name for name in tracked_files() if not name.startswith(".scratch/")]
    assert [name for name in names if pattern.search((ROOT / name).read_bytes())] == []


def test_ci_is_executable():
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
