"""Containers of device code: the committed ones, and what nvcc makes of several.cu."""

from __future__ import annotations

import functools
import hashlib
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import real_cubins
from built_once import BUILD, built_once

FOLDER = real_cubins.DATA / "containers"
COMMITTED = sorted(FOLDER.iterdir())
CUBIN = real_cubins.DATA / "vec_add.sm_80.cuda118.cubin"
MODES = ("none", "size", "speed", "balance", "default")
ARCHS = {
    "sm_75": "arch=compute_75,code=sm_75",
    "sm_90a": "arch=compute_90a,code=sm_90a",
    "sm_100f": "arch=compute_100f,code=sm_100f",
    "sm_120": "arch=compute_120,code=sm_120",
    "ptx": "arch=compute_80,code=compute_80",
}
MAIN = """
extern "C" __global__ void in_main(float* x, short n) { *x = n; }
int main() { in_main<<<1, 1>>>(nullptr, 1); return 0; }
"""


def hex_array(data: bytes, *, per_line: int = 16, form: str = "0x{:02x}") -> str:
    words = [form.format(byte) for byte in data]
    lines = [", ".join(words[i : i + per_line]) for i in range(0, len(words), per_line)]
    return ",\n".join(lines)


def triton_aot(data: bytes, name: str = "add_kernel_1a2b3c4d_0d1d2d") -> str:
    """The source that Triton's AOT tool writes around a cubin: the array's name is a macro."""
    return f"""/* clang-format off */
#include <stdio.h>
#include <cuda.h>

#define CUDA_CHECK(ans) {{\\
    gpuAssert((ans), __FILE__, __LINE__);\\
  }}\\

static inline void gpuAssert(CUresult code, const char *file, int line) {{
  if (code != CUDA_SUCCESS) {{
    const char *prefix = "Triton Error [CUDA]: ";
    char err[1024] = {{0}};
    strcat(err, prefix);
    printf("%s\\\\n", err);
  }}
}}

// globals
#define CUBIN_NAME {name}_cubin
CUmodule {name}_mod = NULL;
unsigned char CUBIN_NAME[{len(data)}] = {{ {", ".join(f"0x{byte:02x}" for byte in data)} }};

void load_{name}() {{
    void *bin = (void *)&CUBIN_NAME;
    CUDA_CHECK(cuModuleLoadData(&{name}_mod, bin));
}}
"""


def tensorrt_llm(arrays: dict[str, bytes]) -> str:
    """A source as TensorRT and TensorRT-LLM ship them: a licence longer than any first look."""
    licence = "/*\n" + " * Licensed under the Apache License, Version 2.0.\n" * 200 + " */\n"
    parts = [
        f"unsigned char {name}[] = {{\n{hex_array(data)}\n}};\nuint32_t {name}_len = {len(data)};\n"
        for name, data in arrays.items()
    ]
    return (
        licence
        + '#include <cstdint>\nnamespace kernels\n{\n// clang-format off\nextern "C"\n{\n'
        + ("\n".join(parts) + "}\n}  // namespace kernels\n")
    )


@functools.cache
def compiled() -> dict[str, Path]:
    """{what: file}: fatbins of every compression mode, relocatable ones, LTO-IR, objects, libraries
    and a program; empty without nvcc."""
    compiler = real_cubins.nvcc()
    if compiler is None:
        return {}
    source = real_cubins.DATA / "several.cu"
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    digest = hashlib.sha256(source.read_bytes() + version.encode() + MAIN.encode())
    digest.update(repr((MODES, ARCHS)).encode())
    folder = BUILD / f"containers-{digest.hexdigest()[:16]}"
    with built_once(folder) as unfinished:
        if unfinished:
            unfinished.mkdir()
            _compile(compiler, source, unfinished)
    return {path.name: path for path in sorted(folder.iterdir())}


def _compile(compiler: Path, source: Path, folder: Path) -> None:
    main = folder.with_name(f"{folder.name}.main.cu")
    main.write_text(MAIN)
    every = [word for flags in ARCHS.values() for word in ("-gencode", flags)]
    two = ["-gencode", ARCHS["sm_90a"], "-gencode", ARCHS["ptx"]]
    lto = ["-gencode", ARCHS["sm_90a"], "-gencode", "arch=compute_90,code=lto_90"]

    def run(command: list[object]) -> str:
        found = subprocess.run([str(word) for word in command], capture_output=True, text=True)
        assert found.returncode == 0, f"{command}\n{found.stderr}"
        return found.stderr

    def build(name: str, *options: object, of: Path = source) -> None:
        run([compiler, *options, "-I", source.parent, of, "-o", folder / name])

    with tempfile.TemporaryDirectory() as parts:
        # The modes differ in how the same parts are packed: nvcc compiles those once, and then only
        # its last command is run.
        for number, mode in enumerate(MODES):
            for suffix, more in (("", []), (".all", ["-Xfatbin", "-compress-all"])):
                command = [compiler, "-fatbin", *every, "--keep", "--keep-dir", parts, *more]
                command += ["-Xfatbin", f"--compress-mode={mode}", source]
                command += ["-o", folder / f"{mode}{suffix}.fatbin"]
                if number == 0 and not suffix:
                    run(command)
                    continue
                steps = run([*command, "--dryrun"]).splitlines()
                (pack,) = (line for line in steps if line.startswith("#$ fatbinary "))
                run([compiler.parent / "fatbinary", *shlex.split(pack)[2:]])
    build("relocatable.fatbin", "-fatbin", "-dc", *two)
    build("relocatable.cubin", "-cubin", "-dc", "-arch=sm_90a")
    build("lto.fatbin", "-fatbin", "-dc", *lto)
    build("object.o", "-c", *two)
    build("relocatable.o", "-dc", *two)
    build("library.so", "-shared", "-Xcompiler", "-fPIC", "-cudart=none", *two)
    if (compiler.parent.parent / "lib64" / "libcudart_static.a").exists():
        # Two objects: their fatbins stand one after the other.
        build("program", *two, main, of=source)
    main.unlink()


def zstd() -> str | None:
    return shutil.which("zstd")
