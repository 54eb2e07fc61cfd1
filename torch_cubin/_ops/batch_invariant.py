"""The switch of batch invariance, of a thread and of the process, which the library stores."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch_cubin import errors
from torch_cubin._native import library
from torch_cubin._ops import decorator
from torch_cubin._pytorch import thread_objects
from torch_cubin._pytorch.compiler import never_traced

_library = library.load()


def is_batch_invariant() -> bool:
    """Whether this thread's calls are batch-invariant: it is inside :class:`batch_invariant`, or
    the process is by ``install(batch_invariant=True)``."""
    return bool(_library.torch_cubin_batch_invariant())


class batch_invariant:
    """Calls inside give each row the same bits, whatever the number of other rows.

    A context manager and a decorator for the thread that enters it, like :class:`torch.no_grad`::

        with torch_cubin.batch_invariant():
            y = torch.ops.cubin.linear(x, weight)  # y[i] depends on x[i] and weight alone

    Inside, the bits of a row of ``matmul``, ``linear`` and ``addmm`` depend neither on the number
    of rows and batches nor on the position of the row, so that a language model's answer does not
    depend on the other requests in the batch. This holds for one GPU model, one build of
    torch_cubin, and equal layouts of the operands: K is summed in one order, which depends on the
    sizes of the weights alone. It costs some speed for few rows, for which K would otherwise be
    split further. docs/same_bits.md has the promise for every op;
    ``install(batch_invariant=True)`` promises it for the whole process, and serves more of
    PyTorch's own operators for it.

    It applies to all code that runs inside, including compiled code, wherever it was compiled, to
    every ``backward()`` that is called inside, and to that of our ops' eager products that were
    computed inside, wherever it is called. :func:`torch_cubin.install` and
    :func:`torch_cubin.drop_in` serve here whatever they can, also by the policy "fastest". Under
    ``torch.compile``, enter it around the compiled function: inside one it breaks the graph.

    Args:
        enabled: False disables it for the code inside, also under
            ``install(batch_invariant=True)``.
    """

    def __init__(self, enabled: bool = True) -> None:
        if not isinstance(enabled, bool):
            what = "torch_cubin.batch_invariant argument 'enabled'"
            advice = "A decorator is written with brackets: @torch_cubin.batch_invariant()."
            raise errors.wrong_type(what, "a bool", enabled, advice)
        self._enabled = enabled
        self._before: list[int] = []

    def __enter__(self) -> None:
        self._before.append(_switch(int(self._enabled)))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _switch(self._before.pop())

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """As a decorator: the function's body runs inside, also that of a generator or coroutine.

        Wrong arguments of these two raise at their first step, as under :class:`torch.no_grad`. Any
        callable may be given; the result is a function.
        """

        def anew() -> batch_invariant:
            return batch_invariant(self._enabled)  # the function may run in several threads

        return decorator.decorated("batch_invariant", function, anew, anew)


@never_traced
def _switch(state: int) -> int:
    """Sets this thread's own state, -1 for none, and returns the previous one."""
    before: int = _library.torch_cubin_set_batch_invariant(state)
    # For the threads that compute the gradients of a backward() called in this thread.
    if before == 1 != state:
        library.forget_thread_object(thread_objects.BATCH_INVARIANT)
    elif state == 1 != before:
        thread_objects.leave(thread_objects.BATCH_INVARIANT)
        from torch_cubin._drop_in import aten_kernels  # imported late: it needs the ops

        aten_kernels.register_rows()
    return before
