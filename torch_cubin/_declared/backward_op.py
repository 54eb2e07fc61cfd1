"""`backward="ns::op"`: the derivative is another op, whose arguments are matched by name.

The backward op's parameter `grad_out` gets the gradient of the output `out`; parameters named as
the forward's arguments and outputs get those. Its output `grad_x` is the gradient of the forward's
`x`. Arguments without such an output have no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_cubin import errors
from torch_cubin._declared.autograd import Formula
from torch_cubin._declared.signature import Signature
from torch_cubin._pytorch import operators, transforms

ALIGN = 16  # bytes; the default alignment of a pattern


def formula(name: str, signature: Signature, call: Callable[..., Any]) -> Formula:
    """The formula. Its op is looked up on first use, so it may be defined later.

    `call(overload, args, kwargs)` calls the backward op.
    """
    plan: list[_Plan] = []

    def found() -> _Plan:
        if not plan:
            plan.append(_Plan(name, signature))
        return plan[0]

    def setup_context(
        ctx: Any,
        inputs: tuple[Any, ...],
        output: Any,
        keyword_only_inputs: dict[str, Any] | None = None,
    ) -> None:
        values = signature.bind(inputs, keyword_only_inputs or {})
        outputs = (output,) if signature.single else output
        values.update(zip(signature.outputs, outputs, strict=True))
        ctx.torch_cubin_values = {}
        tensors: list[Tensor] = []
        for wanted in found().parameters:
            value = values.get(wanted)
            if isinstance(value, Tensor):
                ctx.torch_cubin_values[wanted] = len(tensors), Tensor
                tensors.append(value)
            elif isinstance(value, (list, tuple)):
                ctx.torch_cubin_values[wanted] = (len(tensors), len(value)), list
                tensors += value
            else:
                ctx.torch_cubin_values[wanted] = value, None
        ctx.save_for_backward(*tensors)

    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        made = found()
        saved = ctx.saved_tensors
        by_name: dict[str, Any] = {}
        for wanted, (value, kind) in ctx.torch_cubin_values.items():
            if kind is Tensor:
                by_name[wanted] = saved[value]
            elif kind is list:
                by_name[wanted] = list(saved[value[0] : value[0] + value[1]])
            else:
                by_name[wanted] = value
        for output, grad in zip(signature.outputs, grads, strict=True):
            by_name[f"grad_{output}"] = _without_gaps(grad)
        args = tuple(by_name[parameter] for parameter in made.positional)
        kwargs = {parameter: by_name[parameter] for parameter in made.keyword_only}
        results = call(made.overload, args, kwargs)
        results = (results,) if isinstance(results, Tensor) else results
        gradients = dict(zip(made.gradients, results, strict=True))
        positional = [argument.name for argument in signature.arguments]
        positional = positional[: len(ctx.needs_input_grad)]
        needed = zip(positional, ctx.needs_input_grad, strict=True)
        return tuple(gradients.get(name) if need else None for name, need in needed)

    return Formula(backward, setup_context, of_contract=True)


def _without_gaps(grad: Tensor) -> Tensor:
    """Makes a gradient contiguous, as kernels' patterns require; autograd passes expanded ones and
    slices."""
    grad = grad.contiguous()
    if type(grad) is Tensor and not transforms.is_wrapped(grad):
        return grad if grad.data_ptr() % ALIGN == 0 else grad.clone()
    return grad


class _Plan:
    """Maps the backward op's parameters and outputs to the forward's."""

    def __init__(self, name: str, signature: Signature) -> None:
        label = f"backward '{name}' of op '{signature.name}'"

        def refuse(problem: str, expected: str, got: str, advice: str = "") -> errors.Error:
            return errors.fault("input", label, problem, expected=expected, got=got, advice=advice)

        namespace, _, local = name.partition("::")
        local, _, overload = local.partition(".")
        try:
            packet = getattr(getattr(torch.ops, namespace), local)
            self.overload = getattr(packet, overload or "default")
        except (AttributeError, RuntimeError):
            raise refuse(
                "is not defined",
                "an op that is there at the first call that may be differentiated",
                "no such op",
                f"Define '{name}' with torch_cubin.define_op or torch.library, or load the package"
                " that has it.",
            ) from None
        schema = operators.schema_of(self.overload)
        known = [argument.name for argument in signature.arguments]
        known += [*signature.outputs, *(f"grad_{output}" for output in signature.outputs)]
        self.positional: list[str] = []
        self.keyword_only: list[str] = []
        for argument in schema.arguments:
            if argument.name not in known:
                raise refuse("has a parameter of another name", ", ".join(known), argument.name)
            (self.keyword_only if argument.kwarg_only else self.positional).append(argument.name)
        tensors = [a.name for a in signature.arguments if a.kind in ("tensor", "tensor?")]
        self.gradients: list[str] = []
        for result in schema.returns:
            target = (result.name or "").removeprefix("grad_")
            if target not in tensors or result.name == target:
                expected = " or ".join(f"grad_{tensor}" for tensor in tensors)
                raise refuse("has an output of another name", expected, result.name or "none")
            self.gradients.append(target)
        grads = {f"grad_{output}" for output in signature.outputs}
        parameters = {*self.positional, *self.keyword_only}
        self.parameters = sorted(parameters - grads)


__all__ = ["formula"]
