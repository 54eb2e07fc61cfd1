"""The names under which selective activation checkpointing sees the public ops."""

from __future__ import annotations

from typing import Any

import torch

from torch_cubin import errors
from torch_cubin._ops import raw_ops

# The raw ops that a public op runs, if they are not just the raw ops of its own name.
_RUNS = {
    "linear": ("linear", "linear_activation", "linear_activation_aux"),
    "addmm": ("addmm", "addmm_dtype"),
    "grouped_matmul": ("grouped_matmul", "matmul"),  # of two batches
    "scaled_dot_product_attention": ("scaled_dot_product_attention", "attention_forward"),
    "flash_attention": ("attention_forward", raw_ops.E4M3),
    **dict.fromkeys(("rms_norm", "add_rms_norm", "layer_norm"), ("norm",)),
    **dict.fromkeys(("softmax", "log_softmax"), ("softmax",)),
    **{name: (name,) for name in ("cross_entropy", "linear_cross_entropy")},
}
_PUBLIC = tuple({**dict.fromkeys(filter(raw_ops.has_public_op, raw_ops.ALL)), **_RUNS})
_Packet, _Overload = type(torch.ops.aten.mm), type(torch.ops.aten.mm.default)


def checkpoint_ops(*ops: Any) -> list[Any]:
    """The ops that selective checkpointing sees for calls of `ops`; by default, of any of ours.

        save = torch_cubin.checkpoint_ops(torch.ops.cubin.linear, torch.ops.aten.mm.default)
        context_fn = functools.partial(create_selective_checkpoint_contexts, save)
        checkpoint(block, x, use_reentrant=False, context_fn=context_fn)

    For the lists and policy functions of torch.utils.checkpoint: a public op such as
    `torch.ops.cubin.linear` forwards to others and is never seen itself. Declared ops and those of
    other libraries are listed unchanged. Inside drop_in(), eager code on a CUDA build of PyTorch
    calls aten's ops, so list those; traced code, and code on a CPU build, calls ours.
    Attention composed of products (options without a fused derivative) is always recomputed.

    Raises InputError [input] for arguments that are not ops.
    """
    found: dict[Any, None] = {}  # a set that keeps the order
    for op in ops or [getattr(torch.ops.cubin, name) for name in _PUBLIC]:
        for overload in _overloads(op):
            name = overload.name().partition(".")[0].removeprefix("cubin::")
            if overload.namespace == "cubin" and name in _PUBLIC:
                runs = [raw for run in _RUNS.get(name, (name,)) for raw in raw_ops.raw_names(run)]
                found.update(dict.fromkeys(map(raw_ops.overload, runs)))
            else:
                found[overload] = None
    return list(found)


def _overloads(op: Any) -> list[Any]:
    if isinstance(op, _Packet):
        return [getattr(op, name) for name in op.overloads()]
    if not isinstance(op, _Overload):
        expected = "an op, such as torch.ops.cubin.linear"
        raise errors.wrong_type("torch_cubin.checkpoint_ops argument", expected, op)
    return [op]


__all__ = ["checkpoint_ops"]
