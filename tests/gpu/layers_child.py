"""The scenario that runs the kernels of layers: several of one input, gated ones, gradients of a
weight and a bias, products in parts, and copies before a product: see child.py.

    python tests/gpu/layers_child.py NAME ARGUMENT...

A sanitizer watches: inputs are made on the CPU, and results compared there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

ops = torch.ops.cubin
Compared = Iterator[tuple[str, list[Tensor], list[Tensor]]]


def _integers(*shape: int, most: int = 1) -> Tensor:
    return torch.randint(-most, most + 1, shape).double()


def _linears(dtype: torch.dtype, shapes: Iterable[tuple[int, int, tuple[int, ...]]]) -> Compared:
    """Several layers of one input, and a gated one, in one launch."""
    for rows, k, sizes in shapes:
        x, *weights = (_integers(n, k) for n in (rows, *sizes))
        sums = [x @ weight.t() for weight in weights]
        own, *on_gpu = (each.to(dtype).cuda() for each in (x, *weights))
        yield f"layers {rows} {k} {sizes}", ops._linears(own, on_gpu, []), sums
        gated = ops._linear_glu(own, on_gpu[0], on_gpu[0].neg(), "relu")
        yield f"gated layer {rows} {k} {sizes}", [gated], [sums[0].relu() * -sums[0]]


def layers_of_few_rows(dtype: torch.dtype) -> Compared:
    """K whole, a kernel each, and in parts."""
    few = [(rows, 136, (72, 136, 8)) for rows in (5, 12, 24)]
    yield from _linears(dtype, [*few, (33, 2056, (264, 264))])


def _layers_of_more_rows(dtype: torch.dtype) -> Compared:
    yield from _linears(dtype, [(520, 72, (2048, 1032)), (4096, 256, (2048, 2048))])


def _layers_of_middle_rows(dtype: torch.dtype) -> Compared:
    """A gated layer in tiles of 128 x 128."""
    yield from _linears(dtype, [(264, 136, (1032,))])


def gradients(dtype: torch.dtype) -> Compared:
    """Rows of the gradient, outputs, inputs: one tile of a row, several, and K in parts."""
    for rows, outputs, inputs in [(72, 136, 64), (264, 200, 520), (2056, 136, 264)]:
        grad, x = _integers(rows, outputs), _integers(rows, inputs)
        found = ops._weight_and_bias_gradient(grad.to(dtype).cuda(), x.to(dtype).cuda())
        yield f"gradients {rows} {outputs} {inputs}", list(found), [grad.t() @ x, grad.sum(0)]


def _forced(a: Tensor, b: Tensor, dtype: torch.dtype, wanted: str, layout: str = "nt") -> Compared:
    """By every config whose name has this in it."""
    from torch_cubin._native import library
    from torch_cubin._tuning import measure

    own = a.to(dtype).cuda() if layout[0] == "n" else a.to(dtype).t().contiguous().cuda().t()
    other = b.to(dtype).cuda() if layout[1] == "n" else b.to(dtype).t().contiguous().cuda().t()
    with measure.watching():
        ops.matmul(own, other)
        plans = library.watched_plans()
        names = {config["name"] for plan in plans for config in plan["configs"]}
        for name in sorted(name for name in names if wanted in f" {name} "):
            library.force_config(name)
            label = f"{tuple(a.shape)} {tuple(b.shape)} {name}"
            yield label, [ops.matmul(own, other)], [a @ b]
            library.force_config("")


def _parts(dtype: torch.dtype) -> Compared:
    """K in parts, under batch_invariant()."""
    import torch_cubin

    for m, n, k in ((7, 72, 4096), (130, 520, 2304), (257, 200, 1024)):
        with torch_cubin.batch_invariant():
            yield from _forced(_integers(m, k), _integers(k, n), dtype, " parts ")


def _wide_sums(dtype: torch.dtype) -> Compared:
    """K in splits, whose sums a kernel adds to float32."""
    from torch_cubin._native import library
    from torch_cubin._tuning import measure

    a, b, c = _integers(24, 2056), _integers(2056, 264), _integers(24, 264)
    with measure.watching():
        library.force_config("split")
        out = c.float().cuda()
        ops.addmm_into(out, a.to(dtype).cuda(), b.to(dtype).cuda(), beta=1.0, alpha=1.0)
        yield "wide sums", [out], [c + a @ b]


def _few_rows(dtype: torch.dtype) -> Compared:
    """By tiles of more rows of the weight than the planner takes for small weights."""
    for m in (7, 16, 32, 64):
        yield from _forced(_integers(m, 264), _integers(264, 8512), dtype, " 72 rows 1 ")


def _long_sums(dtype: torch.dtype) -> Compared:
    """K split among many blocks, whose sums a kernel adds."""
    a, b = _integers(16, 8200), _integers(8200, 520)
    yield from _forced(a, b, dtype, " mma 128x128x32 ")


def _whole_sums(dtype: torch.dtype) -> Compared:
    """In one chain, under batch_invariant(), of operands whose rows begin anywhere."""
    import torch_cubin

    torch.backends.cuda.matmul.allow_tf32 = False
    a, b = _integers(129, 65), _integers(65, 257)
    with torch_cubin.batch_invariant():
        yield "whole sums", [ops.matmul(a.to(dtype).cuda(), b.to(dtype).cuda())], [a @ b]
    torch.backends.cuda.matmul.allow_tf32 = True


def _copies(dtype: torch.dtype) -> Compared:
    """Of operands whose rows begin anywhere."""
    yield from _forced(_integers(264, 520), _integers(520, 1025), dtype, " pad ", "nn")


def _mirrored(dtype: torch.dtype) -> Compared:
    x = _integers(33, 17)
    gram = ops.syrk(x.to(dtype).cuda(), torch.zeros(33, 33, dtype=dtype).cuda(), beta=1)
    yield "syrk", [gram], [x @ x.t()]


def _columns(dtype: torch.dtype) -> Compared:
    """Neither operand is contiguous along K."""
    a, b = _integers(72, 1032), _integers(1032, 136)
    for wanted in (" mma ", " transpose "):
        yield from _forced(a, b, dtype, wanted, "tn")


SIXTEEN = (
    layers_of_few_rows,
    _layers_of_more_rows,
    _layers_of_middle_rows,
    gradients,
    _parts,
    _wide_sums,
    _few_rows,
    _copies,
)
KINDS = {
    torch.bfloat16: SIXTEEN,
    torch.float16: SIXTEEN,
    torch.float32: (_copies, _columns, _long_sums, _whole_sums),
    torch.float64: (_mirrored,),
}


def wrong_of(
    kinds: Iterable[Callable[[torch.dtype], Compared]], dtype: torch.dtype
) -> tuple[list[str], int]:
    """What was wrong, and how many calls there were."""
    wrong, calls = [], 0
    with torch.no_grad():
        for kind in kinds:
            for label, found, exact in kind(dtype):
                calls += 1
                for x, y in zip(found, exact, strict=True):
                    if not torch.equal(x.cpu(), y.to(x.dtype)):
                        wrong.append(f"{dtype} {label}")
    return wrong, calls


def layers_sanitize(tool: str, name: str) -> dict:
    """compute-sanitizer watches."""
    from gpu import answers

    import torch_cubin  # noqa: F401

    dtype = getattr(torch, name)
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    kinds = [*KINDS[dtype]]
    answers.shuffle(kinds)
    wrong, calls = wrong_of(kinds, dtype)
    torch.cuda.synchronize()
    return {"wrong": wrong, "calls": calls}


if __name__ == "__main__":
    from gpu import answers, fresh_memory

    fresh_memory.fill_if_wanted()
    answers.give(answers.in_time(globals()[sys.argv[1]], *sys.argv[2:]))
