"""The results of inspect(), as dataclasses that print as tables.

docs/inspect.md documents the dicts of `to_dict`: programs read them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch_cubin import errors
from torch_cubin._native import library
from torch_cubin.errors import counted

Triple = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class Param:
    """One parameter of a kernel. `kind` is "pointer", "value" or "unknown".

    The file distinguishes a pointer from a 64-bit integer only if the compiler recorded it (nvcc
    for sm_100 and later, Triton always); it never records signedness or floating point.
    """

    index: int
    offset: int  # bytes from the start of the parameter block
    size: int  # bytes
    kind: str
    cpp_type: str  # "float const*", if the kernel's mangled name has it; otherwise ""


@dataclasses.dataclass(frozen=True)
class Variable:
    """A `__device__` or `__constant__` variable."""

    name: str  # the symbol
    cpp_name: str  # "ns::table"; "" if the symbol is no C++ name
    size: int  # bytes; 0 if PTX does not say
    space: str  # "global" or "constant"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One entry kernel. Blocks and cluster are None if the file records none."""

    name: str  # the symbol: C++ mangles it unless the kernel is extern "C"
    cpp_name: str  # "void scale<float>(float*, int)"; "" if the symbol is no C++ name
    params: tuple[Param, ...]
    param_bytes: int
    registers: int  # per thread
    static_shared: int  # bytes a block, without the driver's reserved memory
    stack: int  # bytes per thread
    barriers: int
    required_block: Triple | None
    max_block: Triple | None
    cluster: Triple | None
    uses_dynamic_shared: bool  # every launch must give shared memory; False: unknown
    grid_in_clusters: bool  # a launch's grid counts clusters (__block_size__), not blocks

    def __str__(self) -> str:
        facts = [counted(self.registers, "register")]
        for count, what in (
            (self.static_shared, "B static shared"),
            (self.stack, "B stack"),
            (self.barriers, "barrier" if self.barriers == 1 else "barriers"),
        ):
            if count:
                facts.append(f"{count} {what}")
        if self.uses_dynamic_shared:
            facts.append("dynamic shared memory")
        facts += _shapes(self)
        lines = [_title(self), f"  {', '.join(facts)}"]
        if not self.params:
            return "\n".join([*lines, "  no parameters"])
        typed = any(p.cpp_type for p in self.params)
        lines.append(
            f"  {'param':>5} {'offset':>7} {'size':>6}  kind{'     type' if typed else ''}"
        )
        lines += [
            f"  {p.index:>5} {p.offset:>7} {p.size:>6}  {p.kind:<7}  {shown(p.cpp_type)}".rstrip()
            for p in self.params
        ]
        return "\n".join(lines)


def _title(kernel: Any) -> str:
    cpp_name = f"  {shown(kernel.cpp_name)}" if kernel.cpp_name else ""
    return f"kernel {shown(kernel.name)}{cpp_name}"


def _variable_table(variables: tuple[Variable, ...]) -> list[str]:
    """The variables as a table in a list; an empty list if there are none."""
    if not variables:
        return []
    lines = [counted(len(variables), "variable"), f"  {'space':<8} {'size':>10}  name"]
    lines += [
        f"  {v.space:<8} {v.size:>10}  {shown(v.name)}{f'  {shown(v.cpp_name)}' * bool(v.cpp_name)}"
        for v in variables
    ]
    return ["\n".join(lines)]


class _Facts:
    """Facts that can be converted to JSON."""

    def to_dict(self) -> dict[str, Any]:
        """The same facts as plain dicts and lists, ready for json."""
        facts: Any = self  # every subclass is a dataclass
        return dataclasses.asdict(facts, dict_factory=_plain)


class _Kernels(_Facts):
    """Looks up one of `kernels` by name."""

    kernels: tuple[Any, ...]

    def __getitem__(self, name: str) -> Any:
        known = {kernel.name: kernel for kernel in self.kernels}
        called = library.symbols_called(known, name)
        if len(called) == 1:
            return known[called[0]]
        if called:
            raise errors.fault(
                "no_kernel",
                f"the name '{shown(name)}'",
                f"is that of {counted(len(called), 'kernel')}",
                expected="one of them",
                got=", ".join(f"'{shown(symbol)}'" for symbol in called[:8]),
                advice="Give the symbol, or the scope, template arguments or parameters too.",
            )
        names = ", ".join(f"'{shown(kernel.name)}'" for kernel in self.kernels[:3])
        more = f" and {len(self.kernels) - 3} more" if len(self.kernels) > 3 else ""
        raise errors.fault(
            "no_kernel",
            f"kernel '{shown(name)}'",
            "is not in the cubin" if isinstance(self, Image) else "is not in the PTX",
            expected=f"{names}{more}" if names else "a file with kernels",
            advice="A name is a symbol of the file, or what C++ calls it: 'f', 'ns::f', 'f<int>'.",
        )


