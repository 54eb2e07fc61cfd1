"""c_struct: layouts read from C text, against the host compiler's own; fields by name."""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
from pathlib import Path

import pytest
from declared import schema

import torch_cubin
from torch_cubin import errors
from torch_cubin._declared import kernel_arguments
from torch_cubin._declared.expressions import Traced, TracedTensor

PARAMS = """
#ifndef PARAMS_H
#define PARAMS_H
#pragma once
#include <cuda_fp16.h>
#define HEADS 4
#define JOINED(a, b) \\
    a##b
namespace kernels {
enum class Mask : uint8_t { kNone, kCausal = 1 };
static constexpr int kMaxDims = 3;
typedef struct { int b; int s[kMaxDims]; } Shape;
struct Strides {
  int64_t batch, head;  // elements
  int32_t row;
};
using index_t = int64_t;
/* The kernel's one
   parameter. */
struct alignas(16) Params {
  void const* __restrict__ q_ptr;
  half2 *o_ptr = nullptr;
  Strides q, kv[2];
  Shape shape;
  index_t stride_o;
  float scale = 0.125f, shift;
  half2 scale2;
  __half small;
  bool flags[HEADS + 1];
  Mask mask = {};
  struct { float x; unsigned char tag; } inner;
  unsigned long long seed{7};
  float4 corner;
  alignas(64) CUtensorMap map;
  uint16_t last;
};
}
inline int count(const Params& p) { return p.shape.b; }
#endif
"""


def test_the_layout() -> None:
    params = torch_cubin.c_struct(PARAMS, "Params")
    offsets = {name: field.offset for name, field in params.fields.items()}
    assert offsets == {
        "q_ptr": 0, "o_ptr": 8, "q": 16, "kv": 40, "shape": 88, "stride_o": 104, "scale": 112,
        "shift": 116, "scale2": 120, "small": 124, "flags": 126, "mask": 131, "inner": 132,
        "seed": 144, "corner": 160, "map": 192, "last": 320,
    }  # fmt: skip
    assert (params.size, params.align) == (384, 64)
    assert torch_cubin.c_struct(PARAMS, "Strides").size == 24
    assert torch_cubin.c_struct(PARAMS, "Shape").size == 16
    short = torch_cubin.c_struct(PARAMS, "Params", prefix=120)
    assert (short.size, list(short.fields)[-1]) == (120, "shift")


def entries(made: kernel_arguments.Struct) -> dict[int, list]:
    return dict(made.members)


def test_fields_by_name_and_the_rest_zero() -> None:
    params = torch_cubin.c_struct(PARAMS, "Params")
    q, n = TracedTensor("q"), Traced(["number", "n"], int)
    made = torch_cubin.struct(
        params, q_ptr=q, q={"row": n}, kv=[{"batch": 5}, {}], flags=[1, 0, True, False, 0],
        small=0.5, scale2=0x3C003C00, last=torch_cubin.float16(1.0), inner={"x": 2.0},
        map=torch_cubin.TensorMap(q, box=(8, 64)), corner=(1.0, 2.0, 3.0, 4.0),
    )  # fmt: skip
    assert made.size == 384
    found = entries(made)
    assert found.pop(192)[0] == "tensor_map"
    assert found == {
        0: ["pointer", "q"], 32: ["int32", ["number", "n"]], 40: ["int64", 5],
        112: ["float32", 0.125], 120: ["uint32", 0x3C003C00], 124: ["float16", 0.5],
        126: ["bool", True], 127: ["bool", False], 128: ["bool", True], 129: ["bool", False],
        130: ["bool", False], 132: ["float32", 2.0], 144: ["uint64", 7],
        160: ["float32", 1.0], 164: ["float32", 2.0], 168: ["float32", 3.0],
        172: ["float32", 4.0], 320: ["float16", 1.0],
    }  # fmt: skip
    assert entries(torch_cubin.struct(params, flags=0, scale=0.0))[112] == ["float32", 0.0]
    assert len(entries(torch_cubin.struct(params))) == 2  # the initialisers


