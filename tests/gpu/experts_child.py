"""The scenario that runs every kernel of 8-bit products, of groups and of experts: see child.py.

    python tests/gpu/experts_child.py NAME ARGUMENT...

A sanitizer watches: inputs are made on the CPU, and results compared there, so that few kernels but
ours run.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import scaled_cases as scaled
import torch
from torch import Tensor

KERNELS = {"scaled", "grouped", "groups", "quantize", "experts"}  # families
BLOCK_1X128, BLOCK_128X128, ROW = scaled.BLOCK_1X128, scaled.BLOCK_128X128, scaled.ROW
TYPES = {"e4m3": scaled.E4M3, "e5m2": scaled.E5M2}
DTYPES = torch.bfloat16, torch.float16, torch.float32


def kernels() -> list[dict[str, Any]]:
    """Of these families, for Hopper, which the tests need."""
    from torch_cubin._native import library

    found = library.catalog()["kernels"]
    return [own for own in found if own["family"] in KERNELS and own["arch"] == "sm_90a"]


def _on_gpu(args: list[Any] | tuple[Any, ...]) -> list[Any]:
    """Copies whose strides are the same."""
    moved = [x.cuda() if isinstance(x, Tensor) else x for x in args]
    moved[1] = args[1].mT.cuda().mT  # the weights: K is contiguous
    return moved


def _recipes(kernel: dict[str, Any]) -> list[tuple[int, int]]:
    if kernel["math"] == "columns":
        return [(BLOCK_1X128, BLOCK_1X128)]
    by_blocks = kernel["math"] == "promoted" and 128 % kernel["tile"][1] == 0
    return [(ROW, ROW), *([(BLOCK_1X128, BLOCK_128X128)] if by_blocks else [])]


def _products(kernel: dict[str, Any], small: bool) -> Iterator[str]:
    """What was wrong of products by the kernel: whole tiles, several to a block, stored by the TMA;
    and tails in every dim, with a bias."""
    rows, columns, _ = kernel["tile"]
    generator = torch.Generator().manual_seed(rows + columns)
    types = TYPES[kernel["a"]], TYPES[kernel["b"]]
    sizes = [(rows + 8, columns * (8 if small else 70) - 8, 256), (rows + 9, 2 * columns + 5, 130)]
    for recipes, (m, n, k) in itertools.product(_recipes(kernel), sizes):
        if kernel["a"] != kernel["b"] and recipes[0] != ROW:
            continue
        args = scaled.operands(m, n, k, recipes, generator, types)
        bias = scaled.integers((n,), generator) if k % 128 else None
        options: dict[str, Any] = {"use_fast_accum": kernel["math"] == "fast"}
        if bias is not None:
            options |= {"bias": bias.cuda(), "output_dtype": torch.float32}
        out = torch.ops.cubin.scaled_matmul(*_on_gpu(args), **options).cpu()
        if not torch.equal(out, scaled.expected(*args, bias).to(out.dtype)):
            yield f"{kernel['name']} {(m, n, k)} {recipes}"


def _groups_of_rows(kernel: dict[str, Any], small: bool) -> Iterator[str]:
    rows, columns, _ = kernel["tile"]
    generator = torch.Generator().manual_seed(rows + columns)
    sizes = (5, 0, rows + 2, 17)
    offs = torch.tensor(sizes).cumsum(0).cuda()
    shapes = [(columns * (3 if small else 40) - 8, 272), (77, 130)]
    if kernel["math"] == "promoted" and rows == 128 and not small:  # a loop of its own, of long K
        shapes += [(columns * 40, 4096)]
    for recipes, (n, k) in itertools.product(_recipes(kernel), shapes):
        args = scaled.groups(recipes, sum(sizes) + 3, len(sizes), n, k, generator)
        out = torch.ops.cubin.scaled_grouped_matmul(
            *_on_gpu(args), offs=offs, use_fast_accum=kernel["math"] == "fast"
        )
        right = scaled.expected_of_groups(args, sizes).bfloat16()
        if not torch.equal(out[: sum(sizes)].cpu(), right):
            yield f"{kernel['name']} {(n, k)} {recipes}"


def _again_on_gpu(x: Tensor) -> Tensor:
    return x.cpu().cuda()


def _groups_of_k(kernel: dict[str, Any], small: bool) -> Iterator[str]:
    rows, columns, _ = kernel["tile"]
    generator = torch.Generator().manual_seed(rows + columns)
    sizes = (5, 0, 130, 17)
    offs = torch.tensor(sizes).cumsum(0).cuda()
    recipe = BLOCK_1X128 if kernel["math"] == "columns" else ROW
    for (m, n), rest in (((rows + 8, columns * (2 if small else 18) - 8), 8), ((77, 51), 4)):
        args = scaled.groups_of_k(recipe, len(sizes), m, n, sum(sizes) + rest, generator)
        out = torch.ops.cubin.scaled_grouped_matmul(
            *_on_gpu(args), offs=offs, use_fast_accum=kernel["math"] == "fast"
        )
        if not torch.equal(out.cpu(), scaled.expected_of_k(args, sizes).bfloat16()):
            yield f"{kernel['name']} {(m, n)}"


def _gated(kernel: dict[str, Any], small: bool) -> Iterator[str]:
    """Beside the steps that it consists of, on the GPU."""
    from torch_cubin._native import library

    generator = torch.Generator().manual_seed(0)
    rows, outputs = kernel["tile"][0] + 9, 128 * (2 if small else 40)
    groups = 3 if kernel["grouped"] else 1
    a, b, scale_a, _, scale_b, _ = scaled.groups(
        (BLOCK_1X128, BLOCK_128X128), rows, groups, 2 * outputs, 272, generator
    )
    args = _on_gpu([a, b if kernel["grouped"] else b[0], scale_a])
    args.append((scale_b if kernel["grouped"] else scale_b[0]).cuda())
    ends = torch.tensor([5, 5, rows], dtype=torch.int32).cuda()
    offs = {"offs": ends} if kernel["grouped"] else {}
    out = torch.ops.cubin.scaled_gated_matmul(*args, **offs)
    library.force_config("")
    # Over the host: initcheck does not see what a product's TMA stores.
    right = scaled.gated_by_steps(args, torch.bfloat16, between=_again_on_gpu, **offs)
    if not all(
        torch.equal(x.cpu().float(), y.cpu().float()) for x, y in zip(out, right, strict=True)
    ):
        yield kernel["name"]


def _wrong_8_bit_products(small: bool) -> list[str]:
    from torch_cubin._native import library
    from torch_cubin._tuning import measure

    wrong: list[str] = []
    kinds = {0: _products, 1: _groups_of_rows, 2: _groups_of_k}
    for kernel in kernels():
        if kernel["family"] != "scaled":
            continue
        check = _gated if kernel["gated"] else kinds[kernel["grouped"]]
        with measure.watching():
            library.force_config(kernel["name"])
            wrong += check(kernel, small)
    return wrong


def wrong_quantize(dtypes: Iterable[torch.dtype], shapes: Iterable[tuple[int, int]]) -> list[str]:
    """Beside the CPU's."""
    wrong, quantize = [], torch.ops.cubin.quantize
    for dtype, (rows, columns) in itertools.product(dtypes, shapes):
        x = torch.randn(rows, columns).to(dtype)
        for recipe, transpose in ((1, False), (4, False), (4, True), (5, False), (5, True)):
            for to in (scaled.E4M3, scaled.E5M2):
                found = quantize(x.cuda(), recipe, transpose=transpose, dtype=to)
                right = quantize(x, recipe, transpose=transpose, dtype=to)
                if not all(
                    torch.equal(a.cpu().float(), b.float())
                    for a, b in zip(found, right, strict=True)
                ):
                    wrong.append(f"quantize {(rows, columns)} {dtype} {recipe} {transpose} {to}")
        even = x[:, columns % 2 :]
        found, right = quantize(even.cuda(), 4, gate="silu"), quantize(even, 4, gate="silu")
        numbers = [
            data.cpu().float() * scales.cpu().float().repeat_interleave(128, 1)[:, : data.shape[1]]
            for data, scales in (found, right)
        ]
        if not torch.allclose(*numbers, rtol=0.13, atol=1e-3):
            wrong.append(f"quantize {(rows, columns)} {dtype} silu")
    return wrong


