"""Lays a wheel out as a kernel of Hugging Face's hub, for the library `kernels`.

    python tools/hub.py dist/torch_cubin-*.whl [--out dist/hub] [--backends cu126 cu130]

    dist/hub/build/torch-stable-abi211-cu130-x86_64-linux/
        metadata.json, __init__.py      what `kernels` reads and imports
        torch_cubin/                    the package

    from kernels import get_local_kernel
    torch_cubin = get_local_kernel(Path("dist/hub"))

One wheel serves every CUDA of a major version, so the backends differ in the folder's name alone:
`kernels` takes a folder whose CUDA is of the same major version and not newer than PyTorch's.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import sys
import zipfile
from pathlib import Path

ABI = "torch-stable-abi211"  # the oldest torch that the package supports
BACKENDS = ("cu126", "cu130")
PACKAGE = "torch_cubin"

# `kernels` imports this file under a name of its own. The package keeps its name, since its ops are
# registered once a process; one that has been imported before is taken.
INIT = '''"""torch_cubin, as the library `kernels` loads it."""

import sys
from pathlib import Path

_here = str(Path(__file__).parent)
sys.path.insert(0, _here)
try:
    import torch_cubin
finally:
    sys.path.remove(_here)

from torch_cubin import *
from torch_cubin import __all__, __version__
from torch_cubin import _hub_layers as layers
from torch_cubin._hub_attention import *


def __getattr__(name):
    return getattr(torch_cubin, name)
'''


def metadata(backend: str, digest: str, archs: list[str]) -> dict[str, object]:
    kind = "cuda" if backend.startswith("cu") else backend
    return {
        "id": f"_{PACKAGE}_{kind}_{digest}",
        "name": PACKAGE.replace("_", "-"),
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": kind, **({"archs": archs} if kind == "cuda" else {})},
    }


def archs_of(names: list[str]) -> list[str]:
    """["8.0", "9.0a"], of the folders of kernels."""
    found = {m[1] for name in names if (m := re.match(rf"{PACKAGE}/cubins/sm_(\w+)/", name))}
    return sorted(re.sub(r"(\d)(\D?)$", r".\1\2", arch) for arch in found)


def lay_out(wheel: Path, out: Path, backends: list[str]) -> list[Path]:
    """The folders, one a backend."""
    match = re.fullmatch(r".*_(x86_64|aarch64)\.whl", wheel.name)
    if match is None:
        raise SystemExit(f"{wheel.name}: expected a wheel for Linux on x86_64 or aarch64")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()[:12]
    folders = []
    for backend in backends:
        folder = out / "build" / f"{ABI}-{backend}-{match[1]}-linux"
        shutil.rmtree(folder, ignore_errors=True)
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith(f"{PACKAGE}/")]
            archive.extractall(folder, names)
        (folder / "__init__.py").write_text(INIT)
        facts = metadata(backend, digest, archs_of(names))
        (folder / "metadata.json").write_text(json.dumps(facts, indent=2) + "\n")
        folders.append(folder)
    return folders


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--out", type=Path, default=Path("dist/hub"))
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS))
    options = parser.parse_args(arguments)
    for folder in lay_out(options.wheel, options.out, options.backends):
        print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
