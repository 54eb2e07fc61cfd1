"""Two kernels of one symbol and architecture in one file: refused, unless they are the same."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import real_cubins
from stated_cubins import entry, info, ptx
from unit.elf_builder import NOBITS, PROGBITS, Cubin, Kernel, Section, Symbol

import torch_cubin
from torch_cubin import errors

LOCAL, GLOBAL, WEAK = 0, 1, 2
PLAIN, TEMPLATE = "_Z1kPf", "_Z1kIfEvPT_"


def cubin(code: int, name: str = PLAIN, binding: int = LOCAL, table: bytes = b"", sm: int = 90):
    kernel = Kernel(name, info(8), code=bytes([code]) * 16, binding=binding)
    made = Cubin([kernel], flags=0x06000004 | sm << 8)
    if table:
        made.sections = [Section(".nv.constant3", PROGBITS, data=table)]
        made.symbols = [Symbol("_ZL5table", 6, size=len(table), info=1, other=0)]
    return made.build()


def one_file(*images: bytes) -> bytes:
    arrays = (", ".join(f"0x{byte:02x}" for byte in image) for image in images)
    lines = (f"unsigned char image_{i}[] = {{{a}}};" for i, a in enumerate(arrays))
    return "\n".join(lines).encode()


def text(body: str, linkage: str = "", head: str = "", name: str = PLAIN) -> bytes:
    return ptx(entry(name, "u64", body).replace(".visible ", linkage), head)


REFUSED = {
    "static": (cubin(1), cubin(2)),
    "static with another table": (cubin(1, table=b"abcd"), cubin(1, table=b"efgh")),
    "static template": (cubin(1, TEMPLATE), cubin(2, TEMPLATE)),
    "before CUDA 13": (cubin(1, binding=GLOBAL), cubin(2, binding=GLOBAL)),
    "extern C": (cubin(1, "k", GLOBAL), cubin(2, "k", GLOBAL)),
    "one of them static": (cubin(1, TEMPLATE, LOCAL), cubin(2, TEMPLATE, GLOBAL)),
}
TAKEN = {
    "a static of a header": (cubin(1), cubin(1)),
    "template": (cubin(1, TEMPLATE, GLOBAL), cubin(2, TEMPLATE, GLOBAL)),
    "weak": (cubin(1, PLAIN, WEAK), cubin(2, PLAIN, WEAK)),
    "architectures": (cubin(1), cubin(2, sm=80)),
    "names": (cubin(1), cubin(2, "_Z1lPf")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_different_kernels_of_one_symbol_are_refused(name: str) -> None:
    module = torch_cubin.load(one_file(*REFUSED[name]))
    (kernel,) = module
    with pytest.raises(errors.ImageError, match="two images of one file.*entry 0.*entry 1"):
        module[kernel]
    with pytest.raises(errors.ImageError):
        torch_cubin.define_op(
            f"statics::{name.replace(' ', '_')}(Tensor(a!) x) -> ()",
            kernel=(one_file(*REFUSED[name]), kernel), tensors={"x": "float32[n]"}, args="x",
            grid=1, block=32,
        )  # fmt: skip
    images = REFUSED[name]
    with pytest.raises(errors.ImageError):  # of several files, too
        torch_cubin.load(list(images))[kernel]


@pytest.mark.parametrize("name", TAKEN)
def test_the_same_kernel_of_one_symbol_is_taken(name: str) -> None:
    module = torch_cubin.load(one_file(*TAKEN[name]))
    for kernel in module:
        module[kernel]


def test_ptx_beside_ptx() -> None:
    table = ".const .align 4 .b8 table[4] = {1, 2, 3, 4};"
    pairs = {
        True: [
            (text("ret;"), text("ret;")),
            (text("ret;", ".weak "), text("exit;", ".weak ")),
        ],
        False: [
            (text("ret;"), text("exit;")),
            (text("ret;", head=table), text("ret;", head=table.replace("1", "9"))),
        ],
    }
    for same, cases in pairs.items():
        for images in cases:
            module = torch_cubin.load(one_file(*images), jit=True)
            if len(module.images) != 2:
                pytest.skip("arrays of PTX are not two images here")
            if same:
                module[PLAIN]
            else:
                with pytest.raises(errors.ImageError):
                    module[PLAIN]


SOURCE = """static __global__ void k(float* x) {{ x[0] = {}; }}
void f{}(float* x) {{ k<<<1, 1>>>(x); }}
"""


@pytest.mark.skipif(real_cubins.nvcc() is None, reason="needs nvcc, found none")
def test_two_static_kernels_linked_into_one_library(tmp_path: Path) -> None:
    for i in range(2):
        (tmp_path / f"{i}.cu").write_text(SOURCE.format(i + 1, i))
    command = [real_cubins.nvcc(), "-arch=sm_90", "-shared", "-Xcompiler", "-fPIC"]
    subprocess.run([*command, "-o", "libk.so", "0.cu", "1.cu"], cwd=tmp_path, check=True)
    module = torch_cubin.load(tmp_path / "libk.so")
    with pytest.raises(errors.ImageError, match="two images of one file"):
        module["k"]
    (tmp_path / "1.cu").write_text(SOURCE.format(1, 1))
    subprocess.run([*command, "-o", "libs.so", "0.cu", "1.cu"], cwd=tmp_path, check=True)
    assert torch_cubin.load(tmp_path / "libs.so")["k"].name == "_Z1kPf"


def test_variables_do_not_matter_to_kernels_of_other_names() -> None:
    image = Cubin([Kernel("a", info(8))], sections=[Section(".nv.global", NOBITS, size=8)]).build()
    torch_cubin.load(one_file(image, cubin(1)))["a"]
