# What drop_in() and batch_invariant() are as decorators. A body that runs later than the call, of
# a generator or of a coroutine, is resumed by whoever asks for it next, perhaps in another thread:
# the context is entered for each step alone, and left while the body is suspended.
"""Functions whose body runs inside a context, of every kind that Python has."""

import contextlib
import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractContextManager
from typing import Any

import torch

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
    if not callable(function) or isinstance(function, (type, torch.nn.Module)):
        is_class = isinstance(function, type)
        raise errors.fault(
            "input",
            f"torch_cubin.{name} as a decorator",
            "is given no function",
            expected="a function",
            got="a class" if is_class else type(function).__name__,
            advice="Decorate its methods." if is_class else "",
        )
    if _is(inspect.isasyncgenfunction, function):

        @functools.wraps(function)
        async def inside(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
            with begun():
                generator = function(*args, **kwargs)
                step = generator.__anext__()
                while True:
                    try:
                        item = await _Stepwise(step, step_context)
                    except StopAsyncIteration:
                        return
                    try:
                        step = generator.asend((yield item))
                    except GeneratorExit:
                        await _Stepwise(generator.aclose(), step_context)
                        raise
                    except BaseException as error:
                        step = generator.athrow(error)

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


class _Stepwise:
    """An awaitable whose steps run inside a context each."""

    def __init__(self, awaitable: Any, context: Contexts) -> None:
        self._awaitable, self._context = awaitable, context

    def __await__(self) -> Generator[Any, Any, Any]:
        return _steps(self._awaitable.__await__(), self._context)


def _steps(body: Any, context: Contexts) -> Generator[Any, Any, Any]:
    """A generator that resumes another one, or what a coroutine awaits, in a context each time."""
    resume, value = body.send, None
    while True:
        try:
            with context():
                item = resume(value)
        except StopIteration as stop:
            return stop.value
        try:
            value = yield item
            resume = body.send
        except GeneratorExit:
            with context():
                body.close()
            raise
        except BaseException as error:
            resume, value = body.throw, error
