"""One call of a declared op in Python, for fake tensors and the CPU.

csrc/declared checks a description of each tensor against the contract, exactly as for CUDA tensors.
The outputs' sizes are computed here once more, for symbolic sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_cubin import errors
from torch_cubin._declared.evaluate import evaluate
from torch_cubin._declared.patterns import shifted_name
from torch_cubin._declared.signature import Argument, Signature
from torch_cubin._kernels.memory import has_memory
from torch_cubin._native import library
from torch_cubin._ops import checks
from torch_cubin._pytorch import transforms


class Output(NamedTuple):
    """How to allocate an output. Contiguous if strides is None."""

    name: str
    shape: tuple[Any, ...]
    strides: tuple[Any, ...] | None
    dtype: torch.dtype

    def allocate(self, device: torch.device) -> Tensor:
        if self.strides is None:
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)

    def is_layout_of(self, tensor: Tensor) -> bool:
        """Whether the tensor has these strides; dims with one element are ignored."""
        if self.strides is None or tensor.numel() == 0:
            return tensor.is_contiguous()
        pairs = zip(tensor.shape, tensor.stride(), self.strides, strict=True)
        return all(size == 1 or found == wanted for size, found, wanted in pairs)


def outputs_of(
    contract: Mapping[str, Any],
    signature: Signature,
    values: Mapping[str, Any],
    devices: Sequence[str],
    advice: str,
) -> list[Output]:
    """The outputs of a call, in the schema's order; `values` has every argument by name. `advice`
    is the error's advice for a tensor on none of the `devices`.

    Raises InputError [input] for arguments that the contract does not allow.
    """
    signature.check_given(values)
    for name, tensor in signature.tensors(values):
        what = f"op '{signature.name}' argument '{name}'"
        if tensor.device.type not in devices:
            expected = " or ".join(devices)
            checks.fail(what, "is on a wrong device", expected, str(tensor.device), advice)
        if tensor.layout is not torch.strided:
            checks.fail(what, "is not dense", "torch.strided", str(tensor.layout))
    described = {a.name: _described(a, values[a.name]) for a in signature.arguments}
    answer = checks.ask(library.check_call, {"op": signature.name, "arguments": described})
    sizes = [size for _, tensor in signature.tensors(values) for size in tensor.shape]
    numbers = [value for value in values.values() if not isinstance(value, (Tensor, list, tuple))]
    if answer is None or any(map(checks.is_symbol, [*sizes, *numbers])):
        return _Symbolic(contract, signature, values).outputs()
    return [
        Output(name, tuple(o["sizes"]), tuple(o["strides"]), getattr(torch, o["dtype"]))
        for name, o in zip(contract["outputs"], answer["outputs"], strict=True)
    ]


def _described(argument: Argument, value: Any) -> Any:
    """The JSON that csrc/declared/described_arguments.h reads."""
    if argument.kind == "tensors":
        return [_described_tensor(tensor) for tensor in value]
    if value is None or not isinstance(value, (Tensor, torch.dtype, float, int)):
        return value
    if isinstance(value, Tensor):
        return _described_tensor(value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return str(float(value)) if argument.kind.startswith("float") else value


def _described_tensor(tensor: Tensor) -> dict[str, Any]:
    described = checks.described(tensor)
    if tensor.device.type != "meta" and type(tensor) in (Tensor, torch.nn.Parameter):
        described["address"] = tensor.data_ptr() if has_memory(tensor) else 0  # 0 for fake tensors
    return described


class _Symbolic:
    """Computes the outputs of a call with symbolic sizes."""

    def __init__(
        self, contract: Mapping[str, Any], signature: Signature, values: Mapping[str, Any]
    ) -> None:
        self.contract, self.signature, self.values = contract, signature, values
        self.tensors: dict[str, Tensor | None] = {a.name: None for a in signature.arguments}
        self.tensors.update(signature.tensors(values))
        self.numbers: dict[str, Any] = {}
        self.groups: dict[str, Any] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        for argument in signature.arguments:
            name, value = argument.name, values[argument.name]
            if argument.kind == "tensors":
                self.numbers[f"len({name})"] = len(value)
            elif not argument.is_tensor:
                self.numbers[name] = value
                self.numbers[f"{name}?"] = value is not None
        for name, tensor in signature.tensors(values):
            entry = contract["tensors"][name.partition("[")[0]]
            self.dtypes[entry["dtype"]] = tensor.dtype
        required = [a.name for a in signature.arguments if a.kind == "tensor"]
        later = [part for name in required for part in self._bind(name)]
        for found, tree, label in later:
            self._unify(found, evaluate(tree, self.tensors, self.numbers, label))

    def _bind(self, name: str) -> list[tuple[Any, Any, str]]:
        """Binds the names in a pattern; returns the sizes that must equal expressions."""
        shape, sizes = self.contract["tensors"][name]["shape"], list(self.values[name].shape)
        later = []
        for dim, size in enumerate(shape or ()):
            if isinstance(size, str) and size[0] == "*":
                count = len(sizes) - (len(shape) - 1 - dim)
                taken, sizes = sizes[:count], sizes[count:]
                for found, bound in zip(taken, self.groups.setdefault(size, taken), strict=True):
                    self._unify(found, bound)
                continue
            found = sizes.pop(0)
            if isinstance(size, str):
                self._unify(found, self.numbers.setdefault(size, found))
            elif isinstance(size, int):
                self._unify(found, size)
            elif (shifted := shifted_name(size)) is not None and shifted[0] not in self.numbers:
                self.numbers[shifted[0]] = found - shifted[1]
            else:
                later.append((found, size, f"op '{self.signature.name}': tensors.{name}.shape"))
        return later

    def _unify(self, found: Any, wanted: Any) -> None:
        """Raises if two sizes differ; under torch.compile it also states that they are equal."""
        if found is not wanted:
            what = f"op '{self.signature.name}'"
            checks.require(found == wanted, what, "has a wrong size", str(wanted), str(found))

    def outputs(self) -> list[Output]:
        return [self._output(name) for name in self.contract["outputs"]]

    def _output(self, name: str) -> Output:
        entry = self.contract["tensors"][name]
        dtype = self.dtypes.get(entry["dtype"]) or getattr(torch, entry["dtype"])
        if entry.get("like") is not None:
            other = self.values[entry["like"]]
            return Output(name, tuple(other.shape), tuple(other.stride()), dtype)
        shape: list[Any] = []
        for dim, size in enumerate(entry["shape"]):
            if isinstance(size, str) and size[0] == "*":
                shape.extend(self.groups[size])
                continue
            tree = ["number", size] if isinstance(size, str) else size
            label = f"op '{self.signature.name}': tensors.{name}.shape[{dim}]"
            value = evaluate(tree, self.tensors, self.numbers, label)
            what, problem = f"op '{self.signature.name}' output '{name}'", "has a negative size"
            checks.require(value >= 0, what, problem, "0 or more", str(value))
            shape.append(value)
        return Output(name, tuple(shape), None, dtype)


def refuse_derivative(signature: Signature, values: Mapping[str, Any]) -> None:
    """Raises if an op without a backward would lose a derivative, as C++ does.

    In a forward-mode level every call raises in any grad mode: tangents propagate under no_grad
    too, and C++ cannot see whether a tensor has one.
    """
    if torch.is_grad_enabled():
        for name, tensor in signature.tensors(values):
            if tensor.requires_grad:
                raise no_derivative(signature, f"argument '{name}' requires grad")
    if transforms.dual_level_is_open(*(tensor for _, tensor in signature.tensors(values))):
        raise no_forward_mode(signature)


def no_forward_mode(signature: Signature) -> errors.Error:
    """The error of a call in a forward-mode level."""
    return checks.fault(
        f"op '{signature.name}'",
        "has no derivative, and a forward-mode level is open",
        "",
        "",
        "Call it outside of torch.func.jvp and forward_ad.dual_level.",
    )


def no_derivative(signature: Signature, got: str) -> errors.Error:
    """The error for differentiating an op that has no such derivative."""
    return checks.fault(
        f"op '{signature.name}'",
        "has no derivative",
        "a call that needs none",
        got,
        "Give it one (backward=, op.register_autograd), or call it under torch.no_grad().",
    )
