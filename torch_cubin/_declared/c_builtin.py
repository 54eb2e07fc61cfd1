"""Declarations of nvcc and of CUDA's headers, for C texts whose includes are not found.

Except for CUtensorMap, only types whose layout is the same in every version of CUDA are listed. An
installed header takes precedence: a declaration is added only for names that are undeclared.
"""

from __future__ import annotations

# Keywords of CUDA C++ that do not affect a layout, and the one that does.
KEYWORDS = (
    *(f"-D{word}=" for word in ("__host__", "__device__", "__global__", "__constant__",
                                "__shared__", "__managed__", "__forceinline__",
                                "__grid_constant__", "__noinline__")),
    "-D__launch_bounds__(...)=",
    "-D__align__(n)=__attribute__((aligned(n)))",
)  # fmt: skip

# Headers that may be missing: their names are declared one by one.
HEADERS = (
    *("cuda.h", "cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h", "cuda_runtime.h", "driver_types.h"),
    *("cuda_runtime_api.h", "vector_types.h", "cstdint", "stdint.h", "cstddef", "stddef.h"),
    *("climits", "limits.h", "cfloat", "float.h", "stdbool.h", "cstdio", "stdio.h"),
)

_INTEGERS = {
    **{f"{sign}int{bits}_t": f"{'unsigned' if sign else 'signed'} {name}"
       for bits, name in ((8, "char"), (16, "short"), (32, "int"), (64, "long"))
       for sign in ("", "u")},
    "size_t": "unsigned long", "ptrdiff_t": "long", "intptr_t": "long",
    "uintptr_t": "unsigned long",
}  # fmt: skip
_LIMITS = {
    "CHAR_BIT": "8", "SCHAR_MAX": "127", "SCHAR_MIN": "(-128)", "UCHAR_MAX": "255",
    "SHRT_MAX": "32767", "SHRT_MIN": "(-32768)", "USHRT_MAX": "65535",
    "INT_MAX": "__INT_MAX__", "INT_MIN": "(-__INT_MAX__ - 1)", "UINT_MAX": "(__INT_MAX__ * 2u + 1)",
    "LONG_MAX": "__LONG_MAX__", "LONG_MIN": "(-__LONG_MAX__ - 1)",
    "ULONG_MAX": "(__LONG_MAX__ * 2ul + 1)", "LLONG_MAX": "__LONG_LONG_MAX__",
    "LLONG_MIN": "(-__LONG_LONG_MAX__ - 1)", "ULLONG_MAX": "(__LONG_LONG_MAX__ * 2ull + 1)",
    "FLT_MAX": "__FLT_MAX__", "FLT_MIN": "__FLT_MIN__", "FLT_EPSILON": "__FLT_EPSILON__",
    "DBL_MAX": "__DBL_MAX__", "DBL_MIN": "__DBL_MIN__", "DBL_EPSILON": "__DBL_EPSILON__",
    "SIZE_MAX": "__SIZE_MAX__", "NULL": "nullptr",
    **{f"INT{n}_MAX": f"__INT{n}_MAX__" for n in (8, 16, 32, 64)},
    **{f"INT{n}_MIN": f"(-__INT{n}_MAX__ - 1)" for n in (8, 16, 32, 64)},
    **{f"UINT{n}_MAX": f"__UINT{n}_MAX__" for n in (8, 16, 32, 64)},
}  # fmt: skip


def _vector(name: str, item: str, count: int, align: int) -> str:
    fields = ", ".join("xyzw"[:count])
    return f"struct alignas({align}) {name} {{ {item} {fields}; }};"


