"""A kernel that loads its tiles with the Tensor Memory Accelerator: out = x.t() of float32.

    python examples/tensor_map.py

For direct launches, a torch_cubin.TensorMap is made once per tensor and passed to each launch; an
op makes it for the tensor of each call. The row stride must be a multiple of 16 bytes, a hardware
rule that is checked; so x may be a slice. Reads outside x give zero, so the kernel needs no bounds
checks for loads.
"""

import sys

import support
import torch

import torch_cubin
from torch_cubin import TensorMap, cdiv, int32

CUBIN, TILE = support.cubin("transpose"), 32

transpose = torch_cubin.define_op(
    "examples::transpose(Tensor x) -> Tensor",
    kernel=f"{CUBIN}:transpose",
    tensors={"x": "float32[m, n] rows", "out": "float32[n, m]"},
    args=lambda x, out, m, n: (TensorMap(x, (TILE, TILE)), out, int32(m), int32(n)),
    grid=lambda m, n: (cdiv(n, TILE), cdiv(m, TILE)),
    block=256,
)


def main() -> int:
    kernel = torch_cubin.load(CUBIN)["transpose"]
    print(f"{kernel.info}\n{transpose}")
    support.require_gpu(9)
    x = torch.randn(1000, 1004, device="cuda")
    out = torch.empty(1004, 1000, device="cuda")
    kernel(TensorMap(x, (TILE, TILE)), out, 1000, 1004, grid=(32, 32), block=256)
    wrong = support.compare("launched directly", out, x.t())
    wrong += support.compare("as an op", transpose(x), x.t())
    part = x[10:510, 4:40]
    wrong += support.compare("of a slice", transpose(part), part.t())
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
