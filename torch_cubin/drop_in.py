# The context manager that serves a model's products and attention from cubins. It routes: what a
# function becomes is decided in _drop_in/served.py, what is counted in _drop_in/report.py.
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

# A dict of its own for torch.compile: the one below grows, and a graph's guards would fail on it.
_traced: Any = F.multi_head_attention_forward
_TRACED_COPIES = {_traced: _python_functions.without_check(_traced)}
_copies: dict[types.FunctionType, types.FunctionType | None] = {}


class _Serving(TorchFunctionMode):
    """The routing alone; what drop_in() adds is when the counts begin."""

    def __torch_function__(
        self, func: Any, types_: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # NOTE: every torch function of a model comes through here, so the way of one that is no
        # product is a dict look-up and no more.
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
    """Call a function of torch written in Python; one that multiplies inside, with the mode on."""
    if torch.compiler.is_compiling():
        if func is torch.Tensor.unflatten:  # it says super(), which cannot be traced from here
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
    """Where activation checkpointing is at work, save one tensor more than PyTorch would.

    Checkpointing computes a region again in backward() and takes what that saves for what the first
    run saved, by position. Called outside of drop_in(), backward() would run PyTorch's own linear
    again, which saves other tensors; where all are square the gradient would silently be wrong.
    With one more in the first run torch.utils.checkpoint sees the difference and raises.
    """
    if _modes.saves_tensors_by_hooks():
        # Saves its result, and is then forgotten. On the CPU, whatever the default device is.
        torch.empty(0, device="cpu", requires_grad=True).exp()


def _nested() -> bool:
    """Whether a drop_in() further out will see the same call (this one is off in here)."""
    return any(isinstance(mode, _Serving) for mode in _modes.function_modes())


class drop_in(_Serving):
    """Serve the matrix products and the attention of the code inside from cubins.

    Served are ``@``, :func:`torch.matmul`, ``mm``, ``mv``, ``bmm``, ``dot``, ``vdot``, ``inner``,
    ``addmm``, ``addmv``, ``addbmm``, ``baddbmm``, the Tensor methods of these, ``torch.einsum`` of
    two operands where it is a product, ``F.linear`` (so :class:`torch.nn.Linear`) and
    ``F.scaled_dot_product_attention``, for float16, bfloat16, float32 and float64 tensors on CUDA
    (on the CPU: by the reference implementation).
    Everything else, and every call that cannot be served, goes to PyTorch;
    :func:`torch_cubin.report` lists both.

    It holds for the thread that enters it, may be nested, works inside a function given to
    ``torch.compile`` and around one, and is differentiable. Functions that PyTorch wrote in Python,
    such as the one behind :class:`torch.nn.MultiheadAttention`, are entered, so the products inside
    are served too; ``TorchScript`` and other code that never comes back to Python is not.
    Results have PyTorch's shape and dtype; a product is always contiguous. Dropout of attention
    drops as much as PyTorch's, but other weights; which kernel of its own PyTorch is set to use
    (``torch.nn.attention.sdpa_kernel``) plays no part. ``addmm`` and its kin round once, after
    factors and sum. Nested tensors given to :class:`torch.nn.MultiheadAttention` and
    :class:`torch.nn.TransformerEncoderLayer` are left to the fused path of these layers, which
    alone takes them.

    With activation checkpointing call ``backward()`` inside as well: what is computed again must be
    computed the same way (torch.utils.checkpoint raises otherwise).
    """

    def __init__(self, *model: Any) -> None:
        if model:
            raise errors.fault(
                "input", "torch_cubin.drop_in", "takes no argument: it serves what runs inside it",
                expected="with torch_cubin.drop_in(): model(x)", got=type(model[0]).__name__,
            )  # fmt: skip
        super().__init__()

    def __call__(self, function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
        """As a decorator: every call of the function runs inside a drop_in() of its own.

        The body of a generator, a coroutine or an asynchronous generator does, too; whoever resumes
        it is outside while it is suspended. Wrong arguments of these raise at their first step, as
        under :class:`torch.no_grad`.
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
    """What happens once for all threads when the first of them enters: the counts start anew."""

    def __init__(self) -> None:
        # Reentrant, because a garbage collection in here may end a decorated generator.
        self._lock = threading.RLock()
        # How often each is entered now. Weak: one that was entered in a compiled graph, and left
        # outside or not at all, must not stand in the way of the next. Guarded by _lock.
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
    """Counts as a drop_in() that is entered, and serves nothing."""

    def __enter__(self) -> None:
        self._mode = None if torch.compiler.is_compiling() else drop_in()
        if self._mode is not None:
            _outermost.enter(self._mode)

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        if self._mode is not None:
            _outermost.leave(self._mode)


_compiler.skip_frames([sys.modules[__name__], _decorator, _fast_path, _report, _served, _why_not])
