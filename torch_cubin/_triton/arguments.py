"""Maps the user's description of a Triton kernel's arguments to the binary's parameters.

A parameter becomes one or several of the binary's, or none if the compiler folded it. The
compiler's assumptions become requirements of the contract, which each call is checked against.
Over 500 lines: every kind of parameter adds to the same entries and requirements.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from torch_cubin import errors
from torch_cubin._declared.contract import Produced, Scope
from torch_cubin._declared.expressions import (
    Traced,
    TracedOptional,
    TracedTensor,
    TracedText,
    TracedView,
    Tree,
    tree_of,
)
from torch_cubin._declared.kernel_arguments import pointer
from torch_cubin._kernels.scalars import Scalar, TracedScalar
from torch_cubin._triton import folded
from torch_cubin._triton.kernel import (
    FOLDED,
    POINTEES,
    SCALARS,
    Parameter,
    TritonKernel,
    Unknown,
    descriptor,
    descriptor_flags,
)
from torch_cubin._triton.made import of_arguments

_NULL = ["uint64", 0]
_SWIZZLES = (None, "32B", "64B", "128B")
# Triton's number of a descriptor's element type, by dtype.
_ELEMENTS = {
    "fp16": 6, "fp32": 7, "fp64": 9, "bf16": 10, "fp8e4nv": 0, "fp8e5": 0,
    "i8": 0, "u8": 0, "i16": 1, "u16": 1, "i32": 2, "u32": 2, "i64": 4, "u64": 4,
}  # fmt: skip
# Signed ints and the unsigned ones that the hardware treats alike.
_SAME_ELEMENTS = {3: 2, 5: 4}
ALLOCATOR_ALIGN = 256


class Descriptor:
    """A tensor descriptor with a stated padding: see descriptor()."""

    def __init__(self, tensor: Any, padding: str) -> None:
        self.tensor, self.padding = tensor, padding


class TritonArguments(Produced):
    """The arguments of one kernel. `given` is define_op's `args`."""

    def __init__(
        self,
        kernel: TritonKernel,
        given: Any,
        folded: Mapping[str, Any],
        varying: frozenset[str],
        grid: Any = None,
    ) -> None:
        self.kernel, self.given, self.folded, self.varying = kernel, given, folded, varying
        self.grid = grid

    def resolve(self, scope: Scope) -> tuple[list[Any], list[dict[str, Any]]]:
        return Resolver(self, scope).resolve()


