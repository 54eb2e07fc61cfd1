"""Counters of streamed products, which no launch sets to zero (csrc/runtime/counters.h): streams
at once, branches of graphs, replays beside calls, graphs that come and go."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import numerics
import pytest
import torch
from gpu import cases, hopper
from in_threads import in_threads
from torch import Tensor

from torch_cubin._native import library
from torch_cubin._tuning import measure

pytestmark = hopper.for_kernels
SIZES = 1024, 1024, 4104
CONFIGS = ("sm90 128x128 streamed evenly", "sm90 128x128 share_a streamed evenly")


@contextlib.contextmanager
def streamed(config: str = CONFIGS[0]) -> Iterator[None]:
    """Products are streamed, in this thread."""
    with torch.no_grad(), measure.watching():
        library.force_config(config)
        yield
        chosen = {plan["chosen"] for plan in library.watched_plans()}
    assert chosen == {config}


def operands(count: int, g: torch.Generator) -> tuple[list[tuple[Tensor, Tensor]], list[Tensor]]:
    """So many pairs of integers, and their products."""
    m, n, k = SIZES
    pairs = [
        (
            cases.draw((k, m), torch.bfloat16, True, g).t(),
            cases.draw((k, n), torch.bfloat16, True, g),
        )
        for _ in range(count)
    ]
    return pairs, [(a.double() @ b.double()).bfloat16() for a, b in pairs]


def wrong(results: list[Tensor], expected: list[Tensor]) -> int:
    """How many of the results differ, which come in turns."""
    torch.cuda.synchronize()
    count = len(expected)
    return sum(not torch.equal(out, expected[i % count]) for i, out in enumerate(results))


def nodes(graph: torch.cuda.CUDAGraph) -> int:
    count = ctypes.c_size_t()
    driver = ctypes.CDLL("libcuda.so.1")
    handle = ctypes.c_void_p(graph.raw_cuda_graph())
    assert driver.cuGraphGetNodes(handle, None, ctypes.byref(count)) == 0
    return count.value


@pytest.mark.parametrize("config", CONFIGS)
def test_streams_at_once(config: str, generator: torch.Generator) -> None:
    pairs, expected = operands(8, generator)
    streams = [torch.cuda.Stream() for _ in pairs]
    torch.cuda.synchronize()
    results = []
    with streamed(config):
        for _ in range(100):
            for stream, (a, b) in zip(streams, pairs, strict=True):
                with torch.cuda.stream(stream):
                    results.append(torch.ops.cubin.matmul(a, b))
    assert wrong(results, expected) == 0


def test_threads_that_share_a_stream_and_others(generator: torch.Generator) -> None:
    pairs, expected = operands(4, generator)
    shared = torch.cuda.Stream()
    results: list[list[Tensor]] = [[] for _ in pairs]
    torch.cuda.synchronize()

    def work(index: int) -> None:
        library.force_config(CONFIGS[0])  # a thread's own
        with torch.cuda.stream(shared if index % 2 else torch.cuda.Stream()), torch.no_grad():
            for _ in range(100):
                results[index].append(torch.ops.cubin.matmul(*pairs[index]))

    with streamed():  # watching is the process's
        in_threads(work, [(i,) for i in range(4)])
    assert [len(each) for each in results] == [100] * 4
    assert [wrong(*each) for each in zip(results, [[x] for x in expected], strict=True)] == [0] * 4


@pytest.mark.parametrize("config", CONFIGS)
def test_branches_of_a_graph(config: str, generator: torch.Generator) -> None:
    """And each product is one node: nothing is set to zero."""
    pairs, expected = operands(4, generator)
    streams = [torch.cuda.Stream() for _ in pairs]
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with streamed(config), torch.cuda.graph(graph):
        main, results = torch.cuda.current_stream(), []
        for stream in streams:
            stream.wait_stream(main)
        for _ in range(10):
            for stream, (a, b) in zip(streams, pairs, strict=True):
                with torch.cuda.stream(stream):
                    results.append(torch.ops.cubin.matmul(a, b))
        for stream in streams:
            main.wait_stream(stream)
    graph.instantiate()
    assert nodes(graph) == 40
    for _ in range(25):
        for out in results:
            out.fill_(torch.nan)
        graph.replay()
        assert wrong(results, expected) == 0


def test_replays_beside_calls_and_other_graphs(generator: torch.Generator) -> None:
    """Two graphs and calls on three streams at once; the first was captured on the stream of the
    calls."""
    pairs, expected = operands(3, generator)
    streams = [torch.cuda.Stream() for _ in pairs]
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    outs = []
    with streamed():
        for graph, (a, b) in zip(graphs, pairs, strict=False):
            with torch.cuda.graph(graph, stream=streams[2]):
                outs.append([torch.ops.cubin.matmul(a, b) for _ in range(4)])
        torch.cuda.synchronize()
        calls = []
        for _ in range(100):
            for graph, stream in zip(graphs, streams, strict=False):
                with torch.cuda.stream(stream):
                    graph.replay()
            with torch.cuda.stream(streams[2]):
                calls += [torch.ops.cubin.matmul(*pairs[2]) for _ in range(2)]
    assert wrong(calls, [expected[2]]) == 0
    assert [wrong(outs[i], [expected[i]]) for i in range(2)] == [0, 0]


def test_graphs_that_come_and_go_give_their_counters_back(generator: torch.Generator) -> None:
    """More launches than there are counters, in graphs that are destroyed while they run."""
    pairs, expected = operands(1, generator)
    with streamed():
        for number in range(60):
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            with torch.cuda.graph(graph):
                for _ in range(299):
                    torch.ops.cubin.matmul(*pairs[0])
                out = torch.ops.cubin.matmul(*pairs[0])
            graph.instantiate()
            assert nodes(graph) == 300, f"graph {number}"
            graph.replay()
            copy = out.clone()
            del graph, out
            assert wrong([copy], expected) == 0


def test_the_bits_do_not_depend_on_what_ran_before(generator: torch.Generator) -> None:
    """Eager calls, replays and calls whose kernel another one overlaps."""
    m, n, k = SIZES
    a = cases.draw((k, m), torch.bfloat16, False, generator).t()
    b = cases.draw((k, n), torch.bfloat16, False, generator)
    graph = torch.cuda.CUDAGraph()
    with streamed():
        first = torch.ops.cubin.matmul(a, b)
        with torch.cuda.graph(graph):
            captured = [torch.ops.cubin.matmul(a, b) for _ in range(20)]
        for _ in range(100):
            graph.replay()
        results = [*captured, *(torch.ops.cubin.matmul(a, b) for _ in range(1000))]
    assert wrong(results, [first]) == 0
    numerics.check_close(first, a @ b, numerics.reference_matmul(a, b))
