"""Makes what tests/data/triton holds, with the Triton that is importable.

    PYTHONPATH=.:TRITON/site-packages python tests/data/make_triton.py

- `package_VERSION`: a package of ops of tests/triton_table.py, for sm_90a.
- `cache_VERSION_ARCH`: what Triton's cache holds of two kernels, as far as read() takes it.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # no path of this machine, and smaller files
os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import triton  # noqa: E402
import triton_table as table  # noqa: E402

import torch_cubin  # noqa: E402

PACKAGED = (
    *("add of an odd length", "add of an unaligned address", "add bf16", "fp8e5 in memory"),
    *("integers of every width", "floats of every width", "a bool that is True", "tuples"),
    "an optional tensor that is None",
    *("an int that is 1, and a 64-bit one", "softmax", "matmul fp16", "matmul in clusters of 2"),
    *("a host descriptor fp16", "matmul of specialised warps", "a cooperative grid"),
    *("descriptors made on the device, in scratch", "programmatic dependent launch"),
)
CACHED = {"add": ("add", ("sm_90a",)), "copy_tile": ("a host descriptor fp16", ("sm_80", "sm_90a"))}


def main() -> None:
    version = triton.__version__
    ops = []
    for name in PACKAGED:
        if name in table.known():
            kernels = table.kernels_of(table.CASES[name], ("sm_90a",))
            ops.append(table.define(name, f"triton_{version.replace('.', '_')}", kernels))
    folder = HERE / "triton" / f"package_{version}"
    shutil.rmtree(folder, ignore_errors=True)
    torch_cubin.save_package(folder, ops)
    for kernel, (name, archs) in CACHED.items():
        for arch in archs:
            os.environ["TRITON_CACHE_DIR"] = cache = tempfile.mkdtemp()
            table.kernels_of(table.CASES[name], (arch,))
            (found,) = Path(cache).glob(f"*/{kernel}.cubin")
            folder = HERE / "triton" / f"cache_{version}_{arch}"
            folder.mkdir(exist_ok=True)
            for suffix in (".json", ".cubin", ".ttir"):
                text = found.with_suffix(suffix).read_bytes()
                if suffix != ".cubin":  # no path of this machine
                    text = text.replace(str(Path(triton.__file__).parent).encode(), b"/triton")
                (folder / f"{kernel}{suffix}").write_bytes(text)


if __name__ == "__main__":
    main()
