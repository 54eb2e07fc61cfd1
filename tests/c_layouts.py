"""Layouts of the structs that the project's own headers declare, for tests and benchmarks.

They are stored in tests/data/c_layouts.json, because machines with GPUs may have no libclang to
read the headers with. `python tests/c_layouts.py` writes it; a layout of an older header is
refused.
"""

from __future__ import annotations

import ctypes
import functools
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "csrc" / "kernels" / "build"))

from kernel_table import params_digest  # noqa: E402  (needs the path above)

STORED = ROOT / "tests" / "data" / "c_layouts.json"
COMMAND = "python tests/c_layouts.py"
ATTENTION, MATMUL = "csrc/kernels/attention", "csrc/kernels/matmul"
ROWS = "csrc/kernels/rows"
LISTED = (
    (f"{ATTENTION}/decode/gather_params.h", "DecodeGatherParams"),
    (f"{ATTENTION}/sm90/backward_params.h", "Sm90BackwardParams"),
    (f"{ATTENTION}/sm90/e4m3_backward_params.h", "Sm90E4m3BackwardParams"),
    (f"{ATTENTION}/sm90/e4m3_params.h", "Sm90E4m3Params"),
    (f"{ATTENTION}/sm90/e4m3_values_params.h", "Sm90E4m3ValuesParams"),
    (f"{ATTENTION}/sm90/forward_params.h", "Sm90AttentionParams"),
    ("csrc/kernels/experts/gate_params.h", "ExpertGateParams"),
    ("csrc/kernels/experts/order_params.h", "ExpertOrderParams"),
    ("csrc/kernels/experts/sum_params.h", "ExpertSumParams"),
    (f"{MATMUL}/finish_params.h", "FinishParams"),
    (f"{MATMUL}/group_rows_params.h", "GroupRowsParams"),
    (f"{MATMUL}/groups_params.h", "GroupedMatmulParams"),
    (f"{MATMUL}/matmul_params.h", "MatmulParams"),
    (f"{MATMUL}/mirror_params.h", "MirrorParams"),
    (f"{MATMUL}/pad_params.h", "PadParams"),
    (f"{MATMUL}/residues_params.h", "ResidueParams"),
    (f"{MATMUL}/sm90_fused_params.h", "Sm90FusedParams"),
    (f"{MATMUL}/sm90_grouped_params.h", "Sm90GroupedParams"),
    (f"{MATMUL}/sm90_params.h", "Sm90MatmulParams"),
    (f"{MATMUL}/sm90_scaled_params.h", "Sm90ScaledParams"),
    (f"{MATMUL}/sm90_skinny_params.h", "Sm90SkinnyParams"),
    (f"{MATMUL}/transpose_params.h", "TransposeParams"),
    ("csrc/kernels/quantize/quantize_params.h", "QuantizeParams"),
    (f"{ROWS}/column_sums_params.h", "ColumnSumsParams"),
    (f"{ROWS}/losses_params.h", "LossesParams"),
    (f"{ROWS}/norm_params.h", "NormParams"),
    (f"{ROWS}/softmax_params.h", "RowsSoftmaxParams"),
    ("csrc/runtime/launch_call.h", "torch_cubin_launch_call"),
    ("examples/fmha/fmha_params.h", "FmhaParams"),
    ("tests/data/struct_params.h", "Params"),
)
# What ctypes reads a field as: addresses are integers, 0 where null; 16-bit floats are their bits.
_TYPES = {
    **{f"{sign}int{n}": getattr(ctypes, f"c_{sign}int{n}")
       for sign in ("", "u") for n in (8, 16, 32, 64)},
    "bool": ctypes.c_bool, "float32": ctypes.c_float, "float64": ctypes.c_double,
    "float16": ctypes.c_uint16, "bfloat16": ctypes.c_uint16, "pointer": ctypes.c_uint64,
    "tensor_map": ctypes.c_uint64 * 16,
}  # fmt: skip


