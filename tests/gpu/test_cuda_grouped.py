"""grouped_matmul on a GPU: exact on small integers for any sizes of groups, wrong ends, graphs,
determinism, derivatives. Memory is full of NaN, so that what a kernel must not read would show.
"""

from __future__ import annotations

import random

import grouped_sizes
import numerics
import pytest
import torch
from gpu import cases
from torch import Tensor

import torch_cubin  # noqa: F401  (registers the ops)

pytestmark = pytest.mark.usefixtures("nan_memory")

op = torch.ops.cubin.grouped_matmul
raw = torch.ops.cubin._grouped_matmul
INT = torch.int32
# Sizes of groups, rows that follow them, N, K: whole tiles and tails, groups without rows, many of
# one row, several waves, of which the last one has tiles of half the height, of single blocks and
# of pairs (NT), short K, odd N and K (copies, outputs without a tensor map).
CASES = [
    ((5, 0, 130, 17, 64), 9, 264, 136), ((0, 0, 300), 0, 130, 70), ((1,) * 70, 3, 64, 64),
    ((2048, 1000, 3000), 5, 1032, 256), ((64,) * 128, 0, 512, 128), ((0,) * 40, 7, 64, 64),
    ((4096,), 0, 4104, 72), ((33, 31) * 40, 1, 200, 8), ((700, 0, 1), 2, 8, 1000),
    ((16,) * 300, 0, 64, 64), ((257, 255), 0, 129, 129), ((140, 300, 260, 500) * 12, 3, 2056, 328),
    ((300, 0, 700, 1090), 3, 4104, 328),
]  # fmt: skip


# The modes of cases.MODES: dtypes, and TF32.
MODES = list(cases.MODES)


@pytest.fixture
def dtype(mode: str):
    with cases.math_mode(mode) as own:
        yield own


def ends_of(sizes: tuple[int, ...], dtype: torch.dtype = INT) -> Tensor:
    return torch.tensor(sizes, device="cuda").cumsum(0).to(dtype)


def integers(shape, dtype, generator) -> Tensor:
    return torch.randint(-3, 4, shape, generator=generator, device="cuda").to(dtype)


def weights(groups: int, k: int, n: int, layout: str, dtype, generator) -> Tensor:
    """(groups, k, n), contiguous along k in "nt", else along n."""
    if layout == "nt":
        return integers((groups, n, k), dtype, generator).mT
    return integers((groups, k, n), dtype, generator)


def products_of_rows(a: Tensor, b: Tensor, sizes: tuple[int, ...]) -> Tensor:
    own = list(a.double().split([*sizes, a.shape[0] - sum(sizes)]))
    zeros = own[-1].new_zeros(own[-1].shape[0], b.shape[2])
    return torch.cat([*(x @ y.double() for x, y in zip(own, b, strict=False)), zeros])