WRONG_FIELDS = {
    "an unknown name": ({"q_pt": None}, "'q_ptr'"),
    "a number for a pointer": ({"q_ptr": 5}, "expected pointer"),
    "a float for an int": ({"stride_o": 1.5}, "expected int64"),
    "too few items": ({"flags": [1]}, "expected 5 values, or 0"),
    "a number for a struct": ({"q": 5}, "a dict of its fields"),
    "a number for a map": ({"map": 5}, "TensorMap"),
    "a field of a field": ({"q": {"rows": 5}}, "'row'"),
    "another float": ({"last": torch_cubin.float32(1.0)}, "expected uint16"),
}


@pytest.mark.parametrize("case", WRONG_FIELDS)
def test_wrong_fields(case: str) -> None:
    members, says = WRONG_FIELDS[case]
    with pytest.raises(errors.InputError) as caught:
        torch_cubin.struct(torch_cubin.c_struct(PARAMS, "Params"), **members)
    assert says in str(caught.value)


REFUSED = {
    "a conditional part": (
        "struct P {\n  int a;\n#ifdef X\n  int b;\n#endif\n};",
        "line 3 has a c",
    ),
    "bits": ("struct P { int a : 3; };", "a bit field"),
    "a union": ("struct P { union { int a; float b; }; };", "union"),
    "a base": ("struct B { int b; };\nstruct P : B { int a; };", "line 2 has a base class"),
    "a template's type": ("struct P {\n  Array<int, 3> a;\n};", "line 2 has a template's type"),
    "an unknown type": ("struct P { Unknown a; };", "is not known"),
    "a function": ("struct P { int f() const; };", "a function"),
    "a pointer to a function": ("struct P { void (*f)(int); };", "a pointer to a function"),
    "a size": ("struct P { int a[N]; };", "no constant of the text"),
    "a large size": ("struct P { int a[99999999]; };", "out of range"),
    "a pragma that packs": (
        "\n#pragma pack(1)\nstruct P { char a; int b; };",
        "line 2 packs",
    ),
    "an attribute that packs": ("struct P { char a; int b; } __attribute__((packed));", "packs"),
    "another that packs": ("struct [[gnu::packed]] P { char a; int b; };", "packs structs"),
    "void": ("struct P { void a; };", "type void"),
    "an initialiser": ("struct P { int a = f(); };", "no number"),
    "several": ("struct P { int a[2] = {1, 2}; };", "several values"),
    "twice": ("struct P { int a; float a; };", "twice"),
    "no fields": ("struct P { };", "without fields"),
    "no end": ("struct P { int a;", "does not parse"),
    "another name": ("struct Params { int a; };", "expected 'P"),
    "nothing": ("", "struct NAME { ... };"),
    "a template": ("struct P { template <int N> int f(); };", "template"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_plain_struct(case: str) -> None:
    text, says = REFUSED[case]
    with pytest.raises(errors.InputError) as caught:
        torch_cubin.c_struct(text, "P")
    assert says in str(caught.value), caught.value


def test_prefixes_and_types() -> None:
    for prefix in (0, 500, "8", True):
        with pytest.raises(errors.InputError):
            torch_cubin.c_struct(PARAMS, "Params", prefix=prefix)
    with pytest.raises(errors.InputError, match="wrong type"):
        torch_cubin.c_struct(None, "P")
    with pytest.raises(errors.InputError, match="too much text"):
        torch_cubin.c_struct(" " * (2 << 20), "P")


def test_an_op_with_such_a_struct() -> None:
    """Two levels and an array, by value: the size is compared with the binary's."""
    from declared import LAUNCH

    sizes = {p.size: (k, i) for k in torch_cubin.inspect(LAUNCH).kernels
             for i, p in enumerate(k.params) if p.size > 8}  # fmt: skip
    assert sizes  # a kernel that takes a struct
    size, (kernel, index) = next(iter(sizes.items()))
    exact = torch_cubin.c_struct(f"struct P {{ int n; char rest[{size - 4}]; }};", "P")
    large = torch_cubin.c_struct(f"struct P {{ int n; char rest[{size}]; }};", "P")

    def define(layout) -> torch_cubin.Op:
        def args(x):
            values = [x if p.size == 8 else 0 for p in kernel.params]
            values[index] = torch_cubin.struct(layout, n=x.numel())
            return tuple(values)

        return torch_cubin.define_op(
            schema("f(Tensor(a!) x) -> ()"), kernel=(LAUNCH, kernel.name),
            tensors={"x": "float32[n]"}, args=args, grid=1, block=32,
        )  # fmt: skip

    entry = define(exact).contract["kernels"][0]["args"][index]
    assert entry == ["struct", size, [[0, ["int32", ["numel", "x"]]]]]
    with pytest.raises(errors.ParamsError, match=f"expected {size} bytes, got {size + 4} bytes"):
        define(large)


TYPES = [
    "char", "bool", "short", "int", "long long", "unsigned", "float", "double", "void*",
    "const int *", "int64_t", "uint8_t", "unsigned short int", "size_t", "Inner", "long unsigned",
]  # fmt: skip


def test_random_structs_are_laid_out_as_the_compiler_does(tmp_path: Path) -> None:
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    r = random.Random(11)
    text = "struct Inner { char a; double b[2]; short c; };\n"
    names = []
    for number in range(60):
        lines = []
        for field in range(r.randrange(1, 9)):
            align = r.choice(["", "", "", f"alignas({r.choice((8, 16, 64))}) "])
            array = r.choice(["", "", f"[{r.randrange(1, 5)}]", "[2][3]"])
            lines.append(f"  {align}{r.choice(TYPES)} f{field}{array};\n")
        align = r.choice(["", "", "alignas(32) "])
        text += f"struct {align}S{number} {{\n{''.join(lines)}}};\n"
        names.append((f"S{number}", len(lines)))
    printed = "".join(
        f'  std::printf("%zu", sizeof({name}));\n'
        + "".join(f'  std::printf(" %zu", offsetof({name}, f{i}));\n' for i in range(count))
        + '  std::printf("\\n");\n'
        for name, count in names
    )
    source = tmp_path / "layout.cpp"
    source.write_text(
        "#include <cstddef>\n#include <cstdint>\n#include <cstdio>\n"
        f"{text}int main() {{\n{printed}}}\n"
    )
    command = ["c++", "-w", "-std=c++17", str(source), "-o", str(tmp_path / "layout")]
    subprocess.run(command, check=True, timeout=120)
    lines = subprocess.run(
        [str(tmp_path / "layout")], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for (name, _), line in zip(names, lines, strict=True):
        found = torch_cubin.c_struct(text, name)
        assert [found.size, *(f.offset for f in found.fields.values())] == [*map(int, line.split())]


def test_hostile_text() -> None:
    """Whatever the text, what is raised is ours, and soon."""
    r = random.Random(4)
    words = [
        "struct",
        "{",
        "}",
        ";",
        "int",
        "P",
        "[",
        "]",
        "*",
        "=",
        "alignas",
        "(",
        ")",
        ":",
        "enum",
        "typedef",
        "using",
        "4",
        "static",
        "constexpr",
        ",",
        "<",
        "#define",
        "\n",
    ]
    for _ in range(3000):
        text = "struct P { " + " ".join(r.choice(words) for _ in range(r.randrange(1, 25)))
        try:
            torch_cubin.c_struct(text, "P")
        except errors.InputError:
            continue
    deep = "struct P { struct { " * 300 + "int a;" + "} a; };" * 300
    with pytest.raises(errors.InputError):
        torch_cubin.c_struct(deep, "P")


def test_bits_of_floats_in_ctypes_structures() -> None:
    class Bits(ctypes.Structure):
        _fields_ = [("h", ctypes.c_uint16), ("f", ctypes.c_uint32), ("d", ctypes.c_uint64)]

    made = torch_cubin.struct(
        Bits, h=torch_cubin.float16(1.0), f=torch_cubin.float32(2.0), d=torch_cubin.float64(3.0)
    )
    assert [kind for _, (kind, _) in made.members] == ["float16", "float32", "float64"]
