"""Conditions of bools: compared, and not tested by identity."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_cubin import errors
from torch_cubin._declared import expressions
from torch_cubin._declared.evaluate import evaluate
from torch_cubin._declared.expressions import Traced, TracedTensor

NAMES = {
    "a": Traced(["number", "a"], bool),
    "b": Traced(["number", "b"], bool),
    "x": TracedTensor("x"),
}


def traced(function: Any) -> Any:
    return expressions.trace(function, NAMES, "when")


@pytest.mark.parametrize(
    "function",
    [
        lambda a: a == True,  # noqa: E712
        lambda a: a == False,  # noqa: E712
        lambda a: a != True,  # noqa: E712
        lambda a: True == a,  # noqa: E712, SIM300
        lambda a: ~a,
        lambda a, b: a == b,
        lambda a, b: a != b,
        lambda a, b: (a == True) & (b != a),  # noqa: E712
    ],
)
def test_bools_are_compared(function: Any) -> None:
    tree = traced(function).tree
    names = function.__code__.co_varnames
    for a in (False, True):
        for b in (False, True):
            given = {"a": a, "b": b}
            wanted = not a if "~" in str(function) else None
            found = evaluate(tree, {}, given)
            assert type(found) is bool
            if function(*(torch.tensor(given[n]) for n in names)).item() != found:
                pytest.fail(f"{tree} of {given}: {found}, {wanted}")


@pytest.mark.parametrize(
    "function",
    [
        lambda a: a is True,
        lambda a: a is not False,
        lambda a: True is a,
        lambda a: a is None,
        lambda a, b: a is b,
        lambda x: x.dtype is torch.float32,
        lambda x: torch.float32 is x.dtype,
        lambda a: not a,
    ],
)
def test_conditions_that_would_be_traced_to_constants_are_refused(function: Any) -> None:
    with pytest.raises(errors.InputError, match="which each call decides|each call decides"):
        traced(function)


def test_a_function_may_compare_its_own_values_by_identity() -> None:
    own = object()
    assert traced(lambda a, own=own: own is None) is False
    with pytest.raises(errors.InputError, match="uses a bool as a number"):
        traced(lambda a: a == 1)