def _vectors() -> dict[str, str]:
    out = {}
    for base, item, size in (
        *(("char", "signed char", 1), ("uchar", "unsigned char", 1), ("short", "short", 2)),
        *(("ushort", "unsigned short", 2), ("int", "int", 4), ("uint", "unsigned int", 4)),
        *(("long", "long", 8), ("ulong", "unsigned long", 8), ("longlong", "long long", 8)),
        *(("ulonglong", "unsigned long long", 8), ("float", "float", 4), ("double", "double", 8)),
    ):
        for count in (1, 2, 3, 4):
            align = size if count in (1, 3) else min(16, size * count)
            out[f"{base}{count}"] = _vector(f"{base}{count}", item, count, align)
        if size == 8:  # CUDA 13 and later, which have the alignment in the name
            for align in (16, 32):
                name = f"{base}4_{align}a"
                out[name] = _vector(name, item, 4, align)
    return out


def _bits(name: str, *aliases: str, size: int = 2) -> dict[str, str]:
    """A CUDA type of `size` bytes, aligned to its size."""
    item = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int"}[size]
    # With constructors, like CUDA's: a struct with such a field is no POD; its padding is reused.
    code = f"struct {name} {{ {item} bits; {name}() = default;"
    code += f" template <class T, class... More> constexpr {name}(T, More...) : bits() {{}} }};"
    return {name: code, **{alias: f"{code} typedef {name} {alias};" for alias in aliases}}


_HANDLES = {
    "CUstream": "CUstream_st", "cudaStream_t": "CUstream_st", "CUevent": "CUevent_st",
    "cudaEvent_t": "CUevent_st", "CUmodule": "CUmod_st", "CUfunction": "CUfunc_st",
    "CUlibrary": "CUlib_st", "cudaLibrary_t": "CUlib_st", "CUkernel": "CUkern_st",
    "cudaKernel_t": "CUkern_st",
}  # fmt: skip

HANDLES = frozenset(_HANDLES.values())

# A macro gives the alignment of a CUtensorMap: 64 before CUDA 13, 128 since.
MAP_ALIGNMENT = "TORCH_CUBIN_MAP_ALIGNMENT"
TENSOR_MAP = "CUtensorMap"
_MAP = f"struct alignas({MAP_ALIGNMENT}) CUtensorMap_st {{ unsigned long opaque[16]; }};"

DECLARATIONS: dict[str, str] = {
    **{name: f"typedef {code} {name};" for name, code in _INTEGERS.items()},
    **{name: f"#define {name} {value}" for name, value in _LIMITS.items()},
    **_vectors(),
    "dim3": "struct dim3 { unsigned int x, y, z; constexpr dim3(unsigned int a = 1,"
    " unsigned int b = 1, unsigned int c = 1) : x(a), y(b), z(c) {} };",
    **_bits("__half", "half"),
    **_bits("__nv_bfloat16", "nv_bfloat16"),
    **_bits("__half2", "half2", size=4),
    **_bits("__nv_bfloat162", "nv_bfloat162", size=4),
    **_bits("__nv_fp8_e4m3", size=1),
    **_bits("__nv_fp8_e5m2", size=1),
    **{name: f"struct {tag}; typedef struct {tag}* {name};" for name, tag in _HANDLES.items()},
    "CUdeviceptr": "typedef unsigned long long CUdeviceptr;",
    TENSOR_MAP: f"{_MAP} typedef CUtensorMap_st CUtensorMap;",
    "std": "namespace std { "
    + " ".join(f"typedef {code} {name};" for name, code in _INTEGERS.items())
    + " typedef decltype(nullptr) nullptr_t; enum class byte : unsigned char {}; }",
}  # fmt: skip


def declared(names: set[str]) -> str:
    """The declarations of these names, each struct once."""
    parts: dict[str, None] = {}
    for name in sorted(names & DECLARATIONS.keys()):
        code = DECLARATIONS[name]
        body, separator, rest = code.partition("; typedef ")
        if separator and not code.startswith("namespace"):
            # `half` and `__half` may both be named: the struct and its alias are separate parts.
            parts[f"{body};"] = None
            parts[f"typedef {rest}"] = None
        else:
            parts[code] = None
    return "\n".join(parts) + "\n"
