"""Product: a matrix product as tuned tables describe it, and matching operands."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

# An operand's access (csrc/ops/matmul/tuned.cpp): which dim is contiguous, and whether rows are
# aligned to cache lines, to 16 bytes, or not at all.
K_LINES, OWN_LINES = "k_lines", "own_lines"
K_VECTORS, OWN_VECTORS = "k_vectors", "own_vectors"
OWN_ELEMENTS, K_ELEMENTS = "own_elements", "k_elements"
VECTOR_BYTES = 16
LINE_BYTES = 128
ALLOCATION_BYTES = 512


@dataclasses.dataclass(frozen=True)
class Product:
    """``[batch, m, k] @ [batch, k, n]``; ``a`` and ``b`` are the accesses of the operands."""

    m: int
    n: int
    k: int
    batch: int = 1
    math: str = "16_bit"  # or "tf32", "float32", "float64"
    a: str = K_LINES
    b: str = K_LINES
    dtype: str = "bfloat16"

    @classmethod
    def of_layout(cls, m: int, n: int, k: int, layout: str, dtype: str, batch: int = 1) -> Product:
        """Contiguous operands. `layout`: "nt" is ``a @ w.t()``, "nn" is ``a @ b``, and so on;
        `dtype` may be "tf32"."""
        kind = {"float16": "16_bit", "bfloat16": "16_bit"}.get(dtype, dtype)
        dtype = "float32" if dtype == "tf32" else dtype
        size = getattr(torch, dtype).itemsize

        def access(contiguous_k: bool, own: int) -> str:
            row = (k if contiguous_k else own) * size
            if row % LINE_BYTES == 0:
                return K_LINES if contiguous_k else OWN_LINES
            if row % VECTOR_BYTES == 0:
                return K_VECTORS if contiguous_k else OWN_VECTORS
            return K_ELEMENTS if contiguous_k else OWN_ELEMENTS

        a, b = access(layout[0] == "n", m), access(layout[1] == "t", n)
        return cls(m, n, k, batch, kind, a, b, dtype)

    @classmethod
    def of_plan(cls, plan: dict[str, Any]) -> Product:
        """From an entry of library.watched_plans()."""
        return cls(**plan["product"], dtype=plan["dtype"])

    def line(self) -> dict[str, Any]:
        """As in a tuned table, where float16 and bfloat16 are the same."""
        return {k: v for k, v in dataclasses.asdict(self).items() if k != "dtype"}

    @property
    def layout(self) -> str:
        """ "nt", ...; upper case for an operand with unaligned rows."""
        letters = [("n", "t"), ("t", "n")]
        text = ""
        for access, (along_k, along_own) in zip((self.a, self.b), letters, strict=True):
            letter = along_k if access.startswith("k_") else along_own
            text += letter.upper() if access in (K_ELEMENTS, OWN_ELEMENTS) else letter
        return text

    def __str__(self) -> str:
        batch = f"{self.batch}x" if self.batch > 1 else ""
        return f"{batch}{self.m}x{self.n}x{self.k} {self.layout} {self.dtype}"

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def bytes(self) -> int:
        """The bytes of both operands."""
        return self.batch * (self.m + self.n) * self.k * self.torch_dtype.itemsize

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.n * self.k


class Operands:
    """Makes operands as views of one block of random normal data, which takes no time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.blocks: dict[torch.dtype, torch.Tensor] = {}

    def block(self, dtype: torch.dtype, elements: int) -> torch.Tensor:
        have = self.blocks.get(dtype)
        if have is None or have.numel() < elements:
            self.blocks[dtype] = torch.empty(0, dtype=dtype)  # free it first
            have = torch.empty(elements, dtype=dtype, device=self.device)
            for piece in have.split(1 << 26):
                piece.normal_()
            self.blocks[dtype] = have
        return have

    def sets(self, product: Product, most: int = 64) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of operands that together exceed the L2 cache three times."""
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size
        count = max(2, min(most, math.ceil(3 * cache / product.bytes)))
        a, b = _strides(product, "a"), _strides(product, "b")
        block = self.block(product.torch_dtype, count * (a.elements + b.elements))
        pairs, at = [], 0
        for _ in range(count):
            first = block.as_strided(a.size, a.stride, at + a.offset)
            at += a.elements
            second = block.as_strided(b.size, b.stride, at + b.offset)
            at += b.elements
            pairs.append((first, second.mT))
        return pairs


@dataclasses.dataclass(frozen=True)
class _Strides:
    """An operand as [batch, own dim, k], or [own dim, k] for a single product."""

    size: list[int]
    stride: list[int]
    offset: int  # elements
    elements: int  # that it takes, a multiple of VECTOR_BYTES


def _strides(product: Product, side: str) -> _Strides:
    own, access = (product.m, product.a) if side == "a" else (product.n, product.b)
    vector = VECTOR_BYTES // product.torch_dtype.itemsize
    line = LINE_BYTES // product.torch_dtype.itemsize
    along_k = access.startswith("k_")
    row, rows = (product.k, own) if along_k else (own, product.k)
    offset = 0
    if access in (K_LINES, OWN_LINES):
        step = (row + line - 1) // line * line
    elif access in (K_VECTORS, OWN_VECTORS):
        step = (row + vector - 1) // vector * vector
        step += vector * (step % line == 0)
    else:
        step, offset = row, int(row % vector == 0)
    one = (rows * step + line - 1) // line * line
    if access in (K_VECTORS, OWN_VECTORS, K_ELEMENTS, OWN_ELEMENTS):
        one = (rows * step + vector - 1) // vector * vector
    size, stride = [own, product.k], [step, 1] if along_k else [1, step]
    if product.batch > 1:
        size, stride = [product.batch, *size], [one, *stride]
    # Each begins as PyTorch's own tensors do: one that begins 16 bytes into a line of the cache
    # takes up to 1.4 times as long on an H200.
    lines = ALLOCATION_BYTES // product.torch_dtype.itemsize
    elements = (product.batch * one + offset + lines - 1) // lines * lines
    return _Strides(size, stride, offset, elements)
