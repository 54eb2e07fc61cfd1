"""drop_in() as a decorator of functions, generators and coroutines: it holds in the body only."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import inspect
import threading
import types
import weakref

import pytest
import torch
from drop_in_cases import Ops, integers

import torch_cubin
from torch_cubin import errors
from torch_cubin._ops.batch_invariant import is_batch_invariant


def served(a: torch.Tensor) -> bool:
    """Whether a product here comes from a cubin."""
    with Ops() as ops:
        a @ a
    return ops.cubin() == 1


@pytest.fixture
def a(device) -> torch.Tensor:
    return integers(4, 4, device=device)


def test_a_generator_is_served_and_who_resumes_it_is_not(a) -> None:
    @torch_cubin.drop_in()
    def numbers(first):
        """Numbers."""
        got = []
        for number in range(first, first + 3):
            assert served(a)
            try:
                got.append((yield number))
            except ValueError as error:
                assert served(a)
                got.append(str(error))
        assert served(a)
        return got

    assert inspect.isgeneratorfunction(numbers)
    assert numbers.__doc__ == "Numbers."
    assert list(numbers(5)) == [5, 6, 7]
    generator = numbers(0)
    assert next(generator) == 0
    assert not served(a)
    assert generator.send("sent") == 1
    assert generator.throw(ValueError("thrown")) == 2
    assert not served(a)
    with pytest.raises(StopIteration) as stopped:
        generator.send("last")
    assert stopped.value.value == ["sent", "thrown", "last"]
    with pytest.raises(KeyError, match="not caught"):
        next(broken := numbers(0))
        broken.throw(KeyError("not caught"))
    assert not served(a)


def test_a_generator_is_closed_inside(a) -> None:
    seen = []

    @torch_cubin.drop_in()
    def endless():
        try:
            while True:
                yield
        finally:
            seen.append(served(a))

    generator = endless()
    next(generator)
    generator.close()
    dropped = endless()
    next(dropped)
    del dropped
    gc.collect()
    assert seen == [True, True]
    assert not served(a)


def test_a_generator_is_resumed_by_any_thread(a) -> None:
    @torch_cubin.drop_in()
    def steps():
        while True:
            yield served(a)

    generator = steps()
    seen = [next(generator)]

    def work() -> None:
        seen.extend([next(generator), served(a)])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [*seen, next(generator), served(a)] == [True, True, False, True, False]


def test_the_counts_of_a_generator_begin_once(a) -> None:
    @torch_cubin.drop_in()
    def products():
        for _ in range(3):
            yield a @ a

    generator = products()
    for calls in (1, 2, 3):
        next(generator)
        a @ a
        assert [row.calls for row in torch_cubin.report().served] == [calls]
    del generator
    with torch_cubin.drop_in():
        assert torch_cubin.report().served == ()


def test_a_coroutine_is_served_and_other_tasks_are_not(a) -> None:
    seen = []

    @torch_cubin.drop_in()
    async def product(number):
        for _ in range(3):
            assert served(a)
            await asyncio.sleep(0)
        assert served(a)
        return number

    async def other() -> None:
        for _ in range(5):
            seen.append(served(a))
            await asyncio.sleep(0)

    async def slow():
        try:
            await asyncio.sleep(60)
        finally:
            seen.append(not served(a))

    async def main() -> None:
        assert await asyncio.gather(product(1), other(), product(2)) == [1, None, 2]
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(torch_cubin.drop_in()(slow)(), 0.01)

    assert inspect.iscoroutinefunction(product)
    asyncio.run(main())
    assert seen == [False] * 6


def test_an_asynchronous_generator(a) -> None:
    ends = []

    @torch_cubin.drop_in()
    async def numbers():
        got = []
        try:
            for number in range(3):
                await asyncio.sleep(0)
                assert served(a)
                try:
                    got.append((yield number))
                except ValueError as error:
                    got.append(str(error))
            yield got
        finally:
            await asyncio.sleep(0)
            ends.append(served(a))

    async def main() -> None:
        generator = numbers()
        assert await generator.asend(None) == 0
        assert not served(a)
        assert await generator.asend("sent") == 1
        assert await generator.athrow(ValueError("thrown")) == 2
        assert await generator.asend("last") == ["sent", "thrown", "last"]
        with pytest.raises(StopAsyncIteration):
            await generator.asend(None)
        closed = numbers()
        await closed.__anext__()
        await closed.aclose()
        assert [number async for number in numbers() if not served(a)] == [0, 1, 2, [None] * 3]

    assert inspect.isasyncgenfunction(numbers)
    asyncio.run(main())
    assert ends == [True, True, True]


def test_methods_partials_and_objects_that_are_called(a) -> None:
    class Model:
        @torch_cubin.drop_in()
        def products(self, n):
            for _ in range(n):
                yield served(a)

        async def __call__(self):
            await asyncio.sleep(0)
            return served(a)

    assert list(Model().products(2)) == [True, True]
    assert list(torch_cubin.drop_in()(functools.partial(Model.products, Model()))(1)) == [True]
    assert asyncio.run(torch_cubin.drop_in()(Model())())


def test_an_awaitable_generator_stays_awaitable(a) -> None:
    @torch_cubin.drop_in()
    @types.coroutine
    def step():
        yield from asyncio.sleep(0).__await__()
        return served(a)

    @torch_cubin.batch_invariant()
    @types.coroutine
    def other():
        yield from asyncio.sleep(0).__await__()
        return is_batch_invariant()

    async def main():
        return await step(), await other(), served(a), is_batch_invariant()

    assert inspect.isawaitable(step())
    assert asyncio.run(main()) == (True, True, False, False)


MODES = {
    "undecorated": lambda function: function,
    "drop_in": torch_cubin.drop_in(),
    "batch_invariant": torch_cubin.batch_invariant(),
}


@pytest.fixture
def no_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("mode", MODES)
def test_an_exception_leaves_no_cycle(mode, no_collection) -> None:
    """The body's tensors go with the exception, not at a garbage collection to come."""
    tensors = []

    def tensor() -> torch.Tensor:
        made = torch.ones(2)
        tensors.append(weakref.ref(made))
        return made

    @MODES[mode]
    def generator():
        local = tensor()
        yield
        return local

    @MODES[mode]
    async def task():
        local = tensor()
        await asyncio.sleep(60)
        return local

    @MODES[mode]
    async def asynchronous_generator():
        local = tensor()
        yield
        await asyncio.sleep(0)
        yield local

    @MODES[mode]
    async def that_fails():
        local = tensor()
        await asyncio.sleep(0)
        if local is not None:
            raise KeyError

    running = generator()
    next(running)
    with contextlib.suppress(KeyError):
        running.throw(KeyError())
    del running
    assert [ref() for ref in tensors] == [None]

    async def main() -> None:
        cancelled = asyncio.ensure_future(task())
        await asyncio.sleep(0)
        cancelled.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await cancelled
        del cancelled
        await asyncio.sleep(0)  # asyncio's own step lets go of the exception
        assert [ref() for ref in tensors] == [None] * 2
        running = asynchronous_generator()
        await running.__anext__()
        with contextlib.suppress(KeyError):
            await running.athrow(KeyError())
        del running
        assert [ref() for ref in tensors] == [None] * 3
        with contextlib.suppress(KeyError):
            await that_fails()
        assert [ref() for ref in tensors] == [None] * 4

    asyncio.run(main())


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (torch.nn.Linear, r"a class: expected a function, got Linear\."),
        (torch.nn.ReLU(), r"a module: expected a function, got ReLU\."),
        (3, r"what cannot be called: expected a function, got int\."),
    ],
)
def test_drop_in_refuses_objects_that_are_no_function(wrong, says) -> None:
    with pytest.raises(errors.InputError, match=rf"\[input\].* is given {says}"):
        torch_cubin.drop_in()(wrong)


