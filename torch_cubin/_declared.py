"""Declared ops as Python sees them: the object that define_op returns, and what torch is told.

csrc/contract has defined the op and runs it on CUDA. Here it gets what torch takes from Python
alone: the fake implementation, the CPU function, autograd. One registry holds every op of the
process; a definition that is run again changes the op's entry, and the kernels below follow it.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_cubin import _backward_op, _declared_autograd, _lib, _private, _signature, errors
from torch_cubin._contract_call import Call, Output, refuse_derivative
from torch_cubin._declared_autograd import Formula


class Op:
    """A declared op. Calling it calls `torch.ops.<namespace>.<name>`, which is the same op, and
    raises InputError [input] and its kin where that raises a RuntimeError with the same text.

    - `name`: "mylib::vec_add". `schema`: as it was given. `contract`: what the definition became,
      the JSON of docs/manifest.md as a dict.
    - `overload`: the torch._ops.OpOverload, for opcheck and the like.
    """

    def __init__(self, signature: _signature.Signature, contract: dict[str, Any]) -> None:
        self.name = signature.name
        self.schema = signature.text
        self.contract = contract
        self.overload = signature.overload()
        self._signature = signature
        self._cpu: Callable[..., Any] | None = None
        self._formula: Formula | None = None
        self._images: list[tuple[bytes, str]] | None = None  # with names for errors
        self._package: str | None = None  # where it came from
        self._has_autograd_kernel = False
        self._library = torch.library.Library(signature.namespace, "FRAGMENT")
        self._register()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.overload(*args, **kwargs)
        except RuntimeError as error:  # what C++ raises is a plain one
            known = errors.of_text(error)
            if known is None:
                raise
        raise known

    def __repr__(self) -> str:
        return f"<torch_cubin.Op '{self.schema}'>"

    def register_autograd(
        self,
        backward: Callable[..., Any],
        /,
        *,
        setup_context: Callable[..., None] | None = None,
    ) -> None:
        """Gives the op a derivative, as torch.library.register_autograd does.

        `backward(ctx, *grads)` gets a gradient for each output and returns one for each argument of
        the schema, None where there is none; `setup_context(ctx, inputs, output)` saves what it
        needs. Derivatives of higher order, and torch.func.grad and vmap of it, work where the ops
        that `backward` calls have theirs. Forward mode raises.

        Raises InputError [input] for an op that changes its arguments, and for keyword-only
        tensors.
        """
        if not callable(backward) or not (setup_context is None or callable(setup_context)):
            raise self._refuse("register_autograd takes functions", "callables")
        self._check_differentiable()
        self._set_formula(Formula(backward, setup_context))

    def preload(self, device: int | str | torch.device | None = None) -> None:
        """Loads the op's kernels onto a device now (default: PyTorch's current one).

        A first call does the same by itself, inside a CUDA graph capture too.
        """
        from torch_cubin._module import _device_index

        _lib.preload_op(self.name, _device_index(device))

    # What follows is for define_op and packages.

    def _check_differentiable(self) -> None:
        if self._signature.mutates:
            raise self._refuse(
                "changes its arguments, so it can have no derivative", "a schema without (a!)"
            )
        if not self._signature.outputs:
            raise self._refuse("returns nothing that could have a gradient", "an output")
        for argument in self._signature.arguments:
            if argument.keyword_only and argument.is_tensor:
                raise self._refuse(
                    f"has the keyword-only tensor '{argument.name}', which PyTorch's autograd does"
                    " not take",
                    "tensors before the '*' of the schema",
                )

    def _refuse(self, problem: str, expected: str) -> errors.Error:
        return errors.fault("input", f"op '{self.name}'", problem, expected=expected)

    def _set_formula(self, formula: Formula | None) -> None:
        self._formula = formula
        if formula is not None and not self._has_autograd_kernel:
            kernel = _declared_autograd.autograd_kernel(
                self.overload, self._signature, lambda: self._formula
            )
            self._library.impl(self._signature.local_name, kernel, "Autograd")
            _private.forget_dispatch(self.overload)
            self._has_autograd_kernel = True

    def _redefine(self, contract: dict[str, Any]) -> None:
        self.contract = contract
        name = contract.get("backward")
        if name is None:
            self._set_formula(None)
            return
        self._check_differentiable()
        self._set_formula(_backward_op.formula(name, self._signature, attached))

    def _register(self) -> None:
        signature, library = self._signature, self._library

        def fake(*args: Any, **kwargs: Any) -> Any:
            return self._on_fake(signature.bind(args, kwargs))

        def cpu(*args: Any, **kwargs: Any) -> Any:
            return self._on_cpu(signature.bind(args, kwargs))

        torch.library.register_fake(self.name, fake, lib=library)
        library.impl(signature.local_name, cpu, "CPU")
        transform = _declared_autograd.transform_kernel(
            self.overload, signature, lambda: self._formula
        )
        library.impl(signature.local_name, transform, _declared_autograd.FRONT_KEY)

    def _on_fake(self, values: dict[str, Any]) -> Any:
        refuse_derivative(self._signature, values)
        devices = ("cuda", "meta") if self._cpu is None else ("cuda", "cpu", "meta")
        call = Call(self.contract, self._signature, values, devices)
        return self._returned([output.allocate(call.device) for output in call.outputs()])

    def _on_cpu(self, values: dict[str, Any]) -> Any:
        refuse_derivative(self._signature, values)
        cpu = self._cpu
        call = Call(self.contract, self._signature, values, ("cpu",) if cpu else ("cuda",))
        assert cpu is not None  # CPU tensors are refused otherwise
        outputs = call.outputs()
        args, kwargs = self._signature.unbind(values)
        with torch.no_grad(), _private.below_autograd():
            found = cpu(*args, **kwargs)
        for argument in self._signature.arguments:
            # The ops in `cpu` may have run where nothing counts versions.
            if argument.mutable and not values[argument.name].is_inference():
                torch.autograd.graph.increment_version(values[argument.name])
        return self._returned(self._checked(found, outputs, values))

    def _checked(self, found: Any, outputs: list[Output], values: dict[str, Any]) -> list[Tensor]:
        """What `cpu=` returned, laid out as the contract says."""
        results = [found] if self._signature.single else found
        if not outputs and found is None:
            results = []
        label = f"op '{self.name}': what cpu= returns"
        if not isinstance(results, (list, tuple)) or len(results) != len(outputs):
            got = type(found).__name__
            expected = f"{len(outputs)} tensors"
            raise errors.fault("input", label, "is no output of it", expected=expected, got=got)
        inputs = {t.untyped_storage().data_ptr() for _, t in self._signature.tensors(values)}
        out = []
        for result, output in zip(results, outputs, strict=True):
            wanted = f"{output.dtype} of shape {tuple(output.shape)} on the CPU"
            got = type(result).__name__
            if isinstance(result, Tensor):
                got = f"{result.dtype} of shape {tuple(result.shape)} on {result.device}"
            if got.replace("on cpu", "on the CPU") != wanted:
                name = f"'{output.name}'"
                raise errors.fault(
                    "input", f"{label} for {name}", "is wrong", expected=wanted, got=got
                )
            if result.untyped_storage().data_ptr() in inputs or not output.is_layout_of(result):
                result = output.allocate(result.device).copy_(result)
            out.append(result)
        return out

    def _returned(self, tensors: list[Tensor]) -> Any:
        if self._signature.single:
            return tensors[0]
        return tuple(tensors) if tensors else None


_lock = threading.Lock()  # guards the registry
_ops: dict[str, Op] = {}


def find(name: str) -> Op | None:
    """The declared op of that name."""
    return _ops.get(name)


def attached(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a backward op. A declared one without a derivative raises when that is asked for.

    torch.func.grad and create_graph=True run a backward with gradients enabled, whether or not
    second derivatives follow: to refuse the call, as a plain call is refused, would refuse them.
    """
    op = _ops.get(_name_of(overload))
    if op is None or op._formula is not None or not torch.is_grad_enabled():
        return overload(*args, **kwargs)
    return _declared_autograd.differentiable(overload, op._signature, None, args, kwargs)


def _name_of(overload: Any) -> str:
    return overload.name()


def adopt(
    contract: dict[str, Any],
    state: str,
    *,
    cpu: Callable[..., Any] | None = None,
    images: list[tuple[bytes, str]] | None = None,
    package: str | None = None,
) -> Op:
    """The Op of a contract that csrc/contract has defined: "defined", "same" or "swapped"."""
    signature = _signature.parse(contract["schema"])
    with _lock:
        op = _ops.get(signature.name)
        known = op is not None
        if op is None:
            op = Op(signature, contract)
            _ops[signature.name] = op
        if not known or state == "swapped":
            op._redefine(contract)
            # Images are numbered by this very contract: "same" content may number them otherwise.
            op._images, op._package = images, package
        if known and state == "swapped":
            warnings.warn(
                f"torch_cubin [input]: op '{op.name}' is defined again, with other content. Calls"
                " run the new definition from now on; a backward given by register_autograd is"
                " forgotten. What torch.compile made of the old one keeps its sizes:"
                " torch.compiler.reset() forgets it.",
                UserWarning,
                stacklevel=3,
            )
        if cpu is not None or state == "swapped":
            op._cpu = cpu
        return op


__all__ = ["Op", "adopt", "attached", "find"]
