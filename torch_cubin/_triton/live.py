"""Triton kernels of this process, and kernels compiled now, with or without a GPU."""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch_cubin import errors
from torch_cubin._triton import copies
from torch_cubin._triton.kernel import (
    FOLDED,
    Parameter,
    TritonKernel,
    Unknown,
    descriptor,
    make,
    with_accesses,
)

_OPTIONS = "num_warps=, num_stages=, num_ctas=, maxnreg= and what else Triton's compiler takes"


def triton() -> types.ModuleType:
    """The package. Raises InputError [input] if it cannot be imported."""
    try:
        import triton as found
        import triton.compiler
    except ImportError as error:
        raise errors.fault(
            "input",
            "torch_cubin.producers.triton",
            f"needs Triton for this ({error})",
            expected="an installed triton",
            advice="Loading and running what was exported needs none.",
        ) from error
    return found


def is_compiled(value: Any) -> bool:
    """Whether it is a CompiledKernel."""
    return all(hasattr(value, name) for name in ("asm", "metadata", "src", "name"))


def is_function(value: Any) -> bool:
    """Whether it is a @triton.jit function, possibly under @heuristics."""
    return hasattr(value, "arg_names") and (hasattr(value, "params") or hasattr(value, "fn"))


def is_autotuned(value: Any) -> bool:
    """Whether it is a @triton.autotune function."""
    return all(hasattr(value, name) for name in ("configs", "cache", "keys", "fn"))


def function_of(value: Any) -> Any:
    """The @triton.jit function below decorators."""
    while not hasattr(value, "params"):
        value = value.fn
    return value


def with_decorators(kernels: Iterable[TritonKernel], value: Any) -> list[TritonKernel]:
    """The kernels, with the facts about their parameters from the decorators above @triton.jit.

    A heuristic (@triton.heuristics) computes a constexpr value from a call's arguments (whether K
    is a multiple of a block, for example), so it may differ at the next call. Its name must be in
    `args`, and each call is checked against it.

    Parameters in reset_to_zero or restore_value of @triton.autotune count as read before they are
    written, whether or not the IR shows it.
    """
    computed: set[str] = set()
    prepared: dict[str, set[str]] = {}
    while not hasattr(value, "params"):
        computed.update(getattr(value, "values", None) or ())
        for field, access in (("reset_to_zero", "reset"), ("restore_value", "restore")):
            for name in getattr(value, field, None) or ():
                prepared.setdefault(name, {"read", "write", "first"}).add(access)
        value = value.fn
    if not computed and not prepared:
        return list(kernels)

    def completed(parameter: Parameter) -> Parameter:
        is_memory = parameter.type.startswith("*") or descriptor(parameter.type) is not None
        access = prepared.get(parameter.name) if is_memory else None
        known = parameter.access
        return dataclasses.replace(
            parameter,
            is_declared=parameter.is_declared and parameter.name not in computed,
            access=known if access is None else frozenset(access | (known or frozenset())),
        )

    return [
        dataclasses.replace(kernel, parameters=tuple(map(completed, kernel.parameters)))
        for kernel in kernels
    ]


def of_compiled(compiled: Any) -> TritonKernel:
    """The kernel of a CompiledKernel."""
    metadata = compiled.metadata
    fields = metadata._asdict() if hasattr(metadata, "_asdict") else dict(metadata)
    ttgir = compiled.asm.get("ttgir") if hasattr(compiled.asm, "get") else None
    if isinstance(ttgir, str):
        copies.check(ttgir, f"Triton kernel '{fields.get('name', '?')}'")
    ttir = compiled.asm.get("ttir") if hasattr(compiled.asm, "get") else None
    return of_source(compiled.src, fields, compiled.asm["cubin"], ttir)


def of_source(
    source: Any, metadata: Mapping[str, Any], cubin: Any, ttir: Any = None
) -> TritonKernel:
    """A kernel from the compiler's source object, its metadata, its binary and its IR."""
    origin = f"Triton kernel '{metadata.get('name', '?')}'"
    target = metadata.get("target")
    backend = target["backend"] if isinstance(target, Mapping) else getattr(target, "backend", "")
    if backend != "cuda":
        raise errors.fault(
            "input", origin, "is for another backend", expected="cuda", got=str(backend)
        )
    function = getattr(source, "fn", None)
    if function is None:
        raise errors.fault(
            "input",
            origin,
            "was compiled from IR, which does not tell its arguments' names and constants",
            expected="a kernel compiled from a @triton.jit function, or its cache folder",
        )
    constants = dict(getattr(source, "constants", None) or {})
    attributes = dict(getattr(source, "attrs", None) or {})
    declared = {p.name for p in function.params if p.is_constexpr}
    parameters: list[Parameter] = []
    for index, (name, type_) in enumerate(source.signature.items()):
        path = (index,)
        _flatten(name, type_, path, constants, attributes, name in declared, origin, parameters)
    if isinstance(ttir, str):
        parameters = with_accesses(parameters, ttir)
    cache_key = getattr(function, "cache_key", "")
    return make(
        bytes(cubin), metadata, parameters, origin,
        source_hash=cache_key if isinstance(cache_key, str) else "",
    )  # fmt: skip


