"""torch.utils.flop_counter counts as many operations as for torch.matmul, each call once."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from ops.samples import (
    LINEAR_SHAPES,
    MATMUL_SHAPES,
    ids,
    linear,
    make_all,
    matmul,
    reference_linear,
)
from torch.utils.flop_counter import FlopCounterMode

CASES = [(matmul, torch.matmul, shapes) for shapes in MATMUL_SHAPES]
CASES += [(linear, reference_linear, shapes) for shapes in LINEAR_SHAPES]


def case_id(case) -> str:
    return f"{case[1].__name__}-{','.join(map(ids, case[2]))}"


def count(f) -> int:
    with FlopCounterMode(display=False) as mode:
        f()
    return mode.get_total_flops()


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_count_equals_torchs_in_every_grad_mode(case, device):
    op, stock, shapes = case
    for requires_grad in (False, True):
        args = make_all(shapes, device, requires_grad=requires_grad)
        expected = count(lambda: stock(*args))  # noqa: B023
        assert count(lambda: op(*args)) == expected  # noqa: B023
        with torch.no_grad():
            assert count(lambda: op(*args)) == expected  # noqa: B023
        with torch.inference_mode():
            assert count(lambda: op(*args)) == expected  # noqa: B023


# An outer product, which the gradient of a vector is, is elementwise here and an mm in torch.
@pytest.mark.parametrize(
    "case", [case for case in CASES if 1 not in map(len, case[2][:2])], ids=case_id
)
def test_count_of_forward_and_backward(case, device):
    op, stock, shapes = case
    args = make_all(shapes, device, requires_grad=True)
    assert count(lambda: op(*args).sum().backward()) == count(lambda: stock(*args).sum().backward())


def test_raw_ops_are_counted(device):
    a, b = make_all(((2, 3), (3, 4)), device)
    for name in ("_matmul", "_matmul_autograd"):
        assert count(lambda: getattr(torch.ops.cubin, name)(a, b)) == 48  # noqa: B023
    for name in ("_linear", "_linear_autograd"):
        assert count(lambda: getattr(torch.ops.cubin, name)(a, b.t())) == 48  # noqa: B023


def test_fake_tensors_are_counted():
    a, b = make_all(((2, 3), (3, 4)), "meta")
    assert count(lambda: matmul(a, b)) == 48


@pytest.mark.parametrize("first", ["torch_cubin", "torch.utils.flop_counter"])
def test_counter_imported_before_or_after(first):
    second = "torch.utils.flop_counter" if first == "torch_cubin" else "torch_cubin"
    code = f"""
import sys
import torch
import {first}
assert ({first!r} != "torch_cubin") or ("torch.utils.flop_counter" not in sys.modules)
import {second}
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as mode:
    torch.ops.cubin.matmul(torch.ones(2, 3), torch.ones(3, 4))
print(mode.get_total_flops())
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**__import__("os").environ, "PYTHONPATH": ":".join(filter(None, sys.path))},
    )
    assert done.stdout.strip() == "48", done.stderr
