"""Attention: the same bits every time, on every stream, in every thread, eager or from a graph.

All under torch's default settings: no kernel asks for torch.use_deterministic_algorithms.
"""

from __future__ import annotations

import numerics
import pytest
import torch
from gpu import attention_cases as ac
from gpu import attention_reference as ar
from gpu import cases
from in_threads import in_threads

REPEATS = 1000
SLEEP = 200_000_000  # cycles: about 0.1 s

# batch, heads, heads of key, rows, columns, head_dim: split columns, packed rows, tiles, tails.
FORWARDS = [
    (1, 8, 2, 1, 8192, 128),
    (2, 32, 8, 1, 1000, 64),
    (2, 4, 4, 300, 300, 64),
    (1, 4, 4, 257, 1025, 256),
]
BACKWARDS = [(1, 4, 4, 300, 700, 64), (2, 4, 2, 257, 257, 128), (1, 2, 2, 130, 520, 256)]


def _args(shape, dtype: torch.dtype, g: torch.Generator) -> list[torch.Tensor]:
    batch, heads, kv_heads, rows, columns, head_dim = shape
    q = ac.draw((batch, heads, rows, head_dim), dtype, g)
    return [q, *(ac.draw((batch, kv_heads, columns, head_dim), dtype, g) for _ in range(2))]


class _Noise:
    """Other work on the GPU, which moves blocks in time and between multiprocessors."""

    def __init__(self) -> None:
        self.matrix = torch.randn(1024, 1024, device=ac.DEVICE, dtype=torch.bfloat16)
        self.stream = torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())

    def make(self, repeat: int) -> None:
        if repeat % 8 == 0:
            with torch.cuda.stream(self.stream):
                torch.mm(self.matrix, self.matrix)


def _changed(results, first) -> torch.Tensor:
    differences = [
        (numerics.bits(result) != numerics.bits(want)).any()
        for result, want in zip(results, first, strict=True)
    ]
    return torch.stack(differences).any()


@pytest.mark.parametrize("shape", FORWARDS, ids=str)
@pytest.mark.parametrize("name", ac.DTYPES)
def test_a_thousand_forwards_have_the_same_bits(name: str, shape) -> None:
    args = _args(shape, ac.DTYPES[name], ac.generator(f"{name} {shape}"))
    is_causal = shape[3] == shape[4]
    noise = _Noise()
    with torch.no_grad():
        call = torch.ops.cubin.attention_forward.default
        first = call(*args, None, 0.0, is_causal, enable_gqa=True)
        changed = torch.zeros((), dtype=torch.int64, device=ac.DEVICE)
        for repeat in range(REPEATS):
            noise.make(repeat)
            changed += _changed(call(*args, None, 0.0, is_causal, enable_gqa=True), first)
    assert int(changed) == 0, f"{int(changed)} of {REPEATS} repeats differ: {name} {shape}"


@pytest.mark.parametrize("shape", BACKWARDS, ids=str)
@pytest.mark.parametrize("name", ac.DTYPES)
def test_a_thousand_backwards_have_the_same_bits(name: str, shape) -> None:
    g = ac.generator(f"{name} {shape}")
    args = _args(shape, ac.DTYPES[name], g)
    grad = ac.gradient(args[0], g)
    is_causal = shape[3] == shape[4]
    noise = _Noise()
    with torch.no_grad():
        out, logsumexp = torch.ops.cubin.attention_forward(
            *args, None, 0.0, is_causal, enable_gqa=True
        )
        call = torch.ops.cubin.attention_backward.default
        rest = (grad, *args, out, logsumexp, None, 0.0, is_causal)
        first = call(*rest, enable_gqa=True)
        changed = torch.zeros((), dtype=torch.int64, device=ac.DEVICE)
        for repeat in range(REPEATS):
            noise.make(repeat)
            changed += _changed(call(*rest, enable_gqa=True), first)
    assert int(changed) == 0, f"{int(changed)} of {REPEATS} repeats differ: {name} {shape}"


@pytest.mark.parametrize("name", ac.DTYPES)
def test_packed_and_masked_backwards_have_the_same_bits(name: str) -> None:
    g = ac.generator(name)
    dtype = ac.DTYPES[name]
    seed = torch.tensor([99], device=ac.DEVICE)
    calls = []
    q, k, v = (ac.draw((2, 4, 200, 64), dtype, g) for _ in range(3))
    mask = ac.draw((2, 1, 200, 200), dtype, g)
    calls.append(((q, k, v), {"attn_mask": mask, "dropout_p": 0.2, "dropout_seed": seed}))
    if name in ac.FUSED:
        offsets = torch.tensor([0, 70, 71, 200], dtype=torch.int32, device=ac.DEVICE)
        packed = [ac.draw((200, 4, 64), dtype, g) for _ in range(3)]
        calls.append((packed, {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}))
    for args, options in calls:
        grad = ac.gradient(args[0], g)
        with torch.no_grad():
            out, logsumexp = torch.ops.cubin.attention_forward(*args, **options)
            rest = (grad, *args, out, logsumexp)
            first = torch.ops.cubin.attention_backward(*rest, **options)
            changed = torch.zeros((), dtype=torch.int64, device=ac.DEVICE)
            for _ in range(200):
                changed += _changed(torch.ops.cubin.attention_backward(*rest, **options), first)
        assert int(changed) == 0, f"{int(changed)} of 200 repeats differ: {name} {list(options)}"


