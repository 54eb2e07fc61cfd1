"""TritonKernel: one kernel that Triton compiled, from any source.

The compiler's metadata is validated here, since the files may come from an untrusted source.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from torch_cubin import errors
from torch_cubin._inspection.facts import shown
from torch_cubin._native import library
from torch_cubin._triton import accesses

FOLDED = "constexpr"  # the type of a parameter that the compiler folded away
# Triton's scalar types, and the contract's (docs/manifest.md).
SCALARS = {
    "i1": "bool", "u1": "bool",
    "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64",
    "u8": "uint8", "u16": "uint16", "u32": "uint32", "u64": "uint64",
    # Triton's launchers truncate to bfloat16; torch rounds.
    "fp16": "float16", "bf16": "bfloat16_truncated", "fp32": "float32", "f32": "float32",
    "fp64": "float64",
}  # fmt: skip
# Triton's element types of pointers, and torch's dtypes.
POINTEES = {
    "i1": "bool", "u1": "bool",
    "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64",
    "u8": "uint8", "u16": "uint16", "u32": "uint32", "u64": "uint64",
    "fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "f32": "float32", "fp64": "float64",
    "fp8e4nv": "float8_e4m3fn", "fp8e5": "float8_e5m2",
    "fp8e4b8": "float8_e4m3fnuz", "fp8e5b16": "float8_e5m2fnuz",
}  # fmt: skip
_DESCRIPTOR = re.compile(r"tensordesc<([a-z0-9]+)\[([0-9, ]+)\](?:,[^>]*)?>")
# Supported versions of Triton, oldest and newest (tools/library_versions.py tests all of them).
OLDEST, NEWEST = (3, 3), (3, 9)
_NUMBERS = (
    *("num_warps", "num_ctas", "num_stages", "shared", "tmem_size"),
    *("global_scratch_size", "global_scratch_align", "profile_scratch_size"),
)
_FLAGS = ("launch_cooperative_grid", "launch_pdl")
_MOST = 1 << 40


ACCESSES = frozenset({"read", "write", "update", "first", "reset", "restore"})


class Unknown:
    """The value of a folded parameter that has no JSON form: a dtype, a function."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unknown) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return self.text


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter of the Triton function, or an item of a tuple parameter."""

    name: str  # "x_ptr"; "t.0" for an item; "" if unknown
    type: str  # Triton's: "*fp32", "i32", "tensordesc<fp16[128,64]>", FOLDED
    value: Any = None  # if folded: a number, bool, str or None, or Unknown
    is_declared: bool = False  # folded because it is tl.constexpr
    multiple_of: int = 1  # known divisor of an address in bytes, or of an int
    is_signless: bool = False  # read from IR, which does not distinguish i32 from u32
    # The kernel's accesses to a pointer's memory: "read", "write", "update", and "first" if it is
    # read or updated on a path that has not written to it. None if the IR could not be followed.
    # "reset" and "restore": the autotuner's reset_to_zero or restore_value names the parameter.
    access: frozenset[str] | None = None

    def to_json(self) -> dict[str, Any]:
        entry: dict[str, Any] = {"name": self.name, "type": self.type}
        if self.type == FOLDED:
            is_data = not isinstance(self.value, Unknown)
            entry |= {"value": self.value} if is_data else {"text": self.value.text}
            entry["declared"] = self.is_declared
        if self.multiple_of != 1:
            entry["multiple_of"] = self.multiple_of
        if self.is_signless:
            entry["signless"] = True
        if self.access is not None:
            entry["access"] = sorted(self.access)
        return entry

    @classmethod
    def from_json(cls, entry: Any, label: str) -> Parameter:
        if not isinstance(entry, Mapping):
            raise _wrong(label, "a parameter", "an object", entry)
        name, type_ = entry.get("name"), entry.get("type")
        if not isinstance(name, str) or not isinstance(type_, str):
            raise _wrong(label, "a parameter", "a name and a type", entry)
        value = entry.get("value")
        if isinstance(entry.get("text"), str):
            value = Unknown(entry["text"])
        elif value is not None and type(value) not in (bool, int, float, str):
            raise _wrong(label, f"parameter '{name}'", "a number, bool, str or null", value)
        multiple = entry.get("multiple_of", 1)
        if type(multiple) is not int or not 1 <= multiple <= 1 << 20:
            raise _wrong(label, f"parameter '{name}'", "multiple_of from 1", multiple)
        access = entry.get("access")
        if access is not None and not (isinstance(access, list) and {*access} <= ACCESSES):
            raise _wrong(label, f"parameter '{name}'", f"access of {sorted(ACCESSES)}", access)
        return cls(
            name, type_, value, bool(entry.get("declared")), multiple, bool(entry.get("signless")),
            None if access is None else frozenset(access),
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TritonKernel:
    """A kernel that Triton compiled: its cubin, and the constraints on its launches.

    - `name`: the symbol. `arch`: the binary's, "sm_90a". `version`: Triton's.
    - `parameters`: those of the Triton function; `constants` has the values of the folded ones.
    """

    cubin: bytes = dataclasses.field(repr=False)
    origin: str  # for errors: "Triton kernel 'add'"
    name: str
    version: str
    arch: str
    parameters: tuple[Parameter, ...]
    metadata: Mapping[str, Any] = dataclasses.field(repr=False)
    source_hash: str = ""
    # Whether the values of folded parameters are known; a cache folder does not record them.
    knows_folded: bool = True
    # The integers in its IR, among them the folded ones; None without the IR.
    numbers: frozenset[int] | None = None
    # By axis of the grid, how many elements a program computes (accesses.program_steps).
    steps: tuple[int | None, ...] = (None, None, None)

    @property
    def constants(self) -> dict[str, Any]:
        return {p.name: p.value for p in self.parameters if p.type == FOLDED}

    @property
    def hidden(self) -> int:
        """The number of parameters that the compiler added: scratch memory for the kernel and a
        profiler."""
        if "profile_scratch_size" in self.metadata:
            return 2
        return 1 if "global_scratch_size" in self.metadata else 0

    @property
    def cluster(self) -> tuple[int, int, int]:
        """Blocks of a cluster; (1, 1, 1) means no cluster."""
        dims = self.metadata.get("cluster_dims")
        if dims is not None:
            return tuple(dims)
        return self.metadata.get("num_ctas", 1), 1, 1

    def record(self) -> dict[str, Any]:
        """The kernel's record in a manifest, which read() accepts."""
        return {
            "name": "triton",
            "version": self.version,
            "target": self.arch,
            "kernel": self.name,
            "source_hash": self.source_hash,
            "knows_folded": self.knows_folded,
            "parameters": [parameter.to_json() for parameter in self.parameters],
            "metadata": dict(self.metadata),
        }


