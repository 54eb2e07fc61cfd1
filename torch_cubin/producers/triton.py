"""Triton's kernels as ops: docs/producers.md.

    import torch_cubin.producers.triton as tct

    op = tct.define_op(
        "mylib::add(Tensor x, Tensor y) -> Tensor",
        kernel=add_kernel,  # @triton.jit
        signature="*fp32:16, *fp32:16, *fp32:16, i32, 1024", archs=["sm_80", "sm_90a"],
        tensors=dict(x="float32[*s]", y="float32[*s]", out="float32[*s]"),
        args=dict(x_ptr="x", y_ptr="y", out_ptr="out", n=lambda x: x.numel()),
        grid=lambda x, BLOCK: torch_cubin.cdiv(x.numel(), BLOCK))

Importing this needs no Triton, nor does loading a package of such ops; compiling does.
"""

from __future__ import annotations

from typing import Any

from torch_cubin import errors
from torch_cubin._triton.arguments import Descriptor
from torch_cubin._triton.files import read, write
from torch_cubin._triton.kernel import Parameter, TritonKernel
from torch_cubin._triton.live import compile
from torch_cubin._triton.op import define_op
from torch_cubin._triton.record import Recorded, Recording, record


@errors.named_keywords
def descriptor(tensor: Any, *, padding: str = "zero") -> Descriptor:
    """In define_op's `args`: a host TensorDescriptor of a whole tensor, by its name, whose elements
    out of bounds read as `padding`, "zero" or "nan". A tensor's name alone means "zero"."""
    if padding not in ("zero", "nan"):
        raise errors.fault(
            "input", "descriptor argument 'padding'", "is unknown", expected="'zero' or 'nan'",
            got=repr(padding),
        )  # fmt: skip
    return Descriptor(tensor, padding)


__all__ = [
    "Parameter",
    "Recorded",
    "Recording",
    "TritonKernel",
    "compile",
    "define_op",
    "descriptor",
    "read",
    "record",
    "write",
]