def _flatten(
    name: str,
    type_: Any,
    path: tuple[int, ...],
    constants: Mapping[Any, Any],
    attributes: Mapping[Any, Any],
    declared: bool,
    origin: str,
    out: list[Parameter],
) -> None:
    if isinstance(type_, (tuple, list)):
        for index, item in enumerate(type_):
            inner = f"{name}.{index}", item, (*path, index)
            _flatten(*inner, constants, attributes, declared, origin, out)
        return
    if type_ == FOLDED:
        value = constants.get(path, constants.get(name))
        out.append(Parameter(name, FOLDED, _data(value), declared))
        return
    multiple = 1
    for attribute, value in attributes.get(path, ()):
        if attribute != "tt.divisibility" or type(value) is not int:
            raise errors.fault(
                "input",
                f"{origin} parameter '{name}'",
                "was compiled under a condition that torch_cubin does not know",
                expected="tt.divisibility",
                got=f"{attribute} = {value!r:.40}",
            )
        multiple = value
    out.append(Parameter(name, str(type_), multiple_of=multiple))


def _data(value: Any) -> Any:
    """A constant as a JSON value, or Unknown."""
    value = getattr(value, "value", value) if type(value).__name__ == "constexpr" else value
    if value is None or type(value) in (bool, int, float, str):
        finite = type(value) is not float or value - value == 0
        return value if finite else Unknown(repr(value))
    return Unknown(str(value)[:200])


def compile(
    function: Any,
    signature: str | Mapping[str, Any] | Sequence[Any],
    archs: Sequence[str] | str,
    **options: Any,
) -> list[TritonKernel]:
    """Compiles a @triton.jit function for each arch, on a machine with or without a GPU.

    `signature` gives each argument's type in Triton's notation: "*fp32:16, *fp32:16, i32, 1024", a
    list of these, or a dict by name. ":16" lets the compiler assume a multiple of 16, ":1" the
    value 1; a number, a bool, None or a quoted string is the value of a constexpr argument. With a
    dict, arguments that have defaults may be omitted. `archs`: "sm_80", "sm_90a". Further keywords
    are Triton's options: num_warps, num_stages, num_ctas, maxnreg.

    Raises InputError [input] for a signature that does not fit the function, and for options that
    the installed Triton does not have.
    """
    package = triton()
    from triton.backends.compiler import GPUTarget

    given, function = function, function_of(function)
    label = f"Triton function '{function.__name__}'"
    types_, constants, attributes = _read_signature(function, signature, label)
    out = []
    for arch in [archs] if isinstance(archs, str) else archs:
        match = re.fullmatch(r"sm_(\d+)a?", str(arch))
        if match is None:
            raise errors.fault(
                "input", label, "has no such target", expected="'sm_80', 'sm_90a'", got=repr(arch)
            )
        source = package.compiler.ASTSource(
            fn=function, signature=dict(types_), constexprs=dict(constants), attrs=dict(attributes)
        )
        target = GPUTarget("cuda", int(match[1]), 32)
        _check_options(package, target, options, label)
        try:
            compiled = package.compile(source, target=target, options=dict(options))
        except (KeyError, TypeError) as error:  # the compiler refused an option's value
            raise errors.fault(
                "input", label, f"does not compile ({error})", expected=_OPTIONS
            ) from error
        out.append(of_compiled(compiled))
    return with_decorators(out, given)


def _check_options(
    package: types.ModuleType, target: Any, options: Mapping[str, Any], label: str
) -> None:
    """Refuses options that this Triton does not have, because Triton ignores them silently."""
    known = getattr(package.compiler.make_backend(target).parse_options({}), "__dict__", {})
    for name in options:
        if known and name not in known:
            raise errors.fault(
                "input", label, "is compiled with an option that Triton does not have",
                expected=errors.nearest(name, sorted(known)), got=f"'{name}'",
            )  # fmt: skip


