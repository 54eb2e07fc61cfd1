"""Builds the contract, the JSON that docs/manifest.md describes, from a definition's arguments.

Patterns are parsed and functions traced here. csrc/declared alone validates the result; its errors
get the user's source line from `Builder.places`.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torch_cubin import errors
from torch_cubin._declared import expressions, kernel_arguments
from torch_cubin._declared import patterns as _patterns
from torch_cubin._declared.expressions import (
    Traced,
    TracedList,
    TracedOptional,
    TracedTensor,
    TracedText,
    Tree,
    tree_of,
)
from torch_cubin._declared.patterns import Empty, Like
from torch_cubin._declared.signature import DEVICE_NAMES, Signature

_TYPES = {"int": int, "float": float, "bool": bool, "int?": int, "float?": float, "bool?": bool}


@dataclasses.dataclass
class Choice:
    """One kernel of an op, as given to define_op; `images` are indices into the op's images."""

    images: list[int]
    kernel: str
    args: Any
    grid: Any
    block: Any
    when: Any = None
    shared_memory: Any = 0
    cluster: Any = None
    cooperative: bool = False
    programmatic_dependent_launch: bool = False
    priority: int | None = None
    # For producers (torch_cubin/producers): constants that functions may name, factors of the grid,
    # the record for the manifest, the kernel's group in a tuned table.
    constants: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    grid_factors: tuple[int, int, int] = (1, 1, 1)
    producer: dict[str, Any] | None = None
    group: int = 0
    names_advice: str = ""  # advice for an unknown name, "{}", in functions


class Produced(abc.ABC):
    """A part of the contract that a compiler's metadata determines once the op's names are known. A
    Choice's `args` may be one."""

    @abc.abstractmethod
    def resolve(self, scope: Scope) -> Any:
        """For `args`: the kernel's arguments and its requirements, as the contract's JSON."""


@dataclasses.dataclass(frozen=True)
class Scope:
    """The names of an op and their patterns, for a Produced."""

    label: str  # for errors
    names: Mapping[str, Any]  # the op's own: arguments, sizes, outputs, scratch
    trace: Callable[[Any, str], Any]  # traces a function; returns other values unchanged
    entries: Mapping[str, dict[str, Any]]  # tensors' entries in the contract
    dtypes: Mapping[str, list[str]]  # the dtypes of each variable
    optional: frozenset[str]  # tensor arguments that a call may omit
    arguments: frozenset[str]  # tensor arguments
    varying: tuple[str, ...] = ()  # arguments other than required tensors
    when: Tree = None  # the kernel's condition
    outputs: frozenset[str] = frozenset()
    mutable: frozenset[str] = frozenset()  # tensor arguments that the op changes by its schema


