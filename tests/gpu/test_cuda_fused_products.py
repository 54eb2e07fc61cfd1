"""_linear_glu, _linears and activations with what their derivative keeps: one kernel on Hopper.

Exact on small integers; others within the rule of numerics.Judge, of which PyTorch's own kernels
are the measure; odd sizes and layouts, which are composed, too.
"""

from __future__ import annotations

import json
from pathlib import Path

import numerics
import pytest
import torch
import torch.nn.functional as F
from gpu import cases
from gpu.profiled import kernels_that_run
from gpu.repeats import count_different
from torch import Tensor

import torch_cubin

pytestmark = pytest.mark.usefixtures("nan_memory")

ops = torch.ops.cubin
DTYPES = [torch.bfloat16, torch.float16]
ACTIVATIONS = {
    "none": lambda x: x.clone(),
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}
# M, K, N: what one kernel takes (whole tiles and tails, several waves, clusters of odd rows, short
# K; at most 64 rows, with K whole and split), and what it does not (few tiles, a short K of few
# rows, odd rows of outputs or operands).
TAKEN = [
    (4096, 256, 2048), (1000, 200, 4104), (129, 64, 16384), (8200, 72, 1032), (300, 8, 9000),
    (65, 1000, 20000), (2048, 4096, 5632), (6000, 640, 136),
    (16, 512, 4096), (1, 2048, 8192), (5, 8200, 72), (13, 4104, 2056), (33, 1096, 28672),
    (64, 2048, 1024),
]  # fmt: skip
OTHERS = [(1, 64, 64), (512, 512, 64), (300, 264, 1001), (300, 261, 2000)]


def integers(shape, dtype, generator, most: int = 2) -> Tensor:
    return torch.randint(-most, most + 1, shape, generator=generator, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [*TAKEN, *OTHERS], ids=str)
