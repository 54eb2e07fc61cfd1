"""Facts of one finished cubin: its parameters, its ptxas log, its occupancy.

Reads only cubins that this build has just made. Files from elsewhere go through csrc/cubin, which
does not trust its input.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import struct
from collections.abc import Sequence

import ptx_waits
from kernel_table import name_of, split_arch
from toolkit import BuildError

# --- parameters, from the cubin -------------------------------------------------------------------

KPARAM_INFO, KPARAM_INFO_V2 = 0x17, 0x45
SIZED = 4  # the attribute format whose second half-word is the payload's size


def sections(cubin: bytes) -> dict[str, bytes]:
    """The sections of an ELF64 little-endian file, by name."""
    offset = struct.unpack_from("<Q", cubin, 0x28)[0]
    entry_size, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = []
    for index in range(count):
        name, kind, _, _, start, size = struct.unpack_from(
            "<IIQQQQ", cubin, offset + index * entry_size
        )
        no_bits = kind == 8
        headers.append((name, b"" if no_bits else cubin[start : start + size]))
    names = headers[names_index][1]
    return {names[n : names.index(b"\0", n)].decode(): data for n, data in headers}


def read_params(cubin: bytes, kernel: str) -> list[dict[str, int]]:
    """[{"index", "offset", "size"}] of the kernel, by index, from its .nv.info section."""
    info = sections(cubin).get(f".nv.info.{kernel}")
    if info is None:
        raise BuildError("image", f"kernel '{kernel}'", "is not in the cubin that was built for it")
    params = []
    at = 0
    while at + 4 <= len(info):
        form, attribute, value = struct.unpack_from("<BBH", info, at)
        at += 4
        size = value if form == SIZED else 0
        if attribute in (KPARAM_INFO, KPARAM_INFO_V2):
            _, index, offset, word = struct.unpack_from("<IHHI", info, at)
            # V2: a u16 for the size, then one byte each for alignment and address space.
            bytes_ = word >> 18 if attribute == KPARAM_INFO else word & 0xFFFF
            params.append({"index": index, "offset": offset, "size": bytes_})
        at += size
    return sorted(params, key=lambda param: param["index"])


def params_struct(header: pathlib.Path) -> str:
    """The name of the one struct that a header declares."""
    names = re.findall(
        r"^struct (?:alignas\([^()]*\) )?(\w+Params)(?: : \w+)? \{", header.read_text(), re.M
    )
    if len(names) != 1:
        raise BuildError(
            "params",
            f"the header '{header.name}'",
            "does not declare the one parameter of its kernels",
            expected="one 'struct <name>Params {'",
            got=", ".join(names) or "none",
        )
    return names[0]


def size_probe(headers: Sequence[pathlib.Path]) -> str:
    """A source whose PTX contains the sizes of the headers' structs."""
    return "".join(
        f'#include "{name_of(header)}"\n'
        f'extern "C" __device__ const unsigned long long tc_params_size_{i} ='
        f" sizeof(torch_cubin::{params_struct(header)});\n"
        for i, header in enumerate(headers)
    )


def probed_sizes(ptx: str, headers: Sequence[pathlib.Path]) -> dict[pathlib.Path, int]:
    found = {int(i): int(size) for i, size in re.findall(r"\btc_params_size_(\d+) = (\d+);", ptx)}
    return {header: found[i] for i, header in enumerate(headers)}


# --- the log of ptxas -v --------------------------------------------------------------------------

# C7510, C7511, C7515: wgmma is serialised (2 to 4 times slower); C7508: setmaxnreg is ignored.
SLOW = re.compile(r"\(C75\d\d\)|wgmma\.mma_async|setmaxnreg")


@dataclasses.dataclass(frozen=True)
class PtxasFacts:
    registers: int
    static_shared: int
    barriers: int
    spill: int  # bytes, stores and loads
    warnings: tuple[str, ...]


def parse_log(log: str) -> PtxasFacts:
    """Facts of a log that describes one kernel."""

    def number(pattern: str) -> int:
        return max((int(found) for found in re.findall(pattern, log)), default=0)

    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    return PtxasFacts(
        registers=number(r"Used (\d+) registers"),
        static_shared=number(r"(\d+) bytes smem"),
        barriers=number(r"used (\d+) barriers"),
        spill=sum(int(stores) + int(loads) for stores, loads in spills),
        warnings=tuple(line.strip() for line in log.splitlines() if SLOW.search(line)),
    )


