"""Completes the ops that _C.so defines with the registrations that torch needs from Python."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from torch_cubin._ops import late, raw_ops
from torch_cubin._pytorch import operators
from torch_cubin._pytorch.compiler import skip_frames_of
from torch_cubin._pytorch.dispatch_keys import AUTOCAST
from torch_cubin._pytorch.imports import when_imported
from torch_cubin._pytorch.transforms import DERIVATIVES, VMAP_OF_ATTENTION

# The modules that are imported by their names, for what packs a program with the modules that it
# finds in import statements; a test compares them with rules().
if TYPE_CHECKING:
    from torch_cubin._ops import (  # noqa: F401
        addmm_into,
        attention_autograd,
        attention_e4m3,
        autocast,
        autograd,
        cross_entropy,
        expert_rows,
        fake,
        fused,
        fused_autograd,
        grouped,
        kv_cache,
        layouts,
        linear_cross_entropy,
        moe,
        no_derivatives,
        rows,
        scaled,
        softmax,
        symmetric,
        vmap,
    )

_FAKE, _BATCHED, _AUTOGRAD = late.FAKE, "FuncTorchBatched", "Autograd"
_AUTOCAST = ("AutocastCUDA", "AutocastCPU")

# Frames below an op are never compiled, even if torch.compile gives up on an outer frame.
_SKIPPED = (
    *("autograd", "batch_invariant", "cross_entropy", "expert_rows", "fused_autograd", "grouped"),
    *("late", "linear_cross_entropy", "row_rules", "rows", "symmetric"),
)


def _raw(*names: str) -> list[str]:
    return [raw for name in names for raw in raw_ops.raw_names(name)]


def _with_autograd(*names: str) -> list[str]:
    return [f"_{name}_autograd" for name in names]


def rules() -> Iterator[tuple[str, Sequence[str], Sequence[str]]]:
    """A module of this folder, keys, and ops for which it has a rule of each; a test compares them
    with what the modules register."""
    products, attention = raw_ops.PRODUCTS, raw_ops.ATTENTION
    differentiated = [name for name in attention if name in raw_ops.DIFFERENTIABLE]
    e4m3 = (raw_ops.E4M3, raw_ops.E4M3_BACKWARD)
    parts = ["_weight_and_bias_gradient", "_attention_sinks_gradient"]
    yield "fake", [_FAKE], [*_raw(*products, *attention, *e4m3), *parts]
    yield "autograd", [_AUTOGRAD], _with_autograd(*products)
    yield "vmap", [_BATCHED], _raw(*products, *attention)
    yield "attention_autograd", [_AUTOGRAD], _with_autograd(*differentiated)
    softmax = ["_attention_softmax", "_attention_softmax_backward", "_attention_dropout"]
    yield "softmax", [_FAKE, _BATCHED, _AUTOGRAD], softmax
    yield "attention_e4m3", [_BATCHED], _raw(*e4m3)
    yield "attention_e4m3", [_AUTOGRAD], _with_autograd(*e4m3)
    yield "fused", [_FAKE, _BATCHED], _raw(*raw_ops.FUSED)
    yield "fused", [_FAKE], [f"_{name}.below_autograd" for name in raw_ops.BELOW_AUTOGRAD]
    yield "fused_autograd", [_AUTOGRAD], _raw(*raw_ops.FUSED)
    linear_losses = [name for name in raw_ops.ROWS if name.startswith("linear")]
    for module, names in (
        ("addmm_into", [raw_ops.ADDMM_INTO]),
        ("symmetric", raw_ops.SYMMETRIC),
        ("grouped", [raw_ops.GROUPED]),
        ("scaled", [name for name in raw_ops.FLOAT8 if "scaled" in name or "quantize" in name]),
        ("moe", [raw_ops.MOE, raw_ops.MOE_FLOAT8]),
        ("expert_rows", raw_ops.EXPERTS),
        ("kv_cache", [raw_ops.KV_CACHE]),
        ("rows", [name for name in raw_ops.ROWS if "entropy" not in name]),
        ("cross_entropy", [name for name in raw_ops.ROWS if name.startswith("cross_entropy")]),
        ("linear_cross_entropy", linear_losses),
    ):
        yield module, [_FAKE, _BATCHED], _raw(*names)
        yield module, [_AUTOGRAD], _with_autograd(*names)
    yield "moe", [_FAKE], ["_moe_forward", "_moe_backward", "_float8_copies"]
    yield "rows", [_FAKE], ["_row_sums", "_scale_into"]
    in_float = ["rms_norm", "add_rms_norm", "layer_norm", "softmax", "log_softmax"]
    yield "rows", _AUTOCAST[:1], in_float
    yield "cross_entropy", _AUTOCAST[:1], ["cross_entropy"]
    yield "linear_cross_entropy", _AUTOCAST, ["linear_cross_entropy", *_raw(*linear_losses)]
    yield "autocast", _AUTOCAST, [x for op in raw_ops.ALL for x in raw_ops.all_names(op)]
    layouts = ["CompositeExplicitAutograd", "CompositeImplicitAutogradNestedTensor"]
    yield "layouts", layouts, _raw(*raw_ops.ALL, *raw_ops.ROWS)


@cache
def register() -> torch.library.Library:
    """Called once per process, after _C.so is loaded. The result owns the registrations."""
    library = operators.registry("cubin", "IMPL")
    late.keep_modules()
    if DERIVATIVES.available and VMAP_OF_ATTENTION.available and AUTOCAST.available:
        for module, keys, names in rules():
            late.register(library, module, keys, names)
    else:
        _register_at_once(library)
    _register_late()
    skip_frames_of({f"{__package__}.{name}" for name in _SKIPPED})
    return library


def _register_at_once(library: torch.library.Library) -> None:
    """For a PyTorch without some of the names that the rules need: the modules know which."""
    modules = dict.fromkeys(module for module, _, _ in rules())
    if not DERIVATIVES.available:
        modules = {m: None for m in modules if m != "autograd" and not m.endswith("_autograd")}
        modules["no_derivatives"] = None
    for module in modules:
        importlib.import_module(f"{__package__}.{module}").register(library)


def _register_late() -> None:
    """Rules for modules of PyTorch that most processes never import."""

    def flops(counter: ModuleType) -> None:
        from torch_cubin._ops import flops

        flops.register(counter)

    def sharding(module: ModuleType) -> None:
        from torch_cubin._ops import sharding

        sharding.register()

    def causal_bias(module: ModuleType) -> None:
        from torch_cubin._ops import causal_bias

        causal_bias.patch(module)

    when_imported("torch.utils.flop_counter", flops)
    when_imported("torch.distributed.tensor", sharding)
    # It takes a second to import (sympy).
    when_imported("torch.nn.attention.bias", causal_bias)