def with_accesses(parameters: list[Parameter], ttir: str) -> list[Parameter]:
    """The parameters with their accesses by the IR. Left unknown if the parameters that are not
    folded do not match the IR's."""
    found = accesses.accesses(ttir)
    if found is None:
        return parameters
    passed = [p for p in parameters if p.type.startswith("*") or descriptor(p.type)]
    if len(found) != len(passed):
        return parameters
    known = {}
    for parameter, access in zip(passed, found, strict=True):
        names = (("read", access.reads), ("write", access.writes), ("update", access.updates),
                 ("first", access.reads_first))  # fmt: skip
        if access.followed:
            known[id(parameter)] = frozenset(name for name, holds in names if holds)
    return [dataclasses.replace(p, access=known.get(id(p))) for p in parameters]


def descriptor(type_: str) -> tuple[str, int] | None:
    """A descriptor type's dtype and number of dims; None for another type."""
    match = _DESCRIPTOR.fullmatch(type_)
    return (match[1], match[2].count(",") + 1) if match else None


def make(
    cubin: bytes,
    metadata: Mapping[str, Any],
    parameters: list[Parameter],
    origin: str,
    *,
    source_hash: str = "",
    knows_folded: bool = True,
) -> TritonKernel:
    """Raises ImageError [image] if `cubin` is no cubin, InputError [input] for metadata that is
    inconsistent with itself or the cubin, or describes a kernel that cannot be launched."""
    checked = _checked(metadata, origin)
    name = checked.get("name")
    if not isinstance(name, str) or not name:
        raise _wrong(origin, "name", "the kernel's symbol", name)
    facts = library.inspect(cubin, origin)
    if facts.get("kind") != "cubin":
        raise _wrong(origin, "the binary", "a cubin", facts.get("kind"))
    _refuse_unsupported(checked, origin)
    kernel = TritonKernel(
        cubin=cubin,
        origin=origin,
        name=name,
        version=str(checked.get("triton_version", "")),
        arch=facts["arch"],
        parameters=tuple(parameters),
        metadata=checked,
        source_hash=source_hash,
        knows_folded=knows_folded,
    )
    _check_types(kernel)
    _check_count(kernel, facts)
    _check_version(kernel)
    return kernel


