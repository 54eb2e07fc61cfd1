"""Equations of two operands: every one that is a product is served, and every one is right."""

from __future__ import annotations

import pytest
import torch
from drop_in_cases import integers, run, same
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_cubin._drop_in import einsum

SIZES = dict(zip("abcdijkl", (1, 2, 3, 4, 2, 3, 1, 5), strict=True))

PRODUCTS = [
    "ij,jk->ik",
    "ij,jk->ki",
    "ij,kj->ik",
    "ji,jk",
    "bij,bjk->bik",
    "bij,bkj->bik",
    "bij,jk->bik",
    "ij,bjk->bik",
    "bihd,bjhd->bhij",
    "bhij,bjhd->bihd",
    "i,i->",
    "i,i",
    "ij,j->i",
    "j,ij->i",
    "ij,ij->",
    "ijk,ijk->k",
    "abij,abjk->baik",
    "abcd,cdij->abij",
    "abcd,cd->ab",
    "bi , bj -> ij",
    "AiB,jA->Bji",
]
ELLIPSIS = [
    ("...ij,...jk->...ik", (2, 3, 4, 5), (2, 3, 5, 2)),
    ("...ij,...jk->...ik", (3, 4, 5), (2, 1, 5, 2)),
    ("...ij,jk->...ik", (2, 3, 4, 5), (5, 2)),
    ("...ij,...jk", (1, 4, 5), (3, 5, 2)),
    ("i...,i...->...", (4, 2, 3), (4, 2, 3)),
    ("...i,...i->", (2, 3), (2, 3)),
    ("...,...->", (2, 3), (2, 3)),
]


@pytest.mark.parametrize("equation", PRODUCTS)
def test_product_is_served(equation, device) -> None:
    sizes = {**SIZES, "h": 2, "A": 3, "B": 2}
    terms = equation.replace(" ", "").split("->")[0].split(",")
    a, b = (integers(*(sizes[x] for x in term), device=device, seed=len(term)) for term in terms)
    expected = torch.einsum(equation, a, b)
    result, ops, report = run(lambda: torch.einsum(equation, a, b))
    same(result, expected)
    assert ops.cubin() == 1
    assert ops.aten_products() == []
    assert [row.function for row in report.served] == ["torch.einsum"]


@pytest.mark.parametrize(("equation", "shape_a", "shape_b"), ELLIPSIS)
def test_ellipsis_is_served(equation, shape_a, shape_b, device) -> None:
    a, b = integers(*shape_a, device=device), integers(*shape_b, device=device, seed=1)
    result, ops, _ = run(lambda: torch.einsum(equation, a, b))
    same(result, torch.einsum(equation, a, b))
    assert ops.cubin() == 1


@st.composite
def _equations(draw) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    labels = st.lists(st.sampled_from("abcdijkl"), max_size=4, unique=True)
    a, b = draw(labels), draw(labels)
    some = draw(st.permutations(sorted({*a, *b})))
    output = some[: draw(st.integers(0, len(some)))]
    arrow = "->" + "".join(output) if draw(st.booleans()) else ""
    shapes = (tuple(SIZES[x] for x in term) for term in (a, b))
    return (f"{''.join(a)},{''.join(b)}{arrow}", *shapes)


@settings(deadline=None, max_examples=300, derandomize=True)
@given(_equations())
def test_any_equation_equals_torch(drawn) -> None:
    equation, shape_a, shape_b = drawn
    a, b = integers(*shape_a), integers(*shape_b, seed=1)
    expected = torch.einsum(equation, a, b)
    result, ops, report = run(lambda: torch.einsum(equation, a, b))
    same(result, expected)
    assert ops.cubin() == len(report.served)
    assert len(report.served) + len(report.declined) == 1


def test_the_operands_are_swapped_rather_than_the_output_permuted() -> None:
    plan = einsum.plan("ij,jk->ki", (2, 2))
    assert plan.swapped
    assert plan.output == (0, 1)
    assert not einsum.plan("ij,jk->ik", (2, 2)).swapped


@pytest.mark.parametrize(
    ("equation", "dims"),
    [
        *(("ij,jk->ik", (3, 2)), ("i-,j", (2, 1)), ("ij,jk->ikk", (2, 2)), ("...i...,i", (2, 1))),
        *(("ij,j. ..->i", (2, 1)), ("ij,jk- >ik", (2, 2))),
    ],
)
def test_a_wrong_equation_is_left_to_torch(equation, dims) -> None:
    with pytest.raises(RuntimeError, match="einsum"):
        torch.einsum(equation, *(torch.ones([2] * dim) for dim in dims))
    assert einsum.plan(equation, dims) == "an equation that torch.einsum refuses"
