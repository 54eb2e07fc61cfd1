"""Scenarios that lose a context, hide the GPU or end the process: `fault_child.py NAME ARGUMENT`.

As child.py's: each returns a JSON object, printed as the last line of output.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

FAULTS = Path(__file__).resolve().parents[1] / "data" / "faults" / "faults.sm_90a.cuda130.cubin"
TABLE = FAULTS.with_name("large_table.sm_90a.cuda130.cubin")


def error_of(call: Callable[[], object]) -> list[str]:
    try:
        call()
    except Exception as error:  # which one is the question
        return [type(error).__name__, str(error)]
    return []


def fault_kernel(name: str) -> dict:
    """A kernel faults; what do later launches of another kernel say?"""
    import torch_cubin

    module = torch_cubin.load(FAULTS)
    out = torch.zeros(32, dtype=torch.int32, device="cuda")

    def use() -> None:
        module["set"](out, 1, grid=1, block=32)

    use()
    torch.cuda.synchronize()
    module[name](out, grid=1, block=1)
    pytorchs = error_of(torch.cuda.synchronize)
    op = error_of(lambda: torch.ops.cubin.matmul(out.float().view(1, 32), out.float().view(32, 1)))
    return {"pytorchs": pytorchs, "later": [error_of(use), error_of(use)], "op": op}


def fault_no_device() -> dict:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # read when the driver is initialised
    import torch_cubin

    module = torch_cubin.load(FAULTS)
    return {"error": error_of(lambda: torch_cubin.preload(module, "cuda:0"))}


def fault_reset() -> dict:
    """Another library resets the device's context."""
    import torch_cubin

    module = torch_cubin.load(FAULTS)
    out = torch.zeros(32, dtype=torch.int32, device="cuda")

    def use() -> None:
        module["set"](out, 1, grid=1, block=32, stream=0)

    use()
    torch.cuda.synchronize()
    assert ctypes.CDLL("libcuda.so.1").cuDevicePrimaryCtxReset_v2(0) == 0
    return {"errors": [error_of(use), error_of(use)]}


def fault_memory(kind: str) -> dict:
    """All of the GPU's memory is PyTorch's: in its cache ("cached"), or in tensors ("used")."""
    import torch_cubin

    module = torch_cubin.load(TABLE)
    out = torch.zeros(32, dtype=torch.int32, device="cuda")
    module_of_little = torch_cubin.load(FAULTS)
    module_of_little["set"](out, 1, grid=1, block=32)  # the driver's own first allocations
    held = []
    for size in (1 << 30, 1 << 27, 1 << 24, 1 << 21):
        while True:
            try:
                held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                break
    torch.cuda.synchronize()
    if kind == "cached":
        held.clear()
    reserved = torch.cuda.memory_reserved()

    def use() -> None:
        module["use_table"](out, grid=1, block=32)

    first = error_of(use)
    held.clear()
    if kind == "used":
        torch.cuda.empty_cache()
    use()
    return {"first": first, "reserved": reserved, "value": out.tolist()}


def fault_capture(mode: str) -> dict:
    """One thread captures, another uses a kernel for the first time."""
    import torch_cubin

    x = torch.zeros(32, dtype=torch.int32, device="cuda")
    y = torch.zeros(32, dtype=torch.int32, device="cuda")
    captured = torch_cubin.load(FAULTS)
    captured["set"](x, 1, grid=1, block=32)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    begun, used = threading.Event(), threading.Event()
    errors: list[str] = []

    def capture() -> None:
        stream = torch.cuda.Stream()
        try:
            with torch.cuda.graph(graph, stream=stream, capture_error_mode=mode):
                captured["set"](x, 2, grid=1, block=32)
                begun.set()
                used.wait(60)
                captured["set"](x[:16], 3, grid=1, block=16)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
            begun.set()

    thread = threading.Thread(target=capture)
    thread.start()
    begun.wait(60)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        module = torch_cubin.load(FAULTS)
        first = error_of(lambda: module["set"](y, 4, grid=1, block=32))
    used.set()
    thread.join()
    side.synchronize()  # the second launch writes the same memory from another stream
    second = error_of(lambda: module["set"](y, 5, grid=1, block=32))
    if not errors:
        graph.replay()
    torch.cuda.synchronize()
    return {
        "capture": errors,
        "first": first,
        "second": second,
        "x": x.tolist(),
        "y": y.tolist(),
    }


def fault_exit(kind: str) -> dict:
    """The process ends with modules loaded, and in the middle of things."""
    import torch_cubin

    module = torch_cubin.load(FAULTS)
    out = torch.zeros(32, dtype=torch.int32, device="cuda")
    module["set"](out, 1, grid=1, block=32)
    torch.ops.cubin.matmul(torch.ones(64, 64, device="cuda"), torch.ones(64, 64, device="cuda"))
    torch.cuda.synchronize()
    globals()["kept"] = [module, module["set"], out]

    def launch_for_ever() -> None:
        while True:
            module["set"](out, 1, grid=1, block=32)

    # Python 3.12 warns of a fork beside threads, which PyTorch has.
    warnings.simplefilter("ignore", DeprecationWarning)
    if kind == "thread":
        threading.Thread(target=launch_for_ever, daemon=True).start()
    elif kind == "fork" and os.fork() == 0:
        os._exit(0)
    elif kind == "fork and exit" and os.fork() == 0:
        sys.exit(0)
    elif kind == "exception":
        import atexit

        atexit.register(lambda: os.write(1, json.dumps({"ended": kind}).encode() + b"\n"))
        raise SystemExit(3)
    return {"ended": kind}


def fault_fork_threads() -> dict:
    """Forks while other threads launch; what the children's first launch says."""
    import torch_cubin

    module = torch_cubin.load(FAULTS)
    out = torch.zeros(32, dtype=torch.int32, device="cuda")
    kernel = module["set"]
    kernel(out, 1, grid=1, block=32)
    stop = threading.Event()

    def launch(stream: torch.cuda.Stream) -> None:
        while not stop.is_set():
            kernel(out, 1, grid=1, block=32, stream=stream)

    streams = [torch.cuda.Stream() for _ in range(4)]
    threads = [threading.Thread(target=launch, args=(stream,)) for stream in streams]
    for thread in threads:
        thread.start()
    warnings.simplefilter("ignore", DeprecationWarning)
    said = []
    for _ in range(20):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            error = error_of(lambda: kernel(out, 2, grid=1, block=32, stream=streams[0]))
            os.write(write, json.dumps(error).encode()[:4000])
            os._exit(0)
        os.close(write)
        end = time.monotonic() + 20
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > end:
                os.kill(pid, 9)
                os.waitpid(pid, 0)
                break
            time.sleep(0.001)
        said.append(os.read(read, 4000).decode() or "hung")
        os.close(read)
    stop.set()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()  # what the threads launched on their streams comes before the next one
    kernel(out, 3, grid=1, block=32)
    torch.cuda.synchronize()
    return {"said": said, "after": out.tolist()}


if __name__ == "__main__":
    from gpu import answers, fresh_memory

    fresh_memory.fill_if_wanted()
    scenario = globals()[sys.argv[1]]
    answers.give(scenario(*sys.argv[2:]))