def test_batch_invariance_of_all_that_can_be_called() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.made_inside = is_batch_invariant()

        def forward(self, x):
            return x, is_batch_invariant()

    model = Model()
    assert not model.made_inside
    assert torch_cubin.batch_invariant()(model)(5) == (5, True)
    assert torch_cubin.batch_invariant()(Model)().made_inside
    assert torch_cubin.batch_invariant()(functools.partial(model, 6))() == (6, True)
    assert not is_batch_invariant()
    with pytest.raises(errors.InputError, match=r"\[input\].*expected a function, got int\."):
        torch_cubin.batch_invariant()(3)


@pytest.mark.parametrize("mode", [torch_cubin.drop_in, torch_cubin.batch_invariant])
def test_a_decorator_without_brackets_is_refused(mode) -> None:
    with pytest.raises(errors.InputError, match=r"\[input\].*got function"):

        @mode
        def function():
            return 1


def test_batch_invariance_holds_in_the_body_alone() -> None:
    @torch_cubin.batch_invariant()
    def steps():
        for _ in range(2):
            yield is_batch_invariant()

    @torch_cubin.batch_invariant()
    async def step():
        await asyncio.sleep(0)
        return is_batch_invariant()

    assert [(inside, is_batch_invariant()) for inside in steps()] == [(True, False), (True, False)]
    assert asyncio.run(step())
