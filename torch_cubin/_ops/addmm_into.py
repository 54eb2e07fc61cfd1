"""addmm_into for PyTorch: a fake kernel, and errors for transforms that do not support an op that
writes to its first argument.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_cubin import errors
from torch_cubin._ops import checks, mutated
from torch_cubin._ops.raw_ops import ADDMM_INTO as NAME
from torch_cubin._ops.raw_ops import raw_names
from torch_cubin._pytorch import operators, transforms


def _fake(out: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> None:
    mutated.fix_offsets(NAME, [("out", out)])
    checks.check_product(NAME, {}, {"out": out, "mat1": mat1, "mat2": mat2})
    shape = checks.product_shape(list(mat1.shape), list(mat2.shape))
    for size, wanted in zip(out.shape, shape, strict=True):
        checks.unify(size, wanted)


def _refusal(transform: str, advice: str) -> errors.Error:
    problem = f"has no rule for {transform}: it writes to 'out'"
    return checks.fault(NAME, problem, "a call outside of it", "one inside", advice)


def _autograd(out: Tensor, mat1: Tensor, mat2: Tensor, **factors: float) -> None:
    """Refuses calls that need a derivative; all others run as without gradients."""
    if any(x.requires_grad for x in (out, mat1, mat2)) or transforms.dual_level_is_open():
        raise _refusal("derivatives", "Call it under torch.no_grad(), or call addmm.")
    with transforms.below_autograd():
        torch.ops.cubin._addmm_into.default(out, mat1, mat2, **factors)


def _vmap(*args: Any, **kwargs: Any) -> None:
    raise _refusal("torch.vmap", "Give it the whole batch, or call addmm.")


def register(library: torch.library.Library) -> None:
    for name in raw_names(NAME):
        operators.register_fake(f"cubin::{name}", _fake, library)
        library.impl(name, _vmap, "FuncTorchBatched")
    library.impl(f"_{NAME}_autograd", _autograd, "Autograd")
