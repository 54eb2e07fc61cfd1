"""addmm(out_dtype=torch.float32) and addmm_into: 16-bit products added to float32, in one kernel
where C has rows of 16-byte vectors and both factors are 1, else in two."""

from __future__ import annotations

import itertools

import numerics
import pytest
import torch
from gpu import cases

import torch_cubin

pytestmark = pytest.mark.usefixtures("nan_memory")

ops = torch.ops.cubin
DTYPES = [torch.bfloat16, torch.float16]
# M, N, K: one tile, whole tiles, tails, odd rows, few rows and columns, weight gradients.
SHAPES = [
    (512, 512, 512), (4096, 1024, 256), (300, 264, 1000), (129, 131, 67), (129, 130, 67),
    (1, 4096, 4096), (4, 1000, 512), (16, 128, 16384), (768, 768, 20000), (2048, 3, 100),
    (700, 1, 64), (1, 1, 5), (2, 2, 2),
]  # fmt: skip
FACTORS = [(1, 1), (0.5, -2), (0, 1), (-3, 0)]

LAYOUTS = [
    cases.Layout(),
    cases.Layout(order=(1, 0)),
    cases.Layout(pad=3, offset=1),
    cases.Layout(pad=2, offset=2),
    cases.Layout(offset=1),
    cases.Layout(step=2),
]