def test_small_integers_are_exact(sizes, dtype, generator: torch.Generator) -> None:
    m, k, n = sizes
    x = integers((m, k), dtype, generator, 1)
    gate, up = (integers((n, k), dtype, generator, 1) * (torch.rand(n, k, device="cuda") < 8 / k)
                for _ in range(2))  # fmt: skip
    gate, up = gate.to(dtype), up.to(dtype)
    bias = integers((n,), dtype, generator)
    g, u = x.double() @ gate.double().t(), x.double() @ up.double().t()
    label = f"{sizes}"
    for activation, own in (("none", g), ("relu", g.relu())):
        numerics.check_exact(ops._linear_glu(x, gate, up, activation), own * u, label)
        results = ops._linear_glu_aux(x, gate, up, activation)
        for out, expected in zip(results, (own * u, g, u), strict=True):
            numerics.check_exact(out, expected, f"aux {label}")
    for given in (bias, None):
        sums = g if given is None else g + bias.double()
        for activation, expected in (("relu", sums.relu()), ("none", sums)):
            out, aux = ops._linear_activation_aux(x, gate, given, activation)
            numerics.check_exact(out, expected, f"activation {label}")
            numerics.check_exact(aux, sums, f"activation's aux {label}")
    grad = integers((m, 24), dtype, generator)
    weight = integers((24, n), dtype, generator)
    expected = torch.where(g > 0, grad.double() @ weight.double(), 0.0)
    out = ops._linear_activation_backward(grad, weight, g.to(dtype), "relu")
    numerics.check_exact(out, expected, f"backward {label}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_several_weights_are_exact(dtype, generator: torch.Generator) -> None:
    for m, k, sizes in (
        (4096, 256, (2048, 512, 512)), (1000, 200, (4104, 8, 1032, 264)), (129, 72, (8000, 9000)),
        (700, 640, (640,) * 7), (300, 264, (1000, 1001, 1040)), (16, 512, (512, 512)),
        (1, 2048, (2048, 512, 512)), (7, 4104, (4096, 1032, 8, 1032)), (27, 1000, (72, 16, 10504)),
        (64, 512, (28672,) * 3), (33, 8200, (136, 136)),
        (512, 64, (64,)), (2000, 64, (0, 2048, 1024)), (0, 64, (64, 64)), (2000, 0, (512, 512)),
    ):  # fmt: skip
        x = integers((m, k), dtype, generator)
        weights = [integers((n, k), dtype, generator) for n in sizes]
        biases = [integers((n,), dtype, generator) for n in sizes]
        mixed = [None if i % 2 else bias for i, bias in enumerate(biases)]
        one = [bias[:1] if bias.numel() else bias for bias in biases]
        odd = [cases.place(bias, cases.Layout(step=2)) for bias in biases]
        for given in ([], biases, mixed, one, odd):
            outs = ops._linears(x, weights, given)
            for i, out in enumerate(outs):
                expected = x.double() @ weights[i].double().t()
                if given and given[i] is not None:
                    expected = expected + given[i].double()
                numerics.check_exact(out, expected, f"{(m, k, sizes)} weight {i}")


def test_a_gated_layer_allocates_its_result_alone(generator: torch.Generator) -> None:
    """By tiles, and of few rows."""

    def requested(when: str) -> int:
        # Not memory_allocated(): a block from the cache may be larger than what was asked for.
        return torch.cuda.memory_stats()[f"requested_bytes.all.{when}"]

    for m in (4096, 16):
        x = integers((m, 512), torch.bfloat16, generator)
        gate, up = (integers((2048, 512), torch.bfloat16, generator) for _ in range(2))
        ops._linear_glu(x, gate, up, "silu")
        torch.cuda.reset_peak_memory_stats()
        before = requested("current")
        out = ops._linear_glu(x, gate, up, "silu")
        assert requested("peak") - before == out.numel() * out.element_size(), m


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_errors_against_pytorch(activation: str, dtype, generator: torch.Generator) -> None:
    function = ACTIVATIONS[activation]
    for m, k, n in (
        (1024, 512, 2048), (520, 1000, 4104), (65, 264, 20000), (16, 512, 512), (1, 2048, 8192),
        (50, 4096, 1032),
    ):  # fmt: skip
        x = cases.draw((m, k), dtype, False, generator)
        gate, up = (cases.draw((n, k), dtype, False, generator) * k**-0.5 for _ in range(2))
        bias = cases.draw((n,), dtype, False, generator)
        g, u = F.linear(x.double(), gate.double()), F.linear(x.double(), up.double())
        own = F.linear(x, gate), F.linear(x, up)
        label = f"{(m, k, n)}"
        exact = function(g) * u
        numerics.check_close(
            ops._linear_glu(x, gate, up, activation), function(own[0]) * own[1], exact, label
        )
        out, gate_out, up_out = ops._linear_glu_aux(x, gate, up, activation)
        numerics.check_close(out, function(own[0]) * own[1], exact, label)
        numerics.check_close(gate_out, own[0], g, label)
        numerics.check_close(up_out, own[1], u, label)
        sums = g + bias.double()
        out, aux = ops._linear_activation_aux(x, gate, bias, activation)
        own_sums = F.linear(x, gate, bias)
        numerics.check_close(out, function(own_sums), function(sums), label)
        numerics.check_close(aux, own_sums, sums, label)
        if activation == "none":
            continue
        grad = cases.draw((m, 64), dtype, False, generator)
        weight = cases.draw((64, n), dtype, False, generator)
        before = aux.double().requires_grad_()
        (derivative,) = torch.autograd.grad(function(before).sum(), before)
        exact = derivative * (grad.double() @ weight.double())
        before = aux.detach().requires_grad_()
        (own_grad,) = torch.autograd.grad(function(before), before, grad @ weight)
        out = ops._linear_activation_backward(grad, weight, aux, activation)
        numerics.check_close(out, own_grad, exact, f"backward {label}")


def test_infinities_and_nan(generator: torch.Generator) -> None:
    """As PyTorch's: a NaN in a row of x spoils that row alone, and rows past M are not read."""
    x = cases.draw((1030, 128), torch.bfloat16, False, generator)
    gate, up = (cases.draw((2048, 128), torch.bfloat16, False, generator) for _ in range(2))
    x[7] = torch.nan
    x[1029, 3] = torch.inf
    out = ops._linear_glu(x, gate, up, "silu")
    own = F.silu(F.linear(x, gate)) * F.linear(x, up)
    assert torch.equal(out.isnan(), own.isnan())
    assert out[7].isnan().all()
    assert not out[:7].isnan().any()


@pytest.mark.parametrize(
    "layout",
    [
        cases.Layout(pad=8),
        cases.Layout(pad=8, offset=8),
        cases.Layout(pad=1),
        cases.Layout(offset=1),
        cases.Layout(order=(1, 0)),
        cases.Layout(step=2),
    ],
    ids=str,
)
def test_layouts(layout, generator: torch.Generator) -> None:
    values = [integers(shape, torch.bfloat16, generator) for shape in ((520, 96), (2056, 96))]
    for i in range(3):
        x, gate, up = values[0], values[1], values[1].flip(0)
        expected = (x.double() @ gate.double().t()), (x.double() @ up.double().t())
        own = [x, gate, up]
        own[i] = cases.place(own[i], layout)
        outs = ops._linears(own[0], own[1:], [])
        for out, wanted in zip(outs, expected, strict=True):
            numerics.check_exact(out, wanted, f"linears {layout} {i}")
        results = ops._linear_glu_aux(*own, "relu")
        wanted = expected[0].relu() * expected[1]
        rounds = wanted.to(torch.bfloat16)
        composed = expected[0].relu().to(torch.bfloat16) * expected[1].to(torch.bfloat16)
        assert torch.equal(results[0], rounds) or torch.equal(results[0], composed)
        numerics.check_exact(results[1], expected[0], f"glu {layout} {i}")


def test_batches_of_rows(generator: torch.Generator) -> None:
    x = integers((3, 5, 100, 64), torch.float16, generator)
    gate, up = (integers((1024, 64), torch.float16, generator, 1) for _ in range(2))
    for given in (x, x.transpose(0, 1), x[:, :, ::2]):
        out = ops._linear_glu(given, gate, up, "none")
        expected = (given.double() @ gate.double().t()) * (given.double() @ up.double().t())
        torch.testing.assert_close(out.double(), expected, rtol=2**-9, atol=0)
        outs = ops._linears(given, [gate, up], [])
        numerics.check_exact(outs[1], given.double() @ up.double().t(), "batches")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_dtypes_are_composed(dtype, generator: torch.Generator) -> None:
    x = integers((300, 64), dtype, generator)
    gate, up = (integers((520, 64), dtype, generator) for _ in range(2))
    g, u = x.double() @ gate.double().t(), x.double() @ up.double().t()
    numerics.check_exact(ops._linear_glu(x, gate, up, "relu"), g.relu() * u, "glu")
    numerics.check_exact(ops._linears(x, [gate, up], [])[1], u, "linears")
    numerics.check_exact(ops._linear_activation_aux(x, gate, None, "relu")[0], g.relu(), "aux")


def test_results_are_deterministic(generator: torch.Generator) -> None:
    x = cases.draw((3000, 1024), torch.bfloat16, False, generator)
    gate, up = (cases.draw((4104, 1024), torch.bfloat16, False, generator) for _ in range(2))
    first = ops._linear_glu_aux(x, gate, up, "gelu")
    for _ in range(30):
        for out, expected in zip(ops._linear_glu_aux(x, gate, up, "gelu"), first, strict=True):
            numerics.check_bits(out, expected)


def test_batch_invariant_rows(generator: torch.Generator) -> None:
    x = cases.draw((600, 1024), torch.bfloat16, False, generator)
    gate, up = (cases.draw((4096, 1024), torch.bfloat16, False, generator) for _ in range(2))
    with torch_cubin.batch_invariant():
        whole = [
            ops._linear_glu(x, gate, up, "silu"),
            *ops._linears(x, [gate, up], []),
            *ops._linear_activation_aux(x, gate, None, "gelu"),
        ]
        for rows in (1, 17, 64, 65, 130):
            part = [
                ops._linear_glu(x[:rows], gate, up, "silu"),
                *ops._linears(x[:rows], [gate, up], []),
                *ops._linear_activation_aux(x[:rows], gate, None, "gelu"),
            ]
            for out, expected in zip(part, whole, strict=True):
                numerics.check_bits(out, expected[:rows].contiguous())


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_batch_invariant_results_do_not_depend_on_gradients(activation, dtype, generator) -> None:
    """One kernel, few tiles, few rows, K in parts, rows of outputs that are no whole vectors."""
    for m, k, n in ((2048, 512, 2048), (130, 512, 1024), (16, 1024, 4096), (300, 8192, 1024),
                    (16, 8192, 1024), (300, 264, 1001), (2000, 64, 4096)):  # fmt: skip
        x = cases.draw((m, k), dtype, False, generator)
        gate, up = (cases.draw((n, k), dtype, False, generator) * k**-0.5 for _ in range(2))
        bias = cases.draw((n,), dtype, False, generator)
        calls = (
            lambda gate, up, bias, x=x: ops._linear_glu(x, gate, up, activation),
            lambda gate, up, bias, x=x: ops.linear(x, gate, bias, activation=activation),
            lambda gate, up, bias, x=x: ops.linear(x, gate, activation=activation),
        )
        with torch_cubin.batch_invariant():
            for i, call in enumerate(calls):
                with torch.no_grad():
                    alone = call(gate, up, bias)
                kept = call(*(leaf.detach().requires_grad_() for leaf in (gate, up, bias)))
                assert kept.requires_grad
                numerics.check_bits(kept.detach(), alone, f"{(m, k, n)} {i}")
            _, aux = ops._linear_activation_aux(x, gate, bias, activation)
            numerics.check_bits(aux, ops._linear(x, gate, bias), f"{(m, k, n)} aux")


def test_training_step(generator: torch.Generator) -> None:
    """Gradients against float64, by the kernels that keep what the derivative needs."""
    leaves = [
        cases.draw(shape, torch.bfloat16, False, generator) * shape[-1] ** -0.5
        for shape in ((4, 300, 512), (1536, 512), (1536, 512))
    ]
    leaves = [x.requires_grad_() for x in leaves]
    grad = cases.draw((4, 300, 1536), torch.bfloat16, False, generator)
    ours = torch.autograd.grad(ops._linear_glu(*leaves, "silu"), leaves, grad)
    x, gate, up = leaves
    own = torch.autograd.grad(F.silu(F.linear(x, gate)) * F.linear(x, up), leaves, grad)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    x, gate, up = exact
    reference = torch.autograd.grad(
        F.silu(F.linear(x, gate)) * F.linear(x, up), exact, grad.double()
    )
    for a, b, c in zip(ours, own, reference, strict=True):
        numerics.check_close(a, b, c, "gradient")


def test_in_a_graph_and_on_a_stream(generator: torch.Generator) -> None:
    x = integers((1024, 256), torch.bfloat16, generator)
    weights = [integers((n, 256), torch.bfloat16, generator) for n in (1024, 264, 520)]
    expected = [x.double() @ w.double().t() for w in weights]
    ops._linears(x, weights, [])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = ops._linears(x, weights, [])
    graph.replay()
    for out, wanted in zip(outs, expected, strict=True):
        numerics.check_exact(out, wanted, "graph")


def test_every_gated_kernel_of_few_rows_runs(generator: torch.Generator) -> None:
    with kernels_that_run() as ran:
        for dtype in DTYPES:
            for m in (8, 16, 32, 64):
                x = integers((m, 2048), dtype, generator)
                gate, up = (integers((512, 2048), dtype, generator) for _ in range(2))
                ops._linear_glu(x, gate, up, "silu")
    manifest = Path(torch_cubin.__file__).parent / "cubins" / "manifest.json"
    kernels = json.loads(manifest.read_text())["kernels"]
    assert {k["name"] for k in kernels if k["kind"] == "sm90_skinny_gated"} - ran == set()


def test_gated_results_of_few_rows_repeat(generator: torch.Generator) -> None:
    """A cluster's blocks exchange the sums of both layers: their order must not show."""
    x = cases.draw((64, 4096), torch.bfloat16, False, generator)
    gate, up = (cases.draw((2048, 4096), torch.bfloat16, False, generator) for _ in range(2))
    call = lambda: [ops._linear_glu(x, gate, up, "silu"), *ops._linears(x, [gate, up], [])]  # noqa: E731
    assert count_different(call, call()) == 0


def test_a_chain_of_few_rows_reads_what_the_kernel_before_wrote(generator: torch.Generator) -> None:
    """Blocks that start early must load neither tokens nor weights too soon."""
    identity = torch.eye(1024, device="cuda", dtype=torch.bfloat16)
    for _ in range(50):
        x = integers((16, 1024), torch.bfloat16, generator, 1)
        expected, got = x.double(), x
        for shift in range(6):
            moved, twice = identity.roll(shift, 1), 2 * identity
            first, second = ops._linears(got, [moved, twice], [])
            got = ops._linear_glu(first - second, moved, identity, "relu") - first
            wanted = expected @ moved.double().t()
            difference = wanted - 2 * expected
            expected = (difference @ moved.double().t()).relu() * difference - wanted
            got = got.sign()
            expected = expected.sign()
        assert torch.equal(got.double(), expected)
