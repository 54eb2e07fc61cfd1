"""Builds torch_cubin/cubins for a `make` target.

    python tools/kernels.py demo     this machine's GPU, else sm_90a
    python tools/kernels.py test     sm_90a and this machine's GPU
    python tools/kernels.py all      every architecture of a wheel
    python tools/kernels.py hashes   prints each cubin's sha256, to compare builds by `diff`; builds
                                     nothing

If TORCH_CUBIN_ARCHS is set, those architectures are built instead. Architectures that are already
built stay, so that one target does not undo another's work; csrc/kernels/build/build.py reuses
unchanged kernels.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "csrc" / "kernels" / "build"))

import build  # noqa: E402
from machine_gpus import gpu_archs  # noqa: E402

OUT = ROOT / "torch_cubin" / "cubins"
# The architecture that has every family of kernels. tests/unit/test_kernel_build.py compiles a
# sample for others, and `make kernel-test` (every night) all kernels for all of them.
DEMO_ARCH = "sm_90a"


def present_archs() -> list[str]:
    try:
        manifest = json.loads((OUT / "manifest.json").read_text())
        return list(dict.fromkeys(kernel["arch"] for kernel in manifest["kernels"]))
    except (OSError, ValueError, KeyError):
        return []


def wanted_archs(purpose: str) -> list[str]:
    if os.environ.get("TORCH_CUBIN_ARCHS"):
        return list(build.choose_archs(None))
    gpu = gpu_archs(lambda line: print(f"kernels: {line}", flush=True))
    chosen = {
        "demo": gpu or [DEMO_ARCH],
        "test": [DEMO_ARCH, *gpu],
        "all": [*build.DEFAULT_ARCHS, *gpu],
    }[purpose]
    return list(dict.fromkeys([*chosen, *present_archs()]))


def progress() -> Callable[[str], None]:
    """Prints the build's output; its progress lines ("[7/82] ...") at most every 5 seconds."""
    last = time.monotonic()

    def log(line: str) -> None:
        nonlocal last
        now = time.monotonic()
        count = re.match(r"\[(\d+)/(\d+)\]", line)
        if count is None or count[1] == count[2] or now - last >= 5:
            last = now
            print(f"kernels: {line}", flush=True)

    return log


def main() -> int:
    purpose = sys.argv[1] if len(sys.argv) == 2 else ""
    if purpose == "hashes":
        for kernel in json.loads((OUT / "manifest.json").read_text())["kernels"]:
            print(kernel["sha256"], kernel["file"])
        return 0
    if purpose not in ("demo", "test", "all"):
        print(__doc__, file=sys.stderr)
        return 2
    jobs = int(os.environ.get("MAX_JOBS") or 0) or None
    try:
        build.build_package(OUT, wanted_archs(purpose), jobs, progress())
    except build.BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
