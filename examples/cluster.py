"""A cluster launch: blocks read each other's shared memory. Softmax of long rows.

    python examples/cluster.py

Eight blocks share a row: each keeps its part on its own multiprocessor, and they exchange two
numbers.
"""

import sys

import support
import torch

import torch_cubin
from torch_cubin import int32

CLUSTER = 8

softmax = torch_cubin.define_op(
    "examples::softmax(Tensor x) -> Tensor",
    kernel=f"{support.cubin('softmax')}:softmax",
    tensors={"x": "float32[m, n]", "out": "float32[m, n]"},
    args=lambda x, out, n: (x, out, int32(n)),
    grid=lambda m: (CLUSTER, m),
    cluster=CLUSTER,
    block=512,
)


def main() -> int:
    print(softmax)
    support.require_gpu(9)
    wrong = 0
    for m, n in ((40, 250_000), (3, 5), (1, 1)):
        x = torch.randn(m, n, device="cuda") * 5
        expected = torch.softmax(x.double(), 1).float()
        wrong += support.compare(f"{m} rows of {n}", softmax(x), expected, 1e-6)
    x = torch.randn(64, 250_000, device="cuda")
    ours = support.microseconds(lambda: softmax(x))
    theirs = support.microseconds(lambda: torch.softmax(x, 1))
    print(f"64 rows of 250,000: {ours:.0f} us, torch.softmax {theirs:.0f} us")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
