"""Makes what tests/data/tile holds, with the cuTile that is importable (cuda-tile[tileiras]).

python tests/data/make_tile.py
"""

from __future__ import annotations

from pathlib import Path

import cuda.tile as ct
from cuda.tile.compilation import (
    ArrayConstraint,
    CallingConvention,
    KernelSignature,
    ScalarConstraint,
    export_kernel,
)

HERE = Path(__file__).resolve().parent / "tile"


@ct.kernel
def add(x, y, out, TILE: ct.Constant[int]):
    i = ct.bid(0)
    a = ct.load(x, index=(i,), shape=(TILE,))
    b = ct.load(y, index=(i,), shape=(TILE,))
    ct.store(out, index=(i,), tile=a + b)


@ct.kernel(num_ctas=2)
def add2(x, y, out, TILE: ct.Constant[int]):
    i = ct.bid(0)
    a = ct.load(x, index=(i,), shape=(TILE,))
    b = ct.load(y, index=(i,), shape=(TILE,))
    ct.store(out, index=(i,), tile=a + b)


@ct.kernel
def scale(x, out, by, TILE: ct.Constant[int]):
    i, j = ct.bid(0), ct.bid(1)
    a = ct.load(x, index=(i, j), shape=(TILE, TILE))
    ct.store(out, index=(i, j), tile=a * by)


def array(ndim: int, **more) -> ArrayConstraint:
    return ArrayConstraint(
        ct.float32, ndim, index_dtype=ct.int32, stride_lower_bound_incl=0, alias_groups=(),
        may_alias_internally=False, base_addr_divisible_by=16, **more,
    )  # fmt: skip


ONE = {"stride_constant": (1,)}
ROWS = {"stride_constant": (None, 1)}
KERNELS = {
    "add": (add, [*[array(1, **ONE)] * 3, 1024], ("sm_80", "sm_90")),
    "add_const": (add, [*[array(1, shape_constant=(4096,), **ONE)] * 3, 1024], ("sm_90",)),
    "add2": (add2, [*[array(1, shape_divisible_by=16, **ONE)] * 3, 1024], ("sm_90",)),
    "scale": (
        scale,
        [array(2, stride_divisible_by=(4, 1), **ROWS), array(2, **ROWS),
         ScalarConstraint(ct.float32), 32],
        ("sm_90",),
    ),
}  # fmt: skip

if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    for name, (kernel, parameters, archs) in KERNELS.items():
        signature = KernelSignature(parameters, CallingConvention.cutile_python_v2())
        for arch in archs:
            export_kernel(
                kernel, [signature], str(HERE / f"{name}.{arch}.cubin"), gpu_code=arch,
                output_format="cubin",
            )  # fmt: skip
