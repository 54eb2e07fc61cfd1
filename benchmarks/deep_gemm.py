"""DeepGEMM's products, a peer of the benchmarks of 8-bit floats and of groups on Hopper.

    python benchmarks/deep_gemm.py FOLDER

Builds in FOLDER, without a GPU, the kernels that DeepGEMM would compile for the benchmarks' cases
on 132 multiprocessors (71; half an hour on a processor): its source as PyPI's deepinfer-gemm has it
(MIT; deepseek-ai/DeepGEMM), nvcc with the flags of its own compiler, and the tiles that its
heuristics choose. It needs pip, PyTorch and a CUDA toolkit (CUDA_HOME, else /usr/local/cuda) of
12.9 or later. The benchmarks launch them by torch_cubin if they are given `--deep-gemm FOLDER`.

choose() follows the source's csrc/jit_kernels/heuristics/sm90.hpp. The kernels are compared with
ours and are no part of the package.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import torch_cubin
from torch_cubin import TensorMap

WHO = "DeepGEMM"
# By address, because the name within is another one.
SOURCE = (
    "https://files.pythonhosted.org/packages/c3/81/"
    "8211cfa3e92b0f5be337116fe15da8a6fa232161899a628fe100d8895fa0/deepinfer_gemm-2.8.2.tar.gz"
    "#sha256=aad050965750f809b8dbb744a8db54fc4eba0eb3bc99d565fa9b41010fe25351"
)
MULTIPROCESSORS = 132
SHARED_BYTES = 232448
ALIGNMENT = 128  # of the rows at which groups begin
L2_BYTES = 6153  # that the L2 cache reads or writes in a cycle; of a multiprocessor's memory 128
FLAGS = (
    *("-cubin", "-arch=sm_90a", "-std=c++20", "-O3", "--ptxas-options=--register-usage-level=10"),
    *("--expt-relaxed-constexpr", "--expt-extended-lambda", "-w"),
)
Size = tuple[int, int, int]  # M, N, K


def round_up(size: int, to: int) -> int:
    return -(-size // to) * to


@dataclasses.dataclass(frozen=True)
class Config:
    """A kernel: its product's N, K and groups, and its tile, cluster and stages."""

    bytes: int  # of an operand's element: 1 for e4m3, 2 for bfloat16
    n: int
    k: int
    groups: int  # 1 for a product without groups
    tile_m: int
    tile_n: int
    cluster: tuple[int, int]  # of M, N
    stages: int
    shared: int

    @property
    def name(self) -> str:
        return (
            f"{('e4m3', 'bf16')[self.bytes - 1]}_{self.groups}x{self.n}x{self.k}"
            f"_{self.tile_m}x{self.tile_n}_{self.cluster[0]}x{self.cluster[1]}"
        )

    @property
    def tile_k(self) -> int:
        return 128 // self.bytes

    @property
    def threads(self) -> int:
        """That multiply; 128 more load."""
        return 128 if self.tile_m <= 64 else 256

    @property
    def out_swizzle(self) -> int:
        return next(span for span in (128, 64, 32) if self.tile_n * 2 % span == 0)

    def source(self) -> str:
        is_e4m3 = self.bytes == 1
        blocks = math.prod(self.cluster)
        kind = "MGroupedContiguous" if self.groups > 1 else "Normal"
        kernel = "sm90_fp8_gemm_1d2d" if is_e4m3 else "sm90_bf16_gemm"
        arguments = [
            *["cute::UMMA::Major::K"] * self.bytes, 0, self.n, self.k, self.groups,
            self.tile_m, self.tile_n, self.tile_k, 128, 128, self.out_swizzle, self.stages,
            128, self.threads, blocks, str(self.cluster[1] > 1).lower(), MULTIPROCESSORS,
            f"GemmType::{kind}", *([] if is_e4m3 else ["false"]), "cutlass::bfloat16_t",
        ]  # fmt: skip
        return (
            f"#include <deep_gemm/impls/{kernel}.cuh>\nusing namespace deep_gemm;\n"
            "static void instantiate() { auto kernel = reinterpret_cast<void*>("
            f"&{kernel}_impl<{', '.join(map(str, arguments))}>); }}\n"
        )