class Builder:
    """Parses a definition's patterns and traces its functions."""

    def __init__(self, signature: Signature, dtypes: Mapping[str, Any] | None) -> None:
        self.signature = signature
        self.op = f"op '{signature.name}'"
        self.names: dict[str, Any] = {}  # the names that traced functions may use
        for argument in signature.arguments:
            name, kind = argument.name, argument.kind
            if kind == "tensors":
                self.names[name] = TracedList(name)
            elif argument.is_tensor:
                self.names[name] = TracedTensor(name)
            elif kind in ("str", "dtype"):
                self.names[name] = TracedText(name, str if kind == "str" else torch.dtype)
            else:
                stand_in = TracedOptional if kind.endswith("?") else Traced
                self.names[name] = stand_in(["number", name], _TYPES[kind])
        self.dtypes = {str(name): _dtype_list(listed) for name, listed in (dtypes or {}).items()}
        self.entries: dict[str, dict[str, Any]] = {}
        self.sizes: set[str] = set()  # sizes bound by patterns of required tensors
        # Where the user wrote each part of the contract, by the part's name in C++'s errors.
        self.places: dict[str, str] = {}

    def refuse(self, what: str, problem: str, expected: str, got: Any) -> errors.Error:
        where = f"{self.op}: {what}"
        return errors.fault("input", where, problem, expected=expected, got=f"{got!s:.120}")

    def trace(
        self, value: Any, what: str, names: Mapping[str, Any], part: str, advice: str = ""
    ) -> Any:
        """Traces a function; returns other values unchanged. `part`: of the contract."""
        if not isinstance(value, Callable) or isinstance(value, type):  # type: ignore[arg-type]
            return value
        traced = expressions.trace(value, names, f"{self.op}: {what}", self.sizes, advice)
        code = value.__code__
        self.places[part] = expressions.place(code.co_filename, code.co_firstlineno)
        return traced

    # Tensors.

    def tensors(self, patterns: Mapping[str, Any]) -> None:
        """Parses `tensors=`: an entry for each tensor argument and output."""
        if not isinstance(patterns, Mapping):
            raise errors.wrong_type(f"{self.op}: tensors", "a dict of patterns by name", patterns)
        outputs = self.signature.outputs
        for name, pattern in patterns.items():
            if name in outputs:
                continue
            what = f"tensors['{name}']"
            if not isinstance(pattern, str):
                raise self.refuse(what, "is no pattern", 'a str, as "float32[m, k]"', repr(pattern))
            self.entries[name] = _patterns.parse(pattern, f"{self.op}: {what}")
            self._check_dtype(what, self.entries[name]["dtype"])
        for argument in self.signature.arguments:
            if argument.kind == "tensor" and argument.name in self.entries:
                shape = self.entries[argument.name]["shape"] or ()
                self.sizes |= {size for size in shape if isinstance(size, str) and size[0] != "*"}
                self.sizes |= {found[0] for found in map(_patterns.shifted_name, shape) if found}
        self.sizes -= self.names.keys()
        for name in sorted(self.sizes & {*DEVICE_NAMES}):
            raise self.refuse(f"tensors, size '{name}'", "has a name of the device's",
                              "another name", name)  # fmt: skip
        for name in outputs:
            if name in patterns:
                part = f"tensors.{name}"
                self.entries[name] = self._made(f"tensors['{name}']", patterns[name], part)

    def _check_dtype(self, what: str, dtype: str) -> None:
        """Refuses an unknown dtype, naming the nearest ones."""
        if dtype in self.dtypes or isinstance(getattr(torch, dtype, None), torch.dtype):
            return
        known = [name for name, value in vars(torch).items() if isinstance(value, torch.dtype)]
        expected = errors.nearest(dtype, [*self.dtypes, *known])
        if "(nearest of" not in expected:
            expected = "a name of torch's, as float32, or a variable of dtypes="
        raise self.refuse(f"{what}: dtype", "is unknown", expected, f"'{dtype}'")

    def _made(self, what: str, pattern: Any, part: str) -> dict[str, Any]:
        """The entry of an output or scratch."""
        value = pattern
        if not isinstance(pattern, (str, Empty, Like)):
            value = self.trace(pattern, what, self._scope(device=False), part)
        if isinstance(value, str):
            entry = _patterns.parse(value, f"{self.op}: {what}", made=True)
            self._check_dtype(what, entry["dtype"])
            if entry["shape"] is None:
                expected = f'"{entry["dtype"]}[*s]", or torch_cubin.like("x")'
                raise self.refuse(what, "has no sizes, which the op allocates", expected, value)
            return entry
        if not isinstance(value, (Empty, Like)):
            expected = "a str, torch_cubin.empty(shape, dtype) or torch_cubin.like(x)"
            raise self.refuse(what, "is no pattern", expected, type(value).__name__)
        tensors = {a.name: self.entries.get(a.name) for a in self.signature.arguments}
        return _patterns.made(value, tensors, f"{self.op}: {what}")

    def _scope(self, *, device: bool) -> dict[str, Any]:
        sizes = {name: Traced(["number", name], int) for name in self.sizes}
        of_device = {name: Traced([name], int) for name in DEVICE_NAMES} if device else {}
        return {**of_device, **sizes, **self.names}

    def scratch(self, patterns: Mapping[str, Any] | None) -> list[dict[str, Any]]:
        out = []
        for name, pattern in (patterns or {}).items():
            entry = self._made(f"scratch['{name}']", pattern, f"scratch.{name}")
            kept = {"name": name, "dtype": entry["dtype"], "shape": entry["shape"]}
            out.append({**kept, "zeroed": True} if entry.get("zeroed") else kept)
        return out

    # Kernels.

    def scope_of(
        self,
        names: Mapping[str, Any],
        what: str,
        part: str,
        made: Sequence[dict[str, Any]] = (),
        constants: Mapping[str, Any] | None = None,
        when: Tree = None,
        advice: str = "",
    ) -> Scope:
        """The op's names for a Produced; functions may also name `constants`."""
        traced = {**names, **(constants or {})}
        kinds = {argument.name: argument.kind for argument in self.signature.arguments}
        return Scope(
            label=f"{self.op}: {what}",
            names=names,
            trace=lambda value, which: self.trace(value, f"{what}: {which}", traced, part, advice),
            entries={**self.entries, **{entry["name"]: entry for entry in made}},
            dtypes=self.dtypes,
            optional=frozenset(name for name, kind in kinds.items() if kind == "tensor?"),
            arguments=frozenset(a.name for a in self.signature.arguments if a.is_tensor),
            varying=tuple(
                name for name, kind in kinds.items() if kind not in ("tensor", "tensors")
            ),
            when=when,
            outputs=frozenset(self.signature.outputs),
            mutable=frozenset(a.name for a in self.signature.arguments if a.mutable),
        )

    def tuned(self, tuned: Produced) -> Any:
        """The contract's tuned table."""
        return tuned.resolve(self.scope_of(self._scope(device=True), "tuned", "tuned"))

    def kernel(self, choice: Choice, scratch: list[dict[str, Any]], index: int) -> dict[str, Any]:
        """The contract's entry of a kernel."""
        made = [*self.signature.outputs, *(entry["name"] for entry in scratch)]
        own = {**self._scope(device=True), **{name: TracedTensor(name) for name in made}}
        arguments = {**self._scope(device=True), **choice.constants}
        everything = {**own, **choice.constants}
        self.places[f"kernels[{index}]"] = f"kernel '{choice.kernel}'"
        if "row" in choice.constants and "row" in own:
            raise self.refuse("names", "has a name of choices()", "another name", "row")

        advice = choice.names_advice

        def traced(field: str, names: Mapping[str, Any]) -> Any:
            what = f"kernel '{choice.kernel}': {field}"
            value, part = getattr(choice, field), f"kernels[{index}].{field}"
            if isinstance(value, (list, tuple)) and field != "args":
                return [self.trace(item, what, names, part, advice) for item in value]
            return self.trace(value, what, names, part, advice)

        def triple(field: str) -> list[Tree]:
            values = traced(field, everything)
            values = list(values) if isinstance(values, (list, tuple)) else [values]
            trees = [tree_of(value) for value in values]
            return trees + [1] * (3 - len(trees)) if trees else trees

        when = None if choice.when is None else tree_of(traced("when", arguments))
        requires: list[dict[str, Any]] = []
        if isinstance(choice.args, Produced):
            part = f"kernels[{index}].args"
            what = f"kernel '{choice.kernel}'"
            of_op = self.scope_of(own, what, part, scratch, choice.constants, when, advice)
            args, requires = choice.args.resolve(of_op)
        else:
            args = traced("args", everything)
            where = self.places.get(f"kernels[{index}].args", "")
            label = f"{self.op}: kernel '{choice.kernel}': args" + (f" at {where}" if where else "")
            args = kernel_arguments.entries(args, everything, label)
        grid = triple("grid")
        if len(grid) == 3:
            grid = [_times(tree, n) for tree, n in zip(grid, choice.grid_factors, strict=True)]
        entry = {
            "when": when,
            "images": list(choice.images),
            "kernel": choice.kernel,
            "args": args,
            "grid": grid,
            "block": triple("block"),
            "shared_memory": tree_of(traced("shared_memory", everything)),
            "cluster": None if choice.cluster is None else triple("cluster"),
            "cooperative": choice.cooperative,
            "programmatic_dependent_launch": choice.programmatic_dependent_launch,
            "priority": choice.priority,
        }
        if requires:
            entry["requires"] = requires
        if choice.producer is not None:
            entry["producer"] = choice.producer
        if choice.group:
            entry["group"] = choice.group
        return entry


