"""What the ops answer to tensors that are not dense: sparse, quantised, nested, MKL-DNN's.

Such a tensor brings a dispatch key of its own, for which the ops have no kernel. Without these,
PyTorch would say so in a text of its own, which the C API below torch 2.13 loses on the way.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from torch_cubin import errors
from torch_cubin._ops import checks
from torch_cubin._pytorch import operators

_KEYS = (
    *("SparseCPU", "SparseCUDA", "SparseMeta", "SparseCsrCPU", "SparseCsrCUDA", "SparseCsrMeta"),
    *("QuantizedCPU", "QuantizedCUDA", "MkldnnCPU"),
    *("NestedTensorCPU", "NestedTensorCUDA", "AutogradNestedTensor"),
)


def _refusal(name: str) -> Callable[..., torch.Tensor]:
    op = name.removeprefix("_").removesuffix("_autograd").removesuffix("_activation")
    arguments = operators.argument_names(getattr(torch.ops.cubin, name).default)

    def refuse(*args: object, **kwargs: object) -> torch.Tensor:
        given = {**dict(zip(arguments, args, strict=False)), **kwargs}
        for argument, value in given.items():
            if isinstance(value, torch.Tensor):
                checks.check_dense(op, argument, value)
        raise errors.fault("internal", op, "was sent dense tensors under a key of other layouts")

    return refuse


def register(library: torch.library.Library) -> None:
    for name in (
        *("_matmul", "_matmul_autograd", "_linear", "_linear_autograd"),
        *("_linear_activation", "_linear_activation_autograd", "_addmm", "_addmm_autograd"),
        *("_scaled_dot_product_attention", "_attention_forward", "_attention_forward_autograd"),
        *("_attention_forward_e4m3", "_attention_forward_e4m3_autograd"),
        *("_attention_backward", "_attention_backward_autograd"),
        *("_flash_attention_with_kvcache", "_flash_attention_with_kvcache_autograd"),
    ):
        refuse = _refusal(name)
        for key in _KEYS:
            library.impl(name, refuse, key)
