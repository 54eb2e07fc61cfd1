"""Builds torch_cubin: the library torch_cubin/_C.so, the kernel package torch_cubin/cubins, the
optional extension module torch_cubin/_launch.abi3.so for faster kernel calls from Python, and, from
the same objects, torch_cubin/lib/libtorch_cubin.so and .a for C++ programs without torch.

    pip install --no-build-isolation .        (or -e .)

Needs torch, nlohmann-json, a C++ compiler and a CUDA compiler (csrc/kernels/build/toolkit.py says
where it looks), no GPU. The library uses PyTorch's stable ABI and links neither CUDA nor Python, so
one wheel, tagged py3-none-<platform>, serves every torch from TORCH_MIN on.

Environment: TORCH_CUBIN_ARCHS (architectures of the kernels, or "all"; default: those of this
machine's GPUs, all without a GPU), MAX_JOBS (compilers at a time, default one more than processors;
half of them compile C++ until that is done), TORCH_CUBIN_SKIP_KERNELS=1 (do not build
torch_cubin/cubins: only for work on the C++ in a checkout; a wheel then contains the kernels that
are there, or none).
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import setuptools
from setuptools import Distribution, setup

# The oldest supported torch. Determines the install requirement, the check below, and the macro
# that hides newer declarations from the compiler.
TORCH_MIN = (2, 11)
SETUPTOOLS_MIN = 77  # pyproject.toml's license field; its own bdist_wheel

ROOT = Path(__file__).resolve().parent
PACKAGE = ROOT / "torch_cubin"
GENERATED = ROOT / "build" / "generated"  # headers made from other sources
# The folders of csrc that libtorch_cubin is made of (tests/unit/layers.py: WITHOUT_TORCH).
WITHOUT_TORCH = ("cubin", "driver", "runtime", "package", "abi")


def torch_target_version(version: tuple[int, int]) -> str:
    """TORCH_TARGET_VERSION. NOTE: one byte per part: 2.11 is 0x020b; 0x0211 would be 2.17."""
    return f"0x{version[0]:02x}{version[1]:02x}{0:012x}"


def fail(subject: str, problem: str, expected: str, got: str, do: str) -> None:
    """Ends the build with one line, by the library's template for errors, and no traceback."""
    raise SystemExit(
        f"\ntorch_cubin [file]: {subject} {problem}: expected {expected}, got {got}. {do}\n"
    )


def check_setuptools() -> None:
    found = int(setuptools.__version__.split(".")[0])
    if found < SETUPTOOLS_MIN:
        fail(
            "setuptools",
            "is too old",
            f"setuptools >= {SETUPTOOLS_MIN}",
            setuptools.__version__,
            "Without build isolation it must be in the environment: pip install -U setuptools",
        )


def check_torch(version: bool = True) -> None:
    """Checks that torch is installed, and optionally its version, which takes seconds to import."""
    wanted = ".".join(map(str, TORCH_MIN))
    if importlib.util.find_spec("torch") is None:
        fail(
            "torch",
            "is missing",
            f"torch >= {wanted} in the environment that builds ({sys.executable})",
            "none",
            "Install torch, then build without isolation, so that the build sees it: "
            "pip install --no-build-isolation .",
        )
    if not version:
        return
    import torch

    found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if found < TORCH_MIN:
        fail("torch", "is too old", f"torch >= {wanted}", torch.__version__, "Install a newer one.")


def json_include(system: tuple[str, ...] = ("/usr/include", "/usr/local/include")) -> list[str]:
    """The folder with nlohmann/json.hpp (none if the compiler finds it by itself)."""
    spec = importlib.util.find_spec("nlohmann_json")
    if spec is not None and spec.origin:
        folder = Path(spec.origin).parent / "include"
        if (folder / "nlohmann" / "json.hpp").is_file():
            return [str(folder)]
    if any((Path(folder) / "nlohmann" / "json.hpp").is_file() for folder in system):
        return []
    fail(
        "nlohmann-json",
        "is missing",
        "nlohmann/json.hpp",
        f"none in {sys.prefix} or {' or '.join(system)}",
        f"Install it: {sys.executable} -m pip install nlohmann-json",
    )


