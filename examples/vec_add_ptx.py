"""PTX, compiled by the driver at its first launch: z = x + y.

    python examples/vec_add_ptx.py

PTX runs on every later GPU than it was made for, at the price of a compiler at run time; hence only
with jit=True. `nvcc -ptx -arch=compute_80 vec_add.cu` made this one, of the kernel in vec_add.py.
"""

import sys

import support
import torch

import torch_cubin


def main() -> int:
    path = support.ROOT / "tests" / "data" / "containers" / "vec_add.ptx"
    try:
        torch_cubin.load(path)
    except torch_cubin.Error as error:
        print(f"Without jit=True:\n{error}\n")
    vec_add = torch_cubin.load(path, jit=True)["vec_add"]
    print(vec_add.info)
    support.require_gpu()
    x, y = (torch.randn(100_003, device="cuda") for _ in range(2))
    z = torch.empty_like(x)
    vec_add(x, y, z, x.numel(), grid=(x.numel() + 255) // 256, block=256)
    return support.compare("vec_add of 100,003 floats", z, x + y)


if __name__ == "__main__":
    sys.exit(main())
