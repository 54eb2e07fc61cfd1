"""define_op of Triton's kernels: which kernels there are, and which one a call takes."""

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

    What the compiler knows is not asked for: parameters that it added, scratch memory, shared
    memory, block, cluster, the grid's factor, tensor maps, and what it took for granted of the
    arguments, which each call is checked against. Loading the op's package needs no Triton.

    - `schema`, `tensors`, `dtypes`, `scratch`, `cpu`, `backward`: as torch_cubin.define_op has
      them.
    - `kernel`: a CompiledKernel (what `kernel[grid](...)` returns), a @triton.jit function with
      `signature` and `archs`, a folder, what compile() or read() gave, or a list of these: a kernel
      for each arch and each specialisation. The first that a call's arguments and device fit is
      launched, the most specialised before others. KernelChoice(kernel, when=...) adds a condition.
    - `args`: the Triton function's arguments by name: a name of the op's, a function of these, or
      a constant. Those that have a name of the op's need not be said, nor its tl.constexpr ones.
      A tuple's items are given as a tuple. Where names are not known (folders of Triton 3.4's
      cache): a sequence.
    - `grid`: as in `kernel[grid]`: an int, up to three, or functions of the op's names and the
      kernel's constants (`lambda x, BLOCK: torch_cubin.cdiv(x.numel(), BLOCK)`).
    - `signature`, `archs`, `options`: for compile().
    - `folded`: values that a cache folder does not tell: `dict(BLOCK=1024, stride=1)`.
    - `tuned`: True for what a @triton.autotune kernel has found, or a NAME.autotune.json; "all" for
      every configuration, for torch_cubin.tune() to choose from on the user's GPU. What has won
      here, or else the first, is taken until then.

    Raises InputError [input] for what does not fit together, naming the kernel's argument; what
    torch_cubin.define_op raises.
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
    # What decides between kernels is known once their arguments are resolved, so they are
    # resolved twice: in the order given, and in the order of preference.
    ordered = _ordered(schema, listed, op_tensors, dtypes, scratch, label)
    return _define.define(
        schema, ordered, {"block": None}, tensors=op_tensors, dtypes=dtypes, scratch=scratch,
        cpu=cpu, backward=backward, tuned=table,
    )  # fmt: skip


def _kernels(
    given: Any, signature: Any, archs: Any, options: Any, label: str
) -> list[tuple[TritonKernel, Any]]:
    """The kernels that `kernel=` means, each with its `when`."""
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
    """Parameters whose type is not the same in all kernels: what they take decides."""
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
    # From 3.6 on the binary demands its cluster, and a launch need not name it.
    choice = KernelChoice(
        (kernel.cubin, kernel.name),
        when=when,
        args=TritonArguments(kernel, args, folded, varying),
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
    """The patterns, where those that say no alignment ask for what the kernels need: of several
    kernels, one may take any address."""
    if not isinstance(tensors, Mapping):
        return tensors  # refused where it is read
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
    """Bytes of the smallest element that a pattern allows: PyTorch's tensors are aligned to it."""
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
    """The kernels, the newest arch and the most specialised first; with conditions, as given."""
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
                continue  # the same binary twice
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