@functools.cache
def structure(header: str, name: str) -> type[ctypes.Structure]:
    """The struct as a ctypes.Structure; `header` is a path in the repository."""
    return structure_of(_stored(header, name))


def layout(header: str, name: str) -> Any:
    """The same as the torch_cubin.CStruct that torch_cubin.c_struct() reads."""
    return _read(_stored(header, name))


def structure_of(written: dict[str, Any]) -> type[ctypes.Structure]:
    """Raises ValueError where ctypes would not lay the struct out as the compiler does: members of
    unions, bit fields, packed fields."""
    fields: list[tuple[str, Any]] = []
    end, align = 0, 1

    def pad_to(offset: int, alignment: int) -> None:
        """Padding that ctypes would not add by itself, as it knows no alignas."""
        if -(-end // alignment) * alignment != offset:
            fields.append((f"_{end}", ctypes.c_uint8 * max(0, offset - end)))

    for name, field in written["fields"].items():
        kind, count = field["kind"], field["count"]
        if "bits" in field or not (isinstance(kind, dict) or kind in _TYPES):
            raise ValueError(f"{written['name']}.{name}: {field} has no type in c_layouts.py")
        type_ = structure_of(kind) if isinstance(kind, dict) else _TYPES[kind]
        pad_to(field["offset"], ctypes.alignment(type_))
        fields.append((name, type_ if count is None else type_ * count))
        end = field["offset"] + field["step"] * (1 if count is None else count)
        align = max(align, ctypes.alignment(type_))
    pad_to(written["size"], align)
    made = type(written["name"], (ctypes.Structure,), {"_fields_": fields})
    wanted = {name: field["offset"] for name, field in written["fields"].items()}
    found = {name: getattr(made, name).offset for name in wanted}
    if found != wanted or ctypes.sizeof(made) != written["size"]:
        raise ValueError(f"{written['name']}: expected {written['size']} bytes and {wanted},"
                         f" got {ctypes.sizeof(made)} and {found}")  # fmt: skip
    return made


def _stored(header: str, name: str) -> dict[str, Any]:
    found = json.loads(STORED.read_text()).get(f"{header}:{name}")
    if found is None or found["source"] != params_digest(ROOT / header):
        problem = "changed since it was stored" if found else "is not stored (see LISTED)"
        raise LookupError(f"struct {name} of {header} {problem}: run {COMMAND}, where libclang is")
    return found


def from_headers() -> dict[str, Any]:
    """What STORED should hold. Needs libclang."""
    import torch_cubin

    return {
        f"{header}:{name}": {"source": params_digest(ROOT / header)}
        | _written(torch_cubin.c_struct(ROOT / header, name))
        for header, name in LISTED
    }


def _written(found: Any) -> dict[str, Any]:
    fields = {}
    for name, field in found.fields.items():
        kind = field.kind if isinstance(field.kind, str) else _written(field.kind)
        given = {"default": field.default, "bit": field.bit, "bits": field.bits}
        fields[name] = {"offset": field.offset, "kind": kind, "count": field.count}
        fields[name] |= {"step": field.step, **{key: n for key, n in given.items() if n}}
    return {"name": found.name, "size": found.size, "align": found.align, "fields": fields}


def _read(written: dict[str, Any]) -> Any:
    from torch_cubin._declared.c_struct import CStruct, Field

    fields = {
        name: Field(**{**field, "kind": field["kind"] if isinstance(field["kind"], str)
                       else _read(field["kind"])})
        for name, field in written["fields"].items()
    }  # fmt: skip
    return CStruct(written["name"], written["size"], written["align"], fields)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    text = json.dumps(from_headers(), indent=1)
    # A field of numbers is a line.
    text = re.sub(r"\{[^{}]*\}", lambda field: " ".join(field[0].split()), text)
    STORED.write_text(text + "\n")
