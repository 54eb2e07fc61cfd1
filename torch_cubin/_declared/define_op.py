"""define_op(): makes a cubin's kernel a torch op. docs/declared_ops.md is its reference."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch_cubin import errors
from torch_cubin._declared import contract as _contract
from torch_cubin._declared import op as _op
from torch_cubin._declared import signature as _signature
from torch_cubin._declared.contract import Choice
from torch_cubin._kernels.module import Kernel, Module
from torch_cubin._kernels.sources import Loaded, by_kernel, opened
from torch_cubin._native import library

LAUNCH_ARGUMENTS = (
    *("args", "grid", "block", "shared_memory", "cluster", "cooperative"),
    *("programmatic_dependent_launch", "priority"),
)


class KernelChoice:
    """One of an op's kernels: `define_op(..., kernels=[KernelChoice(...), ...])`.

    The first whose `when` holds is launched; `when=None` always holds. Omitted fields are taken
    from define_op. Conditions may use dtypes, sizes, strides, `is_contiguous()`, numbers, and the
    device's `sm` (90 for 9.0) and `multiprocessors`: `when=lambda x, sm: (x.shape[1] % 8 == 0) &
    (sm >= 90)`.
    """

    def __init__(self, kernel: Any, *, when: Any = None, **launch: Any) -> None:
        errors.check_keywords("KernelChoice", launch, ("kernel", "when", *LAUNCH_ARGUMENTS))
        self.kernel, self.when, self.launch = kernel, when, launch
        self.produced: dict[str, Any] = {}  # further fields of a Choice, from a producer


@errors.named_keywords
def define_op(
    schema: str,
    *,
    kernel: Any = None,
    tensors: Mapping[str, Any],
    args: Any = None,
    grid: Any = None,
    block: Any = None,
    shared_memory: Any = 0,
    cluster: Any = None,
    cooperative: bool = False,
    programmatic_dependent_launch: bool = False,
    priority: int | None = None,
    dtypes: Mapping[str, Any] | None = None,
    scratch: Mapping[str, Any] | None = None,
    kernels: Sequence[Any] | None = None,
    cpu: Callable[..., Any] | None = None,
    backward: str | None = None,
    jit: bool = False,
) -> _op.Op:
    """Makes a cubin's kernel a torch op, `torch.ops.<namespace>.<name>`, and returns it.

    The op runs on CUDA tensors, on PyTorch's current stream, without Python in its calls, and works
    under torch.compile, torch.export, AOTInductor and CUDA graphs. Every call is checked against
    `tensors`. docs/declared_ops.md has examples and every rule.

    - `schema`: PyTorch's, as "mylib::vec_add(Tensor x, Tensor y) -> Tensor".
    - `kernel`: "file.cubin:name", (source, name), ([source, ...], name) for several archs, a list
      of the first two, or a torch_cubin.Kernel. A source is an argument of torch_cubin.load.
    - `tensors`: a pattern for each tensor argument and output: "float32[m, k]", "T[*s]",
      "float16[m, k] rows align=4". An output may also be torch_cubin.empty(shape, dtype) or
      torch_cubin.like("x"). A single output is called "out" unless the schema names it.
    - `args`: a function of the op's arguments, outputs, scratch and sizes, by name, that returns
      the kernel's arguments; or a sequence of names of tensors and of constants. Sizes and numbers
      need a function.
    - `grid`, `block`: an int or up to three, or functions that return them; likewise
      `shared_memory` (bytes) and `cluster`. `block` may be omitted if the binary requires one.
    - `dtypes`: the dtypes of each variable in patterns: dict(T=["float16", torch.bfloat16]).
    - `scratch`: uninitialised memory for a call, by name: patterns, or functions that return
      torch_cubin.empty(...).
    - `kernels`: several KernelChoice, instead of `kernel`.
    - `cpu`: a function of the op's arguments that returns its outputs, for CPU tensors.
    - `backward`: the name of an op that is the derivative: "ns::op". See also Op.register_autograd.
      Without either, the op raises if it would be differentiated.
    - `jit`: accepts PTX too, which the driver compiles if no cubin runs on the device. It applies
      to the whole op: a Kernel of a module loaded with jit=True turns it on for all of `kernels`.

    Functions are called once, now, with stand-ins for the arguments: they can calculate with + - *
    // %, torch_cubin.cdiv, minimum, maximum, sqrt and select, and cannot branch.

    Repeating a definition does nothing. A different one with the same schema replaces the old one,
    and warns; with another schema it is an error.

    Raises InputError [input] for a definition that is malformed or inconsistent, ParamsError
    [params] if `args` do not fit the binary's parameters, and what torch_cubin.load raises.
    """
    op = f"op '{_signature.parse(schema).name}'"
    _check_types(op, cpu, backward, jit)
    common = {
        "args": args,
        "grid": grid,
        "block": block,
        "shared_memory": shared_memory,
        "cluster": cluster,
        "cooperative": cooperative,
        "programmatic_dependent_launch": programmatic_dependent_launch,
        "priority": priority,
    }
    if (kernel is None) == (kernels is None):
        got = "neither" if kernel is None else "both"
        raise errors.fault("input", op, "names its kernels twice or not at all",
                           expected="kernel= or kernels=", got=got)  # fmt: skip
    listed = [KernelChoice(kernel)] if kernels is None else [_choice(op, c) for c in kernels]
    return define(
        schema, listed, common, tensors=tensors, dtypes=dtypes, scratch=scratch, cpu=cpu,
        backward=backward, jit=jit,
    )  # fmt: skip


def define(
    schema: str,
    listed: Sequence[KernelChoice],
    common: Mapping[str, Any],
    *,
    tensors: Mapping[str, Any],
    dtypes: Mapping[str, Any] | None = None,
    scratch: Mapping[str, Any] | None = None,
    cpu: Callable[..., Any] | None = None,
    backward: str | None = None,
    jit: bool = False,
    tuned: _contract.Produced | None = None,
) -> _op.Op:
    """define_op for a list of kernels; `common` has the fields that each of them may omit."""
    signature = _signature.parse(schema)
    op = f"op '{signature.name}'"
    images = _Images()
    choices = []
    for entry in listed:
        sources, name, as_jit = _sources(op, entry.kernel, images)
        places = [place for source in sources for place in images.add(source, name)]
        jit = jit or as_jit
        if isinstance(entry.kernel, Kernel) and entry.kernel.module._producer is not None:
            entry.produced.setdefault("producer", _producer(entry.kernel))
        choice = Choice(
            places, name, when=entry.when, **{**common, **entry.launch, **entry.produced}
        )
        if choice.block is None:
            choice.block = _block(op, [images.found[place] for place in places], name, jit)
        for part in ("args", "grid"):
            if getattr(choice, part) is None:
                what = f"{op}: kernel '{name}'"
                raise errors.fault("input", what, f"has no {part}", expected=f"{part}=")
        choices.append(choice)
    if not choices:
        raise errors.fault("input", op, "has no kernel", expected="one or more in kernels=")
    contract, written = _contract.build(
        signature,
        tensors=tensors,
        dtypes=dtypes,
        scratch=scratch,
        choices=choices,
        backward=backward,
        jit=jit,
        tuned=tuned,
    )
    return _op.define(signature, contract, images.found, cpu, written)


def _check_types(op: str, cpu: Any, backward: Any, jit: Any) -> None:
    for name, value, fits, expected in (
        ("cpu", cpu, cpu is None or callable(cpu), "a function"),
        (
            "backward",
            backward,
            backward is None or (isinstance(backward, str) and backward.count("::") == 1),
            "the name of an op, 'ns::op'",
        ),
        ("jit", jit, isinstance(jit, bool), "a bool"),
    ):
        if not fits:
            got = f"{type(value).__name__} {value!r:.80}"
            advice = "A function goes to op.register_autograd." if name == "backward" else ""
            raise errors.fault(
                "input", f"{op}: {name}", "has a wrong type", expected=expected, got=got,
                advice=advice,
            )  # fmt: skip


def _choice(op: str, choice: Any) -> KernelChoice:
    if isinstance(choice, KernelChoice):
        return choice
    if isinstance(choice, Mapping) and "kernel" in choice:
        return KernelChoice(**choice)
    raise errors.fault(
        "input",
        f"{op}: kernels",
        "has a wrong entry",
        expected="torch_cubin.KernelChoice(kernel, when=, ...)",
        got=f"{choice!r:.80}",
    )


def _producer(kernel: Kernel) -> dict[str, Any]:
    """A kernel's producer for the manifest, with the names that stand for its symbol."""
    module = kernel.module
    aliases = sorted(alias for alias, symbol in module._aliases.items() if symbol == kernel.name)
    return {**(module._producer or {}), **({"aliases": aliases} if aliases else {})}


class _Images:
    """The images of a definition, without duplicates. Each source is opened and searched once,
    since hundreds of kernels may come from one library or archive."""

    def __init__(self) -> None:
        self.found: list[tuple[bytes, str]] = []
        self._places: dict[bytes, int] = {}
        self._files: dict[Any, _Files] = {}
        self._kept: list[Any] = []  # keeps the objects alive whose ids are keys of _files

    def add(self, source: Any, kernel: str) -> list[int]:
        """The indices of a source's files; for an archive only files with that kernel."""
        if isinstance(source, Loaded):
            return [self._place(source)]

        def read() -> list[Loaded]:
            what = f"image {len(self.found)} of the definition"
            return [loaded for _, loaded in opened(source, what)]

        is_path = isinstance(source, (str, os.PathLike))
        files = self._once(source, os.fsdecode(source) if is_path else id(source), read)
        return [self._place(file) for file in files.with_kernel(kernel)]

    def of(self, kernel: Kernel) -> list[Loaded]:
        """The files that contain a loaded kernel."""
        module = kernel.module
        return self._once(module, id(module), module._read_again).with_kernel(kernel.name)

    def _once(self, source: Any, key: Any, read: Callable[[], list[Loaded]]) -> _Files:
        files = self._files.get(key)
        if files is None:
            self._kept.append(source)
            files = self._files[key] = _Files(read())
        return files

    def _place(self, file: Loaded) -> int:
        place = self._places.setdefault(file.data, len(self.found))
        if place == len(self.found):
            self.found.append(file)
        return place


class _Files:
    """The files in one source, and the kernels of each."""

    def __init__(self, files: list[Loaded]) -> None:
        self._files = files
        self._by_kernel: dict[str, list[Loaded]] | None = None

    def with_kernel(self, name: str) -> list[Loaded]:
        """The files that have a kernel of that name; all of them unless exactly one kernel
        matches."""
        if len(self._files) == 1:
            return self._files
        if self._by_kernel is None:
            self._by_kernel = by_kernel(self._files)
        called = library.symbols_called(self._by_kernel, name)
        return self._by_kernel[called[0]] if len(called) == 1 else self._files


def _sources(op: str, kernel: Any, images: _Images) -> tuple[list[Any], str, bool]:
    """Parses `kernel=`: the sources, the kernel's symbol, and whether PTX is accepted."""
    if isinstance(kernel, Kernel):
        return images.of(kernel), kernel.name, kernel.module._jit
    if isinstance(kernel, str):
        parts = re.fullmatch(r"(.*[^:]):([^:].*)", kernel, re.DOTALL)  # C++ names have "::"
        if parts is not None:
            return [parts[1]], parts[2], False
    elif isinstance(kernel, tuple) and len(kernel) == 2 and isinstance(kernel[1], str):
        source, name = kernel
        several = isinstance(source, (list, tuple))
        if name and (not several or source):
            return list(source) if several else [source], name, False
    elif isinstance(kernel, list) and kernel:
        found = [_sources(op, one, images) for one in kernel]
        names = {name for _, name, _ in found}
        if len(names) == 1:
            jit = any(as_jit for _, _, as_jit in found)
            return [source for sources, _, _ in found for source in sources], names.pop(), jit
    raise errors.fault(
        "input",
        f"{op}: kernel",
        "names no kernel",
        expected="'file.cubin:name', (source, name), ([source, ...], name), a list of these with"
        " one name, or a torch_cubin.Kernel",
        got=f"{type(kernel).__name__} {_shown(kernel)}",
    )


def _shown(kernel: Any) -> str:
    return f"{os.fspath(kernel) if isinstance(kernel, os.PathLike) else kernel!r:.80}"


def _block(op: str, images: list[tuple[bytes, str]], name: str, jit: bool) -> tuple[int, ...]:
    """The block that the binaries require for a kernel."""
    module = Module(images, images[0][1], jit)
    name = module[name].name  # raises if no image has it, naming the nearest kernels
    demands = {
        tuple(kernel.required_block): image.arch
        for image in module.images
        for kernel in image.kernels
        if kernel.name == name and kernel.required_block is not None
    }
    if not demands:
        raise errors.fault(
            "input",
            f"{op}: kernel '{name}'",
            "has no block, and its binary demands none",
            expected="block=",
        )
    if len(demands) > 1:
        raise errors.fault(
            "params",
            f"{op}: kernel '{name}'",
            "has images that demand different blocks",
            expected="one block",
            got=" and ".join(f"{block} for {arch}" for block, arch in demands.items()),
            advice="Give each architecture a KernelChoice of its own in `kernels`, with `when`.",
        )
    return next(iter(demands))


__all__ = ["KernelChoice", "define_op"]
