"""Declared ops in Python: the object that define_op returns, and its registrations with torch.

csrc/declared has defined the op and runs it on CUDA. This file registers the parts that PyTorch
takes from Python: the fake implementation, the CPU function, autograd. One registry holds every op
of the process; a repeated definition changes the op's entry, and the registered kernels follow it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from torch_cubin import errors
from torch_cubin._declared import autograd, backward_op
from torch_cubin._declared import signature as _signature
from torch_cubin._declared.autograd import Formula
from torch_cubin._declared.contract_call import Output, outputs_of, refuse_derivative
from torch_cubin._declared.package_images import Image, of_package
from torch_cubin._kernels.memory import has_memory
from torch_cubin._native import library as _library
from torch_cubin._native.locks import fork_safe_lock
from torch_cubin._ops import layouts, mutated
from torch_cubin._pytorch import operators, transforms


class Op:
    """A declared op. Calling it calls `torch.ops.<namespace>.<name>`, which is the same op; errors
    are InputError [input] and other torch_cubin errors here, RuntimeError with the same text there.

    - `name`: "mylib::vec_add". `schema`: as it was given. `contract`: the JSON of docs/manifest.md
      as a dict.
    - `overload`: the `torch.ops` overload, for opcheck and the like.
    """

    def __init__(self, signature: _signature.Signature, contract: dict[str, Any]) -> None:
        self.name = signature.name
        self.schema = signature.text
        self.contract = contract
        self.overload = signature.overload()
        self._signature = signature
        self._cpu: Callable[..., Any] | None = None
        self._formula: Formula | None = None
        self._digest: bytes | None = None  # digest_of_traces()'s of this op
        self._images: list[Image] | None = None  # by the contract's indices, if known
        self._package: str | None = None  # the package that it was loaded from
        self._is_defined_here = False  # by define_op, whose `cpu=` it may have, in this process
        self._has_autograd_kernel = False
        self._library = operators.registry(signature.namespace, "FRAGMENT")
        try:
            self._register()
            self._redefine(contract)
        except BaseException:
            operators.destroy(self._library)  # no partial registration remains
            raise

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.overload(*args, **kwargs)
        except RuntimeError as error:  # C++ raises plain RuntimeErrors
            known = errors.of_text(error)
            if known is None:
                raise
        raise known

    # A copy is the same op, since torch.ops has one op for a name.
    def __copy__(self) -> Op:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Op:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _op_of_name, (self.name,)

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
        the schema, None for arguments without one; `setup_context(ctx, inputs, output)` saves what
        it needs. Derivatives of higher order, and torch.func.grad and vmap of it, work if the ops
        that `backward` calls have theirs. Forward mode raises.

        Raises InputError [input] for an op that changes its arguments, and for keyword-only
        tensors.
        """
        if not callable(backward) or not (setup_context is None or callable(setup_context)):
            raise self._signature.refuse("register_autograd takes functions", "callables")
        self._signature.check_differentiable()
        self._set_formula(Formula(backward, setup_context))

    def preload(self, device: int | str | torch.device | None = None) -> None:
        """Loads the op's kernels onto a device now (default: PyTorch's current one).

        Otherwise the first call does, also inside a CUDA graph capture.
        """
        from torch_cubin._kernels.launch import device_index

        _library.preload_op(self.name, device_index(device))

    # Internal: for define_op and packages.

    def _set_formula(self, formula: Formula | None) -> None:
        needed = transforms.BACKWARD_OF_DECLARED_OPS
        if formula is not None and not needed.available:
            raise needed.error(f"the derivative of op '{self.name}'")
        self._formula, self._digest = formula, None
        if formula is not None and not self._has_autograd_kernel:
            kernel = autograd.autograd_kernel(self.overload, self._signature, lambda: self._formula)
            self._library.impl(self._signature.local_name, kernel, "Autograd")
            operators.forget_dispatch(self.overload)
            self._has_autograd_kernel = True

    def _redefine(self, contract: dict[str, Any]) -> None:
        name = contract.get("backward")
        found = None
        if name is not None:
            found = backward_op.formula(name, self._signature, attached)
        self.contract = contract
        self._set_formula(found)

    def _register(self) -> None:
        signature, library = self._signature, self._library

        def fake(*args: Any, **kwargs: Any) -> Any:
            return self._on_fake(signature.bind(args, kwargs))

        def cpu(*args: Any, **kwargs: Any) -> Any:
            return self._on_cpu(signature.bind(args, kwargs))

        torch.library.register_fake(self.name, fake, lib=library)
        library.impl(signature.local_name, cpu, "CPU")
        transform = autograd.transform_kernel(self.overload, signature, lambda: self._formula)
        library.impl(signature.local_name, transform, autograd.FRONT_KEY)
        layouts.refuse_in(library, signature.local_name, f"op '{self.name}'", lambda: self.overload)

    def _on_fake(self, values: dict[str, Any]) -> Any:
        refuse_derivative(self._signature, values)
        devices = ("cuda", "meta") if self._cpu is None else ("cuda", "cpu", "meta")
        outputs = self._outputs(values, devices)
        changed = [(a.name, values[a.name]) for a in self._signature.arguments if a.mutable]
        mutated.fix_offsets(f"op '{self.name}'", changed)
        device = next(tensor.device for _, tensor in self._signature.tensors(values))
        return self._returned([output.allocate(device) for output in outputs])

    def _on_cpu(self, values: dict[str, Any]) -> Any:
        refuse_derivative(self._signature, values)
        cpu = self._cpu
        devices = ("cpu",) if cpu else ("cuda",)
        for name, tensor in self._signature.tensors(values):
            # The contract's check reads addresses of plain tensors only.
            if not has_memory(tensor):
                raise errors.fault(
                    "input",
                    f"op '{self.name}' argument '{name}'",
                    "has elements but no memory",
                    expected="a tensor whose storage is allocated",
                    got=f"a {type(tensor).__name__}",
                )
        outputs = self._outputs(values, devices)
        assert cpu is not None  # otherwise CPU tensors are refused
        args, kwargs = self._signature.unbind(values)
        with torch.no_grad(), transforms.below_autograd():
            found = cpu(*args, **kwargs)
        for argument in self._signature.arguments:
            # The ops in `cpu` may have run in a mode that does not count versions.
            if argument.mutable and not values[argument.name].is_inference():
                torch.autograd.graph.increment_version(values[argument.name])
        return self._returned(self._checked(found, outputs, values))

    def _outputs(self, values: dict[str, Any], devices: tuple[str, ...]) -> list[Output]:
        advice = "Move it with .cuda()"
        if self._is_defined_here:
            advice += ", or give define_op a `cpu=` function."
        else:
            advice += ": the op came from a package, which holds no `cpu=` function."
        return outputs_of(self.contract, self._signature, values, devices, advice)

    def _checked(self, found: Any, outputs: list[Output], values: dict[str, Any]) -> list[Tensor]:
        """The results of `cpu=` in the contract's layout."""
        results = [found] if self._signature.single else found
        if not outputs and found is None:
            results = []
        label = f"op '{self.name}': what cpu= returns"
        if not isinstance(results, (list, tuple)) or len(results) != len(outputs):
            got = type(found).__name__
            expected = errors.counted(len(outputs), "tensor")
            raise errors.fault("input", label, "is no output of it", expected=expected, got=got)
        # Storages that the output must not share: the arguments' and the other outputs'.
        taken = {t.untyped_storage().data_ptr() for _, t in self._signature.tensors(values)}
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
            if result.untyped_storage().data_ptr() in taken or not output.is_layout_of(result):
                result = output.allocate(result.device).copy_(result)
            taken.add(result.untyped_storage().data_ptr())
            out.append(result)
        return out

    def _returned(self, tensors: list[Tensor]) -> Any:
        if self._signature.single:
            return tensors[0]
        return tuple(tensors) if tensors else None


