"""Inputs of the GPU tests: dtypes and math modes, memory layouts, random cases.

Every tensor made here lies in a buffer whose other bytes are NaN: a kernel that reads one element
beside its operand, or multiplies a masked one by zero, gives NaN.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch

# How numbers are multiplied; "tf32" is float32 tensors with torch's TF32 setting on.
MODES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "tf32": torch.float32,
    "float64": torch.float64,
}

GUARD = 64  # elements of NaN before and after every tensor; keeps 16-byte alignment


@contextlib.contextmanager
def math_mode(mode: str) -> Iterator[torch.dtype]:
    """Sets torch's TF32 switch for `mode` and gives the dtype of the tensors."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = mode == "tf32"
    try:
        yield MODES[mode]
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def need_memory(gigabytes: float) -> None:
    """Skips the test on a GPU that is too small for it; fails where others hold the memory.

    Tests run in several processes: waits a minute for the others to give memory back.
    """
    total = torch.cuda.get_device_properties("cuda").total_memory / 1e9
    if total < gigabytes * 1.1 + 2:
        pytest.skip(f"needs {gigabytes:.0f} GB of GPU memory, found a GPU of {total:.0f}")
    deadline = time.monotonic() + 60
    torch.cuda.empty_cache()
    while (free := torch.cuda.mem_get_info()[0] / 1e9) < gigabytes * 1.1:
        if time.monotonic() > deadline:
            pytest.fail(f"needs {gigabytes:.0f} GB of GPU memory free, found {free:.0f}")
        time.sleep(0.1)


def round_to_tf32(x: torch.Tensor) -> torch.Tensor:
    """float32 rounded to TF32's 10 bits of mantissa, to nearest, ties away, as cvt.rna does."""
    bits = x.resolve_neg().contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


def peer(mode: str, own: torch.Tensor, reference: torch.Tensor, product, *factors):
    """What our result is compared with: PyTorch's, or for TF32 the worse of two.

    NOTE: cuBLAS takes plain float32 for some shapes and layouts though TF32 is allowed, and is then
    1,000 times as exact as TF32 can be. What TF32 promises is the product of the rounded factors.
    """
    if mode != "tf32" or own.numel() == 0:
        return own
    rounded = product(*(round_to_tf32(x) for x in factors)).float()
    error = [(x.double() - reference).square().sum().item() for x in (own, rounded)]
    return own if error[0] >= error[1] else rounded


def draw(shape: Sequence[int], dtype: torch.dtype, integers: bool, g: torch.Generator):
    """Normal numbers, or integers from -3 to 3, whose products sum exactly in every dtype."""
    if integers:
        return torch.randint(-3, 4, tuple(shape), generator=g, device=g.device).to(dtype)
    return torch.randn(tuple(shape), generator=g, device=g.device).to(dtype)


@dataclass(frozen=True)
class Layout:
    """How a tensor lies in memory. The default is contiguous."""

    order: tuple[int, ...] = ()  # dims from outermost to innermost; empty: unchanged
    pad: int = 0  # elements between the rows of the innermost dim
    step: int = 1  # stride of the innermost dim
    offset: int = 0  # elements by which the start is moved
    expand: tuple[int, ...] = ()  # dims of stride 0
    negate: bool = False  # stored negated, with torch's neg bit set


