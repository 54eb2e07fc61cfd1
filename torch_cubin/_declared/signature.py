"""An op's schema: its arguments by kind, and the names of its outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from torch_cubin import errors
from torch_cubin._native import library
from torch_cubin._ops import checks
from torch_cubin._pytorch import operators

# PyTorch's types, as FunctionSchema prints them, and their kinds here.
KINDS = {
    "Tensor": "tensor",
    "Optional[Tensor]": "tensor?",
    "List[Tensor]": "tensors",
    "int": "int",
    "SymInt": "int",
    "float": "float",
    "bool": "bool",
    "Optional[int]": "int?",
    "Optional[SymInt]": "int?",
    "Optional[float]": "float?",
    "Optional[bool]": "bool?",
    "str": "str",
    "ScalarType": "dtype",
}
# Names that traced functions may use besides the op's own.
DEVICE_NAMES = ("sm", "multiprocessors")


@dataclasses.dataclass(frozen=True)
class Argument:
    name: str
    kind: str  # a value of KINDS
    mutable: bool
    keyword_only: bool
    has_default: bool
    default: Any

    @property
    def is_tensor(self) -> bool:
        return self.kind in ("tensor", "tensor?", "tensors")


@dataclasses.dataclass(frozen=True)
class Signature:
    """`text` is the schema as the user wrote it; `name` is "mylib::vec_add", with the overload if
    any."""

    text: str
    name: str
    arguments: tuple[Argument, ...]
    outputs: tuple[str, ...]
    single: bool  # one output that is not a tuple

    @property
    def mutates(self) -> bool:
        return any(argument.mutable for argument in self.arguments)

    @property
    def namespace(self) -> str:
        return self.name.partition("::")[0]

    @property
    def local_name(self) -> str:
        """Without the namespace: "vec_add", or "vec_add.overload"."""
        return self.name.partition("::")[2]

    def refuse(self, problem: str, expected: str, got: str = "") -> errors.Error:
        return errors.fault("input", f"op '{self.name}'", problem, expected=expected, got=got)

    def check_differentiable(self) -> None:
        """Raises InputError [input] if the op cannot have a derivative."""
        library.check_schema(self.text, differentiable=True)

    def overload(self) -> Any:
        """torch.ops.mylib.vec_add.default."""
        name, _, overload = self.local_name.partition(".")
        packet = getattr(getattr(torch.ops, self.namespace), name)
        if (overload or "default") not in packet.overloads():
            operators.refresh_packet(packet)
        return getattr(packet, overload or "default")

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Every argument by name. The dispatcher omits arguments that equal their default."""
        values = {}
        for index, argument in enumerate(self.arguments):
            if index < len(args):
                values[argument.name] = args[index]
            else:
                values[argument.name] = kwargs.get(argument.name, argument.default)
        return values

    def unbind(self, values: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The positional and the keyword-only arguments for the values of bind()."""
        args = [values[a.name] for a in self.arguments if not a.keyword_only]
        return args, {a.name: values[a.name] for a in self.arguments if a.keyword_only}

    def check_given(self, values: Mapping[str, Any]) -> None:
        """Raises InputError [input] if a call passes None for a required tensor.

        The dispatcher accepts None for any Tensor.
        """
        for argument in self.arguments:
            if argument.kind == "tensor" and values[argument.name] is None:
                what = f"op '{self.name}' argument '{argument.name}'"
                advice = "An argument that may be omitted is 'Tensor?' in the schema."
                checks.fail(what, "is missing", "a tensor", "None", advice)

    def tensors(self, values: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor among the values, with its name: "x", "xs[2]"."""
        for argument in self.arguments:
            value = values[argument.name]
            if argument.kind == "tensors":
                for index, item in enumerate(value):
                    yield f"{argument.name}[{index}]", item
            elif argument.is_tensor and value is not None:
                yield argument.name, value


def parse(schema: str) -> Signature:
    """Raises InputError [input] for schemas that a declared op cannot have."""
    label = f"schema {schema!r:.200}"
    if not isinstance(schema, str):
        raise errors.wrong_type(label, "a str", schema)
    library.check_schema(schema)
    said = operators.refusal_of_schema(schema)
    if said:
        raise errors.fault("input", label, "does not parse", got=said)
    parsed = operators.parse_schema(schema)
    name = parsed.name + (f".{parsed.overload_name}" if parsed.overload_name else "")
    outputs = tuple(result.name or "out" for result in parsed.returns)
    arguments = tuple(map(_argument, parsed.arguments))
    return Signature(schema, name, arguments, outputs, len(outputs) == 1)


def _argument(argument: Any) -> Argument:
    kind = KINDS[str(argument.real_type)]
    default = argument.default_value if argument.has_default_value() else None
    if kind == "dtype" and isinstance(default, int):
        default = getattr(torch, _NUMBERS[default])
    alias, has_default = argument.alias_info, argument.has_default_value()
    return Argument(
        argument.name, kind, alias is not None, argument.kwarg_only, has_default, default
    )


# c10::ScalarType's numbers, which a schema's default uses for a dtype.
_NUMBERS = {
    0: "uint8", 1: "int8", 2: "int16", 3: "int32", 4: "int64", 5: "float16", 6: "float32",
    7: "float64", 8: "complex32", 9: "complex64", 10: "complex128", 11: "bool", 15: "bfloat16",
    23: "float8_e5m2", 24: "float8_e4m3fn", 25: "float8_e5m2fnuz", 26: "float8_e4m3fnuz",
    27: "uint16", 28: "uint32", 29: "uint64", 44: "float8_e8m0fnu", 45: "float4_e2m1fn_x2",
}  # fmt: skip