# Guards the registry, and serialises definitions, so that C++ and Python have the same contract.
_lock = fork_safe_lock()
_ops: dict[str, Op] = {}


def _op_of_name(name: str) -> Op:
    """The op of that name, for unpickling."""
    op = _ops.get(name)
    if op is None:
        raise errors.fault(
            "input",
            f"op '{name}'",
            "was pickled, and is not defined in this process",
            expected="a define_op or load_package that defines it",
            advice="Define it before you unpickle.",
        )
    return op


def find(name: str) -> Op | None:
    """The declared op of that name."""
    return _ops.get(name)


def digest_of_traces() -> str:
    """A digest of what a graph that calls declared ops was traced by: contracts and derivatives."""
    hashed = hashlib.sha256()
    with _lock:
        for name in sorted(_ops):
            op = _ops[name]
            if op._digest is None:
                contract = json.dumps(op.contract, sort_keys=True).encode()
                formula = b"" if op._formula is None else op._formula.digest()
                op._digest = hashlib.sha256(contract + formula).digest()
            hashed.update(op._digest)
    return hashed.hexdigest()


def attached(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a backward op. A declared one without a derivative raises only if it is differentiated.

    torch.func.grad and create_graph=True run a backward with grad mode on, whether or not second
    derivatives follow. Refusing the call, as for a plain call, would break first derivatives there.
    """
    op = _ops.get(_name_of(overload))
    if op is None or op._formula is not None or not torch.is_grad_enabled():
        return overload(*args, **kwargs)
    return autograd.differentiable(overload, op._signature, None, args, kwargs)


def _name_of(overload: Any) -> str:
    return overload.name()


def define(
    signature: _signature.Signature,
    contract: dict[str, Any],
    images: list[tuple[bytes, str]],
    cpu: Callable[..., Any] | None,
    places: Mapping[str, str],
) -> Op:
    """Defines an op in Python and C++. `images` are (bytes, name for errors) by the contract's
    indices. `places` has the user's source line of each part of the contract, for errors."""
    with _lock:
        try:
            (answer,) = _library.define_ops([contract], images)
        except errors.Error as error:
            raise errors.make(error.tag, _with_place(str(error), signature.name, places)) from None
        state = answer["state"]
        op = _ops.get(signature.name)
        if op is None:
            op = _ops[signature.name] = Op(signature, contract)
            state = "defined"
        elif state == "swapped":
            op._redefine(contract)
        if state != "same":
            # Images are indexed by this contract; "same" content may index them otherwise.
            op._images = [Image(origin, data) for data, origin in images]
            op._package = None
        if cpu is not None or state != "same":
            op._cpu = cpu
        op._is_defined_here = True
    if state == "swapped":
        errors.warn(
            f"torch_cubin [input]: op '{op.name}' is defined again, with other content. Calls"
            " run the new definition from now on; a backward given by register_autograd is"
            " forgotten. What torch.compile made of the old one keeps its sizes:"
            " torch.compiler.reset() forgets it.",
            UserWarning,
        )
    return op


def _with_place(message: str, op: str, places: Mapping[str, str]) -> str:
    """A C++ error that names a part of the contract, extended by the user's source line."""
    for part in sorted(places, key=len, reverse=True):
        label = f"op '{op}': {part}"
        if label in message:
            before, _, after = message.partition(label)
            path = re.split(r"[^\w.\[\]]", after, maxsplit=1)[0]
            return f"{before}{label}{path} ({places[part]}){after[len(path) :]}"
    return message


def load(package: str, trusted: list[str] | None = None) -> dict[str, Op]:
    """Defines a package's ops, all or none, in Python and C++."""
    with _lock:
        return _adopt(_library.load_package(package, trusted))


def adopt_all() -> None:
    """Adopts ops that only C++ knows: those of TORCH_CUBIN_PACKAGES."""
    with _lock:
        _adopt(_library.defined_ops())


def _adopt(answers: list[dict[str, Any]]) -> dict[str, Op]:
    """Registers the ops that C++ has defined. Needs `_lock`. Never replaces an op: C++ refuses
    other content."""
    made: dict[str, Op] = {}
    try:
        for answer in answers:
            if answer["name"] not in _ops and answer["name"] not in made:
                contract = answer["contract"]
                op = made[answer["name"]] = Op(_signature.parse(contract["schema"]), contract)
                op._package = answer["package"]
                op._images = of_package(answer["images"])
    except BaseException:
        for op in made.values():
            operators.destroy(op._library)
        raise
    _ops.update(made)
    return {answer["name"]: _ops[answer["name"]] for answer in answers}


__all__ = ["Op", "adopt_all", "attached", "define", "find", "load"]