def sums_of_groups(a: Tensor, b: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """a (K, M) and b (K, N), whose K the groups divide."""
    parts = [x.double().split([*sizes, x.shape[0] - sum(sizes)])[:-1] for x in (a, b)]
    return torch.stack([x.t() @ y for x, y in zip(*parts, strict=True)])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{len(case[0])} groups {case[2:]}")
def test_small_integers_are_exact(case, dtype, generator: torch.Generator) -> None:
    sizes, rest, n, k = case
    offs, rows = ends_of(sizes, torch.int32 if rest else torch.int64), sum(sizes) + rest
    for layout in ("nt", "nn"):
        a, b = integers((rows, k), dtype, generator), weights(len(sizes), k, n, layout, dtype,
                                                              generator)  # fmt: skip
        expected = products_of_rows(a, b, sizes)
        out = op(a, b, offs=offs)
        numerics.check_exact(out[: sum(sizes)], expected[: sum(sizes)], f"{layout} {case}")
        numerics.check_exact(raw(a, b, offs, True), expected, f"zero rest, {layout} {case}")
        columns = op(b.mT, a.mT, offs=offs)
        numerics.check_exact(
            columns[:, : sum(sizes)], expected[: sum(sizes)].t(), f"columns {case}"
        )
    a, b = integers((rows, k), dtype, generator), integers((rows, n), dtype, generator)
    a[sum(sizes) :], b[sum(sizes) :] = torch.nan, torch.nan
    numerics.check_exact(op(a.t(), b, offs=offs), sums_of_groups(a, b, sizes), f"K {case}")


@pytest.mark.parametrize(("m", "n", "k"), [(768, 640, 24), (3000, 96, 17)])
def test_rows_of_groups_without_k_never_part_the_warps(m, n, k, generator) -> None:
    """Without a product, nothing but a barrier keeps the four warps that share a stage together."""
    source = random.Random(1)
    for _ in range(20):
        cuts = [*sorted(source.choices(range(k + 1), k=63)), k]
        sizes = tuple(end - start for start, end in zip([0, *cuts], cuts, strict=False))
        a, b = (integers((k, x), torch.bfloat16, generator) for x in (m, n))
        sums = sums_of_groups(a, b, sizes)
        numerics.check_exact(op(a.t(), b, offs=ends_of(sizes)), sums, f"K {sizes}")


@pytest.mark.parametrize("mode", MODES[:-1])  # the reference is of float64
def test_errors_are_those_of_a_product_of_each_group(dtype, generator: torch.Generator) -> None:
    sizes = (300, 20, 0, 700)
    a = torch.randn(sum(sizes), 2048, generator=generator, device="cuda", dtype=dtype)
    b = torch.randn(4, 2048, 512, generator=generator, device="cuda", dtype=dtype)
    judge = numerics.Judge(dtype)
    own = torch.cat([x @ y for x, y in zip(a.split(sizes), b, strict=True)])
    judge.add("rows", op(a, b, offs=ends_of(sizes)), own, products_of_rows(a, b, sizes))
    judge.finish()


@pytest.mark.parametrize(
    "ends",
    [(100, 50, 200, 300), (100, 400, 200, 300), (-5, 100, 200, 300), (100, 200, 250, 301),
     (2**40, 1, 2, 3), (100, -(2**40), 300, 300)],
)  # fmt: skip
@pytest.mark.parametrize("mode", MODES)
def test_wrong_ends_write_nan_inside_the_output_alone(ends, dtype, generator) -> None:
    a = integers((300, 64), dtype, generator)
    b = integers((4, 64, 128), dtype, generator)
    c = integers((300, 128), dtype, generator)
    for offs_dtype in (torch.int32, torch.int64):
        if max(map(abs, ends)) > 2**31 and offs_dtype == torch.int32:
            continue
        offs = torch.tensor(ends, dtype=offs_dtype, device="cuda")
        rows, sums = raw(a, b, offs, True), op(a.t(), c, offs=offs)
        start = group = 0
        while start <= ends[group] <= 300:
            end = ends[group]
            numerics.check_exact(rows[start:end], a[start:end].double() @ b[group].double(), "rows")
            product = a[start:end].double().t() @ c[start:end].double()
            numerics.check_exact(sums[group], product, "sums")
            start, group = end, group + 1
        assert rows[start:].isnan().all()
        assert sums[group:].isnan().all()
    torch.cuda.synchronize()
    assert torch.ones(1, device="cuda").item() == 1


@pytest.mark.parametrize(
    ("ends", "right"),
    [((100, 250, 300), 3), ((100, 50, 300), 1), ((100, 200, 301), 2), ((-1, 0, 300), 0)],
)
@pytest.mark.parametrize("mode", MODES)
def test_groups_without_k(ends, right, dtype) -> None:
    """Zeros, and NaN from a wrong end on."""
    a, b = torch.empty(300, 0, dtype=dtype, device="cuda"), torch.empty(3, 0, 128, device="cuda")
    rows = raw(a, b.to(dtype), torch.tensor(ends, device="cuda", dtype=INT), True)
    valid = (0, *ends)[right]
    assert rows[:valid].eq(0).all()
    assert rows[valid:].isnan().all()
    none = torch.empty(0, 72, dtype=dtype, device="cuda")
    offs = torch.tensor([0] * right + [1] + [0] * (3 - right), device="cuda", dtype=INT)
    sums = op(none[:, :24].t(), none, offs=offs)
    assert sums[:right].eq(0).all()
    assert sums[right:].isnan().all()


def test_checked_ends_name_the_group(monkeypatch) -> None:
    monkeypatch.setenv("TORCH_CUBIN_CHECK", "1")
    a, b = (torch.ones(shape, device="cuda", dtype=torch.half) for shape in ((9, 8), (2, 8, 8)))
    with pytest.raises(RuntimeError, match=r"\[input\]: grouped_matmul .*group 1.*got 10"):
        op(a, b, offs=torch.tensor([4, 10], device="cuda"))


@pytest.mark.parametrize("mode", MODES)
def test_no_group_and_empty_operands(dtype) -> None:
    made = {"device": "cuda", "dtype": dtype}
    none = torch.zeros(0, dtype=INT, device="cuda")
    assert (
        op(torch.ones(0, 512, **made), torch.ones(0, 256, 512, **made).mT, offs=none).numel() == 0
    )
    assert raw(torch.ones(5, 64, **made), torch.ones(0, 64, 8, **made), none, True).sum() == 0
    ends = torch.zeros(4, dtype=INT, device="cuda")
    assert op(torch.ones(0, 64, **made), torch.ones(4, 64, 8, **made), offs=ends).shape == (0, 8)
    assert op(torch.ones(8, 0, **made), torch.ones(0, 16, **made), offs=ends).eq(0).all()
    assert op(torch.ones(8, 9, **made), torch.ones(9, 16, **made), offs=ends).eq(0).all()


@pytest.mark.parametrize("mode", MODES)
def test_a_row_has_the_same_bits_whatever_the_other_groups(dtype, generator) -> None:
    a = torch.randn(600, 1000, generator=generator, device="cuda", dtype=dtype)
    b = torch.randn(40, 1000, 512, generator=generator, device="cuda", dtype=dtype)
    alone = op(a[:37].clone(), b[:1], offs=ends_of((37,)))
    for sizes in ((37, 563), (37, *(14,) * 39), (37, 0, 100, 0, 463)):
        args = (a, b[: len(sizes)], ends_of(sizes), True)
        out = raw(*args)
        assert torch.equal(out[:37], alone), sizes
        assert torch.equal(out, raw(*args)), sizes


@pytest.mark.parametrize("mode", MODES)
def test_a_graph_is_replayed_with_other_ends(dtype, generator: torch.Generator) -> None:
    a, c = (integers((300, n), dtype, generator) for n in (64, 128))
    b, offs = integers((3, 64, 128), dtype, generator), ends_of((100, 100, 100))

    def call() -> tuple[Tensor, Tensor]:
        return raw(a, b, offs, True), op(a.t(), c, offs=offs)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows, sums = call()
    for sizes in ((10, 0, 290), (0, 300, 0), (1, 2, 3)):
        offs.copy_(ends_of(sizes))
        graph.replay()
        numerics.check_exact(rows, products_of_rows(a, b, sizes), f"{sizes}")
        numerics.check_exact(sums, sums_of_groups(a, c, sizes), f"{sizes}")
    offs.copy_(torch.tensor([10, 5, 300]))  # wrong ones make no difference to what comes later
    graph.replay()
    assert rows[10:].isnan().all()
    assert sums[1:].isnan().all()
    offs.copy_(ends_of((0, 300, 0)))
    graph.replay()
    numerics.check_exact(rows, products_of_rows(a, b, (0, 300, 0)), "after wrong ends")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("divided", ["rows", "contraction"])
def test_derivatives_are_exact(divided, dtype, generator: torch.Generator) -> None:
    sizes, rest, k, n = (40, 0, 100, 3), 6, 72, 136
    offs = ends_of(sizes)
    a = integers((sum(sizes) + rest, k), dtype, generator)
    if divided == "rows":
        b = integers((4, n, k), dtype, generator).mT
        grad = integers((a.shape[0], n), dtype, generator)
    else:
        a, b = a.t(), integers((sum(sizes) + rest, n), dtype, generator)
        grad = integers((4, k, n), dtype, generator)
    a.requires_grad_()
    b.requires_grad_()
    grad_a, grad_b = torch.autograd.grad(op(a, b, offs=offs), (a, b), grad)
    a, b = a.detach(), b.detach()
    if divided == "rows":
        numerics.check_exact(grad_a, products_of_rows(grad, b.mT, sizes), "grad_a")
        numerics.check_exact(grad_b, sums_of_groups(a, grad, sizes), "grad_b")
    else:
        numerics.check_exact(grad_a, products_of_rows(b, grad.mT, sizes).t(), "grad_a")
        numerics.check_exact(grad_b, products_of_rows(a.t(), grad, sizes), "grad_b")


@pytest.mark.parametrize("mode", MODES)
def test_every_kernel_is_exact(dtype, generator: torch.Generator) -> None:
    for m, count, n in grouped_sizes.ROWS:
        own = (m // count,) * count
        for layout in ("nt", "nn"):
            a = integers((m, 72), dtype, generator)
            b = weights(count, 72, n, layout, dtype, generator)
            label = f"{layout} {m} {count} {n}"
            numerics.check_exact(op(a, b, offs=ends_of(own)), products_of_rows(a, b, own), label)
    for k, m, n in grouped_sizes.SUMS:
        a, b = integers((k, m), dtype, generator), integers((k, n), dtype, generator)
        own = (k // grouped_sizes.SUMMED_GROUPS,) * grouped_sizes.SUMMED_GROUPS
        expected = sums_of_groups(a, b, own)
        numerics.check_exact(op(a.t(), b, offs=ends_of(own)), expected, f"K {k} {m} {n}")
