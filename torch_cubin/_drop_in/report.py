# Counts the calls that install() and drop_in() served or left to PyTorch, and formats the report.
# It decides nothing (served.py does) and calls no operator.
"""The counts behind :func:`torch_cubin.report`."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from torch_cubin import errors
from torch_cubin._native import library
from torch_cubin._native.locks import fork_safe_lock
from torch_cubin._pytorch.aten_kernels import has_cuda
from torch_cubin._pytorch.compiler import assume_constant_result

# A limit for programs whose shapes never repeat.
MAX_SHAPES = 10_000


@dataclasses.dataclass(frozen=True)
class Served:
    """One row of the calls served by cubin ops: a torch function, and the dtype and device of its
    results.

    ``device`` is "cuda" for calls that ran from cubins, "cpu" for those that the ops' reference
    implementation computed. ``calls`` counts eager calls. ``traced`` counts how often torch.compile
    traced the call into a graph since the process began; the calls of the graph are in
    :class:`Ran`. ``shapes`` is the number of different operand shapes among the eager calls (it
    stops at 10,000); None for operators of aten, whose shapes are not recorded.
    """

    function: str
    dtype: str
    calls: int
    traced: int
    shapes: int | None
    device: str


@dataclasses.dataclass(frozen=True)
class Declined:
    """One row of the calls left to PyTorch, with the reason. ``calls`` and ``traced`` as in
    :class:`Served`."""

    function: str
    reason: str
    calls: int
    traced: int


@dataclasses.dataclass(frozen=True)
class Ran:
    """One row of the ops that ran, regardless of the caller: an op of torch.ops.cubin, and the
    dtype and device of its first tensor. ``calls`` counts eager code, compiled graphs and
    backward(); for a CUDA graph it counts the capture, but no replay.
    """

    op: str
    dtype: str
    calls: int
    device: str


@dataclasses.dataclass(frozen=True)
class Report:
    """The calls that install() and :func:`torch_cubin.drop_in` served and did not serve, and how
    often each of our ops ran; ``str()`` formats it as a table."""

    served: tuple[Served, ...]
    declined: tuple[Declined, ...]
    ran: tuple[Ran, ...] = ()

    def __str__(self) -> str:
        columns = ["function", "dtype", "device", "shapes", "calls", "traced"]
        ran_columns = ["op", "dtype", "device", "calls"]
        on_cpu = any(row.device == "cpu" for row in self.served + self.ran)
        if not on_cpu:
            columns.remove("device")
            ran_columns.remove("device")
        sections = []
        if self.served:
            rows = [_cells(row, columns) for row in self.served]
            sections.append(table(("served by cubin ops", *columns[1:]), rows))
        elif not self.ran:
            sections.append(["served by cubin ops: nothing"])
        if self.declined:
            rows = [(r.function, r.reason, r.calls, r.traced) for r in self.declined]
            sections.append(table(("left to PyTorch", "because", "calls", "traced"), rows))
        else:
            sections.append(["left to PyTorch: nothing"])
        if self.ran:
            rows = [_cells(row, ran_columns) for row in self.ran]
            sections.append(table(("cubin ops that ran", *ran_columns[1:]), rows))
        lines = sections[0] + [line for section in sections[1:] for line in ("", *section)]
        notes = []
        if not (self.served or self.ran) and not has_cuda():
            notes.append("This PyTorch is a CPU build: install() serves nothing.")
        if on_cpu:
            notes.append("cpu: computed by the ops' reference implementation, not by a cubin.")
        if any(row.traced for row in self.served + self.declined):
            notes.append(
                "traced: counted when torch.compile traced the call, in this process so far, not "
                "when its graph ran."
            )
        if self.ran:
            notes.append("ran: in eager code, compiled graphs and backward().")
        return "\n".join([*lines, "", *notes] if notes else lines)


def _cells(row: object, columns: Sequence[str]) -> tuple[object, ...]:
    values = (getattr(row, column) for column in columns)
    return tuple("" if value is None else value for value in values)


def table(header: tuple[str, ...], rows: Sequence[tuple[object, ...]]) -> list[str]:
    """Columns under a header; text is left-aligned, numbers are right-aligned."""
    widths = [max(len(str(row[i])) for row in [header, *rows]) for i in range(len(header))]
    lines = []
    for row in [header, *rows]:
        cells = [
            str(cell).rjust(width)
            if any(isinstance(each[i], int) for each in rows)
            else str(cell).ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return lines


class _Row:
    __slots__ = ("calls", "shapes", "traced")

    def __init__(self) -> None:
        self.calls = 0
        self.traced = 0
        self.shapes: set[tuple[torch.Size, torch.Size | None]] = set()


# Reentrant, because a garbage collection in here may run user code that multiplies matrices.
_lock = fork_safe_lock()
_served: dict[tuple[str, object, str], _Row] = {}  # by name, dtype and device; guarded by _lock
_declined: dict[tuple[str, str], _Row] = {}  # guarded by _lock


def count_served(name: str, args: tuple[object, ...], result: torch.Tensor) -> None:
    key = (name, result.dtype, result.device.type)
    # Recording every operand's shape would cost more than everything else here. The result and the
    # second argument determine M, N and K; the batch dims of the others are in the result's.
    shapes = (result.shape, getattr(args[1], "shape", None) if len(args) > 1 else None)
    with _lock:
        row = _served.get(key)
        if row is None:
            row = _served[key] = _Row()
        row.calls += 1
        if len(row.shapes) < MAX_SHAPES:
            try:
                row.shapes.add(shapes)
            except TypeError:
                # A symbolic size (export, make_fx) has no hash: the call is counted without it.
                return


def count_declined(name: str, reason: str) -> None:
    with _lock:
        _declined.setdefault((name, reason), _Row()).calls += 1


# Under torch.compile, updating a count would become part of the graph's guards and recompile it at
# every call. A function whose result is assumed constant is instead run once, while tracing.
@assume_constant_result
def count_traced_served(name: str, dtype: object, device: str) -> int:
    with _lock:
        _served.setdefault((name, dtype, device), _Row()).traced += 1
    return 0


@assume_constant_result
def count_traced_declined(name: str, reason: str) -> int:
    with _lock:
        _declined.setdefault((name, reason), _Row()).traced += 1
    return 0


def clear(*, graphs: bool = False) -> None:
    """Resets the counts. Traced calls stay, because their graphs do, unless `graphs`."""
    with _lock:
        _clear(graphs)
        library.op_calls(clear=True)
        library.declined_calls(clear=True)


def _clear(graphs: bool = False) -> None:
    both: tuple[dict[Any, _Row], ...] = (_served, _declined)
    for rows in both:
        for key, row in list(rows.items()):
            if graphs or not row.traced:
                del rows[key]
            else:
                row.calls, row.shapes = 0, set()


@errors.named_keywords
def report(*, reset: bool = False) -> Report:
    """The calls that install() and drop_in() served and left to PyTorch, since the outermost was
    entered.

    It includes the calls of PyTorch's flash attention while
    ``torch.nn.attention.activate_flash_attention_impl("cubin")`` is active, compiled ones included.

    "Outermost" is over all threads: while any drop_in() is entered, the calls of all threads are
    added, and the counts stay readable afterwards. Under torch.compile a call is counted once, when
    it is traced (``traced``), and not each time the compiled graph runs. Because a graph may be
    called again in a later drop_in(), traced calls stay listed; ``ran`` counts how often our ops
    ran.

    Args:
        reset: reset the counts after reading them.

    Returns:
        A :class:`Report`: ``served``, ``declined`` and ``ran`` rows, most calls first; ``str()`` is
        a table.
    """
    with _lock:
        served = [
            Served(name, _short(dtype), row.calls, row.traced, len(row.shapes), device)
            for (name, dtype, device), row in _served.items()
        ]
        declined = [
            Declined(name, reason, row.calls, row.traced)
            for (name, reason), row in _declined.items()
        ]
        declined += [
            Declined(row["op"], row["reason"], row["calls"], 0)
            for row in library.declined_calls(clear=reset)
        ]
        ran = []
        for row in library.op_calls(clear=reset):
            op, dtype, calls, device = (row[key] for key in ("op", "dtype", "calls", "device"))
            if op.startswith("aten::"):
                served.append(Served(op, dtype, calls, 0, None, device))
            else:
                ran.append(Ran(f"cubin::{op}", dtype, calls, device))
        if reset:
            _clear()

    def most(row: Served | Declined) -> tuple[int, str]:
        return -(row.calls + row.traced), row.function

    return Report(
        tuple(sorted(served, key=most)),
        tuple(sorted(declined, key=most)),
        tuple(sorted(ran, key=lambda row: (-row.calls, row.op))),
    )


def _short(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
