"""Errors of built-in and declared ops for tensors that are not dense: sparse, nested, and others.

Such a tensor has its own dispatch key, for which the ops have no kernel. Without these errors,
PyTorch would raise its own, whose text the C API before torch 2.13 loses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torch_cubin import errors
from torch_cubin._ops import checks, raw_ops
from torch_cubin._pytorch import operators

_KEYS = (
    *("SparseCPU", "SparseCUDA", "SparseMeta", "SparseCsrCPU", "SparseCsrCUDA", "SparseCsrMeta"),
    *("QuantizedCPU", "QuantizedCUDA", "MkldnnCPU"),
    *("NestedTensorCPU", "NestedTensorCUDA", "AutogradNestedTensor"),
)


def _refusal(op: str, arguments: Sequence[str]) -> Callable[..., torch.Tensor]:
    def refuse(*args: object, **kwargs: object) -> torch.Tensor:
        given = {**dict(zip(arguments, args, strict=False)), **kwargs}
        for argument, value in given.items():
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(tensor, torch.Tensor):
                    checks.check_dense(op, argument, tensor)
        raise errors.fault("internal", op, "was sent dense tensors under a key of other layouts")

    return refuse


def refuse_in(
    library: torch.library.Library, name: str, label: str, arguments: Sequence[str]
) -> None:
    """Registers the errors for one op of a library, which they call `label`."""
    for key in _KEYS:
        library.impl(name, _refusal(label, arguments), key)


def register(library: torch.library.Library) -> None:
    for op in (*raw_ops.ALL, *raw_ops.ROWS):
        for name in raw_ops.raw_names(op):
            arguments = operators.argument_names(raw_ops.overload(name))
            refuse_in(library, name, op.removesuffix("_activation"), arguments)
