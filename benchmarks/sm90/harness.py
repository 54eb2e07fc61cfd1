"""Loads the cubins of build.py through libcuda, and plans and launches products."""

from __future__ import annotations

import ctypes
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from cubin_launch import Attribute, LaunchConfig, check, cuda
from kernel_params import ROOT, MatmulParams

BATCHED = 1
(SPLIT_PAIR, SERPENTINE, GROUP_N, GENERAL, BIAS_ROW, OUT_FLOAT, OUT_VECTOR, ADD_VECTOR,
 NO_SKEW) = (1 << i for i in range(3, 12))  # fmt: skip
ALONG_N, ALONG_M = 1, 21  # the lower of two bits
FINISH, TRANSPOSED = 1 << 16, 1 << 23
# Blocks of a cluster along M and along N.
CLUSTERS = {
    "": (1, 1),
    "k": (1, 1),
    "m": (2, 1),
    "n": (1, 2),
    "mn": (2, 2),
    "m4": (4, 1),
    "n4": (1, 4),
    "2x4": (2, 4),
    "4x2": (4, 2),
    "m8": (8, 1),
    "n8": (1, 8),
}
ACTIVATIONS = {None: 0, "relu": 1, "gelu_erf": 2, "gelu_tanh": 3, "silu": 4}


def activation_curves() -> list[list[float]]:
    """kActivationCurves."""
    header = ROOT / "csrc/kernels/matmul/activation_params.h"
    table = header.read_text().split("kActivationCurves[] = {")[1].split("};")[0]
    numbers = [float(x) for x in re.findall(r"[-+.e0-9]+(?=f)", table)]
    return [numbers[i : i + 7] for i in range(0, len(numbers), 7)]


TYPES = {"bf16": (9, torch.bfloat16), "f16": (6, torch.float16), "tf32": (11, torch.float32)}
OUT_MAP_TYPE = {"bf16": 9, "f16": 6, "tf32": 7}


def encode(
    map_: ctypes.Structure, kind: int, size: int, base: int, dims, strides, box, swizzle: int
) -> None:
    """Encodes a tensor map; `strides` are in elements, for dims[1:]."""
    rank = len(dims)
    u64, u32 = ctypes.c_uint64, ctypes.c_uint32
    check(
        cuda.cuTensorMapEncodeTiled(
            ctypes.byref(map_), kind, rank, ctypes.c_void_p(base), (u64 * rank)(*dims),
            (u64 * (rank - 1))(*(s * size for s in strides)), (u32 * rank)(*box),
            (u32 * rank)(*[1] * rank), 0, swizzle, 3, 0,
        ),
        f"tensor map {dims} {strides} {box}",
    )  # fmt: skip


@dataclass
class Kernel:
    """A loaded cubin."""

    facts: dict
    handle: ctypes.c_void_p

    @property
    def tile(self) -> tuple[int, int]:
        return tuple(self.facts["tile"])


def load(folder: Path) -> dict[str, Kernel]:
    torch.zeros(1, device="cuda")
    kernels = {}
    for facts in json.loads((folder / "kernels.json").read_text()):
        data = (folder / f"{facts['name']}.cubin").read_bytes()
        library, kernel = ctypes.c_void_p(), ctypes.c_void_p()
        code = cuda.cuLibraryLoadData(ctypes.byref(library), data, None, None, 0, None, None, 0)
        check(code, facts["name"])
        check(
            cuda.cuLibraryGetKernel(ctypes.byref(kernel), library, facts["name"].encode()), "kernel"
        )
        check(cuda.cuKernelSetAttribute(8, facts["shared"], kernel, 0), "shared memory")
        kernels[facts["name"].removeprefix("sm90_matmul_")] = Kernel(facts, kernel)
    return kernels


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class How:
    """The config with which a kernel runs a problem."""

    cluster: str = ""  # a key of CLUSTERS: the layout of its tiles; "k": two blocks halve K
    blocks: int = 132
    stream: bool = False
    group: int = 8
    group_n: bool = False
    serpentine: bool = True
    skew: bool = True
    pdl: bool = False
    least: int = 8  # minimum k blocks per part of a streamed tile
    polls: int = 10000
    parts: int = 0  # parts per streamed tile; 0: derived from the number of blocks

    def __str__(self) -> str:
        words = [f"c{self.cluster}" if self.cluster else "c1", str(self.blocks)]
        words += [f"stream{self.parts or ''}"] * self.stream
        words += [f"g{self.group}{'n' * self.group_n}"]
        words += ["noserp"] * (not self.serpentine) + ["noskew"] * (not self.skew)
        return " ".join(words + ["pdl"] * self.pdl)


@dataclass
class Epilogue:
    bias: torch.Tensor | None = None
    bias_row: bool = False
    addend: torch.Tensor | None = None
    alpha: float = 1.0
    beta: float = 1.0
    activation: str | None = None
    force: bool = False


