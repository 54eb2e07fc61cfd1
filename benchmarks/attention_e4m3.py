"""Attention of float8_e4m3fn for bench_attention_goals.py: its gradients beside ours of bfloat16,
and one query of each sequence beside a copy's rate, or where launches decide the best peer.

PyTorch has no attention of float8 caches, so the peers are cuDNN and flash on the same values in
bfloat16, and cuDNN's own attention of float8 where nvidia-cudnn-frontend is installed
(bench_attention_fp8.py): its query is float8 too, and a head of keys' four heads of queries are
rows of one head.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import bench_attention
import bench_attention_fp8
import common
import numerics
import torch
from attention_shapes import Timed

GROUPS = ("e4m3 backward", "e4m3 decode, of a copy", "e4m3 decode, one sequence")
LENGTHS = (512, 2048, 4096, 8192, 16384)
COPIED = ((1, 32768), (1, 131072), (16, 8192), (64, 4096))  # batch, keys: from 64 MB on
LAUNCHED = ((1, 4096), (1, 8192), (1, 16384))
CALLS = 48  # in a graph


def backward(budget_ms: float) -> Iterator[Timed]:
    """The time of attention_backward of bfloat16 over that of attention_backward_e4m3."""
    for head_dim, length, causal in itertools.product((64, 128), LENGTHS, (False, True)):
        row = bench_attention.measure_backward_e4m3(head_dim, length, causal, budget_ms)
        case = f"d{head_dim} s{length}{' causal' if causal else ''}"
        yield Timed("e4m3 backward", case, row.ratio, row.cubin_us, row.cubin_rate)


def copied(budget_ms: float) -> Iterator[Timed]:
    """The rate at which caches are read over a copy's."""
    copies = bench_attention.copy_rate()
    for batch, length in COPIED:
        row = bench_attention.measure_cache("e4m3", batch, length, 0, copies, budget_ms)
        yield Timed("e4m3 decode, of a copy", row.case, row.copy or 0, row.cubin_us, row.cubin_rate)


Calls = dict[str, Callable[[int], torch.Tensor]]


def cudnn_call(operands: list[torch.Tensor]) -> Callable[[], torch.Tensor] | None:
    """cuDNN's attention of float8; None without its Python API, and if it refuses the shape."""
    try:
        cudnn = bench_attention_fp8.load_cudnn()
    except ImportError:
        return None
    try:
        call = bench_attention_fp8.cudnn_call(cudnn, operands, False)
        call()
        torch.cuda.synchronize()
    except Exception as error:
        print(f"cuDNN's float8: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
        return None
    return call


def contenders(batch: int, length: int) -> tuple[Calls, int]:
    """Calls on set number i, and how many sets rotate."""
    sets = bench_attention.cache_sets(batch, length, 0, torch.float8_e4m3fn)
    calls: Calls = {"cubin": lambda i: bench_attention.cached(*sets[i])}
    peers = []
    for q, k, v, *_ in sets:
        wide = (x.bfloat16().transpose(1, 2).contiguous() for x in (k, v))
        peers.append(bench_attention.peers_of_cache(q, *wide))
    for name in peers[0]:
        calls[name] = lambda i, name=name: peers[i][name]()
    narrow = []
    for q, k, v, _, _ in sets:
        rows = q.to(torch.float8_e4m3fn).reshape(batch, k.shape[2], -1, q.shape[-1])
        call = cudnn_call([rows, *(x.transpose(1, 2) for x in (k, v))])
        if call is None:
            break
        narrow.append(call)
    else:
        calls["cuDNN's float8"] = lambda i: narrow[i]().view(batch, 1, -1, sets[0][0].shape[-1])
    return calls, len(sets)


def launched(budget_ms: float) -> Iterator[Timed]:
    """The time of the best peer over ours."""
    for batch, length in LAUNCHED:
        calls, sets = contenders(batch, length)
        order = list(range(sets)) * math.ceil(CALLS / sets)
        graphs, results = {}, {}
        for name, call in calls.items():
            try:
                graphs[name], results[name] = common.graph_of(
                    [lambda i=i, call=call: call(i) for i in order]
                )
            except RuntimeError:  # this peer refuses the case
                torch.cuda.synchronize()
            else:
                graphs[name].replay()
        torch.cuda.synchronize()
        own = results["cubin"].double()
        for name, other in results.items():
            # Results of float8 have 4 significant bits, as the query of that peer has.
            limit = 1e-1 if other.element_size() == 1 else 2e-2
            error = ((own - other.double()).norm() / own.norm()).item()
            if numerics.exceeds(error, limit):
                raise AssertionError(f"e4m3 b{batch} s{length}: differs from {name} by {error:.2g}")
        runs = {name: graph.replay for name, graph in graphs.items()}
        times = common.interleaved(runs, budget_ms / 12, settle_ms=1)
        peer = min((name for name in times if name != "cubin"), key=times.__getitem__)
        us = times["cubin"] / len(order)
        rate = 2 * batch * length * 8 * 128 / us / 1e3
        case = f"b{batch} s{length}, to {peer}"
        yield Timed("e4m3 decode, one sequence", case, times[peer] / times["cubin"], us, rate)
        torch.cuda.empty_cache()


def lines(budget_ms: float) -> Iterator[Timed]:
    yield from launched(budget_ms)
    yield from copied(budget_ms)
    yield from backward(budget_ms)
