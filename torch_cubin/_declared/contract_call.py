"""One call of a declared op as Python sees it: what the contract demands of the arguments, and what
the outputs are. For fake tensors, whose sizes may be symbols, and for the CPU.

The same rules and order as csrc/declared for CUDA tensors. Left out for fake tensors: the address's
alignment, which they do not have, and `when`, whose guards would split graphs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_cubin import errors
from torch_cubin._declared.evaluate import evaluate
from torch_cubin._declared.expressions import Tree
from torch_cubin._declared.signature import Signature
from torch_cubin._kernels.memory import has_memory
from torch_cubin._ops import checks as _checks
from torch_cubin._pytorch import transforms


class Output(NamedTuple):
    """How an output is to be allocated; strides None: contiguous."""

    name: str
    shape: tuple[Any, ...]
    strides: tuple[Any, ...] | None
    dtype: torch.dtype

    def allocate(self, device: torch.device) -> Tensor:
        if self.strides is None:
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)

    def is_layout_of(self, tensor: Tensor) -> bool:
        """Whether a tensor has these strides; dims of one element do not count."""
        if self.strides is None or tensor.numel() == 0:
            return tensor.is_contiguous()
        pairs = zip(tensor.shape, tensor.stride(), self.strides, strict=True)
        return all(size == 1 or found == wanted for size, found, wanted in pairs)


class Call:
    """Checks the arguments (a dict of every one by name) and knows the outputs.

    Raises InputError [input] for arguments that the contract does not allow.
    """

    def __init__(
        self,
        contract: Mapping[str, Any],
        signature: Signature,
        values: Mapping[str, Any],
        devices: Sequence[str],
    ) -> None:
        self.contract, self.signature, self.values = contract, signature, values
        self.op = f"op '{signature.name}'"
        self.mutable = {argument.name for argument in signature.arguments if argument.mutable}
        self.device = self._one_device(devices)
        self.numbers: dict[str, Any] = {}
        self.tensors: dict[str, Tensor | None] = {}
        self.groups: dict[str, tuple] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        for argument in signature.arguments:
            name, value = argument.name, values[argument.name]
            if argument.kind == "tensors":
                self.numbers[f"len({name})"] = len(value)
                self.tensors.update({f"{name}[{i}]": item for i, item in enumerate(value)})
            elif argument.is_tensor:
                self.tensors[name] = value
            else:
                self.numbers[name] = value
                if argument.kind.endswith("?"):
                    self.numbers[f"{name}?"] = value is not None
        required = [(name, tensor) for kind, name, tensor in self._arguments() if kind == "tensor"]
        later = [self._match(self._entry(name), name, tensor) for name, tensor in required]
        for (name, tensor), sizes in zip(required, later, strict=True):
            self._compare(name, tensor, sizes)
        for kind, name, tensor in self._arguments():
            if kind != "tensor":
                shared = dict(self.numbers), dict(self.groups)
                self._compare(name, tensor, self._match(self._entry(name), name, tensor))
                self.numbers, self.groups = shared  # its own sizes end here; dtypes are the call's

    def _arguments(self) -> Iterator[tuple[str, str, Tensor]]:
        """(kind, name, tensor) of each, in the order in which they bind names."""
        for kind in ("tensor", "tensor?", "tensors"):
            for argument in self.signature.arguments:
                if argument.kind != kind:
                    continue
                value = self.values[argument.name]
                if kind == "tensors":
                    for index, item in enumerate(value):
                        yield kind, f"{argument.name}[{index}]", item
                elif value is not None:
                    yield kind, argument.name, value

    def _entry(self, name: str) -> dict[str, Any]:
        return self.contract["tensors"][name.partition("[")[0]]

    def _refuse(
        self, name: str, problem: str, expected: str, got: Any, advice: str = ""
    ) -> errors.Error:
        return _checks.fault(f"{self.op} argument '{name}'", problem, expected, str(got), advice)

    def _one_device(self, devices: Sequence[str]) -> torch.device:
        first: tuple[str, Tensor] | None = None
        for name, tensor in self.signature.tensors(self.values):
            if tensor.device.type not in devices:
                raise self._refuse(
                    name, "is on a wrong device", " or ".join(devices), tensor.device,
                    "Move it with .cuda(), or give define_op a `cpu=` function.",
                )  # fmt: skip
            if tensor.layout is not torch.strided:
                raise self._refuse(name, "is not dense", "torch.strided", tensor.layout)
            if first is None:
                first = name, tensor
            elif tensor.device != first[1].device:
                raise self._refuse(
                    name,
                    "is on another device",
                    f"{first[1].device} like '{first[0]}'",
                    tensor.device,
                    "Move one of them with .to(device).",
                )
        if first is None:
            raise _checks.fault(self.op, "is given no tensor", "at least one", "none")
        return first[1].device

    def _match(self, entry: Mapping[str, Any], name: str, tensor: Tensor) -> list[tuple[int, Tree]]:
        """Binds names; gives the dims whose size is an expression, for _compare."""
        self._match_dtype(entry["dtype"], name, tensor)
        shape = entry["shape"]
        later = []
        if shape is not None:
            stars = [i for i, size in enumerate(shape) if isinstance(size, str) and size[0] == "*"]
            dims = tensor.dim() - (len(shape) - 1) if stars else None
            if dims is None and tensor.dim() != len(shape):
                raise self._wrong_shape(name, tensor, shape)
            if dims is not None and dims < 0:
                raise self._wrong_shape(name, tensor, shape)
            at = 0
            for size in shape:
                if isinstance(size, str) and size[0] == "*":
                    assert dims is not None
                    self._match_group(size, name, tensor, tuple(tensor.shape[at : at + dims]))
                    at += dims
                    continue
                if isinstance(size, str):
                    bound = self.numbers.setdefault(size, tensor.shape[at])
                    self._equal(name, tensor, at, bound, size)
                elif isinstance(size, int):
                    self._equal(name, tensor, at, size, str(size))
                else:
                    later.append((at, size))
                at += 1
        self._match_layout(entry["layout"], name, tensor)
        if name in self.mutable and entry["layout"] in ("rows", "strided"):
            self._match_overlaps(name, tensor)
        self._match_address(entry["align"], name, tensor)
        return later

    def _compare(self, name: str, tensor: Tensor, sizes: list[tuple[int, Tree]]) -> None:
        for dim, tree in sizes:
            label = f"{self.op}: tensors.{name}.shape[{dim}]"
            wanted = evaluate(tree, self.tensors, self.numbers, label)
            self._equal(name, tensor, dim, wanted, str(wanted))

    def _match_dtype(self, dtype: str, name: str, tensor: Tensor) -> None:
        found = _checks.dtype_name(tensor)
        allowed = (self.contract.get("dtypes") or {}).get(dtype)
        if allowed is None:
            if found != dtype:
                raise self._refuse(name, "has a wrong dtype", dtype, found, _CONVERT)
            return
        if found not in allowed:
            raise self._refuse(name, "has a wrong dtype", " or ".join(allowed), found, _CONVERT)
        bound = self.dtypes.setdefault(dtype, tensor.dtype)
        if bound != tensor.dtype:
            raise self._refuse(
                name,
                "has another dtype than an argument before it",
                f"{str(bound).removeprefix('torch.')}, the {dtype} of this call",
                found,
                _CONVERT,
            )

    def _wrong_shape(self, name: str, tensor: Tensor, shape: Sequence[Tree]) -> errors.Error:
        expected = errors.counted(len(shape), "dim")
        if any(isinstance(size, str) and size[0] == "*" for size in shape):
            expected = f"{errors.counted(len(shape) - 1, 'dim')} or more"
        got = f"{tensor.dim()}, shape {_checks.shape_text(tensor.shape)}"
        return self._refuse(name, "has a wrong number of dims", expected, got)

    def _match_group(self, group: str, name: str, tensor: Tensor, sizes: tuple) -> None:
        bound = self.groups.setdefault(group, sizes)
        if len(bound) != len(sizes):
            expected = (
                f"{errors.counted(len(bound), 'dim')} for '{group}', as an argument before it"
            )
            raise self._refuse(name, "has another number of dims", expected, len(sizes))
        for a, b in zip(sizes, bound, strict=True):
            self._require(a == b, name, tensor, f"{_checks.shape_text(bound)} for '{group}'")

    def _equal(self, name: str, tensor: Tensor, dim: int, wanted: Any, text: str) -> None:
        found = tensor.shape[dim]
        if found is not wanted:
            self._require(found == wanted, name, tensor, f"{wanted} in dim {dim}, '{text}'")

    def _require(self, holds: Any, name: str, tensor: Tensor, expected: str) -> None:
        got = f"shape {_checks.shape_text(tensor.shape)}"
        _checks.require(
            holds, f"{self.op} argument '{name}'", "has a wrong shape", expected, got, ""
        )

    def _match_layout(self, layout: str, name: str, tensor: Tensor) -> None:
        if layout == "strided" or (layout != "contiguous" and _is_empty(tensor)):
            return
        if layout == "rows":
            fits = tensor.dim() == 0 or tensor.stride(-1) == 1 or tensor.shape[-1] == 1
            expected = "stride 1 in its last dim"
        elif layout == "dense":
            fits = _is_dense(tensor)
            expected = "no gaps and no overlaps"
        else:
            fits, expected = tensor.is_contiguous(), "a contiguous tensor"
        if not fits:
            advice = "Call .contiguous(), or let its pattern say rows, dense or strided."
            raise self._refuse(name, "has a wrong layout", expected, _strides_text(tensor), advice)

    def _match_overlaps(self, name: str, tensor: Tensor) -> None:
        if _may_overlap(tensor):
            raise self._refuse(
                name,
                "overlaps itself, and the op writes to it",
                "a tensor no two of whose elements share memory",
                _strides_text(tensor),
                "Call .contiguous() on it.",
            )

    def _match_address(self, align: int, name: str, tensor: Tensor) -> None:
        if tensor.device.type == "meta" or type(tensor) not in (Tensor, torch.nn.Parameter):
            return  # a fake tensor
        if not has_memory(tensor):
            expected = "a tensor whose storage is allocated"
            raise self._refuse(name, "has elements but no memory", expected, "a null address")
        if tensor.numel() and tensor.data_ptr() % align:
            raise self._refuse(
                name,
                "is not aligned",
                f"an address that is a multiple of {align} bytes",
                hex(tensor.data_ptr()),
                f"Pass a .clone(), or let its pattern say align={tensor.element_size()}.",
            )

    def outputs(self) -> list[Output]:
        """The outputs, in the schema's order."""
        return [self._output(name) for name in self.contract["outputs"]]

    def _output(self, name: str) -> Output:
        entry = self.contract["tensors"][name]
        dtype = self.dtypes.get(entry["dtype"]) or getattr(torch, entry["dtype"])
        like = entry.get("like")
        if like is not None:
            other = self.values[like]
            return Output(name, tuple(other.shape), tuple(other.stride()), dtype)
        shape: list[Any] = []
        for dim, size in enumerate(entry["shape"]):
            if isinstance(size, str) and size[0] == "*":
                shape.extend(self.groups[size])
                continue
            label = f"{self.op}: tensors.{name}.shape[{dim}]"
            tree = ["number", size] if isinstance(size, str) else size
            value = evaluate(tree, self.tensors, self.numbers, label)
            _checks.require(
                value >= 0,
                f"{self.op} output '{name}'",
                f"has a negative size in dim {dim}",
                "0 or more",
                str(value),
            )
            shape.append(value)
        return Output(name, tuple(shape), None, dtype)


