# The context manager that serves a model's products and attention from cubins. It only routes
# calls: _drop_in/served.py decides how a function is served, _drop_in/report.py counts.
"""``with torch_cubin.drop_in(): model(x)``: any model, unchanged, with its products from cubins."""

import functools
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
from torch_cubin._drop_in import aten_kernels as _aten_kernels
from torch_cubin._drop_in import fast_path as _fast_path
from torch_cubin._drop_in import install as _install
from torch_cubin._drop_in import muon as _muon
from torch_cubin._drop_in import python_functions as _python_functions
from torch_cubin._drop_in import report as _report
from torch_cubin._drop_in import served as _served
from torch_cubin._drop_in import transformers_hooks as _transformers_hooks
from torch_cubin._drop_in import transformers_sdpa as _transformers_sdpa
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


_MODE = _Serving()
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
    with _MODE:
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


class _Scope(_Serving):
    """A part of a thread that is served.

    Eager code is served by kernels below autograd, which cost other functions nothing. The mode is
    for traces, where our ops become part of the graph, and for a CPU build of PyTorch, where the
    ops' reference serves tensors of the CPU.
    """

    policy = "fastest"

    def __enter__(self) -> "_Scope":
        if torch.compiler.is_compiling() or not _aten_kernels.enter_thread(self, self.policy):
            super().__enter__()
        return self

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        if torch.compiler.is_compiling() or not _aten_kernels.leave_thread(self):
            super().__exit__(exc_type, exc_value, traceback)


_STEP = {policy: _Scope() for policy in ("fastest", "all")}
_STEP["all"].policy = "all"


class drop_in(_Scope):
    """Serve the matrix products and the attention of the code inside from cubins.

    In eager code on a CUDA build of PyTorch our kernels stand below autograd, as those of
    :func:`torch_cubin.install` do, but for this thread alone, and for the threads that compute the
    gradients of a ``backward()`` that is called inside. Other functions cost nothing. A function
    that :func:`torch.compile` has compiled is served alike where it is called inside.

    Where it is traced (``with drop_in():`` in a compiled or exported function), and on a CPU build
    of PyTorch, a mode replaces torch's functions by our ops: ``@``, :func:`torch.matmul`, ``mm``,
    ``mv``, ``bmm``, ``dot``, ``vdot``, ``inner``, ``addmm``, ``addmv``, ``addbmm``, ``baddbmm``,
    the Tensor methods of these, ``torch.einsum`` of two operands if it is a product, ``F.linear``
    (hence :class:`torch.nn.Linear`) and ``F.scaled_dot_product_attention``, for float16, bfloat16,
    float32 and float64 tensors on CUDA (on the CPU: by the reference implementation). Functions
    that PyTorch implements in Python, such as the one behind
    :class:`torch.nn.MultiheadAttention`, are entered, so their products are served too. Dropout of
    attention then drops other weights with the same probability, ``torch.nn.attention.sdpa_kernel``
    has no effect, and with activation checkpointing ``backward()`` must be called inside as well
    (torch.utils.checkpoint raises otherwise).

    Every call that cannot be served goes to PyTorch; :func:`torch_cubin.report` lists both. It may
    be nested, and results have PyTorch's shape and dtype; a product is always contiguous. ``addmm``
    and its relatives round once, after factors and sum.

    Args:
        policy: as :func:`torch_cubin.install` takes it; the mode serves whatever it can.
    """

    def __init__(self, *model: Any, policy: str = "fastest") -> None:
        if model:
            raise errors.fault(
                "input", "torch_cubin.drop_in", "takes no argument: it serves what runs inside it",
                expected="with torch_cubin.drop_in(): model(x)", got=type(model[0]).__name__,
            )  # fmt: skip
        super().__init__()
        if policy != "fastest":
            _aten_kernels.number_of(policy)
            self.policy = policy

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
        policy = self.policy
        again = drop_in if policy == "fastest" else functools.partial(drop_in, policy=policy)
        return _decorator.decorated("drop_in", function, again, lambda: _STEP[policy], _begun)

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
            if not self._times_entered and not _install.is_active():
                _report.clear()
            self._times_entered[mode] = self._times_entered.get(mode, 0) + 1
            _muon.set_serving("drop_in", True)
            _transformers_hooks.add(_transformers_sdpa.HOOKS)

    def leave(self, mode: drop_in) -> None:
        with self._lock:
            times = self._times_entered.pop(mode, 0)
            if times > 1:
                self._times_entered[mode] = times - 1
            _muon.set_serving("drop_in", bool(self._times_entered))


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
