"""From a definition's arguments to its contract, the JSON that docs/manifest.md describes.

Everything that is wrong with a definition, and can be told without its kernels' binaries, is told
here; csrc/declared checks it all again, for packages that come from elsewhere, and alone knows what
no GPU launches (launch_limits.cpp).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torch_cubin import errors
from torch_cubin._declared import expressions as _expressions
from torch_cubin._declared import kernel_arguments as _kernel_arguments
from torch_cubin._declared import patterns as _patterns
from torch_cubin._declared.expressions import (
    Traced,
    TracedList,
    TracedOptional,
    TracedTensor,
    TracedText,
    Tree,
)
from torch_cubin._declared.patterns import Empty, Like
from torch_cubin._declared.signature import DEVICE_NAMES, Signature

_TYPES = {"int": int, "float": float, "bool": bool, "int?": int, "float?": float, "bool?": bool}
_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclasses.dataclass
class Choice:
    """One kernel of an op, as define_op was told; `images` are places among the op's."""

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


class Builder:
    """Traces a definition's functions and checks what they give."""

    def __init__(self, signature: Signature, dtypes: Mapping[str, Any] | None) -> None:
        self.signature = signature
        self.op = f"op '{signature.name}'"
        self.names: dict[str, Any] = {}  # what traced functions may take
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
        self.dtypes = self._dtypes(dtypes)
        self.entries: dict[str, dict] = {}
        self.sizes: set[str] = set()
        self.groups: set[str] = set()

    def refuse(
        self, what: str, problem: str, expected: str = "", got: Any = "", advice: str = ""
    ) -> errors.Error:
        return errors.fault(
            "input",
            f"{self.op}: {what}",
            problem,
            expected=expected,
            got=f"{got!s:.120}",
            advice=advice,
        )

    def _dtypes(self, dtypes: Mapping[str, Any] | None) -> dict[str, list[str]]:
        out = {}
        known = _patterns.dtype_names()
        for name, allowed in (dtypes or {}).items():
            if not isinstance(name, str) or not _NAME.fullmatch(name) or name in known:
                raise self.refuse(
                    "dtypes", "has a wrong variable", "a name that is no dtype's", name
                )
            listed = allowed if isinstance(allowed, (list, tuple, set, frozenset)) else [allowed]
            texts = [str(dtype).removeprefix("torch.") for dtype in listed]
            if isinstance(listed, (set, frozenset)):
                texts.sort()  # the same definition again is the same contract
            for text in texts or [""]:
                if text not in known:
                    raise self.refuse(
                        f"dtypes['{name}']",
                        "has what is no dtype",
                        "torch's dtypes",
                        text or "none",
                    )
            out[name] = texts
        return out

    def trace(self, value: Any, what: str, names: Mapping[str, Any]) -> Any:
        """What a function gives; anything else as it is."""
        if isinstance(value, Callable) and not isinstance(value, type):  # type: ignore[arg-type]
            return _expressions.trace(value, names, f"{self.op}: {what}", self.sizes)
        return value

    def where(self, value: Any, what: str) -> str:
        """The name of a definition's part, with its line where it is a function."""
        code = getattr(value, "__code__", None)
        if code is None:
            return what
        return f"{what} at {_expressions.place(code.co_filename, code.co_firstlineno)}"

    # Tensors.

    def tensors(self, patterns: Mapping[str, Any] | None) -> None:
        """Reads `tensors=`: an entry for each tensor argument and output."""
        arguments = [a for a in self.signature.arguments if a.is_tensor]
        outputs = self.signature.outputs
        if not isinstance(patterns, Mapping):
            got = type(patterns).__name__
            raise self.refuse("tensors", "has a wrong type", "a dict of patterns by name", got)
        wanted = [a.name for a in arguments] + list(outputs)
        for name in patterns:
            if name not in wanted:
                raise self.refuse(
                    f"tensors['{name}']", "is none of the op's", " or ".join(wanted), name
                )
        for name in wanted:
            if name not in patterns:
                raise self.refuse(
                    f"tensors['{name}']",
                    "is missing: a kernel believes its pointers, so a definition must say what they"
                    " point to",
                    "dtype[sizes], as float32[m, k]",
                )
        # The order in which names are bound: docs/manifest.md.
        rank = {"tensor": 0, "tensor?": 1, "tensors": 2}
        arguments.sort(key=lambda argument: rank[argument.kind])
        shared: set[str] = set()  # what entries of required tensors bind
        for argument in arguments:
            entry = self._pattern(argument.name, patterns[argument.name])
            self.entries[argument.name] = entry
            if argument.kind == "tensor":
                shared |= self._binds(entry)
        self.sizes |= {name for name in shared if name[0] != "*"}
        self.groups |= {name for name in shared if name[0] == "*"}
        for argument in arguments:
            own = self._binds(self.entries[argument.name])
            self._check_names(argument.name, self.entries[argument.name], own | shared)
        for name in outputs:
            self.entries[name] = self._made(name, f"tensors['{name}']", patterns[name])
        self._check_variables(arguments)

    def _pattern(self, name: str, pattern: Any) -> dict:
        if not isinstance(pattern, str):
            raise self.refuse(
                f"tensors['{name}']", "is no pattern", 'a str, as "float32[m, k]"', repr(pattern)
            )
        return _patterns.parse(pattern, f"{self.op}: tensors['{name}']")

    def _made(self, name: str, what: str, pattern: Any) -> dict:
        """The entry of an output or of scratch."""
        value = pattern
        if not isinstance(pattern, (str, Empty, Like)):
            value = self.trace(pattern, what, self._scope(device=False))
            what = self.where(pattern, what)
        if isinstance(value, str):
            entry = _patterns.parse(value, f"{self.op}: {what}")
            if entry["shape"] is None or entry["layout"] != "contiguous":
                raise self.refuse(
                    what,
                    "does not say the whole shape of new memory, or asks for gaps in it",
                    "sizes, contiguous",
                    value,
                    "Write 'float32[m, n]', or torch_cubin.like('x') for another's order of dims.",
                )
            self._check_names(name, entry, self.sizes | self.groups)
            return entry
        if not isinstance(value, (Empty, Like)):
            raise self.refuse(
                what,
                "is no pattern",
                "a str, torch_cubin.empty(shape, dtype) or torch_cubin.like(x)",
                type(value).__name__,
            )
        entries = {a.name: self.entries[a.name] for a in self.signature.arguments if a.is_tensor}
        if isinstance(value, Like):
            required = [a.name for a in self.signature.arguments if a.kind == "tensor"]
            entries = {
                name: entries[name]
                for name in required
                if entries[name]["layout"] in ("contiguous", "dense")
            }
        entry = _patterns.made(value, entries, f"{self.op}: {what}")
        self._check_names(name, entry, self.sizes | self.groups, types=(int, float, bool))
        return entry

    def _binds(self, entry: dict) -> set[str]:
        numbers = {a.name for a in self.signature.arguments if a.kind == "int"}
        return {
            size for size in entry["shape"] or () if isinstance(size, str) and size not in numbers
        }

    def _check_names(
        self, name: str, entry: dict, bound: set[str], types: tuple[type, ...] = (int,)
    ) -> None:
        """Every size that an entry names is bound, and is no other thing's name.

        `types`: of the arguments that it may calculate with. A pattern takes ints alone; a function
        has been traced, so whatever it does with others gives an int.
        """
        what = f"tensors['{name}']"
        own = {*self.names, *self.signature.outputs, *DEVICE_NAMES}
        numbers = {a.name for a in self.signature.arguments if a.kind == "int"}
        known = bound | numbers
        for size in sorted(bound):
            text = size.lstrip("*")
            if text in own or (size[0] != "*" and f"*{text}" in bound):
                raise self.refuse(
                    what, f"uses the name '{text}' twice", "a size's name of its own", text
                )
        for size in entry["shape"] or ():
            named = {size} if isinstance(size, str) else _sizes_in(size)
            for text in sorted(named - known):
                number = self.names.get(text.removesuffix("?"))
                if text.startswith("len(") or (
                    isinstance(number, Traced) and (text[-1] == "?" or number.type in types)
                ):
                    continue
                raise self.refuse(
                    what,
                    f"names a size '{text}' that no required tensor binds",
                    ", ".join(sorted(known)) or "a size of an argument's pattern",
                    text,
                )

    def _check_variables(self, arguments: Sequence[Any]) -> None:
        known = _patterns.dtype_names()
        bound = {self.entries[a.name]["dtype"] for a in arguments if a.kind == "tensor"}
        for name, entry in self.entries.items():
            dtype = entry["dtype"]
            if dtype in known:
                continue
            if dtype not in self.dtypes:
                raise self.refuse(
                    f"tensors['{name}']",
                    "has an unknown dtype",
                    "one of torch's, or a variable of dtypes=dict(T=[...])",
                    dtype,
                )
            if name in self.signature.outputs and dtype not in bound:
                raise self.refuse(
                    f"tensors['{name}']",
                    "has a dtype that no required tensor binds",
                    "a variable that an argument has",
                    dtype,
                )

    # Functions.

    def _scope(self, *, device: bool) -> dict[str, Any]:
        sizes = {name: Traced(["number", name], int) for name in self.sizes}
        of_device = {name: Traced([name], int) for name in DEVICE_NAMES} if device else {}
        return {**of_device, **sizes, **self.names}

    def scratch(self, patterns: Mapping[str, Any] | None) -> list[dict]:
        out = []
        taken = {*self.entries, *self.names, *self.sizes}
        for name, pattern in (patterns or {}).items():
            what = f"scratch['{name}']"
            if not _NAME.fullmatch(str(name)) or name in taken:
                raise self.refuse(what, "has a wrong name", "a name of its own", name)
            entry = self._made(name, what, pattern)
            known = {**dict.fromkeys(_patterns.dtype_names()), **self.dtypes}
            if "like" in entry or entry["dtype"] not in known:
                raise self.refuse(
                    what,
                    "is no scratch",
                    "a dtype and sizes",
                    entry.get("like") or entry["dtype"],
                )
            out.append({"name": name, "dtype": entry["dtype"], "shape": entry["shape"]})
        return out

    def kernel(self, choice: Choice, scratch: list[dict]) -> dict[str, Any]:
        """The contract's entry of a kernel."""
        what = f"kernel '{choice.kernel}'"
        arguments = self._scope(device=True)
        made = [*self.signature.outputs, *(entry["name"] for entry in scratch)]
        everything = {**arguments, **{name: TracedTensor(name) for name in made}}
        cluster = choice.cluster
        for name in ("cooperative", "programmatic_dependent_launch"):
            if not isinstance(getattr(choice, name), bool):
                raise self.refuse(f"{what}: {name}", "is no bool", "True or False")
        if choice.priority is not None and type(choice.priority) is not int:
            raise self.refuse(f"{what}: priority", "is no int", "an int or None", choice.priority)
        return {
            "when": self._when(choice.when, f"{what}: when", arguments),
            "images": list(choice.images),
            "kernel": choice.kernel,
            "args": self._args(choice.args, f"{what}: args", everything),
            "grid": self._triple(choice.grid, f"{what}: grid", everything),
            "block": self._triple(choice.block, f"{what}: block", everything),
            "shared_memory": self._integer(
                choice.shared_memory, f"{what}: shared_memory", everything
            ),
            "cluster": None
            if cluster is None
            else self._triple(cluster, f"{what}: cluster", everything),
            "cooperative": choice.cooperative,
            "programmatic_dependent_launch": choice.programmatic_dependent_launch,
            "priority": choice.priority,
        }

    def _args(self, args: Any, what: str, names: Mapping[str, Any]) -> list:
        values = self.trace(args, what, names)
        where = self.where(args, what)
        if not isinstance(values, (list, tuple)):
            values = (values,)
        out = []
        for index, value in enumerate(values):
            if isinstance(value, str) and isinstance(names.get(value), TracedTensor):
                value = names[value]  # args=("x", "out"), without a function
            out.append(_kernel_arguments.entry(value, f"{self.op}: {where}: argument {index}"))
        return out

    def _when(self, when: Any, what: str, names: Mapping[str, Any]) -> Tree:
        if when is None:
            return None
        value = self.trace(when, what, names)
        if isinstance(value, bool) or (isinstance(value, Traced) and value.type is bool):
            return _expressions.tree_of(value)
        got = value.type.__name__ if isinstance(value, Traced) else type(value).__name__
        raise self.refuse(self.where(when, what), "is no condition", "a bool", got)

    def _integer(self, value: Any, what: str, names: Mapping[str, Any]) -> Tree:
        traced = self.trace(value, what, names)
        return self._tree(traced, self.where(value, what))

    def _tree(self, value: Any, where: str) -> Tree:
        if isinstance(value, Traced) and value.type is int:
            return value.tree
        if type(value) is int and 0 <= value < 2**63:
            return value
        got = value.type.__name__ if isinstance(value, Traced) else repr(value)
        raise self.refuse(where, "is no size", "an int of 0 or more", got)

    def _triple(self, value: Any, what: str, names: Mapping[str, Any]) -> list[Tree]:
        where = self.where(value, what)
        if isinstance(value, (list, tuple)):
            values = [self.trace(item, what, names) for item in value]
        else:
            values = self.trace(value, what, names)
        if not isinstance(values, (list, tuple)):
            values = [values]
        if not 1 <= len(values) <= 3:
            raise self.refuse(where, "has a wrong length", "1 to 3 sizes", len(values))
        trees = [self._tree(item, where) for item in values]
        return trees + [1] * (3 - len(trees))


def _sizes_in(tree: Tree) -> set[str]:
    """The names of numbers in a tree."""
    if not isinstance(tree, list):
        return set()
    if tree[0] == "number":
        return {tree[1]}
    return set().union(*(_sizes_in(operand) for operand in tree[1:]))


def build(
    signature: Signature,
    *,
    tensors: Mapping[str, Any] | None,
    dtypes: Mapping[str, Any] | None,
    scratch: Mapping[str, Any] | None,
    choices: Sequence[Choice],
    backward: str | None,
    jit: bool,
) -> dict[str, Any]:
    """The contract. Raises InputError [input] for what is malformed."""
    builder = Builder(signature, dtypes)
    builder.tensors(tensors)
    memory = builder.scratch(scratch)
    contract = {
        "schema": signature.text,
        "dtypes": builder.dtypes,
        "tensors": builder.entries,
        "outputs": list(signature.outputs),
        "scratch": memory,
        "kernels": [builder.kernel(choice, memory) for choice in choices],
    }
    if backward is not None:
        contract["backward"] = backward
    if jit:
        contract["jit"] = True
    return contract