@dataclasses.dataclass(frozen=True)
class Image(_Kernels):
    """The facts in a cubin: arch, and every kernel by name."""

    kind: str  # "cubin", or "relocatable_cubin": must be linked before it can be loaded
    arch: str  # "sm_90a"
    sm: int  # 90
    abi_version: int  # layout of the ELF header: 7 (CUDA 11 and 12) or 8
    toolkit: str  # "13.0", or "" if unknown
    size: int  # bytes
    kernels: tuple[Kernel, ...]
    variables: tuple[Variable, ...]

    @property
    def relocatable(self) -> bool:
        """Whether it must be linked (nvlink) before it can be loaded."""
        return self.kind == "relocatable_cubin"

    def __str__(self) -> str:
        made = f", CUDA {self.toolkit}" if self.toolkit else ""
        what = "relocatable cubin (link it before loading)" if self.relocatable else "cubin"
        count = counted(len(self.kernels), "kernel")
        head = f"{what} for {self.arch}{made}, {self.size} bytes, {count}"
        return "\n\n".join([head, *map(str, self.kernels), *_variable_table(self.variables)])


@dataclasses.dataclass(frozen=True)
class PtxParam:
    """One parameter of a PTX entry, as declared."""

    index: int
    name: str
    type: str  # "u64", "f32", "b8[128]"
    size: int  # bytes; 0 for textures, samplers and surfaces
    alignment: int  # bytes
    kind: str  # "pointer" (declared .ptr), "value", or "unknown": 8 bytes that may be either
    cpp_type: str  # see Param


@dataclasses.dataclass(frozen=True)
class PtxKernel:
    """One entry of PTX text. None means not declared; ptxas chooses the registers."""

    name: str
    cpp_name: str  # see Kernel; so are the last two
    params: tuple[PtxParam, ...]
    max_registers: int | None
    required_block: Triple | None
    max_block: Triple | None
    cluster: Triple | None
    uses_dynamic_shared: bool
    grid_in_clusters: bool

    def __str__(self) -> str:
        facts = ["dynamic shared memory"] if self.uses_dynamic_shared else []
        facts += _shapes(self)
        if self.max_registers:
            facts.append(f"at most {counted(self.max_registers, 'register')}")
        lines = [_title(self)]
        if facts:
            lines.append(f"  {', '.join(facts)}")
        if not self.params:
            return "\n".join([*lines, "  no parameters"])
        width = max(len("type"), *(len(p.type) for p in self.params))
        lines.append(f"  {'param':>5} {'type':>{width}} {'size':>6} {'align':>6}  kind     name")
        lines += [
            f"  {p.index:>5} {p.type:>{width}} {p.size:>6} {p.alignment:>6}  {p.kind:<7}  "
            f"{shown(p.name)}"
            for p in self.params
        ]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Ptx(_Kernels):
    """The facts in PTX text."""

    kind: str  # "ptx"
    version: str  # of the PTX ISA: "9.0"
    arch: str  # the target: "sm_90a"
    sm: int  # 90
    address_size: int  # bits
    size: int  # bytes
    uses_dynamic_shared: bool  # the file declares `.extern .shared`
    kernels: tuple[PtxKernel, ...]
    variables: tuple[Variable, ...]
    imports: tuple[str, ...]  # symbols that another file must define: it must be linked first

    def __str__(self) -> str:
        dynamic = ", dynamic shared memory" if self.uses_dynamic_shared else ""
        count = counted(len(self.kernels), "kernel")
        head = f"PTX {shown(self.version)} for {self.arch}, {self.size} bytes, {count}{dynamic}"
        if self.imports:
            head += f"\nimports {', '.join(map(shown, self.imports))}: link it before loading"
        return "\n\n".join([head, *map(str, self.kernels), *_variable_table(self.variables)])


