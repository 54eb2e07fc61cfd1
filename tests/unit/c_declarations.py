"""Declarations of a struct P, which c_struct and a C++ compiler must lay out identically.

Each has the text, and values for some of its fields: the bytes are compared too.
"""

from __future__ import annotations

from typing import Any

PLAIN: dict[str, tuple[str, dict[str, Any]]] = {
    "an int": ("struct P { int a; };", {"a": -5}),
    "padding": ("struct P { char a; double b; char c; };", {"b": 0.5, "c": 7}),
    "signed char": ("struct P { signed char a; unsigned char b; short c; unsigned short d; };", {}),
    "words in any order": ("struct P { long unsigned int a; long long unsigned b; short int c;"
                           " int unsigned d; char signed e; };", {"a": 1 << 63, "e": -1}),
    "wchar_t": ("struct P { char a; wchar_t b; char16_t c; char32_t d; };", {}),
    "long double": ("struct P { char a; long double b; int c; };", {"c": 3}),
    "int128": ("struct P { char a; __int128 b; unsigned __int128 c; };", {}),
    "bool": ("struct P { bool a; bool b[3]; int c; };", {"a": True, "b": [1, 0, 1]}),
    "pointers": ("struct Q; struct P { void* a; const int* const b; Q* c; char** d; };", {}),
    "restrict": ("struct P { const float* __restrict__ a; float* __restrict b; };", {}),
    "a pointer to a function": ("struct P { char a; void (*b)(int, float); };", {}),
    "a pointer to an array": ("struct P { char a; int (*b)[4]; };", {}),
    "pointers to members": ("struct Q { int x; }; struct P { char a; int Q::*b; void (Q::*c)(); };",
                            {}),
    "volatile": ("struct P { volatile int a; const volatile short* b; };", {"a": 2}),
    "several declarators": ("struct P { int a, *b, c[2], **d; };", {"c": [4, 5]}),
    "two dims": ("struct P { char a; int b[2][3]; short c; };", {"b": [1, 2, 3, 4, 5, 6]}),
    "a constexpr size": ("constexpr int kN = 1 + 1; struct alignas(16) P { int v[kN]; int n; };",
                         {"v": [1, 2], "n": 7}),
    "a shifted size": ("constexpr int kN = 1 << 3; struct P { char v[kN | 1]; int n; };", {}),
    "a conditional size": ("constexpr bool kB = sizeof(int) == 4;"
                           "struct P { int v[kB ? 3 : 5]; int n; };", {"n": 1}),
    "a function's size": ("constexpr int f(int n) { return n < 2 ? 1 : n * f(n - 1); }"
                          "struct P { char v[f(3)]; int n; };", {}),
    "a hex size": ("struct P { char a[0x11]; char b[010]; char c['\\n']; int d; };", {}),
    "a size with separators": ("struct P { char a[1'0]; int b; };", {}),
    "a macro's size": ("\n#define N(x) ((x) * 2 + 1)\nstruct P { char a[N(3)]; int b; };\n", {}),
    "an enumerator's size": ("enum { kA = 3, kB = kA * 2 }; struct P { char a[kB]; int b; };", {}),
    "sizeof": ("struct Q { int a; char b; }; struct P { char a[sizeof(Q)]; short b; };", {}),
    "a static member's size": ("struct P { static constexpr int N = 3; char a[N]; int b; };", {}),
    "if and else": ("\n#define FP8 1\n#if FP8 && !defined(OLD)\n#define N 3\n#else\n#define N 5\n"
                    "#endif\nstruct P {\n#ifdef OLD\n  int old;\n#elif FP8\n  char a[N];\n#else\n"
                    "  long b;\n#endif\n  int c;\n};\n", {"c": 9}),
    "if zero": ("struct P {\n#if 0\n  long a;\n#endif\n  char b; int c;\n};\n", {}),
    "macros of the compiler": ("\n#if defined(__clang__) || __GNUC__ < 5\nstruct P { int a; };\n"
                               "#else\nstruct P { long a; };\n#endif\n", {}),
    "features of clang": ("\n#ifndef __has_feature\n#define __has_feature(x) 0\n#endif\n"
                          "struct P {\n#if __has_feature(cxx_rtti) || defined(__clang_major__)\n"
                          "int a;\n#else\nlong a;\n#endif\n};\n", {}),
    "attributes of clang": ("\n#if __has_cpp_attribute(clang::lifetimebound)\n"
                            "struct P { int a; };\n#else\nstruct P { long a; };\n#endif\n", {}),
    "a redefined macro": ("\n#define M 2\nstruct A { int x[M]; };\n#undef M\n#define M 3\n"
                          "struct P { A a; int b[M]; };\n", {}),
    "scopes": ("typedef float E; struct X { typedef unsigned short E; E a; };"
               "struct P { E e; int n; X x; };", {"e": 1.5, "n": 2}),
    "scopes of structs": ("struct I { char c; }; struct Y { struct I { double d; }; I i; };"
                          "struct P { I a; Y y; Y::I z; };", {}),
    "scopes of constants": ("constexpr int N = 2; struct Y { enum { N = 5 }; char a[N]; };"
                            "struct P { char a[N]; Y y; int c; };", {}),
    "namespaces": ("namespace n { typedef double T; namespace m { struct Q { T t; }; } }"
                   "typedef char T; struct P { T a; n::m::Q q; n::T c; };", {"c": 0.25}),
    "using namespace": ("namespace n { struct Q { double d; }; } using namespace n;"
                        "struct P { char a; Q q; };", {}),
    "an alias of const": ("namespace a { struct B { int x; }; } using D = a::B const;"
                          "struct P { D* p; int n; };", {"n": 4}),
    "an alias of an array": ("typedef int V[3]; struct P { char a; V b; V c[2]; };",
                             {"b": [1, 2, 3]}),
    "an alias's template": ("template <class T> using Ptr = T*; struct P { char a; Ptr<int> b; };",
                            {}),
    "an enum": ("enum E { A, B = 7 }; struct P { char a; E b; };", {"b": 7}),
    "an enum's type": ("enum class E : unsigned char { A }; enum F : short { C };"
                       "struct P { E a; F b; int c; };", {"a": 3, "b": -2}),
    "a large enum": ("enum E { A = 1ll << 40 }; struct P { char a; E b; };", {}),
    "a negative enum": ("enum E { A = -1 }; struct P { char a; E b; };", {"b": -1}),
    "an enum within": ("struct P { enum class K : long { X } k; enum { Y } y; };", {"k": 5}),
    "nested structs": ("struct P { struct { float x; char c; } i; struct Q { int a; } q, r[2]; };",
                       {}),
    "a C typedef": ("typedef struct { int b; char c; } Q; typedef struct T { Q q; } P;", {}),
    "empty structs": ("struct E {}; struct P { E a; int b; E c; E d; };", {"b": 3}),
    "no unique address": ("struct E {}; struct P { [[no_unique_address]] E a; int b;"
                          " [[no_unique_address]] E c; char d; };", {"b": 3, "d": 4}),
    "a base": ("struct B { int b; char c; }; struct P : B { char d; };", {"b": 3, "d": 4}),
    "a base's padding": ("class B { public: int b; private: char c; };"
                         "struct P : B { char d; };", {"d": 4}),
    "two bases": ("struct A { char a; }; struct B { double b; }; struct P : A, B { short c; };",
                  {"a": 1, "b": 2.0, "c": 3}),
    "an empty base": ("struct E {}; struct P : E { int a; };", {"a": 1}),
    "an empty base and a field of its type": ("struct E {}; struct P : E { E e; int a; };",
                                             {"a": 1}),
    "bases of bases": ("struct A { short a; }; struct B : A { char b; }; struct C { char c; };"
                       "struct P : B, C { int d; };", {"a": 5, "b": 6, "c": 7, "d": 8}),
    "a base within": ("struct A { int a; }; struct B : A { char b; }; struct P { char x; B y; };",
                      {"x": 1}),
    "a base of bits": ("struct B { int a; unsigned f : 3, g : 5; }; struct P : B { char c; };",
                       {"f": 5, "g": 17, "c": 2}),
    "private fields": ("class P { int a = 2; protected: char b; public: long c; };", {"c": -1}),
    "constructors": ("struct P { int a; long b; P() {} P(int x) : a(x) {} ~P() {}"
                     " P(const P&) = default; P& operator=(const P&) = default; };", {"b": 3}),
    "functions": ("struct P { int a; int get() const { return a; } static int make(); long b;"
                  " template <int N> int f(); bool operator==(const P& o) const; };", {}),
    "friends": ("struct P { friend struct Q; friend int f(P&); char a; using T = int; T b; };", {}),
    "static assert": ("struct P { int a; static_assert(sizeof(int) == 4, \"int\"); char b; };", {}),
    "alignas": ("struct P { char a; alignas(8) char b; alignas(double) char c; };", {}),
    "alignas twice": ("struct alignas(4) alignas(32) P { char a; alignas(4) alignas(8) int b; };",
                      {"b": 1}),
    "alignas of a constant": ("constexpr int kA = 8 * 4; struct alignas(kA) P { int a; };", {}),
    "alignas zero": ("struct alignas(0) P { char a; };", {}),
    "a GNU alignment": ("struct P { char a; int b __attribute__((aligned(16))); }"
                        " __attribute__((aligned(64)));", {}),
    "the largest alignment": ("struct P { char a; char b __attribute__((aligned)); };", {}),
    "an aligned typedef": ("typedef int I __attribute__((aligned(32))); struct P { char a; I b; };",
                           {"b": 3}),
    "an aligned struct within": ("struct alignas(64) Q { int a; }; struct P { char a; Q b; };", {}),
    "packed": ("struct __attribute__((packed)) P { char a; int b; double c; };",
               {"b": 5, "c": 0.5}),
    "packed behind": ("struct P { char a; int b; } __attribute__((aligned(2), packed));", {"b": 9}),
    "a packed field": ("struct P { char a; int b __attribute__((packed)); };", {"b": 9}),
    "packed in a list": ("struct [[gnu::packed]] P { char a; short b; long c; };", {"c": 1}),
    "a packed struct within": ("struct __attribute__((packed)) Q { char a; int b; };"
                               "struct P { char a; Q q; int c; };", {}),
    "a struct in a packed one": ("struct Q { char a; int b; };"
                                 "struct __attribute__((packed)) P { char a; Q q; };", {}),
    "a packed enum": ("enum __attribute__((packed)) E { A }; struct P { E a; E b; };", {}),
    "pragma pack": ("\n#pragma pack(push, 1)\nstruct P { char a; int b; };\n#pragma pack(pop)\n",
                    {"b": 1}),
    "pragma pack 2": ("\n#pragma pack(push, 2)\nstruct P { char a; double b; int c; };\n"
                      "#pragma pack(pop)\n", {}),
    "an alignment beside pragma pack": ("\n#pragma pack(push, 1)\nstruct Q { char a; int b; };\n"
                                        "#pragma pack(pop)\nstruct P { Q q; alignas(8) int c; };\n",
                                        {"c": 2}),
    "a less aligned typedef in a packed struct":
        ("typedef long L __attribute__((aligned(1)));"
         "struct __attribute__((packed)) P { char a; L b; char c; };", {"b": 3}),
    "pragma pack 4": ("\n#pragma pack(4)\nstruct P { int a; double b; };\n#pragma pack()\n", {}),
    "pragma pack ended": ("\n#pragma pack(push, 1)\nstruct Q { char a; int b; };\n"
                          "#pragma pack(pop)\nstruct P { char a; Q q; int b; };\n", {}),
    "pragma pack by name": ("\n#pragma pack(push, saved, 1)\nstruct P { char a; long b; };\n"
                            "#pragma pack(pop, saved)\n", {}),
    "pack by an operator": ('_Pragma("pack(push, 1)") struct P { char a; int b; };'
                            ' _Pragma("pack(pop)")', {}),
    "packed by a macro": ("\n#define SMALL __attribute__((packed))\n"
                          "struct SMALL P { char a; int b; };\n", {}),
    "an anonymous union": ("struct P { char a; union { int b; double c; }; char d; };",
                           {"b": 5, "d": 1}),
    "an anonymous struct in it": ("struct P { char a; union { struct { short x, y; }; int z; }; };",
                                  {"x": 3, "y": -4}),
    "a union": ("union U { int a; double b; char c[12]; }; struct P { char a; U u; };", {"a": 1}),
    "a union's values": ("struct P { union { float f = 1.5f; int i; } u; union { int x; }; };", {}),
    "bit fields": ("struct P { unsigned a : 3; unsigned b : 7; int c : 5; };",
                   {"a": 5, "b": 100, "c": -3}),
    "bits over a word": ("struct P { unsigned a : 20; unsigned b : 20; char c; };",
                         {"a": 0xABCDE, "b": 0x54321, "c": 1}),
    "bits of chars": ("struct P { unsigned char a : 3; unsigned char b : 6; short c : 4; };",
                      {"a": 7, "b": 33, "c": -1}),
    "bits without a name": ("struct P { int a : 3; int : 0; int b : 4; int : 5; int c : 6; };",
                            {"a": -4, "b": 7, "c": -32}),
    "long bits": ("struct P { char x; unsigned long a : 40; unsigned long b : 20; };",
                  {"a": (1 << 40) - 2, "b": 5}),
    "bits of bools and enums": ("enum E : unsigned { A }; struct P { bool a : 1; E b : 2; };",
                                {"a": 1, "b": 2}),
    "packed bits": ("struct __attribute__((packed)) P { char x; unsigned a : 13; int b : 30; };",
                    {"a": 8000, "b": -7}),
    "initialisers": ("\n#include <climits>\n"
                     "struct P { int a = INT_MAX; int b{-7}; float c = 1; bool d = true;"
                     " unsigned char e = 'x'; void* f = nullptr; double g = -0.5; long h = {}; };",
                     {}),
    "pointers to nothing": ("struct P { void* a = 0; int* b{0}; char c; };", {}),
    "initialisers of arrays": ("struct P { int a[4] = {1, -2}; float b[2]{}; char c[2] = {3, 4};"
                               " };", {}),
    "initialisers of constants": ("enum class E : short { A = 4 }; constexpr int k = 3 * 5;"
                                  "struct P { E e = E::A; int a = k + 1; unsigned b = ~0u;"
                                  " int c = sizeof(long); unsigned char d = -1; };", {}),
    "initialisers of structs": ("struct Q { int a = 3; char b; }; struct P { char x; Q q;"
                                " Q r[2]; Q s = {}; Q t{}; };", {"x": 1}),
    "initialisers by a macro": ("\n#define IS(x) = (x)\nstruct P { int a IS(4), b IS(-5); };\n",
                                {"b": 2}),
    "initialisers of bits": ("struct P { int a = 2; unsigned char b; };", {"b": 200}),
    "a template": ("template <class T, int N> struct A { T v[N]; int n = N; };"
                   "struct P { char a; A<double, 2> b; A<char, 3> c; };", {}),
    "a specialisation": ("template <class T> struct A { T v; }; template <> struct A<int> { long v;"
                         " char c; }; struct P { char a; A<int> b; A<char> c; };", {}),
    "a partial one": ("template <class T> struct A { T v; }; template <class T> struct A<T*> {"
                      " T* v; char c; }; struct P { char a; A<int*> b; };", {}),
    "a dependent size": ("template <int N> struct A { static constexpr int kM = N * 2 + 1;"
                         " char v[kM]; }; struct P { A<3> a; int b; };", {}),
    "a member of a template": ("template <class T> struct A { struct I { T t; char c; }; };"
                               "struct P { char a; A<double>::I b; };", {}),
    "conditional types": ("template <bool B, class T, class F> struct If { using type = T; };"
                          "template <class T, class F> struct If<false, T, F> { using type = F; };"
                          "struct P { char a; If<(4 > 2), double, char>::type b; };", {"b": 4.0}),
    "a vector": ("typedef float V __attribute__((vector_size(16))); struct P { char a; V v; };",
                 {}),
    "complex": ("struct P { char a; _Complex float c; };", {}),
    "decltype": ("extern double x; struct P { char a; decltype(x) b; };", {"b": 1.0}),
    "a field of its own name": ("struct a { short x; }; struct P { char c; struct a a; };", {}),
    "digraphs": ("struct P <% char a<:3:>; int b; %>;", {"b": 6}),
    "a comment in a string": ('constexpr char s[] = "/*";struct P { char a[sizeof(s)]; int b; };'
                              "/* */", {}),
    "a continued comment": ("// one \\\nstruct P { long a; };\nstruct P { char a; int b; };\n", {}),
    "standard integers": ("\n#include <cstdint>\n#include <cstddef>\nstruct P { std::int8_t a;"
                          " uint16_t b; ::int32_t c; uint64_t d; size_t e; std::size_t f;"
                          " intptr_t g; std::ptrdiff_t h; uint_least8_t i; uint_fast16_t j; };",
                          {"d": 1 << 60}),
    "std::array": ("\n#include <array>\n#include <cstdint>\n"
                   "struct P { char a; std::array<std::int64_t, 3> b; };", {}),
    "an atomic": ("\n#include <atomic>\nstruct P { char a; std::atomic<long> b; };", {}),
}  # fmt: skip

