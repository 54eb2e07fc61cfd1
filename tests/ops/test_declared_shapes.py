"""The shapes of a declared op's outputs: Python's formulas for symbols against what C++ answers."""

from __future__ import annotations

import random

import torch
from declared import DECLARED, schema

import torch_cubin
from torch_cubin import errors
from torch_cubin._declared.contract_call import _Symbolic

CALLS = 3000


def remainder(x: torch.Tensor) -> int:
    return x.numel() % 3


def an_op() -> torch_cubin.Op:
    """One with every kind of size and output."""
    select, empty = torch_cubin.select, torch_cubin.empty
    return torch_cubin.define_op(
        schema(
            "f(Tensor x, Tensor y, Tensor z, Tensor? b, Tensor[] xs, int n, int? k, float f,"
            " bool w, str mode, ScalarType t) -> (Tensor o1, Tensor o2, Tensor o3, Tensor o4)"
        ),
        kernel=(DECLARED, "add_three"),
        dtypes={"T": ["float16", "float32"]},
        tensors={
            "x": "T[m, *s] strided align=1",
            "y": "T[m, n + 1, *s] rows",
            "z": "int8[*g, min(m, n), 3] dense align=1",
            "b": "float32[q, m]",
            "xs": "float32[q]",
            "o1": "T[*s, m * n]",
            "o2": torch_cubin.like("z"),
            "o3": lambda x, xs, n, w, mode: empty(
                (select(w & (mode == "wide"), x.shape[0], 7 // n), torch_cubin.length(xs)), "T"
            ),
            "o4": lambda x, k, f, t, b: empty(
                select(k.defined, select(f > remainder(x), 5, 6), select(t == torch.float16, 1, 2)),
                "bool",
            ),
        },
        args=lambda o1, o2, o3, o4: (o1, o2, o3, o4, torch_cubin.int32(1)),
        grid=1,
        block=32,
    )


def random_call(r: random.Random) -> dict:
    dtype = r.choice((torch.float16, torch.float32))
    m, n = r.randrange(4), r.randrange(-1, 4)
    s = [r.randrange(4) for _ in range(r.randrange(3))]
    g = [r.randrange(1, 4) for _ in range(r.randrange(3))]

    def tensor(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        sizes = tuple(max(size, 0) + (r.random() < 0.02) for size in sizes)
        made = torch.empty(sizes, dtype=dtype, device="meta")
        if r.random() < 0.2 and len(sizes) > 1:
            made = torch.empty(sizes[::-1], dtype=dtype, device="meta").permute(
                *range(len(sizes) - 1, -1, -1)
            )
        return made

    return {
        "x": tensor(m, *s, dtype=dtype),
        "y": tensor(m, n + 1, *s, dtype=dtype),
        "z": tensor(*g, min(m, n), 3, dtype=torch.int8),
        "b": r.choice((None, tensor(2, m))),
        "xs": [tensor(r.randrange(3)) for _ in range(r.randrange(3))],
        "n": n,
        "k": r.choice((None, 3)),
        "f": r.choice((0.0, 1.5, float("inf"), float("nan"))),
        "w": r.random() < 0.5,
        "mode": r.choice(("wide", "narrow")),
        "t": r.choice((torch.float16, torch.int8)),
    }


def test_symbolic_outputs_are_those_of_cpp() -> None:
    op = an_op()
    right, refusals = 0, set()
    for seed in range(CALLS):
        values = random_call(random.Random(seed))
        try:
            outs = op(*values.values())
        except errors.InputError as error:
            refusals.add(str(error).split(": expected")[0])
            continue
        right += 1
        formulas = _Symbolic(op.contract, op._signature, values).outputs()
        want = [output.allocate(torch.device("meta")) for output in formulas]
        for a, b in zip(outs, want, strict=True):
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype), f"seed {seed}"
    assert right > CALLS // 10
    assert len(refusals) > 8, refusals