# Rows, groups, K and N: of 16-bit types the planner takes each kernel for one of them.
GROUPED = ((600, 2, 136, 264), (2100, 2, 72, 1032), (20, 40, 72, 1032), (600, 2, 136, 8200))


def _wrong_groups() -> list[str]:
    wrong, op = [], torch.ops.cubin.grouped_matmul
    dtypes = torch.bfloat16, torch.float16, torch.float32, torch.float64
    for dtype, (m, groups, k, n) in itertools.product(dtypes, GROUPED):
        if dtype.itemsize > 2 and n > 1000:
            continue
        sizes = [m // groups + (i < m % groups) for i in range(groups)]
        offs = torch.tensor(sizes).cumsum(0).int()
        parts = list(zip([0, *offs.tolist()], offs.tolist(), strict=False))
        a, b = (
            torch.randint(-2, 3, (m, k)).to(dtype),
            torch.randint(-2, 3, (groups, n, k)).to(dtype),
        )
        grad = torch.randint(-1, 2, (m, n)).to(dtype)
        rows = [a[i:j].double() @ own.double().t() for (i, j), own in zip(parts, b, strict=True)]
        sums = torch.stack([a[i:j].double().t() @ grad[i:j].double() for i, j in parts])
        for precision in ("high", "highest") if dtype == torch.float32 else ("highest",):
            torch.set_float32_matmul_precision(precision)
            for weights in (b.cuda().mT, b.mT.contiguous().cuda()):
                out = op(a.cuda(), weights, offs=offs.cuda())
                if not torch.equal(out.cpu(), torch.cat(rows).to(dtype)):
                    wrong.append(f"rows of groups {dtype} {(m, groups, k, n)} {precision}")
            out = op(a.cuda().t(), grad.cuda(), offs=offs.cuda())
            if not torch.equal(out.cpu(), sums.to(dtype)):
                wrong.append(f"sums of groups {dtype} {(m, groups, k, n)} {precision}")
    return wrong


def wrong_layers(
    dtypes: Iterable[torch.dtype], shapes: Iterable[tuple[int, int, int]]
) -> list[str]:
    """Mixtures of experts of so many tokens, hidden and inner columns, and their gradients, beside
    the CPU's: 300 tokens of four experts are two chunks of ids."""
    wrong = []
    for dtype, (tokens, hidden, inner) in itertools.product(dtypes, shapes):
        layer = [
            torch.randn(tokens, hidden).to(dtype),
            torch.rand(tokens, 6).argsort(-1)[:, :4] - 1,  # -1 is no expert
            torch.rand(tokens, 4),
            (torch.randn(4, 2 * inner, hidden) / hidden**0.5).to(dtype),
            (torch.randn(4, hidden, inner) / inner**0.5).to(dtype),
        ]
        found, right = (
            _layer_and_gradients([tensor.to(device) for tensor in layer])
            for device in ("cuda", "cpu")
        )
        names = ("out", "x", "weights", "w13", "w2")
        for name, own, other in zip(names, found, right, strict=True):
            if not torch.allclose(own.cpu(), other, rtol=0.05, atol=0.3):
                wrong.append(f"mixture of experts {dtype} {tokens} {hidden} {inner}: {name}")
        plain = torch.ops.cubin._moe(*(x.cuda() for x in layer), "silu", False).cpu()
        if not torch.allclose(plain, torch.ops.cubin._moe(*layer, "silu", False), 0.02, 0.02):
            wrong.append(f"mixture of experts {dtype} {tokens} {hidden} {inner}")
    return wrong


def _layer_and_gradients(layer: list[Tensor]) -> tuple[Tensor, ...]:
    x, _, weights, w13, w2 = layer
    out, *kept = torch.ops.cubin._moe_forward(*layer, "gelu", False)
    args = torch.ones_like(out), x, weights, w13, w2, *kept, "gelu", False
    return out, *torch.ops.cubin._moe_backward(*args, True, True, True)


def experts_sanitize(tool: str) -> dict:
    """compute-sanitizer watches. For racecheck a block has one tile of short K: it takes many times
    as long, and reports stages whose scales are copied again. A warp's lanes read them, meet, and
    one of them arrives at the mbarrier on which the copies wait: it orders that lane's reads alone.
    """
    import torch_cubin  # noqa: F401

    with torch.no_grad():
        wrong = _wrong_8_bit_products(tool == "racecheck")
        wrong += wrong_quantize(DTYPES, ((129, 257), (8, 1032), (1, 9001))) + _wrong_groups()
        wrong += wrong_layers(DTYPES, ((7, 72, 40), (300, 136, 136)))
    torch.cuda.synchronize()
    names = [kernel["name"] for kernel in kernels()]
    return {"wrong": wrong, "calls": len(names), "names": names}


if __name__ == "__main__":
    from gpu import answers, fresh_memory

    fresh_memory.fill_if_wanted()
    answers.give(answers.in_time(globals()[sys.argv[1]], *sys.argv[2:]))