def check_log(facts: PtxasFacts, kernel: str, arch: str, accepted_spill: int) -> None:
    """Raises BuildError for compiler warnings and spills that make a kernel slow."""
    if facts.warnings:
        raise BuildError(
            "image",
            f"kernel '{kernel}' for {arch}",
            "was compiled with its tensor core instructions serialised",
            got=facts.warnings[0],
            do="Change the kernel: such code runs several times slower.",
        )
    if facts.spill > accepted_spill:
        raise BuildError(
            "image",
            f"kernel '{kernel}' for {arch}",
            "spills registers",
            expected=f"at most {accepted_spill} bytes",
            got=f"{facts.spill} bytes (stores and loads)",
            do="Lower its register need, or accept it in the table's 'accepted_spill' and say why.",
        )


# --- occupancy ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of one multiprocessor (CUDA C++ Programming Guide, 'Technical Specifications')."""

    shared: int  # bytes
    shared_block: int  # bytes a block can opt in to
    threads: int
    blocks: int
    registers: int = 65536


KIB = 1024
LIMITS = {
    80: Limits(164 * KIB, 163 * KIB, 2048, 32),
    86: Limits(100 * KIB, 99 * KIB, 1536, 16),
    87: Limits(164 * KIB, 163 * KIB, 1536, 16),
    89: Limits(100 * KIB, 99 * KIB, 1536, 24),
    90: Limits(228 * KIB, 227 * KIB, 2048, 32),
    100: Limits(228 * KIB, 227 * KIB, 2048, 32),
    103: Limits(228 * KIB, 227 * KIB, 2048, 32),
    120: Limits(100 * KIB, 99 * KIB, 1536, 24),
    121: Limits(100 * KIB, 99 * KIB, 1536, 24),
}
RESERVED_SHARED = 1024  # bytes a block that the driver reserves from compute capability 8.0 on


def limits_of(arch: str) -> Limits:
    digits, _ = split_arch(arch)
    if digits not in LIMITS:
        raise BuildError(
            "arch",
            f"architecture '{arch}'",
            "is unknown to the build",
            expected=", ".join(f"sm_{sm}" for sm in LIMITS),
            do="Add its limits to csrc/kernels/build/cubin_facts.py.",
        )
    return LIMITS[digits]


def blocks_per_multiprocessor(arch: str, threads: int, registers: int, shared: int) -> int:
    """How many blocks are resident at once; `shared` is static + dynamic bytes."""
    limits = limits_of(arch)
    warps = -(-threads // 32)
    # Registers are allocated to warps in units of 256, warps to the multiprocessor's 4 partitions.
    warp_registers = -(-max(registers, 1) * 32 // 256) * 256
    by_registers = limits.registers // 4 // warp_registers * 4 // warps
    block_shared = -(-(shared + RESERVED_SHARED) // 128) * 128
    return min(
        limits.blocks, limits.threads // (warps * 32), by_registers, limits.shared // block_shared
    )


def check_waits(name: str, arch: str, ptx: str) -> None:
    """Raises BuildError unless the kernel waits for its predecessor: the host launches kernels for
    sm_90 and newer before the previous kernel has ended."""
    touch = ptx_waits.first_touch(ptx) if split_arch(arch)[0] >= 90 else None
    if touch is not None:
        raise BuildError(
            "image",
            f"kernel '{name}' for {arch}",
            "does not wait for the kernel before it on every path",
            expected="wait_for_previous_kernel() first, in PTX for 90 or newer ('virtual_arch')",
            got=f"'{touch}' before it",
            do="If that instruction reads and writes nothing, enter it in build/ptx_waits.py.",
        )


def check_shared(kernel: str, arch: str, shared: int) -> None:
    limit = limits_of(arch).shared_block
    if shared > limit:
        raise BuildError(
            "image",
            f"kernel '{kernel}' for {arch}",
            "needs too much shared memory",
            expected=f"at most {limit} bytes",
            got=f"{shared} bytes",
            do="Leave this architecture out in the table's 'archs'.",
        )
