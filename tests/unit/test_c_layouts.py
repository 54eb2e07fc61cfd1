"""Structs as tests and benchmarks read them: the stored layouts are those of the headers."""

from __future__ import annotations

import ast
import ctypes
import json
from pathlib import Path
from typing import Any

import c_layouts
import pytest

import torch_cubin
from torch_cubin._kernels.launch import Call

ROOT = c_layouts.ROOT
needs_libclang = pytest.mark.usefixtures("libclang")


@pytest.fixture
def libclang() -> None:
    pytest.importorskip("clang.cindex", reason="needs libclang, found none")


@needs_libclang
def test_stored_layouts_are_the_headers() -> None:
    stored = json.loads(c_layouts.STORED.read_text())
    assert stored == c_layouts.from_headers(), f"run {c_layouts.COMMAND}"
    for header, name in c_layouts.LISTED:
        assert c_layouts.layout(header, name) == torch_cubin.c_struct(ROOT / header, name)


def test_layouts_of_changed_headers_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On machines without libclang, too: a launch with the old layout would be silently wrong."""
    key = "params.h:P"
    header, included = tmp_path / "params.h", tmp_path / "inner.h"
    header.write_text('#include "inner.h"\n#include <cstdint>\nstruct P { Inner x; };\n')
    included.write_text("struct Inner { int a; };\n")
    entry = {"name": "P", "size": 4, "align": 4, "fields": {}}
    entry["fields"]["a"] = {"offset": 0, "kind": "int32", "count": None, "step": 4}
    stored = tmp_path / "stored.json"
    stored.write_text(json.dumps({key: {"source": c_layouts.params_digest(header), **entry}}))
    monkeypatch.setattr(c_layouts, "ROOT", tmp_path)
    monkeypatch.setattr(c_layouts, "STORED", stored)

    assert c_layouts.layout("params.h", "P").size == 4
    included.write_text("// A comment.\nstruct  Inner {\n  int a; /* another\n one */ };\n")
    assert c_layouts.layout("params.h", "P").size == 4
    included.write_text("struct Inner { long a; };\n")
    for read in (c_layouts.layout, c_layouts.structure):
        with pytest.raises(LookupError, match=f"changed since.*: run {c_layouts.COMMAND}"):
            read("params.h", "P")
        with pytest.raises(LookupError, match=f"is not stored.*: run {c_layouts.COMMAND}"):
            read("params.h", "Q")


def structure_of(text: str) -> type[ctypes.Structure]:
    found = torch_cubin.c_struct(text, "P", cuda=13)
    return c_layouts.structure_of(json.loads(json.dumps(c_layouts._written(found))))


TEXT = """
struct alignas(64) Map { unsigned long long words[16]; };
struct Inner { double d; char tag; };
struct Base { const float* pointer; char c; };
struct alignas(256) P : Base {
  char tail;
  Inner inner[2];
  short table[2][3];
  CUtensorMap tensor_map;
  __half half;
  bool flag;
  Map map;
  unsigned n;
  alignas(16) float f;
};
"""


@needs_libclang
def test_ctypes_reads_what_c_struct_writes() -> None:
    made = structure_of(TEXT)
    layout = torch_cubin.c_struct(TEXT, "P", cuda=13)
    assert ctypes.sizeof(made) == layout.size
    assert {name: getattr(made, name).offset for name in layout.fields} == {
        name: field.offset for name, field in layout.fields.items()
    }
    p = made(tail=5, table=(1, 2, 3, 4, 5, -6), half=0x3C00, flag=True, n=2**32 - 1, f=0.5)
    p.inner[1].d, p.inner[1].tag, p.map.words[15], p.pointer = 0.25, 7, 2**64 - 1, 2**47
    found = bytes(p)
    for name, count, value in (
        ("tail", 1, "05"),
        ("table", 12, "010002000300040005 00faff"),
        ("half", 2, "003c"),
        ("n", 4, "ffffffff"),
        ("f", 4, "0000003f"),
        ("pointer", 8, "0000000000800000"),
    ):
        at = layout.fields[name].offset
        assert found[at : at + count] == bytes.fromhex(value), name
    assert made.from_buffer_copy(bytes(layout.size)).pointer == 0  # not None


@needs_libclang
@pytest.mark.parametrize(
    "fields",
    ["int a : 3, b : 5;", "union { int a; float b; };", "union { long a; char b; }; int c;",
     "char a; int b __attribute__((packed));", "char a; long double b;"],
)  # fmt: skip
def test_structs_that_ctypes_lays_out_differently_are_refused(fields: str) -> None:
    with pytest.raises(ValueError, match=r"^P"):
        structure_of(f"struct P {{ {fields} }};")


def test_the_launch_struct_of_python_matches_the_header() -> None:
    """torch_cubin._kernels.launch writes it by hand: an installed package has no header."""
    header = c_layouts.structure("csrc/runtime/launch_call.h", "torch_cubin_launch_call")

    def fields(type_: Any) -> list[tuple[str, int, int]]:
        places = [(name, getattr(type_, name)) for name, *_ in type_._fields_]
        return [(name, place.offset, place.size) for name, place in places]

    assert fields(Call) == fields(header)
    assert ctypes.sizeof(Call) == ctypes.sizeof(header)


# The structs that tests and benchmarks write by hand, and why. A kernel's parameter is none of
# them: c_layouts.structure() reads it from its header.
_ARGUMENT = "an argument under test, as a user writes it"
HAND_WRITTEN = {
    "tests/faults/fake_arguments.py": (["Three"], _ARGUMENT),
    "tests/gpu/load.py": (["MallocUsage"], "glibc's struct mallinfo2"),
    "tests/gpu/test_cuda_define_op.py": (["Scale"], _ARGUMENT),
    "tests/gpu/test_cuda_faults.py": (["Parameters"], _ARGUMENT),
    "tests/gpu/test_cuda_module.py": (["Scale"], _ARGUMENT),
    "tests/gpu/test_cuda_streams.py": (["_Edge"], "the driver's, CUgraphEdgeData"),
    "tests/gpu/test_cuda_tile.py": (["Array"], "of CuTe DSL, which declares it in no header"),
    "tests/unit/test_c_struct.py": (["Bits"], _ARGUMENT),
    "tests/unit/test_define_op.py": (["Inner", "Outer"], _ARGUMENT),
    "tests/unit/test_define_op_calls.py": (["Base"], _ARGUMENT),
    "tests/unit/test_define_op_errors.py": (["Pair"], _ARGUMENT),
    "tests/unit/test_keywords.py": (["Pair"], _ARGUMENT),
}


def test_structs_of_headers_are_not_written_again() -> None:
    found: dict[str, list[str]] = {}
    for folder in ("benchmarks", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef) and "ctypes.Structure" in map(
                    ast.unparse, node.bases
                ):
                    found.setdefault(str(path.relative_to(ROOT)), []).append(node.name)
    assert {path: sorted(names) for path, names in found.items()} == {
        path: names for path, (names, _) in HAND_WRITTEN.items()
    }
