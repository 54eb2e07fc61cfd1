"""A cooperative launch: all blocks wait for each other. out = x / |x| of a vector in one launch.

    python examples/cooperative.py

The grid has one block per multiprocessor, a number that a grid expression can query. A grid whose
blocks cannot all be resident is refused, because it would deadlock. The blocks communicate through
`scratch`, memory that is allocated for one call.
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
