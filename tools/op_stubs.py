"""Writes torch_cubin/ops.pyi, the types of the public ops, from the schemas of the built library.

    python tools/op_stubs.py

PyTorch looks up ops by name at run time, so editors cannot complete `torch.ops.cubin` without it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
STUBS = ROOT / "torch_cubin" / "ops.pyi"
TYPES = {"Tensor": "Tensor", "float": "float", "int": "int", "bool": "bool", "str": "str"}
TYPES["ScalarType"] = "dtype"
TYPES["List[int]"] = "Sequence[int]"
HEADER = '''\
"""The types of the public ops; written by `python tools/op_stubs.py` from their schemas."""

from collections.abc import Sequence
from typing import overload

from torch import Tensor, dtype

'''


def public_ops() -> list[str]:
    """The ops of the library that users call; those that begin with _ are private."""
    names = torch._C._dispatch_get_all_op_names()
    ours = {name.removeprefix("cubin::").partition(".")[0] for name in names if "cubin::" in name}
    return sorted(name for name in ours if not name.startswith("_"))


def type_of(schema_type: torch._C.Type) -> str:
    if isinstance(schema_type, torch._C.OptionalType):
        return f"{type_of(schema_type.getElementType())} | None"
    return TYPES[str(schema_type)]


def stub(name: str) -> str:
    op = getattr(torch.ops.cubin, name)
    stubs = [stub_of(name, getattr(op, overload)._schema) for overload in op.overloads()]
    return stubs[0] if len(stubs) == 1 else "".join(f"@overload\n{one}" for one in stubs)


def stub_of(name: str, schema: torch._C.FunctionSchema) -> str:
    lines = []
    for argument in schema.arguments:
        if argument.kwarg_only and "    *,\n" not in lines:
            lines.append("    *,\n")
        default = f" = {argument.default_value!r}" if argument.has_default_value() else ""
        lines.append(f"    {argument.name}: {type_of(argument.real_type)}{default},\n")
    results = [type_of(result.type) for result in schema.returns]
    returned = f"tuple[{', '.join(results)}]" if len(results) > 1 else (*results, "None")[0]
    return f"def {name}(\n{''.join(lines)}) -> {returned}: ...\n"


def text() -> str:
    return HEADER + "".join(stub(name) for name in public_ops())


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    import torch_cubin  # noqa: F401  (registers the ops)

    STUBS.write_text(text())
    subprocess.run([sys.executable, "-m", "ruff", "format", "--quiet", STUBS], check=True)
