# What drop_in() and batch_invariant() are as decorators. A body that runs later than the call, of
# a generator or of a coroutine, is resumed by whoever asks for it next, perhaps in another thread:
# the context is entered for each step alone, and left while the body is suspended.
"""Functions whose body runs inside a context, of every kind that Python has."""

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
    """`function` with its body in `context()`. A body that is resumed is in a `step_context()` in
    each of its steps, and in `begun()` from its beginning to its end. `name` is for errors.
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
    """Whether a function, or an object that is called as one, has a body of that kind."""
    while isinstance(function, functools.partial):
        function = function.func
    return kind(function) or kind(type(function).__call__)


def _is_awaitable_generator(function: Any) -> bool:
    """Whether types.coroutine made it: a generator function whose generators can be awaited."""
    flags = getattr(getattr(function, "__code__", None), "co_flags", 0)
    return bool(flags & inspect.CO_ITERABLE_COROUTINE)


class _Stepwise:
    """An awaitable whose steps run inside a context each."""

    def __init__(self, awaitable: Any, context: Contexts) -> None:
        self._awaitable, self._context = awaitable, context

    def __await__(self) -> Generator[Any, Any, Any]:
        return _steps(self._awaitable.__await__(), self._context)


def _steps(body: Any, context: Contexts) -> Generator[Any, Any, Any]:
    """A generator that resumes another one, or what a coroutine awaits, in a context each time."""
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
        # The traceback of an exception that was thrown in refers to this frame. Were the frame to
        # refer to the exception, or to a body that holds it, the body's tensors would stay until
        # a garbage collection.
        del body, resume, value
