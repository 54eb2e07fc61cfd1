"""Copies of 8 bits that weights keep inside keep_float8_weights(), for torch_cubin.moe and layers
of torch_cubin.float8(model, training=True)."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import threading
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from torch_cubin._native import library
from torch_cubin._pytorch.compiler import never_traced
from torch_cubin._pytorch.recording import recorder

_copies = torch.ops.cubin._float8_copies.default


@dataclasses.dataclass(frozen=True)
class Copies:
    """Data and scale of matrices, and of their transposes; of one matrix what quantize() gives."""

    own: tuple[Tensor, Tensor]
    transposed: tuple[Tensor, Tensor]


class _Kept:
    """Of one base of views: what it was when its weights were quantised, and their copies."""

    def __init__(self, base: Tensor, state: tuple[Any, ...]) -> None:
        self.state = state
        # While it is referenced, no other storage has its number, which `state` has.
        self.storage = StorageWeakRef(base.untyped_storage())
        self.copies: dict[tuple[Any, ...], Copies] = {}


class _Scopes:
    """Of the process, because backward() runs in threads of its own."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.open = 0
        self.kept: Any = WeakIdKeyDictionary()


_scopes = _Scopes()


def copies_of(weight: Tensor, make: bool) -> Copies | None:
    """Those that the weight, a matrix or several, keeps if it is as it was; else new ones, if
    `make`.

    None outside keep_float8_weights(), and where calls are traced. A CUDA graph has copies of its
    own, which its replays make again: with others it would run with what the weight was.
    """
    if torch.compiler.is_compiling() or not _scopes.open:
        return None
    if type(weight) not in (Tensor, torch.nn.Parameter) or weight.is_inference() or recorder():
        return None
    base = weight if weight._base is None else weight._base
    stream, capture = None, 0
    if weight.is_cuda:
        stream = torch.cuda.current_stream(weight.device)
        if torch.cuda.is_current_stream_capturing():
            capture = _capture_of(stream.device_index)
    storage = base.untyped_storage()._cdata
    state = base._version, storage, base.data_ptr(), base.dtype, stream, capture
    view = weight.dtype, weight.storage_offset(), *weight.shape, *weight.stride()
    with _scopes.lock:
        kept = _scopes.kept.get(base)
        if kept is None or kept.state != state:
            kept = _scopes.kept[base] = _Kept(base, state)
        if view not in kept.copies and make:
            kept.copies[view] = _made(weight.detach())
        found: Copies | None = kept.copies.get(view)
        return found


def _capture_of(device: int) -> int:
    """The number of the capture that records the device's current stream."""
    number = ctypes.c_uint64()
    library.raise_error(library.load().torch_cubin_capture_of(device, ctypes.byref(number)))
    return number.value


def _made(weight: Tensor) -> Copies:
    if weight.dim() == 3:
        data, scale, data_of_transpose, scale_of_transpose = _copies(weight)
        return Copies((data, scale), (data_of_transpose, scale_of_transpose))
    data, scale, data_of_transpose, scale_of_transpose = _copies(weight.unsqueeze(0))
    return Copies((data[0], scale[0].t()), (data_of_transpose[0], scale_of_transpose[0].t()))


def given(weights: tuple[Tensor, Tensor], transposed: bool) -> list[Tensor] | None:
    """The copies of both weights for a forward, or `transposed` for a backward, which makes none:
    its forward has, unless the weights have changed since."""
    found = [copies_of(weight, not transposed) for weight in weights]
    first, second = found
    if first is None or second is None:
        return None
    if transposed:
        return [*first.transposed, *second.transposed]
    return [*first.own, *second.own]


class keep_float8_weights:
    """Weights that are quantised for training inside keep their 8-bit copies.

    A context manager around the micro-batches of a step, or a forward and a backward with
    activation checkpointing::

        with torch_cubin.keep_float8_weights():
            for x in micro_batches:
                loss(model(x)).backward()
        optimizer.step()

    :func:`torch_cubin.moe` with recipe "block" and the layers of ``torch_cubin.float8(model,
    training=True)`` quantise weights in each forward, and their transposes in each backward.
    Inside, a weight is quantised once, for both, and its copies serve until the last scope ends,
    any optimizer of torch.optim has made a step, any CUDA graph has been replayed, the weight is
    freed, or it changes, as its version counter tells. Results have the same bits.
    Copies take two bytes for each element of a weight, which is why they are not kept by default.
    It holds for all threads of the process, and for eager calls whose gradients are recorded;
    compiled calls quantise as outside. Calls that a CUDA graph captures share copies that each
    replay makes again.

    NOTE: the version counter does not see all writes, such as those to `weight.data`, and those of
    FSDP to the weights that it gathers. What they write may change between scopes alone. A weight
    that is replaced, as by `weight.data = other` or load_state_dict(assign=True), is quantised
    again; torch.utils.swap_tensors() refuses weights that have copies.
    """

    def __enter__(self) -> None:
        _open(1)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _open(-1)


@functools.cache
def _forget_at_steps() -> None:
    """Fused optimizers write to weights without a new version, and so do graphs that are replayed:
    the version counter does not see their writes."""

    def forget(*_: Any) -> None:
        with _scopes.lock:
            _scopes.kept.clear()

    register_optimizer_step_post_hook(forget)
    graph: Any = torch.cuda.CUDAGraph
    replay = graph.replay

    @functools.wraps(replay)
    def replay_and_forget(self: Any) -> None:
        replay(self)
        forget()

    graph.replay = replay_and_forget


@never_traced
def _open(change: int) -> None:
    _forget_at_steps()
    with _scopes.lock:
        _scopes.open += change
        if not _scopes.open:
            _scopes.kept.clear()


__all__ = ["keep_float8_weights"]
