"""Arguments that an op writes to, under torch.compile: what must not be a symbol there."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from torch_cubin._ops import checks
from torch_cubin._pytorch import compiler


def fix_offsets(op: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Makes each storage offset a number, with guards: another offset is compiled again.

    Inductor makes a changed view anew from its base, by the view's sizes, strides and offset. It
    has no lowering for an offset that is a symbol (`pool[i]` where i is dynamic): it reads it from
    a copy of the view, where it is 0, and the op writes to the base's beginning, as does every
    custom op (https://github.com/pytorch/pytorch/issues/198068).
    """
    for name, tensor in tensors:
        if not compiler.fix(tensor.storage_offset()):
            checks.fail(
                f"{op} argument '{name}'",
                "is written to, and is a view that begins where only run time knows",
                "a storage offset that torch.compile can know",
                str(tensor.storage_offset()),
                "Pass the whole tensor and say where in it by a tensor of indices, or index it by "
                "a constant.",
            )
