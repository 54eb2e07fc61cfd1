"""tune(): measures the kernels that can run some work on this GPU, and uses the quickest."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from torch_cubin import errors
from torch_cubin._declared.op import Op
from torch_cubin._native import library
from torch_cubin._tuning import measure, op_calls, store, sweep
from torch_cubin._tuning.products import Operands, Product


class Tuning:
    """The result of tune(): ``print`` shows it, ``save`` writes it for other processes.

    `table`: the argument of load_tuned(): the products with a quicker config than predicted, or the
    kernel of each call of a declared op.
    """

    def __init__(
        self,
        times: Sequence[measure.Times] = (),
        left: Sequence[Product] = (),
        calls: Sequence[op_calls.CallTimes] = (),
        calls_left: int = 0,
        table: dict[str, Any] | None = None,
        kept: str = "",
    ) -> None:
        self.times = list(times)
        self.left = list(left)  # products that were skipped for lack of time
        self.calls = list(calls)  # of a declared op
        self.calls_left = calls_left
        self.kept = kept  # of a declared op: the file, or why there is none
        self.lines = [sweep.line_of(each) for each in self.times]
        self.table = sweep.table_of(self.lines) if table is None else table

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the table as JSON, for load_tuned() in later processes with the same GPU."""
        store.write(self.table, Path(path))

    def __str__(self) -> str:
        if self.calls or self.calls_left:
            text = [str(each) for each in self.calls]
            if self.calls_left:
                text.append(f"{errors.counted(self.calls_left, 'call')} not measured: no time left")
            return "\n".join([*text, *([self.kept] if self.kept else [])])
        rows = [("product", "predicted best", "us", "measured best", "us", "gain")]
        for each, line in zip(self.times, self.lines, strict=True):
            chosen, best = line["chosen"], line["best"]
            numbers = (f"{each.median(chosen):.1f}", best, f"{each.median(best):.1f}")
            rows.append((str(each.product), chosen, *numbers, f"{line['gain']:+.1%}"))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        text = [
            "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        if self.left:
            text.append(f"{errors.counted(len(self.left), 'product')} not measured: no time left")
        return "\n".join(text)


@errors.named_keywords
def tune(
    work: Op | Callable[[], object] | Iterable[tuple[int, int, int]],
    inputs: Any = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    layout: str = "nt",
    seconds: float = 60,
    any_condition: bool = False,
) -> Tuning:
    """Measures which kernel is quickest on the current GPU, for the calls of a declared op or for
    each matrix product of `work`, and makes this process use it from now on.

    ``tune(op, inputs)`` runs every kernel of the op that fits the arguments: specialisations,
    Triton's configurations, kernels of a library (`choices`). Calls with the same dtypes, sizes,
    integers and strings then use the quickest one. It is also stored on disk (docs/tuning.md) for
    later processes with that GPU, driver and package, C++ programs too. Other calls are not
    affected. The arguments are not changed.

    ``tune(work)`` tunes the products of a callable, or of shapes; ``save`` stores these.

    Args:
        work: a declared op (what define_op and load_package return, or ``torch.ops.ns.name``); or a
            callable without arguments, run once, all whose matrix products by this library
            are tuned: ``lambda: model(x)``, under ``torch_cubin.drop_in()`` or not; or shapes
            ``(m, n, k)`` of ``a @ b`` with a ``[m, k]`` and b ``[k, n]``.
        inputs: for an op: the arguments of a call as a tuple, or as a dict by name, or a list of
            such calls. They should be realistic: the speed may depend on their values.
        dtype: for shapes; float32 follows ``torch.backends.cuda.matmul.allow_tf32``.
        layout: for shapes; "nt": b is a transposed ``[n, k]``, as a linear layer's weight; "nn",
            "tn", "tt": first letter "t" for a transposed a, second letter "n" for a plain b.
        seconds: no measurement starts after this time.
        any_condition: for an op: also consider kernels whose `when` holds but differs from that of
            the kernel which the call would launch. Only for ops each of whose kernels is correct
            whenever its own `when` holds, whatever the kernels before it.

    Returns:
        The measurements; ``print`` them, ``save`` them for load_tuned().

    Raises:
        torch_cubin.Error: [no_device] without a CUDA device; [input] for invalid shapes or layouts,
            if `work` runs no product of this library, for inputs that the op does not accept or
            that are on GPUs of different names, and for an op with a single kernel.
    """
    op = op_calls.op_of(work)
    is_op = type(work).__name__ in ("OpOverloadPacket", "OpOverload")
    if op is None and (is_op or not (callable(work) or isinstance(work, Iterable))):
        raise errors.fault(
            "input", "torch_cubin.tune", "cannot measure that",
            expected="a declared op, a callable without arguments, or shapes (m, n, k)",
            got=f"{work}, which is no declared op" if is_op else type(work).__name__,
        )  # fmt: skip
    if (op is None) != (inputs is None):
        raise errors.fault(
            "input", "torch_cubin.tune", "takes inputs of a declared op, and of nothing else",
            expected="tune(op, inputs), tune(callable) or tune(shapes)",
            got=f"{type(work).__name__} {'with' if inputs is not None else 'without'} inputs",
        )  # fmt: skip
    shapes = None if op is not None or callable(work) else _shapes(work, dtype, layout)
    if not torch.cuda.is_available():
        raise errors.fault(
            "no_device", "torch_cubin.tune", "needs a CUDA device, and torch sees none"
        )
    if op is not None:
        return _tune_op(op, inputs, any_condition, seconds)
    start = time.monotonic()
    if shapes is None:
        assert callable(work), "else it is an op or has shapes"
        shapes = _products_of(work)
    operands = Operands(torch.device("cuda", torch.cuda.current_device()))
    times: list[measure.Times] = []
    for product in shapes:
        if time.monotonic() - start > seconds:
            break
        times.append(measure.measure(product, operands, measure.Effort(), beside_torch=True))
    result = Tuning(times, shapes[len(times) :])
    library.add_tuned_table(result.table)
    return result


def _tune_op(op: Op, inputs: Any, any_condition: bool, seconds: float) -> Tuning:
    calls = op_calls.calls_of(op, inputs)
    _check_one_gpu(op, calls)
    times: list[op_calls.CallTimes] = []
    try:
        for each in op_calls.measure_calls(op, calls, any_condition, seconds):
            times.append(each)
    except Exception:
        if times:
            _use(op, times)
        raise
    table, kept = _use(op, times)
    return Tuning(calls=times, calls_left=len(calls) - len(times), table=table, kept=kept)


def _use(op: Op, times: Sequence[op_calls.CallTimes]) -> tuple[dict[str, Any], str]:
    """Activates the measured choices and stores them on disk; returns the table and its place."""
    # All were measured on GPUs of one name, as a table requires.
    device = times[0].device if times else torch.cuda.current_device()
    table = op_calls.table_of(op, device, times)
    if not table["ops"][0]["calls"]:
        return table, "not kept: no call had two kernels to choose from" if times else ""
    library.add_tuned_table(table)
    path = library.tuned_file(op.name, device)["path"]
    if path is None:
        return table, "not kept: there is no folder (TORCH_CUBIN_CACHE is 0, or no home)"
    why = store.keep(table, Path(path))
    return table, f"not kept: {why}" if why else f"kept in {path}"


def _check_one_gpu(op: Op, calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
    gpus = set()
    for args, kwargs in calls:
        for value in (*args, *kwargs.values()):
            items = value if isinstance(value, (list, tuple)) else [value]
            tensors = [item for item in items if isinstance(item, torch.Tensor)]
            gpus |= {torch.cuda.get_device_name(t.device) for t in tensors if t.is_cuda}
    if len(gpus) > 1:
        raise errors.fault(
            "input", f"tune of op '{op.name}': inputs", "are on GPUs of several names",
            expected="those of one: a table belongs to it", got=" and ".join(sorted(gpus)),
        )  # fmt: skip


@errors.named_keywords
def load_tuned(path: str | os.PathLike[str]) -> int:
    """Activates a table that Tuning.save() wrote; returns the number of its products or calls.

    Raises:
        torch_cubin.Error: [file] for a missing file; [input] if it is not such a table, was
            measured on a GPU that this process does not have, or, for a declared op, with another
            driver or other kernels, or if that op is not declared. Then the table is not used.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise errors.fault(
            "input", "torch_cubin.load_tuned", "takes a path", expected="what Tuning.save() wrote",
            got=type(path).__name__,
        )  # fmt: skip
    table = store.read(Path(os.fsdecode(path)))
    library.add_tuned_table(table)
    return len(table.get("products", ())) + sum(len(op["calls"]) for op in table.get("ops", ()))


def _products_of(work: Callable[[], object]) -> list[Product]:
    with measure.watching():
        work()
        torch.cuda.synchronize()
        plans = library.watched_plans()
    here = torch.cuda.current_device()
    products = [Product.of_plan(plan) for plan in plans if plan["device"] == here]
    if not products:
        raise errors.fault(
            *("input", "work", "ran no matrix product of this library on the current GPU"),
            expected="calls of torch.ops.cubin.matmul or linear (without an activation), or "
            "PyTorch's under drop_in()",
        )
    return products


def _shapes(shapes: Iterable[tuple[int, int, int]], dtype: torch.dtype, layout: str) -> list[Any]:
    if layout not in ("nt", "nn", "tn", "tt"):
        raise errors.fault("input", "layout", "is unknown", expected="nt, nn, tn or tt", got=layout)
    name = str(dtype).removeprefix("torch.")
    if name not in ("float16", "bfloat16", "float32", "float64"):
        raise errors.fault(
            *("input", "dtype", "cannot be multiplied"),
            expected="float16, bfloat16, float32 or float64",
            got=name,
        )
    if name == "float32" and torch.backends.cuda.matmul.allow_tf32:
        name = "tf32"
    products = []
    for shape in shapes:
        sizes = tuple(shape) if isinstance(shape, Iterable) else ()
        if len(sizes) != 3 or not all(isinstance(s, int) and s > 0 for s in sizes):
            raise errors.fault(
                "input", "shape", "is none", expected="three positive integers", got=repr(shape)
            )
        products.append(Product.of_layout(*sizes, layout, name))
    return products
