"""drop_in() below autograd, as on a CUDA build of PyTorch: for one thread, without a mode."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from drop_in_cases import integers, same
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

import torch_cubin
from torch_cubin import errors
from torch_cubin._drop_in import aten_kernels
from torch_cubin._native import library
from torch_cubin._pytorch import thread_objects


@pytest.fixture(autouse=True)
def _below_autograd(monkeypatch, _drop_in_as_on_a_cpu_build) -> None:
    """On the CPU's key, whose kernels end in the reference."""
    aten_kernels.register("CPU")
    monkeypatch.setattr(aten_kernels, "below_autograd", lambda: True)


def left_in_this_thread(key: str) -> bool:
    """Whether there is an object: null means none, and PyTorch has no query for it."""
    policies = {name: number for number, name in thread_objects.KEYS.items()}
    return library.thread_object_policy() == policies[key]


def served() -> dict[str, int]:
    return {row.function: row.calls for row in torch_cubin.report().served}


def test_no_mode_is_on_and_products_are_served() -> None:
    a, b = integers(3, 4), integers(4, 5, seed=1)
    with torch_cubin.drop_in():
        assert _get_current_function_mode_stack() == []
        result = a @ b
        F.linear(a, b.t(), b[0])
        assert served() == {"aten::mm": 1, "aten::addmm": 1}
    a @ b
    assert served() == {"aten::mm": 1, "aten::addmm": 1}
    same(result, a @ b)


def test_training_equals_torch() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    x = torch.randn(6, 4)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(x).square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = gradients()
    with torch_cubin.drop_in():
        result = gradients()
        assert served() == {"aten::addmm": 2, "aten::mm": 3}
    torch.testing.assert_close(result, expected)


def test_nested_scopes_and_policies() -> None:
    a = integers(3, 3)
    scope = torch_cubin.drop_in()
    with scope, torch_cubin.drop_in(policy="all"), scope, scope:
        a @ a
    assert served() == {"aten::mm": 1}
    with torch_cubin.drop_in(), pytest.raises(ZeroDivisionError), torch_cubin.drop_in():
        raise ZeroDivisionError
    assert library.set_thread_policy(0) == 0
    assert not any(map(left_in_this_thread, thread_objects.KEYS.values()))
    with pytest.raises(errors.InputError, match="policy"):
        torch_cubin.drop_in(policy="quickest")


def test_it_serves_only_threads_that_enter_it() -> None:
    a = integers(4, 4)
    counts: dict[str, int] = {}

    def work(enter: bool) -> None:
        before = served().get("aten::mm", 0)
        if enter:
            with torch_cubin.drop_in():
                a @ a
        else:
            a @ a
        counts[str(enter)] = served().get("aten::mm", 0) - before

    with torch_cubin.drop_in():
        for enter in (True, False):
            thread = threading.Thread(target=work, args=(enter,))
            thread.start()
            thread.join()
    assert counts == {"True": 1, "False": 0}


def test_a_thread_of_backward_is_served() -> None:
    """PyTorch hands the object of the thread that called backward() on; on a GPU, to another."""
    a = integers(4, 4)
    seen: list[dict[str, int]] = []

    def work() -> None:
        thread_objects.leave(thread_objects.KEYS[1])
        a @ a
        seen.append(served())
        library.forget_thread_object(thread_objects.KEYS[1])
        a @ a
        seen.append(served())

    with torch_cubin.drop_in():
        assert left_in_this_thread(thread_objects.KEYS[1])
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == [{"aten::mm": 1}] * 2


def test_decorated_functions_generators_and_coroutines() -> None:
    a = integers(3, 3)

    @torch_cubin.drop_in()
    def product():
        return a @ a

    @torch_cubin.drop_in(policy="all")
    def steps():
        for _ in range(2):
            yield a @ a

    same(product(), a @ a)
    assert served() == {"aten::mm": 1}
    for _ in steps():
        a @ a  # outside, while the body is suspended
    assert served() == {"aten::mm": 2}


def test_scopes_of_generators_end_in_any_order() -> None:
    a = integers(3, 3)

    def body(policy):
        with torch_cubin.drop_in(policy=policy):
            yield

    first, second = body("fastest"), body("all")
    next(first)
    next(second)
    first.close()
    a @ a
    assert served() == {"aten::mm": 1}
    assert left_in_this_thread(thread_objects.KEYS[2])
    second.close()
    a @ a
    assert served() == {"aten::mm": 1}
    assert not any(map(left_in_this_thread, thread_objects.KEYS.values()))


def test_checkpointing_recomputes_with_or_without() -> None:
    layer = torch.nn.Linear(4, 4)
    x = integers(4, 4).requires_grad_()
    layer(x).square().sum().backward()
    expected, x.grad = x.grad, None
    with torch_cubin.drop_in():
        result = checkpoint(layer, x, use_reentrant=False)
    result.square().sum().backward()
    torch.testing.assert_close(x.grad, expected)


def test_other_modes_and_subclasses_keep_working() -> None:
    class Mine(torch.Tensor):
        pass

    a = integers(3, 3)
    with torch.device("cpu"), torch_cubin.drop_in(), torch.device("meta"):
        assert torch.ones(2).is_meta
        result = a.as_subclass(Mine) @ a
    assert type(result) is Mine
    same(result.as_subclass(torch.Tensor), a @ a)
    assert served() == {"aten::mm": 1}


def test_a_compiled_function_is_served_inside_and_compiled_once(fresh_dynamo) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(lambda a, b: (a @ b) @ b, backend=counter)
    a, b = integers(3, 4), integers(4, 4, seed=1)
    expected = compiled(a, b)
    with torch_cubin.drop_in():
        same(compiled(a, b), expected)
        assert served() == {"aten::mm.out": 2}
    compiled(a, b)
    assert served() == {"aten::mm.out": 2}
    assert counter.frame_count == 1


def test_a_scope_in_a_compiled_function_is_part_of_its_graph(fresh_dynamo) -> None:
    seen: list[str] = []

    def backend(graph, inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    @torch.compile(backend=backend, fullgraph=True)
    def function(a):
        with torch_cubin.drop_in():
            return a @ a

    a = integers(3, 3)
    same(function(a), a @ a)
    assert seen == ["cubin.matmul.default"]


def test_counts_of_install_stay() -> None:
    a = integers(3, 3)
    with torch_cubin.install(policy="all"):
        a @ a
        with torch_cubin.drop_in():
            a @ a
        assert served() == {"aten::mm": 2}
