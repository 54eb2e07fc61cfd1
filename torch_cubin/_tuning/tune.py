"""tune(): measures the products of a piece of work on this GPU, and uses what is quickest."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from torch_cubin import errors
from torch_cubin._native import library
from torch_cubin._tuning import measure, sweep
from torch_cubin._tuning.products import Operands, Product


class Tuning:
    """What tune() measured: ``print`` shows it, ``save`` keeps it for other processes."""

    def __init__(self, times: list[measure.Times], left: list[Product]) -> None:
        self.times = times
        self.left = left  # products for which there was no time
        self.lines = [sweep.line_of(each) for each in times]

    @property
    def table(self) -> dict[str, Any]:
        """The tuned table: the products that have a quicker way than the one predicted."""
        return sweep.table_of(self.lines)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the table as JSON, for load_tuned() on another day, on a GPU of the same name."""
        sweep.write_table(self.table, Path(path))

    def __str__(self) -> str:
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


def tune(
    work: Callable[[], object] | Iterable[tuple[int, int, int]],
    *,
    dtype: torch.dtype = torch.bfloat16,
    layout: str = "nt",
    seconds: float = 60,
) -> Tuning:
    """Measures which kernel is quickest for each product of `work` on the current GPU, and makes
    this process use it from now on.

    Args:
        work: a callable without arguments, run once, all whose matrix products by this library
            are tuned: ``lambda: model(x)``, under ``torch_cubin.drop_in()`` or not; or shapes
            ``(m, n, k)`` of ``a @ b`` with a ``[m, k]`` and b ``[k, n]``.
        dtype: of shapes; float32 is tuned as ``torch.backends.cuda.matmul.allow_tf32`` stands.
        layout: of shapes; "nt": b is a transposed ``[n, k]``, as a linear layer's weight is; "nn",
            "tn", "tt": "t" as first letter for a transposed a, "n" as second for a plain b.
        seconds: no product is begun after so long.

    Returns:
        What was measured; ``print`` it, ``save`` it for load_tuned().

    Raises:
        torch_cubin.Error: [no_device] without a CUDA device; [input] for shapes or a layout that
            are none, and where `work` runs no product of this library.
    """
    if not torch.cuda.is_available():
        raise errors.fault(
            "no_device", "torch_cubin.tune", "needs a CUDA device, and torch sees none"
        )
    start = time.monotonic()
    products = _products_of(work) if callable(work) else _shapes(work, dtype, layout)
    operands = Operands(torch.device("cuda", torch.cuda.current_device()))
    times: list[measure.Times] = []
    for product in products:
        if time.monotonic() - start > seconds:
            break
        times.append(measure.measure(product, operands, measure.Effort(), beside_torch=True))
    result = Tuning(times, products[len(times) :])
    library.add_tuned_table(result.table)
    return result


def load_tuned(path: str | os.PathLike[str]) -> int:
    """Makes this process use a table that Tuning.save() wrote; the number of its products.

    Raises:
        torch_cubin.Error: [file] where there is none; [input] where it is no such table, or was
            measured on a GPU that this process does not have: it is never used then.
    """
    try:
        table = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise errors.fault("file", f"tuned table '{path}'", f"cannot be read ({error})") from None
    library.add_tuned_table(table)
    return len(table["products"])


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


def _shapes(shapes: Iterable[tuple[int, int, int]], dtype: torch.dtype, layout: str) -> list:
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
        sizes = tuple(shape)
        if len(sizes) != 3 or not all(isinstance(s, int) and s > 0 for s in sizes):
            raise errors.fault(
                "input", "shape", "is none", expected="three positive integers", got=repr(shape)
            )
        products.append(Product.of_layout(*sizes, layout, name))
    return products
