# Says of every operator in a region whether its bits may depend on the batch. The classes of
# PyTorch's own operators are lists here; those of ours follow from the switch and from what was
# served. It changes nothing that runs.
"""``torch_cubin.audit()``: which ops of a region are batch-invariant, deterministic or neither."""

from __future__ import annotations

import dataclasses
import functools
import json
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from torch_cubin import errors
from torch_cubin._drop_in import report, row_kernels
from torch_cubin._native import library
from torch_cubin._ops.batch_invariant import is_batch_invariant
from torch_cubin._pytorch import inductor
from torch_cubin._pytorch.dispatch_modes import (
    DISPATCH_MODES,
    Mode,
    current_modes,
    has_subclass,
    is_composite,
    is_higher_order,
)
from torch_cubin._pytorch.operators import argument_names

INVARIANT, DETERMINISTIC, NEITHER = "batch-invariant", "deterministic", "neither"

_ELEMENTS = "each element by itself"
_MOVES = "moves or compares elements"
_ORDER = "sums in an order that may depend on the batch"
_ATOMICS = "adds in an order that may change from run to run"
_TIES = "which of equal elements it names may change from run to run"
_RANDOM = "draws random numbers for the whole call"
_UNKNOWN = "not known to torch_cubin"
_ENDS = "PyTorch's CPU kernels compute a tensor's last elements by other functions"
_RANKS = "a sum over ranks, whose order the communication library chooses"
_FUSED = "a compiled graph, whose fused kernels audit() does not see"
_OVER_BATCH = "a sum that all of the batch has a part in"

# PyTorch's own operators by what they do: "moving" ones compute nothing, or what needs no order;
# of "summing" ones, PyTorch's kernels choose the order by all sizes of a call, also the batch's;
# "over_the_batch" are sums that all of the batch has a part in; "adding" ones use atomics (the list
# of torch.use_deterministic_algorithms, and attention's backwards). "exact" ones, among those that
# PyTorch tags as pointwise, round once, so that every implementation gives the same bits.
_LISTS = json.loads(Path(__file__).with_name("audit_ops.json").read_text(encoding="utf-8"))
_MOVING, _SUMMING, _OVER_THE_BATCH, _ADDING, _EXACT = (
    frozenset(_LISTS[key]) for key in ("moving", "summing", "over_the_batch", "adding", "exact")
)
_CONVOLUTIONS = ("convolution", "convolution_backward", "cudnn_convolution")
_SCANS = ("cumsum", "cumprod", "logcumsumexp")
# Collectives: those with these names add, unless they are called with another reduction.
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_REDUCES = ("reduce", "allreduce")
# Our ops over rows, whose kernels are batch-invariant with and without the switch.
_OUR_ROWS = (
    *("norm", "softmax", "cross_entropy", "row_sums", "quantize", "scaled_matmul", "expert_"),
)


@dataclasses.dataclass(frozen=True)
class Audited:
    """One row of an :class:`Audit`: an op, whose kernel ran it, and the class of its bits."""

    op: str
    ran: str  # "cubin" or "PyTorch"
    kind: str  # "batch-invariant", "deterministic" or "neither"
    because: str
    calls: int


