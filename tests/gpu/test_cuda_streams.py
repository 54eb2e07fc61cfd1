"""Streams and threads: the op runs on the current stream of its thread, and waits for nothing."""

from __future__ import annotations

import ctypes

import numerics
import pytest
import torch
from gpu import cases
from in_threads import in_threads

SLEEP = 200_000_000  # cycles: about 0.1 s

SHAPES = [(64, 64, 64), (16, 512, 8192), (1, 4096, 512)]  # one of them split along K


def _pair(m: int, n: int, k: int, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(cases.draw(shape, torch.bfloat16, True, g) for shape in ((m, k), (k, n)))


@pytest.mark.fault_case(37)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_op_is_ordered_on_the_current_stream_and_asynchronous(shape, generator) -> None:
    """The inputs are written by the stream only after a long sleep."""
    a, b = _pair(*shape, generator)
    late_a, late_b = torch.zeros_like(a), torch.zeros_like(b)
    torch.ops.cubin.matmul(a, b)  # the first use may load a module, which is not tested here
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP)
        late_a.copy_(a)
        late_b.copy_(b)
        out = torch.ops.cubin.matmul(late_a, late_b)
        busy = not stream.query()
    assert busy, "the call waited for the GPU"
    stream.synchronize()
    numerics.check_exact(out, a.double() @ b.double())


@pytest.mark.child("destroyed_streams")
def test_streams_are_destroyed_while_they_run(child) -> None:
    """A call with programmatic dependent launch never ends there (driver 580); a graph does."""
    assert child.check() == {"called": [True] * 80, "replayed": [True] * 800}


class _Edge(ctypes.Structure):
    """CUgraphEdgeData."""

    _fields_ = (
        ("from_port", ctypes.c_ubyte),
        ("to_port", ctypes.c_ubyte),
        ("type", ctypes.c_ubyte),  # 1: programmatic
        ("reserved", ctypes.c_ubyte * 5),
    )


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9,
    reason="kernels for Hopper have programmatic dependent launch",
)
@pytest.mark.parametrize("made_by", ["PyTorch", "the driver"])
def test_dependent_launch_on_streams_of_pytorch_alone(made_by: str, generator) -> None:
    """As the dependencies show that a capture turns it into."""
    driver = ctypes.CDLL("libcuda.so.1")
    a, b = _pair(512, 512, 512, generator)
    torch.ops.cubin.matmul(a, b)
    torch.cuda.synchronize()
    handle = ctypes.c_void_p()
    stream = torch.cuda.Stream()
    if made_by == "the driver":
        assert driver.cuStreamCreate(ctypes.byref(handle), 1) == 0
        stream = torch.cuda.ExternalStream(handle.value)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(3):
            torch.ops.cubin.matmul(a, b)
    count, edges = ctypes.c_size_t(8), (_Edge * 8)()
    nodes = [(ctypes.c_void_p * 8)() for _ in range(2)]
    captured = ctypes.c_void_p(graph.raw_cuda_graph())
    assert driver.cuGraphGetEdges_v2(captured, *nodes, edges, ctypes.byref(count)) == 0
    assert [edge.type for edge in edges[: count.value]] == [int(made_by == "PyTorch")] * 2
    if handle:
        del graph
        assert driver.cuStreamDestroy_v2(handle) == 0


def test_op_does_not_touch_other_streams(generator) -> None:
    """Work of ours on one stream ends while another stream, the default one, still sleeps."""
    a, b = _pair(64, 64, 64, generator)
    expected = a.double() @ b.double()
    torch.ops.cubin.matmul(a, b)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    torch.cuda._sleep(SLEEP)
    with torch.cuda.stream(stream):
        out = torch.ops.cubin.matmul(a, b)
        done = torch.cuda.Event()
        done.record(stream)
    done.synchronize()
    assert not torch.cuda.default_stream().query(), "the sleep ended first: nothing was shown"
    torch.cuda.synchronize()
    numerics.check_exact(out, expected)


def test_result_used_on_another_stream(generator) -> None:
    a, b = _pair(256, 256, 256, generator)
    expected = a.double() @ b.double()
    producer, consumer = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(20):
        with torch.cuda.stream(producer):
            torch.cuda._sleep(2_000_000)
            out = torch.ops.cubin.matmul(a, b)
        consumer.wait_stream(producer)
        out.record_stream(consumer)
        with torch.cuda.stream(consumer):
            copy = out.clone()
        del out
        with torch.cuda.stream(producer):
            # Must not get the block that the consumer still reads.
            torch.full((256, 256), torch.nan, dtype=torch.bfloat16, device="cuda")
        consumer.synchronize()
        numerics.check_exact(copy, expected)


