"""torch.compile and torch.export: the tensors that they trace with, and control of tracing."""

import sys
import types
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from torch_cubin._pytorch.imports import when_imported
from torch_cubin._pytorch.internals import Feature

TRACING = Feature(
    "drop_in() under torch.export and torch.compile",
    "traced calls are left to PyTorch, and flops of packed attention are not counted for fakes",
)
# The tensor types that torch.export and torch.compile trace with, in place of plain tensors.
TRACING_TYPES: tuple[type, ...] = tuple(
    kind
    for kind in (
        TRACING.find("_subclasses.fake_tensor.FakeTensor", None),
        TRACING.find("_subclasses.functional_tensor.FunctionalTensor", None),
    )
    if kind is not None
)

SKIPPED_FRAMES = Feature(
    "drop_in() around a graph break of torch.compile",
    "its own Python is compiled as small graphs, with the same results",
)
_Strategy = SKIPPED_FRAMES.find("_C._dynamo.eval_frame._FrameExecStrategy", None)
_Action = SKIPPED_FRAMES.find("_C._dynamo.eval_frame._FrameAction", None)
_mark = SKIPPED_FRAMES.find("_C._dynamo.eval_frame.set_code_exec_strategy", None)


def hint_of(symbol: Any) -> int | float | bool | None:
    """The hint of a symbolic number; None for an unbacked one.

    Reading it adds no guard. Always None if this torch stores hints elsewhere.
    """
    hint = getattr(getattr(symbol, "node", None), "hint", None)
    return hint if isinstance(hint, (int, float)) else None


def fix(number: Any) -> bool:
    """Guards every symbol in a number, so that its value becomes a constant; False: it has no
    symbols.

    A guard on the number alone would leave the symbols of a product in the graph.
    """
    node = getattr(number, "node", None)
    if node is None:
        return True
    if hint_of(number) is None:
        return False
    for symbol in node.expr.free_symbols:
        node.shape_env.evaluate_expr(symbol)
    return node.maybe_as_int() is not None


def assume_constant_result(function: Any) -> Any:
    """torch.compiler.assume_constant_result without its import of torch._dynamo (3 seconds).

    If a torch reads another attribute, it traces into the function and recompiles a graph when
    report()'s counts change.
    """
    function._dynamo_marked_constant = True
    return function


@assume_constant_result
def is_exporting() -> bool:
    """torch.compiler.is_exporting(), which torch 2.11 takes for true in all that it compiles."""
    return torch.compiler.is_exporting()


def forget_compiled() -> None:
    """Functions that were compiled are compiled again at their next call."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def never_traced(function: Any) -> Any:
    """torch.compiler.disable without its import of torch._dynamo: a call breaks the graph.

    If a torch reads another attribute, the graph breaks inside the function, with a warning.
    """
    function._torchdynamo_disable = True
    return function


def skip_frames(modules: Iterable[types.ModuleType]) -> None:
    """Lets torch.compile inline these modules' functions into a model's graph, but never compile
    one by itself.

    When torch.compile gives up on a frame (a graph break inside ``with drop_in():``), the frame
    runs as plain Python and each function that it calls is compiled alone. Our functions would
    give one graph of one operator per call, and recompilation warnings. That is what happens on a
    torch without this switch; results are the same.
    """
    if SKIPPED_FRAMES.available:
        when_imported("torch._dynamo", lambda dynamo: _skip(modules))


def skip_frames_of(names: Collection[str]) -> None:
    """skip_frames() of modules that may be imported later."""
    loaded: list[types.ModuleType] = []

    def add(module: types.ModuleType) -> None:
        loaded.append(module)
        if "torch._dynamo" in sys.modules:
            _skip([module])

    if SKIPPED_FRAMES.available:
        when_imported(names, add)
        skip_frames(loaded)


def never_compiled(function: Any) -> Any:
    """Marks a function of such a module: what it calls, as imports below a compiled program, is not
    compiled either."""
    _NEVER_COMPILED.add(function.__code__)
    return function


_NEVER_COMPILED: set[types.CodeType] = set()


def _skip(modules: Iterable[types.ModuleType]) -> None:
    own, with_calls = (
        _Strategy(_Action.SKIP, of_calls) for of_calls in (_Action.DEFAULT, _Action.SKIP)
    )
    for module in modules:
        for code in _codes(vars(module), module.__name__):
            _mark(code, with_calls if code in _NEVER_COMPILED else own)


def _codes(namespace: Mapping[str, object], module: str) -> Iterable[types.CodeType]:
    for value in list(namespace.values()):
        if isinstance(value, staticmethod):
            value = value.__func__
        if getattr(value, "__module__", None) != module:
            continue
        if isinstance(value, types.FunctionType):
            yield from _nested(value.__code__)
        elif isinstance(value, type):
            yield from _codes(vars(value), module)


def _nested(code: types.CodeType) -> Iterable[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)