@pytest.mark.parametrize("name", ac.DTYPES)
def test_bits_do_not_depend_on_the_address_the_stream_or_the_grad_mode(name: str) -> None:
    for shape in FORWARDS:
        args = _args(shape, ac.DTYPES[name], ac.generator(f"{name} {shape}"))
        first = ar.cubin(*args, enable_gqa=True)[0]
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            again = ar.cubin(*(x.clone() for x in args), enable_gqa=True)[0]
        torch.cuda.synchronize()
        numerics.check_bits(again, first, f"{name} {shape}")
        leaves = [x.detach().requires_grad_() for x in args]
        with torch.enable_grad():
            again = torch.ops.cubin.scaled_dot_product_attention(*leaves, enable_gqa=True)
        numerics.check_bits(again.detach(), first, f"{name} {shape} with gradients")


@pytest.mark.parametrize("shape", FORWARDS, ids=str)
def test_op_is_ordered_on_the_current_stream_and_asynchronous(shape) -> None:
    """The inputs are written by the stream only after a long sleep; both directions."""
    g = ac.generator("late")
    args = _args(shape, torch.bfloat16, g)
    grad = ac.gradient(args[0], g)
    want = ar.cubin(*args, grad, enable_gqa=True)
    late = [torch.zeros_like(x) for x in args]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        torch.cuda._sleep(SLEEP)
        for target, source in zip(late, args, strict=True):
            target.copy_(source)
        out, logsumexp = torch.ops.cubin.attention_forward(*late, enable_gqa=True)
        grads = torch.ops.cubin.attention_backward(grad, *late, out, logsumexp, enable_gqa=True)
        busy = not stream.query()
    assert busy, "a call waited for the GPU"
    stream.synchronize()
    numerics.check_bits(out, want[0])
    for mine, theirs in zip(grads, want[1:], strict=True):
        numerics.check_bits(mine, theirs)


def test_op_does_not_touch_other_streams() -> None:
    """Work of ours on one stream ends while another stream, the default one, still sleeps."""
    args = _args(FORWARDS[0], torch.bfloat16, ac.generator("other"))
    want = ar.cubin(*args, enable_gqa=True)[0]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    for _ in range(5):  # other processes may hold this one up for longer than the sleep
        torch.cuda._sleep(SLEEP)
        with torch.cuda.stream(stream):
            out = ar.cubin(*args, enable_gqa=True)[0]
            done = torch.cuda.Event()
            done.record(stream)
        done.synchronize()
        sleeps = not torch.cuda.default_stream().query()
        torch.cuda.synchronize()
        numerics.check_bits(out, want)
        if sleeps:
            break
    assert sleeps, "the sleep ended first each time"


def test_workspaces_are_not_shared_between_streams() -> None:
    """Split columns, and sums of dq, on several streams at once, each with data of its own."""
    streams = [torch.cuda.Stream() for _ in range(4)]
    sets = [_args(FORWARDS[0], torch.bfloat16, ac.generator(i)) for i in range(4)]
    want = [ar.cubin(*args, enable_gqa=True)[0] for args in sets]
    torch.cuda.synchronize()
    results = []
    for _ in range(25):
        for stream, args in zip(streams, sets, strict=True):
            with torch.cuda.stream(stream):
                results.append(ar.cubin(*args, enable_gqa=True)[0])
    torch.cuda.synchronize()
    for index, out in enumerate(results):
        numerics.check_bits(out, want[index % 4])