# With CUDA's headers where they are installed, and with c_struct's own knowledge of them.
OF_CUDA: dict[str, str] = {
    "half": "#include <cuda_fp16.h>\nstruct P { char a; half b; __half c[3]; half2 d;"
    " __half2 e; };",
    "bfloat16": "#include <cuda_bf16.h>\nstruct P { char a; __nv_bfloat16 b; nv_bfloat16 c;"
    " __nv_bfloat162 d; nv_bfloat162 e; };",
    "fp8": "#include <cuda_fp8.h>\nstruct P { __nv_fp8_e4m3 a; __nv_fp8_e5m2 b[2]; int c; };",
    "padding of half": "#include <cuda_fp16.h>\nstruct B { int n; half h; };"
    " struct P : B { char c; };",
    "padding of dim3": "#include <cuda_runtime.h>\nstruct B { dim3 g; char h; };"
    " struct P : B { char c; };",
    **{
        f"{base}1 to {base}4": "#include <cuda_runtime.h>\nstruct P { "
        + " ".join(f"char a{n}; {base}{n} b{n};" for n in (1, 2, 3, 4)) + " };"
        for base in ("char", "uchar", "short", "ushort", "int", "uint", "long", "ulong",
                     "longlong", "ulonglong", "float", "double")
    },
    "vectors of 13": "#include <cuda_runtime.h>\nstruct P { char a; double4_16a b; char c;"
    " double4_32a d; longlong4_16a e; char f; ulong4_32a g; };",
    "handles": "#include <cuda.h>\n#include <cuda_runtime.h>\nstruct P { char a; cudaStream_t b;"
    " CUstream c; CUdeviceptr d; cudaEvent_t e; CUfunction f; };",
    "a map": "#include <cuda.h>\nstruct P { CUtensorMap a; int n; };",
    "a map behind": "#include <cuda.h>\nstruct alignas(128) P { int n; CUtensorMap a; };",
    "maps": "#include <cuda.h>\nstruct P { int n; CUtensorMap a[2]; char c; CUtensorMap d; };",
}  # fmt: skip
