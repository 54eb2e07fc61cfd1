"""DTensor's private names: the strategy of an op, from rules about one dim of a mesh."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from torch_cubin import errors
from torch_cubin._pytorch.internals import Feature

SHARDING = Feature("our ops of DTensors", "they raise: DTensor knows no sharding strategy for them")

HANDLERS = Feature("install(tensor_parallel=) for DTensors", "it raises InternalError")


@dataclasses.dataclass
class Rules:
    """What an op may do with the shards of one dim of a mesh.

    Each choice has a placement for every result and every tensor argument, in the schema's order.
    """

    results: int
    choices: list[tuple[list[Any], list[Any]]]
    # Dims of tensor arguments (by number) that only equal shards may divide.
    even: Sequence[tuple[int, int]] = ()
    # Tensor arguments that are written, or that DTensor passes on as they are.
    fixed: Sequence[int] = ()
    is_list: bool = False  # the results are a list


def register(ops: Sequence[Any], rules: Callable[..., Rules]) -> None:
    """`rules` gets the op's arguments, with objects that have a shape in place of tensors."""

    def find(name: str) -> Any:
        return SHARDING.find(f"distributed.tensor.{name}", None)

    dispatcher = find("DTensor._op_dispatcher")
    info = find("_op_schema.RuntimeSchemaInfo")
    if not SHARDING.available:
        return
    for op in ops:
        dispatcher.sharding_propagator.register_op_strategy(
            op, lambda schema: _strategy(schema, rules), _runtime_info(op, info)
        )


def _runtime_info(op: Any, info: Any) -> Any:
    """All arguments that are no tensors are part of the cached strategy's key."""
    arguments = op._schema.arguments
    others = [i for i, each in enumerate(arguments) if "Tensor" not in str(each.type)]
    positional = [i for i in others if not arguments[i].kwarg_only]
    named = [arguments[i].name for i in others if arguments[i].kwarg_only]
    return info(min(positional, default=100), named or None, needs_pytree=True)


def _strategy(schema: Any, rules: Callable[..., Rules]) -> Any:
    strategy_type = SHARDING.find("distributed.tensor._op_schema.OpStrategy", None)
    tuple_type = SHARDING.find("distributed.tensor._op_schema.TupleStrategy", None)
    expand = SHARDING.find("distributed.tensor._ops.utils.expand_to_full_mesh_op_strategy", None)

    def spec(value: Any) -> Any:
        if isinstance(value, strategy_type):
            return value.strategies[0].output_spec
        if isinstance(value, tuple_type):
            return [spec(child) for child in getattr(value, "children", ())]
        return [spec(each) for each in value] if isinstance(value, (list, tuple)) else value

    found = rules(
        *map(spec, schema.args_schema), **{k: spec(v) for k, v in schema.kwargs_schema.items()}
    )
    mesh = schema.get_mesh_from_args()
    given = [each.strategies[0].output_spec for each in _inputs(schema)]
    choices = [
        results + arguments[: len(given)]
        for results, arguments in found.choices
        if all(each.is_replicate() for each in arguments[len(given) :])
    ]
    expanded = expand(mesh, schema, choices, input_index=found.results)
    even = [(i, dim) for i, dim in found.even if i < len(given)]
    fixed = [i for i in found.fixed if i < len(given)]
    expanded.strategies = [
        each
        for each in expanded.strategies
        if all(_is_even(each.input_specs[i], given[i], dim) for i, dim in even)
        and all(each.input_specs[i].placements == given[i].placements for i in fixed)
        and _ignored_are_whole(schema)
    ]
    if not expanded.strategies:
        raise errors.fault(
            "input", f"torch.ops.{schema.op}", "cannot run on these shards",
            expected="an argument that is written, or given by name, in a placement that the "
            "op supports", got=", ".join(str(each.placements) for each in given),
            advice="Redistribute it before the call.",
        )  # fmt: skip
    if found.is_list and found.results == 1:
        for each in expanded.strategies:
            each.output_specs = (each.output_specs,)
    return expanded


def _inputs(schema: Any) -> list[Any]:
    """The tensors that DTensor chooses placements for: in older versions, positional ones alone."""
    return [*schema.args_strategy, *getattr(schema, "kwargs_strategy", ())]


def _ignored_are_whole(schema: Any) -> bool:
    """Whether the tensors that DTensor does not look at are the same on every rank."""
    if hasattr(schema, "kwargs_strategy"):
        return True
    specs = [getattr(each, "output_spec", each) for each in schema.kwargs_schema.values()]
    return all(
        placement.is_replicate() for spec in specs for placement in getattr(spec, "placements", ())
    )


def _is_even(spec: Any, given: Any, dim: int) -> bool:
    shards = math.prod(
        spec.mesh.size(i) for i, each in enumerate(spec.placements) if each.is_shard(dim)
    )
    return bool(given.shape[dim] % shards == 0)


# What a product of DTensors is served by, or None for a call that is PyTorch's.
Handler = Callable[[Any, Sequence[Any], dict[str, Any]], Any]

_before: dict[Any, Any] = {}  # handlers that ours replaced


def require_handlers() -> Any:
    """DTensor's dispatcher, which is imported for it; raises if this torch has none as we know."""
    dispatcher = HANDLERS.find(_DISPATCHER, None)
    for name in _NEEDED:
        HANDLERS.find(f"{_DISPATCHER}.{name}", None)
    if not HANDLERS.available:
        raise HANDLERS.error("torch_cubin.install(tensor_parallel=)")
    return dispatcher


def set_handlers(handlers: dict[Any, Handler]) -> None:
    """Calls these for ops of DTensors, before PyTorch would choose their shards."""
    dispatcher = require_handlers()
    known = dispatcher._custom_op_handlers
    for op, handler in handlers.items():
        _before.setdefault(op, known.get(op))
        known[op] = functools.partial(_handle, dispatcher, handler)


def remove_handlers() -> None:
    dispatcher = HANDLERS.find(_DISPATCHER, None)
    while _before:
        op, before = _before.popitem()
        if before is None:
            dispatcher._custom_op_handlers.pop(op, None)
        else:
            dispatcher._custom_op_handlers[op] = before


_DISPATCHER = "distributed.tensor.DTensor._op_dispatcher"
_NEEDED = (
    *("_custom_op_handlers", "unwrap_to_op_info", "sharding_propagator", "wrap"),
    "_dispatch_get_local_results_slow_path",
)


def _handle(dispatcher: Any, handler: Handler, op: Any, args: Any, kwargs: Any) -> Any:
    result = handler(op, args, kwargs)
    if result is not None:
        return result
    before = _before.get(op)
    if before is not None:
        return before(op, args, kwargs)
    # As PyTorch's own handlers do (distributed/tensor/_tp_conv.py).
    info = dispatcher.unwrap_to_op_info(op, args, kwargs)
    dispatcher.sharding_propagator.propagate(info)
    results = dispatcher._dispatch_get_local_results_slow_path(op, args, info)
    spec = info.output_sharding.output_spec
    for argument in op._schema.arguments:
        if argument.is_out:
            kwargs[argument.name]._spec = spec  # the product's placements, as PyTorch has it
            return kwargs[argument.name]
    return dispatcher.wrap(results, spec)
