"""Random calls of declared ops: the exact result, or an error where the contract is not met.

Shapes, strides, offsets, expanded and negated inputs are drawn as in cases.py. The kernels add and
multiply small integers, so that every result is exact. A failure prints the seed and the case:

    TORCH_CUBIN_TEST_SEED=SEED pytest tests/gpu/test_cuda_define_op_differential.py
"""

from __future__ import annotations

import random

import pytest
import torch
from declared import affine, axpy, repeat, vec_add
from gpu import attention_cases as ac
from gpu import cases
from gpu.seeds import seeds
from torch import Tensor

import torch_cubin
from torch_cubin import errors

CASES = 300
SEEDS = seeds(1)
DTYPES = (torch.float32,) * 9 + (torch.float16, torch.int32)


@pytest.fixture(scope="module")
def ops() -> dict[str, torch_cubin.Op]:
    return {"vec_add": vec_add(), "affine": affine(), "axpy": axpy(), "repeat": repeat()}


def _shape(r: random.Random, dims: int) -> tuple[int, ...]:
    sizes = (0, 1, 2, 3, 4, 5, 8, 16, 31, 64, 100)
    return tuple(r.choice(sizes[1:]) if r.random() < 0.97 else 0 for _ in range(dims))


def _draw(r: random.Random, shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    """Mostly a tensor as the contract wants it."""
    dtype = r.choice(DTYPES)
    value = torch.randint(-8, 9, shape, generator=g, device=ac.DEVICE).to(dtype)
    if dtype == torch.int32 or r.random() < 0.5:
        return value
    layout = cases.Layout(
        order=tuple(r.sample(range(len(shape)), len(shape))) if r.random() < 0.3 else (),
        pad=r.choice((0, 0, 0, 4, 1)),
        step=r.choice((1, 1, 1, 1, 2)),
        offset=r.choice((0, 0, 4, 8, 1)),
        expand=tuple(d for d in range(len(shape)) if r.random() < 0.05),
        negate=r.random() < 0.05,
    )
    return cases.place(value, layout)


def _meets(tensor: Tensor, shape: torch.Size) -> bool:
    """The contracts of these ops: float32, contiguous, at a multiple of 16 bytes."""
    aligned = tensor.numel() == 0 or tensor.resolve_neg().data_ptr() % 16 == 0
    right = tensor.dtype == torch.float32 and tensor.shape == shape
    return right and tensor.resolve_neg().is_contiguous() and aligned


@pytest.mark.parametrize("seed", SEEDS)
def test_random_calls_are_exact_or_refused(ops, seed: int, nan_memory) -> None:
    r = random.Random(f"declared {seed}")
    g = ac.generator(seed)
    refused = 0
    for index in range(CASES):
        name = r.choice(list(ops))
        shape = _shape(r, r.randrange(5) if name in ("vec_add", "axpy") else 2)
        inputs = [_draw(r, shape, g)]
        if name in ("vec_add", "axpy"):
            inputs.append(_draw(r, shape if r.random() < 0.95 else _shape(r, 2), g))
        elif name == "affine":
            inputs.append(_draw(r, shape, g) if r.random() < 0.5 else None)
        factor, offset = r.randrange(-3, 4), r.choice((None, 2, -5))
        relu = r.random() < 0.5
        given = [x for x in inputs if x is not None]
        label = f"seed {seed}, case {index}: {name} " + ", ".join(
            f"{tuple(x.shape)} {x.stride()} {x.dtype} at {x.storage_offset()}" for x in given
        )
        accepted = all(_meets(x, given[0].shape) for x in given)
        if name == "axpy":  # what a kernel writes must be plain tensors
            accepted = accepted and not any(x.is_neg() for x in given)
        before = [x.clone() for x in given]
        rest = {"axpy": (float(factor),), "affine": (float(factor), offset)}.get(name, ())
        named = {"relu": relu} if name == "affine" else {}
        try:
            out = ops[name](*inputs, *rest, **named)
            out = inputs[1] if name == "axpy" else out
        except errors.InputError as error:
            if accepted:
                raise AssertionError(f"{label}: {error}") from error
            for x, old in zip(given, before, strict=True):
                assert torch.equal(x, old), f"{label}: a refused call wrote"
            refused += 1
            continue
        assert accepted, f"{label}: was not refused"
        x = before[0]
        if name == "vec_add":
            want = x + before[1]
        elif name == "axpy":
            want = before[1] + factor * x
        elif name == "repeat":
            want = x.repeat(1, 2)
        else:
            want = x * factor + (offset or 0) + (before[1] if len(before) > 1 else 0)
            want = want.relu() if relu else want
        assert torch.equal(out, want), label
    assert CASES // 10 < refused < CASES * 9 // 10
