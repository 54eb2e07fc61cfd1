"""Epilogues: linear(activation=) and addmm, in the kernel or in a second one, rounded once."""

from __future__ import annotations

import itertools

import numerics
import pytest
import torch
import torch.nn.functional as F
from gpu import cases

import torch_cubin

pytestmark = pytest.mark.usefixtures("nan_memory")

ops = torch.ops.cubin
ACTIVATIONS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}
# M, N, K: one block, whole tiles, tails, rows that are not whole vectors, few rows and columns, a
# split K.
SHAPES = [
    (512, 512, 512), (4096, 1024, 256), (300, 264, 1000), (129, 131, 67), (1, 4096, 4096),
    (4, 1000, 512), (64, 1024, 2048), (16, 128, 16384), (2048, 3, 100), (1, 1, 5), (700, 1, 64),
]  # fmt: skip


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def check(out, reference, mode: str, k: int, label: str) -> None:
    """Within what float32 sums (TF32 products) and one rounding to the dtype may differ."""
    dtype = out.dtype
    eps = torch.finfo(dtype).eps * (0.51 if dtype.itemsize == 2 else 4)
    # The sums are near 1, whatever K is: products are rounded by TF32, sums in every other mode.
    sums = {"tf32": 2.0**-7, "float64": 2.0**-48 * k**0.5}.get(mode, 2.0**-18 * k**0.5)
    limit = eps * reference.abs() + sums
    worst = ((out.double() - reference).abs() - limit).max().item()
    assert not numerics.exceeds(worst, 0.0), f"{label}: {worst:.3e} over the limit"


def smooth(mode: str, shape, generator) -> torch.Tensor:
    return cases.draw(shape, cases.MODES[mode], False, generator)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("mode", cases.MODES)
def test_activations(mode: str, name: str, generator: torch.Generator) -> None:
    with cases.math_mode(mode), torch.no_grad():
        for m, n, k in SHAPES:
            x, weight = smooth(mode, (m, k), generator), smooth(mode, (n, k), generator)
            weight *= k**-0.5  # where activations bend
            bias = smooth(mode, (n,), generator)
            for own in (bias, None, bias[:1].expand(n)):
                out = ops.linear(x, weight, own, activation=name)
                sums = numerics.reference_linear(x, weight, own)
                check(out, ACTIVATIONS[name](sums), mode, k, f"{mode} {name} {(m, n, k)}")


@pytest.mark.parametrize("mode", cases.MODES)
def test_relu_and_factors_are_exact_on_small_integers(mode: str, generator) -> None:
    """Epilogues in the kernel and in a second kernel give the same; all strides of an addend."""
    wrong = []
    with cases.math_mode(mode) as dtype, torch.no_grad():
        for (m, n, k), layout in itertools.product(SHAPES, ("nt", "nn")):
            a = cases.draw((m, k), dtype, True, generator)
            b = cases.draw((k, n), dtype, True, generator)
            b = b.t().contiguous().t() if layout == "nt" else b
            exact = a.double() @ b.double()
            bias = cases.draw((n,), dtype, True, generator)
            out = ops.linear(a, b.t(), bias, activation="relu")
            if not torch.equal(out, (exact + bias.double()).relu().to(dtype)):
                wrong.append(f"relu {(m, n, k)} {layout}")
            whole = cases.draw((m, n), dtype, True, generator)
            addends = {
                "whole": whole,
                "columns": cases.place(whole, cases.Layout(order=(1, 0))),
                "padded": cases.place(whole, cases.Layout(pad=3, offset=1)),
                "steps": cases.place(whole, cases.Layout(step=2)),
                "row": whole[:1],
                "column": whole[:, :1],
                "vector": whole[0],
                "number": whole[0, 0],
            }
            for (what, addend), (beta, alpha) in itertools.product(
                addends.items(), ((1, 1), (0.5, -2), (-3, 1))
            ):
                out = ops.addmm(addend, a, b, beta=beta, alpha=alpha)
                expected = (beta * addend.double() + alpha * exact).to(dtype)
                if not torch.equal(out, expected.expand(m, n)):
                    wrong.append(f"addmm {what} {(m, n, k)} {layout} {beta} {alpha}")
    assert wrong == []


