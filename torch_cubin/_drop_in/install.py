# Switches our kernels for the whole process. aten_kernels.py registers them, and
# csrc/ops/matmul/aten_products.cpp decides which calls they serve.
"""``torch_cubin.install()``: serves a program's products, attention and norms from cubins, below
autograd."""

from __future__ import annotations

from typing import Any

import torch

from torch_cubin import errors
from torch_cubin._drop_in import aten_kernels, muon, report, transformers_hooks
from torch_cubin._drop_in import tensor_parallel as over_ranks
from torch_cubin._drop_in.transformers_layers import HOOKS as HOOKS_OF_LAYERS
from torch_cubin._drop_in.transformers_sdpa import HOOKS as HOOKS_OF_ATTENTION
from torch_cubin._native import library
from torch_cubin._native.locks import fork_safe_lock
from torch_cubin._pytorch import inductor_config

_lock = fork_safe_lock()
_active: list[Installation] = []  # the last one's policy applies; guarded by _lock
_graphs_before: dict[str, Any] | None = None  # Inductor's options; guarded by _lock

_NO_PRODUCT = (
    "torch_cubin: install(tensor_parallel={}) cut no product. It knows the products whose K ranks "
    "share by their DTensors: divide the model with parallelize_module, in one process on a mesh "
    "of one rank."
)


class Installation:
    """The result of :func:`install`: active until :meth:`remove`, or the end of its ``with``."""

    def __init__(
        self, policy: str, batch_invariant: bool, tensor_parallel: int | None = None
    ) -> None:
        self.policy = policy
        self.batch_invariant = batch_invariant
        self.tensor_parallel = tensor_parallel
        self._products_before = over_ranks.products_served()

    @property
    def active(self) -> bool:
        """Whether remove() has not been called."""
        return self in _active

    def remove(self) -> None:
        """Returns the calls to PyTorch, in all threads. Calling it again does nothing.

        Our registrations stay below PyTorch's autograd and forward every call, which costs it a few
        tenths of a microsecond.
        """
        with _lock:
            served = over_ranks.products_served() - self._products_before
            unused = self in _active and self.tensor_parallel and not served
            if self in _active:
                _active.remove(self)
                _switch()
        if unused:
            errors.warn(_NO_PRODUCT.format(self.tensor_parallel), RuntimeWarning)

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.remove()

    def __repr__(self) -> str:
        state = "active" if self.active else "removed"
        invariant = ", batch-invariant" if self.batch_invariant else ""
        parts = f", tensor_parallel={self.tensor_parallel}" if self.tensor_parallel else ""
        return f"<torch_cubin.Installation: policy {self.policy!r}{invariant}{parts}, {state}>"


def is_active() -> bool:
    """Whether any handle is active; if so, resetting the counts would lose calls."""
    return bool(_active)


def _switch() -> None:
    library.set_process_policy(aten_kernels.POLICIES[_active[-1].policy if _active else "off"])
    over_ranks.set_parts(_active[-1].tensor_parallel if _active else None)
    invariant = bool(_active) and _active[-1].batch_invariant
    library.set_process_batch_invariant(invariant)
    library.set_process_keeps_k_whole(over_ranks.parts_of_graphs() is not None)
    _set_for_graphs(invariant)
    muon.set_serving("install", bool(_active))
    transformers_hooks.set_policy(graph_policy(), HOOKS_OF_ATTENTION + HOOKS_OF_LAYERS)


def _set_for_graphs(on: bool) -> None:
    """Sets Inductor's own options, which a program may have set before."""
    global _graphs_before
    if on and _graphs_before is None:
        _graphs_before = inductor_config.set_batch_invariant()
    elif not on and _graphs_before is not None:
        inductor_config.set_batch_invariant(_graphs_before)
        _graphs_before = None


def graph_policy() -> str:
    """The policy of the products in a graph that is being compiled; "off" without install()."""
    if not _active:
        return "off"
    return "all" if _active[-1].batch_invariant else _active[-1].policy


def serves_graph(value: torch.Tensor) -> bool:
    """Whether products of this (fake) tensor are served where they run."""
    return aten_kernels.serves(value, graph_policy())


@errors.named_keywords
def install(
    *,
    policy: str = "fastest",
    batch_invariant: bool = False,
    tensor_parallel: int | None = None,
) -> Installation:
    """Serve the products, attention and norms of the whole process from cubins, until
    ``handle.remove()``.

    Our kernels replace those of ``aten::mm``, ``bmm``, ``mv``, ``addmm``, ``baddbmm`` and
    ``addmv``, their ``out=`` and in-place variants, PyTorch's fused attention ops, layer norm and
    RMS norm, below autograd, for CUDA tensors of float16, bfloat16, float32 and, for products,
    float64. So they serve eager code and the graphs of ``torch.compile``, forward and backward, on
    every thread, in C++ modules, DTensor and FSDP; derivatives, autocast and vmap are PyTorch's
    own. Other calls run PyTorch's kernels; :func:`torch_cubin.report` counts both, with the reason.

    Layers that models of transformers write out above these operators (RMS norm, gated linear
    layers, experts "grouped_mm", attention with a mask) are recognised by their code and served,
    too, where nothing changes how they compute; other calls run transformers' own code.

    The handle is a context manager. ``TORCH_CUBIN_INSTALL=1`` in the environment installs when
    PyTorch is imported, for programs that do not mention torch_cubin (docs/serving_a_model.md).

    Args:
        policy: ``"fastest"`` serves calls on the GPUs, with the dtypes and of the kinds for which
            our kernels were measured to be at least as fast as PyTorch's; ``"all"`` serves every
            call that can be served.
        batch_invariant: gives every row of a model's forward and backward the same bits, whatever
            else is in the batch, in all threads (docs/same_bits.md): every call that can be served
            is, also those of softmax and reductions over rows, which are otherwise left to
            PyTorch. ``with torch_cubin.batch_invariant(False)`` excepts a thread.
        tensor_parallel: with ``batch_invariant``, the number of parts that the K of a product of
            DTensors is cut into where ranks share it: each is summed from zero, and float32 sums
            are added by one tree. So models that ``parallelize_module`` divides have the same bits
            on every number of ranks that divides it, one process included, whose model is divided
            on a mesh of one rank. Calls that cannot have them raise.
    """
    aten_kernels.number_of(policy)
    if not isinstance(batch_invariant, bool):
        what = "torch_cubin.install argument 'batch_invariant'"
        raise errors.wrong_type(what, "a bool", batch_invariant)
    over_ranks.check(tensor_parallel)
    if tensor_parallel is not None and not batch_invariant:
        raise errors.fault(
            "input", "torch_cubin.install argument 'tensor_parallel'", "is given alone",
            expected="batch_invariant=True with it", got="batch_invariant=False",
            advice="Sums over ranks have the same bits only where all other sums have.",
        )  # fmt: skip
    aten_kernels.register_for(policy)
    if batch_invariant:
        aten_kernels.register_rows()
    handle = Installation(policy, batch_invariant, tensor_parallel)
    with _lock:
        if not _active:
            report.clear()
        _active.append(handle)
        try:
            _switch()
        except BaseException:
            _active.remove(handle)
            _switch()
            raise
    return handle


__all__ = [
    "Installation",
    "graph_policy",
    "install",
    "is_active",
    "serves_graph",
]
