# Keeps torch.compile from compiling drop_in()'s own Python as graphs of its own.
"""Functions that torch.compile inlines into a model's graph, but never compiles by themselves."""

import types
from collections.abc import Iterable, Mapping

import torch


def skip(modules: Iterable[types.ModuleType]) -> None:
    """Mark every function of these modules.

    Where torch.compile gives up on a frame (a graph break inside ``with drop_in():``), the frame
    runs as plain Python and each function that it calls is compiled alone. For ours that gives a
    graph of one operator per call, and warnings about too many of them. Under a torch without
    this switch that is what happens, and the results are the same.
    """
    dynamo = torch._C._dynamo.eval_frame
    try:
        strategy = dynamo._FrameExecStrategy(dynamo._FrameAction.SKIP, dynamo._FrameAction.DEFAULT)
        mark = dynamo.set_code_exec_strategy
    except AttributeError:
        return
    for module in modules:
        for code in _codes(vars(module), module.__name__):
            mark(code, strategy)


def _codes(namespace: Mapping[str, object], module: str) -> Iterable[types.CodeType]:
    for value in list(namespace.values()):
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
