"""Thousands of calls beside other work: whether each gives the bits of the first."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numerics
import torch
from torch import Tensor

CALLS, REPLAYS = 20, 500  # of a graph that is captured once: the host would take longest


def _is_different(results: Sequence[Tensor], first: Sequence[Tensor]) -> Tensor:
    each = [
        (numerics.bits(result) != numerics.bits(want)).any()
        for result, want in zip(results, first, strict=True)
    ]
    return each[0] if len(each) == 1 else torch.stack(each).any()


def count_different(
    call: Callable[[], Sequence[Tensor]], first: Sequence[Tensor], replays: int = REPLAYS
) -> int:
    """How many of 10,000 results of `call` differ from `first`. It may be captured in a graph.
    `replays`: 500; each has 20 calls.

    Another stream multiplies matrices meanwhile, which moves blocks in time and between
    multiprocessors. What a call wrote is overwritten before the next, which may get its memory.
    """
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            results = call()
            different += _is_different(results, first)
            for result in results:
                result.fill_(torch.nan)
    matrix = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    products = [matrix[:rows] for rows in (128, 512, 1024, 2048)]
    side, r = torch.cuda.Stream(), random.Random(0)
    for _ in range(replays):
        side.wait_stream(torch.cuda.current_stream())  # or they would all be done by the first one
        with torch.cuda.stream(side):
            for _ in range(r.randrange(1, 8)):
                torch.mm(r.choice(products), matrix)
        graph.replay()
    return int(different)