@pytest.mark.parametrize("mode", cases.MODES)
def test_batches_of_addmm(mode: str, generator) -> None:
    wrong = []
    with cases.math_mode(mode) as dtype, torch.no_grad():
        for a_batch, b_batch, added in (
            ((3,), (3,), (3, 72, 40)), ((2, 3), (3,), (2, 1, 72, 1)), ((4, 1), (5,), (5, 1, 40)),
            ((3,), (), (3, 72, 40)), ((3,), (), (72, 40)), ((), (6,), (6, 72, 40)),
            ((2, 1, 2, 1), (3, 1, 2), (1, 1, 1, 2, 1, 40)),
        ):  # fmt: skip
            a = cases.draw((*a_batch, 72, 200), dtype, True, generator)
            b = cases.draw((*b_batch, 200, 40), dtype, True, generator)
            addend = cases.draw(added, dtype, True, generator)
            out = ops.addmm(addend, a, b, beta=2, alpha=0.5)
            expected = (2 * addend.double() + 0.5 * (a.double() @ b.double())).to(dtype)
            if not torch.equal(out, expected):
                wrong.append(f"{a_batch} {b_batch} {added}")
    assert wrong == []


@pytest.mark.parametrize("mode", ["float16", "bfloat16", "float32"])
def test_one_row_is_added_to_every_batch(mode: str, generator) -> None:
    """Where batches could run on as columns, whose number the row does not have."""
    with cases.math_mode(mode) as dtype, torch.no_grad():
        for batch, m, n, k in ((3, 1, 4, 1), (5, 1, 64, 128), (4, 1, 40, 200), (3, 7, 24, 1)):
            row = cases.draw((n,), dtype, True, generator)
            one = cases.draw((m, k), dtype, True, generator)
            runs_on = cases.draw((k, batch, n), dtype, True, generator).permute(1, 0, 2)
            for a in (one, one.expand(batch, m, k)):
                for b in (runs_on, runs_on.contiguous()):
                    expected = (row.double() + a.double() @ b.double()).to(dtype)
                    assert torch.equal(ops.addmm(row, a, b), expected), (batch, m, n, k)


@pytest.mark.parametrize("mode", ["float16", "bfloat16"])
def test_a_sum_is_rounded_after_it_is_taken(mode: str, generator) -> None:
    with torch.no_grad():
        a, b = smooth(mode, (256, 512), generator), smooth(mode, (512, 128), generator)
        near = -(a @ b)
        out = ops.addmm(near, a, b)
        exact = near.double() + a.double() @ b.double()
        torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=2e-4)
        high = torch.full((256, 128), 60000.0, device="cuda", dtype=torch.float16)
        product = ops.addmm(
            -high, torch.full_like(high[:, :64], 200), torch.full_like(high[:64], 8)
        )
        assert torch.equal(product, torch.full_like(high, 42400.0))


def test_operands_with_a_zero_factor_are_not_read(generator) -> None:
    nan = torch.full((128, 64), torch.nan, device="cuda", dtype=torch.bfloat16)
    a, b = torch.ones_like(nan), torch.ones_like(nan).t()
    with torch.no_grad():
        ones = torch.ones(128, 128, device="cuda", dtype=torch.bfloat16)
        whole = torch.full_like(ones, torch.nan)
        assert torch.equal(ops.addmm(whole, a, b, beta=0, alpha=2), 128 * ones)
        assert torch.equal(ops.addmm(ones, nan, b, beta=3, alpha=0), 3 * ones)
        assert torch.equal(ops.addmm(ones, a[:, :0], b[:0], beta=3), 3 * ones)


