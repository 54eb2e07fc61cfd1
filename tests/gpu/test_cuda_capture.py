"""CUDA graphs: first calls inside a capture, replays with new data, the pool's memory."""

from __future__ import annotations

import gc

import numerics
import pytest
import torch
from gpu import cases


@pytest.mark.fault_case(30)
@pytest.mark.child("capture_first_call", "global")
def test_first_call_inside_a_global_capture(child) -> None:
    assert child.check()["right"]
    assert all(child.answer["right"])


@pytest.mark.fault_case(30)
@pytest.mark.child("capture_first_call", "thread_local")
def test_first_call_inside_a_thread_local_capture(child) -> None:
    assert child.check()["right"]
    assert all(child.answer["right"])


@pytest.mark.fault_case(30)
@pytest.mark.child("capture_first_call", "relaxed")
def test_first_call_inside_a_relaxed_capture(child) -> None:
    assert child.check()["right"]
    assert all(child.answer["right"])


@pytest.mark.fault_case(30)
@pytest.mark.parametrize("mode", cases.MODES)
def test_replay_gives_the_bits_of_an_eager_call(mode: str, generator: torch.Generator) -> None:
    with cases.math_mode(mode) as dtype, torch.no_grad():
        shapes = [(64, 96, 128), (1, 512, 4096), (16, 256, 8192), (129, 65, 33)]
        inputs = [
            (
                cases.draw((m, k), dtype, False, generator),
                cases.draw((n, k), dtype, False, generator),
            )
            for m, n, k in shapes
        ]
        biases = [cases.draw((n,), dtype, False, generator) for _, n, _ in shapes]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = [
                torch.ops.cubin.linear(x, w, bias)
                for (x, w), bias in zip(inputs, biases, strict=True)
            ]
        for _ in range(3):
            for x, w in inputs:
                x.normal_(generator=generator)
                w.normal_(generator=generator)
            graph.replay()
            for out, (x, w), bias in zip(outputs, inputs, biases, strict=True):
                numerics.check_bits(out, torch.ops.cubin.linear(x, w, bias), mode)


def test_capture_of_forward_and_backward(generator: torch.Generator) -> None:
    """torch.cuda.make_graphed_callables captures both directions."""

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = cases.draw((48, 64), torch.float32, True, generator)
            self.weight = torch.nn.Parameter(weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.cubin.linear(x, self.weight)

    layer = Layer()
    sample = torch.zeros(32, 64, device="cuda", requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(layer, (sample,))
    for _ in range(3):
        x = cases.draw((32, 64), torch.float32, True, generator).requires_grad_()
        grad = cases.draw((32, 48), torch.float32, True, generator)
        layer.weight.grad = None
        out = graphed(x)
        out.backward(grad)
        numerics.check_exact(out.detach(), x.detach().double() @ layer.weight.detach().double().t())
        numerics.check_exact(x.grad, grad.double() @ layer.weight.detach().double())
        numerics.check_exact(layer.weight.grad, grad.double().t() @ x.detach().double())


def test_an_error_inside_a_capture_does_not_break_it(generator: torch.Generator) -> None:
    """A refused call (wrong shapes) makes no driver call: the capture goes on."""
    a = cases.draw((64, 64), torch.bfloat16, True, generator)
    expected = a.double() @ a.double()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match=r"\[input\]"):
            torch.ops.cubin.matmul(a, torch.empty(3, 3, dtype=torch.bfloat16, device="cuda"))
        out = torch.ops.cubin.matmul(a, a)
    graph.replay()
    numerics.check_exact(out, expected)


def test_graph_memory_is_the_pools(generator: torch.Generator) -> None:
    """Outputs and split-K workspaces of a capture come from the graph's pool and go with it."""
    a = cases.draw((16, 16384), torch.bfloat16, True, generator)
    b = cases.draw((16384, 512), torch.bfloat16, True, generator)
    torch.ops.cubin.matmul(a, b)
    expected = a.double() @ b.double()
    torch.cuda.synchronize()
    gc.collect()  # as a capture does: graphs that are garbage give their memory back
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = torch.ops.cubin.matmul(a, b)
    during = torch.cuda.memory_reserved()
    assert during > before
    # Fill what an allocation outside the pool could reuse, then replay.
    others = [torch.full((1 << 20,), torch.nan, device="cuda") for _ in range(16)]
    graph.replay()
    numerics.check_exact(out, expected)
    assert all(bool(other.isnan().all()) for other in others)
    del others, out, graph
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before
