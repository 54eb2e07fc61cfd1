"""c_struct beside nvcc's device compiler: offsets, and sizes of kernels' parameters.

It lays some structs out otherwise than g++ does, and it is the one that reads them.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from c_declarations import PLAIN
from programs import output_of

import torch_cubin

pytest.importorskip("clang.cindex", reason="needs libclang, found none")
NVCC = shutil.which("nvcc")
# What device code cannot have: types, and offsets of fields that it may not name.
NOT_ON_A_DEVICE = re.compile(r"long double|_Complex|vector_size|private:|protected:|class P")


@pytest.mark.skipif(NVCC is None, reason="needs nvcc, found none")
def test_declarations_are_laid_out_as_nvcc_does(tmp_path: Path) -> None:
    """nvcc compares the offsets, and its cubin has the sizes."""
    includes, texts, sizes = "#include <cstddef>\n#include <type_traits>\n", "", {}
    for index, (name, (text, _)) in enumerate(PLAIN.items()):
        if NOT_ON_A_DEVICE.search(text):
            continue
        found = torch_cubin.c_struct(text, "P")
        sizes[name] = (f"k{index}", found.size)
        includes += "".join(re.findall(r"#include [^\n]*\n", text))
        text = re.sub(r"#include [^\n]*\n", "", text)
        undefined = "".join(f"#undef {n}\n" for n in re.findall(r"#define (\w+)", text))
        asserts = "".join(  # nothing is read of an empty field
            f" static_assert(std::is_empty_v<decltype(c{index}::P::{field})> ||"
            f' offsetof(c{index}::P, {field}) == {place.offset}, "{name}");'
            for field, place in found.fields.items() if place.bits is None
        )  # fmt: skip
        texts += f"namespace c{index} {{ {text}\n}}\n{undefined}"
        texts += f'extern "C" __global__ void k{index}(c{index}::P, int) {{{asserts} }}\n'
    assert len(sizes) >= 90
    source, cubin = tmp_path / "layout.cu", tmp_path / "layout.cubin"
    source.write_text(includes + texts)
    command = [NVCC, "-std=c++17", "-w", "-arch=sm_90a", "-cubin", source, "-o", cubin]
    output_of(command, timeout=300)
    kernels = torch_cubin.inspect(cubin)
    wrong = {name: (kernels[kernel].params[0].size, size)
             for name, (kernel, size) in sizes.items()
             if kernels[kernel].params[0].size != size}  # fmt: skip
    assert not wrong