def test_special_values_pass_through_activations() -> None:
    """Infinities and NaN as torch's activations of the same sums, in every kernel."""
    values = [-torch.inf, -1e30, -100.0, -0.0, 0.0, 1e-30, 100.0, 1e30, torch.inf, torch.nan]
    for dtype, rows in itertools.product((torch.bfloat16, torch.float32), (8, 512)):
        column = torch.tensor(values, device="cuda", dtype=dtype)
        bias = column.repeat(32)
        x = torch.zeros(rows, 64, device="cuda", dtype=dtype)
        weight = torch.zeros(bias.numel(), 64, device="cuda", dtype=dtype)
        for name, function in ACTIVATIONS.items():
            with torch.no_grad():
                out = ops.linear(x, weight, bias, activation=name)
            expected = function(bias.double()).to(dtype).expand_as(out)
            torch.testing.assert_close(
                out, expected, rtol=0.02, atol=1e-6, equal_nan=True, msg=f"{dtype} {rows} {name}"
            )


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_batch_invariant(name: str, generator) -> None:
    """The activation of a few rows runs in another kernel than that of many."""
    for mode in ("bfloat16", "tf32"):
        with cases.math_mode(mode), torch.no_grad(), torch_cubin.batch_invariant():
            x, weight = smooth(mode, (4096, 1024), generator), smooth(mode, (2048, 1024), generator)
            bias = smooth(mode, (2048,), generator)
            full = ops.linear(x, weight, bias, activation=name)
            sums = ops.addmm(bias, x, weight.t(), beta=0.5, alpha=2)
            for rows in (1, 5, 17, 64, 100, 300):
                part = ops.linear(x[:rows], weight, bias, activation=name)
                numerics.check_bits(part, full[:rows], f"{mode} {name} {rows}")
                part = ops.addmm(bias, x[:rows], weight.t(), beta=0.5, alpha=2)
                numerics.check_bits(part, sums[:rows], f"{mode} addmm {rows}")


def test_gradients(generator) -> None:
    results = []
    for own in (True, False):
        torch.manual_seed(0)
        x, weight, bias = (
            torch.randn(s, device="cuda", dtype=torch.float64).requires_grad_()
            for s in ((50, 70), (30, 70), (30,))
        )
        if own:
            out = ops.addmm(bias, ops.linear(x, weight, bias, activation="gelu"), weight[:, :30],
                            beta=2, alpha=3)  # fmt: skip
        else:
            out = 2 * bias + 3 * (F.gelu(F.linear(x, weight, bias)) @ weight[:, :30])
        out.square().sum().backward()
        results.append([out.detach(), x.grad, weight.grad, bias.grad])
    torch.testing.assert_close(*results)


def test_drop_in_serves_factors_in_16_bits(generator) -> None:
    a = cases.draw((512, 256), torch.bfloat16, True, generator)
    b = cases.draw((256, 384), torch.bfloat16, True, generator)
    c = cases.draw((512, 384), torch.bfloat16, True, generator)
    with torch.no_grad(), torch_cubin.drop_in():
        single = torch.addmm(c, a, b, beta=0.5, alpha=2)
        batched = torch.baddbmm(c[None], a[None], b[None], beta=0.5, alpha=2)
    exact = (0.5 * c.double() + 2 * (a.double() @ b.double())).to(torch.bfloat16)
    assert torch.equal(single, exact)
    assert torch.equal(batched[0], exact)
    assert torch_cubin.report().declined == ()


def test_cuda_graph(generator) -> None:
    x, weight = smooth("bfloat16", (300, 512), generator), smooth("bfloat16", (64, 512), generator)
    with torch.no_grad():
        expected = ops.linear(x, weight, activation="silu")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = ops.linear(x, weight, activation="silu")
        graph.replay()
        numerics.check_bits(out, expected)
