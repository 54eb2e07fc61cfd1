"""Registers the lowerings and the fold pass when Inductor is imported."""

from __future__ import annotations

import functools
from typing import Any

from torch_cubin._pytorch import inductor


def register() -> None:
    inductor.set_pass(beside)
    inductor.set_choices(_choices, _choices_key)
    inductor.when_loaded(_lower)


@functools.cache
def _lower() -> None:
    from torch_cubin._inductor import choices, lowerings, reductions

    lowerings.register()
    reductions.register()
    if inductor.CHOICES.available:
        choices.register()


def _choices(op: str, theirs: list[Any]) -> list[Any]:
    from torch_cubin._inductor import choices

    return choices.choices(op, theirs)


def _choices_key() -> Any:
    from torch_cubin._inductor import choices

    return choices.key()


def beside(users: Any) -> Any:
    """A pass that runs the user's pass, if there is one, and then ours."""
    base: Any = inductor.pass_type()
    passes = users if isinstance(users, (list, tuple)) else [users] if users is not None else []

    class Fold(base):
        def __call__(self, graph: Any) -> None:
            from torch_cubin._inductor import fold  # imported late, because its imports are large

            for each in passes:
                each(graph)
            if inductor.can_fold():
                fold.fold(graph)

        def uuid(self) -> Any:
            # None, as from a user's pass without a key, disables caching.
            theirs = [each.uuid() if isinstance(each, base) else None for each in passes]
            if None in theirs:
                return None
            from torch_cubin._drop_in import install, tensor_parallel
            from torch_cubin._inductor import keys
            from torch_cubin._ops.batch_invariant import is_batch_invariant

            parts = tensor_parallel.parts_of_graphs()
            settings = (install.graph_policy(), parts, is_batch_invariant())
            return ("torch_cubin.fold", *keys.of_graphs(), *settings, *theirs)

        def __repr__(self) -> str:  # without an address: Inductor hashes copies of its options
            return f"torch_cubin.fold after {passes}"

    return Fold()
