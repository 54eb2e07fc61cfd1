"""What CuTe DSL's export_to_c writes: an object with the image in its data, and a header.

tests/data/cute holds what CuTe DSL 4.8.1 wrote of the kernel in docs/producers.md, with
function_prefix="addp" and 1,024 bytes of dynamic shared memory, without a GPU.
"""

from __future__ import annotations

from pathlib import Path

import contracts

import torch_cubin

CUTE = Path(__file__).resolve().parents[1] / "data" / "cute"
OBJECT = CUTE / "add.sm_90a.cute481.o"


def test_the_image_is_found_by_its_symbol() -> None:
    facts = torch_cubin.inspect(OBJECT)
    assert [(e.kind, e.name) for e in facts.entries] == [("fatbin", "kernels_binary")]
    (image,) = facts.images()
    assert (image.arch, image.toolkit) == ("sm_90a", "12.9")
    (kernel,) = image.kernels
    assert kernel.required_block == (256, 1, 1)
    assert [param.size for param in kernel.params] == [16, 16, 16]
    module = torch_cubin.load(OBJECT)
    assert set(module) == {kernel.name}


def test_an_op_of_a_cute_object_and_its_header() -> None:
    array = torch_cubin.c_struct((CUTE / "add.h.txt").read_text(), "addp_Tensor_x_t")
    assert (array.size, list(array.fields)) == (16, ["data", "dynamic_shapes"])
    op = torch_cubin.define_op(
        f"{contracts.new_name('cute_add')}(Tensor x, Tensor y) -> Tensor",
        kernels=torch_cubin.choices(OBJECT),
        tensors={"x": "float32[n]", "y": "float32[n]", "out": "float32[n]"},
        args=lambda x, y, out, n: [
            torch_cubin.struct(array, data=tensor, dynamic_shapes=[n]) for tensor in (x, y, out)
        ],
        grid=lambda n: torch_cubin.cdiv(n, 256),
        shared_memory=1024,
    )
    (entry,) = op.contract["kernels"]
    assert entry["block"] == [256, 1, 1]
