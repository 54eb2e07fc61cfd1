# Measures a GPU that known_speed.json does not name, and keeps the result on disk. C++ asks for it
# at the GPU's first call under the policy "fastest" (csrc/ops/common/serving.cpp).
"""Which kinds of calls our kernels run at least as fast as PyTorch's, measured on this GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import math
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from torch_cubin import errors
from torch_cubin._compile import cache
from torch_cubin._native import library
from torch_cubin._native.files import write_file
from torch_cubin._pytorch import process_group

VERSION = 1
SECONDS = 2.0  # PyTorch computes the kinds that are not measured by then
_WAIT_SECONDS = 10.0  # for another process that measures
_PYTORCHS, _OURS = 1, 2  # Measuring in csrc/ops/common/serving.h
_WARM_UP_MS, _ROUNDS, _BLOCK_MS = 100.0, 3, 1.5

# Batch, M, N and K; of attention batch, heads, rows and head_dim.
_SHAPES = {
    "product": ((1, 16, 4096, 4096), (1, 256, 1024, 1024), (1, 2048, 2048, 2048)),
    "batched": ((32, 256, 256, 64), (8, 512, 512, 512)),
    "vector": ((1, 4096, 1, 4096),),
    "attention": ((4, 16, 512, 64), (2, 16, 2048, 128)),
}
_HALVES = (torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True)
class Line:
    kind: str  # as in known_speed.json
    dtype: str
    speed: float  # PyTorch's time over ours: the geometric mean over the calls


def speed_type(dtype: torch.dtype) -> str:
    """The name in known_speed.json: float32 has two, by PyTorch's setting."""
    if dtype is torch.float32 and torch.backends.cuda.matmul.allow_tf32:
        return "tf32"
    return str(dtype).removeprefix("torch.")


def rows(lines: list[Line]) -> list[dict[str, list[str]]]:
    """The rows of known_speed.json for the kinds that are at least as fast."""
    return [{"kinds": [x.kind], "dtypes": [x.dtype]} for x in lines if x.speed >= 1]


# --- measuring ---


