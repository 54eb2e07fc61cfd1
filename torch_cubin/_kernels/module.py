"""load(): a cubin from a path or bytes, and its kernels, launched directly."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import math
import operator
import re
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch

from torch_cubin import errors
from torch_cubin._inspection.facts import Image, Ptx, content_of
from torch_cubin._inspection.inspect import Kernel as KernelFacts
from torch_cubin._kernels import global_memory, launch
from torch_cubin._kernels.arguments import Stated, wrong_count
from torch_cubin._kernels.launch import device_index
from torch_cubin._kernels.sources import (
    Known,
    Loaded,
    Source,
    aliases_of,
    opened,
    path_of,
    read_again,
)  # fmt: skip
from torch_cubin._native import library
from torch_cubin._native.launcher import Launcher


class Kernel(Launcher):
    """One kernel of a Module. Calling it launches it:

        kernel(*args, grid=, block=, shared_memory=0, cluster=None, cooperative=False,
               programmatic_dependent_launch=False, priority=None, stream=None)

    The launch goes to the device of the tensors among `args`, which must be one (without tensors,
    to PyTorch's current device), and to `stream` (a torch.cuda.Stream, or a handle as int) or
    PyTorch's current stream there. It is asynchronous.

    - `args`, one per parameter: a contiguous CUDA tensor, or strided(tensor), or an object with
      `__cuda_array_interface__`, for its address; an int, float or bool, packed to the parameter's
      own size (a float as float32 in 4 bytes, float64 in 8); int32(n) and its kin; None for a null
      pointer; bytes, a ctypes.Structure or a NumPy scalar for a struct; a TensorMap. Where the file
      states types (a mangled C++ name, PTX), arguments must be of them, and an int becomes a float
      for one; bits(argument) passes any other type on purpose.
    - `grid` in blocks and `block` in threads: an int, or up to three (x, y, z). `block` may be
      omitted if the binary requires one.
    - `shared_memory`: dynamic, bytes per block. `cluster`: blocks, as `grid`.
    - `cooperative`: all blocks are resident at once, or the launch is refused.
    - `priority`: lower goes first; see torch.cuda.Stream.

    Raises ParamsError [params] for arguments that do not fit the binary's parameters, InputError
    [input] for a tensor on a wrong device or in a wrong layout, LaunchError [launch] for a grid,
    block, cluster or shared memory out of range, ClosedError [closed] after unload().
    """

    def __init__(self, module: Module, facts: KernelFacts, found: dict[str, Any]) -> None:
        self.module = module
        self.info = facts
        self._handle = found["handle"]
        self._stated = [Stated(**fields) for fields in found["params"]]
        self._bind(
            self._handle,
            tuple(
                (param.size, stated.kind, stated.takes if stated.is_pointer else 0, stated.number)
                for param, stated in zip(facts.params, self._stated, strict=True)
            ),
        )

    # A copy is the same kernel: the underlying handle belongs to the process and is not copied.
    def __copy__(self) -> Kernel:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Kernel:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.getitem, (self.module, self.name)

    @property
    def name(self) -> str:
        """The kernel's symbol."""
        return self.info.name

    def __getitem__(self, shape: Any) -> Any:
        """Refuses `kernel[grid](...)`, the launch syntax of Triton and Numba."""
        raise errors.fault(
            "input",
            f"the launch of kernel '{self.name}'",
            "is written with brackets",
            expected="kernel(*args, grid=, block=)",
            got=f"kernel[{shape!r:.60}]".replace("[(", "[").replace(")]", "]"),
        )

    def _launch_plainly(self, /, *args: Any, **keywords: Any) -> None:
        _check_keywords(self.info, keywords)
        launch.launch(self._handle, self.info, self._stated, args, **keywords)

    def __repr__(self) -> str:
        return f"<torch_cubin.Kernel '{self.name}' of {self.module.origin}>"


class FilledKernel(Kernel):
    """A kernel from a folder of Triton's: its notes supply the block, shared memory and so on if
    the call does not give them, and the hidden parameters at the end are null pointers."""

    def __init__(self, module: Module, facts: KernelFacts, found: dict[str, Any]) -> None:
        super().__init__(module, facts, found)
        self._filled = dict(found["filled"])
        self._hidden = self._filled.pop("hidden")

    def __call__(self, /, *args: Any, **keywords: Any) -> None:
        wanted = len(self.info.params) - self._hidden
        if len(args) != wanted:
            raise wrong_count(self.info, wanted, len(args))
        hidden = [None] * self._hidden
        super().__call__(*args, *hidden, **{**self._filled, **keywords})


def _facts_of_all(facts: list[KernelFacts]) -> KernelFacts:
    """The facts of a kernel in several images: those of the first, and the block size required by
    all images that require one, for launches without `block`."""
    demanded = {each.required_block for each in facts} - {None}
    return dataclasses.replace(
        facts[0], required_block=demanded.pop() if len(demanded) == 1 else None
    )


_KEYWORDS = (
    *("grid", "block", "shared_memory", "cluster", "cooperative"),
    *("programmatic_dependent_launch", "priority", "stream"),
)


def _check_keywords(facts: KernelFacts, keywords: dict[str, Any]) -> None:
    for name in keywords:
        if name not in _KEYWORDS:
            raise errors.fault(
                "input",
                f"the launch of kernel '{facts.name}'",
                "has an unknown keyword",
                expected=", ".join(_KEYWORDS),
                got=name,
            )


# Modules that a garbage collection finds dead are freed at its end: until then a __del__ of the
# same cycle may still launch or unload them.
_dead: list[int] = []
_collecting = False


def _drop(handle: int) -> None:
    if _collecting:
        _dead.append(handle)
    else:
        library.module_drop(handle)


def _follow_collection(phase: str, _: dict[str, int]) -> None:
    global _collecting
    _collecting = phase == "start"
    while _dead and not _collecting:
        library.module_drop(_dead.pop())


gc.callbacks.append(_follow_collection)


class Module:
    """The kernels of one or more images: the result of load().

    A mapping from names to kernels: `module["name"]`, `name in module`, iteration, `len`. A name is
    a symbol or a C++ name: "scale", "ns::scale<float, 4>", "scale(float*, int)". As a context
    manager it unloads at the end.
    """

    def __init__(
        self,
        sources: Sequence[tuple[bytes, str]],
        origin: str,
        jit: bool,
        paths: Sequence[str] = (),
    ) -> None:
        facts = library.open_module(sources, origin, jit, paths)
        self._jit = jit
        self._handle: int = facts["handle"]
        self._drop = weakref.finalize(self, _drop, self._handle)
        self._drop.atexit = False
        self.origin = origin
        self.images = tuple(cast("Image | Ptx", content_of(entry)) for entry in facts["images"])
        self._sources: list[Known] = []
        found: dict[str, list[Any]] = {}
        for image in sorted(self.images, key=lambda image: image.kind == "ptx"):  # it tells less
            for kernel in image.kernels:
                found.setdefault(kernel.name, []).append(kernel)
        self._facts = {name: _facts_of_all(facts) for name, facts in found.items()}
        self._kernels: weakref.WeakValueDictionary[str, Kernel] = weakref.WeakValueDictionary()
        self._globals: set[int] = set()  # tensors over global variables (global_memory.py)
        self._closed = False
        self._aliases: dict[str, str] = {}  # symbols by the names passed to the compiler
        self._producer: dict[str, Any] | None = None  # the producer, for manifests

    def _name(self, aliases: dict[str, str], producer: dict[str, Any] | None) -> None:
        """Sets the names of its kernels in addition to their symbols, and their producer."""
        self._aliases = {_normal(alias): symbol for alias, symbol in aliases.items()}
        self._producer = producer

    # A copy is the same module, which is closed when the last copy is freed.
    def __copy__(self) -> Module:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Module:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by its sources: paths, which are read again, or the given bytes."""
        self._check_open()
        return _load_again, (tuple(self._sources), self._jit, self._aliases, self._producer)

    def __getitem__(self, name: str) -> Kernel:
        if not isinstance(name, str):
            raise errors.fault(
                "input", self.origin, "is asked for no name", expected="a str", got=repr(name)[:80]
            )
        self._check_open()
        if name not in self._facts:
            name = self._aliases.get(_normal(name), name)
        kernel = self._kernels.get(name)
        if kernel is None:
            if self._aliases and not library.symbols_called(self._facts, name):
                known = [*self._aliases, *self._facts]  # names passed to the compiler
                raise errors.fault(
                    "no_kernel", f"kernel '{name:.200}'", f"is not in {self.origin}",
                    expected=errors.nearest(name, known),
                )  # fmt: skip
            found = library.module_kernel(self._handle, name)
            symbol = found["name"]
            kernel = self._kernels.get(symbol)
            if kernel is None:
                kind = Kernel if found["filled"] is None else FilledKernel
                made = kind(self, self._facts[symbol], found)
                kernel = self._kernels.setdefault(symbol, made)
        return kernel

    def __contains__(self, name: object) -> bool:
        if name in self._facts:
            return True
        if not isinstance(name, str):
            return False
        return _normal(name) in self._aliases or len(library.symbols_called(self._facts, name)) == 1

    def __iter__(self) -> Iterator[str]:
        return iter(self._facts)

    def __len__(self) -> int:
        return len(self._facts)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the kernels."""
        return tuple(self._facts)

    def global_tensor(
        self,
        name: str,
        dtype: torch.dtype,
        shape: Sequence[int] = (),
        device: int | str | torch.device | None = None,
    ) -> torch.Tensor:
        """The `__device__` or `__constant__` variable `name` as a CUDA tensor over its memory.

        `name` is its symbol or its C++ name: "table", "ns::table".

        The bytes of `dtype` and `shape` must match the variable. Each device has its own copy
        (default: PyTorch's current one). Writes go to the variable in the order of their stream,
        and kernels of other streams may see either value; write a `__constant__` one with copy_().
        The tensor cannot be resized, does not come from PyTorch's allocator, and keeps the module
        loaded while it lives.

        Raises NoKernelError [no_kernel] for an unknown name, InputError [input] for another size,
        ImageError [image] for a variable that two of the device's images define, because the
        kernels of each image see their own.
        """
        self._check_open()
        index = device_index(device)
        address, size = library.module_global(self._handle, index, name)
        wanted = math.prod(shape) * dtype.itemsize
        if wanted != size:
            raise errors.fault(
                "input",
                f"global variable '{name}' of {self.origin}",
                "has another size",
                expected=f"{size} bytes",
                got=f"{wanted} bytes, {dtype} of shape {tuple(shape)}",
            )
        flat = global_memory.tensor_over(self, address, size, index)
        return flat.view(dtype).view(tuple(shape))

    def preload(self, device: int | str | torch.device | None = None) -> None:
        """Loads the kernels onto a device now (default: PyTorch's current one).

        Kernels without an image for it, and those that ``module[name]`` refuses, are skipped.
        """
        self._check_open()
        library.module_preload(self._handle, device_index(device))

    def unload(self) -> bool:
        """Waits for submitted work, then unloads the module from the driver.

        The module is closed: its kernels raise ClosedError [closed] from now on. Returns True if it
        is unloaded. A module that a CUDA graph has captured stays loaded until the process ends,
        and one with tensors over its global variables until they are freed and unload() is called
        again: then this warns and returns False. Waiting for a device is not allowed while a CUDA
        graph is captured there: CaptureError [capture].
        """
        living = len(self._globals)
        unloaded = library.module_unload(self._handle, keep=living > 0)
        self._closed = True
        if unloaded:
            return True
        if living:
            tensors = f"{errors.counted(living, 'tensor')} over its global variables"
            return self._stays(tensors, "Delete them and unload again.")
        return self._stays("a CUDA graph that captured a kernel of it", "")

    def image(self, arch: str | None = None) -> bytes:
        """The bytes of its image: a cubin, or PTX if there is no cubin. `arch` ("sm_90a") selects
        one of several (`module.images` lists them).

        Files are read again. Raises InputError [input] if `arch` matches none or several of its
        images, FileError [file] for a file that is missing, HashError [hash] for one that has
        changed.
        """
        if arch is not None and not isinstance(arch, str):
            raise errors.wrong_type("Module.image argument 'arch'", "a str", arch)
        asked = self.images if arch is None else [i for i in self.images if i.arch == arch]
        cubins = [image for image in asked if image.kind != "ptx"]
        found = [i for i, image in enumerate(self.images) if image in (cubins or asked)]
        if len(found) != 1:
            archs = ", ".join(dict.fromkeys(image.arch for image in self.images))
            what = errors.counted(len(found), "image") + (f" for {arch}" if arch else "")
            several = arch is not None and len(found) > 1
            raise errors.fault(
                "input", self.origin, f"has {what}",
                expected="one" if several else f"arch= one of {archs}", got=repr(arch),
                advice="Load each of its files as a module of its own." if several else "",
            )  # fmt: skip
        return self._image_bytes()[found[0]]

    def _image_bytes(self) -> list[bytes]:
        """The bytes of each of `images`."""
        sources = [(data, origin) for data, origin in self._read_again()]
        return [data for data, _, _ in library.images(sources, self.origin, self._jit)]

    def _image_files(self, stem: str) -> dict[str, bytes]:
        """Its images by file names, for embedding."""
        return {
            f"{stem}.{number}.{image.arch}.{'ptx' if image.kind == 'ptx' else 'cubin'}": data
            for number, (image, data) in enumerate(
                zip(self.images, self._image_bytes(), strict=True)
            )
        }

    def _read_again(self) -> list[Loaded]:
        """The images' bytes, for define_op. Raises HashError [hash] if they have changed."""
        return read_again(self._sources)

    def _stays(self, what: str, advice: str) -> bool:
        text = f"torch_cubin [closed]: {self.origin} stays loaded: it is needed by {what}. {advice}"
        errors.warn(text.rstrip(), RuntimeWarning)
        return False

    def __enter__(self) -> Module:
        self._check_open()
        return self

    def __exit__(self, *exception: object) -> None:
        self.unload()

    def _check_open(self) -> None:
        if self._closed:
            raise errors.fault("closed", self.origin, "was unloaded", advice="Load it again.")

    def __repr__(self) -> str:
        archs = ", ".join(image.arch for image in self.images)
        kernels = errors.counted(len(self), "kernel")
        state = ", unloaded" if self._closed else ""
        return f"<torch_cubin.Module of {self.origin}: {archs}; {kernels}{state}>"


@errors.named_keywords
def load(source: Source | Sequence[Source], *, jit: bool = False) -> Module:
    """Opens a cubin, from a path or its bytes, for launching its kernels.

    It also opens fatbins; objects, libraries and programs that contain fatbins or data of
    torch_cubin.embed; C source with device code in arrays; zip archives of such files
    (AOTInductor's `.pt2`); and cuda.core's ObjectCode, whose kernels keep the names that were
    requested. torch_cubin.inspect lists the contents. Several sources, and several images in one,
    form one module: for each kernel, a device uses the best image that contains it (exactly its own
    sm_XYa, then its family, then the same major with the nearest lower minor). The bytes are
    checked now; the driver is first called at the first launch, so this needs no GPU. A folder of
    Triton's cache with one kernel (NAME.cubin, NAME.json) can be opened too: calls pass the user's
    arguments and the grid. PTX is accepted only with `jit=True`: then the driver compiles it if no
    cubin can run.

    Raises FileError [file] for a path that cannot be read, ImageError [image] for bytes that are
    not a loadable cubin. Two files may have different kernels with the same name and architecture,
    and images may disagree on a kernel's parameters: only looking up such a kernel raises
    ImageError [image] or ParamsError [params].
    """
    if isinstance(source, (list, tuple)):
        given = [(one, f"source {index}") for index, one in enumerate(source)]
    else:
        given = [(source, "the buffer given")]
    found = [pair for one, what in given for pair in opened(one, what)]
    sources = [loaded for _, loaded in found]
    if not sources:
        raise errors.fault("input", "torch_cubin.load", "was given no source", expected="a cubin")
    origin = sources[0][1]
    if len(sources) > 1:
        origin += f" and {len(sources) - 1} more"
    module = Module(sources, origin, jit, [path_of(one) for one, _ in found])
    module._name(aliases_of(source), None)
    # Paths are read again, and bytes belong to the caller: nothing is stored twice.
    module._sources = [(one, name, hashlib.sha256(data).hexdigest()) for one, (data, name) in found]
    return module


def _normal(name: str) -> str:
    """A C++ name without insignificant blanks."""
    return re.sub(r" ?([<>,:*&()\[\]]) ?", r"\1", " ".join(name.split()))


def _load_again(
    sources: tuple[Known, ...],
    jit: bool,
    aliases: dict[str, str] | None = None,
    producer: dict[str, Any] | None = None,
) -> Module:
    """A module from a pickle. Raises HashError [hash] if a file has changed."""
    stored: list[Any] = [source for source, _, _ in sources]
    module = load(stored, jit=jit)
    for (_, name, digest), (_, _, found) in zip(sources, module._sources, strict=True):
        if found != digest:
            problem = "is not what the pickled module was loaded from"
            raise errors.other_bytes(name, problem, digest, found, "Pickle it again.")
    module._name(aliases or {}, producer)
    return module


@errors.named_keywords
def preload(target: Module | Kernel, device: int | str | torch.device | None = None) -> None:
    """Loads a module's kernels, or one kernel, onto a device now (default: PyTorch's current one).

    A first launch does the same, also during a CUDA graph capture; preload() moves the cost, and
    the errors, to a place of your choice.
    """
    if isinstance(target, Module):
        target.preload(device)
    elif isinstance(target, Kernel):
        library.kernel_preload(target._handle, device_index(device))
    else:
        expected = "a torch_cubin.Module or Kernel"
        raise errors.wrong_type("torch_cubin.preload argument", expected, target)


__all__ = ["Kernel", "Module", "load", "preload"]