@dataclasses.dataclass(frozen=True)
class Fault:
    """Why an entry could not be read: the tag and text of an error."""

    tag: str
    message: str


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel's launch in an archive's C++ code. Values that are not numbers are C++ text."""

    kernel: str  # the symbol
    grid: Triple | tuple[str, str, str]  # "((xnumel + (1023)) / (1024))"
    num_warps: int  # 32 threads each
    shared_memory: int  # dynamic, bytes a block
    arguments: tuple[str, ...]  # one for each parameter: "int32_t xnumel"
    wrapper: str  # the archive's file with this launch

    def __str__(self) -> str:
        grid = ", ".join(shown(str(size)) for size in self.grid)
        lines = [
            f"launched by {shown(self.wrapper)}: kernel {shown(self.kernel)}",
            f"  grid ({grid}), {counted(self.num_warps, 'warp')},"
            f" {self.shared_memory} B dynamic shared memory",
        ]
        lines += [f"  {index:>5}  {shown(text)}" for index, text in enumerate(self.arguments)]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One thing in a container. `content` is None if its kind cannot be read, and if it is damaged;
    then `error` says how."""

    kind: str  # of the content: "cubin", "relocatable_cubin", "ptx", "fatbin", "lto_ir", ...
    name: str  # of the array or section, or fatbinary's -ident; may be ""
    arch: str | None  # "sm_90a"; None if the container does not say
    offset: int  # in the container, in bytes
    stored_size: int  # bytes in the container
    size: int  # bytes unpacked
    compression: str  # "none", "lz4", "zstd" or "unknown"
    flags: int  # of a fatbin's entry
    options: str  # the compiler's, if a fatbin records them
    content: Image | Ptx | Container | None
    error: Fault | None


@dataclasses.dataclass(frozen=True)
class ArchivedFile(Entry):
    """A file in a zip archive."""

    launches: tuple[Launch, ...] = ()  # of its kernels, if C++ code in the archive has them


@dataclasses.dataclass(frozen=True)
class Container(_Facts):
    """The contents of a fatbin, a host ELF file (its fatbins, and what torch_cubin.embed added), a
    static library (the same of its objects), C source (its arrays) or a zip archive (its files with
    device code)."""

    kind: str  # "fatbin", "host_elf", "static_library", "c_source" or "archive"
    machine: str | None  # of a host ELF file: "x86-64"
    size: int  # bytes
    entries: tuple[Entry, ...]

    def images(self) -> list[Image | Ptx]:
        """Every cubin and PTX text within, at any depth, in the file's order."""
        found: list[Image | Ptx] = []
        for entry in self.entries:
            if isinstance(entry.content, Container):
                found += entry.content.images()
            elif entry.content is not None:
                found.append(entry.content)
        return found

    def __str__(self) -> str:
        what, unit = {
            "fatbin": ("fatbin", "entry"),
            "host_elf": (f"host ELF file ({self.machine})", "fatbin"),
            "static_library": (f"static library ({self.machine})", "fatbin"),
            "c_source": ("C source", "array"),
            "archive": ("zip archive", "file"),
        }[self.kind]
        if unit == "fatbin" and any(entry.kind != unit for entry in self.entries):
            unit = "embedded file"
        head = f"{what}, {self.size} bytes, {counted(len(self.entries), unit)}"
        if self.kind in ("host_elf", "static_library"):
            head += f"\n{_summary(self.images())}"
        parts = [head, _entry_table(self.entries)]
        for index, entry in enumerate(self.entries):
            title = f"{unit} {index}"
            if entry.name:
                title += f" '{shown(entry.name)}'"
            if entry.error is not None:
                parts.append(f"{title}: {entry.error.message}")
            elif entry.content is not None:
                parts.append(_indented(f"{title}: {entry.content}"))
            parts += [_indented(f"  {launch}") for launch in getattr(entry, "launches", ())]
        return "\n\n".join(parts)


