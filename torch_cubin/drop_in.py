# The context manager that serves a model's products and attention from cubins. It only routes
# calls: _drop_in/served.py decides how a function is served, _drop_in/report.py counts.
"""``with torch_cubin.drop_in(): model(x)``: any model, unchanged, with its products from cubins."""

import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from torch_cubin import errors
from torch_cubin._drop_in import fast_path as _fast_path
from torch_cubin._drop_in import python_functions as _python_functions
from torch_cubin._drop_in import report as _report
from torch_cubin._drop_in import served as _served
from torch_cubin._drop_in import why_not as _why_not
from torch_cubin._drop_in.report import report
from torch_cubin._drop_in.served import SERVED
from torch_cubin._drop_in.why_not import plain
from torch_cubin._ops import decorator as _decorator
from torch_cubin._pytorch import compiler as _compiler
from torch_cubin._pytorch import modes as _modes

__all__ = ["drop_in", "report"]

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")

# A separate dict for torch.compile: the one below grows, which would fail a graph's guards.
_traced: Any = F.multi_head_attention_forward
_TRACED_COPIES = {_traced: _python_functions.without_check(_traced)}
_copies: dict[types.FunctionType, types.FunctionType | None] = {}


class _Serving(TorchFunctionMode):
    """The routing. drop_in() adds the reset of the counts."""

    def __torch_function__(
        self, func: Any, types_: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # NOTE: every torch function of a model comes through here, so functions that are not served
        # must cost only a dict lookup.
        served = SERVED.get(func)
        if served is None:
            if type(func) is types.FunctionType:
                return _call_python(func, types_, args, kwargs or {})
            return func(*args, **kwargs) if kwargs else func(*args)
        name, handler = served
        if kwargs is None:
            kwargs = {}
        result = handler if isinstance(handler, str) else handler(*args, **kwargs)
        if not isinstance(result, str):
            if torch.compiler.is_compiling():
                _report.count_traced_served(name, result.dtype, result.device.type)
            else:
                _report.count_served(name, args, result)
                if result.requires_grad and type(result) is torch.Tensor:
                    _leave_a_mark()
            return result
        if torch.compiler.is_compiling():
            _report.count_traced_declined(name, result)
        elif not _nested():
            _report.count_declined(name, result)
        return func(*args, **kwargs)


_INSIDE = _Serving()
_fast_path.serves(_Serving)


def _call_python(func: Any, types_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a torch function written in Python; with the mode enabled if it multiplies inside."""
    if torch.compiler.is_compiling():
        if func is torch.Tensor.unflatten:  # it uses super(), which cannot be traced from here
            return args[0].unflatten(*args[1:], **kwargs)
        copy: Any = _TRACED_COPIES.get(func)
    else:
        copy = _copies.get(func, func)
        if copy is func:
            inside = _python_functions.multiplies(func)
            inside = inside and not _python_functions.checks_by_attribute(func)
            copy = _copies[func] = _python_functions.without_check(func) if inside else None
        elif copy is not None:
            _python_functions.refresh(copy, func)
    if copy is None or not plain(types_):
        return func(*args, **kwargs)
    with _INSIDE:
        return copy(*args, **kwargs)


def _leave_a_mark() -> None:
    """Under activation checkpointing, saves one more tensor than PyTorch would.

    Checkpointing recomputes a region in backward() and matches the saved tensors with those of the
    first run by position. If backward() is called outside drop_in(), it runs PyTorch's own linear,
    which saves other tensors; if all are square, the gradient would silently be wrong. With one
    more tensor in the first run, torch.utils.checkpoint detects the difference and raises.
    """
    if _modes.saves_tensors_by_hooks():
        # exp saves its result, which is then dropped. On the CPU, whatever the default device is.
        torch.empty(0, device="cpu", requires_grad=True).exp()


def _nested() -> bool:
    """Whether an outer drop_in() will see the same call (this one is disabled in here)."""
    return any(isinstance(mode, _Serving) for mode in _modes.function_modes())


class drop_in(_Serving):
    """Serve the matrix products and the attention of the code inside from cubins.

    Served are ``@``, :func:`torch.matmul`, ``mm``, ``mv``, ``bmm``, ``dot``, ``vdot``, ``inner``,
    ``addmm``, ``addmv``, ``addbmm``, ``baddbmm``, the Tensor methods of these, ``torch.einsum`` of
    two operands if it is a product, ``F.linear`` (hence :class:`torch.nn.Linear`) and
    ``F.scaled_dot_product_attention``, for float16, bfloat16, float32 and float64 tensors on CUDA
    (on the CPU: by the reference implementation).
    Everything else, and every call that cannot be served, goes to PyTorch;
    :func:`torch_cubin.report` lists both.

    It applies to the thread that enters it, may be nested, supports ``torch.compile`` inside and
    around the compiled function, and is differentiable. Functions that PyTorch implements in
    Python, such as the one behind :class:`torch.nn.MultiheadAttention`, are entered, so their
    products are served too; ``TorchScript`` and other code that does not run in Python is not.
    Results have PyTorch's shape and dtype; a product is always contiguous. Dropout of attention has
    PyTorch's probability, but drops other weights; ``torch.nn.attention.sdpa_kernel`` has no
    effect. ``addmm`` and its relatives round once, after factors and sum. Nested tensors given to
    :class:`torch.nn.MultiheadAttention` and :class:`torch.nn.TransformerEncoderLayer` take the
    fused path of these layers, which alone supports them.

    With activation checkpointing, call ``backward()`` inside as well: the recomputation must run
    the same ops (torch.utils.checkpoint raises otherwise).
    """

    def __init__(self, *model: Any) -> None:
        if model:
            raise errors.fault(
                "input", "torch_cubin.drop_in", "takes no argument: it serves what runs inside it",
                expected="with torch_cubin.drop_in(): model(x)", got=type(model[0]).__name__,
            )  # fmt: skip
        super().__init__()

    def __call__(self, function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
        """As a decorator: every call of the function runs inside its own drop_in().

        So does the body of a generator, a coroutine or an asynchronous generator; the caller is
        outside while it is suspended. Wrong arguments of these raise at their first step, as under
        :class:`torch.no_grad`.
        """
        if isinstance(function, (type, torch.nn.Module)):
            kind = function if isinstance(function, type) else type(function)
            is_class = kind is function
            raise errors.fault(
                "input", "torch_cubin.drop_in as a decorator",
                "is given a class" if is_class else "is given a module", expected="a function",
                got=kind.__name__,
                advice="Decorate its methods." if is_class else
                "Call it inside: with torch_cubin.drop_in(): model(x).",
            )  # fmt: skip
        return _decorator.decorated("drop_in", function, drop_in, lambda: _INSIDE, _begun)

    def __enter__(self) -> "drop_in":
        if not torch.compiler.is_compiling():
            _outermost.enter(self)
        super().__enter__()
        return self

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        super().__exit__(exc_type, exc_value, traceback)
        if not torch.compiler.is_compiling():
            _outermost.leave(self)


class _Outermost:
    """Resets the counts when the first of all threads enters."""

    def __init__(self) -> None:
        # Reentrant: a garbage collection while it is held may end a decorated generator.
        self._lock = threading.RLock()
        # How often each is entered now. Weak: one that was entered in a compiled graph, and exited
        # outside or never, must not block the next. Guarded by _lock.
        self._times_entered: weakref.WeakKeyDictionary[drop_in, int] = weakref.WeakKeyDictionary()

    def enter(self, mode: drop_in) -> None:
        with self._lock:
            if not self._times_entered:
                _report.clear()
            self._times_entered[mode] = self._times_entered.get(mode, 0) + 1

    def leave(self, mode: drop_in) -> None:
        with self._lock:
            times = self._times_entered.pop(mode, 0)
            if times > 1:
                self._times_entered[mode] = times - 1


_outermost = _Outermost()


class _begun:
    """Counts as an entered drop_in(), but serves nothing."""

    def __enter__(self) -> None:
        self._mode = None if torch.compiler.is_compiling() else drop_in()
        if self._mode is not None:
            _outermost.enter(self._mode)

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        if self._mode is not None:
            _outermost.leave(self._mode)


_compiler.skip_frames([sys.modules[__name__], _decorator, _fast_path, _report, _served, _why_not])
