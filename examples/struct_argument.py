"""A kernel that takes its numbers in a struct by value.

    python examples/struct_argument.py

A ctypes.Structure (or a structured NumPy dtype) gives the layout of the struct, with the same
padding as in CUDA C++. A direct launch takes an instance; in an op, torch_cubin.struct() says which
members depend on the call.
"""

import ctypes
import sys

import support
import torch

import torch_cubin

CUBIN = support.cubin("affine")


class Affine(ctypes.Structure):
    _fields_ = [
        ("scale", ctypes.c_float),
        ("shift", ctypes.c_float),
        ("limit", ctypes.c_double),
        ("count", ctypes.c_int32),
    ]


affine = torch_cubin.define_op(
    "examples::affine(Tensor x, float scale, float shift=0., float limit=1e30) -> Tensor",
    kernel=f"{CUBIN}:affine",
    tensors={"x": "float32[*s]", "out": "float32[*s]"},
    args=lambda x, scale, shift, limit, out: (
        torch_cubin.struct(Affine, scale=scale, shift=shift, limit=limit, count=x.numel()),
        x,
        out,
    ),
    grid=lambda x: torch_cubin.cdiv(x.numel(), 256),
    block=256,
)


def main() -> int:
    kernel = torch_cubin.load(CUBIN)["affine"]
    print(f"{kernel.info}\n{affine}")
    support.require_gpu()
    x = torch.randint(-99, 100, (5000,), device="cuda").float()
    expected = (x * 0.5 + 3).clamp(-20, 20)
    out = torch.empty_like(x)
    kernel(Affine(0.5, 3, 20, 5000), x, out, grid=20, block=256)
    wrong = support.compare("launched directly", out, expected)
    wrong += support.compare("as an op", affine(x, 0.5, 3, 20), expected)
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