@pytest.mark.parametrize("what", ["matmul", "attention"])
def test_work_of_a_green_context_stays_in_order(what: str, generator) -> None:
    """PyTorch makes a green context current, and its work goes to that one's default stream."""
    green_contexts = pytest.importorskip("torch.cuda.green_contexts")
    if not green_contexts.SUPPORTED:
        pytest.skip("a PyTorch without green contexts")

    def run(x: torch.Tensor) -> torch.Tensor:
        if what == "matmul":
            return torch.ops.cubin.matmul(x, x)
        heads = x.view(1, 512, 4, 128).transpose(1, 2)
        return torch.ops.cubin.scaled_dot_product_attention(heads, heads, heads)

    a = cases.draw((512, 512), torch.bfloat16, True, generator)
    expected = run(a).clone()
    late = torch.zeros_like(a)
    torch.cuda.synchronize()
    context = green_contexts.GreenContext.create(num_sms=16, device_id=0)
    context.set_context()
    try:
        torch.cuda._sleep(SLEEP)
        late.copy_(a)
        out = run(late)
        late.zero_()
        copy = out * 1
        torch.cuda.synchronize()
    finally:
        context.pop_context()
    assert torch.equal(copy, expected)


def test_workspace_of_split_k_is_not_shared_between_streams(generator) -> None:
    """Split-K calls on several streams at once, each with data of its own."""
    streams = [torch.cuda.Stream() for _ in range(4)]
    pairs = [_pair(16, 512, 8192, generator) for _ in streams]
    expected = [a.double() @ b.double() for a, b in pairs]
    torch.cuda.synchronize()
    results = []
    for _ in range(25):
        for stream, (a, b) in zip(streams, pairs, strict=True):
            with torch.cuda.stream(stream):
                results.append(torch.ops.cubin.matmul(a, b))
    torch.cuda.synchronize()
    for index, out in enumerate(results):
        numerics.check_exact(out, expected[index % 4])


def test_threads_with_streams_of_their_own(generator) -> None:
    pairs = [_pair(40 + i, 64, 96, generator) for i in range(8)]
    torch.cuda.synchronize()

    def work(index: int) -> None:
        a, b = pairs[index]
        expected = a.double() @ b.double()
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
            results = [torch.ops.cubin.matmul(a, b) for _ in range(50)]
            torch.cuda.current_stream().synchronize()
        for out in results:
            numerics.check_exact(out, expected)

    in_threads(work, [(i,) for i in range(8)])


def test_thread_without_a_current_context(generator) -> None:
    """The op is the first thing that touches CUDA in the thread, autograd workers included."""
    a, b = _pair(64, 64, 64, generator)
    expected = a.double() @ b.double()
    cases.poison(64 * 64, torch.bfloat16)  # a free block: the allocator need not call CUDA
    torch.cuda.synchronize()
    results: list[torch.Tensor] = []
    in_threads(lambda: results.append(torch.ops.cubin.matmul(a, b)), [()])
    numerics.check_exact(results[0], expected)


def test_data_parallel_threads(generator) -> None:
    """torch.nn.parallel.parallel_apply: a thread a replica, with device and stream contexts."""

    class Product(torch.nn.Module):
        def __init__(self, weight: torch.Tensor) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.cubin.linear(x, self.weight)

    devices = list(range(torch.cuda.device_count())) * 4
    modules, inputs, expected = [], [], []
    for device in devices:
        x, weight = (tensor.float().to(device) for tensor in _pair(32, 48, 64, generator))
        modules.append(Product(weight.t().contiguous()))
        inputs.append((x.requires_grad_(),))
        expected.append(x.detach().double() @ weight.double())
    outputs = torch.nn.parallel.parallel_apply(modules, inputs, devices=devices)
    for out, want in zip(outputs, expected, strict=True):
        numerics.check_exact(out.detach(), want)
    sum(out.sum().to(0) for out in outputs).backward()
    assert all(module.weight.grad is not None for module in modules)


@pytest.mark.fault_case(28)
@pytest.mark.child("first_use_threads")
def test_first_use_from_16_threads_at_once(child) -> None:
    answer = child.check()
    assert answer["errors"] == []
    assert answer["right"] == [True] * 16
