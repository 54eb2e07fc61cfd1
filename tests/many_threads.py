"""Products in 32 threads while install() comes and goes: none may fail or differ."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import torch
from torch import Tensor

import torch_cubin

THREADS = 32


def wrong_products(
    a: Tensor,
    b: Tensor,
    s: Tensor,
    times: int,
    around: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> list[object]:
    """Those of a @ b and s + a @ b that differ from PyTorch's, or raise, in threads that multiply
    inside of `around` while this one installs and removes `times` times."""
    expected = a @ b, torch.addmm(s, a, b)
    stop = threading.Event()
    wrong: list[object] = []
    rounds = [0] * THREADS

    def multiply(index: int) -> None:
        with around():
            while not stop.is_set():
                try:
                    result = torch.mm(a, b), torch.addmm(s, a, b)
                    if not all(map(torch.equal, result, expected)):
                        wrong.append(result)
                except Exception as error:
                    wrong.append(error)
                rounds[index] += 1

    threads = [threading.Thread(target=multiply, args=(index,)) for index in range(THREADS)]
    for thread in threads:
        thread.start()
    for _ in range(times):
        with torch_cubin.install(policy="all"):
            torch.mm(a, b)
    while min(rounds) == 0:
        stop.wait(0.01)
    stop.set()
    for thread in threads:
        thread.join()
    return wrong
