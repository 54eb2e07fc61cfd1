"""The parameters of the kernels that this folder launches, as csrc/kernels declares them.

Their layouts are read by tests/c_layouts.py, which says how to bring them up to date.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))

from c_layouts import ATTENTION, structure  # noqa: E402  (needs the path above)

AttentionParams = structure(f"{ATTENTION}/sm90/forward_params.h", "Sm90AttentionParams")
BackwardParams = structure(f"{ATTENTION}/sm90/backward_params.h", "Sm90BackwardParams")
