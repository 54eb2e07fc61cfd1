"""The floating-point work of a call's products and attention, and how much of it our kernels did.

A dispatch mode sees every operator of aten above our kernels, which stand below autograd. Whether
one of them served the operator is read off the counts behind torch_cubin.report(). Ops of ours are
served (transformers' attention calls one). It sees what compiled graphs call, too, but neither
Triton's products, which max-autotune may choose, nor CUDA graphs.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from torch_cubin._native import library


@dataclass(frozen=True)
class Share:
    served: float  # of the work, 0 to 1
    left: dict[str, float]  # operator: its part of the work, for those that PyTorch computed


def _grouped_mm(a: Any, b: Any, *rest: Any, **others: Any) -> int:
    """Every row times one matrix; of two matrices, groups of the inner dim."""
    return 2 * a.numel() * b.shape[-1]


def _attention(q: Any, k: Any, v: Any, *rest: Any, **others: Any) -> int:
    """Two products, with any number of heads of the keys. Hidden scores count."""
    return 2 * q.numel() * k.shape[-2] + 2 * q.numel() // q.shape[-1] * k.shape[-2] * v.shape[-1]


def _attention_backward(gradient: Any, *rest: Any, **others: Any) -> int:
    """Five products."""
    return _attention(*rest) * 5 // 2


_FORMULAS: dict[Any, Callable[..., Any]] = {
    **flop_registry,
    torch.ops.aten._grouped_mm: _grouped_mm,
    **{
        getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention{direction}"): formula
        for kind in ("flash", "efficient", "cudnn")
        for direction, formula in (("", _attention), ("_backward", _attention_backward))
    },
}


def has_formula(func: Any) -> bool:
    """Whether an operator is a product or an attention."""
    return func._overloadpacket in _FORMULAS and "convolution" not in func.name()


def _calls_of(names: set[str]) -> int:
    rows = library.op_calls(clear=False)
    return sum(row["calls"] for row in rows if row["op"] in names)


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.served, self.left = 0.0, collections.Counter[str]()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions run as they are, not their eager code."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not has_formula(func):
            return func(*args, **kwargs)
        name = func.name()
        names = {name, name.removesuffix(".default"), name.partition(".")[0]}
        before = _calls_of(names)
        result = func(*args, **kwargs)
        work = _FORMULAS[func._overloadpacket](*args, **kwargs, out_val=result)
        if name.startswith("cubin::") or _calls_of(names) > before:
            self.served += work
        else:
            self.left[name] += work
        return result


def share_of(call: Callable[[], object]) -> Share:
    """Runs the call once, with the contender entered."""
    with _Counting() as counting:
        call()
    total = counting.served + math.fsum(counting.left.values())
    if not total:
        raise ValueError("the call has no products and no attention")
    left = {name: work / total for name, work in counting.left.most_common()}
    return Share(counting.served / total, left)
