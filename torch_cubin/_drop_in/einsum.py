# Parses an einsum equation of two operands and plans it as one matrix product. The plan depends
# only on labels, not on tensors, so it can be cached for each equation.
"""Finds the einsum equations that are one matrix product, and the permutations for it."""

import string
from collections.abc import Sequence
from typing import NamedTuple

REASONS = (
    "not two operands",
    "an equation that torch.einsum refuses",
    "an index repeated in one operand",
    "no index is summed over in both operands",
    "an index summed over in one operand alone",
)
_OPERANDS, _REFUSED, _REPEATED, _NONE_SUMMED, _SUMMED_ALONE = REASONS
_ALPHABET = string.ascii_uppercase + string.ascii_lowercase


class Plan(NamedTuple):
    """`left` permuted to [batch, rows, inner] times `right` permuted to [batch, inner, columns].

    Each group is zero or more dims; `batch`, `rows`, `columns` and `inner` are their numbers. The
    product's [batch, rows, columns] dims, permuted by `output`, are the equation's output.
    `swapped`: the first operand is `right` (then the output needs no permutation more often).
    """

    swapped: bool
    left: tuple[int, ...]
    right: tuple[int, ...]
    output: tuple[int, ...]
    batch: int
    rows: int
    columns: int
    inner: int


def plan(equation: str, dims: tuple[int, int]) -> Plan | str:
    """The plan for an equation over operands with these numbers of dims, or the reason why there is
    none.

    An invalid equation gives a reason too: torch.einsum then raises its own error.
    """
    given, equation = equation, equation.replace(" ", "")
    if any(given.count(whole) != equation.count(whole) for whole in ("...", "->")):
        return _REFUSED  # blanks inside of one
    inputs, arrow, output = equation.partition("->")
    terms = inputs.split(",")
    if len(terms) != 2:
        return _OPERANDS
    a, b = (_labels(term, n) for term, n in zip(terms, dims, strict=True))
    if a is None or b is None:
        return _REFUSED
    if len(set(a)) != len(a) or len(set(b)) != len(b):
        return _REPEATED
    ellipsis = max(([x for x in t if len(x) > 1] for t in (a, b)), key=len)
    if arrow:
        spelled = _spell(output, ellipsis)
        if spelled is None or len(set(spelled)) != len(spelled) or not set(spelled) <= {*a, *b}:
            return _REFUSED
        out = spelled
    else:
        once = [x for x in {*a, *b} if len(x) == 1 and (x in a) != (x in b)]
        out = ellipsis + sorted(once)

    inner = [x for x in a if x in b and x not in out]
    if not inner:
        return _NONE_SUMMED
    if any((x in a) != (x in b) and x not in out for x in {*a, *b}):
        return _SUMMED_ALONE
    batch = [x for x in out if x in a and x in b]
    rows = [x for x in out if x in a and x not in b]
    columns = [x for x in out if x in b and x not in a]
    # The operand whose own index comes first in the output gives the rows.
    swapped = bool(rows and columns) and out.index(columns[0]) < out.index(rows[0])
    if swapped:
        a, b, rows, columns = b, a, columns, rows
    product = batch + rows + columns
    return Plan(
        swapped=swapped,
        left=tuple(a.index(x) for x in batch + rows + inner),
        right=tuple(b.index(x) for x in batch + inner + columns),
        output=tuple(product.index(x) for x in out),
        batch=len(batch),
        rows=len(rows),
        columns=len(columns),
        inner=len(inner),
    )


def equation(inputs: Sequence[Sequence[object]], output: Sequence[object] | None) -> str:
    """The equation for einsum's other form, lists of integers and Ellipsis; "" for an invalid
    one."""
    terms = [_letters(term) for term in inputs]
    last = None if output is None else _letters(output)
    known = [term for term in terms if term is not None]
    if len(known) < len(terms) or (output is not None and last is None):
        return ""
    return ",".join(known) + ("" if last is None else "->" + last)


def _letters(term: Sequence[object]) -> str | None:
    letters = ""
    for label in term:
        if label is Ellipsis:
            letters += "..."
        elif isinstance(label, int) and 0 <= label < 52:
            letters += _ALPHABET[label]
        else:
            return None
    return letters


def _labels(term: str, dims: int) -> list[str] | None:
    """One label for each dim. The dims of an ellipsis are "...1" (the last), "...2" and so on."""
    covered = dims - len(term.replace("...", ""))
    if covered < 0 or (covered > 0 and "..." not in term):
        return None
    return _spell(term, [f"...{i}" for i in range(covered, 0, -1)])


def _spell(term: str, ellipsis: list[str]) -> list[str] | None:
    before, dots, after = term.partition("...")
    letters = before + after
    if letters and not (letters.isascii() and letters.isalpha()):
        return None
    return [*before, *(ellipsis if dots else []), *after]