def named_signature(function: Any, signature: Any, constants: Mapping[str, Any]) -> dict[str, Any]:
    """A signature by name, with the `constants` that a sequence of types omits."""
    if isinstance(signature, Mapping):
        return {**signature, **constants}
    listed = _split(signature) if isinstance(signature, str) else list(signature)
    names = [name for name in function.arg_names if name not in constants]
    if len(listed) > len(names):
        raise errors.fault(
            "input", f"Triton function '{function.__name__}'", "is given too many types",
            expected=", ".join(names), got=f"{len(listed)} for {len(names)}",
        )  # fmt: skip
    return {**dict(zip(names, listed, strict=False)), **constants}


_QUOTED = re.compile(r"""'[^']*'|"[^"]*\"""")


def _read_signature(
    function: Any, signature: Any, label: str
) -> tuple[dict[str, Any], dict[tuple[int, ...], Any], dict[tuple[int, ...], Any]]:
    names = list(function.arg_names)
    if isinstance(signature, str):
        signature = _split(signature)
    if isinstance(signature, Mapping):
        unknown = [name for name in signature if name not in names]
        if unknown:
            raise errors.fault(
                "input", label, f"has no argument '{unknown[0]}'", expected=", ".join(names)
            )
        values = dict(signature)
    else:
        values = dict(zip(names, signature, strict=False))
        if len(list(signature)) > len(names):
            got = f"{len(list(signature))} for {len(names)}"
            raise errors.fault(
                "input", label, "is given too many types", expected=", ".join(names), got=got
            )
    types_: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for index, name in enumerate(names):
        parameter = function.params[index]
        if name not in values:
            if not parameter.has_default:
                advice = "Types and constants go by position, or by name in a dict."
                raise errors.fault(
                    "input", label, f"lacks the type of '{name}'", expected="'*fp32:16', 'i32'",
                    advice=advice,
                )  # fmt: skip
            types_[name], constants[(index,)] = FOLDED, parameter.default
            continue
        types_[name] = _read_type(values[name], (index,), constants, attributes, parameter, label)
    return types_, constants, attributes


def _split(text: str) -> list[str]:
    """Splits at commas outside of brackets, parentheses and quotes."""
    parts, depth, start, quote = [], 0, 0, ""
    for at, c in enumerate(text):
        if quote:
            quote = "" if c == quote else quote
        elif c in "'\"":
            quote = c
        elif c in "([<":
            depth += 1
        elif c in ")]>":
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(text[start:at].strip())
            start = at + 1
    last = text[start:].strip()
    return [*parts, last] if last or parts else []


def _read_type(
    value: Any,
    path: tuple[int, ...],
    constants: dict[tuple[int, ...], Any],
    attributes: dict[tuple[int, ...], Any],
    parameter: Any,
    label: str,
) -> Any:
    """A type in the compiler's form; stores a constant or an attribute in its dict."""
    if isinstance(value, str) and value.startswith("(") and value.endswith(")"):
        value = tuple(_split(value[1:-1].rstrip(",")))
    if isinstance(value, (tuple, list)):
        return tuple(
            _read_type(item, (*path, i), constants, attributes, parameter, label)
            for i, item in enumerate(value)
        )
    if not isinstance(value, str):
        constants[path] = value
        return FOLDED
    literal = _literal(value)
    if literal is not _NO_LITERAL:
        constants[path] = literal
        return FOLDED
    type_, colon, hint = value.rpartition(":")
    if not colon:
        type_, hint = value, ""
    if hint not in ("", "1", "16"):
        raise errors.fault(
            "input", label, f"has a hint of '{parameter.name}' that Triton does not know",
            expected=":16 or :1", got=value,
        )  # fmt: skip
    if parameter.is_constexpr:
        raise errors.fault(
            "input", label, f"takes '{parameter.name}' as a constant",
            expected="its value", got=value, advice="A string is quoted: \"'relu'\".",
        )  # fmt: skip
    if hint == "1":
        constants[path] = 1
        return FOLDED
    if hint == "16":
        attributes[path] = [["tt.divisibility", 16]]
    return type_.strip()


_NO_LITERAL = object()


def _literal(text: str) -> Any:
    words = {"None": None, "True": True, "False": False}
    if text in words:
        return words[text]
    if _QUOTED.fullmatch(text):
        return text[1:-1]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return _NO_LITERAL


def kernels_of(function: Any) -> list[TritonKernel]:
    """The compiled kernels of a @triton.jit function in this process, for all devices."""
    found = []
    for entry in getattr(function_of(function), "device_caches", {}).values():
        kernels = entry[0] if isinstance(entry, (tuple, list)) else entry
        found += [of_compiled(kernel) for kernel in kernels.values() if is_compiled(kernel)]
    return with_decorators(found, function)
