"""audit() against experiments on the CPU: no class claims more than rows alone and in a batch show.

tests/gpu/test_cuda_same_bits.py runs the same on a GPU.
"""

from __future__ import annotations

import pytest
from row_bits import MOVING, POINTWISE, arguments_of, differs, rows_of

import torch_cubin
from torch_cubin._drop_in.audit import INVARIANT, classify


def test_pointwise_operators() -> None:
    """Every overload that PyTorch tags so and whose arguments a schema says."""
    refuted, tried = set(), 0
    for op in POINTWISE:
        for args in arguments_of(op, "cpu"):
            tried += 1
            if differs(lambda *rows, op=op: op(*rows), args):
                refuted.add(op.name())
                assert classify(op, args, {}, False)[0] != INVARIANT, op
    assert tried > 500
    assert "aten::silu" in refuted, "the experiment has nothing to show here"


@pytest.mark.parametrize("name", MOVING)
def test_operators_that_move_and_compare(name) -> None:
    for x in rows_of("cpu"):
        with torch_cubin.audit(strict=True) as found:
            MOVING[name](x)
        assert not differs(MOVING[name], [x])
    assert f"aten::{name}" in {row.op for row in found.rows}
