"""Layouts of the project's own structs, read from their headers: `layout(header, name)`.

Where libclang is not installed (the machines with GPUs), they come from tests/data/c_layouts.json,
which `python tests/c_layouts.py` writes and tests/unit/test_c_layouts.py compares.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import torch_cubin
from torch_cubin._declared.c_struct import CStruct, Field

ROOT = Path(__file__).resolve().parents[1]
STORED = ROOT / "tests" / "data" / "c_layouts.json"
LISTED = (
    ("examples/fmha/fmha_params.h", "FmhaParams"),
    ("tests/data/struct_params.h", "Params"),
)


def layout(header: str, name: str) -> CStruct:
    """`header` is a path in the repository."""
    if importlib.util.find_spec("clang") is not None:
        return torch_cubin.c_struct(ROOT / header, name)
    return _read(json.loads(STORED.read_text())[f"{header}:{name}"])


def stored() -> dict[str, Any]:
    """What STORED should hold."""
    return {f"{header}:{name}": _written(layout(header, name)) for header, name in LISTED}


def _written(found: CStruct) -> dict[str, Any]:
    fields = {
        name: {**vars(field), "kind": field.kind if isinstance(field.kind, str)
               else _written(field.kind)}
        for name, field in found.fields.items()
    }  # fmt: skip
    return {"name": found.name, "size": found.size, "align": found.align, "fields": fields}


def _read(written: dict[str, Any]) -> CStruct:
    fields = {
        name: Field(**{**field, "kind": field["kind"] if isinstance(field["kind"], str)
                       else _read(field["kind"])})
        for name, field in written["fields"].items()
    }  # fmt: skip
    return CStruct(written["name"], written["size"], written["align"], fields)


if __name__ == "__main__":
    STORED.write_text(json.dumps(stored(), indent=1) + "\n")
