"""Counts which product kernels for sm_90a an H200 would run for random products, without a GPU.

    python tools/kernel_use.py [--products 8000] [--seed 1]

Products are planned on the tests' stand-in driver, which reports an H200's attributes; tuned tables
are ignored. A kernel that no product takes costs build time and wheel size: the three largest
16-bit tiles of mma.cu ran 2 of 23,279 times beside the kernels of sm90.cu, and are no longer built
for sm_90a. Needs a CPU build of torch and kernels for sm_90a (`make build`).
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import stand_in

MOST_ELEMENTS = 2**30  # of one operand: the stand-in driver allocates host memory


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--products", type=int, default=8000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if not stand_in.is_there():
        return stand_in.run_again()
    count_uses(random.Random(options.seed), options.products)
    return 0


def count_uses(rng: random.Random, products: int) -> None:
    driver, kernels = stand_in.driver()
    uses = collections.Counter({kernel["name"]: 0 for kernel in kernels})
    for _ in range(products):
        driver.reset()
        multiply(rng)
        uses.update(launch["kernel"] for launch in driver.launches())
    for name, count in sorted(uses.items(), key=lambda use: use[1]):
        print(f"{count:7} {name}")
    print(f"{products} products, {sum(uses.values())} launches, {len(kernels)} kernels")


def multiply(rng: random.Random) -> None:
    """Runs one random product: shape, layout, gaps and offsets, batches, epilogue, settings."""
    import torch
    from fake_driver import tensors

    import torch_cubin

    dtype = rng.choice((torch.float16, torch.bfloat16, torch.float32, torch.float64))
    batch = rng.choice((0, 0, 0, 2, 16, rng.randint(1, 300)))
    m, n, k = (stand_in.random_size(rng) for _ in range(3))
    while max(batch, 1) * max(m * n, m * k, n * k) > MOST_ELEMENTS:
        m, n, k = (stand_in.random_size(rng) for _ in range(3))

    def operand(rows: int, columns: int) -> torch.Tensor:
        gap, offset = rng.choice((0, 0, 0, 8, 1, 3)), rng.choice((0, 0, 0, 0, 1, 8))
        turned = rng.random() < 0.4
        stride = (1, rows + gap) if turned else (columns + gap, 1)
        shape = (rows, columns)
        if batch:
            whole = stride[1] * columns if turned else stride[0] * rows
            shape, stride = (batch, *shape), (rng.choice((0, whole)), *stride)
        return tensors.strided(shape, stride, dtype, 0, offset)

    a, b, kind = operand(m, k), operand(k, n), rng.choice(("plain", "linear", "addmm"))
    bias = tensors.empty(n, dtype=dtype)
    torch.backends.cuda.matmul.allow_tf32 = rng.random() < 0.5
    setting = torch_cubin.batch_invariant() if rng.random() < 0.25 else contextlib.nullcontext()
    with setting:
        if batch or kind == "plain":
            torch.ops.cubin._matmul(a, b)
        elif kind == "linear":
            weight = tensors.empty(n, k, dtype=dtype)
            activation = rng.choice(("none", "gelu", "relu"))
            torch.ops.cubin._linear_activation(a, weight, bias, activation)
        else:
            torch.ops.cubin._addmm(bias, a, b, beta=rng.choice((1, 0.5)), alpha=rng.choice((1, 2)))


if __name__ == "__main__":
    sys.exit(main())