class Audit:
    """The result of :func:`audit`: ``rows``, the worst first; ``str()`` is a table."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self._lock = threading.Lock()
        self._calls: dict[tuple[str, str, str, str], int] = {}  # guarded by _lock

    @property
    def rows(self) -> tuple[Audited, ...]:
        with self._lock:
            rows = [Audited(*key, calls) for key, calls in self._calls.items()]
        order = (NEITHER, DETERMINISTIC, INVARIANT)
        return tuple(sorted(rows, key=lambda row: (order.index(row.kind), row.op)))

    @property
    def batch_invariant(self) -> bool:
        """Whether every op was, apart from sums that all of the batch has a part in by nature."""
        return all(_passes(row.kind, row.because) for row in self.rows)

    @property
    def deterministic(self) -> bool:
        return all(row.kind != NEITHER for row in self.rows)

    def __str__(self) -> str:
        if not self.rows:
            return "no op ran"
        cells = [(row.op, row.ran, row.kind, row.because, row.calls) for row in self.rows]
        return "\n".join(report.table(("op", "ran by", "bits", "because", "calls"), cells))

    def _add(self, op: str, ran: str, kind: str, because: str) -> None:
        with self._lock:
            key = (op, ran, kind, because)
            self._calls[key] = self._calls.get(key, 0) + 1


def _passes(kind: str, because: str) -> bool:
    by_nature = (_OVER_BATCH, row_kernels.OVER_BATCH, row_kernels.WHOLE_TENSOR)
    return kind == INVARIANT or (kind == DETERMINISTIC and because in by_nature)


class audit(Mode):
    """Says of every op inside whether it is batch-invariant, deterministic or neither.

    ::

        with torch_cubin.audit() as found:
            loss = model(x).loss
            loss.backward()
        print(found)

    An op is *batch-invariant* if the bits of a row depend on that row alone, *deterministic* if the
    same call gives the same bits again. Sums that all of the batch has a part in, such as gradients
    of weights and mean losses, are deterministic, and listed as such. It covers the ops of this
    thread and of a ``backward()`` called in it. Compiled functions run uncompiled inside, unless
    they were compiled before: then only their calls of ops are seen, not their fused kernels.

    Args:
        strict: raise :class:`torch_cubin.errors.ModeError` at the first op that may give a row
            other bits in another batch.
    """

    def __init__(self, *, strict: bool = False) -> None:
        if not DISPATCH_MODES.available:
            raise DISPATCH_MODES.error("torch_cubin.audit")
        super().__init__()
        if not isinstance(strict, bool):
            raise errors.wrong_type("torch_cubin.audit argument 'strict'", "a bool", strict)
        self._found = Audit(strict)

    # PyTorch's name: operators that take functions come here, too.
    supports_higher_order_operators = True

    def __enter__(self) -> Audit:
        _watch_graphs()
        super().__enter__()
        return self._found

    def __torch_dispatch__(
        self, func: Any, types: Iterable[Any], args: Any = (), kwargs: Any = None
    ) -> Any:
        if has_subclass(types):
            return NotImplemented  # it calls its parts' ops, which come here
        if is_higher_order(func):
            self._record(f"{func.namespace}::{func.name()}", False, NEITHER, _UNKNOWN)
            return func(*args, **(kwargs or {}))
        if is_composite(func):
            with self:
                return func.decompose(*args, **(kwargs or {}))
        before = _calls_served()
        result = func(*args, **(kwargs or {}))
        ours = func.namespace == "cubin" or _calls_served() > before
        kind, because = classify(func, args, kwargs or {}, ours)
        name = func.name().partition(".")[0]  # without the overload
        self._record(name, ours, kind, because)
        return result

    def _record(self, name: str, ours: bool, kind: str, because: str) -> None:
        self._found._add(name, "cubin" if ours else "PyTorch", kind, because)
        if self._found.strict and not _passes(kind, because):
            fault = errors.fault(
                "input", f"{name} inside torch_cubin.audit(strict=True)",
                "may give a row other bits in another batch", expected=INVARIANT,
                got=f"{kind}: {because}",
                advice="torch_cubin.install(batch_invariant=True) serves what it can; "
                "docs/same_bits.md lists the rest.",
            )  # fmt: skip
            raise errors.ModeError(str(fault))


@functools.cache
def _watch_graphs() -> None:
    inductor.watch_graphs(_graph_runs)


def _graph_runs() -> None:
    for mode in current_modes():
        if isinstance(mode, audit):
            mode._record("a compiled graph", False, NEITHER, _FUSED)


def _calls_served() -> int:
    served: int = library.load().torch_cubin_calls_served()
    return served + row_kernels.calls_served()


def classify(func: Any, args: Any, kwargs: Any, ours: bool) -> tuple[str, str]:
    """The class of a call, and the reason."""
    name = func.name().partition("::")[2].partition(".")[0]
    base = name.removesuffix("_") if name not in _MOVING else name
    if ours:
        return _ours(func, base, args, kwargs)
    if torch.Tag.nondeterministic_seeded in func.tags:
        return NEITHER, _RANDOM
    if base == "kthvalue" or (base == "median" and len(args) > 1):
        return NEITHER, _TIES
    if func.is_view or func.namespace == "prim" or (base in _MOVING and base != "index_put"):
        return INVARIANT, _MOVES
    if torch.Tag.pointwise in func.tags:
        return _pointwise(base, args, kwargs)
    if func.namespace in _COLLECTIVES:
        return _collective(base, args, kwargs)
    if "index_put" in base and _accumulates(base, args, kwargs):
        return DETERMINISTIC, _OVER_BATCH
    if base in _MOVING:
        return INVARIANT, _MOVES
    if base in _ADDING:
        return NEITHER, _ATOMICS
    if _changes_order(base, args, kwargs):
        return NEITHER, _ATOMICS
    if base in _OVER_THE_BATCH:
        return DETERMINISTIC, _OVER_BATCH
    if base in _SUMMING:
        return _summing(base, args, kwargs)
    return NEITHER, _UNKNOWN


def _accumulates(base: str, args: Any, kwargs: Any) -> bool:
    given = kwargs.get("accumulate", args[3] if len(args) > 3 else False)
    return given is True or base.endswith("_accumulate")


def _changes_order(base: str, args: Any, kwargs: Any) -> bool:
    """Whether PyTorch's kernel for CUDA may add in another order in each run, by its arguments and
    settings: gradients of embeddings, convolutions by some of cuDNN's algorithms, and scans of one
    vector, of which blocks take what has been summed before them as it comes."""
    first = args[0] if args else None
    if not isinstance(first, torch.Tensor) or not first.is_cuda:
        return False
    if base == "embedding_dense_backward":
        return not row_kernels.serves_embeddings()
    if base in _CONVOLUTIONS:
        fixed = torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic
        return not fixed
    if base not in _SCANS or not (first.is_floating_point() or first.is_complex()):
        return False
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    return first.dim() > 0 and first.numel() == first.shape[dim]


def _pointwise(base: str, args: Any, kwargs: Any) -> tuple[str, str]:
    exact = base in _EXACT or (base == "pow" and _is_two(args[1:]))
    if base in ("add", "sub", "rsub") and kwargs.get("alpha", 1) != 1:
        exact = False  # one or two roundings
    on_cpu = any(
        isinstance(each, torch.Tensor) and each.device.type == "cpu" and each.dim() > 0
        for each in args
    )
    return (INVARIANT, _ELEMENTS) if exact or not on_cpu else (DETERMINISTIC, _ENDS)


def _is_two(exponent: Any) -> bool:
    # A tensor's == would be a tensor, or read its elements.
    return len(exponent) == 1 and isinstance(exponent[0], (int, float)) and exponent[0] == 2


def _collective(base: str, args: Any, kwargs: Any) -> tuple[str, str]:
    if not any(part in base for part in _REDUCES):
        return INVARIANT, _MOVES
    named = [each for each in (*args, *kwargs.values()) if isinstance(each, str)]
    picks = any(each in ("max", "min", "band", "bor", "bxor") for each in named)
    return (INVARIANT, _MOVES) if picks else (DETERMINISTIC, _RANKS)


def _summing(base: str, args: Any, kwargs: Any) -> tuple[str, str]:
    first = args[0]
    if isinstance(first, torch.Tensor) and not (first.is_floating_point() or first.is_complex()):
        return INVARIANT, "integers, whose sums are exact"
    if base in ("sum", "mean", "var", "std", "var_mean", "std_mean", "linalg_vector_norm"):
        at = 2 if base == "linalg_vector_norm" else 1
        dim = kwargs.get("dim", args[at] if len(args) > at else None)
        found = row_kernels.reduced_dims(first, dim)
        if isinstance(found, str):
            return DETERMINISTIC, found
    return DETERMINISTIC, _ORDER


def _ours(func: Any, base: str, args: Any, kwargs: Any) -> tuple[str, str]:
    if base.lstrip("_").startswith(("cross_entropy", "linear_cross_entropy")):
        given = {**dict(zip(argument_names(func), args, strict=False)), **kwargs}
        sums = given["reduction"] != "none" and "backward" not in base
        if sums or "linear_cross_entropy_backward" in base:
            return DETERMINISTIC, _OVER_BATCH
    if func.namespace == "cubin" and base.lstrip("_").startswith(_OUR_ROWS):
        return INVARIANT, "rows by themselves"
    if "e4m3" in base:
        return DETERMINISTIC, _ORDER
    if "attention" in base:
        given = {**dict(zip(argument_names(func), args, strict=False)), **kwargs}
        mask = given.get("attn_mask", given.get("attn_bias"))
        if given.get("dropout_p"):
            return DETERMINISTIC, _RANDOM
        if isinstance(mask, torch.Tensor) and mask.dtype != torch.bool:
            return (
                DETERMINISTIC,
                "an additive mask, which rows of a tile are computed with together",
            )
    if is_batch_invariant():
        return INVARIANT, "under the switch"
    return DETERMINISTIC, _ORDER


__all__ = ["Audit", "Audited", "audit", "classify"]
