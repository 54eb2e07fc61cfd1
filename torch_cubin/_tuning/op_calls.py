"""Times the kernels that a call of a declared op can take beside one another, on this GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_cubin import errors
from torch_cubin._declared.op import Op, find
from torch_cubin._native import library
from torch_cubin._tuning import measure

LEAST_GAIN = 0.01  # of another kernel over the one that a call takes by itself
# How far two kernels' results may be apart, in parts of their size: no proof that a kernel is
# right, but no table may point to one that is plainly wrong.
_NEAR = {torch.float64: 1e-9, torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 4e-2}
_NEAR_8_BITS = 0.15
_ALIGN = 512  # of PyTorch's allocator
_MOST_SETS, _SET_BYTES = 16, 8 << 30
_REFUSALS = (errors.LaunchError, errors.ImageError, errors.InputError, errors.OutOfMemoryError)
_MOST_GRAPHS = 12  # alive at once, each of up to 1500 launches
_PIECE = 1 << 22  # elements that are compared at once
_MOST_OFF = 0.01  # of the elements may be off by more than their neighbours' size explains


@dataclasses.dataclass(frozen=True)
class CallTimes:
    """Microseconds of one call by each kernel that it can take, a number for each round."""

    op: str
    key: dict[str, Any]  # identifies the call, together with `chosen`
    chosen: int  # the kernel that it takes without a table
    rounds: dict[int, list[float]]
    names: dict[int, str]
    differ: dict[int, str]  # kernels that were not timed, and why: other results, or no launch
    elsewhere: list[int]  # kernels that fit, under another `when` than the chosen one's
    device: int = 0  # where it was measured

    def median(self, kernel: int) -> float:
        return statistics.median(self.rounds[kernel])

    def gain(self, kernel: int) -> float:
        """Over the kernel chosen without a table: the median of the rounds' ratios, less 1."""
        pairs = zip(self.rounds[self.chosen], self.rounds[kernel], strict=True)
        return statistics.median(before / after for before, after in pairs) - 1

    @property
    def best(self) -> int:
        """The quickest; the one chosen unless another is clearly quicker in most rounds."""
        best = max(self.rounds, key=self.gain)
        return best if self.gain(best) > LEAST_GAIN else self.chosen

    def line(self) -> dict[str, Any]:
        """The call's line of a tuned table."""
        best = self.best
        return {
            "key": self.key,
            "kernel": best,
            "name": self.names[best],
            "microseconds": round(self.median(best), 3),
            "instead_of": self.chosen,
            "gain": round(self.gain(best), 4),
        }

    def __str__(self) -> str:
        rows = [("  kernel", "us", "")]
        for kernel in sorted(self.rounds, key=self.median):
            notes = [("best",) * (kernel == self.best), ("taken before",) * (kernel == self.chosen)]
            text = ", ".join(note for group in notes for note in group)
            rows.append((f"  {self.names[kernel]}", f"{self.median(kernel):.2f}", text))
        rows += [(f"  {self.names[k]}", "-", f"not used: {why}") for k, why in self.differ.items()]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [f"{self.op}({shown_key(self.key)})"]
        for row in rows:
            padded = (c.ljust(w) for c, w in zip(row, widths, strict=True))
            lines.append("  ".join(padded).rstrip())
        if self.elsewhere:
            count = errors.counted(len(self.elsewhere), "kernel")
            lines.append(f"  {count} more under another `when`: tune(..., any_condition=True)")
        return "\n".join(lines)


def shown_key(key: Mapping[str, Any]) -> str:
    def one(value: Any) -> str:
        if isinstance(value, list):
            return f"{value[0]}{value[1]}"
        return repr(value)

    return ", ".join(f"{name}={one(value)}" for name, value in key.items())


def op_of(work: Any) -> Op | None:
    """The declared op that was meant: an Op, or the same under torch.ops; None for other things."""
    if isinstance(work, Op):
        return work
    kind = type(work).__name__
    if kind == "OpOverloadPacket":
        work, kind = getattr(work, work.overloads()[0]), "OpOverload"
    return find(work.name()) if kind == "OpOverload" else None


