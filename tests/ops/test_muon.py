"""torch.optim.Muon inside drop_in(): unchanged, with a symmetric product by symm_square."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from drop_in_cases import another_thread_inside
from recorded_ops import RecordedOps
from torch.optim import _muon

import torch_cubin
from torch_cubin._drop_in import muon


class Calls(RecordedOps):
    def squares(self) -> int:
        return sum("symm_square" in name for name in self.names)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Matrices of a test's size count as large."""
    monkeypatch.setattr(muon, "_LEAST", 8)
    yield
    torch._dynamo.reset()


def parameters(*shapes: tuple[int, int]) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    made = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for parameter in made:
        parameter.grad = torch.randn_like(parameter)
    return made


SHAPES = ((16, 16), (12, 24), (24, 12), (4, 6))  # the last is too small


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="drop_in() serves the CPU only without CUDA")
def test_steps_agree_with_pytorchs(compiled: bool) -> None:
    stock, served = parameters(*SHAPES), parameters(*SHAPES)
    steps = []
    for each in (stock, served):
        optimizer = torch.optim.Muon(each, lr=0.1)
        steps.append(torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step)
    for _ in range(3):
        steps[0]()
        with torch_cubin.drop_in():
            steps[1]()
    for x, y in zip(stock, served, strict=True):
        torch.testing.assert_close(x, y, atol=2e-2, rtol=0)  # bfloat16, rounded elsewhere


def test_a_step_that_is_compiled_inside_has_them_in_its_graph() -> None:
    targets: list[str] = []

    def backend(graph, inputs):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    optimizer = torch.optim.Muon(parameters((16, 16)), lr=0.1)
    step = torch.compile(optimizer.step, backend=backend)
    with torch_cubin.drop_in():
        step()
    assert sum("symm_square" in target for target in targets) == 5
    targets.clear()
    step()  # outside it is another graph
    assert targets
    assert not any("symm_square" in target for target in targets)


@pytest.mark.skipif(torch.cuda.is_available(), reason="drop_in() serves the CPU only without CUDA")
def test_which_products_are_symmetric() -> None:
    (parameter,) = parameters((16, 16))
    with Calls() as calls, torch_cubin.drop_in():
        _muon._zeropower_via_newtonschulz(parameter.grad, (3.4, -4.7, 2.0), 5, 1e-7)
    assert calls.squares() == 5
    rows = [row for row in torch_cubin.report().served if row.function == "torch.addmm"]
    assert sum(row.calls for row in rows) == 10


def test_outside_nothing_changes() -> None:
    with torch_cubin.drop_in():
        pass
    (parameter,) = parameters((16, 16))
    args = (parameter.grad, (3.4, -4.7, 2.0), 5, 1e-7)
    with Calls() as calls:
        got = _muon._zeropower_via_newtonschulz(*args)
    assert calls.squares() == 0
    assert torch.equal(got, _muon._zeropower_via_newtonschulz.__wrapped__(*args))


def test_another_thread_inside_changes_nothing_here() -> None:
    (parameter,) = parameters((16, 16))
    with another_thread_inside(), Calls() as calls:
        _muon._zeropower_via_newtonschulz(parameter.grad, (3.4, -4.7, 2.0), 5, 1e-7)
    assert calls.squares() == 0


def test_a_users_addmm_of_one_tensor_stays_a_product() -> None:
    """Outside of Muon nobody knows that the tensor is symmetric."""
    a = torch.randn(16, 16)
    with torch_cubin.drop_in():
        got = torch.addmm(a, a, a)
    torch.testing.assert_close(got, a + a @ a)


@pytest.mark.parametrize("wrong", ["steps", "shape", "coefficients"])
@pytest.mark.parametrize("inside", [False, True])
def test_errors_are_pytorchs(wrong: str, inside: bool) -> None:
    grad = torch.randn((4, 4, 4) if wrong == "shape" else (16, 16))
    coefficients = (1.0, 2.0) if wrong == "coefficients" else (3.4, -4.7, 2.0)
    with torch_cubin.drop_in() if inside else nullcontext(), pytest.raises(ValueError):
        _muon._zeropower_via_newtonschulz(grad, coefficients, 100 if wrong == "steps" else 5, 1e-7)
