"""Real cubins: the committed ones, and tests/data/several.cu compiled for every arch."""

from __future__ import annotations

import concurrent.futures
import functools
import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

from built_once import BUILD, ROOT, built_once

DATA = ROOT / "tests" / "data"
COMMITTED = sorted(DATA.glob("*.cubin"))
ARCHS = (
    *("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_100a", "sm_100f"),
    *("sm_103a", "sm_120a", "sm_120f", "sm_121a"),
)


@functools.cache
def nvcc() -> Path | None:
    """A CUDA compiler: CUDA_HOME, PATH, or the usual prefix."""
    places = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    for place in places:
        if place and os.access(Path(place, "bin", "nvcc"), os.X_OK):
            return Path(place, "bin", "nvcc")
    found = shutil.which("nvcc")
    return Path(found) if found else None


@functools.cache
def compiled() -> dict[str, tuple[Path, str]]:
    """{arch: (cubin of several.cu, what ptxas -v said)}; empty without nvcc."""
    compiler = nvcc()
    if compiler is None:
        return {}
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    source = DATA / "several.cu"
    digest = hashlib.sha256(
        source.read_bytes() + version.encode() + repr(ARCHS).encode()
    ).hexdigest()[:16]
    folder = BUILD / f"cubins-{digest}"

    def build(arch: str) -> None:
        command = [compiler, "-cubin", f"-arch={arch}", "-DALL_KERNELS", "-Xptxas", "-v"]
        command += ["-o", unfinished / f"{arch}.cubin", source]
        made = subprocess.run(command, capture_output=True, text=True)
        assert made.returncode == 0, f"{arch}: {made.stderr}"
        (unfinished / f"{arch}.txt").write_text(made.stderr)

    with built_once(folder) as unfinished:
        if unfinished:
            unfinished.mkdir()
            with concurrent.futures.ThreadPoolExecutor(2) as pool:
                list(pool.map(build, ARCHS))
    return {
        arch: (folder / f"{arch}.cubin", (folder / f"{arch}.txt").read_text()) for arch in ARCHS
    }


def ptxas_usage(log: str) -> dict[str, dict[str, int]]:
    """{kernel: registers, barriers, smem, stack} out of `ptxas -v`."""
    usage = {}
    blocks = re.split(r"Compiling entry function '", log)[1:]
    for block in blocks:
        name = block.split("'")[0]
        used = re.search(r"Used (\d+) registers, used (\d+) barriers(.*)", block)
        assert used, block

        def number(pattern: str, text: str) -> int:
            found = re.search(pattern, text)
            return int(found.group(1)) if found else 0

        usage[name] = {
            "registers": int(used.group(1)),
            "barriers": int(used.group(2)),
            "smem": number(r"(\d+) bytes smem", used.group(3)),
            "stack": number(r"(\d+) bytes stack frame", block),
        }
    return usage


def cuobjdump() -> Path | None:
    """NVIDIA's cuobjdump, of a toolkit or of Triton's wheel. Only for files of our own."""
    compiler = nvcc()
    if compiler is not None and (compiler.parent / "cuobjdump").exists():
        return compiler.parent / "cuobjdump"
    found = shutil.which("cuobjdump")
    if found:
        return Path(found)
    import importlib.util

    spec = importlib.util.find_spec("triton")
    folders = spec.submodule_search_locations if spec and spec.submodule_search_locations else []
    for folder in folders:
        tool = Path(folder) / "backends" / "nvidia" / "bin" / "cuobjdump"
        if tool.exists():
            return tool
    return None