def _times(tree: Tree, factor: int) -> Tree:
    if factor == 1:
        return tree
    return tree * factor if isinstance(tree, int) else ["mul", tree, factor]


def _dtype_list(listed: Any) -> list[str]:
    several = isinstance(listed, (list, tuple, set, frozenset))
    texts = [str(dtype).removeprefix("torch.") for dtype in (listed if several else [listed])]
    # Sorted, because the same definition must give the same contract.
    return sorted(texts) if isinstance(listed, (set, frozenset)) else texts


def build(
    signature: Signature,
    *,
    tensors: Mapping[str, Any],
    dtypes: Mapping[str, Any] | None,
    scratch: Mapping[str, Any] | None,
    choices: Sequence[Choice],
    backward: str | None,
    jit: bool,
    tuned: Produced | None = None,
) -> tuple[dict[str, Any], dict[str, str]]:
    """The contract, and where the user wrote each part. Raises InputError [input] for patterns that
    do not parse and functions that cannot be traced."""
    builder = Builder(signature, dtypes)
    builder.tensors(tensors)
    memory = builder.scratch(scratch)
    contract: dict[str, Any] = {
        "schema": signature.text,
        "dtypes": builder.dtypes,
        "tensors": builder.entries,
        "outputs": list(signature.outputs),
        "scratch": memory,
        "kernels": [builder.kernel(choice, memory, i) for i, choice in enumerate(choices)],
    }
    if backward is not None:
        contract["backward"] = backward
    if jit:
        contract["jit"] = True
    if tuned is not None:
        contract["tuned"] = builder.tuned(tuned)
    return contract, builder.places
