"""Sinks that learn: the fused kernels, forward and backward, and their gradient against float64."""

from __future__ import annotations

import math

import attention_cases as ac
import attention_reference as ar
import pytest
import torch
from ops.attention_samples import formula
from profiled import kernels_that_run
from torch import Tensor

HEADS, GROUP = 8, 4


def gradient_of_sinks(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, sinks: Tensor, kept: Tensor | None, options: dict
) -> tuple[Tensor, Tensor]:
    """By autograd in float64, not by a formula; and the size of a sum of its terms with random
    signs."""
    own = sinks.detach().double().requires_grad_()
    out, logsumexp = formula(q, k, v, kept=kept, sinks=own, **options)
    sink_weight = torch.exp(own[:, None] - logsumexp).detach()
    grad = grad.double()
    (wanted,) = torch.autograd.grad(out, own, grad)
    terms = sink_weight.square() * (out.detach() * grad).square().sum(-1)
    return wanted, terms.sum((0, 2)).sqrt()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kind", ["causal", "window", "dropout"])
@pytest.mark.parametrize("name", ac.FUSED)
def test_gradients(name: str, kind: str, head_dim: int, nan_memory) -> None:
    g = ac.generator(f"{name} {kind} {head_dim}")
    dtype, rows = ac.DTYPES[name], 900
    q, grad = (ac.draw((2, HEADS, rows, head_dim), dtype, g) for _ in range(2))
    k, v = (ac.draw((2, HEADS // GROUP, rows, head_dim), dtype, g) for _ in range(2))
    sinks = torch.randn(HEADS, generator=g, device=ac.DEVICE) + 2  # of some weight
    options = {"is_causal": True, "enable_gqa": True}
    if kind == "window":
        options["window_left"] = 127
    elif kind == "dropout":
        options |= ac.score_options("dropout", 2, HEADS, g)
    rest, kept = ar.without_dropout(options, (2, HEADS, rows, rows))
    want = ar.reference(q, k, v, grad, None, kept, **rest, sinks=sinks)
    wanted, size = gradient_of_sinks(q, k, v, grad, sinks, kept, rest)

    inputs = [x.detach().requires_grad_() for x in (q, k, v, sinks)]
    with kernels_that_run() as names:
        out, _ = torch.ops.cubin.attention_forward(*inputs[:3], **options, sinks=inputs[3])
        out.backward(grad)
    ours = [out.detach(), *(x.grad for x in inputs[:3])]
    ar.check(name, f"{kind} {head_dim}", ours, want)
    error = (inputs[3].grad.double() - wanted).abs()
    limit = {"float32": 1e-5}.get(name, 0.01) * size
    assert bool((error < limit).all()), f"off by {(error / size).max():.1e} of the terms' size"
    # The sinks' gradient by a kernel, and no product of the composition, nor its softmax.
    short = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}[name]
    assert f"delta_attention_{short}" in names
    assert not any("softmax" in x or "matmul" in x for x in names), names
    again = torch.ops.cubin.attention_forward(*inputs[:3], **options, sinks=inputs[3])[0]
    (repeated,) = torch.autograd.grad(again, inputs[3], grad)
    assert torch.equal(repeated, inputs[3].grad)


def test_no_scores_in_memory() -> None:
    """16,384 rows, whose scores would be 8.6 GB in float32."""
    q, k, v = (
        torch.randn(1, 8, 16384, 64, dtype=torch.bfloat16, device=ac.DEVICE).requires_grad_()
        for _ in range(3)
    )
    sinks = torch.randn(8, device=ac.DEVICE).requires_grad_()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, _ = torch.ops.cubin.attention_forward(q, k, v, is_causal=True, sinks=sinks)
    out.sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 40 * q.numel() * q.element_size()
    assert bool(sinks.grad.isfinite().all())


@pytest.mark.parametrize("name", ac.FUSED)
def test_the_op_with_any_layout(name: str, nan_memory) -> None:
    """Rows of partial vectors, views, broadcast gradients, fully masked rows, no rows."""
    g = ac.generator(name)
    op = torch.ops.cubin._attention_sinks_gradient
    for number, (batch, heads, rows, columns) in enumerate(
        [(2, 3, 65, 64), (1, 2, 33, 20), (2, 4, 1, 7), (3, 5, 31, 256), (2, 3, 0, 64), (0, 2, 3, 8)]
    ):
        out, grad = (ac.draw((batch, rows, heads, columns), ac.DTYPES[name], g) for _ in range(2))
        out = out.transpose(1, 2)
        grad = grad.transpose(1, 2)
        logsumexp = torch.randn(batch, heads, rows, generator=g, device=ac.DEVICE)
        logsumexp[:, :, ::7] = -math.inf
        grad[:, :, ::7] = math.nan  # has no part in it
        if number % 2:
            grad = grad[..., :1].expand_as(out)
        sinks = torch.randn(2 * heads, generator=g, device=ac.DEVICE)[::2]
        weights = torch.exp(sinks.double()[:, None] - logsumexp).masked_fill(
            logsumexp == -math.inf, 0.0
        )
        terms = -weights * (out.double() * grad.double()).sum(-1).masked_fill(weights == 0, 0.0)
        ours = op(grad, out, logsumexp, sinks)
        near = terms.square().sum((0, 2)).sqrt() * 1e-5 + 1e-6
        assert ours.shape == sinks.shape
        assert bool(((ours.double() - terms.sum((0, 2))).abs() <= near).all())
    with pytest.raises(RuntimeError, match=r"\[input\]: _attention_sinks_gradient has shapes"):
        op(grad, out, logsumexp[..., :1], sinks)


def test_in_a_graph() -> None:
    q, k, v, grad = (
        torch.randn(2, 8, 700, 64, dtype=torch.bfloat16, device=ac.DEVICE) for _ in range(4)
    )
    tensors = [x.requires_grad_() for x in (q, k, v)]
    sinks = torch.randn(8, device=ac.DEVICE).requires_grad_()

    def step() -> tuple[Tensor, ...]:
        out, _ = torch.ops.cubin.attention_forward(*tensors, is_causal=True, sinks=sinks)
        return torch.autograd.grad(out, (*tensors, sinks), grad)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        sinks += 1
        q *= 0.5
    graph.replay()
    for one, other in zip(captured, step(), strict=True):
        assert torch.equal(one, other)
