"""How Inductor's kernels reduce rows in graphs that are compiled under install().

A norm reads its rows twice where a kernel loops over them. With a row for each block, of up to
COLUMNS columns in the block's registers, it reads them once. rows.py copies rows that do not lie
together (benchmarks/NOTES.md).
"""

from __future__ import annotations

from torch_cubin._drop_in import install
from torch_cubin._ops.batch_invariant import is_batch_invariant
from torch_cubin._pytorch import inductor_rows

ROWS = 1024  # fewer are too few blocks
COLUMNS = 2048


def _in_one_piece(rows: int, columns: int) -> bool:
    return _applies() and rows >= ROWS and columns <= COLUMNS


def _applies() -> bool:
    # Under batch_invariant() a row's bits may not depend on how many rows there are.
    return install.graph_policy() != "off" and not is_batch_invariant()


def register() -> None:
    inductor_rows.set_rows(_in_one_piece)


__all__ = ["register"]
