"""define_op for Triton's kernels: collects the kernels and orders them for the choice in a call."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torch_cubin import errors
from torch_cubin._declared import define_op as _define
from torch_cubin._declared import op as _op
from torch_cubin._declared import patterns as _patterns
from torch_cubin._declared import signature as _signature
from torch_cubin._declared.define_op import KernelChoice
from torch_cubin._triton import files, live
from torch_cubin._triton.arguments import TritonArguments
from torch_cubin._triton.kernel import FOLDED, TritonKernel

_EXPECTED = (
    "a CompiledKernel, a @triton.jit function, a folder, what torch_cubin.producers.triton.compile"
    " or read gave, a KernelChoice of one of them, or a list of these"
)


@errors.named_keywords
def define_op(
    schema: str,
    *,
    kernel: Any,
    tensors: Mapping[str, Any],
    grid: Any,
    args: Any = None,
    signature: Any = None,
    archs: Sequence[str] | str | None = None,
    options: Mapping[str, Any] | None = None,
    folded: Mapping[str, Any] | None = None,
    dtypes: Mapping[str, Any] | None = None,
    scratch: Mapping[str, Any] | None = None,
    cpu: Callable[..., Any] | None = None,
    backward: str | None = None,
    tuned: Any = None,
) -> _op.Op:
    """Makes a kernel that Triton compiled a torch op, as torch_cubin.define_op does.

    Everything that the compiler recorded is taken from there: parameters that it added, scratch
    memory, shared memory, block, cluster, the grid's factor, tensor maps, and its assumptions on
    the arguments, which each call is checked against. Loading the op's package needs no Triton.

    - `schema`, `tensors`, `dtypes`, `scratch`, `cpu`, `backward`: as in torch_cubin.define_op.
    - `kernel`: a CompiledKernel (the result of `kernel[grid](...)`), a @triton.jit function with
      `signature` and `archs`, a folder, the result of compile() or read(), or a list of these: a
      kernel for each arch and each specialisation. A call launches the most specialised kernel that
      its arguments and device fit. KernelChoice(kernel, when=...) adds a condition.
    - `args`: the Triton function's arguments by name: a name of the op's, a function of these, or a
      constant. Arguments with a name of the op's may be omitted, and tl.constexpr ones. A tuple's
      items are given as a tuple. Where names are unknown (folders of Triton 3.4's cache): a
      sequence.
    - `grid`: as in `kernel[grid]`: an int, up to three, or functions of the op's names and the
      kernel's constants (`lambda x, BLOCK: torch_cubin.cdiv(x.numel(), BLOCK)`).
    - `signature`, `archs`, `options`: for compile().
    - `folded`: values that a cache folder does not record: `dict(BLOCK=1024, stride=1)`.
    - `tuned`: True for the results of a @triton.autotune kernel, or a NAME.autotune.json; "all" for
      every configuration, for torch_cubin.tune() to choose from on the user's GPU. Until then calls
      take the configuration that won here, or else the first.

    Raises InputError [input] for arguments that do not fit together, naming the kernel's argument;
    and what torch_cubin.define_op raises.
    """
    signature_ = _signature.parse(schema)
    label = f"op '{signature_.name}'"
    if tuned is not None and tuned is not False:
        from torch_cubin._triton import tuned as _tuned

        table = _tuned.of(kernel, tuned, signature, archs, options, args, label)
        groups = table.groups
    else:
        table, groups = None, [_kernels(kernel, signature, archs, options, label)]
    every = [found for group in groups for found, _ in group]
    if not every:
        raise errors.fault("input", f"{label}: kernel", "is none", expected=_EXPECTED)
    varying = _varying(every)
    listed: list[KernelChoice] = []
    for number, group in enumerate(groups):
        for found, when in group:
            listed.append(_choice(found, when, grid, args, folded or {}, varying, number))
    op_tensors = _aligned(tensors, signature_, every, dtypes)
    # The order depends on the resolved arguments of the kernels, so they are resolved twice: in the
    # given order, and in the order of preference.
    ordered = _ordered(schema, listed, op_tensors, dtypes, scratch, label)
    return _define.define(
        schema, ordered, {"block": None}, tensors=op_tensors, dtypes=dtypes, scratch=scratch,
        cpu=cpu, backward=backward, tuned=table,
    )  # fmt: skip


def _kernels(
    given: Any, signature: Any, archs: Any, options: Any, label: str
) -> list[tuple[TritonKernel, Any]]:
    """The kernels of `kernel=`, each with its `when`."""
    if isinstance(given, (list, tuple)):
        return [pair for one in given for pair in _kernels(one, signature, archs, options, label)]
    if isinstance(given, KernelChoice):
        if given.launch:
            raise errors.fault(
                "input", f"{label}: kernel", "says how a Triton kernel is launched",
                expected="KernelChoice(kernel, when=...)", got=", ".join(given.launch),
                advice="The compiler's notes say the rest.",
            )  # fmt: skip
        inner = _kernels(given.kernel, signature, archs, options, label)
        return [(kernel, given.when) for kernel, _ in inner]
    if isinstance(given, TritonKernel):
        return [(given, None)]
    if isinstance(given, (str, os.PathLike)):
        return [(kernel, None) for kernel in files.read(given)]
    if live.is_compiled(given):
        return [(live.of_compiled(given), None)]
    if live.is_autotuned(given):
        raise errors.fault(
            "input",
            f"{label}: kernel",
            "is autotuned",
            expected="tuned=True, or one of its kernels",
        )
    if live.is_function(given):
        if signature is None:
            found = [(kernel, None) for kernel in live.kernels_of(given)]
            if found:
                return found
            raise errors.fault(
                "input", f"{label}: kernel", "is a function that was not compiled yet",
                expected="signature= and archs=, or a call of it before",
            )  # fmt: skip
        if archs is None:
            raise errors.fault("input", f"{label}: archs", "is missing", expected="['sm_90a', ...]")
        compiled = live.compile(given, signature, archs, **dict(options or {}))
        return [(kernel, None) for kernel in compiled]
    raise errors.fault(
        "input", f"{label}: kernel", "is no Triton kernel", expected=_EXPECTED,
        got=f"{type(given).__name__} {given!r:.60}",
    )  # fmt: skip


def _varying(kernels: list[TritonKernel]) -> frozenset[str]:
    """Parameters whose type differs between the kernels; their arguments choose among them."""
    types_: dict[str, set[str]] = {}
    for kernel in kernels:
        for parameter in kernel.parameters:
            if parameter.type != FOLDED:
                types_.setdefault(parameter.name, set()).add(parameter.type)
    return frozenset(name for name, found in types_.items() if len(found) > 1)


def _choice(
    kernel: TritonKernel,
    when: Any,
    grid: Any,
    args: Any,
    folded: Mapping[str, Any],
    varying: frozenset[str],
    group: int,
) -> KernelChoice:
    metadata = kernel.metadata
    cluster = kernel.cluster
    # Since Triton 3.6 the binary itself requires its cluster, so a launch need not pass it.
    choice = KernelChoice(
        (kernel.cubin, kernel.name),
        when=when,
        args=TritonArguments(kernel, args, folded, varying, grid),
        grid=grid,
        shared_memory=metadata.get("shared", 0),
        cluster=cluster if cluster != (1, 1, 1) else None,
        cooperative=metadata.get("launch_cooperative_grid", False),
        programmatic_dependent_launch=metadata.get("launch_pdl", False),
    )
    constants = {
        name: value for name, value in {**kernel.constants, **folded}.items()
        if name.isidentifier() and type(value) in (bool, int, float)
    }  # fmt: skip
    choice.produced = {
        "constants": constants,
        "grid_factors": cluster,
        "producer": kernel.record(),
        "group": group,
    }
    if not kernel.knows_folded:
        choice.produced["names_advice"] = (
            "A cache folder does not tell the kernel's constants: if '{0}' is one, give its value,"
            " folded=dict({0}=VALUE)."
        )
    return choice


def _aligned(
    tensors: Mapping[str, Any],
    signature: _signature.Signature,
    kernels: list[TritonKernel],
    dtypes: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The patterns. If a kernel takes addresses that are less aligned than a pattern's default,
    those without `align=` get their element's size."""
    if not isinstance(tensors, Mapping):
        return tensors  # the pattern's parser refuses it
    needs_any = any(
        p.type.startswith("*") and p.multiple_of < _patterns.ALIGN
        for kernel in kernels for p in kernel.parameters
    )  # fmt: skip
    out = dict(tensors)
    if not needs_any:
        return out
    names = {argument.name for argument in signature.arguments}
    for name, pattern in tensors.items():
        if name in names and isinstance(pattern, str) and "align=" not in pattern:
            out[name] = f"{pattern} align={_itemsize(pattern, dtypes or {})}"
    return out


def _itemsize(pattern: str, dtypes: Mapping[str, Any]) -> int:
    """Bytes of the smallest element that a pattern allows; PyTorch aligns tensors to it."""
    name = (re.match(r"\s*(\w*)", pattern) or [""])[1]
    listed = dtypes.get(name, name)
    names = listed if isinstance(listed, (list, tuple, set, frozenset)) else [listed]
    found = [getattr(torch, str(dtype).removeprefix("torch."), None) for dtype in names]
    return min((d.itemsize for d in found if isinstance(d, torch.dtype)), default=1)


def _ordered(
    schema: str,
    listed: list[KernelChoice],
    tensors: Mapping[str, Any],
    dtypes: Any,
    scratch: Any,
    label: str,
) -> list[KernelChoice]:
    """The kernels sorted by arch (newest first) and specialisation; in the given order if they have
    conditions."""
    import json

    from torch_cubin._declared import contract as _contract

    if len(listed) == 1:
        return listed
    signature = _signature.parse(schema)
    choices = []
    for entry in listed:
        fields = {**entry.launch, **entry.produced}
        name = entry.kernel[1]
        choices.append(_contract.Choice([0], name, when=entry.when, block=1, **fields))
    contract, _ = _contract.build(
        signature, tensors=tensors, dtypes=dtypes, scratch=scratch, choices=choices, backward=None,
        jit=False,
    )  # fmt: skip
    seen: dict[str, int] = {}
    kept = []
    for index, (entry, kernel) in enumerate(zip(listed, contract["kernels"], strict=True)):
        arch = kernel["producer"]["target"]
        requires = sorted(json.dumps(one, sort_keys=True) for one in kernel.get("requires", ()))
        key = json.dumps([entry.produced["group"], arch, kernel["when"], requires])
        if key in seen:
            if listed[seen[key]].kernel[0] == entry.kernel[0]:
                continue  # a duplicate binary
            raise errors.fault(
                "input", f"{label}: kernel {index}", "takes the same calls as another before it",
                expected="one for each arch and specialisation, or KernelChoice(kernel, when=...)",
                got=f"kernel {seen[key]} and kernel {index}, '{entry.kernel[1]}' for {arch}",
            )  # fmt: skip
        seen[key] = index
        number = re.search(r"\d+", arch)
        rank = (-int(number[0]) if number else 0, not arch.endswith("a"), -len(requires))
        kept.append((rank, entry))
    if any(entry.when is not None for entry in listed):
        return [entry for _, entry in kept]
    return [entry for _, entry in sorted(kept, key=lambda pair: pair[0])]