def kernel_build():
    """csrc/kernels/build/build.py as a module: it is not part of the installed package."""
    path = ROOT / "csrc" / "kernels" / "build" / "build.py"
    spec = importlib.util.spec_from_file_location("torch_cubin_kernel_build", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_params_digests(kernels) -> None:
    """Writes the header of digests that csrc compares with the manifest, if it changed.

    A family's header is named "matmul", a kernel's own "matmul/sm90" (sm90_params.h).
    """
    digests = {}
    table = kernels.kernel_table
    for header in table.headers_of_params(ROOT / "csrc" / "kernels"):
        digests[table.params_key(header)] = table.params_digest(header)
    text = "".join(f'{{"{key}", "{digest}"}},\n' for key, digest in digests.items())
    kernels.replace_file(GENERATED / "params_digests.inc", text.encode())


def write_units(kernels, files: list[Path]) -> list[str]:
    """Writes a unity source for each folder of csrc and each family of ops, which includes the .cpp
    files of the folder, of a family those in its folders, too.

    The headers of torch and of JSON take the compiler seconds in each file: with units the library
    needs 75 s of processor time instead of 250. Names in anonymous namespaces must therefore be
    unique in a unit and differ from its headers' names.
    """
    parts: dict[str, list[Path]] = {}
    for path in files:
        part = path.relative_to(ROOT / "csrc")
        if part.suffix == ".cpp":
            parts.setdefault("_".join(part.parts[:-1][:2]) or "csrc", []).append(part)
    units = []
    for name, own in parts.items():
        text = "".join(f'#include "{part}"\n' for part in own)
        unit = GENERATED / "units" / f"all_of_{name}.cpp"
        kernels.replace_file(unit, text.encode())
        units.append(unit)
    # The longest first, so that two compilers end at about the same time.
    units.sort(key=lambda unit: unit.name != "all_of_declared.cpp")
    return [str(unit.relative_to(ROOT)) for unit in units]


def host_compiler() -> list[str]:
    """The C++ compiler, as PyTorch's build extension chooses it."""
    return (os.environ.get("CXX") or "c++").split()


def only_of_gcc(*options: str) -> list[str]:
    """The options if the compiler is GCC, else none."""
    version = subprocess.run([*host_compiler(), "--version"], capture_output=True, text=True)
    return list(options) if "Free Software Foundation" in version.stdout else []


def extension():
    from torch.utils.cpp_extension import CppExtension, include_paths

    kernels = kernel_build()
    try:
        cuda_include = kernels.cuda_toolkit.find_toolkit().include
    except kernels.BuildError as error:
        raise SystemExit(f"\n{error}\n") from None
    csrc = ROOT / "csrc"
    files = sorted(path for path in csrc.rglob("*") if csrc / "kernels" not in path.parents)
    torch_root = Path(include_paths()[0]).parent
    return CppExtension(
        "torch_cubin._C",
        write_units(kernels, files),
        depends=[
            *(str(path) for path in files if path.suffix in (".cpp", ".h", ".map")),
            *map(str, sorted((csrc / "kernels").rglob("*.h"))),
            str(PACKAGE / "include" / "torch_cubin" / "abi.h"),
            __file__,
        ],
        py_limited_api=True,  # keeps libtorch_python out of the link line
        # cuda.h for types only: csrc/driver finds every function at run time.
        include_dirs=[
            *map(str, (csrc, GENERATED, PACKAGE / "include")),
            *json_include(),
            str(cuda_include),
        ],
        extra_compile_args=[
            "-O2",
            "-g0",
            "-fno-plt",  # saves a jump in each call into torch, which shows in a launch's time
            "-fvisibility=hidden",
            "-fvisibility-inlines-hidden",
            # Otherwise static members of templates stay global in the static libtorch_cubin.
            *only_of_gcc("-fno-gnu-unique"),
            "-Wall",
            "-Wextra",
            "-Wno-unused-parameter",  # PyTorch's headers
            "-Wno-maybe-uninitialized",  # false warning of GCC 12 about std::optional<Tensor>
            "-Werror=return-type",
            "-Werror=unused-result",
            "-Werror=format",
            # NOTE: no -std: PyTorch's headers need C++17 or C++20 depending on their version, and
            # its build extension adds the right one only if none is given.
            f"-DTORCH_TARGET_VERSION={torch_target_version(TORCH_MIN)}",
            # Messages that contain __FILE__ must not reveal the path of this checkout or of torch.
            f"-ffile-prefix-map={ROOT}/=",
            f"-ffile-prefix-map={torch_root}/=torch/",
        ],
        extra_link_args=[
            "-Wl,--as-needed",
            "-Wl,-s",  # names of local symbols would be a tenth of the library
            "-Wl,-z,defs",
            f"-Wl,--version-script={csrc / 'exports.map'}",
            "-ldl",  # for build machines with glibc before 2.34
        ],
    )


def build_launch_extension(target: Path) -> None:
    """Builds csrc/python_*.c with the limited API: one file for every Python from 3.10 on.

    Separate from the library, which does not use Python. Skipped if Python's headers or a C
    compiler are missing: torch_cubin/_native/launcher.py works without it.
    """
    include = Path(sysconfig.get_paths()["include"])
    compiler = shutil.which(os.environ.get("CC", "").split(" ")[0] or "cc") or shutil.which("gcc")
    if compiler is None or not (include / "Python.h").is_file():
        missing = "a C compiler" if compiler is None else f"{include / 'Python.h'}"
        print(f"torch_cubin: {missing} is missing: built without {target.name}, calls of your own")
        print("kernels from Python take some microseconds longer")
        target.unlink(missing_ok=True)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    command = [compiler, "-std=c99", "-O2", "-g0", "-Wall", "-Wextra", "-fPIC", "-shared"]
    command += ["-fvisibility=hidden", "-Wno-missing-field-initializers", "-Wl,--as-needed"]
    command += ["-fno-plt", "-DPy_LIMITED_API=0x030A0000", f"-ffile-prefix-map={ROOT}/="]
    command += [f"-I{include}", f"-I{ROOT / 'csrc'}"]
    command += map(str, sorted((ROOT / "csrc").glob("python_*.c")))
    done = subprocess.run([*command, "-o", str(target)], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"\n{done.stderr}\n")


def build_cpp_library(objects: list[Path], folder: Path) -> None:
    """Links libtorch_cubin, shared and static, from objects of _C.so; compiles nothing.

    In the static library all symbols but the C ABI are local, so that a program can link it beside
    another library that contains a copy.
    """
    folder.mkdir(parents=True, exist_ok=True)
    exports = ROOT / "csrc" / "abi" / "exports.map"
    shared, static = folder / "libtorch_cubin.so", folder / "libtorch_cubin.a"
    joined = folder / "torch_cubin.o"
    files = [str(path) for path in objects]
    link = [*host_compiler(), "-shared", *files, "-o", str(shared), "-Wl,-soname,libtorch_cubin.so"]
    link += ["-Wl,--as-needed", "-Wl,-s", "-Wl,-z,defs", f"-Wl,--version-script={exports}", "-ldl"]
    static.unlink(missing_ok=True)  # ar would append to it
    try:
        for command in (
            link,
            ["ld", "-r", "--force-group-allocation", *files, "-o", str(joined)],
            ["objcopy", "--wildcard", "--keep-global-symbol=torch_cubin_v1_*", str(joined)],
            ["ar", "rcsD", str(static), str(joined)],
        ):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                raise SystemExit(f"\n{' '.join(command)}\n{done.stderr}\n")
    finally:
        joined.unlink(missing_ok=True)


def archive_kernels(source: Path, target: Path) -> None:
    """Writes archives of the cubins that the manifest lists: the folder may contain older ones."""
    import archives  # beside build.py, which kernel_build() puts on the path

    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    manifest = json.loads((source / "manifest.json").read_text())
    manifest = archives.write_archives(source, target, manifest)
    text = json.dumps(manifest, indent=1, sort_keys=True) + "\n"
    (target / "manifest.json").write_text(text)


def kernel_archs(kernels, log=print) -> tuple[str, ...]:
    """The archs in TORCH_CUBIN_ARCHS, else of this machine's GPUs, else all; prints which."""
    import machine_gpus  # beside build.py, which kernel_build() has put on the path

    every = ", ".join(kernels.DEFAULT_ARCHS)
    if os.environ.get("TORCH_CUBIN_ARCHS", "").strip():
        archs, why = kernels.choose_archs(None), "which TORCH_CUBIN_ARCHS names"
    elif found := tuple(machine_gpus.gpu_archs(log)):
        archs = found
        why = f"for this machine's GPUs alone; TORCH_CUBIN_ARCHS=all builds {every}"
    else:
        archs = kernels.DEFAULT_ARCHS
        why = f"all, as no GPU is here; TORCH_CUBIN_ARCHS={archs[0]} builds that one, much sooner"
    log(f"torch_cubin: building kernels for {', '.join(archs)} ({why})")
    return archs


def build_ext_class():
    from torch.utils.cpp_extension import BuildExtension

    class BuildLibraryAndKernels(BuildExtension):
        def run(self) -> None:
            write_params_digests(kernel_build())
            jobs = int(os.environ.get("MAX_JOBS") or 0)
            if os.environ.get("TORCH_CUBIN_SKIP_KERNELS") == "1":
                print("torch_cubin: kernels left as they are (TORCH_CUBIN_SKIP_KERNELS=1)")
                self.build_libraries(jobs or 2)  # a compiler takes up to 0.7 GB
            else:
                self.build_all(jobs)
            if not self.inplace and (PACKAGE / "cubins" / "manifest.json").is_file():
                # Not package_data: that is collected before the kernels are built.
                archive_kernels(PACKAGE / "cubins", Path(self.build_lib) / "torch_cubin" / "cubins")

        def build_all(self, jobs: int) -> None:
            kernels = kernel_build()

            def log(line: str) -> None:
                print(line, flush=True)  # ninja writes to the same pipe

            try:
                archs = kernel_archs(kernels, log)
                folder = PACKAGE / "cubins"
                kernels.build_package(folder, archs, jobs, log, other=self.build_libraries)
            except kernels.BuildError as error:
                raise SystemExit(f"\n{error}\n") from None

        def build_libraries(self, compilers: int) -> None:
            os.environ["MAX_JOBS"] = str(compilers)  # read by PyTorch's build extension
            try:
                super().run()
            except RuntimeError as error:  # from ninja: the compiler's output is printed already
                text = f"the C++ library is not built: {error}: above, behind 'FAILED:'"
                raise SystemExit(f"\ntorch_cubin [file]: {text}\n") from None
            package = PACKAGE if self.inplace else Path(self.build_lib) / "torch_cubin"
            build_launch_extension(package / "_launch.abi3.so")
            units = Path(self.build_temp) / GENERATED.relative_to(ROOT) / "units"
            objects = [units / f"all_of_{name}.o" for name in WITHOUT_TORCH]
            build_cpp_library(objects, package / "lib")

    return BuildLibraryAndKernels.with_options(no_python_abi_suffix=True)


def partial_build_number(manifest: Path) -> str | None:
    """The build number of a wheel without the kernels of every architecture, as in "0sm90a"."""
    if not manifest.is_file():
        return None
    kernels = json.loads(manifest.read_text())["kernels"]
    archs = sorted({kernel["file"].split("/")[0] for kernel in kernels})
    if set(archs) >= set(kernel_build().DEFAULT_ARCHS):
        return None
    return "0" + "".join(archs).replace("_", "")


def bdist_wheel_class():
    from setuptools.command.bdist_wheel import bdist_wheel

    class Wheel(bdist_wheel):
        """Tags py3-none-<platform>: the library uses no Python C API, so it serves any Python 3."""

        def get_tag(self) -> tuple[str, str, str]:
            # Determined after the build, from the kernels that the wheel contains.
            if self.build_number is None:
                self.build_number = partial_build_number(PACKAGE / "cubins" / "manifest.json")
            return "py3", "none", super().get_tag()[2]

    return Wheel


class BinaryDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True


def main() -> None:
    check_setuptools()
    options = {}
    if "dist_info" in sys.argv:  # pip's first call: name and requirements
        check_torch(version=False)
    elif "sdist" not in sys.argv:  # sdist needs no torch
        check_torch()
        options = {
            "ext_modules": [extension()],
            "cmdclass": {"bdist_wheel": bdist_wheel_class(), "build_ext": build_ext_class()},
        }
    setup(
        packages=setuptools.find_packages(include=["torch_cubin", "torch_cubin.*"]),
        py_modules=["torch_cubin_autoload"],
        entry_points={
            "torch.backends": ["torch_cubin = torch_cubin_autoload:load"],
            "pyinstaller40": ["hook-dirs = torch_cubin._pyinstaller:hook_dirs"],
        },
        package_data={
            "torch_cubin": [
                *("py.typed", "*.pyi"),
                *("cmake/*.cmake", "cmake/*.py", "include/torch_cubin/*.h", "lib/pkgconfig/*.pc"),
                "_drop_in/*.json",
            ]
        },
        install_requires=[f"torch>={TORCH_MIN[0]}.{TORCH_MIN[1]}"],
        distclass=BinaryDistribution,
        **options,
    )


# NOTE: tests load this file for its constants; pip runs it as __main__ too.
if __name__ == "__main__":
    main()
