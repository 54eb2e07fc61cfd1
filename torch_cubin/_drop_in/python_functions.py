# Calls Python functions of PyTorch that multiply matrices internally (attention, for example) with
# a torch-function mode still enabled. It knows no operator of ours.
"""Enters a Python function of torch, so that the mode sees the calls inside it."""

import dis
import functools
import types

from torch import overrides

_CHECKS = (
    overrides.has_torch_function,
    overrides.has_torch_function_unary,
    overrides.has_torch_function_variadic,
)
# Names that show that a function multiplies matrices. The last two stand for everything that
# backward() may run: hooks, custom functions, and the recomputation of activation checkpointing.
_PRODUCTS = frozenset(("matmul", "mm", "mv", "bmm", "dot", "inner", "vdot", "einsum", "linear"))
_PRODUCTS |= {"scaled_dot_product_attention"}
_PRODUCTS |= {"addmm", "addmv", "addbmm", "baddbmm", "backward", "_engine_run_backward"}


def _nothing_overrides(*args: object) -> bool:
    return False


def without_check(function: types.FunctionType) -> types.FunctionType | None:
    """A copy of `function` that does not ask whether its arguments override it.

    A Python function of torch begins with ``if has_torch_function(...): return
    handle_torch_function(...)``. The condition is true while a mode is enabled, so calling the
    function with the mode enabled would recurse forever. The copy has the same code and globals,
    except for that check. (torch.overrides.redispatch_function does this since 2.13, but not under
    torch.compile.) Returns None if the function makes no such check by name, because then it cannot
    be entered. Nor can one that :func:`checks_by_attribute`.
    """
    scope = function.__globals__
    names = names_in(function.__code__)
    # Only the names that the code uses, and no __name__: torch.compile would look the names up in
    # the module of that name, find the real check there, and refuse its own guard.
    own = {name: scope[name] for name in names if name in scope}
    checks = [name for name, value in own.items() if value in _CHECKS]
    if not checks:
        return None
    own.update(dict.fromkeys(checks, _nothing_overrides))
    own["__builtins__"] = scope["__builtins__"]
    copy = types.FunctionType(
        function.__code__, own, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def refresh(copy: types.FunctionType, function: types.FunctionType) -> None:
    """Copies names that were rebound in the original's module since (people patch torch)."""
    own, scope = copy.__globals__, function.__globals__
    for name, value in own.items():
        if value is not _nothing_overrides and scope.get(name, value) is not value:
            own[name] = scope[name]


def multiplies(function: types.FunctionType, depth: int = 3) -> bool:
    """Whether the function, or a Python function that it names, contains a matrix product."""
    names = names_in(function.__code__)
    if names & _PRODUCTS or _has_matmul_operator(function.__code__):
        return True
    callees = (function.__globals__.get(name) for name in names)
    return depth > 0 and any(
        isinstance(callee, types.FunctionType) and multiplies(callee, depth - 1)
        for callee in callees
    )


def checks_by_attribute(function: types.FunctionType) -> bool:
    """Whether it contains a check as ``torch.overrides.has_torch_function``, which a copy would
    keep."""
    return any(
        isinstance(step.argval, str)
        and step.argval.startswith("has_torch_function")
        and step.opname not in ("LOAD_GLOBAL", "LOAD_NAME")
        for step in dis.get_instructions(function.__code__)
    )


@functools.cache
def names_in(code: types.CodeType) -> frozenset[str]:
    """The names that code and the functions inside it use."""
    inner = (names_in(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return frozenset(code.co_names).union(*inner)


def _has_matmul_operator(code: types.CodeType) -> bool:
    return any(
        step.argrepr == "@" or step.opname == "BINARY_MATRIX_MULTIPLY"  # the latter in Python 3.10
        for step in dis.get_instructions(code)
    )
