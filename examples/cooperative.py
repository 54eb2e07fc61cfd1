"""A cooperative launch: blocks that wait for one another. out = x / |x| of a whole vector, at once.

    python examples/cooperative.py

The grid is as large as the GPU has multiprocessors, which an expression may ask for. A grid whose
blocks cannot all run at once is refused: it would wait for ever. What the blocks tell one another
goes through `scratch`, memory for one call.
"""

import sys

import support
import torch

import torch_cubin
from torch_cubin import cdiv, int32, minimum

CUBIN = support.cubin("unit_norm")

unit_norm = torch_cubin.define_op(
    "examples::unit_norm(Tensor x) -> Tensor",
    kernel=f"{CUBIN}:unit_norm",
    tensors={"x": "float32[n]", "out": "float32[n]"},
    scratch={"parts": "float32[1024]"},
    args=lambda x, out, parts, n: (x, out, parts, int32(n)),
    grid=lambda n, multiprocessors: minimum(minimum(multiprocessors, 1024), cdiv(n, 512)),
    block=512,
    cooperative=True,
)


def main() -> int:
    print(unit_norm)
    support.require_gpu()
    wrong = 0
    for n in (1, 1000, 10_000_019):
        x = torch.randn(n, device="cuda")
        expected = (x.double() / x.double().norm()).float()
        wrong += support.compare(f"{n} floats", unit_norm(x), expected, 1e-6)
    kernel = torch_cubin.load(CUBIN)["unit_norm"]
    try:
        kernel(x, x, x, n, grid=100_000, block=512, cooperative=True)
        wrong += 1
    except torch_cubin.Error as error:
        print(f"\nA grid that is too large is refused:\n{error}")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
