"""Inductor's kernels that reduce rows, under install(), take them in one piece. Without a GPU no
such kernel is compiled, so that its choices are asked."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import sympy
from torch._inductor import choices, compile_fx  # noqa: F401  (whose import registers ours)
from torch._inductor.codegen.simd_kernel_features import SIMDKernelFeatures
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.sizevars import SizeVarAllocator
from torch._inductor.virtualized import V

import torch_cubin
from torch_cubin._drop_in import install

INDUCTORS = choices.InductorChoices


@pytest.fixture
def installed(monkeypatch) -> None:
    """For graphs alone: on the CPU nothing is served."""
    monkeypatch.setattr(install, "graph_policy", lambda: "fastest")


def features(rows: object, columns: object, hint: ReductionHint) -> SimpleNamespace:
    sizes = {"numel": sympy.sympify(rows), "reduction_numel": sympy.sympify(columns)}
    return SimpleNamespace(**sizes, get_reduction_hint=lambda: hint, strict_sum_rblock=lambda: None)


def persistent(rows: object, columns: int, hint: ReductionHint = ReductionHint.INNER) -> bool:
    with V.set_graph_handler(SimpleNamespace(sizevars=SizeVarAllocator())):
        return INDUCTORS().should_use_persistent_reduction(features(rows, columns, hint), False)


def test_rows_in_registers(installed) -> None:
    assert persistent(8192, 1152)
    assert persistent(1024, 2048)
    assert not persistent(8192, 2049)
    assert not persistent(1023, 2048)
    assert persistent(8, 1024)  # Inductor's own choice
    assert not persistent(8192, 1152, ReductionHint.OUTER)
    assert not persistent(sympy.Symbol("s0", integer=True), 1152)


@pytest.mark.parametrize("reason", ["not installed", "batch invariance"])
def test_others_are_inductors_own(reason: str, monkeypatch) -> None:
    if reason == "not installed":
        assert not persistent(8192, 1152)
        return
    monkeypatch.setattr(install, "graph_policy", lambda: "all")
    with torch_cubin.batch_invariant():
        assert not persistent(8192, 1152)


class Read(SimpleNamespace):
    def __init__(self, index: sympy.Expr, names: tuple[sympy.Symbol, ...], together: bool) -> None:
        super().__init__(index=index, var_names=names, stride1_for_last_dim=lambda: together)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("in_pieces", [True, False])
def test_broadcast_operands_do_not_hide_that_columns_lie_together(
    together: bool, in_pieces: bool, installed, monkeypatch
) -> None:
    """`in_pieces`: the kernel also reads or writes a tensor whose columns are apart."""
    row, column = sympy.symbols("row column", integer=True)
    one_a_row = Read(row, (row, column), True)
    matrix = Read(1152 * row + column, (row, column), together)
    data = SimpleNamespace(reduction_hint=ReductionHint.DEFAULT)
    accesses = SimpleNamespace(reads=[one_a_row, matrix], writes=[])
    for read in accesses.reads:
        read.is_contiguous = lambda: False
    node = SimpleNamespace(
        is_reduction=lambda: True, node=SimpleNamespace(data=data), read_writes=accesses
    )
    own = object.__new__(SIMDKernelFeatures)
    own.tiling_scores = None
    own.numel, own.reduction_numel = sympy.Integer(8192), sympy.Integer(1152)
    monkeypatch.setattr(own, "scheduler_nodes", lambda: [node], raising=False)
    monkeypatch.setattr(own, "reduction_nodes", lambda: [node], raising=False)
    name = "has_non_contiguous_pw_in_reduction_kernel"
    monkeypatch.setattr(own, name, lambda: in_pieces, raising=False)
    wanted = ReductionHint.INNER if together and not in_pieces else ReductionHint.DEFAULT
    assert own.get_reduction_hint() is wanted
    own.numel = sympy.Symbol("s0", integer=True)
    assert own.get_reduction_hint() is ReductionHint.DEFAULT
