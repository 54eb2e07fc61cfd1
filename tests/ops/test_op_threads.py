"""Many threads at once, each in its own grad mode, with its own results and its own errors."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch
from in_threads import in_threads
from ops.samples import assert_near, linear, make_all, matmul, reference_linear

import torch_cubin
from torch_cubin._drop_in import install, report

THREADS = 16


def test_sixteen_threads(device):
    barrier = threading.Barrier(THREADS)

    def work(index: int) -> None:
        shapes = ((2, index + 1), (4, index + 1), (4,))
        args = make_all(shapes, device, requires_grad=True)
        wrong = make_all(((2, index + 1), (index + 2, 3)), device)
        expected = torch.autograd.grad(reference_linear(*args).sum(), args)
        barrier.wait()
        for _ in range(50):
            assert_near(torch.autograd.grad(linear(*args).sum(), args), expected)
            with torch.set_grad_enabled(bool(index % 2)):
                assert matmul(args[0], args[1].t()).requires_grad == bool(index % 2)
                with pytest.raises(RuntimeError) as caught:
                    matmul(*wrong)
                assert f"(2, {index + 1}) and ({index + 2}, 3)" in str(caught.value)

    in_threads(work, [(i,) for i in range(THREADS)])


def test_backward_threads_and_data_parallel_style_replicas(device):
    """One weight, many threads that run forward and backward of their own part of the batch."""
    x, w = make_all(((THREADS * 2, 3), (4, 3)), device)
    w.requires_grad_()
    results: list = [None] * THREADS

    def work(index: int) -> None:
        part = linear(x[2 * index : 2 * index + 2], w)
        (results[index],) = torch.autograd.grad(part.sum(), w)

    in_threads(work, [(i,) for i in range(THREADS)])
    (expected,) = torch.autograd.grad(reference_linear(x, w).sum(), w)
    assert_near(torch.stack(results).sum(0), expected)


def test_a_forked_child_waits_for_no_lock_of_another_thread() -> None:
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with report._lock, install._lock:
            held.set()
            done.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # ends a child that waits
        try:
            torch_cubin.report()
            torch_cubin.install().remove()
            os._exit(0)
        finally:
            os._exit(1)
    done.set()
    holder.join()
    assert os.waitpid(child, 0)[1] == 0