def calls_of(op: Op, inputs: Any) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The calls in `inputs`: (args, kwargs) of each."""

    def one(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if isinstance(given, tuple):
            return given, {}
        if isinstance(given, Mapping):
            return (), dict(given)
        if isinstance(given, Tensor):
            return (given,), {}
        raise errors.fault(
            "input", f"tune of op '{op.name}': inputs", "are no call of it",
            expected="a tuple of arguments, a dict of them by name, or a list of these",
            got=type(given).__name__,
        )  # fmt: skip

    listed = inputs if isinstance(inputs, list) else [inputs]
    if not listed:
        raise errors.fault(
            "input", f"tune of op '{op.name}': inputs", "name no call", expected="at least one"
        )
    return [one(given) for given in listed]


@contextlib.contextmanager
def watching(op: Op) -> Iterator[None]:
    """Records this thread's calls of the op, or forces them to a kernel."""
    library.watch_op(op.name)
    try:
        yield
    finally:
        library.watch_op(None)


def measure_call(
    op: Op,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    any_condition: bool = False,
    effort: measure.Effort | None = None,
    timer: Callable[..., dict[int, list[float]]] | None = None,
) -> CallTimes:
    """Times every kernel that fits, in interleaved CUDA graphs, over copies of the arguments that
    together exceed the L2 cache. The arguments are not changed: mutating ops get copies.
    """
    if len(op.contract["kernels"]) == 1:
        raise errors.fault(
            "input", f"tune of op '{op.name}'", "has nothing to choose from: the op has one kernel",
            expected="an op with several",
        )  # fmt: skip
    with watching(op), torch.no_grad():
        reference = _results(op, *_copied(args, kwargs))
        calls = library.watched_calls()
        if not calls:
            raise errors.fault(
                "input", f"tune of op '{op.name}': inputs", "did not run on a GPU",
                expected="CUDA tensors", got="a call that ran on the CPU",
            )  # fmt: skip
        call = calls[-1]
        kernels = call["fits"] if any_condition else call["same"]
        names = _names(op, call["fits"])
        # The allocator may reuse the memory of the previous call's output. Spoil it, so that a
        # kernel that leaves a part unwritten does not find the right result there.
        _spoil(_results(op, *_copied(args, kwargs)))
        differ = {}
        for kernel in kernels:
            if kernel == call["chosen"]:
                continue
            library.force_kernel(kernel)
            try:
                found = _results(op, *_copied(args, kwargs))
            except _REFUSALS as error:
                differ[kernel] = f"it does not run ({error})"
                continue
            far = _difference(found, reference)
            _spoil(found)
            del found
            if far:
                differ[kernel] = far
        library.force_kernel(-1)
        _spoil(reference)
        del reference
        others = [k for k in kernels if k != call["chosen"] and k not in differ]
        timer = timer or _rounds
        rounds = timer(op, args, kwargs, [call["chosen"], *others], effort or measure.Effort())
    elsewhere = [] if any_condition else [k for k in call["fits"] if k not in call["same"]]
    return CallTimes(
        op.name, call["key"], call["chosen"], rounds, names, differ, elsewhere, call["device"]
    )


def measure_calls(
    op: Op,
    calls: Iterable[tuple[tuple[Any, ...], dict[str, Any]]],
    any_condition: bool,
    seconds: float,
) -> Iterator[CallTimes]:
    """Measures each call until the time is up."""
    start = time.monotonic()
    for args, kwargs in calls:
        if time.monotonic() - start > seconds:
            return
        yield measure_call(op, args, kwargs, any_condition=any_condition)


def table_of(op: Op, device: int, times: Sequence[CallTimes]) -> dict[str, Any]:
    """The tuned table (docs/tuning.md). It also contains calls whose default kernel is the
    quickest, because an existing table may say otherwise; but not calls that only one kernel
    fits."""
    file = library.tuned_file(op.name, device)
    calls = [each.line() for each in times if len(each.names) > 1]
    return {
        "version": 1,
        "gpu": file["gpu"],
        "driver": file["driver"],
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "ops": [{"op": op.name, "hash": file["hash"], "calls": calls}],
    }


def _names(op: Op, kernels: Sequence[int]) -> dict[int, str]:
    """The name of each kernel, with its producer's facts; numbered if names are not unique."""
    names = {}
    for kernel in kernels:
        entry = op.contract["kernels"][kernel]
        names[kernel] = " ".join([f"{kernel}:", entry["kernel"][:60], *_facts(entry)])
    return names


