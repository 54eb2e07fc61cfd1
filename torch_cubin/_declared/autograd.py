"""Derivatives of declared ops: the user's formula, or an error for an op without one.

Two paths lead to the same autograd.Function below:

- Without transforms, the kernel on the Autograd key. An op gets it with its first formula; until
  then its calls run no Python, and C++ refuses inputs that require grad.
- Under torch.func's transforms, the kernel on functorch's front key, which every op has. The C++
  kernel below it would see plain tensors, and the derivative would be lost silently. Other calls do
  not pay for it.

The autograd.Function behaves as in user code: derivatives of every order compose if the formula's
own ops have them, vmap calls the op once for each item, forward mode is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_cubin import errors
from torch_cubin._declared import function_digest
from torch_cubin._declared.contract_call import no_derivative, no_forward_mode
from torch_cubin._declared.signature import Signature
from torch_cubin._pytorch import transforms

_PLAIN = torch.contiguous_format


@dataclasses.dataclass(frozen=True)
class Formula:
    """The arguments of register_autograd, with torch.library's meaning."""

    backward: Callable[..., Any]
    setup_context: Callable[..., None] | None = None
    of_contract: bool = False  # made of the op's contract alone

    def digest(self) -> bytes:
        """Differs where the derivative does, for the keys of caches of graphs."""
        if self.of_contract:
            return b""
        return function_digest.digest(self.backward, self.setup_context)


@dataclasses.dataclass
class _Invocation:
    """One call without its tensors, which are operands of the Function."""

    op: Any  # the OpOverload
    signature: Signature
    formula: Formula | None
    values: dict[str, Any]
    places: list[tuple[str, int | None]] = dataclasses.field(default_factory=list)

    def operands(self) -> list[Tensor]:
        """Removes the tensors from `values` and returns them."""
        out = []
        for argument in self.signature.arguments:
            value = self.values[argument.name]
            if argument.kind == "tensors":
                self.places += [(argument.name, index) for index in range(len(value))]
                out += value
                self.values[argument.name] = [None] * len(value)
            elif argument.is_tensor and value is not None:
                self.places.append((argument.name, None))
                out.append(value)
                self.values[argument.name] = None
        return out

    def filled(self, operands: Sequence[Any], rest: bool = True) -> dict[str, Any]:
        """The values with `operands` in place of the tensors; without `rest`, all others are
        False."""
        values = dict(self.values)
        for name, value in values.items():
            if isinstance(value, list):
                values[name] = list(value)
            elif not rest:
                values[name] = False
        for (name, index), operand in zip(self.places, operands, strict=True):
            if index is None:
                values[name] = operand
            else:
                values[name][index] = operand
        return values

    def call(self, operands: Sequence[Any]) -> Any:
        args, kwargs = self.signature.unbind(self.filled(operands))
        return self.op(*args, **kwargs)

    def needs(self, flags: Sequence[bool]) -> tuple[Any, ...]:
        """The formula's ctx.needs_input_grad: one entry for each positional argument."""
        values = self.filled(flags, rest=False)
        return tuple(self.signature.unbind(values)[0])


class _Derivative(torch.autograd.Function):
    @staticmethod
    def forward(invocation: _Invocation, *operands: Tensor) -> Any:
        with transforms.below_autograd():
            return invocation.call(operands)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        invocation, *operands = inputs
        ctx._torch_cubin = invocation
        formula = invocation.formula
        if formula is None or formula.setup_context is None:
            return
        args, kwargs = invocation.signature.unbind(invocation.filled(operands))
        more = {"keyword_only_inputs": kwargs} if kwargs else {}
        flags = ctx.needs_input_grad
        ctx.needs_input_grad = invocation.needs(flags[1:])
        try:
            formula.setup_context(ctx=ctx, inputs=tuple(args), output=output, **more)
        finally:
            ctx.needs_input_grad = flags

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        invocation = ctx._torch_cubin
        signature = invocation.signature
        if invocation.formula is None:
            raise no_derivative(signature, "a backward pass through it")
        flags = ctx.needs_input_grad
        ctx.needs_input_grad = invocation.needs(flags[1:])
        try:
            found = invocation.formula.backward(ctx, *grads)
        finally:
            ctx.needs_input_grad = flags
        return (None, *_gradients_of_operands(invocation, found))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise no_forward_mode(ctx._torch_cubin.signature)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], invocation: _Invocation, *operands: Any) -> Any:
        """Calls the op once for each item of the batch."""
        results = []
        for index in range(info.batch_size):
            # Copied, because a kernel's pattern requires a contiguous item at an aligned address.
            items = [
                operand if dim is None else operand.select(dim, index).clone(memory_format=_PLAIN)
                for operand, dim in zip(operands, in_dims[1:], strict=True)
            ]
            results.append(invocation.call(items))
        if not results:
            raise errors.fault(
                "input",
                f"op '{invocation.signature.name}'",
                "is called under vmap with an empty batch",
                expected="one item or more",
            )
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
        return stacked, (0,) * len(stacked)


