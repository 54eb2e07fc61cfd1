"""The ops over rows on a GPU: errors against float64, layouts, rows that are not finite, bits.

Memory is full of NaN, so that what a kernel must not read would show.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numerics
import pytest
import torch
import torch.nn.functional as F
from gpu import cases
from torch import Tensor

import torch_cubin

pytestmark = pytest.mark.usefixtures("nan_memory")

ops = torch.ops.cubin
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Lengths of rows: one element, parts of a vector, unaligned rows, one to several vectors of a
# thread, all lanes of a warp, all threads of a block, of a cluster, longer than a cluster holds.
# The numbers of rows differ.
SIZES = [(5, 1), (300, 7), (64, 64), (1001, 128), (65, 256), (1000, 100), (77, 264), (130, 512),
         (63, 768), (33, 1001), (257, 1024), (29, 1480), (37, 1536), (45, 2040), (130, 4096),
         (31, 5120), (70, 8192), (9, 12289), (13, 16384), (7, 24000), (4, 50257), (3, 131072),
         (2, 262144)]  # fmt: skip
# Of norms: more rows than their gradients count as few.
MORE_ROWS = [(4100, 768), (2060, 2048), (1030, 4096)]
Inf = float("inf")


def residual(norm: Callable[..., Tensor]) -> Callable[..., Any]:
    def call(x: Tensor, y: Tensor, *rest: Any) -> Any:
        total = x + y
        return norm(total, *rest), total

    return call


# Ours, PyTorch's; which arguments are a row's parameters.
CALLS: dict[str, tuple[Callable[..., Any], Callable[..., Any], str]] = {
    "rms_norm": (
        lambda x, w: ops.rms_norm(x, w.shape, w, 1e-5),
        lambda x, w: F.rms_norm(x, w.shape, w, 1e-5),
        "xw",
    ),
    "add_rms_norm": (
        lambda x, y, w: ops.add_rms_norm(x, y, w.shape, w, 1e-5),
        residual(lambda x, w: F.rms_norm(x, w.shape, w, 1e-5)),
        "xxw",
    ),
    "layer_norm": (
        lambda x, w, b: ops.layer_norm(x, w.shape, w, b),
        lambda x, w, b: F.layer_norm(x, w.shape, w, b),
        "xww",
    ),
    "layer_norm alone": (
        lambda x: ops.layer_norm(x, x.shape[-1:]),
        lambda x: F.layer_norm(x, x.shape[-1:]),
        "x",
    ),
    "softmax": (lambda x: ops.softmax(x, -1), lambda x: torch.softmax(x, -1), "x"),
    "log_softmax": (lambda x: ops.log_softmax(x, -1), lambda x: torch.log_softmax(x, -1), "x"),
}


def results(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else list(found)


def draw(kinds: str, rows: int, columns: int, dtype: torch.dtype, generator: Any) -> list[Tensor]:
    def one(kind: str) -> Tensor:
        shape = (rows, columns) if kind == "x" else (columns,)
        x = torch.randn(shape, device="cuda", generator=generator) * 2 + 0.5
        return x.to(dtype).requires_grad_()

    return [one(kind) for kind in kinds]


def forward_and_backward(
    call: Callable[..., Any], tensors: list[Tensor], grads: list[Tensor]
) -> list[Tensor]:
    out = results(call(*tensors))
    grads = [grad.to(x.dtype) for grad, x in zip(grads, out, strict=False)]
    return [*out, *torch.autograd.grad(out, tensors, grads)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_errors_against_float64(name: str, dtype: torch.dtype, generator: torch.Generator) -> None:
    ours, torchs, kinds = CALLS[name]
    judges: list[numerics.Judge] = []
    for rows, columns in [*SIZES, *(MORE_ROWS if "norm" in name else [])]:
        tensors = draw(kinds, rows, columns, dtype, generator)
        grads = [torch.randn(rows, columns, device="cuda", generator=generator).to(dtype)] * 2
        wide = [x.detach().double().requires_grad_() for x in tensors]
        got = forward_and_backward(ours, tensors, grads)
        own = forward_and_backward(torchs, tensors, grads)
        if name == "add_rms_norm":
            # The rounded sum is normalized.
            total = (tensors[0] + tensors[1]).detach().double()
            wide[0] = (total - wide[1].detach()).requires_grad_()
        want = forward_and_backward(torchs, wide, [grad.double() for grad in grads])
        judges = judges or [numerics.Judge(dtype) for _ in got]
        for i, judge in enumerate(judges):
            parameter = i >= len(got) - kinds.count("w")  # sums over rows
            scale = rows**0.5 if parameter else 1.0
            judge.add(f"{i} {rows} x {columns}", got[i], own[i], want[i], scale)
    for judge in judges:
        judge.finish()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_softmax_in_float32_of_16_bits(dtype: torch.dtype, generator: torch.Generator) -> None:
    for columns in (7, 512, 9000):
        (x,) = draw("x", 40, columns, dtype, generator)
        for ours, torchs in ((ops.softmax, torch.softmax), (ops.log_softmax, torch.log_softmax)):
            got, want = (f(x, -1, dtype=torch.float32) for f in (ours, torchs))
            torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)
            grad = torch.randn_like(got)
            got, want = (torch.autograd.grad(y, x, grad)[0] for y in (got, want))
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("columns", [7, 64, 100, 2048, 8193])
def test_layouts_that_are_not_contiguous(columns: int, generator: torch.Generator) -> None:
    base = torch.randn(6, 5, 3 * columns + 9, device="cuda", generator=generator).bfloat16()
    weight = torch.randn(2 * columns, device="cuda", generator=generator).bfloat16()[::2]
    views = {
        "part of wider rows": base[..., 3 : 3 + columns],
        "every second row": base[::2, :, 8 : 8 + columns],
        "transposed": base[..., :columns].transpose(0, 1),
        "along another dim": base[..., : 2 * columns : 2],
        "expanded rows": base[:1, :1, :columns].expand(4, 3, columns),
        "expanded columns": base[..., :1].expand(6, 5, columns),
    }
    for name, view in views.items():
        dense = view.clone(memory_format=torch.contiguous_format)
        grad = view.flip(0)
        for call in (
            lambda x: ops.softmax(x, -1),
            lambda x: ops.rms_norm(x, x.shape[-1:], weight),
            lambda x: ops.layer_norm(x, x.shape[-1:], weight, weight),
            lambda x: ops.add_rms_norm(x, x, x.shape[-1:])[0],
            lambda x: ops.softmax(x, 1),
        ):
            x, y = view.detach().requires_grad_(), dense.requires_grad_()
            got, want = call(x), call(y)
            assert torch.equal(got, want), name
            (of_view,) = torch.autograd.grad(got, x, grad)
            (of_dense,) = torch.autograd.grad(want, y, grad.contiguous())
            assert torch.equal(of_view, of_dense), name
            (of_sum,) = torch.autograd.grad(call(y).sum(), y)
            assert of_sum.isfinite().all()


@pytest.mark.parametrize("columns", [3, 100, 9000, 131072])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_that_are_not_finite(dtype: torch.dtype, columns: int) -> None:
    x = torch.zeros(7, columns, device="cuda", dtype=dtype)
    x[0], x[1, 1:], x[2, 2], x[3, 1] = -Inf, -Inf, Inf, torch.nan
    x[4], x[4, -1], x[5], x[5, 0] = -Inf, -3e4, -3e4, 3e4
    for ours, torchs in ((ops.softmax, torch.softmax), (ops.log_softmax, torch.log_softmax)):
        torch.testing.assert_close(ours(x, -1), torchs(x, -1), equal_nan=True)


@pytest.mark.parametrize("value", [3000.0, -0.1, 1234.5, 6e4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_one_value(dtype: torch.dtype, value: float) -> None:
    """Layer norm gives its bias: rstd, 1 / sqrt(eps), would multiply an error of the mean."""
    lengths = [*range(1, 21), 64, 100, 128, 256, 504, 768, 1000, 1001, 1400, 2040, 2048,
               3000, 4104, 8193, 9000, 12288, 16376, 16384, 16392, 50257, 65544,
               131072, 200001]  # fmt: skip
    for columns in lengths:
        x = torch.full((5, columns), value, device="cuda", dtype=dtype, requires_grad=True)
        b = torch.arange(columns, device="cuda").remainder(9).to(dtype)
        w = torch.full_like(b, 3)
        out, _, mean, _ = ops._norm(x.detach(), None, (columns,), w, b, None, True)
        assert torch.equal(mean.flatten(), x[:, 0].float()), columns
        assert torch.equal(out, b.expand_as(out)), columns
        assert not ops._row_sums(x.detach(), 2, 1.0, torch.float32).any(), (
            columns
        )  # squared deviations
        out = ops.layer_norm(x, (columns,), w, b)
        (grad,) = torch.autograd.grad(out, x, b.expand_as(out))
        want = 3 * (b.double() - b.double().mean()) / 1e-5**0.5
        torch.testing.assert_close(grad.double(), want.expand_as(grad), rtol=8e-3, atol=1e-2)
        norm = ops.rms_norm(x, (columns,), None, 0.0)
        torch.testing.assert_close(norm, x.sign())
        for call, torchs in ((ops.softmax, torch.softmax), (ops.log_softmax, torch.log_softmax)):
            torch.testing.assert_close(call(x, -1), torchs(x, -1))


@pytest.mark.parametrize("columns", [64, 100, 4096, 16384])
@pytest.mark.parametrize("scale", [1e-20, 1e16, 5e16])
def test_gradients_of_tiny_and_huge_rows_without_an_eps(
    scale: float, columns: int, generator
) -> None:
    """Without an eps: float32 does not hold the square of 1 / sqrt(variance)."""
    x, w, grad = draw("xwx", 37, columns, torch.bfloat16, generator)
    x = x.detach() * scale

    def gradients(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = [each.detach().requires_grad_() for each in tensors]
        norm = ops.rms_norm if leaves[0].dtype == torch.bfloat16 else F.rms_norm
        out = norm(leaves[0], w.shape, leaves[1], 0.0)
        return torch.autograd.grad(out, leaves, grad.to(out.dtype))

    for own, wanted in zip(gradients(x, w), gradients(x.double(), w.double()), strict=True):
        assert not ((own - wanted).abs() > wanted.abs().max() * 0.01).any()


@pytest.mark.parametrize("shape", [(0, 6), (3, 0), (0,), ()])
def test_empty_tensors(shape: tuple[int, ...]) -> None:
    x = torch.ones(shape, device="cuda", requires_grad=True)
    torch.testing.assert_close(ops.softmax(x, -1), torch.softmax(x, -1))
    if shape:
        w = torch.ones(shape[-1:], device="cuda", requires_grad=True)
        out = ops.layer_norm(x, shape[-1:], w, w)
        assert out.shape == shape
        assert all(not g.any() for g in torch.autograd.grad(out.sum(), (x, w)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_residual_added_before_gives_the_same_bits(dtype: torch.dtype, generator) -> None:
    short = (72, 100, 128, 264, 768, 1024, 1208, 2040)
    for columns in (*short, 2048, 2056, 4096, 5120, 8200, 16384, 20000):
        x, y, w = (each.detach() for each in draw("xxw", 37, columns, dtype, generator))
        out, total = ops.add_rms_norm(x, y, w.shape, w)
        assert torch.equal(x + y, total), columns
        assert torch.equal(ops.rms_norm(total, w.shape, w), out), columns


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_a_rows_bits_do_not_depend_on_other_rows(name: str, dtype, generator) -> None:
    ours, _, kinds = CALLS[name]
    for columns in (5, 64, 100, 128, 320, 768, 1000, 1160, 2040, 2048, 4096, 8192, 20000, 131072):
        # Up to 4096 columns, more than norms' gradients count as few, whose parts are few.
        rows = 4200 if columns <= 1160 else 2100 if columns <= 4096 else 400
        rows = rows if columns < 131072 else 40
        tensors = draw(kinds, rows, columns, dtype, generator)
        grads = [torch.randn(rows, columns, device="cuda", generator=generator).to(dtype)] * 2
        whole = forward_and_backward(ours, tensors, grads)
        again = forward_and_backward(ours, tensors, grads)
        assert all(map(torch.equal, whole, again)), (name, columns)
        for begin, end in ((0, 1), (7, 8), (rows // 3, rows - 20)):
            part = [
                (x[begin:end].clone() if kind == "x" else x).detach().requires_grad_()
                for x, kind in zip(tensors, kinds, strict=True)
            ]
            own = forward_and_backward(ours, part, [grad[begin:end] for grad in grads])
            for i, (x, y) in enumerate(zip(own, whole, strict=True)):
                if y.dim() == 2:  # else a parameter's gradient
                    assert torch.equal(x, y[begin:end]), (name, columns, begin, i)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cross_entropy(
    dtype: torch.dtype, smoothing: float, weighted: bool, generator: torch.Generator
) -> None:
    options = {"label_smoothing": smoothing, "reduction": "none", "ignore_index": 1}
    losses, gradients = numerics.Judge(dtype), numerics.Judge(dtype)
    for rows, columns in SIZES:
        (x,) = draw("x", rows, columns, dtype, generator)
        target = torch.randint(0, columns, (rows,), device="cuda", generator=generator)
        grad = torch.randn(rows, device="cuda", generator=generator).to(dtype)
        weight = torch.rand(columns, device="cuda", generator=generator).to(dtype)
        weight[::3] = 0

        def run(
            call: Any, x: Tensor, target: Any = target, grad: Any = grad, weight: Any = weight
        ) -> list[Tensor]:
            out = call(x, target, weight.to(x.dtype) if weighted else None, **options)
            return [out, *torch.autograd.grad(out, x, grad.to(x.dtype))]

        got, own = run(ops.cross_entropy, x), run(F.cross_entropy, x)
        want = run(F.cross_entropy, x.detach().double().requires_grad_())
        for i, judge in enumerate((losses, gradients)):
            judge.add(f"{rows} x {columns}", got[i], own[i], want[i])
        again = run(ops.cross_entropy, x)
        assert all(map(torch.equal, got, again))
        own_weight = weight if weighted else None
        part = ops.cross_entropy(x[:1].clone(), target[:1], own_weight, **options)
        assert torch.equal(part, got[0][:1])
        for reduction in ("mean", "sum"):
            loss, other = (
                call(x.float(), target, weight.float(), reduction=reduction)
                for call in (ops.cross_entropy, F.cross_entropy)
            )
            torch.testing.assert_close(loss, other, rtol=1e-4, atol=1e-5, equal_nan=True)
    losses.finish()
    gradients.finish()


@pytest.mark.parametrize("rows", [1, 130, 1024, 8192, 8200, 100_003])
def test_means_of_few_and_many_losses(rows: int, generator: torch.Generator) -> None:
    x = torch.randn(rows, 8, device="cuda", generator=generator)
    target = torch.randint(0, 8, (rows,), device="cuda", generator=generator)
    weight = torch.rand(8, device="cuda", generator=generator) + 0.1
    for own_weight in (None, weight):
        for ignored in (-100, 3) if rows > 1 else (-100,):
            got = ops.cross_entropy(x, target, own_weight, ignore_index=ignored)
            wide = None if own_weight is None else own_weight.double()
            want = F.cross_entropy(x.double(), target, wide, ignore_index=ignored)
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_losses_of_few_rows_have_the_bits_of_many(dtype: torch.dtype, generator) -> None:
    """A kernel of their own computes them from 8,200 columns on, to 264 blocks."""
    for columns in (4096, 8200, 16384, 32000, 50264, 65544, 128256, 300_000):
        x = torch.randn(300, columns, device="cuda", generator=generator).mul(4).to(dtype)
        x[3, 5:9] = torch.tensor([Inf, -Inf, torch.nan, 0.0])
        x[4], x[5, columns // 2 :] = -Inf, -Inf
        target = torch.randint(0, columns, (300,), device="cuda", generator=generator)
        target[6] = -100
        options = None, "none", -100, 0.0, torch.float32
        whole = ops._cross_entropy(x, target, *options)
        for first, end in ((0, 1), (0, 7), (0, 33), (33, 165), (0, 264), (290, 300)):
            part = ops._cross_entropy(x[first:end], target[first:end], *options)
            for own, all_rows in zip(part, whole, strict=True):
                if own.dim() == 0 or own.numel() == 0:
                    continue
                same = own.view(torch.int32) == all_rows[first:end].view(torch.int32)
                assert same.all(), (columns, first, end)


@pytest.mark.usefixtures("freed_memory")
def test_gradients_of_logits_that_no_cache_holds(generator: torch.Generator) -> None:
    """They have stores of their own, and the bits of few rows."""
    x = torch.randn(2100, 16384, device="cuda", generator=generator).bfloat16().requires_grad_()
    target = torch.randint(0, 16384, (2100,), device="cuda", generator=generator)
    target[5] = -100
    (grad,) = torch.autograd.grad(ops.cross_entropy(x, target, reduction="sum"), x)
    few = x.detach()[:100].clone().requires_grad_()
    (part,) = torch.autograd.grad(ops.cross_entropy(few, target[:100], reduction="sum"), few)
    assert torch.equal(grad[:100], part)
    want = torch.softmax(x.detach().float(), -1)
    want[torch.arange(2100, device="cuda"), target.clamp(min=0)] -= 1
    want[5] = 0
    torch.testing.assert_close(grad.float(), want, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_losses_do_not_depend_on_where_rows_begin(dtype: torch.dtype, generator) -> None:
    """Nor on what precedes and follows them in memory."""
    for rows, columns in ((300, 7), (70, 100), (33, 1001), (2, 50257)):
        logits = torch.randn(rows, columns, device="cuda", generator=generator).to(dtype)
        target = torch.randint(0, columns, (rows,), device="cuda", generator=generator)
        want = torch.cat([
            ops.cross_entropy(row[None], each[None], reduction="none")
            for row, each in zip(logits, target, strict=True)
        ])  # fmt: skip
        exact = F.cross_entropy(logits.double(), target, reduction="none")
        torch.testing.assert_close(want.double(), exact, rtol=1e-2, atol=1e-3)
        for begin in range(8):
            memory = torch.full((begin + logits.numel() + 9,), torch.nan, device="cuda").to(dtype)
            x = memory[begin : begin + logits.numel()].view(rows, columns).copy_(logits)
            assert torch.equal(ops.cross_entropy(x, target, reduction="none"), want), begin


@pytest.mark.usefixtures("nan_memory")
@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_cross_entropy_of_no_rows(reduction: str) -> None:
    x = torch.ones(0, 60, device="cuda", requires_grad=True)
    target = torch.ones(0, dtype=torch.int64, device="cuda")
    hidden, w = x.detach()[:, :8].requires_grad_(), torch.ones(60, 8, device="cuda")
    w.requires_grad_()
    want = F.cross_entropy(x, target, reduction=reduction)
    for out, inputs in (
        (ops.cross_entropy(x, target, reduction=reduction), [x]),
        (ops.linear_cross_entropy(hidden, w, target, reduction=reduction), [hidden, w]),
    ):
        torch.testing.assert_close(out, want, equal_nan=True)
        if reduction != "mean":  # 0 / 0
            assert all(not g.any() for g in torch.autograd.grad(out.sum(), inputs))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cross_entropy_of_large_logits(dtype: torch.dtype, generator: torch.Generator) -> None:
    # exp(x - logsumexp) of logits around 1,000 would have an error of 3e-5 from logsumexp alone.
    (x,) = draw("x", 40, 9000, dtype, generator)
    x = (x.detach() + 1000).requires_grad_()
    target = torch.randint(0, 9000, (40,), device="cuda", generator=generator)
    wide = x.detach().double().requires_grad_()
    judges = numerics.Judge(dtype), numerics.Judge(dtype)
    found = []
    for call, own in ((ops.cross_entropy, x), (F.cross_entropy, x), (F.cross_entropy, wide)):
        losses = call(own, target, reduction="none")
        found.append((losses, *torch.autograd.grad(losses.sum(), own)))
    for judge, got, own, want in zip(judges, *found, strict=True):
        judge.add("large logits", got, own, want)
        judge.finish()


@pytest.mark.parametrize("columns", [5, 40, 9000, 131072])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_cross_entropy_of_classes_that_are_masked_out(smoothing: float, columns: int) -> None:
    x = torch.randn(3, columns, device="cuda")
    x[0, 2] = x[1, 4] = -Inf  # the target of the first row, another class of the second
    target = torch.tensor([2, 0, 1], device="cuda")
    got, want = (
        call(x, target, reduction="none", label_smoothing=smoothing)
        for call in (ops.cross_entropy, F.cross_entropy)
    )
    assert got[0] == Inf
    torch.testing.assert_close(got, want)


def test_cross_entropy_of_rows_that_are_ignored_or_have_no_class() -> None:
    x = torch.randn(6, 40, device="cuda", requires_grad=True)
    target = torch.tensor([-100, 3, -1, 40, 2**40, 39], device="cuda")
    out = ops.cross_entropy(x, target, reduction="none")
    (grad,) = torch.autograd.grad(out.sum(), x)
    for found in (out[:, None], grad):
        assert not found[0].any()
        assert found[2:5].isnan().all()
        assert found[[1, 5]].isfinite().all()


# In several blocks of classes, if gradients are computed later, in several parts of the rows, and
# in several blocks of rows.
@pytest.mark.parametrize(
    ("rows", "features", "classes"), [(8192, 64, 9001), (2500, 4096, 24001), (2000, 16, 262152)]
)
@pytest.mark.parametrize("options", [{}, {"recompute": True, "label_smoothing": 0.1}], ids=str)
@pytest.mark.usefixtures("freed_memory")
def test_linear_cross_entropy(options: Any, rows, features, classes, generator) -> None:
    cases.need_memory(30)
    x, w = (draw("x", n, features, torch.bfloat16, generator)[0] for n in (rows, classes))
    (b,) = draw("w", 1, classes, torch.bfloat16, generator)
    target = torch.randint(0, classes, (rows,), device="cuda", generator=generator)
    target[5] = -100
    tensors = (x, w, b)

    def run(call: Any, tensors: Any) -> list[Tensor]:
        x, w, b = tensors
        loss = call(x, w, target, b)
        return [loss, *torch.autograd.grad(loss, tensors, torch.full_like(loss, 3))]

    def ours(x: Tensor, w: Tensor, target: Tensor, b: Tensor) -> Tensor:
        return ops.linear_cross_entropy(x, w, target, linear_bias=b, **options)

    def torchs(x: Tensor, w: Tensor, target: Tensor, b: Tensor) -> Tensor:
        smoothing = options.get("label_smoothing", 0.0)
        return F.cross_entropy(F.linear(x, w, b), target, label_smoothing=smoothing)

    got, own = run(ours, tensors), run(torchs, tensors)
    want = run(torchs, [each.detach().double().requires_grad_() for each in tensors])
    for name, *each in zip(("loss", "x", "weight", "bias"), got, own, want, strict=True):
        judge = numerics.Judge(torch.bfloat16)
        judge.add(f"{name} {rows} x {classes}", *each)
        judge.finish()
    assert all(map(torch.equal, got, run(ours, tensors)))


def test_linear_cross_entropy_of_float16_keeps_small_gradients(generator) -> None:
    x, w = (draw("x", n, 64, torch.float16, generator)[0] for n in (4096, 4000))
    target = torch.zeros(4096, dtype=torch.int64, device="cuda")
    found = []
    for call in (ops.linear_cross_entropy, lambda x, w, t: F.cross_entropy(F.linear(x, w), t)):
        with torch.autocast("cuda", torch.float16):
            loss = call(x, w, target)
        assert loss.dtype == torch.float32
        found.append(torch.autograd.grad(loss * 65536, w)[0])
    got, want = (each.float() for each in found)
    assert (got - want).norm() <= 1e-2 * want.norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_are_scaled_in_place(dtype: torch.dtype, generator: torch.Generator) -> None:
    for first, count in ((0, 4096), (1, 4096), (0, 1001), (0, 1)):
        x = torch.randn(first + count, device="cuda", generator=generator).to(dtype)[first:]
        for number in (1.0, -3.5, 0.0):
            factor = torch.full((), number, device="cuda", dtype=dtype)
            want, version = x * factor, x._version
            ops._scale_into(x, factor)
            assert torch.equal(x, want)
            assert x._version == version + 1


def test_a_graph_is_replayed(generator: torch.Generator) -> None:
    x, w = (t.detach() for t in draw("xw", 100, 4096, torch.bfloat16, generator))

    def call() -> list[Tensor]:
        out, _, mean, rstd = ops._norm(x, None, w.shape, w, None, None, True)
        args = (out, None, x, mean, rstd, w, 1, None, True, True, torch.bfloat16)
        return [out, *ops._norm_backward(*args), ops.softmax(out, -1)]

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    x.copy_(x.flip(0))
    graph.replay()
    assert all(map(torch.equal, captured, call()))


@pytest.mark.usefixtures("freed_memory")
def test_more_than_2_to_31_elements() -> None:
    cases.need_memory(14)
    x = torch.ones(2**20 + 1, 2056, device="cuda", dtype=torch.bfloat16)
    x[-1, ::2] = 3
    out = ops.softmax(x, -1)
    assert torch.equal(out[-1], ops.softmax(x[-1:].clone(), -1)[0])
    assert torch.equal(out[12345], out[0])
    del out
    out = ops.rms_norm(x, (2056,))
    assert torch.equal(out[-1], ops.rms_norm(x[-1:].clone(), (2056,))[0])


def test_under_autocast_they_run_in_float32(generator: torch.Generator) -> None:
    x, w = draw("xw", 9, 64, torch.bfloat16, generator)
    with torch.autocast("cuda", torch.bfloat16):
        for got, want in (
            (ops.softmax(x, -1), torch.softmax(x, -1)),
            (ops.layer_norm(x, (64,), w), F.layer_norm(x, (64,), w)),
        ):
            assert got.dtype == want.dtype == torch.float32
            torch.testing.assert_close(got, want)
        assert ops.softmax(x, -1, dtype=torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "cross_entropy"])
def test_under_autocast_and_vmap_they_do(name: str, generator: torch.Generator) -> None:
    x, w = draw("xw", 27, 64, torch.bfloat16, generator)
    x, target = x.detach().view(3, 9, 64).requires_grad_(), torch.arange(9, device="cuda")
    op = {
        "rms_norm": lambda x: ops.rms_norm(x, (64,), w),
        "layer_norm": lambda x: ops.layer_norm(x, (64,), w, w),
        "cross_entropy": lambda x: ops.cross_entropy(x, target),
    }[name]
    with torch.autocast("cuda", torch.bfloat16):
        out, want = torch.func.vmap(op)(x), torch.stack([op(sample) for sample in x])
        of_samples = torch.func.vmap(torch.func.grad(lambda x: op(x).square().sum()))(x)
    assert out.dtype == want.dtype == torch.float32
    torch.testing.assert_close(out, want)
    inputs = (x,) if name == "cross_entropy" else (x, w)
    got, wanted = (torch.autograd.grad(y.square().sum(), inputs) for y in (out, want))
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(of_samples, wanted[0])


def test_float64_is_refused() -> None:
    x = torch.ones(3, 4, device="cuda", dtype=torch.float64)
    for call in (lambda: ops.softmax(x, -1), lambda: ops.rms_norm(x, (4,))):
        with pytest.raises(RuntimeError, match=r"\[no_kernel\].*float16, bfloat16 or float32"):
            call()


def test_compiled(generator: torch.Generator) -> None:
    x, w = draw("xw", 64, 512, torch.bfloat16, generator)

    def loss(x: Tensor, w: Tensor) -> Tensor:
        y, total = ops.add_rms_norm(x, x, w.shape, w)
        return (ops.softmax(y, -1) * total).sum()

    got = torch.autograd.grad(torch.compile(loss, fullgraph=True)(x, w), (x, w))
    torch.testing.assert_close(got, torch.autograd.grad(loss(x, w), (x, w)))


def test_they_are_batch_invariant_with_or_without_the_switch(generator) -> None:
    (x,) = draw("x", 50, 3000, torch.bfloat16, generator)
    with torch_cubin.batch_invariant():
        inside = ops.softmax(x, -1)
    assert torch.equal(inside, ops.softmax(x, -1))