class Resolver:
    def __init__(self, arguments: TritonArguments, scope: Scope) -> None:
        self.kernel, self.scope = arguments.kernel, scope
        self.folded, self.varying, self.grid = (
            arguments.folded,
            arguments.varying,
            arguments.grid,
        )
        self.entries: list[list[Any]] = []
        self.requires: list[dict[str, Any]] = []
        self.descriptors = 0
        self.bound: dict[str, list[frozenset[str] | None]] = {}  # accesses, by tensor of the op
        given = scope.trace(arguments.given, "args")
        self.given: Mapping[str, Any] = {}
        self.positional: list[Any] | None = None
        if isinstance(given, Mapping):
            self.given = given
        elif isinstance(given, (list, tuple)):
            self.positional = list(given)
        elif given is not None:
            raise self.refuse("args", "has a wrong type", "a dict by name", type(given).__name__)

    def refuse(
        self, what: str, problem: str, expected: str, got: Any, advice: str = ""
    ) -> errors.Error:
        where = f"{self.scope.label}: {what}"
        return errors.fault(
            "input", where, problem, expected=expected, got=f"{got!s:.120}", advice=advice
        )

    def of(self, parameter: Parameter) -> str:
        return f"kernel argument '{parameter.name or len(self.entries)}'"

    def resolve(self) -> tuple[list[Any], list[dict[str, Any]]]:
        kernel = self.kernel
        passed = [p for p in kernel.parameters if p.type != FOLDED]
        if self.positional is not None and len(self.positional) != len(passed):
            names = ", ".join(p.name or p.type for p in passed)
            raise self.refuse(
                "args", "are another number than the kernel has arguments that are not folded",
                f"{len(passed)} ({names})", len(self.positional),
            )  # fmt: skip
        self._check_names()
        for parameter in kernel.parameters:
            if parameter.type == FOLDED:
                self._fold(parameter)
            else:
                self._pass(parameter)
        for name, value in self.folded.items():  # values that a cache folder does not record
            if not any(p.name == name for p in kernel.parameters):
                self._fold(Parameter(name, FOLDED, value, is_declared=True))
        if not self.kernel.knows_folded:
            folded.check(self)
        self._check_written()
        self.entries += self._hidden()
        unique: dict[str, dict[str, Any]] = {}
        for requirement in self.requires:
            unique.setdefault(json.dumps(requirement, sort_keys=True), requirement)
        return self.entries, list(unique.values())

    def _check_names(self) -> None:
        known = {p.name for p in self.kernel.parameters} | {*self.folded}
        known |= {name.partition(".")[0] for name in known}
        for name in self.given:
            if name in known:
                continue
            if not self.kernel.knows_folded:
                raise self.refuse(
                    f"args '{name}'", "is none of the kernel's arguments, or was folded away",
                    errors.nearest(str(name), sorted(known)), f"'{name}'",
                    "A cache folder does not tell what was folded: say it, folded=dict("
                    f"{name}=VALUE), or give the live kernel.",
                )  # fmt: skip
            raise self.refuse(
                f"args '{name}'", "is none of the kernel's arguments",
                errors.nearest(str(name), sorted(known)), f"'{name}'",
            )  # fmt: skip

    # Accesses through pointers, from the IR.

    def _check_access(self, parameter: Parameter, tensor: TracedTensor) -> None:
        access, name = parameter.access, tensor._name.partition("[")[0]
        self.bound.setdefault(name, []).append(access)
        if access is None:
            return
        what = f"{self.of(parameter)}, the tensor '{tensor._name}',"
        field = "restore_value" if "restore" in access else "reset_to_zero"
        reason = f", as {field} of its autotuner says" * bool(access & {"reset", "restore"})
        if name in self.scope.arguments:
            if "write" in access and name not in self.scope.mutable:
                raise self.refuse(
                    what, f"is written by the kernel{reason}, and the schema says that the op does"
                    " not change it", f"Tensor(a!) {name} in the schema", f"Tensor {name}",
                    "Or bind the tensors in another order.",
                )  # fmt: skip
        elif "first" in access and not self._entry(tensor).get("zeroed"):
            verb = "adds to it atomically" if "update" in access else "reads it"
            raise self.refuse(
                what, f"is fresh memory, and the kernel {verb} before it writes to it{reason}",
                f'"{self._entry(tensor).get("dtype", "dtype")}[...] zeroed",'
                " torch_cubin.empty(..., zeroed=True) or like(..., zeroed=True), or an argument"
                " Tensor(a!) that the caller fills", "uninitialised memory",
            )  # fmt: skip

    def _check_written(self) -> None:
        """Refuses an output that the kernel never writes, as far as its IR shows."""
        made = {name for name in self.bound if name not in self.scope.arguments}
        for name, accesses in self.bound.items():
            if any(access is None or "write" in access for access in accesses):
                continue
            if name in self.scope.mutable:
                errors.warn(
                    f"torch_cubin: {self.scope.label}: the schema says that the op changes"
                    f" '{name}', and the kernel never writes to it.", UserWarning,
                )  # fmt: skip
            elif name in made and name in self.scope.outputs:
                raise self.refuse(
                    f"output '{name}'", "is never written by the kernel", "a store to it",
                    "none in its IR", "Bind the tensors in another order.",
                )  # fmt: skip

    # Values.

    MISSING = object()

    def value(self, parameter: Parameter) -> Any:
        """The user's value for a parameter, or MISSING."""
        if self.positional is not None:
            if parameter.type == FOLDED:
                return self.MISSING
            return self._traced(self.positional.pop(0), parameter.name or parameter.type)
        name = parameter.name
        if name in self.given:
            return self._traced(self.given[name], name)
        base, *indices = name.split(".")
        if indices and base in self.given:
            value = self._traced(self.given[base], base)
            for index in indices:
                if not isinstance(value, (list, tuple)) or int(index) >= len(value):
                    raise self.refuse(
                        f"kernel argument '{base}'", "is a tuple", "a tuple of its items",
                        type(value).__name__,
                    )  # fmt: skip
                value = value[int(index)]
            return self._traced(value, name)
        # A name that is also the op's means the op's argument; each call is checked for the folded
        # value.
        names = self.scope.names
        return names.get(name, self.MISSING)

    def _traced(self, value: Any, what: str) -> Any:
        value = self.scope.trace(value, f"args '{what}'")
        if isinstance(value, str) and value in self.scope.names:
            return self.scope.names[value]
        return value

    # Parameters that the compiler folded.

    def _fold(self, parameter: Parameter) -> None:
        value, constant = self.value(parameter), parameter.value
        what = self.of(parameter)
        if value is self.MISSING:
            # A constexpr parameter always has the compiled value. Another argument that was 1, or a
            # bool, at compilation may differ in a call.
            if parameter.is_declared or constant is None or parameter.name in self.folded:
                return
            raise self.refuse(
                what, f"was {constant!r} when the kernel was compiled, and folded away",
                f"args=dict({parameter.name}=...), which each call is checked against", "nothing",
            )  # fmt: skip
        if isinstance(constant, Unknown):
            if isinstance(value, Unknown) and value == constant:
                return
            raise self.refuse(what, "is a constant that cannot be compared", str(constant), value)
        if constant is None:
            may_be_none = isinstance(value, TracedOptional) or (
                isinstance(value, TracedTensor) and value._name in self.scope.optional
            )
            if may_be_none:
                self._require(parameter, value=value.defined.tree, equals=False)
            elif value is not None:
                raise self.refuse(
                    what, "was None when the kernel was compiled", "None, or what may be None",
                    _shown(value),
                )  # fmt: skip
            return
        if isinstance(constant, str):
            if isinstance(value, TracedText):
                found = torch.dtype if value.type is torch.dtype else str
                if found is str:
                    self._require(parameter, value=(value == constant).tree, equals=True)
                    return
            elif value == constant:
                return
            raise self.refuse(what, "is another constant", repr(constant), _shown(value))
        self._require_number(parameter, value, constant)

    def _require_number(self, parameter: Parameter, value: Any, constant: Any) -> None:
        if isinstance(value, TracedScalar):
            value = value.number
        if isinstance(value, TracedOptional):
            self._require(parameter, value=value.defined.tree, equals=True)
        if isinstance(value, Traced):
            if value.type is bool:
                self._require(parameter, value=value.tree, equals=bool(constant))
            else:
                number = constant if value.type is float else int(constant)
                if number != constant:
                    raise self.refuse(self.of(parameter), "is another constant", repr(constant),
                                      "an integer")  # fmt: skip
                self._require(parameter, value=value.tree, equals=number)
            return
        if isinstance(value, Scalar):
            value = value.value
        if type(value) in (bool, int, float) and value == constant:
            return
        raise self.refuse(
            self.of(parameter), "is another constant than the kernel was compiled for",
            repr(constant), _shown(value),
        )  # fmt: skip

    # Parameters that the binary takes.

    def _pass(self, parameter: Parameter) -> None:
        value = self.value(parameter)
        if value is self.MISSING:
            raise self.refuse(
                self.of(parameter), f"of type {parameter.type} has no value",
                f"args=dict({parameter.name or 'NAME'}=...), or a name of the op's",
                ", ".join(self.scope.names),
            )  # fmt: skip
        if parameter.type in SCALARS:
            self.entries.append(self._scalar(parameter, value))
        elif descriptor(parameter.type) is not None:
            self._descriptor(parameter, value)
        else:
            tensor = self._tensor(parameter, value)
            self._check_dtype(parameter, parameter.type.lstrip("*").removeprefix("k"), tensor)
            self._check_access(parameter, tensor)
            self._align(parameter, tensor, parameter.multiple_of)
            self.entries.append(pointer(tensor._name))

    def _tensor(self, parameter: Parameter, value: Any) -> TracedTensor:
        if not isinstance(value, TracedTensor):
            raise self.refuse(
                self.of(parameter), f"is of type {parameter.type}", "a tensor of the op's",
                _shown(value),
            )  # fmt: skip
        if isinstance(value, TracedView):
            raise self.refuse(
                self.of(parameter), f"is of type {parameter.type}", "a tensor of the op's",
                f"a part of '{value._name}'", "Make the part an argument of the op.",
            )  # fmt: skip
        if value._name in self.scope.optional:
            self._require(parameter, value=value.defined.tree, equals=True)
        return value

    def _entry(self, tensor: TracedTensor) -> dict[str, Any]:
        return self.scope.entries.get(tensor._name.partition("[")[0], {})

    def _align(self, parameter: Parameter, tensor: TracedTensor, multiple: int) -> None:
        """Each call checks the alignment of an address that the pattern does not guarantee."""
        name = tensor._name
        is_made = name.partition("[")[0] not in self.scope.arguments
        promised = ALLOCATOR_ALIGN if is_made else self._entry(tensor).get("align", 16)
        if multiple > promised:
            self._require(parameter, address_of=name, multiple_of=multiple)

    def _check_dtype(self, parameter: Parameter, pointee: str, tensor: TracedTensor) -> None:
        found = self._entry(tensor).get("dtype", "")
        wanted = {POINTEES[pointee]}
        if parameter.is_signless:
            wanted |= {"u" + dtype for dtype in wanted if dtype != "bool"}
            wanted |= {"bool"} if pointee == "i8" else set()
        variable = self.scope.dtypes.get(found)
        allowed = wanted & set(variable if variable is not None else [found])
        if not allowed:
            raise self.refuse(
                self.of(parameter), f"points to {pointee}, and tensor '{tensor._name}' is another",
                " or ".join(sorted(wanted)), found if variable is None else ", ".join(variable),
            )  # fmt: skip
        if variable is None or len(set(variable)) == 1:
            return
        # An output has the dtype of the argument with the same dtype variable.
        name = tensor._name
        if name.partition("[")[0] not in self.scope.arguments:
            same = [
                other for other in self.scope.arguments
                if self.scope.entries.get(other, {}).get("dtype") == found
                and other not in self.scope.optional
            ]  # fmt: skip
            if not same:
                return
            name = sorted(same)[0]
        conditions: list[Tree] = [["is_dtype", name, dtype] for dtype in sorted(allowed)]
        tree = conditions[0]
        for other in conditions[1:]:
            tree = ["or", tree, other]
        self._require(parameter, value=tree, equals=True)

    def _scalar(self, parameter: Parameter, value: Any) -> list[Any]:
        kind = SCALARS[parameter.type]
        what = self.of(parameter)
        if isinstance(value, (TracedScalar, Scalar)):
            if value.type_name not in (kind, kind.partition("_")[0]) and not parameter.is_signless:
                raise self.refuse(what, f"is of type {parameter.type}", kind, value.type_name)
            value = value.number if isinstance(value, TracedScalar) else value.value
        if isinstance(value, TracedOptional):
            self._require(parameter, value=value.defined.tree, equals=True)
        found = value.type if isinstance(value, Traced) else type(value)
        fits: tuple[type, ...] = (int,)
        if kind == "bool":
            fits = (bool,)
        elif "float" in kind:
            fits = (int, float)
        if found not in fits:
            advice = "Compare first: n > 0." if kind == "bool" else ""
            raise self.refuse(
                what, f"is of type {parameter.type}", " or ".join(t.__name__ for t in fits),
                _shown(value), advice,
            )  # fmt: skip
        if "int" in kind:
            self._require_integer(parameter, value, kind)
            if parameter.is_signless:
                kind = "number"
        return [kind, tree_of(value)]

    def _require_integer(self, parameter: Parameter, value: Any, kind: str) -> None:
        multiple = parameter.multiple_of
        if not isinstance(value, Traced):
            if value % multiple:
                raise self.refuse(
                    self.of(parameter), "is not what the kernel was compiled for",
                    f"a multiple of {multiple}", value,
                )  # fmt: skip
            return
        if multiple != 1:
            self._require(parameter, value=value.tree, multiple_of=multiple)
        bits = int("".join(c for c in kind if c.isdigit()))
        if parameter.name in self.varying and (bits < 64 or kind.startswith("u")):
            signed = kind.startswith("int")
            low = -(1 << bits - 1) if signed or parameter.is_signless else 0
            high = (1 << bits - signed) - 1
            self._require(
                parameter, value=value.tree, at_least=low, at_most=min(high, (1 << 63) - 1)
            )

    def _descriptor(self, parameter: Parameter, value: Any) -> None:
        padding = "zero"
        if isinstance(value, Descriptor):
            padding, value = value.padding, value.tensor
            value = self._traced(value, parameter.name)
        tensor = self._tensor(parameter, value)
        dtype, dims = descriptor(parameter.type) or ("", 0)
        self._check_dtype(parameter, dtype, tensor)
        self._check_access(parameter, tensor)
        shape = self._entry(tensor).get("shape")
        is_open = shape is None or any(isinstance(s, str) and s[0] == "*" for s in shape)
        if shape is not None and not is_open and len(shape) != dims:
            raise self.refuse(
                    self.of(parameter), f"is of type {parameter.type}",
                    errors.counted(dims, "dim"), f"tensor '{tensor._name}' of {len(shape)}",
                )  # fmt: skip
        name = tensor._name
        notes = self.kernel.metadata.get("tensordesc_meta")
        sizes = [["size", name, i] for i in range(dims)]
        strides = [["stride", name, i] for i in range(dims)]
        if notes:
            self.entries.append(self._map(parameter, name, dtype, dims, padding))
        else:
            # Triton requires this alignment of descriptors, with and without a tensor map.
            self._align(parameter, tensor, 16)
            self.entries.append(pointer(name))
            self.entries += [["int64", tree] for tree in (*sizes, *strides)]
            flags = [padding == "nan", False]
            self.entries += [["bool", f] for f in flags[: descriptor_flags(self.kernel)]]
            if padding == "nan" and descriptor_flags(self.kernel) == 0:
                raise self.refuse(self.of(parameter), "cannot be padded with NaN by this Triton",
                                  "padding 'zero'", self.kernel.version)  # fmt: skip
            if name.partition("[")[0] in self.scope.arguments:  # outputs and scratch are contiguous
                self._require(parameter, value=["stride", name, dims - 1], equals=1)
        self.entries += [["int32", tree] for tree in sizes]
        self.entries += [["int64", tree] for tree in strides]

    def _map(
        self, parameter: Parameter, name: str, dtype: str, dims: int, padding: str
    ) -> list[Any]:
        notes = self.kernel.metadata["tensordesc_meta"][self.descriptors]
        self.descriptors += 1
        element = _SAME_ELEMENTS.get(notes["elem_type"], notes["elem_type"])
        if element != _ELEMENTS.get(dtype) or len(notes["block_size"]) != dims:
            raise self.refuse(
                self.of(parameter), "has notes that do not fit its type",
                f"{parameter.type}, element type {_ELEMENTS.get(dtype)}",
                f"element type {notes['elem_type']}, block {notes['block_size']}",
            )  # fmt: skip
        return [
            "tensor_map",
            {
                "tensor": name,
                "box": list(notes["block_size"]),
                "swizzle": _SWIZZLES[notes["swizzle"]],
                "interleave": None,
                "l2_promotion": "128B",
                "oob_fill": "nan" if padding == "nan" else "zeros",
                "element_strides": None,
            },
        ]

    def _hidden(self) -> list[list[Any]]:
        metadata = self.kernel.metadata
        size = metadata.get("global_scratch_size", 0)
        scratch = _NULL
        if size:
            align = metadata.get("global_scratch_align", 1) or 1
            scratch = ["workspace", {"bytes_per_block": size, "align": align}]
        return [scratch, _NULL][: self.kernel.hidden]

    def _require(self, parameter: Parameter, **what: Any) -> None:
        name = parameter.name or str(len(self.entries))
        if "value" in what:
            made = {n for n in self.scope.entries if n not in self.scope.arguments}

            def refuse(got: str) -> errors.Error:
                return self.refuse(
                    self.of(parameter), "was specialised by a fact of memory that the op makes,"
                    " which its pattern does not tell", "a size or stride that follows from sizes"
                    " with names of their own", got, "Say it by the arguments.",
                )  # fmt: skip

            what["value"] = of_arguments(what["value"], self.scope.entries, made, refuse)
        self.requires.append({"argument": name, **what})


def _shown(value: Any) -> str:
    if isinstance(value, Traced):
        return f"an expression of type {value.type.__name__}"
    if isinstance(value, TracedTensor):
        return f"the tensor '{value._name}'"
    if isinstance(value, str):
        return f"'{value}', which is no name of the op's"
    return f"{type(value).__name__} {value!r:.60}"
