"""Flop formulas for torch.utils.flop_counter, equal to its count of torch.matmul and F.linear.

A FlopCounterMode sees what a public op forwards to, never the op itself, so the raw op and the one
with derivatives carry the formula as well; each call is counted once.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import math
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

_COUNTER = "torch.utils.flop_counter"


def _matmul_flops(a: Sequence[int], b: Sequence[int], *args: Any, **kwargs: Any) -> int:
    if len(b) == 1 or (len(a) == 1 and len(b) > 2):
        return _vector_flops(a, b)
    return 2 * math.prod(kwargs["out_shape"]) * a[-1]


def _linear_flops(input: Sequence[int], weight: Sequence[int], *args: Any, **kwargs: Any) -> int:
    if len(weight) == 1:
        return _vector_flops(input, weight)
    return 2 * math.prod(kwargs["out_shape"]) * input[-1]


def _vector_flops(a: Sequence[int], b: Sequence[int]) -> int:
    """torch.matmul makes it an mv or a dot, which torch counts only in versions that know them."""
    registry = sys.modules[_COUNTER].flop_registry
    known = torch.ops.aten.dot if len(a) == len(b) == 1 else torch.ops.aten.mv
    return 2 * math.prod(max(a, b, key=math.prod)) if known in registry else 0


def _add_formulas(counter: ModuleType) -> None:
    ops = torch.ops.cubin
    for targets, formula in (
        ([ops.matmul, ops._matmul, ops._matmul_autograd], _matmul_flops),
        ([ops.linear, ops._linear, ops._linear_autograd], _linear_flops),
    ):
        counter.register_flop_formula(targets)(formula)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Adds the formulas when the counter is imported: its module loads Triton, 0.6 s, for nothing
    in a process that counts no flops."""

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _add_formulas(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def register() -> None:
    if _COUNTER in sys.modules:
        _add_formulas(sys.modules[_COUNTER])
    else:
        sys.meta_path.insert(0, _AfterImport())
