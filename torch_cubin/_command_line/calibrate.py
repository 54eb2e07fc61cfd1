# Prints what _drop_in/calibrate.py measures.
"""`python -m torch_cubin calibrate`: the table behind the policy "fastest" on this GPU."""

from __future__ import annotations

from torch_cubin._drop_in import aten_kernels, calibrate
from torch_cubin._drop_in.report import table
from torch_cubin._kernels.launch import device_index
from torch_cubin._native import library


def run(index: int, *, again: bool) -> int:
    gpu = library.device(device_index(index))
    lines = calibrate.lines_of(index, again)
    shipped = aten_kernels.shipped_rows(gpu["name"])
    served = shipped or calibrate.rows(lines)
    rows = []
    for line in lines:
        serves = any(line.kind in r["kinds"] and line.dtype in r["dtypes"] for r in served)
        rows.append((line.kind, line.dtype, f"{line.speed:.2f}", "yes" if serves else "no"))
    print(f"{gpu['name']}, driver {gpu['driver']}")
    print("\n".join(table(("calls", "dtype", "speed over PyTorch's", "served"), rows)))
    if shipped:
        sources = ", ".join(sorted({row["measured"] for row in shipped}))
        print(f"served: by the table of this version, which was measured before: {sources}")
    else:
        print("served: what was measured here to be at least as fast; float32 as the setting is")
    return 0
