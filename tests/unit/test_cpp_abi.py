"""libtorch_cubin, which knows no torch: what it exports and needs, that version 1 of its C ABI
stays as abi_v1.txt has it, and that the headers compile without a warning.

TORCH_CUBIN_ALL_COMPILERS=1 tries every compiler that is installed, in every standard.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from test_abi import needs_readelf, portability

ROOT = Path(__file__).resolve().parents[2]
INCLUDE = ROOT / "torch_cubin" / "include"
HEADER = INCLUDE / "torch_cubin" / "abi.h"
SHARED = ROOT / "torch_cubin" / "lib" / "libtorch_cubin.so"
STATIC = SHARED.with_suffix(".a")
LIST = Path(__file__).with_name("abi_v1.txt")

pytestmark = pytest.mark.skipif(not SHARED.is_file(), reason="not a built checkout")


@functools.cache
def code() -> str:
    return re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.S)


def prototypes() -> dict[str, str]:
    found = re.findall(r"^TORCH_CUBIN_V1 (.*?);", code(), re.M | re.S)
    texts = [" ".join(text.split()) for text in found]
    return {re.search(r"(torch_cubin_v1_\w+)\(", text).group(1): text for text in texts}


def structs() -> dict[str, list[str]]:
    return {
        name: re.findall(r"(\w+)(?:\[\d+\])?;", body)
        for name, body in re.findall(r"^struct (\w+) \{(.*?)^\};", code(), re.M | re.S)
    }


def layouts(folder: Path) -> list[str]:
    """Each struct's size and each field's offset and size, as C has them."""
    lines = []
    for name, fields in structs().items():
        lines.append(f'printf("struct {name}: %zu bytes\\n", sizeof(struct {name}));')
        for field in fields:
            of = f"((struct {name}*)0)->{field}"
            lines.append(
                f'printf("  {field}: %zu at %zu\\n", sizeof({of}), '
                f"offsetof(struct {name}, {field}));"
            )
    lines += [
        f'printf("{name} = %llu\\n", (unsigned long long){name});'
        for name in re.findall(r"#define (TORCH_CUBIN_V1_\w+) \S", code())
        if name != "TORCH_CUBIN_V1_LEVEL"
    ]
    source = folder / "layouts.c"
    body = "\n".join(lines)
    source.write_text(
        f"#include <stddef.h>\n#include <stdio.h>\n#include <torch_cubin/abi.h>\n"
        f"int main(void) {{\n{body}\nreturn 0;\n}}\n"
    )
    program = folder / "layouts"
    command = ["cc", "-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{INCLUDE}"]
    subprocess.run([*command, str(source), "-o", str(program)], check=True)
    return subprocess.run([str(program)], capture_output=True, text=True).stdout.splitlines()


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_abi_is_the_one_of_the_list(tmp_path: Path) -> None:
    """A line that is gone or changed breaks programs: only functions are added, and fields."""
    found = sorted(prototypes().values()) + layouts(tmp_path)
    (tmp_path / "abi_v1.txt").write_text("\n".join(found) + "\n")
    assert found == LIST.read_text().splitlines(), f"compare {tmp_path / 'abi_v1.txt'}"


def test_the_abi_list_is_parsed() -> None:
    assert "torch_cubin_v1_launch" in prototypes()
    assert structs()["torch_cubin_v1_launch_call"][:3] == ["size", "flags", "device"]
    assert len(prototypes()) > 25


@needs_readelf
@pytest.mark.parametrize("library", [SHARED, ROOT / "torch_cubin" / "_C.so"], ids=lambda p: p.name)
def test_the_libraries_export_it(library: Path) -> None:
    exported = portability.exported(library)
    ours = {name for name in exported if name.startswith("torch_cubin_v1_")}
    only_in_c = {f"torch_cubin_v1_torch_{name}" for name in ("load_package", "last_error")}
    assert ours - only_in_c == set(prototypes())
    if library == SHARED:
        assert set(exported) == ours


@needs_readelf
def test_the_small_library_needs_neither_torch_nor_cuda() -> None:
    allowed = {"libstdc++.so.6", "libgcc_s.so.1", "libm.so.6", "libdl.so.2", "libc.so.6"}
    allowed |= {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1", "libpthread.so.0"}
    assert set(portability.needed(SHARED)) <= allowed
    assert portability.too_new(SHARED) == []
    assert str(ROOT).encode() not in SHARED.read_bytes()
    assert str(ROOT).encode() not in STATIC.read_bytes()


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm (binutils)")
def test_the_static_library_exports_only_the_abi() -> None:
    done = subprocess.run(
        ["nm", "-g", "--defined-only", "--format=posix", str(STATIC)],
        capture_output=True,
        text=True,
        check=True,
    )
    names = {line.split()[0] for line in done.stdout.splitlines()[1:] if line}
    assert names == set(prototypes())


# --- the headers ---

USE = """
#include <torch_cubin/cubin.h>
struct Params { int a; float* b; };
TORCH_CUBIN_EMBED(embedded_one);
#ifdef WITH_EXCEPTIONS
void use(CUstream_st* stream, float* x) {
  torch_cubin::Module module = torch_cubin::Module::embedded(embedded_one);
  torch_cubin::Buffer<float> buffer(3);
  module["x"](torch_cubin::grid(1), torch_cubin::block(2), stream, x, 1, 2.0, Params{}, buffer);
  auto typed = module.kernel<void(float*, int)>("x");
  typed(torch_cubin::launch(torch_cubin::grid(1u)).cluster(2), x, 3);
  module.global<float[4]>("t").set({1, 2, 3, 4});
  torch_cubin::KernelFamily family("{a}");
  family.find({{"a", "b"}});
}
#endif
int main() {
  auto module = torch_cubin::Module::try_from_file("x");
  if (!module) return 1;
  auto kernel = module->try_kernel("x");
  if (!kernel) return 2;
  return kernel->try_launch(torch_cubin::grid(1), torch_cubin::block(1), nullptr, 1) ? 0 : 3;
}
"""
COMPILERS = [
    *(f"g++-{version}" for version in range(9, 16)),
    *(f"clang++-{version}" for version in range(14, 23)),
]
STRICT = ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Werror"]


def compilers() -> list[tuple[str, str]]:
    if os.environ.get("TORCH_CUBIN_ALL_COMPILERS") == "1":
        return list(itertools.product(COMPILERS, ("17", "20", "23")))
    return [("g++", "17"), ("clang++", "20")]


def compile_source(
    compiler: str, *options: str, source: str = USE
) -> subprocess.CompletedProcess[str]:
    """Skipped where the compiler is missing or older than the standard."""
    found = shutil.which(compiler) or (
        shutil.which("clang++-14") if compiler == "clang++" else None
    )
    if found is None:
        pytest.skip(f"{compiler} is not installed")
    command = [found, *STRICT, *options, f"-I{INCLUDE}", "-fsyntax-only", "-x", "c++", "-"]
    done = subprocess.run(command, input=source, capture_output=True, text=True)
    if "invalid value" in done.stderr or "unrecognized command-line option" in done.stderr:
        pytest.skip(f"{compiler} does not know {options[0]}")
    return done


def compile_header(compiler: str, *options: str) -> None:
    done = compile_source(compiler, *options)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("compiler", "standard"), compilers())
def test_the_header_compiles_without_a_warning(compiler: str, standard: str) -> None:
    name = {"23": "2b"}.get(standard, standard)
    compile_header(compiler, f"-std=c++{name}", "-DWITH_EXCEPTIONS")


def test_the_header_compiles_without_exceptions() -> None:
    compile_header("g++", "-std=c++17", "-fno-exceptions", "-fno-rtti")


def test_the_header_compiles_beside_cuda() -> None:
    from fake_driver.build import cuda_include

    include = cuda_include()
    if include is None:
        pytest.skip("no CUDA toolkit (cuda.h)")
    compile_header("g++", "-std=c++17", "-DWITH_EXCEPTIONS", f"-isystem{include}", "-includecuda.h")


LAUNCH = """
#include <torch_cubin/cubin.h>
void use(const torch_cubin::Kernel& kernel, {stream} stream, float* x) {{
  kernel(torch_cubin::grid(1), torch_cubin::block(2), stream, x, 1);
}}
"""


@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_the_error_for_a_stream_of_another_type_lists_stream_types(compiler: str) -> None:
    right = LAUNCH.format(stream="CUstream_st*")
    done = compile_source(compiler, "-std=c++17", source=right)
    assert done.returncode == 0, done.stderr
    for wrong in ("void*", "const void*", "int"):
        source = LAUNCH.format(stream=wrong)
        done = compile_source(compiler, "-std=c++17", source=source)
        assert done.returncode != 0, wrong
        (line,) = [line for line in done.stderr.splitlines() if " error: " in line]
        assert re.search("static.assert.* cudaStream_t.* CUstream", line), (wrong, line)
