"""Operator objects: schemas, registration, and PyTorch's caches about them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from torch_cubin import errors
from torch_cubin._pytorch.internals import Feature

SCHEMAS = Feature("define_op() and packages", "both raise InternalError")
_parse_schema = SCHEMAS.find("_C.parse_schema", None)

LATE_OVERLOADS = Feature(
    "overloads of an op that was looked up before they were defined",
    "`torch.ops.ns.name.overloads()` does not list them",
)
_refresh_packet = LATE_OVERLOADS.find("_ops._refresh_packet", lambda packet: None)

LATE_DERIVATIVES = Feature(
    "a derivative that is given to an op after torch.compile has traced it",
    "graphs traced later may still go without it",
)
LATE_DERIVATIVES.find("ops.aten.mm.default._dispatch_cache", None)

FAILED_DEFINITIONS = Feature(
    "taking back what a failed define_op() has registered",
    "it is taken back when Python frees the library object",
)
_destroy = FAILED_DEFINITIONS.find("library.Library._destroy", lambda library: None)

SYMBOLIC_CHECKS = Feature(
    "sizes compared at run time in exported graphs", "such a comparison becomes a guard"
)
_check = SYMBOLIC_CHECKS.find("_check", None)

QUICK_FAKES = Feature(
    "registration of fakes without looking up source lines", "importing takes 15 ms longer"
)
_entries = QUICK_FAKES.find("_library.simple_registry.singleton", None)

SCHEMA_OBJECTS = Feature(
    'define_op(backward="ns::op"), and names of arguments in errors',
    "a call of such an op that needs a gradient raises InternalError, and errors give numbers",
)
SCHEMA_OBJECTS.find("ops.aten.mm.default._schema", None)


def registry(namespace: str, kind: str) -> torch.library.Library:
    """A torch.library.Library, from a package at any path."""
    return torch.library.Library(namespace, kind)


_file_of_registries = __file__
if __file__.encode("utf-8", "replace") != os.fsencode(__file__):
    # PyTorch asks for the file of the caller, and fails where its path is not UTF-8.
    _file_of_registries = "torch_cubin"
    registry.__code__ = registry.__code__.replace(co_filename=_file_of_registries)


def is_by_registry(where: str) -> bool:
    """Whether what PyTorch says of where a kernel was registered names registry()."""
    return f"{_file_of_registries}:" in where


def register_fake(name: str, fake: Callable[..., Any], library: Any) -> None:
    """torch.library.register_fake(), which also reads the caller's source file to name its line.

    `library`: a torch.library.Library, or what keeps fakes in its place (_ops/late.py).
    """
    if not isinstance(library, torch.library.Library):
        library.fake(name, fake)
    elif _entries is None:
        torch.library.register_fake(name, fake, lib=library)
    else:
        handle = _entries.find(name).fake_impl.register(fake, fake.__module__, lib=library)
        library._registration_handles.append(handle)


def schema_of(overload: Any) -> Any:
    """The schema of a registered op."""
    if not SCHEMA_OBJECTS.available:
        raise SCHEMA_OBJECTS.error(f"the schema of {overload}")
    return overload._schema


def returns_views(target: Any) -> bool:
    """Whether the results of a graph's call may be views of its arguments; False for functions that
    are no registered op."""
    schema = getattr(target, "_schema", None)
    return schema is not None and any(each.alias_info for each in schema.returns)


def argument_names(overload: Any, most: int = 64) -> list[str]:
    """The names of an op's arguments; their indices if the schema is not available."""
    if not SCHEMA_OBJECTS.available:
        return [str(index) for index in range(most)]
    return [argument.name for argument in overload._schema.arguments]


def parse_schema(schema: str) -> Any:
    """The parsed schema; RuntimeError if it does not parse."""
    if _parse_schema is None:
        raise SCHEMAS.error("define_op")
    return _parse_schema(schema)


def refusal_of_schema(schema: str) -> str:
    """What PyTorch says of a schema that it does not parse, or ""."""
    try:
        if SCHEMAS.available:
            parse_schema(schema)
    except (RuntimeError, IndexError) as error:
        return " ".join(str(error).split())[:300] or "an error"
    return ""


def types_of_schema(schema: str) -> tuple[list[str], list[str]]:
    """The types of the arguments and results, without names, defaults and aliasing."""
    parsed = parse_schema(schema)
    arguments, results = (
        [str(each.type).replace("SymInt", "int") for each in listed]
        for listed in (parsed.arguments, parsed.returns)
    )
    return arguments, results


def refresh_packet(packet: Any) -> None:
    """Makes an overload visible in `torch.ops.ns.name` that was defined after its first lookup."""
    _refresh_packet(packet)


def forget_dispatch(overload: Any) -> None:
    """Clears cached kernels after a registration on an op that may have been called.

    NOTE: torch.compile's Python dispatcher caches the kernel of each key, and
    torch.library.Library.impl does not clear it: a backward registered later would be ignored.
    """
    if LATE_DERIVATIVES.available:
        overload._dispatch_cache.clear()


def destroy(library: torch.library.Library) -> None:
    """Removes all registrations of this library."""
    _destroy(library)


def check(condition: Any, error: errors.Error) -> None:
    """Raises unless the condition holds; a symbolic one becomes a guard or a run-time check."""
    if _check is not None:
        _check(condition, lambda: str(error))
    elif not condition:
        raise error
