"""Your own kernel from a cubin, launched on tensors: z = x + y.

    python examples/vec_add.py                      # a committed cubin for the installed GPU
    python examples/vec_add.py --cubin FILE         # your own, with the same kernel

The source, and how to compile it (`nvcc -cubin -arch=sm_90a vec_add.cu -o vec_add.cubin`):

    extern "C" __global__ void vec_add(const float* x, const float* y, float* z, int n) {
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      if (i < n) z[i] = x[i] + y[i];
    }

Without a GPU it prints the cubin's facts. docs/your_own_kernel.md explains the calls.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # a checkout that is not installed
DATA = ROOT / "tests" / "data"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cubin", help="a cubin with the kernel vec_add")
    parser.add_argument("--size", type=int, default=1_000_003, help="elements (default: 1,000,003)")
    options = parser.parse_args()
    import torch_cubin

    # Several cubins form one module: each GPU gets the best one for it.
    cubins = options.cubin or sorted(DATA.glob("vec_add.*.cubin"))
    with torch_cubin.load(cubins) as module:
        vec_add = module["vec_add"]
        print(f"{module!r}\n\n{vec_add.info}\n")
        if not torch.cuda.is_available():
            print("No GPU here: nothing was launched.")
            return 0
        n = options.size
        x, y = (torch.randn(n, device="cuda") for _ in range(2))
        z = torch.empty_like(x)
        vec_add(x, y, z, n, grid=(n + 255) // 256, block=256)
        right = torch.equal(z, x + y)
        print(f"{n} elements on {torch.cuda.get_device_name()}: {'right' if right else 'WRONG'}")
        try:
            vec_add(x, y, z, grid=1, block=256)
        except torch_cubin.Error as error:  # calls are checked against the binary's parameter table
            print(f"\nA call that forgets the size is refused:\n{error}")
        return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
