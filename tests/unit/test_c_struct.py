"""c_struct: layouts read from C text; fields by name. test_c_struct_gcc.py compares with g++."""

from __future__ import annotations

import ctypes
import random
from pathlib import Path

import pytest
from declared import schema

import torch_cubin
from torch_cubin import errors
from torch_cubin._declared import kernel_arguments
from torch_cubin._declared.expressions import Traced, TracedTensor

pytest.importorskip("clang.cindex", reason="needs libclang, found none")
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
struct alignas(64) Params {
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
  CUtensorMap map;
  uint16_t last;
};
}
inline int count(const kernels::Params& p) { return p.shape.b; }
#endif
"""


def test_the_layout() -> None:
    params = torch_cubin.c_struct(PARAMS, "Params", cuda=12)
    offsets = {name: field.offset for name, field in params.fields.items()}
    assert offsets == {
        "q_ptr": 0, "o_ptr": 8, "q": 16, "kv": 40, "shape": 88, "stride_o": 104, "scale": 112,
        "shift": 116, "scale2": 120, "small": 124, "flags": 126, "mask": 131, "inner": 132,
        "seed": 144, "corner": 160, "map": 192, "last": 320,
    }  # fmt: skip
    assert (params.size, params.align) == (384, 64)
    assert torch_cubin.c_struct(PARAMS, "Strides", cuda=12).size == 24
    assert torch_cubin.c_struct(PARAMS, "Shape", cuda=12).size == 16
    short = torch_cubin.c_struct(PARAMS, "Params", prefix=120, cuda=12)
    assert (short.size, list(short.fields)[-1]) == (120, "shift")


def entries(made: kernel_arguments.Struct) -> dict[int, list]:
    return dict(made.members)


def test_fields_by_name_and_the_rest_zero() -> None:
    params = torch_cubin.c_struct(PARAMS, "Params", cuda=12)
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
        torch_cubin.struct(torch_cubin.c_struct(PARAMS, "Params", cuda=12), **members)
    assert says in str(caught.value)


REFUSED = {
    "an unknown type": ("struct P {\n  Unknown a; };", "line 2 does not compile"),
    "an unknown header": ('\n#include "no_such.h"\nstruct P { int a; };', "include="),
    "an unknown base": ("struct P : Unknown { int a; };", "does not compile"),
    "an unknown size": ("struct P { int a[N]; };", "undeclared identifier 'N'"),
    "an error elsewhere": ("struct Q { int a };\nstruct P { int a; };", "line 1 does not compile"),
    "an alignment that is too small": ("struct alignas(2) P { int a; };", "does not compile"),
    "two of a name": ("namespace a { struct P { int a; }; } namespace b { struct P { char c; }; }",
                      "a::P, b::P"),
    "a template": ("template <int N> struct P { int a[N]; };", "is a template"),
    "a declaration ahead": ("struct P;", "is not in the text"),
    "a virtual function": ("struct P { virtual void f(); int a; };", "virtual function"),
    "a base's virtual function": ("struct B { virtual ~B(); }; struct P : B { int a; };",
                                  "virtual function"),
    "a template's virtual function": ("template <class T> struct B { virtual void f(); T t; };"
                                      "struct P { B<int> b; };", "virtual function"),
    "a virtual base": ("struct B { int b; }; struct P : virtual B { int a; };", "virtual base"),
    "a flexible array": ("struct P { int n; float a[]; };", "an array without a size"),
    "an array of nothing": ("struct P { int n; float a[0]; };", "an array without a size"),
    "a name twice": ("struct B { int a; }; struct P : B { float a; };", "a field twice"),
    "a large size": ("struct P { int a[99999999]; };", "out of range"),
    "no fields": ("struct P { };", "without fields"),
    "no struct": ("typedef int P;", "is no struct"),
    "no end": ("struct P { int a;", "does not compile"),
    "an open condition": ("#if 1\nstruct P { int a; };", "unterminated conditional"),
    "an error directive": ("#error no\nstruct P { int a; };", "does not compile"),
    "another name": ("struct Params { int a; };", "expected 'P"),
    "nothing": ("", "struct NAME { ... };"),
    "an unknown attribute": ("struct [[no::such]] P { int a; };", "does not know"),
    "another byte order": ("struct P { int a; }"
                           ' __attribute__((scalar_storage_order("big-endian")));',
                           "does not know"),
    "an unknown attribute within": ("struct __attribute__((no_such)) Q { int a; };"
                                    "struct P { Q q; };",
                                    "does not know"),
    # g++ and clang agree on these, but nvcc's device compiler does not.
    "a less aligned typedef": ("typedef double D __attribute__((aligned(4)));"
                               "struct P { int a; D b[2]; };", "place differently"),
    "a less aligned typedef within": ("typedef long L __attribute__((aligned(1)));"
                                      "struct P { int a; struct { char c; L b; }; };",
                                      "place differently"),
    "alignas and pragma pack": ("\n#pragma pack(push, 2)\nstruct P { char a; alignas(8) int c; };\n"
                                "#pragma pack(pop)\n", "place differently"),
    "aligned and pragma pack": ("\n#pragma pack(1)\nstruct P { char a;"
                                " int c __attribute__((aligned(4))); };\n", "place differently"),
    "no unique address, twice": ("struct E {}; struct P { [[no_unique_address]] E a;"
                                 " [[no_unique_address]] E b; char c; };", "place differently"),
    "no unique address, in a base": ("struct E {}; struct P : E { [[no_unique_address]] E a;"
                                     " int c; };", "place differently"),
    "no unique address, of a base": ("struct E {}; struct F : E {}; struct P {"
                                     " [[no_unique_address]] F a; [[no_unique_address]] E b;"
                                     " char c; };", "place differently"),
    **{f"padding of a class with {more}": (
        f"struct B {{ int a; char b; {more} }}; {rest}", "use differently")
       for more in ("B(const B&) = default;", "B(B&&) = delete;")
       for rest in ("struct P : B { char d; };", "struct P { [[no_unique_address]] B b; char d; };",
                    "struct C { B b[2]; char c; }; struct P : C { char d; };")},
    "packed, with alignas": ("struct __attribute__((packed, aligned(4))) P { int a; alignas(32)"
                             " char b; };", "place differently"),
    "packed, with a field of no bits": ("struct __attribute__((packed)) P { float a; long : 0;"
                                        " char b; };", "place differently"),
    "no unique address, aligned": ("struct alignas(16) E {}; struct P { double a;"
                                   " [[no_unique_address]] E e; unsigned b : 24; long c; };",
                                   "place differently"),
    "alignas in a struct with one, and pragma pack":
        ("\n#pragma pack(2)\nstruct alignas(16) P { short a; alignas(16) int b; };\n",
         "place differently"),
    "no unique address, padding": ("struct Q { Q() {} int a; char b; };"
                                   "struct P { [[no_unique_address]] Q q; char c; };",
                                   "use differently"),
    "packed, with a base": ("struct B { int a; char b; }; struct __attribute__((packed)) D : B {"
                            " int c; }; struct P { char x; D d; };", "is packed and has a base"),
    "the layout of MSVC": ("struct __attribute__((ms_struct)) P { char c; int a : 3; };",
                           "device compiler ignores"),
    "a pragma that is ignored": ("#pragma pack(sideways)\nstruct P { char a; int b; };",
                                 "does not know"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_structs_are_refused(case: str) -> None:
    text, says = REFUSED[case]
    with pytest.raises(errors.InputError) as caught:
        torch_cubin.c_struct(text, "P")
    assert says in str(caught.value), caught.value


def test_names() -> None:
    text = """
    struct P { char a; };
    namespace n { struct P { short a; }; }
    namespace n { namespace { struct Q { int a; struct I { long b; } i; }; } }
    extern "C" { typedef struct { double a; } C; }
    template <class T, int N> struct V { T a[N]; };
    using F3 = V<float, 3>;
    """
    for name, size in {"P": 1, "::P": 1, "n::P": 2, "Q": 16, "n::Q": 16, "I": 8, "Q::I": 8, "C": 8,
                       "F3": 12, "V<short, 5>": 10, "V<n::P, 2>": 4}.items():  # fmt: skip
        assert torch_cubin.c_struct(text, name).size == size, name
    for name in ("V", "V<int>", "V<int, 2>; struct X {}", "m::P", "V<", ""):
        with pytest.raises(errors.InputError):
            torch_cubin.c_struct(text, name)


def test_headers_and_options(tmp_path: Path) -> None:
    (tmp_path / "more.h").write_text("struct More { int a[N]; };\n")
    path = tmp_path / "params.h"
    path.write_text('#include "more.h"\nstruct P { char a; More more; };\n')
    assert torch_cubin.c_struct(path, "P", options=["-DN=3"]).size == 16
    again = torch_cubin.c_struct(path.read_text(), "P", include=[tmp_path], options=["-DN=5"])
    assert again.fields["more"].offset == 4
    assert again.size == 24
    with pytest.raises(errors.InputError, match="line 1 of '.*more.h' does not compile"):
        torch_cubin.c_struct(path, "P")
    with pytest.raises(errors.FileError):
        torch_cubin.c_struct(tmp_path / "none.h", "P")
    with pytest.raises(errors.InputError, match="cannot be read by clang|does not compile|unknown"):
        torch_cubin.c_struct("struct P { int a; };", "P", options=["--no-such-option"])


MAP = "struct alignas(128) P { int a; CUtensorMap m; };"


@pytest.mark.parametrize("before", ["", "#include <cuda.h>\n"])
def test_the_offset_of_a_tensor_map_depends_on_the_cuda_version(
    before: str, tmp_path: Path
) -> None:
    """The sizes are equal, so that no binary would tell."""
    from torch_cubin._declared import c_front_end

    if not any((Path(folder) / "cuda.h").is_file() for folder in c_front_end.system_folders()):
        with pytest.raises(errors.InputError, match="depends on the version of CUDA"):
            torch_cubin.c_struct(before + MAP, "P")
        places = {v: torch_cubin.c_struct(before + MAP, "P", cuda=v).fields["m"].offset
                  for v in (12, 13)}  # fmt: skip
        assert places == {12: 64, 13: 128}
    for align in (64, 128):
        (tmp_path / "cuda.h").write_text(
            f"struct alignas({align}) CUtensorMap_st {{ unsigned long long o[16]; }};\n"
            'extern "C" { typedef struct CUtensorMap_st CUtensorMap; }\n'
        )
        text = "#include <cuda.h>\n" + MAP
        field = torch_cubin.c_struct(text, "P", include=[tmp_path]).fields["m"]
        assert (field.offset, field.kind) == (align, "tensor_map")
    first = torch_cubin.c_struct("struct P { CUtensorMap m; int n; void* p[14]; };", "P")
    assert first.fields["p"].offset == 136  # in both cases
    nested = "struct Q { CUtensorMap m; }; struct P { void* p; Q q[2]; };"
    for text in (nested, MAP.replace("CUtensorMap", "alignas(64) CUtensorMap")):
        with pytest.raises(errors.InputError, match="depends on the version of CUDA"):
            torch_cubin.c_struct(text, "P")
    for wrong in ("13", 13.0, True, 2):
        with pytest.raises(errors.InputError, match="'cuda'"):
            torch_cubin.c_struct(MAP, "P", cuda=wrong)


def test_a_layout_that_depends_on_the_compiler_is_refused(tmp_path: Path) -> None:
    text = "struct P {\n#ifdef __CUDACC__\n  char a;\n#endif\n  int b;\n};\n"
    (tmp_path / "params.h").write_text(text)
    for given in (text, '#include "params.h"\n'):
        with pytest.raises(errors.InputError, match="depends on __CUDACC__"):
            torch_cubin.c_struct(given, "P", include=[tmp_path])
        for option, size in (("-D__CUDACC__", 8), ("-D__CUDACC__=1", 8), ("-U__CUDACC__", 4)):
            found = torch_cubin.c_struct(given, "P", include=[tmp_path], options=[option])
            assert found.size == size
    usual = """
    #if defined(__CUDACC__) || defined(__NVCC__)
    #define HD __host__ __device__ __forceinline__
    #else
    #define HD inline
    #endif
    struct __align__(16) P { int b; HD P() : b(1) {} HD int get() const { return __ldg(&b); } };
    __global__ void __launch_bounds__(128, 2) kernel(const __grid_constant__ P p);
    """
    assert torch_cubin.c_struct(usual, "P").size == 16


def test_members_of_unions_and_bits() -> None:
    params = torch_cubin.c_struct(
        "struct P { union { int i = 3; float f; }; unsigned a : 3, b : 9; union U { long l; char c;"
        " } u; bool last : 1; };", "P")  # fmt: skip
    q = TracedTensor("q")
    assert entries(params()) == {0: ["int32", 3], 4: ["uint8", 0], 5: ["uint8", 0],
                                 16: ["uint8", 0]}  # fmt: skip
    found = entries(params(f=1.0, a=5, b=257, u={"c": 7}, last=True))
    assert found == {0: ["float32", 1.0], 4: ["uint8", 0b00001101], 5: ["uint8", 0b1000],
                     8: ["int8", 7], 16: ["uint8", 1]}  # fmt: skip
    for wrong, says in (
        ({"i": 1, "f": 1.0}, "two members of one union"),
        ({"u": {"l": 1, "c": 1}}, "two members of one union"),
        ({"u": 5}, "a dict of its fields"),
        ({"a": 8}, "from 0 to 7"),
        ({"a": -1}, "from 0 to 7"),
        ({"a": 1.0}, "of 3 bits"),
        ({"b": q.shape[0]}, "a constant"),
        ({"last": 2}, "from 0 to 1"),
    ):
        with pytest.raises(errors.InputError, match=says):
            params(**wrong)


def test_fields_without_a_number_type_are_given_as_bytes() -> None:
    text = "struct Q { int x; }; struct P { long double d; int Q::*m; __int128 i; };"
    params = torch_cubin.c_struct(text, "P")
    assert entries(params()) == {}
    assert entries(params(m=b"12345678")) == {16: ["bytes", b"12345678".hex()]}
    for wrong in ({"d": 1.0}, {"m": b"1"}, {"i": 5}):
        with pytest.raises(errors.InputError, match="expected [81]6? bytes"):
            params(**wrong)


def test_default_numbers_that_json_lacks() -> None:
    text = "struct P { float low = -__builtin_inff(); double n; unsigned long u = ~0ul;"
    text += " int a$b = 3; };"
    params = torch_cubin.c_struct(text, "P")
    low = ["bytes", "000080ff"]
    assert entries(params()) == {0: low, 16: ["bytes", "ff" * 8], 24: ["int32", 3]}
    found = entries(params(low=float("inf"), n=float("nan"), u=0))
    assert (found[0], found[8][0]) == (["bytes", "0000807f"], "bytes")
    with pytest.raises(errors.InputError, match="64-bit"):
        torch_cubin.c_struct("struct P { void* p; };", "P", options=["-m32"])
    with pytest.raises(errors.InputError, match="no text"):
        torch_cubin.c_struct("struct P { int a; }; // \ud800", "P")


def test_an_initialiser_that_is_no_constant() -> None:
    """Omitted fields would be zero instead."""
    text = (
        "int f(); struct B { int a = f(); }; struct P { B b; int n; float x = f(); char s[4] = "
        '"ab"; };'
    )
    params = torch_cubin.c_struct(text, "P")
    assert entries(params(b={"a": 1}, x=2.0, s=0, n=3)) == {
        0: ["int32", 1], 4: ["int32", 3], 8: ["float32", 2.0],
    }  # fmt: skip
    for given in ({"x": 2.0, "s": 0}, {"b": {"a": 1}, "s": 0}, {"b": {"a": 1}, "x": 2.0}):
        with pytest.raises(errors.InputError, match="no constant number: expected a value for"):
            params(**given)
    hidden = "template <class T> struct B { T t = 5; }; template <class T> struct A : B<T> {};"
    params = torch_cubin.c_struct(hidden + "struct P { char c; A<long> a; };", "P")
    assert (params.size, params.fields["a"].offset) == (16, 8)
    assert entries(params(a=bytes(8))) == {8: ["bytes", bytes(8).hex()]}
    with pytest.raises(errors.InputError, match="a template with a base class"):
        params()
    with pytest.raises(errors.InputError, match="a template with a base class"):
        torch_cubin.c_struct(hidden, "A<int>")


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that includes nothing, or what c_struct knows of, needs no g++."""
    from torch_cubin._declared import c_front_end

    monkeypatch.setattr(c_front_end, "system_folders", lambda: ())
    assert torch_cubin.c_struct(PARAMS, "Params", cuda=12).size == 384
    text = "#include <climits>\n#include <cstdint>\nstruct P { std::uint8_t a = UINT8_MAX; int b ="
    assert entries(torch_cubin.c_struct(text + " INT_MAX; };", "P")()) == {
        0: ["uint8", 255], 4: ["int32", 2**31 - 1],
    }  # fmt: skip


def test_without_libclang(torch_python) -> None:
    """torch_cubin does not import it; c_struct says what to install."""
    code = """if True:
        import sys
        import torch_cubin
        assert not [name for name in sys.modules if name.partition(".")[0] == "clang"]
        sys.modules["clang"] = None
        try:
            torch_cubin.c_struct("struct P { int a; };", "P")
        except torch_cubin.errors.InputError as error:
            print(error)
    """
    assert "pip install libclang" in torch_python.output(code)


def test_prefixes_and_types() -> None:
    for prefix in (0, 500, "8", True):
        with pytest.raises(errors.InputError):
            torch_cubin.c_struct(PARAMS, "Params", prefix=prefix, cuda=12)
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


def test_hostile_text() -> None:
    """For every text, the error is ours and is raised soon."""
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
    for _ in range(300):
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


def test_headers_see_the_macros_of_gcc(tmp_path: Path) -> None:
    text = "#ifdef __clang__\nstruct Q { int a; };\n#else\nstruct Q { long a; };\n#endif\n"
    (tmp_path / "q.h").write_text(text)
    (tmp_path / "p.h").write_text('#include "q.h"\nstruct P { Q q; char c; };\n')
    assert torch_cubin.c_struct(tmp_path / "p.h", "P").size == 16
