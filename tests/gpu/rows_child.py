"""The scenario that runs every kernel over rows (norms, softmax, losses, sums): see child.py.

    python tests/gpu/rows_child.py NAME ARGUMENT...

A sanitizer watches: inputs are made on the CPU, and results compared there with the CPU's, so that
few kernels but ours run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

ops = torch.ops.cubin
TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 1e-4}
ROWS = 5
# One element, rows that begin anywhere, lanes of a warp, a warp, a block, clusters, several passes.
COLUMNS = (1, 7, 64, 100, 128, 264, 512, 768, 1001, 1024, 1480, 2040, 4096, 5120, 8192, 12289,
           16384, 24000, 50257, 65544, 131072, 262144)  # fmt: skip
LONG = (50257, 131072, 262144)  # half of racecheck's time, by kernels that others of these take
# More rows than norms' gradients count as few, of few and of many columns.
MORE_ROWS = ((4100, 264), (4100, 768), (4100, 1024), (1030, 4096), (260, 16392), (40, 131072))
SUMS = ((3, 64), (600, 72), (600, 7), (5000, 264))  # rows that one block, clusters and parts add
EPS = 1e-5

Call = tuple[Callable[..., Any], list[Any]]


def _rows(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(rows, columns) * 2 + 0.5).to(dtype)


def _norms(rows: int, columns: int, dtype: torch.dtype, forward: bool = True) -> Iterator[Call]:
    x, y, grad = (_rows(rows, columns, dtype) for _ in range(3))
    w, b = _rows(2, columns, dtype)
    shape = [columns]
    kinds = [(y, w, None, False), (None, w, b, True), (None, None, None, True)]
    for residual, weight, bias, centered in kinds:
        given = [x, residual, shape, weight, bias, EPS, centered]
        if forward:
            yield ops._norm, given
        _, total, mean, rstd = ops._norm(*given)
        before, of_sum = (x, None) if residual is None else (total, y)
        wanted = weight is not None, None if bias is None else dtype
        saved = [grad, of_sum, before, mean, rstd, weight, 1, EPS, centered]
        yield ops._norm_backward, [*saved, *wanted]
        if weight is not None and not forward:
            yield ops._norm_backward, [*saved, False, None]


def _softmaxes(rows: int, columns: int, dtype: torch.dtype) -> Iterator[Call]:
    x, grad = _rows(rows, columns, dtype), _rows(rows, columns, dtype)
    for log in (False, True):
        yield ops._softmax, [x, log, dtype]
        yield ops._softmax_backward, [grad, ops._softmax(x, log, dtype), log, dtype]


def _loss(x: Tensor, target: Tensor, weight: Tensor | None, *options: Any) -> list[Tensor]:
    """Losses and the gradient, by the statistics between them, which have no meaning of rows that
    are ignored."""
    *reduction, dtype = options
    loss, *statistics = ops._cross_entropy(x, target, weight, *reduction, dtype)
    ones = torch.ones(loss.shape).to(loss)
    return [
        loss, ops._cross_entropy_backward(ones, x, target, weight, *statistics, *reduction)
    ]  # fmt: skip


def _losses(rows: int, columns: int, dtype: torch.dtype) -> Iterator[Call]:
    x, weight = _rows(rows, columns, dtype), torch.rand(columns).to(dtype) + 0.5
    target = torch.arange(rows) * 7 % columns
    target[0] = -100
    for of_class, reduction, smoothing in ((None, "none", 0.0), (weight, "mean", 0.1)):
        yield _loss, [x, target, of_class, reduction, -100, smoothing, dtype]


def calls(dtype: torch.dtype, tool: str) -> Iterator[Call]:
    for columns in COLUMNS:
        if tool == "racecheck" and columns in LONG:
            continue
        yield from _norms(ROWS, columns, dtype)
        yield from _softmaxes(ROWS, columns, dtype)
        if columns > 1:
            yield from _losses(ROWS, columns, dtype)
        for kind in range(3):
            yield ops._row_sums, [_rows(ROWS, columns, dtype), kind, 2.0, dtype]
    for rows, columns in MORE_ROWS:
        yield from _norms(rows, columns, dtype, forward=False)
    yield from _losses(300, 8200, dtype)  # more than a kernel for few takes
    for rows, columns in SUMS:
        yield torch.ops.aten.sum.dim_IntList, [_rows(rows, columns, dtype), [0]]


def _scaled(out: Tensor, factor: Tensor) -> Tensor:
    ops._scale_into(out, factor)
    return out


def _differs(found: Tensor, right: Tensor, tolerance: float) -> bool:
    found, right = found.cpu().double(), right.double()
    if found.shape != right.shape:
        return True
    infinite = right.isinf()  # sums of squares that float16 does not hold
    rest = torch.where(infinite, 0, right)
    limit = tolerance * max(rest.norm().item(), right.numel() ** 0.5)
    same = torch.equal(found[infinite], right[infinite])
    return not same or not torch.where(infinite, 0, found - right).norm().item() <= limit


def rows_sanitize(tool: str, name: str) -> dict:
    """compute-sanitizer watches."""
    from gpu import answers

    import torch_cubin

    wrong, count, dtype = [], 0, getattr(torch, name)
    torch.manual_seed(0)
    scaled = _scaled, [_rows(9, 1001, dtype), torch.tensor(0.5, dtype=dtype)]
    made = [*calls(dtype, tool), scaled]
    answers.shuffle(made)  # a run that is ended early has some of each kind
    with torch.no_grad(), torch_cubin.install(policy="all"):
        for op, args in made:
            moved = [each.cuda() if isinstance(each, Tensor) else each for each in args]
            found, right = op(*moved), op(*args)
            if isinstance(found, Tensor):
                found, right = [found], [right]
            count += 1
            if any(_differs(*pair, TOLERANCES[dtype]) for pair in zip(found, right, strict=True)):
                sizes = [tuple(each.shape) for each in args if isinstance(each, Tensor)]
                wrong.append(f"{op} {sizes}")
    torch.cuda.synchronize()
    return {"wrong": wrong, "calls": count}


if __name__ == "__main__":
    from gpu import answers, fresh_memory

    fresh_memory.fill_if_wanted()
    answers.give(answers.in_time(globals()[sys.argv[1]], *sys.argv[2:]))
