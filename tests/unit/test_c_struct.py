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
    "a pragma that packs": ("\n#pragma pack(1)\nstruct P { char a; int b; };", "line 3 packs"),
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


def test_constants_are_read_as_c_reads_them() -> None:
    text = """
    #define N 010
    static constexpr int M = 011;
    struct P { int a[N]; int b[2 + 3 * 4]; int c[0x10]; int d[M * 2 + 1]; int e = 010; };
    """
    struct = torch_cubin.c_struct(text, "P")
    assert struct.size == 4 * (8 + 14 + 16 + 19 + 1)
    assert entries(torch_cubin.struct(struct)) == {4 * (8 + 14 + 16 + 19): ["int32", 8]}
    for wrong in ("int a[08];", "int a = 08;"):
        with pytest.raises(errors.InputError):
            torch_cubin.c_struct("struct P { " + wrong + " };", "P")


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


def of_the_compiler(text: str, names: list[tuple[str, int]], folder: Path) -> list[list[int]]:
    """Of structs with so many fields f0, f1, ...: the size and the fields' offsets."""
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    printed = "".join(
        f'  std::printf("%zu", sizeof({name}));\n'
        + "".join(f'  std::printf(" %zu", offsetof({name}, f{i}));\n' for i in range(count))
        + '  std::printf("\\n");\n'
        for name, count in names
    )
    source = folder / "layout.cpp"
    source.write_text(
        "#include <cstddef>\n#include <cstdint>\n#include <cstdio>\n"
        f"{text}int main() {{\n{printed}}}\n"
    )
    command = ["c++", "-w", "-std=c++17", str(source), "-o", str(folder / "layout")]
    subprocess.run(command, check=True, timeout=120)
    lines = subprocess.run(
        [str(folder / "layout")], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [[*map(int, line.split())] for line in lines]


def layout(text: str, name: str) -> list[int]:
    found = torch_cubin.c_struct(text, name)
    return [found.size, *(field.offset for field in found.fields.values())]


def test_random_structs_are_laid_out_as_the_compiler_does(tmp_path: Path) -> None:
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
    expected = of_the_compiler(text, names, tmp_path)
    assert [layout(text, name) for name, _ in names] == expected


PRAGMAS = [
    "pack(1)", "pack(2)", "pack(4)", "pack(8)", "pack()", "pack(push)", "pack(push, 1)",
    "pack(push, 2)", "pack ( push ,\\\n 4 )", "pack(push, 8)", "pack(push, 16)", "pack(pop)",
    "pack(pop)", "pack(pop)", "once",
]  # fmt: skip
ATTRIBUTES = [
    *[""] * 12, "__attribute__((packed))", "__attribute__((aligned(1), packed))",
    "__attribute__((unused, __packed__, aligned(4)))", "__attribute__((aligned(16)))",
    "__attribute__((__aligned__(2), __unused__))", "__attribute((packed))",
]  # fmt: skip


def test_packed_structs_are_refused_and_no_others_are_wrong(tmp_path: Path) -> None:
    r = random.Random(5)
    text, names = "", []
    for number in range(200):
        types = [*TYPES[:12], *([f"S{r.randrange(number)}"] if number else [])]
        if r.randrange(3) == 0:
            text += f"#pragma {r.choice(PRAGMAS)}\n"
        count = r.randrange(1, 5)
        rarely = [*ATTRIBUTES, *[""] * 40]
        fields = "".join(
            f" {r.choice(types)} f{i}{r.choice(['', '', '[2]'])} {r.choice(rarely)};"
            for i in range(count)
        )
        attributes = ["", r.choice(ATTRIBUTES)]
        r.shuffle(attributes)
        text += f"struct {attributes[0]} S{number} {{{fields} }} {attributes[1]};\n"
        names.append((f"S{number}", count))
    taken = 0
    for (name, _), expected in zip(names, of_the_compiler(text, names, tmp_path), strict=True):
        try:
            found = layout(text, name)
        except errors.InputError as error:
            if "packs structs" not in str(error):
                raise
            continue
        taken += 1
        assert found == expected, name
    assert 40 < taken < 160, taken


PLAIN = "struct P { char a; int b; };\n"  # 8 bytes
PACKS = {
    "behind the brace": "struct P { char a; int b; } __attribute__((aligned(1), packed));",
    "before the name": "struct __attribute__((aligned(1), packed)) P { char a; int b; };",
    "with underlines": "struct P { char a; int b; } __attribute__((unused, __packed__));",
    "the short word": "struct P { char a; int b; } __attribute((packed));",
    "in a list": "struct [[gnu::aligned(2), gnu::packed]] P { char a; int b; };",
    "using": "struct [[using gnu: aligned(2), packed]] P { char a; int b; };",
    "underlines in a list": "struct [[__gnu__::__packed__]] P { char a; int b; };",
    "a typedef": "typedef struct { char a; int b; } __attribute__((aligned(1), packed)) P;",
    "a field": "struct P { char a; int b __attribute__((packed)); };",
    "a field, in a list": "struct P { char a; int b [[gnu::packed]]; };",
    "an enum": "enum E { A } __attribute__((packed));\nstruct P { E a; E b; };",
    "a typedef's enum": "typedef enum { A } __attribute__((packed)) E;\nstruct P { E a; };",
    "a struct in it": "#pragma pack(push, 1)\nstruct I { char a; int b; };\n#pragma pack(pop)\n"
    "struct M { I i[2]; };\ntypedef M N;\nstruct P { char a; N n; };",
    "pushed": "#pragma pack(push, 2)\n" + PLAIN,
    "pushed twice": "#pragma pack(push, 2)\n#pragma pack(push, 8)\n#pragma pack(pop)\n" + PLAIN,
    "pushed, then said": "#pragma pack(push)\n#  pragma pack ( 1 )\n" + PLAIN,
    "a push with a name": "#pragma pack(push, before, 1)\n" + PLAIN,
    "a pop with a name": "#pragma pack(push, 1)\n#pragma pack(pop, before)\n" + PLAIN,
    "a number that is not there": "#pragma pack(push, N)\n" + PLAIN,
    "in two lines": "#pragma pack(push, \\\n 1)\n" + PLAIN,
    "in the struct": "struct P { char a;\n#pragma pack(1)\n int b; };",
    "a large field": "#pragma pack(8)\nstruct P { char a; float4 b; };",
    "an alignment": "#pragma pack(8)\nstruct P { char a; alignas(16) int b; };",
    "in a conditional part": "#ifdef X\n#pragma pack(push, 1)\n#endif\n" + PLAIN,
    "undone in a conditional part": "#pragma pack(push, 1)\n#ifdef X\n#pragma pack(pop)\n"
    "#endif\n" + PLAIN,
    "in one branch": "#if X\n#pragma pack(1)\n#else\n#pragma pack(8)\n#endif\n" + PLAIN,
    "by an operator": '_Pragma("pack(push, 1)")\n' + PLAIN,
    "by a raw string": '_Pragma(R"(pack(1))")\n' + PLAIN,
    "by a macro": '#define BEGIN _Pragma("pack(push, 1)")\nBEGIN\n' + PLAIN,
    "by an attribute's macro": "#define SMALL \\\n __attribute__((aligned(1), packed))\n"
    "struct P { char a; int b; } SMALL;",
}  # fmt: skip


@pytest.mark.parametrize("case", PACKS)
def test_a_packed_struct_is_refused(case: str) -> None:
    with pytest.raises(errors.InputError, match=r"line \d+ packs structs"):
        torch_cubin.c_struct(PACKS[case], "P")


NOT_PACKED = {
    "beside a packed one": "#pragma pack(push, 1)\nstruct Q { char a; int b; };\n"
    "#pragma pack(pop)\nstruct R { char a; int b; } __attribute__((packed));\n" + PLAIN,
    "before it": PLAIN + "#pragma pack(1)\nstruct Q { char a; int b; };",
    "that points to one": "struct Q { char a; int b; } __attribute__((packed));\n"
    "struct P { Q* q; };",
    "packed no more than it is": "#pragma pack(push, 8)\n" + PLAIN + "#pragma pack(pop)\n",
    "ints in fours": "#pragma pack(4)\n" + PLAIN,
    "the default again": "#pragma pack(1)\n#pragma pack()\n" + PLAIN,
    "in a guard": "#ifndef H\n#define H\n#pragma pack(push, 8)\n"
    + PLAIN + "#pragma pack(pop)\n#endif",
    "alike in all branches": "#if X\n#pragma pack(8)\n#else\n#pragma pack(8)\n#endif\n" + PLAIN,
    "a comment": "// #pragma pack(1)\n/* __attribute__((packed)) */" + PLAIN,
    "other attributes": "struct [[deprecated]] P { char a; int b; } __attribute__((aligned(8)));",
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_PACKED)
def test_a_struct_that_is_not_packed_is_taken(case: str) -> None:
    assert torch_cubin.c_struct(NOT_PACKED[case], "P").size == 8


def test_attributes_that_align() -> None:
    text = "struct P { int a __attribute__((aligned(8))), b; } __attribute__((aligned(32)));"
    assert layout(text, "P") == [32, 0, 4]
    with pytest.raises(errors.InputError, match=r"line 2 has an unknown attribute"):
        torch_cubin.c_struct("struct Q { int a; };\nstruct [[no::such]] P { Q a; };", "P")
    assert (
        torch_cubin.c_struct("struct [[no::such]] P { int a; };\nstruct Q { int a; };", "Q").size
        == 4
    )


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
    words += ["\n#pragma pack(1)\n", "\n#pragma pack(push", "__attribute__", "packed", "aligned"]
    words += ["\n#if\n", "\n#else\n", "\n#endif\n"]
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