def candidates(m: int, n: int, k: int, groups: int, size: int) -> Iterator[Config]:
    rows = [ALIGNMENT] if groups > 1 else [64, 128]
    if groups == 1:
        rows += [tile for tile, most in ((16, 16), (32, 32), (256, m)) if m <= most]
    for cluster in ((1, 1), (1, 2), (2, 1)):
        for tile_m, tile_n in itertools.product(rows, range(16, 193 if size == 1 else 257, 16)):
            over = tile_n - 128
            if size == 1 and over > 0 and tile_n % over != 0 and 128 % over != 0:
                continue
            if tile_m > 128 and tile_n > 128:
                continue
            scales = 0
            if size == 1:
                scales = round_up(-(-k // 128) * 4 * (1 if 128 % tile_n == 0 else 2), 8)
            fixed = round_up(tile_m * tile_n * 2, 1024) + 256 + scales
            stage = (tile_m + tile_n) * 128 + (round_up(tile_m * 4, 128) if size == 1 else 0)
            stages = min((SHARED_BYTES - fixed) // stage, 16)
            if stages >= (3 if tile_m * tile_n >= 128 * 192 else 4):
                shared = fixed + stages * stage
                yield Config(size, n, k, groups, tile_m, tile_n, cluster, stages, shared)


def cycles(config: Config, m: int) -> int:
    """What a product is estimated to take."""
    tile_m, tile_n = config.tile_m, config.tile_n
    tiles = -(-m // tile_m) * -(-config.n // tile_n)
    waves = -(-tiles // MULTIPROCESSORS)
    if config.cluster != (1, 1) and waves <= 1:
        return sys.maxsize
    out = tile_m * tile_n * 2
    row = config.k * config.bytes
    of_l2 = row * (tile_m // config.cluster[1] + tile_n // config.cluster[0]) + out
    of_l1 = row * (tile_m + tile_n) + row * (max(64, tile_m) + tile_n) + 2 * out
    most = max(of_l2 * tiles // L2_BYTES, of_l1 * tiles // (128 * MULTIPROCESSORS))
    return int(np.float32(most) / (np.float32(tiles) / np.float32(waves * MULTIPROCESSORS)))


@functools.cache
def choose(m: int, n: int, k: int, groups: int = 1, size: int = 1) -> Config:
    """The kernel that DeepGEMM takes; `m`: with the rows that groups are padded by."""
    return min(candidates(m, n, k, groups, size), key=lambda config: cycles(config, m))


def padded_rows(sizes: list[int]) -> list[int]:
    return [round_up(size, ALIGNMENT) for size in sizes]


def padded(sizes: list[int], x: Tensor) -> Tensor:
    """`x`, whose first dim is the groups' rows, with rows of zeros after each group."""
    rows = padded_rows(sizes)
    starts = itertools.accumulate(rows, initial=0)
    to = torch.cat([torch.arange(size) + start for size, start in zip(sizes, starts, strict=False)])
    wide = x.new_zeros(sum(rows), *x.shape[1:], dtype=x.dtype)
    wide.view(torch.uint8)[to.to(x.device)] = x.view(torch.uint8)
    return wide


def groups_of_rows(sizes: list[int]) -> Tensor:
    """Of each row of padded groups."""
    counts = torch.tensor(padded_rows(sizes))
    return torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), counts).cuda()


def scales_of_rows(scales: Tensor) -> Tensor:
    """Scales (M, K / 128) as the kernels read them: (K / 128, M rounded up to a multiple of 4)."""
    rows = scales.new_zeros(scales.shape[1], round_up(scales.shape[0], 4))
    rows[:, : len(scales)] = scales.t()
    return rows


class Peer:
    """Calls of the kernels that were built in a folder."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.kernels: dict[Config, torch_cubin.Kernel] = {}

    def _kernel(self, config: Config) -> torch_cubin.Kernel:
        if config not in self.kernels:
            module = torch_cubin.load(self.folder / f"{config.name}.cubin")
            self.kernels[config] = module[next(iter(module))]
        return self.kernels[config]

    def product(
        self, a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor] | None,
        groups: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """a (M, K) times b (N, K), of e4m3 with scales_of_rows() of a and scales (N / 128, K / 128)
        of b; or padded rows of `groups` times b (groups, N, K), of which bfloat16 has no scales."""
        (m, k), n, count = a.shape, b.shape[-2], b.shape[0] if b.dim() == 3 else 1
        config = choose(m, n, k, count, a.element_size())
        out = a.new_empty(m, n, dtype=torch.bfloat16)
        of_map = functools.partial(TensorMap, l2_promotion="256B")
        maps = [
            of_map(a, (config.tile_m, config.tile_k), swizzle="128B"),
            of_map(b.flatten(0, -2), (config.tile_n, config.tile_k), swizzle="128B"),
            of_map(out, (config.tile_m, config.out_swizzle // 2), swizzle=f"{config.out_swizzle}B"),
        ]
        first: list[Tensor | None] = [groups]
        if scales is not None:
            maps.append(of_map(scales[0], (1, config.tile_m)))
            first = [scales[1], groups]
        self._kernel(config)(
            *first, m, n, k, *maps, grid=MULTIPROCESSORS, block=128 + config.threads,
            cluster=math.prod(config.cluster), shared_memory=config.shared,
        )  # fmt: skip
        return out


def wanted() -> set[Config]:
    """The kernels of bench_fp8.py's and bench_grouped.py's cases."""
    import bench_fp8
    import bench_grouped

    sizes = itertools.product(bench_fp8.ROWS, bench_fp8.WEIGHTS)
    configs = [choose(m, n, k) for m, (n, k) in sizes]
    for _, groups, n, k, _ in bench_grouped.CASES:
        rows = sum(padded_rows(groups))
        configs += [choose(rows, n, k, len(groups), size) for size in (1, 2)]
    return set(configs)


def fetch(folder: Path, cuda: str) -> Path:
    """The unpacked source."""
    # Its setup.py stops without a toolkit, and would compile the extension.
    environment = os.environ | {"CUDA_HOME": cuda, "DG_SKIP_CUDA_BUILD": "1"}
    options = ("--no-deps", "--no-build-isolation", "--dest", str(folder))
    command = [sys.executable, "-m", "pip", "download", *options, SOURCE]
    subprocess.run(command, check=True, env=environment)
    archive = folder / SOURCE.partition("#")[0].rpartition("/")[2]
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def build(configs: Iterable[Config], folder: Path, source: Path, cuda: str) -> None:
    include = [source / "deep_gemm" / "include", source / "third-party" / "cutlass" / "include"]
    for config in configs:
        cubin, text = (folder / f"{config.name}.{kind}" for kind in ("cubin", "cu"))
        if cubin.exists():
            continue
        text.write_text(config.source())
        command = [f"{cuda}/bin/nvcc", *FLAGS, *(f"-I{each}" for each in include)]
        subprocess.run([*command, "-o", str(cubin), str(text)], check=True)
        print(config.name, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    cuda = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    folder.mkdir(parents=True, exist_ok=True)
    build(wanted(), folder, fetch(folder, cuda), cuda)


if __name__ == "__main__":
    main()
