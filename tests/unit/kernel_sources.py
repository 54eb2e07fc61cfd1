"""What tests of the kernels' build share: the modules of csrc/kernels/build, a kernel table."""

from __future__ import annotations

import json
import sys
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[2] / "csrc" / "kernels"
sys.path.insert(0, str(KERNELS / "build"))

import build  # noqa: E402
import cubin_facts  # noqa: E402
import kernel_cache  # noqa: E402
import kernel_table  # noqa: E402
import toolkit  # noqa: E402
from toolkit import BuildError  # noqa: E402

FIELDS = {
    "name": "k",
    "kind": "simt",
    "dtype": "float32",
    "math": "float32",
    "layout": "nn",
    "alignment": 16,
    "tile": [64, 64, 8],
    "stages": 2,
    "block": [64, 1, 1],
    "dynamic_shared": 0,
    "cost": {"k_tile": 1, "fixed": 2},
}


def table(*entries: dict, **top: object) -> str:
    block = json.dumps({**top, "kernels": [{**FIELDS, **entry} for entry in entries]}, indent=1)
    return f"struct code;\n\n/* torch_cubin kernels\n{block}\n*/\n"


__all__ = [
    "KERNELS",
    "BuildError",
    "build",
    "cubin_facts",
    "kernel_cache",
    "kernel_table",
    "table",
    "toolkit",
]
