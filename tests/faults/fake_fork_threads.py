"""A fork while other threads launch and load: the child gets [fork], and does not wait for a lock
that one of those threads held."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
from contracts import SEVERAL

import torch_cubin

FORKS = 20
PATIENCE = 20.0  # seconds; a child needs some milliseconds


def ends_of_children(work) -> list[str]:
    """What each of FORKS children said of `work()`; "hung" for one that did not end."""
    said = []
    for _ in range(FORKS):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                work()
                text = "no error"
            except BaseException as error:  # the child must always end here
                text = str(error)
            os.write(write, text.encode()[:4000])
            os._exit(0)
        os.close(write)
        end = time.monotonic() + PATIENCE
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                break
            time.sleep(0.001)
        said.append(os.read(read, 4000).decode() or "hung")
        os.close(read)
    return said


@pytest.mark.fault_case(29)
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.parametrize("what", ["launch", "load", "kernel"])
def test_a_fork_while_threads_launch_and_load(driver, several, what) -> None:
    x = torch.zeros(64)
    stop = threading.Event()
    latest = [several]
    several["vec_add"](x, x, x, 64, grid=1, block=64)

    def launch() -> None:
        while not stop.is_set():
            several["vec_add"](x, x, x, 64, grid=1, block=64)

    def load() -> None:
        while not stop.is_set():
            module = torch_cubin.load(SEVERAL)
            latest[0] = module
            module["vec_add"](x, x, x, 64, grid=1, block=64)

    def work() -> None:
        if what == "launch":
            several["vec_add"](x, x, x, 64, grid=1, block=64)
        elif what == "load":
            module = torch_cubin.load(SEVERAL)
            module["vec_add"](x, x, x, 64, grid=1, block=64)
        else:
            latest[0]["vec_add"](x, x, x, 64, grid=1, block=64)

    threads = [threading.Thread(target=each) for each in (launch, launch, load, load)]
    for thread in threads:
        thread.start()
    try:
        said = ends_of_children(work)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    wrong = [text for text in said if not text.startswith("torch_cubin [fork]: ")]
    assert not wrong, (len(wrong), wrong[:3])
