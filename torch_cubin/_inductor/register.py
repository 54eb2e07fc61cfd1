"""Registers the lowerings and the fold pass when somebody imports Inductor."""

from __future__ import annotations

import functools
from typing import Any

from torch_cubin._drop_in import install
from torch_cubin._pytorch import inductor


def register() -> None:
    inductor.when_loaded(_register)


@functools.cache
def _register() -> None:
    from torch_cubin._inductor import lowerings

    lowerings.register()
    if inductor.pass_type() is not None:
        inductor.set_pass(beside)


def beside(users: Any) -> Any:
    """A pass that runs the user's, where there is one, and then ours."""
    from torch_cubin._inductor.fold import VERSION, fold

    base: Any = inductor.pass_type()
    passes = users if isinstance(users, (list, tuple)) else [users] if users is not None else []

    class Fold(base):  # type: ignore[misc]
        def __call__(self, graph: Any) -> None:
            for each in passes:
                each(graph)
            fold(graph)

        def uuid(self) -> Any:
            # None, as a user's pass without a key says: do not cache.
            theirs = [each.uuid() if isinstance(each, base) else None for each in passes]
            if None in theirs:
                return None
            return ("torch_cubin.fold", VERSION, install.graph_policy(), *theirs)

    return Fold()