def _is_empty(tensor: Tensor) -> bool:
    return any(type(size) is int and size == 0 for size in tensor.shape)


def _is_dense(tensor: Tensor) -> bool:
    """No gaps and no overlaps: from the innermost on, a dim goes on where the last one ended."""
    left = [dim for dim in range(tensor.dim()) if tensor.shape[dim] != 1]
    step: Any = 1
    while left:
        found = [dim for dim in left if tensor.stride(dim) == step]
        if not found:
            return False
        left.remove(found[0])
        step = step * tensor.shape[found[0]]
    return True


def _may_overlap(tensor: Tensor) -> bool:
    """Whether elements may share memory: taken by stride, a dim must step over those before it."""
    if _is_empty(tensor):
        return False
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    dims = [(stride, size) for stride, size in pairs if type(size) is not int or size > 1]
    if not all(type(number) is int for dim in dims for number in dim):
        return any(type(stride) is int and stride == 0 for stride, _ in dims)  # without guards
    span = 0
    for stride, size in sorted(dims):
        if stride <= span:
            return True
        span += stride * (size - 1)
    return False


def _strides_text(tensor: Tensor) -> str:
    return f"strides {_checks.shape_text(tensor.stride())} of {_shape_text(tensor)}"


def _shape_text(tensor: Tensor) -> str:
    return f"shape {_checks.shape_text(tensor.shape)}"


_CONVERT = "Convert it with .to(dtype)."


def refuse_derivative(signature: Signature, values: Mapping[str, Any]) -> None:
    """What an op does without a backward where a derivative would be lost. C++ does the same.

    In a forward-mode level every call raises, whatever the grad mode: tangents pass under no_grad,
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
    return _checks.fault(
        f"op '{signature.name}'",
        "has no derivative, and a forward-mode level is open",
        "",
        "",
        "Call it outside of torch.func.jvp and forward_ad.dual_level.",
    )


def no_derivative(signature: Signature, got: str) -> errors.Error:
    """The error of differentiating an op that has no derivative of that kind."""
    return _checks.fault(
        f"op '{signature.name}'",
        "has no derivative",
        "a call that needs none",
        got,
        "Give it one (backward=, op.register_autograd), or call it under torch.no_grad().",
    )
