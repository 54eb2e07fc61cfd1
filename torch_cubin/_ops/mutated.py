"""Arguments that an op writes to, under torch.compile: their storage offsets must be constant."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from torch_cubin._ops import checks
from torch_cubin._pytorch import compiler


def fix_offsets(op: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Makes each storage offset a constant, with guards: another offset is recompiled.

    Inductor rebuilds a mutated view from its base, by the view's sizes, strides and offset. It has
    no lowering for a symbolic offset (`pool[i]` with a dynamic i): it reads the offset from a copy
    of the view, where it is 0, so every custom op writes to the beginning of the base
    (https://github.com/pytorch/pytorch/issues/198068).
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