def _entry_table(entries: tuple[Entry, ...]) -> str:
    """The entries, one row each; empty columns are omitted."""
    columns: dict[str, list[str]] = {
        "#": [str(index) for index in range(len(entries))],
        "kind": [entry.kind for entry in entries],
        "arch": [_entry_arch(entry) for entry in entries],
        "offset": [str(entry.offset) for entry in entries],
        "stored": [str(entry.stored_size) for entry in entries],
        "size": [str(entry.size) for entry in entries],
        "compression": [entry.compression for entry in entries],
        "flags": [f"{entry.flags:#x}" for entry in entries],
        "name": [shown(entry.name) for entry in entries],
        "options": [shown(entry.options) for entry in entries],
    }
    if all(entry.compression == "none" for entry in entries):
        del columns["stored"], columns["compression"]
    idle = {"flags": "0x0", "arch": "", "name": "", "options": ""}
    kept = {
        title: cells
        for title, cells in columns.items()
        if title not in idle or any(cell != idle[title] for cell in cells)
    }
    widths = [max(len(title), *map(len, cells)) for title, cells in kept.items()]
    numbers = [title in ("#", "offset", "stored", "size", "flags") for title in kept]
    rows = [list(kept), *map(list, zip(*kept.values(), strict=True))]
    return "\n".join(
        "  "
        + "  ".join(
            f"{cell:>{width}}" if number else f"{cell:<{width}}"
            for cell, width, number in zip(row, widths, numbers, strict=True)
        ).rstrip()
        for row in rows
    )


def _summary(images: list[Image | Ptx]) -> str:
    """A summary of many fatbins: "cubins for sm_80, sm_90a; PTX for sm_90; 24 kernels"."""
    archs: dict[str, dict[str, int]] = {}
    for image in images:
        what = {"ptx": "PTX", "cubin": "cubins"}.get(image.kind, "relocatable cubins")
        archs.setdefault(what, {})[image.arch] = image.sm
    parts = [
        f"{what} for {', '.join(sorted(found, key=lambda arch: (found[arch], arch)))}"
        for what, found in sorted(archs.items(), key=lambda item: item[0].lower())
    ]
    names = {kernel.name for image in images for kernel in image.kernels}
    return "; ".join([*parts, counted(len(names), "kernel")])


def _entry_arch(entry: Entry) -> str:
    if entry.arch is not None:
        return entry.arch
    return "" if entry.content is None else getattr(entry.content, "arch", "")


def _indented(text: str) -> str:
    first, *rest = text.split("\n")
    return "\n".join([first, *(f"  {line}" if line else "" for line in rest)])


def _shapes(kernel: Kernel | PtxKernel) -> list[str]:
    counted_in = ["the grid counts clusters"] if kernel.grid_in_clusters else []
    return counted_in + [
        f"{what} {'x'.join(map(str, block))}"
        for block, what in (
            (kernel.required_block, "block must be"),
            (kernel.max_block, "block at most"),
            (kernel.cluster, "cluster"),
        )
        if block
    ]


def _plain(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in items}


def shown(text: str, limit: int = 200) -> str:
    """An untrusted name, cut to `limit` and without characters that move a terminal's cursor."""
    safe = "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:limit]
    )
    return safe + "..." if len(text) > limit else safe


def content_of(facts: dict[str, Any]) -> Image | Ptx | Container:
    """The dataclass for a JSON object of csrc/cubin/inspect.cpp, by its kind."""
    if "entries" in facts:
        entries = []
        for entry in facts["entries"]:
            content, error = entry.pop("content"), entry.pop("error")
            entries.append(
                Entry(
                    content=content_of(content) if content is not None else None,
                    error=Fault(**error) if error is not None else None,
                    **entry,
                )
            )
        return Container(**{**facts, "entries": tuple(entries)})
    classes: tuple[Any, Any, Any] = (
        (Ptx, PtxKernel, PtxParam) if facts["kind"] == "ptx" else (Image, Kernel, Param)
    )
    image, kernel, param = classes
    kernels = []
    for entry in facts.pop("kernels"):
        params = tuple(param(**fields) for fields in entry.pop("params"))
        for key in ("required_block", "max_block", "cluster"):
            value = entry.pop(key)
            entry[key] = tuple(value) if value is not None else None
        kernels.append(kernel(params=params, **entry))
    variables = tuple(Variable(**fields) for fields in facts.pop("variables"))
    if "imports" in facts:
        facts["imports"] = tuple(facts["imports"])
    return image(kernels=tuple(kernels), variables=variables, **facts)
