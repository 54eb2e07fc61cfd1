"""The switch of batch invariance, of each thread by itself, as the library keeps it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch_cubin import errors
from torch_cubin._native import library
from torch_cubin._ops import decorator
from torch_cubin._pytorch.compiler import never_traced

_library = library.load()
_local = threading.local()


def is_batch_invariant() -> bool:
    """Whether this thread is inside :class:`batch_invariant`."""
    return getattr(_local, "on", False)


class batch_invariant:
    """Products inside give each row the same bits, however many other rows there are.

    A context manager and a decorator, for the thread that enters it, as :class:`torch.no_grad` is::

        with torch_cubin.batch_invariant():
            y = torch.ops.cubin.linear(x, weight)  # y[i] depends on x[i] and weight alone

    Within it a row of what ``matmul``, ``linear`` and ``addmm`` return depends neither on the
    number of rows and batches nor on where the row stands, bit for bit, so that a language model
    answers a request alike, whatever else is in the batch. It holds for one GPU model, one build
    of torch_cubin, and operands laid out alike: K is added up from its beginning to its end
    whatever the other sizes are. That costs speed where few rows would have K split; outside,
    speed decides.

    What runs inside obeys, compiled code included, wherever it was compiled; ``backward()`` of an
    eager product that was computed inside obeys wherever it runs. Under ``torch.compile`` enter it
    around the compiled function: inside of one it breaks the graph.

    Args:
        enabled: False switches it off for what runs inside.
    """

    def __init__(self, enabled: bool = True) -> None:
        if not isinstance(enabled, bool):
            what = "torch_cubin.batch_invariant argument 'enabled'"
            advice = "A decorator is written with brackets: @torch_cubin.batch_invariant()."
            raise errors.wrong_type(what, "a bool", enabled, advice)
        self._enabled = enabled
        self._before: list[bool] = []

    def __enter__(self) -> None:
        self._before.append(_switch(self._enabled))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _switch(self._before.pop())

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """As a decorator: the function's body runs inside, that of a generator or coroutine too.

        Wrong arguments of these two raise at their first step, as under :class:`torch.no_grad`. Any
        object that can be called may be given; what is returned is a function.
        """

        def anew() -> batch_invariant:
            return batch_invariant(self._enabled)  # the function may run in several threads

        return decorator.decorated("batch_invariant", function, anew, anew)


@never_traced
def _switch(on: bool) -> bool:
    _local.on = on
    return bool(_library.torch_cubin_set_batch_invariant(on))
