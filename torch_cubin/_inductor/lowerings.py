"""Our ops in generated code: extern kernels that write to Inductor's memory.

Without a lowering, Inductor calls an op of another library through the dispatcher, asserts the
strides of its result, and neither reuses nor plans its memory.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_cubin._inductor import rows
from torch_cubin._ops import raw_ops
from torch_cubin._pytorch.inductor import INDUCTOR, ExternKernels, declared_shims

# Ops with an out= variant (csrc/ops/matmul/out.h).
WITH_OUT = ("matmul", "linear", "linear_activation", "addmm", "linear_glu")
# Ops with several results, which they allocate.
WITHOUT_OUT = (
    *("linear_glu_aux", "linears", "linear_activation_aux", "weight_and_bias_gradient"),
    *("grouped_matmul", "moe", "moe_forward", "moe_backward"),
)

_TENSOR = "AtenTensorHandle"
# The arguments of the C shims in csrc/c_shims.cpp.
_SHIMS = {
    "matmul": (_TENSOR,) * 3,
    "linear": (_TENSOR,) * 4,
    "linear_activation": (*(_TENSOR,) * 4, "const char*"),
    "addmm": (*(_TENSOR,) * 4, "double", "double"),
    "linear_glu": (*(_TENSOR,) * 4, "const char*"),
}


def _out_op(name: str) -> Any:
    return getattr(torch.ops.cubin, f"_{name}").out


# Our op for a product of aten.
_OF_ATEN = {"mm": "matmul", "bmm": "matmul", "addmm": "addmm", "baddbmm": "addmm"}
_choices: dict[Any, Any] = {}  # Inductor's object for each out= variant


def choice_of(product: str) -> Any:
    """Our kernel for a product of aten in compiled C++; None if its C function is not declared
    (aot_options())."""
    out_op = _out_op(_OF_ATEN[product])
    return _choices.get(out_op) if out_op in declared_shims() else None


def register() -> None:
    kernels = ExternKernels()
    if not INDUCTOR.available:
        return
    for name in WITH_OUT:
        ops = [raw_ops.overload(raw) for raw in raw_ops.raw_names(name)]
        kernels.lower(ops, _out_op(name), f"cubin_{name}", f"aoti_torch_cubin_{name}_out")
    for name in WITHOUT_OUT:
        # Autograd variants begin in Python, and no graph records a derivative here.
        names = raw_ops.raw_names(name) if name in raw_ops.DIFFERENTIABLE else [f"_{name}"]
        ops = [raw_ops.overload(raw) for raw in names]
        kernels.lower_without_out(ops, raw_ops.below_autograd(name))
    for name in ("softmax", "log_softmax", "cross_entropy", "linear_cross_entropy"):
        public = getattr(torch.ops.cubin, name).default
        kernels.lower_without_out([public], public)  # in packages of torch 2.11 (dtypes.py)
    kernels.lower_copy(rows.copy())
    _choices.update(kernels.choices)


def declarations() -> dict[Any, list[str]]:
    """For each out= variant, the declarations with which compiled C++ calls it without the
    dispatcher."""
    return {
        _out_op(name): [f"AOTITorchError aoti_torch_cubin_{name}_out({', '.join(arguments)})"]
        for name, arguments in _SHIMS.items()
    }