def integers(shape, dtype, generator) -> torch.Tensor:
    return torch.randint(-3, 4, shape, generator=generator, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_small_integers_are_exact(layout: str, dtype, generator: torch.Generator) -> None:
    wrong = []
    for m, n, k in SHAPES:
        a, b = integers((m, k), dtype, generator), integers((k, n), dtype, generator)
        a = a.t().contiguous().t() if layout[0] == "t" else a
        b = b.t().contiguous().t() if layout[1] == "t" else b
        product = a.double() @ b.double()
        whole = integers((m, n), torch.float32, generator) + 1e5  # no 16-bit number
        addends = {
            "row": whole[:1],
            "column": whole[:, :1],
            "vector": whole[0],
            "number": whole[0, 0],
            "16 bits": integers((m, n), dtype, generator),
        }
        addends |= {f"{own}": cases.place(whole, own) for own in LAYOUTS}
        for (what, addend), (beta, alpha) in itertools.product(addends.items(), FACTORS):
            expected = (beta * addend.double() + alpha * product).float().expand(m, n)
            out = ops.addmm(addend, a, b, out_dtype=torch.float32, beta=beta, alpha=alpha)
            if out.dtype != torch.float32 or not torch.equal(out, expected):
                wrong.append(f"addmm {what} {(m, n, k)} {beta} {alpha}")
        for own, (beta, alpha) in itertools.product(LAYOUTS, FACTORS):
            into = cases.place(whole, own)
            ops.addmm_into(into, a, b, beta=beta, alpha=alpha)
            if not torch.equal(into, (beta * whole.double() + alpha * product).float()):
                wrong.append(f"addmm_into {own} {(m, n, k)} {beta} {alpha}")
    assert wrong == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_batches(dtype, generator: torch.Generator) -> None:
    wrong = []
    for a_batch, b_batch, added, n in itertools.product(
        ((3,), (2, 3), ()), ((3,), ()), ((3, 72, 40), (72, 1), (2, 1, 1, 40), ()), (40, 41, 1)
    ):
        a = integers((*a_batch, 72, 200), dtype, generator)
        b = integers((*b_batch, 200, n), dtype, generator)
        batch = torch.broadcast_shapes(a_batch, b_batch)
        added = tuple(n if size == 40 else size for size in added)
        if torch.broadcast_shapes(added, (*batch, 72, n)) != (*batch, 72, n):
            continue
        addend = integers(added, torch.float32, generator) + 1e5
        expected = (2 * addend.double() + 0.5 * (a.double() @ b.double())).float()
        out = ops.addmm(addend, a, b, out_dtype=torch.float32, beta=2, alpha=0.5)
        into = addend.expand(expected.shape).contiguous()
        ops.addmm_into(into, a, b, beta=2, alpha=0.5)
        if not (torch.equal(out, expected) and torch.equal(into, expected)):
            wrong.append(f"{a_batch} {b_batch} {added} {n}")
    assert wrong == []


def test_columns_of_batches_are_not_read_as_pairs(generator: torch.Generator) -> None:
    """Batches of one column become columns, whose strides in the addend are any."""
    row = integers((1, 64), torch.bfloat16, generator)
    columns = integers((6, 64, 1), torch.bfloat16, generator)
    addend = (integers((6, 2), torch.float32, generator) + 1e5)[:, :1].unsqueeze(-1)
    out = ops.addmm(addend, row, columns, out_dtype=torch.float32)
    expected = (addend.double() + row.double() @ columns.double()).float()
    assert torch.equal(out, expected)


def test_only_out_is_written(generator: torch.Generator) -> None:
    memory = torch.full((200, 300), 7.0, device="cuda")
    a = integers((64, 48), torch.bfloat16, generator)
    b = integers((48, 80), torch.bfloat16, generator)
    for out in (memory[3:67, 5:85], memory[3:67, 4:84], memory[::2, ::3][:64, :80]):
        before = memory.clone()
        out.fill_(0)
        before = torch.where(memory == 0, memory, before)
        ops.addmm_into(out, a, b)
        assert torch.equal(out, (a.double() @ b.double()).float())
        out.fill_(0)
        assert torch.equal(memory, before)
        memory.fill_(7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_errors_are_those_of_float32_sums(dtype, generator: torch.Generator) -> None:
    for m, n, k in ((1024, 768, 20000), (300, 264, 1000), (129, 131, 2000)):
        a = cases.draw((k, m), dtype, False, generator).t()
        b = cases.draw((k, n), dtype, False, generator)
        c = torch.randn(m, n, generator=generator, device="cuda")
        exact = c.double() + a.double() @ b.double()
        out = ops.addmm(c, a, b, out_dtype=torch.float32)
        own = torch.addmm(c, a, b, out_dtype=torch.float32)
        # Tensor cores truncate a sum at each step of 16 along K; PyTorch may split K into shorter
        # chains, so its error is not a measure for a whole one.
        cut_off = k / 16 * 2.0**-24 * exact.abs().max().item()
        error, of_torch = ((x.double() - exact).abs().max().item() for x in (out, own))
        assert not numerics.exceeds(error, 2 * of_torch + cut_off), ((m, n, k), error, of_torch)


def test_accumulates_the_gradients_of_micro_batches(generator: torch.Generator) -> None:
    main = torch.zeros(768, 1024, device="cuda")
    exact = main.double()
    for _ in range(8):
        grad = integers((512, 768), torch.bfloat16, generator)
        x = integers((512, 1024), torch.bfloat16, generator)
        ops.addmm_into(main, grad.t(), x)
        exact += grad.double().t() @ x.double()
    assert torch.equal(main.double(), exact)


@pytest.mark.parametrize("tokens", [64, 8192])  # one kernel; K split
def test_special_values_of_the_sum_are_kept(tokens: int) -> None:
    grad = torch.zeros(tokens, 256, dtype=torch.bfloat16, device="cuda")
    main = torch.full((256, 256), 1e-40, device="cuda")
    main[1, :4] = torch.tensor([float("nan"), float("inf"), -float("inf"), 2.0**-149])
    out = main.clone()
    ops.addmm_into(out, grad.t(), grad)
    assert torch.equal(out.isnan(), main.isnan())
    numerics.check_bits(out.nan_to_num(nan=0), main.nan_to_num(nan=0))


def test_results_are_deterministic_in_a_graph(generator: torch.Generator) -> None:
    a = cases.draw((12008, 640), torch.bfloat16, False, generator).t()
    b = cases.draw((12008, 640), torch.bfloat16, False, generator)
    c = torch.randn(640, 640, generator=generator, device="cuda")
    first = ops.addmm(c, a, b, out_dtype=torch.float32)
    out = c.clone()
    ops.addmm_into(out, a, b)
    numerics.check_bits(out, first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.addmm_into(out, a, b)
    for _ in range(20):
        out.copy_(c)
        graph.replay()
        numerics.check_bits(out, first)


def test_batch_invariant_rows(generator: torch.Generator) -> None:
    a = cases.draw((300, 4096), torch.bfloat16, False, generator)
    b = cases.draw((4096, 512), torch.bfloat16, False, generator)
    c = torch.randn(300, 512, generator=generator, device="cuda")
    with torch_cubin.batch_invariant():
        whole = ops.addmm(c, a, b, out_dtype=torch.float32)
        for rows in (1, 3, 17, 130):
            part = ops.addmm(c[:rows], a[:rows], b, out_dtype=torch.float32)
            numerics.check_bits(part, whole[:rows].contiguous())