def test_threads_with_streams_of_their_own() -> None:
    """Both directions, in eight threads."""
    sets, grads, want = [], [], []
    for index in range(8):
        g = ac.generator(index)
        sets.append(_args((1, 2, 2, 60 + index, 90, 64), torch.bfloat16, g))
        grads.append(ac.gradient(sets[-1][0], g))
        want.append(ar.cubin(*sets[-1], grads[-1]))
    torch.cuda.synchronize()

    def work(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            results = [ar.cubin(*sets[index], grads[index]) for _ in range(20)]
            torch.cuda.current_stream().synchronize()
        for result in results:
            for mine, theirs in zip(result, want[index], strict=True):
                numerics.check_bits(mine, theirs)

    in_threads(work, [(i,) for i in range(8)])


@pytest.mark.parametrize("name", ac.DTYPES)
def test_replay_gives_the_bits_of_an_eager_call(name: str) -> None:
    dtype = ac.DTYPES[name]
    g = ac.generator(name)
    shapes = [*FORWARDS[1:3], BACKWARDS[0], (2, 3, 3, 65, 33, 40), (2, 3, 3, 33, 65, 320)]
    sets = [_args(shape, dtype, g) for shape in shapes]
    grads = [ac.gradient(args[0], g) for args in sets]

    def step(args, grad) -> list[torch.Tensor]:
        with torch.no_grad():
            out, logsumexp = torch.ops.cubin.attention_forward(*args, enable_gqa=True)
            return [
                out,
                logsumexp,
                *torch.ops.cubin.attention_backward(grad, *args, out, logsumexp, enable_gqa=True),
            ]

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [step(args, grad) for args, grad in zip(sets, grads, strict=True)]
    for _ in range(3):
        for args in sets:
            for tensor in args:
                tensor.normal_(generator=g)
        for outputs in results:
            for tensor in outputs:
                tensor.fill_(torch.nan)
        graph.replay()
        for shape, outputs, args, grad in zip(shapes, results, sets, grads, strict=True):
            for mine, eager in zip(outputs, step(args, grad), strict=True):
                numerics.check_bits(mine, eager, f"{name} {shape}")


def test_capture_of_a_module_in_both_directions() -> None:
    """torch.cuda.make_graphed_callables."""

    class Attention(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return torch.ops.cubin.scaled_dot_product_attention(q, k, v, is_causal=True)

    g = ac.generator("module")
    shape = (2, 4, 4, 100, 100, 64)
    sample = tuple(x.detach().requires_grad_() for x in _args(shape, torch.bfloat16, g))
    graphed = torch.cuda.make_graphed_callables(Attention(), sample)
    judges = ar.Judges(torch.bfloat16)
    for index in range(3):
        args = _args(shape, torch.bfloat16, g)
        grad = ac.gradient(args[0], g)
        leaves = [x.detach().requires_grad_() for x in args]
        out = graphed(*leaves)
        # Replays write where the last ones did.
        ours = [x.clone() for x in (out.detach(), *torch.autograd.grad(out, leaves, grad))]
        own = ar.pytorch(*args, grad, is_causal=True)
        judges.add(f"replay {index}", ours, own, ar.reference(*args, grad, is_causal=True))
    judges.finish()


def test_an_error_inside_a_capture_does_not_break_it() -> None:
    args = _args((1, 2, 2, 64, 64, 64), torch.bfloat16, ac.generator("error"))
    want = ar.cubin(*args)[0]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match=r"\[input\]"):
            ar.cubin(args[0], args[1][..., :32], args[2])
        out = ar.cubin(*args)[0]
    graph.replay()
    numerics.check_bits(out, want)


def test_graph_memory_is_the_pools() -> None:
    """Outputs and workspaces of a capture come from the graph's pool, and go with it."""
    g = ac.generator("memory")
    args = _args(FORWARDS[0], torch.bfloat16, g)
    want = ar.cubin(*args, enable_gqa=True)[0]
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ar.cubin(*args, enable_gqa=True)[0]
    assert torch.cuda.memory_reserved() > before
    others = [torch.full((1 << 20,), torch.nan, device=ac.DEVICE) for _ in range(16)]
    graph.replay()
    numerics.check_bits(out, want)
    assert all(bool(other.isnan().all()) for other in others)
    del others, out, graph
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before


def test_result_used_on_another_stream() -> None:
    g = ac.generator("consumer")
    args = _args((2, 4, 4, 128, 128, 64), torch.bfloat16, g)
    want = ar.cubin(*args)[0]
    producer, consumer = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(10):
        with torch.cuda.stream(producer):
            torch.cuda._sleep(2_000_000)
            out = ar.cubin(*args)[0]
        consumer.wait_stream(producer)
        out.record_stream(consumer)
        with torch.cuda.stream(consumer):
            copy = out.clone()
        del out
        with torch.cuda.stream(producer):
            # Must not get the block that the consumer still reads.
            cases.poison(want.numel(), torch.bfloat16, ac.DEVICE)
        consumer.synchronize()
        numerics.check_bits(copy, want)


@pytest.mark.child("attention_capture_first_call", "global")
def test_first_call_inside_a_global_capture(child) -> None:
    assert child.check()["right"]
    assert all(child.answer["right"])


@pytest.mark.child("attention_capture_first_call", "thread_local")
def test_first_call_inside_a_thread_local_capture(child) -> None:
    assert child.check()["right"]
    assert all(child.answer["right"])


@pytest.mark.child("attention_capture_first_call", "relaxed")
def test_first_call_inside_a_relaxed_capture(child) -> None:
    assert child.check()["right"]
    assert all(child.answer["right"])