def _calls(
    kind: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Iterator[Callable[[], object]]:
    # A generator of its own: the program's random numbers stay the same.
    generator = torch.Generator(device).manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    if kind == "attention":
        yield from _attentions(*(random(*shape) for _ in range(4)))
        return
    batch, m, n, k = shape
    if kind == "batched":
        a, b = random(batch, m, k), random(batch, k, n)
        yield lambda: torch.bmm(a, b)
    elif kind == "vector":
        a, vector = random(m, k), random(k)
        yield lambda: torch.mv(a, vector)
    else:
        a, weight = random(m, k), random(n, k)
        yield lambda: torch.mm(a, weight.t())


def _attentions(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gradient: torch.Tensor
) -> Iterator[Callable[[], object]]:
    """The ops themselves, because autograd's thread may be the one that waits for this."""
    forward = torch.ops.aten._scaled_dot_product_flash_attention.default
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    yield lambda: forward(q, k, v, 0.0, True)
    out, logsumexp, cum_q, cum_k, max_q, max_k, seed, offset, _ = forward(q, k, v, 0.0, True)
    saved = (out, logsumexp, cum_q, cum_k, max_q, max_k, 0.0, True, seed, offset)
    yield lambda: backward(gradient, q, k, v, *saved)


def _milliseconds(call: Callable[[], object], count: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count


def _speed(call: Callable[[], object]) -> float:
    """PyTorch's time over ours, alternating: the median of the rounds."""
    once = 0.0
    for state in (_PYTORCHS, _OURS):
        library.set_measuring(state)
        _milliseconds(call, 1)  # loads the kernels
        once = max(once, _milliseconds(call, 1))
    count = max(1, min(50, round(_BLOCK_MS / max(once, 1e-3))))
    ratios = []
    for i in range(_ROUNDS):
        times = {}
        for state in (_PYTORCHS, _OURS) if i % 2 else (_OURS, _PYTORCHS):
            library.set_measuring(state)
            times[state] = _milliseconds(call, count)
        ratios.append(times[_PYTORCHS] / times[_OURS])
    return statistics.median(ratios)


def _lines(device: torch.device) -> Iterator[Line]:
    """Measures kind by kind, until the time is over."""
    end = time.monotonic() + SECONDS
    (product,) = _calls("product", _SHAPES["product"][-1], torch.float16, device)
    library.set_measuring(_PYTORCHS)
    _milliseconds(product, 1)
    warm = time.monotonic() + _WARM_UP_MS / 1e3
    while time.monotonic() < warm:  # an idle GPU has low clocks
        _milliseconds(product, 5)
    for dtype in (*_HALVES, torch.float32, torch.float64):
        for kind, shapes in _SHAPES.items():
            if kind == "attention" and dtype not in _HALVES:
                continue
            # float64 takes 64 times as long on most GPUs.
            few = shapes[:1] if dtype is torch.float64 else shapes
            speeds = []
            for call in (call for shape in few for call in _calls(kind, shape, dtype, device)):
                if time.monotonic() > end:
                    return
                speeds.append(_speed(call))
            mean = math.exp(sum(map(math.log, speeds)) / len(speeds))
            yield Line(kind, speed_type(dtype), mean)


def _measure(index: int) -> list[Line]:
    """Runs in a thread of its own, which has none of the caller's modes, autocast or streams."""
    found: list[Any] = []

    def run() -> None:
        try:
            device = torch.device("cuda", index)
            with (
                torch.cuda.device(device),
                torch.cuda.stream(torch.cuda.Stream(device)),
                torch.no_grad(),
            ):
                found.extend(_lines(device))
        except Exception as error:
            found[:] = [error]
        finally:
            library.set_measuring(0)

    thread = threading.Thread(target=run, name="torch_cubin.calibrate")
    thread.start()
    thread.join()
    if found and isinstance(found[0], Exception):
        raise found[0]
    return found


# --- keeping ---


def _facts(index: int) -> dict[str, Any]:
    """Whatever a measurement depends on."""
    gpu = library.device(index)
    return {
        "version": VERSION,
        "gpu": gpu["name"],
        "driver": gpu["driver"],
        "torch": torch.__version__,
        "kernels": cache.key(library.catalog()),
        "float32": speed_type(torch.float32),
    }


def _read(path: Path, facts: dict[str, Any]) -> list[Line] | None:
    """The kept lines; None if there are none, or for other facts, or damaged."""
    try:
        content = json.loads(path.read_bytes())
        lines = [Line(str(x["kind"]), str(x["dtype"]), float(x["speed"])) for x in content["lines"]]
        return lines if content["facts"] == facts else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process measures at a time: two would disturb each other."""
    with path.with_suffix(".lock").open("w") as lock:
        end = time.monotonic() + _WAIT_SECONDS
        while time.monotonic() < end:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
        yield


def lines_of(index: int, again: bool = False) -> list[Line]:
    """The kept lines of a GPU, else measured ones, which are kept where there is a folder."""
    facts = _facts(index)
    folder = cache.folder()
    if folder is None:
        return _measure(index)
    path = folder / "calibration" / f"{cache.key(facts)}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            kept = None if again else _read(path, facts)
            if kept is not None:
                return kept
            lines = _measure(index)
            content = {"facts": facts, "lines": [dataclasses.asdict(line) for line in lines]}
            write_file(path, json.dumps(content, indent=1).encode())
            return lines
    except OSError:  # an unwritable folder: this process measures for itself
        return _measure(index)


def _shared(index: int) -> list[dict[str, list[str]]]:
    """The rows of this GPU; in a process group those of rank 0, whose GPU must be alike."""
    rank = process_group.rank()
    if rank is None:
        return rows(lines_of(index))
    key = f"torch_cubin/calibration/{cache.key(_facts(index))}"
    if rank == 0:
        found = rows(lines_of(index))
        process_group.publish(key, json.dumps(found))
        return found
    text = process_group.published(key, _WAIT_SECONDS)
    if text is None:
        raise errors.fault(
            "internal", f"GPU {index} of rank {rank}", "cannot be calibrated",
            expected=f"the table of rank 0 within {_WAIT_SECONDS:.0f} s", got="none",
            advice="Run a product on rank 0 too, or `python -m torch_cubin calibrate` before.",
        )  # fmt: skip
    return json.loads(text)


# --- the library's question ---

_rows: dict[int, list[dict[str, list[str]]]] = {}  # by GPU, of this process


def known_rows(index: int) -> list[dict[str, list[str]]]:
    """What was measured so far; measures nothing."""
    return _rows.get(index, [])


def calibrate(index: int) -> int:
    """Answers the library: 0 to be asked again at a later call. A failure leaves the GPU to
    PyTorch, with a warning."""
    try:
        with torch.cuda.device(index):
            if torch.cuda.is_current_stream_capturing():
                return 0
        _rows[index] = _shared(index)
        library.set_calibrated_speed(index, json.dumps({"rows": _rows[index]}))
    except Exception as error:
        with contextlib.suppress(Warning):  # where warnings are errors
            warnings.warn(
                f"torch_cubin: GPU {index} could not be calibrated, so that PyTorch computes its "
                f"products and attention: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
    return 1


__all__ = ["Line", "calibrate", "known_rows", "lines_of", "rows", "speed_type"]
