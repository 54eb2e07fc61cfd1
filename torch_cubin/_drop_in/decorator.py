# drop_in() as a decorator. What runs later than the call (the body of a generator or of a coroutine)
# is resumed by whoever asks for it next, perhaps in another thread: the mode is on for each step
# alone, and off while the body is suspended.
"""Functions whose body runs with a mode on, of every kind that Python has."""

import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractContextManager
from typing import Any

Contexts = Callable[[], AbstractContextManager[Any]]


def decorated(
    function: Callable[..., Any],
    whole: Contexts,
    begun: Contexts,
    mode: AbstractContextManager[Any],
) -> Callable[..., Any]:
    """`function` with its body in `whole()`; a body that is resumed is in `begun()` from its
    beginning to its end, and in `mode`, which is entered again and again, in each of its steps.
    """
    if _is(inspect.isasyncgenfunction, function):

        @functools.wraps(function)
        async def inside(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
            with begun():
                generator = function(*args, **kwargs)
                step = generator.__anext__()
                while True:
                    try:
                        item = await _Stepwise(step, mode)
                    except StopAsyncIteration:
                        return
                    try:
                        step = generator.asend((yield item))
                    except GeneratorExit:
                        await _Stepwise(generator.aclose(), mode)
                        raise
                    except BaseException as error:
                        step = generator.athrow(error)

    elif _is(inspect.iscoroutinefunction, function):

        @functools.wraps(function)
        async def inside(*args: Any, **kwargs: Any) -> Any:
            with begun():
                return await _Stepwise(function(*args, **kwargs), mode)

    elif _is(inspect.isgeneratorfunction, function):

        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            with begun():
                return (yield from _steps(function(*args, **kwargs), mode))

    else:

        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with whole():
                return function(*args, **kwargs)

    return inside


def _is(kind: Callable[[Any], bool], function: Callable[..., Any]) -> bool:
    """Whether a function, or an object that is called as one, has a body of that kind."""
    while isinstance(function, functools.partial):
        function = function.func
    return kind(function) or kind(type(function).__call__)


class _Stepwise:
    """An awaitable whose steps run with the mode on."""

    def __init__(self, awaitable: Any, mode: AbstractContextManager[Any]) -> None:
        self._awaitable, self._mode = awaitable, mode

    def __await__(self) -> Generator[Any, Any, Any]:
        return _steps(self._awaitable.__await__(), self._mode)


def _steps(body: Any, mode: AbstractContextManager[Any]) -> Generator[Any, Any, Any]:
    """A generator that resumes another one, or what a coroutine awaits, with the mode on."""
    resume, value = body.send, None
    while True:
        try:
            with mode:
                item = resume(value)
        except StopIteration as stop:
            return stop.value
        try:
            value = yield item
            resume = body.send
        except GeneratorExit:
            with mode:
                body.close()
            raise
        except BaseException as error:
            resume, value = body.throw, error
