"""Inductor's private choice of how a Triton kernel reduces the rows of a tensor."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch_cubin._pytorch.internals import Feature

ROWS = Feature(
    "kernels of compiled graphs that read each row once",
    "they loop over rows of more than 1,024 columns, or of which they do not see that they can",
)

Ask = Callable[[int, int], bool]  # of rows and columns


def set_rows(in_one_piece: Ask) -> None:
    """Asks `in_one_piece` where a kernel would loop over rows whose columns lie together.

    NOTE: what the answers depend on must be in the key of Inductor's caches.
    """
    choices: Any = ROWS.find("_inductor.choices.InductorChoices", None)
    features: Any = ROWS.find("_inductor.codegen.simd_kernel_features.SIMDKernelFeatures", None)
    hints: Any = ROWS.find("_inductor.runtime.hints.ReductionHint", None)
    persistent = "should_use_persistent_reduction"
    ROWS.find(f"_inductor.choices.InductorChoices.{persistent}", None)
    if ROWS.available:
        _wrap(choices, persistent, lambda own: _persistent(own, in_one_piece, hints))
        _wrap(features, "get_reduction_hint", lambda own: _hint(own, in_one_piece, hints))


def _wrap(owner: Any, name: str, wrapped: Callable[[Callable[..., Any]], Any]) -> None:
    own = inspect.getattr_static(owner, name)
    if isinstance(own, staticmethod):  # a version's; another's is a method
        setattr(owner, name, staticmethod(wrapped(own.__func__)))
    else:
        setattr(owner, name, wrapped(own))


def _persistent(own: Callable[..., bool], ask: Ask, hints: Any) -> Callable[..., bool]:
    arguments_of = _arguments(own)

    @functools.wraps(own)
    def choice(*args: Any, **kwargs: Any) -> bool:
        if own(*args, **kwargs):
            return True
        given = arguments_of(*args, **kwargs)
        features = given.get("features")
        if features is None or given.get("cooperative_reduction") or _adds_as_eager_code(features):
            return False
        if features.get_reduction_hint() is not hints.INNER:
            return False
        return _answer(ask, features.numel, features.reduction_numel)

    return choice


def _arguments(function: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """The arguments of a call by name."""
    signature = inspect.signature(function)
    return lambda *args, **kwargs: signature.bind(*args, **kwargs).arguments


def _adds_as_eager_code(features: Any) -> bool:
    """Whether the order of a sum is eager code's (an option since torch 2.14)."""
    block = getattr(features, "strict_sum_rblock", None)
    return block is not None and block() is not None


def _hint(own: Callable[..., Any], ask: Ask, hints: Any) -> Callable[..., Any]:
    """Without broadcasting, columns that lie together are INNER by themselves."""

    @functools.wraps(own)
    def choice(features: Any, *args: Any, **kwargs: Any) -> Any:
        hint = own(features, *args, **kwargs)
        if hint is not hints.DEFAULT or not features.reduction_nodes():
            return hint
        if not _answer(ask, features.numel, features.reduction_numel):
            return hint
        if features.has_non_contiguous_pw_in_reduction_kernel():  # it would be read in pieces
            return hint
        return hints.INNER if _lie_together(features) else hint

    return choice


def _answer(ask: Ask, *sizes: Any) -> bool:
    """False of symbolic sizes."""
    if not all(getattr(size, "is_Integer", isinstance(size, int)) for size in sizes):
        return False
    rows, columns = map(int, sizes)
    return ask(rows, columns)


def _lie_together(features: Any) -> bool:
    """Whether the elements of a row are beside each other in all that the reductions read."""
    for node in features.scheduler_nodes():
        if not node.is_reduction():
            continue
        for read in node.read_writes.reads:
            names = getattr(read, "var_names", ())
            if not names or names[-1] not in read.index.free_symbols:
                continue
            if not read.stride1_for_last_dim():
                return False
    return True