def place(value: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A tensor with the values of `value` in this layout, NaN all round and in the gaps.

    Values along an expanded dim are those of its first index.
    """
    if layout.negate:
        stored = place(-value, Layout(**{**vars(layout), "negate": False}))
        return torch._neg_view(stored)
    if value.dim() == 0:
        return value
    order = layout.order or tuple(range(value.dim()))
    strides = [0] * value.dim()
    stride = layout.step
    for position, dim in enumerate(reversed(order)):
        if dim in layout.expand:
            continue
        strides[dim] = stride
        stride *= max(value.shape[dim], 1)
        if position == 0:
            stride += layout.pad * layout.step
    start = GUARD + layout.offset
    extent = 1 + sum((max(n, 1) - 1) * s for n, s in zip(value.shape, strides, strict=True))
    buffer = torch.full(
        (start + extent + GUARD,), torch.nan, dtype=value.dtype, device=value.device
    )
    view = buffer.as_strided(value.shape, strides, start)
    source, target = value, view
    for dim in layout.expand:
        if value.shape[dim] > 1:
            source, target = source.narrow(dim, 0, 1), target.narrow(dim, 0, 1)
    target.copy_(source)
    return view


def matrix_layouts(dims: int) -> dict[str, Layout]:
    """Named layouts of a matrix or batch of matrices, the ones a kernel may treat differently."""
    swapped = (*range(dims - 2), dims - 1, dims - 2)
    return {
        "rows": Layout(),
        "columns": Layout(order=swapped),
        "rows_padded": Layout(pad=8),
        "columns_padded": Layout(order=swapped, pad=8),
        "rows_ragged": Layout(pad=1),
        "columns_offset": Layout(order=swapped, offset=1),
        "stepped": Layout(step=2),
        "columns_stepped": Layout(order=swapped, step=3, pad=1),
    }


SIZES = (1, 1, 2, 3, 5, 8, 16, 17, 31, 32, 33, 64, 65, 96, 100, 128, 129, 200, 255, 256, 257, 300)
DEPTHS = (*SIZES, *SIZES, 512, 513, 1000, 1024, 2049, 4096)


@dataclass(frozen=True)
class Case:
    """One random call of matmul (weight_bias None) or linear."""

    op: str
    a_shape: tuple[int, ...]
    b_shape: tuple[int, ...]
    bias: bool
    a_layout: Layout
    b_layout: Layout
    bias_layout: Layout
    integers: bool

    def has_equal_terms(self) -> bool:
        """Whether both operands repeat one value along K: all terms of a sum are the same."""
        b_dims = len(self.b_shape)
        b_k = b_dims - 1 if self.op == "linear" or b_dims == 1 else b_dims - 2
        return len(self.a_shape) - 1 in self.a_layout.expand and b_k in self.b_layout.expand


def _size(r: random.Random, sizes: Sequence[int]) -> int:
    return 0 if r.random() < 0.03 else r.choice(sizes)


def _layout(r: random.Random, dims: int) -> Layout:
    order = list(range(dims))
    kind = r.random()
    if kind < 0.3 and dims >= 2:
        order[-1], order[-2] = order[-2], order[-1]
    elif kind < 0.4 and dims == 4:
        order = [0, 2, 3, 1]  # channels last
    elif kind < 0.6:
        r.shuffle(order)
    return Layout(
        order=tuple(order),
        pad=r.choice((0, 0, 8, 16, 1, 3)),
        step=r.choice((1, 1, 1, 1, 2, 3)),
        offset=r.choice((0, 0, 0, 1, 5, 8)),
        expand=tuple(d for d in range(dims) if r.random() < 0.06),
        negate=r.random() < 0.05,
    )


def _batches(r: random.Random) -> tuple[list[int], list[int]]:
    """Batch sizes of the two operands, broadcastable, of different ranks."""
    full = [_size(r, (1, 2, 3, 4)) for _ in range(r.choice((0, 0, 1, 1, 2, 3, 4, 5)))]
    pair = []
    for _ in range(2):
        own = [1 if r.random() < 0.25 else n for n in full]
        pair.append(own[r.choice((0, 0, 0, 1, len(own))) :] if own else own)
    return pair[0], pair[1]


def random_case(r: random.Random) -> Case:
    """A case small enough that thousands run in a minute (at most about 2^31 multiplications)."""
    while True:
        m, n, k = _size(r, SIZES), _size(r, SIZES), _size(r, DEPTHS)
        a_batch, b_batch = _batches(r)
        linear = r.random() < 0.3
        if linear:
            a_shape = [*a_batch, m, k] if r.random() < 0.85 else [k]
            b_shape = [n, k]
        else:
            a_shape = [*a_batch, m, k] if r.random() < 0.9 else [k]
            b_shape = [*b_batch, k, n] if r.random() < 0.9 else [k]
        work = m * n * k * 4 ** max(len(a_batch), 0 if linear else len(b_batch))
        if work <= 2**31:
            break
    return Case(
        op="linear" if linear else "matmul",
        a_shape=tuple(a_shape),
        b_shape=tuple(b_shape),
        bias=linear and r.random() < 0.6,
        a_layout=_layout(r, len(a_shape)),
        b_layout=_layout(r, len(b_shape)),
        bias_layout=_layout(r, 1),
        integers=r.random() < 0.5,
    )


def poison(numel: int, dtype: torch.dtype, device: str = "cuda") -> None:
    """Leaves NaN in the block that the caching allocator will hand out next for this size."""
    torch.full((max(numel, 1),), torch.nan, dtype=dtype, device=device)


def all_layout_pairs(dims: int = 2) -> list[tuple[str, str]]:
    """Every pair of the four plain layouts, and the others against plain rows and themselves."""
    names = list(matrix_layouts(dims))
    plain, odd = names[:4], names[4:]
    pairs = list(itertools.product(plain[:2], plain[:2]))
    pairs += [("rows_padded", "columns_padded"), ("columns_padded", "rows_padded")]
    for name in odd:
        pairs += [(name, "rows"), ("rows", name), (name, name)]
    return pairs