def _gradients_of_operands(invocation: _Invocation, found: Any) -> list[Any]:
    """The gradients that a formula returned, one for each operand."""
    signature = invocation.signature
    gradients = found if isinstance(found, tuple) else (found,)
    arguments = [argument for argument in signature.arguments if not argument.keyword_only]

    def refuse(expected: str, got: str) -> errors.Error:
        return errors.fault(
            "input",
            f"backward of op '{signature.name}'",
            "returns something else than the gradients of its arguments",
            expected=expected,
            got=got,
        )

    if len(gradients) != len(arguments):
        raise refuse(f"{len(arguments)}, one for each argument, None for none", str(len(gradients)))
    by_name = dict(zip((argument.name for argument in arguments), gradients, strict=True))
    out = []
    for name, index in invocation.places:
        gradient = by_name[name]
        if index is not None and gradient is not None:
            items = [place for place in invocation.places if place[0] == name]
            if not isinstance(gradient, (list, tuple)) or len(gradient) != len(items):
                raise refuse(f"a list of {len(items)} for '{name}'", repr(gradient)[:80])
            gradient = gradient[index]
        if gradient is not None and not isinstance(gradient, Tensor):
            raise refuse(f"a tensor or None for '{name}'", type(gradient).__name__)
        out.append(gradient)
    return out


# NOTE: autograd.Function.apply inspects the signature of `forward` on every call, which takes 40
# us.
_apply = super(torch.autograd.Function, _Derivative).apply


def differentiable(
    op: Any,
    signature: Signature,
    formula: Formula | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Calls the op with its outputs attached to the formula, with or without transforms.

    Without a formula, differentiating the outputs raises the error that says so.
    """
    invocation = _Invocation(op, signature, formula, signature.bind(args, kwargs))
    operands = invocation.operands()
    if transforms.transforms_active():
        return _Derivative.apply(invocation, *operands)
    return _apply(invocation, *operands)


def autograd_kernel(
    op: Any, signature: Signature, formula: Callable[[], Formula | None]
) -> Callable[..., Any]:
    """The op's kernel on the Autograd key."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        found = formula()
        if found is None or not (torch.is_grad_enabled() and _requires_grad(args)):
            with transforms.below_autograd():
                return op(*args, **kwargs)
        return differentiable(op, signature, found, args, kwargs)

    return kernel


def _requires_grad(args: Sequence[Any]) -> bool:
    for arg in args:
        if isinstance(arg, Tensor):
            if arg.requires_grad:
                return True
        elif isinstance(arg, (list, tuple)) and _requires_grad(arg):
            return True
    return False


def transform_kernel(
    op: Any, signature: Signature, formula: Callable[[], Formula | None]
) -> Callable[..., Any]:
    """The kernel on functorch's front key: calls under any combination of grad, jvp and vmap."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if signature.mutates:
            raise errors.fault(
                "input",
                f"op '{signature.name}'",
                "changes its arguments, which torch.func's transforms cannot follow",
                expected="a call outside grad, jvp and vmap",
            )
        return differentiable(op, signature, formula(), args, kwargs)

    return kernel


FRONT_KEY = "FuncTorchDynamicLayerFrontMode"