def _facts(entry: dict[str, Any]) -> list[str]:
    producer = entry.get("producer") or {}
    parameters = [p for p in producer.get("parameters", ()) if isinstance(p, dict)]
    facts = [f"{p.get('name')}={p['value']}" for p in parameters if type(p.get("value")) is int]
    metadata = producer.get("metadata") or {}
    facts += [
        f"{name}={metadata[name]}" for name in ("num_warps", "num_stages") if name in metadata
    ]
    return [*facts, producer["target"]] if "target" in producer else facts


def _copied(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def copied(value: Any) -> Any:
        if isinstance(value, Tensor):
            return copy_of(value)
        return [copied(v) for v in value] if isinstance(value, (list, tuple)) else value

    return tuple(copied(value) for value in args), {k: copied(v) for k, v in kwargs.items()}


def copy_of(tensor: Tensor) -> Tensor:
    """A copy with the same sizes, strides and alignment (offset modulo 512 bytes)."""
    if not tensor.numel():
        return tensor
    size = _bytes_of(tensor)
    raw = torch.empty(size + _ALIGN, dtype=torch.uint8, device=tensor.device)
    at = (tensor.data_ptr() - raw.data_ptr()) % _ALIGN
    flat = raw[at : at + size].view(tensor.dtype)
    flat.copy_(_flat(tensor))
    return flat.as_strided(tensor.shape, tensor.stride(), flat.storage_offset())


def _bytes_of(tensor: Tensor) -> int:
    """The bytes from the first element to the last, including gaps."""
    if not tensor.numel():
        return 0
    steps = ((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (1 + sum(steps)) * tensor.element_size()


def _flat(tensor: Tensor) -> Tensor:
    """A one-dimensional view of that memory, for a tensor with elements."""
    count = _bytes_of(tensor) // tensor.element_size()
    return tensor.detach().as_strided((count,), (1,), tensor.storage_offset())


def _spoil(tensors: Sequence[Tensor]) -> None:
    """Fills memory that is about to be freed with 0xff bytes: NaN, or -1."""
    for tensor in tensors:
        if tensor.numel():
            _flat(tensor).view(torch.uint8).fill_(0xFF)


def _results(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The op's outputs and mutated arguments; the arguments are copies."""
    made = op(*args, **kwargs)
    results = [made] if isinstance(made, Tensor) else list(made or ())
    values = op._signature.bind(args, kwargs)
    changed = [values[a.name] for a in op._signature.arguments if a.mutable]
    return results + [tensor for tensor in changed if isinstance(tensor, Tensor)]


def _difference(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> str:
    """Why the results differ by more than rounding; "" if they do not."""
    for one, other in zip(found, wanted, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return "its results have another shape or dtype"
        if not one.numel():
            continue
        far = _far(one, other)
        if far:
            return far
    return ""


def _far(one: Tensor, other: Tensor) -> str:
    """_difference() of one pair of results that have elements."""
    if one.dtype.is_complex:
        one, other = (torch.view_as_real(x.resolve_conj()) for x in (one, other))
    if not one.dtype.is_floating_point:
        pieces = (piece for parts in _pieces(one, other) for piece in parts)
        return "" if all(torch.equal(a, b) for a, b in pieces) else "its results differ"
    limit = _NEAR.get(one.dtype, _NEAR_8_BITS)
    worst = scale = roots = 0.0
    for a, b in (piece for parts in _pieces(one, other) for piece in parts):
        a, b = a.double(), b.double()
        for same in (torch.isnan, torch.isposinf, torch.isneginf):
            if not torch.equal(same(a), same(b)):
                return "its results are not finite where the other kernel's are, or the reverse"
        off, size = _off_and_size(a, b)
        worst, scale = max(worst, off.max().item()), max(scale, size.max().item())
        roots += size.sqrt().sum().item()
    if not worst <= limit * scale:
        return f"its results are off by {worst:.3g}, where the largest is {scale:.3g}"
    # One outlier would hide all else from that test, so most elements are compared with the typical
    # size. The mean of square roots is close to the median, which CUDA does not compute in
    # deterministic mode.
    least = max((roots / one.numel()) ** 2, 1e-6 * scale)
    columns = one.shape[-1] if one.dim() else 1
    beyond = 0
    for parts in _pieces(one, other):
        sums = [b.double().nan_to_num(0, 0, 0).abs().sqrt().sum(-1, keepdim=True) for _, b in parts]
        usual = (functools.reduce(torch.add, sums) / columns).square().clamp_min(least)
        for a, b in parts:
            off, size = _off_and_size(a.double(), b.double())
            beyond += int((off > limit * torch.maximum(size, usual)).sum())
    share = beyond / one.numel()
    if share > _MOST_OFF:
        return f"{share:.1%} of its results are off by more than their neighbours' size explains"
    return ""


def _off_and_size(found: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The absolute errors in float64, and the magnitudes of the expected results."""
    wanted = wanted.nan_to_num(0, 0, 0)
    return (found.nan_to_num(0, 0, 0) - wanted).abs(), wanted.abs()


def _pieces(one: Tensor, other: Tensor) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Pairs of pieces of two tensors, at most _PIECE elements each, because a comparison makes
    several float64 copies: one-element lists with whole rows, or lists with all parts of one
    row."""
    if one.numel() <= _PIECE:
        yield [(one, other)]
        return
    last = one.dim() - 1
    dim = next((d for d in range(last) if one.shape[d] > 1), last)
    step = _PIECE if dim == last else max(1, one.shape[dim] * _PIECE // one.numel())
    parts = list(zip(one.split(step, dim), other.split(step, dim), strict=True))
    if dim == last:
        yield parts
        return
    for part in parts:
        yield from _pieces(*part)


def _rounds(
    op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], kernels: list[int], effort: Any
) -> dict[int, list[float]]:
    tensors = [tensor for _, tensor in op._signature.tensors(op._signature.bind(args, kwargs))]
    device = tensors[0].device
    used = max(1, sum(_bytes_of(tensor) for tensor in tensors))
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    count = max(1, min(_MOST_SETS, -(-3 * cache // used), _SET_BYTES // used))

    def call(args: tuple[Any, ...], kwargs: dict[str, Any], restored: Sequence[Any]) -> Any:
        for tensor, before in restored:
            _flat(tensor).copy_(_flat(before))
        return op(*args, **kwargs)

    with torch.cuda.device(device):
        copies = [_copied(args, kwargs) for _ in range(count)]
        sets = [(*copy, _restored(op, copy, (args, kwargs))) for copy in copies]
        about = _about(call, sets)
        repeats = count * max(1, round(1500 / about / count))

        def heat(some: Sequence[int]) -> dict[int, list[float]]:
            graphs, pool = {}, torch.cuda.graph_pool_handle()
            for kernel in some:
                library.force_kernel(kernel)
                graphs[kernel], _ = measure._graph(call, sets, repeats, pool)
            library.force_kernel(-1)
            return measure.rounds_of(graphs, repeats, effort, seed=0)

        return _in_heats(kernels, heat)


def _in_heats(
    kernels: Sequence[int], heat: Callable[[Sequence[int]], dict[int, list[float]]]
) -> dict[int, list[float]]:
    """Times any number of kernels, a few at a time. The first kernel runs in each group, whose
    times are scaled by it."""
    first, others = kernels[0], kernels[1:]
    rounds: dict[int, list[float]] = {}
    for begin in range(0, max(1, len(others)), _MOST_GRAPHS - 1):
        times = heat([first, *others[begin : begin + _MOST_GRAPHS - 1]])
        before = rounds.setdefault(first, times[first])
        scales = [old / new for old, new in zip(before, times[first], strict=True)]
        for kernel, own in times.items():
            if kernel != first:
                rounds[kernel] = [us * scale for us, scale in zip(own, scales, strict=True)]
    return rounds


def _restored(
    op: Op,
    copy: tuple[tuple[Any, ...], dict[str, Any]],
    given: tuple[tuple[Any, ...], dict[str, Any]],
) -> list[tuple[Tensor, Tensor]]:
    """Integer tensors that the op mutates, and their values: an index that each call increments
    would leave its bounds in a replayed graph. They are restored before each call, which adds to
    its time."""
    own, before = (dict(op._signature.tensors(op._signature.bind(*call))) for call in (copy, given))
    changed = {a.name for a in op._signature.arguments if a.mutable}
    return [
        (tensor, before[name])
        for name, tensor in own.items()
        if name.partition("[")[0] in changed
        and tensor.numel()
        and not (tensor.is_floating_point() or tensor.is_complex())
    ]


def _about(call: Callable[..., Any], sets: Sequence[tuple[Any, ...]]) -> float:
    """Approximate microseconds of a call."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call(*sets[0])
    start.record()
    for each in sets:
        call(*each)
    end.record()
    end.synchronize()
    return max(1.0, start.elapsed_time(end) / len(sets) * 1e3)