class Workspace:
    """Scratch memory of streamed tiles; counters are zero between launches."""

    def __init__(self) -> None:
        self.counters = torch.zeros(4096, dtype=torch.int32, device="cuda")
        self.partial = torch.empty(0, device="cuda")

    def need(self, floats: int) -> None:
        if self.partial.numel() < floats:
            self.partial = torch.full((floats,), float("nan"), device="cuda")


def batch_dims(t: torch.Tensor, sizes: list[int]) -> list[int]:
    """Strides of the three batch dims, innermost first."""
    strides = [0 if t.shape[i] == 1 else t.stride(i) for i in range(t.dim() - 2)]
    strides = [0] * (len(sizes) - len(strides)) + strides
    return [*strides[::-1], 0, 0, 0][:3]


class Launch:
    """One product with encoded parameters; each call launches it."""

    def __init__(
        self, kernel: Kernel, how: How, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor,
        workspace: Workspace, epilogue: Epilogue | None = None,
    ) -> None:  # fmt: skip
        facts = kernel.facts
        bm, bn = kernel.tile
        code, dtype = TYPES[facts["type"]]
        size = dtype.itemsize
        assert a.dtype == b.dtype == dtype
        m, k = a.shape[-2:]
        n = b.shape[-1]
        sizes = list(torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]))
        batch = [*sizes[::-1], 1, 1, 1][:3]
        batched = math.prod(sizes) > 1
        tile_k = 128 // size
        cm, cn = CLUSTERS[how.cluster]
        per_cluster = 2 if how.cluster == "k" else cm * cn
        p = self.params = MatmulParams()
        p.m, p.n, p.k_blocks = m, n, cdiv(k, tile_k)
        p.tiles_m, p.tiles_n = cdiv(cdiv(m, bm), cm), cdiv(cdiv(n, bn), cn)
        p.group = how.group
        p.batch = (ctypes.c_int * 3)(*batch)
        tiles = p.tiles_m * p.tiles_n * math.prod(sizes)
        clusters = min(how.blocks // per_cluster, tiles)
        p.whole_tiles = tiles
        if how.cluster == "k":
            assert p.k_blocks >= 2
            assert tiles * 2 <= how.blocks
        elif how.stream:
            clusters = how.blocks // per_cluster
            p.stream_tiles = tiles % clusters
            p.whole_tiles = tiles - p.stream_tiles
            units = p.stream_tiles * p.k_blocks
            p.polls = how.polls
            p.stream_clusters = max(p.stream_tiles, min(clusters, units // how.least))
            if how.parts:
                p.stream_clusters = how.parts * p.stream_tiles
                assert p.stream_clusters <= clusters
            workspace.need(2 * clusters * per_cluster * bm * bn)
            p.partial, p.counters = workspace.partial.data_ptr(), workspace.counters.data_ptr()
            assert p.stream_tiles * per_cluster * facts["consumers"] <= 4096
        flags = (cn.bit_length() - 1) << ALONG_N | (cm.bit_length() - 1) << ALONG_M
        flags |= SPLIT_PAIR * (how.cluster == "k")
        flags |= BATCHED * batched | GROUP_N * how.group_n | SERPENTINE * how.serpentine
        flags |= NO_SKEW * (not how.skew)

        def operand(map_, t: torch.Tensor, mn_major: bool, rows: int, mn: int, parts: int):
            batch_strides = batch_dims(t, sizes)
            stride_mn, stride_k = (t.stride(-2), t.stride(-1)) if t is a else (
                t.stride(-1), t.stride(-2))  # fmt: skip
            if mn_major:
                assert stride_mn == 1, (stride_mn, stride_k)
                dims, strides, box = [mn, k], [stride_k], [tile_k, tile_k // parts]
            else:
                assert stride_k == 1, (stride_mn, stride_k)
                dims, strides, box = [k, mn], [stride_mn], [tile_k, rows // parts]
            if batched:
                dims += batch
                strides += batch_strides
                box += [1, 1, 1]
            encode(map_, code, size, t.data_ptr(), dims, strides, box, 3)

        operand(p.a, a, bool(facts["a_mn"]), bm, m, cn)
        operand(p.b, b, bool(facts["b_mn"]), bn, n, cm)
        e = epilogue or Epilogue()
        unaligned = out.stride(-2) * size % 16 != 0 or n * size % 16 != 0
        general = epilogue is not None or unaligned or out.dtype != dtype
        out_strides = [out.stride(i) for i in range(out.dim() - 2)][::-1]
        out_strides = [*out_strides, 0, 0, 0][:3]
        from_registers = facts["type"] == "tf32" and facts["a_mn"]
        transposed = out.stride(-1) != 1
        assert out.stride(-2 if transposed else -1) == 1
        if from_registers:
            row = out.stride(-1 if transposed else -2)
            flags |= TRANSPOSED * transposed
            pairs = all(x % 2 == 0 for x in (row, out.data_ptr() // 4, *out_strides))
            pairs = pairs and (m if transposed else n) % 2 == 0
            simple = e.activation is None and e.alpha == 1 and e.addend is None
            if e.bias is not None:
                flags |= BIAS_ROW * e.bias_row
                simple = simple and transposed and e.bias_row
            if not pairs or not simple:
                flags |= GENERAL | ACTIVATIONS[e.activation] << 12
            elif e.bias is not None:
                flags |= FINISH
            p.out, p.out_stride_m = out.data_ptr(), row
            p.out_batch_stride = (ctypes.c_int64 * 3)(*out_strides)
            self.set_epilogue(p, e, sizes, m, n)
        elif general:
            flags |= GENERAL | ACTIVATIONS[e.activation] << 12
            flags |= OUT_FLOAT * (out.dtype == torch.float32)
            aligned = out.data_ptr() % 16 == 0 and out.stride(-2) % 4 == 0 and n % 4 == 0
            flags |= OUT_VECTOR * (aligned and all(s % 4 == 0 for s in out_strides))
            p.out, p.out_stride_m = out.data_ptr(), out.stride(-2)
            p.out_batch_stride = (ctypes.c_int64 * 3)(*out_strides)
            flags |= BIAS_ROW * (e.bias is not None and e.bias_row)
            flags |= ADD_VECTOR * self.set_epilogue(p, e, sizes, m, n)
        else:
            row_bytes = bn * size
            panel = next(b for b in (128, 64, 32) if row_bytes % b == 0)
            dims, strides, box = [n, m], [out.stride(-2)], [panel // size, 16]
            if batched:
                dims, strides, box = dims + batch, strides + out_strides, [*box, 1, 1, 1]
            swizzle = {128: 3, 64: 2, 32: 1}[panel]
            encode(
                p.out_map,
                OUT_MAP_TYPE[facts["type"]],
                size,
                out.data_ptr(),
                dims,
                strides,
                box,
                swizzle,
            )
        p.flags = flags
        self.keep = (a, b, out, e, workspace.partial)
        self.kernel = kernel
        # The device needs 64-byte alignment, which ctypes cannot express.
        self.memory = ctypes.create_string_buffer(ctypes.sizeof(p) + 64)
        self.address = (ctypes.addressof(self.memory) + 63) // 64 * 64
        ctypes.memmove(self.address, ctypes.addressof(p), ctypes.sizeof(p))
        self.argument = (ctypes.c_void_p * 1)(self.address)
        self.attributes = (Attribute * 2)()
        count = 0
        if how.cluster:
            self.attributes[0].id = 4
            self.attributes[0].value[0:3] = [per_cluster, 1, 1]
            count = 1
        if how.pdl:
            self.attributes[count].id = 6
            self.attributes[count].value[0] = 1
            count += 1
        self.config = LaunchConfig()
        self.config.grid = (ctypes.c_uint * 3)(clusters * per_cluster, 1, 1)
        self.config.block = (ctypes.c_uint * 3)(facts["threads"], 1, 1)
        self.config.shared = facts["shared"]
        self.config.attributes = self.attributes
        self.config.count = count

    @staticmethod
    def set_epilogue(p: MatmulParams, e: Epilogue, sizes: list[int], m: int, n: int) -> bool:
        """Sets the epilogue's fields; returns whether the addend can be read in vectors."""
        p.alpha, p.beta = e.alpha, e.beta
        curve = activation_curves()[ACTIVATIONS[e.activation]]
        p.curve.limit, p.curve.c[:] = curve[0], curve[1:]
        if e.bias is not None:
            p.bias, p.bias_stride = e.bias.data_ptr(), e.bias.stride(0)
        if e.addend is None:
            return False
        c = e.addend.expand(*sizes, m, n)
        p.addend, p.addend_stride_m, p.addend_stride_n = c.data_ptr(), c.stride(-2), c.stride(-1)
        strides = [c.stride(i) for i in range(c.dim() - 2)]
        strides = [*strides[::-1], 0, 0, 0][:3]
        p.addend_batch_stride = (ctypes.c_int64 * 3)(*strides)
        vector = c.stride(-1) == 1 and c.data_ptr() % 16 == 0
        return vector and all(s % 4 == 0 for s in [c.stride(-2), *strides])

    def __call__(self) -> None:
        self.config.stream = torch.cuda.current_stream().cuda_stream
        check(
            cuda.cuLaunchKernelEx(
                ctypes.byref(self.config), self.kernel.handle, self.argument, None
            ),
            self.kernel.facts["name"],
        )
