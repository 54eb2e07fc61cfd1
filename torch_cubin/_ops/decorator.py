# drop_in() and batch_invariant() as decorators. The body of a generator or a coroutine runs after
# the call, and may be resumed by another thread: the context is entered for each step, and exited
# while the body is suspended.
"""Runs the body of functions of every kind inside a context."""

import contextlib
import functools
import inspect
import types
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractContextManager
from typing import Any

from torch_cubin import errors

Contexts = Callable[[], AbstractContextManager[Any]]


def decorated(
    name: str,
    function: Callable[..., Any],
    context: Contexts,
    step_context: Contexts,
    begun: Contexts = contextlib.nullcontext,
) -> Callable[..., Any]:
    """`function` with its body in `context()`. A resumable body is in a `step_context()` during
    each step, and in `begun()` from its beginning to its end. `name` is for errors.
    """
    if not callable(function):
        raise errors.fault(
            "input",
            f"torch_cubin.{name} as a decorator",
            "is given what cannot be called",
            expected="a function",
            got=type(function).__name__,
        )
    if _is(inspect.isasyncgenfunction, function):

        @functools.wraps(function)
        async def inside(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
            with begun():
                generator = function(*args, **kwargs)
                step = generator.__anext__()
                try:
                    while True:
                        item = await _Stepwise(step, step_context)
                        step = None
                        try:
                            step = generator.asend((yield item))
                        except GeneratorExit:
                            await _Stepwise(generator.aclose(), step_context)
                            raise
                        except BaseException as error:
                            step = generator.athrow(error)
                except StopAsyncIteration:
                    return
                finally:
                    del step  # as in _steps

    elif _is(inspect.iscoroutinefunction, function):

        @functools.wraps(function)
        async def inside(*args: Any, **kwargs: Any) -> Any:
            with begun():
                return await _Stepwise(function(*args, **kwargs), step_context)

    elif _is(inspect.isgeneratorfunction, function):

        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            with begun():
                return (yield from _steps(function(*args, **kwargs), step_context))

        if _is(_is_awaitable_generator, function):
            inside = types.coroutine(inside)

    else:

        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with context():
                return function(*args, **kwargs)

    return inside


def _is(kind: Callable[[Any], bool], function: Callable[..., Any]) -> bool:
    """Whether a function, or a callable object, has a body of that kind."""
    while isinstance(function, functools.partial):
        function = function.func
    return kind(function) or kind(type(function).__call__)


def _is_awaitable_generator(function: Any) -> bool:
    """Whether it is from types.coroutine: a generator function whose generators are awaitable."""
    flags = getattr(getattr(function, "__code__", None), "co_flags", 0)
    return bool(flags & inspect.CO_ITERABLE_COROUTINE)


class _Stepwise:
    """An awaitable that runs each step inside a context."""

    def __init__(self, awaitable: Any, context: Contexts) -> None:
        self._awaitable, self._context = awaitable, context

    def __await__(self) -> Generator[Any, Any, Any]:
        return _steps(self._awaitable.__await__(), self._context)


def _steps(body: Any, context: Contexts) -> Generator[Any, Any, Any]:
    """A generator that resumes another one, or a coroutine's awaitable, in a context each time."""
    resume, value = body.send, None
    try:
        while True:
            with context():
                item = resume(value)
            value = None
            try:
                value = yield item
                resume = body.send
            except GeneratorExit:
                with context():
                    body.close()
                raise
            except BaseException as error:
                resume, value = body.throw, error
    except StopIteration as stop:
        return stop.value
    finally:
        # The traceback of a thrown exception refers to this frame. If the frame referred to the
        # exception, or to a body that holds it, the body's tensors would live until a garbage
        # collection.
        del body, resume, value
