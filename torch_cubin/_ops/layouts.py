"""Errors of the ops for tensors that are not dense: sparse, quantised, nested, MKL-DNN's.

Such a tensor has its own dispatch key, for which the ops have no kernel. Without these errors,
PyTorch would raise its own, whose text the C API before torch 2.13 loses.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from torch_cubin import errors
from torch_cubin._ops import checks, raw_ops
from torch_cubin._pytorch import operators

_KEYS = (
    *("SparseCPU", "SparseCUDA", "SparseMeta", "SparseCsrCPU", "SparseCsrCUDA", "SparseCsrMeta"),
    *("QuantizedCPU", "QuantizedCUDA", "MkldnnCPU"),
    *("NestedTensorCPU", "NestedTensorCUDA", "AutogradNestedTensor"),
)


def _refusal(op: str, name: str) -> Callable[..., torch.Tensor]:
    op = op.removesuffix("_activation")
    arguments = operators.argument_names(raw_ops.overload(name))

    def refuse(*args: object, **kwargs: object) -> torch.Tensor:
        given = {**dict(zip(arguments, args, strict=False)), **kwargs}
        for argument, value in given.items():
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(tensor, torch.Tensor):
                    checks.check_dense(op, argument, tensor)
        raise errors.fault("internal", op, "was sent dense tensors under a key of other layouts")

    return refuse


def register(library: torch.library.Library) -> None:
    for op in raw_ops.ALL:
        for name in raw_ops.raw_names(op):
            refuse = _refusal(op, name)
            for key in _KEYS:
                library.impl(name, refuse, key)
