"""c_struct beside g++: offsets, sizes, alignments, types and bytes of the same declarations."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from c_declarations import OF_CUDA, PLAIN

import torch_cubin
from torch_cubin._declared.c_struct import CStruct
from torch_cubin._kernels.struct_bytes import packed

pytest.importorskip("clang.cindex", reason="needs libclang, found none")
CUDA = Path("/usr/local/cuda/include")
GCC = shutil.which("g++")
needs_gcc = pytest.mark.skipif(GCC is None, reason="needs g++, found none")
PROGRAM = r"""
#include <cstddef>
#include <cstdio>
#include <new>
#include <type_traits>
template <class T> void type() {
  using U = std::remove_cv_t<std::remove_all_extents_t<T>>;
  const int bits = 8 * sizeof(U);
  if constexpr (std::is_enum_v<U>) type<std::underlying_type_t<U>>();
  else if (std::is_same_v<U, bool>) std::printf("bool");
  else if (std::is_integral_v<U> && bits <= 64)
    std::printf("%sint%d", std::is_unsigned_v<U> ? "u" : "", bits);
  else if (std::is_floating_point_v<U> && bits <= 64) std::printf("float%d", bits);
  else if (std::is_pointer_v<U>) std::printf("pointer");
  else std::printf("other");
}
template <class T> void field(std::size_t offset) {
  std::printf(" %zu:%zu:", offset, sizeof(T));
  type<T>();
}
template <class P, class Set> void bytes(Set set) {
  alignas(4096) static unsigned char memory[1 << 16];
  for (auto& byte : memory) byte = 0;
  if constexpr (std::is_default_constructible_v<P>) {
    set(new (memory) P);
    std::printf(" ");
    for (std::size_t i = 0; i < sizeof(P); ++i) std::printf("%02x", memory[i]);
  } else {
    std::printf(" -");
  }
  std::printf("\n");
}
template <class F> using Item = std::remove_all_extents_t<std::remove_reference_t<F>>;
"""


def number(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value}ull" if value >= 1 << 31 else f"({value})"
    return str(value).lower()


def assigned(values: Mapping[str, Any]) -> str:
    out = ""
    for name, value in values.items():
        if isinstance(value, list):
            first = f"reinterpret_cast<Item<decltype((p->{name}))>*>(&p->{name})"
            out += "".join(f" {first}[{i}] = {number(v)};" for i, v in enumerate(value))
        else:
            out += f" p->{name} = static_cast<decltype(p->{name})>({number(value)});"
    return out


def of_gcc(
    cases: Mapping[str, tuple[str, CStruct, Mapping[str, Any]]], folder: Path, *options: str
) -> dict[str, list[str]]:
    """Of each struct P: size, alignment, each field that is no bit field, and the bytes."""
    includes, texts, main = "", "", ""
    for index, (text, found, values) in enumerate(cases.values()):
        includes += "".join(re.findall(r"#include [^\n]*\n", text))
        text = re.sub(r"#include [^\n]*\n", "", text)
        undefined = "".join(f"#undef {n}\n" for n in re.findall(r"#define (\w+)", text))
        texts += f"namespace c{index} {{ {text}\n}}\n{undefined}"
        main += f'  std::printf("%zu %zu", sizeof(c{index}::P), alignof(c{index}::P));\n'
        for name, place in found.fields.items():
            if place.bits is None:
                main += f"  field<decltype(c{index}::P::{name})>(offsetof(c{index}::P, {name}));\n"
        main += f"  bytes<c{index}::P>([](auto* p) {{{assigned(values)} }});\n"
    source = folder / "layout.cpp"
    source.write_text(f"{includes}{PROGRAM}{texts}int main() {{\n{main}}}\n")
    command = [GCC, "-w", "-std=gnu++17", "-O0", "-fno-access-control", *options, source]
    subprocess.run([*command, "-o", folder / "layout"], check=True, timeout=300)
    lines = subprocess.run([folder / "layout"], capture_output=True, text=True, check=True).stdout
    return {name: line.split() for name, line in zip(cases, lines.splitlines(), strict=True)}


def fields(found: CStruct) -> list[str]:
    return [
        f"{f.offset}:{f.end - f.offset}:{f.kind if isinstance(f.kind, str) else 'other'}"
        for f in found.fields.values() if f.bits is None
    ]  # fmt: skip


def same(ours: list[str], theirs: list[str]) -> bool:
    """The types are compared where g++ has a number or a pointer."""
    return len(ours) == len(theirs) and all(
        a == b or (b.endswith(":other") and a.split(":")[:2] == b.split(":")[:2])
        for a, b in zip(ours, theirs, strict=True)
    )


@needs_gcc
def test_declarations_are_laid_out_and_filled_as_gcc_does(tmp_path: Path) -> None:
    assert len(PLAIN) >= 100
    cases = {name: (text, torch_cubin.c_struct(text, "P"), values)
             for name, (text, values) in PLAIN.items()}  # fmt: skip
    wrong = []
    for name, said in of_gcc(cases, tmp_path).items():
        _, found, values = cases[name]
        ours = [str(found.size), str(found.align)]
        made = packed(found(**values), lambda *_: (b"", None))[0].hex()
        if ours != said[:2] or not same(fields(found), said[2:-1]) or said[-1] not in ("-", made):
            wrong.append((name, said, [*ours, *fields(found), made]))
    assert not wrong, "\n".join(f"{n}: g++ {a}\n  c_struct {b}" for n, a, b in wrong)


@needs_gcc
@pytest.mark.skipif(not (CUDA / "cuda.h").is_file(), reason="needs CUDA's headers, found none")
def test_types_of_cuda_are_laid_out_as_gcc_does(tmp_path: Path) -> None:
    """Read from CUDA's headers, and without them."""
    version = (
        int(re.search(r"#define CUDA_VERSION (\d+)", (CUDA / "cuda.h").read_text())[1]) // 1000
    )
    listed = {name: text for name, text in OF_CUDA.items() if version >= 13 or "13" not in name}
    for include in ([CUDA], []):
        cases = {name: (text, torch_cubin.c_struct(text, "P", include=include, cuda=version), {})
                 for name, text in listed.items()}  # fmt: skip
        for name, said in of_gcc(cases, tmp_path, f"-I{CUDA}").items():
            found = cases[name][1]
            ours = [f.rsplit(":", 1)[0] for f in fields(found)]
            theirs = [f.rsplit(":", 1)[0] for f in said[2:-1]]
            assert [str(found.size), str(found.align), *ours] == [*said[:2], *theirs], name