def _checked(metadata: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """The relevant fields, each checked for its type."""
    kept = {}
    for key in ("name", "hash", "triton_version", "instrumentation_mode"):
        if metadata.get(key) is not None:
            if not isinstance(metadata[key], str):
                raise _wrong(origin, key, "a string", metadata[key])
            kept[key] = metadata[key]
    for key in _NUMBERS:
        if metadata.get(key) is not None:
            if type(metadata[key]) is not int or not 0 <= metadata[key] < _MOST:
                raise _wrong(origin, key, "a number, 0 or more", metadata[key])
            kept[key] = metadata[key]
    for key in _FLAGS:
        if metadata.get(key) is not None:
            if not isinstance(metadata[key], bool):
                raise _wrong(origin, key, "true or false", metadata[key])
            kept[key] = metadata[key]
    if metadata.get("cluster_dims") is not None:
        kept["cluster_dims"] = _numbers(metadata["cluster_dims"], 3, 16, origin, "cluster_dims")
    if metadata.get("tensordesc_meta"):
        listed = metadata["tensordesc_meta"]
        if not isinstance(listed, (list, tuple)):
            raise _wrong(origin, "tensordesc_meta", "a list", listed)
        kept["tensordesc_meta"] = [_descriptor_notes(entry, origin) for entry in listed]
    if kept.get("num_ctas", 1) > 16:
        raise _wrong(origin, "num_ctas", "1 to 16", kept["num_ctas"])
    return kept


def _descriptor_notes(entry: Any, origin: str) -> dict[str, Any]:
    what = "tensordesc_meta"
    if not isinstance(entry, Mapping):
        raise _wrong(origin, what, "an object", entry)
    kept: dict[str, Any] = {}
    for key in ("swizzle", "elem_size", "elem_type"):
        if type(entry.get(key)) is not int or not 0 <= entry[key] < 64:
            raise _wrong(origin, f"{what}.{key}", "a small number", entry.get(key))
        kept[key] = entry[key]
    block = entry.get("block_size")
    kept["block_size"] = _numbers(block, None, 256, origin, f"{what}.block_size")
    for key in ("fp4_padded", "is_im2col"):
        kept[key] = bool(entry.get(key, False))
    return kept


def _numbers(values: Any, count: int | None, most: int, origin: str, what: str) -> list[int]:
    right = isinstance(values, (list, tuple)) and (count is None or len(values) == count)
    if not right or not all(type(n) is int and 1 <= n <= most for n in values):
        raise _wrong(origin, what, f"numbers from 1 to {most}", values)
    return list(values)


def _refuse_unsupported(metadata: Mapping[str, Any], origin: str) -> None:
    def refuse(what: str, why: str, advice: str) -> errors.Error:
        return errors.fault("input", origin, f"cannot be launched: {what}", got=why, advice=advice)

    if metadata.get("instrumentation_mode"):
        mode = metadata["instrumentation_mode"]
        raise refuse(
            "it is instrumented",
            f"instrumentation_mode '{mode}'",
            "Its code talks to Triton's profiler or sanitizer: compile it without.",
        )
    if metadata.get("profile_scratch_size"):
        raise refuse(
            "it writes a profile",
            f"{metadata['profile_scratch_size']} bytes of profile scratch a block",
            "Compile it without Proton.",
        )
    for index, entry in enumerate(metadata.get("tensordesc_meta", ())):
        descriptor_ = f"descriptor {index} "
        if entry["is_im2col"]:
            raise refuse(descriptor_ + "is an im2col map", "is_im2col", "Use a tiled descriptor.")
        if entry["fp4_padded"]:
            advice = "No dtype of torch's has such elements."
            raise refuse(descriptor_ + "is of padded 4-bit floats", "fp4_padded", advice)
        if entry["elem_type"] == 11:
            advice = "A TF32 map rounds what it loads: use round_f32_to_tf32=False."
            raise refuse(descriptor_ + "rounds to TF32", "elem_type 11", advice)
        if entry["swizzle"] > 3:
            raise refuse(descriptor_ + "has an unknown swizzle", str(entry["swizzle"]), "")


def _check_version(kernel: TritonKernel) -> None:
    """Warns for versions outside OLDEST to NEWEST, whose hidden parameters and launch rules are
    unknown. That the parameters fit, which is checked, only shows that their number is the known
    one."""
    found = _version(kernel)
    if OLDEST <= found <= NEWEST:
        return
    known = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    errors.warn(
        f"torch_cubin: {kernel.origin} was compiled by Triton"
        f" {shown(kernel.version) or '(unknown)'}, and launches are known of {known}: it"
        " is launched as those are. Its parameters fit; compare its results with Triton's.",
        UserWarning,
    )


def _version(kernel: TritonKernel) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", kernel.version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _check_types(kernel: TritonKernel) -> None:
    for parameter in kernel.parameters:
        type_ = parameter.type
        known = type_ == FOLDED or type_ in SCALARS or descriptor(type_) is not None
        if type_.startswith("*"):
            known = type_.removeprefix("*").removeprefix("k") in POINTEES
        if not known:
            raise errors.fault(
                "input",
                f"{kernel.origin} parameter '{parameter.name}'",
                "has a type that torch_cubin does not know",
                expected="a number, a pointer to numbers or a tensor descriptor",
                got=f"'{type_:.80}'",
            )
    described = sum(descriptor(p.type) is not None for p in kernel.parameters)
    notes = kernel.metadata.get("tensordesc_meta")
    if notes and len(notes) != described:
        raise _wrong(kernel.origin, "tensordesc_meta", errors.counted(described, "entry"), notes)


def sizes_of(kernel: TritonKernel, parameter: Parameter) -> list[int]:
    """Bytes of each binary parameter of a parameter that is not folded."""
    if parameter.type in SCALARS:
        kind = SCALARS[parameter.type]
        digits = re.findall(r"\d+", kind)
        return [1 if kind == "bool" else int(digits[0]) // 8]
    found = descriptor(parameter.type)
    if found is None:
        return [8]
    dims = found[1]
    if kernel.metadata.get("tensordesc_meta"):
        return [128, *[4] * dims, *[8] * dims]
    return [8, *[8] * (2 * dims), *[1] * descriptor_flags(kernel), *[4] * dims, *[8] * dims]


def descriptor_flags(kernel: TritonKernel) -> int:
    """The number of bools after a descriptor's strides on a GPU without tensor maps: NaN padding
    (since 3.5), and rounding to TF32 on loads (since 3.7)."""
    version = _version(kernel)
    return 2 if version >= (3, 7) else 1 if version >= (3, 5) else 0


def _check_count(kernel: TritonKernel, facts: Mapping[str, Any]) -> None:
    found = [entry for entry in facts["kernels"] if entry["name"] == kernel.name]
    if not found:
        names = ", ".join(entry["name"] for entry in facts["kernels"])[:200]
        raise errors.fault(
            "no_kernel",
            kernel.origin,
            "has notes of another binary",
            expected=f"a kernel '{shown(kernel.name)}'",
            got=names,
        )
    _check_shape(kernel, found[0])
    given = [parameter["size"] for parameter in found[0]["params"]]
    passed = [p for p in kernel.parameters if p.type != FOLDED]
    wanted = [size for p in passed for size in sizes_of(kernel, p)] + [8] * kernel.hidden
    if given == wanted:
        return
    names = ", ".join(f"{p.name or '?'} {p.type}" for p in passed)
    raise errors.fault(
        "params",
        kernel.origin,
        "has other parameters than its binary",
        expected=f"{errors.counted(len(given), 'parameter')} of {given} bytes",
        got=f"{wanted} bytes ({names}; {kernel.hidden} hidden for scratch)",
        advice=f"Triton {kernel.version or '(unknown)'} compiled it: notes and binary must be of"
        " one compilation.",
    )


def _check_shape(kernel: TritonKernel, facts: Mapping[str, Any]) -> None:
    """Compares warps and clusters with the binary. Two configurations of a function have the same
    parameters but not the same shared memory, so swapped metadata would go unnoticed otherwise."""
    warps, block = kernel.metadata.get("num_warps", 0), facts["required_block"]
    noted, cluster = math.prod(kernel.cluster), facts["cluster"]
    # Warps of other partitions (warp specialization) come on top. Up to Triton 3.5 only the
    # metadata has clusters.
    if block is not None and 32 * warps > math.prod(block):
        wanted, got = f"num_warps at most {math.prod(block) // 32}", str(warps)
    elif (cluster or "cluster_dims" not in kernel.metadata) and noted != math.prod(cluster or [1]):
        wanted, got = f"clusters of {math.prod(cluster or [1])}", f"clusters of {noted}"
    else:
        return
    raise errors.fault(
        "params", kernel.origin, "has notes of another binary", expected=wanted, got=got,
        advice="Notes and binary must be of one compilation.",
    )  # fmt: skip


def _wrong(origin: str, what: str, expected: str, got: Any) -> errors.Error:
    return errors.fault(
        "input", f"{origin}: {what:.80}", "is wrong", expected=expected, got=f"{got!r:.80}"
    )
