"""Random calls of attention with every option, forward and backward, against float64.

Batches and packed sequences; windows, causal from either corner, softcap, ALiBi, sinks, masks,
dropout of a given seed, scales, shared heads, layouts. A failure prints the seed and the case:

    TORCH_CUBIN_TEST_SEED=SEED pytest tests/gpu/test_cuda_attention_options.py -k DTYPE
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest
import torch
from gpu import attention_cases as ac
from gpu import attention_reference as ar
from gpu import cases
from gpu.seeds import seeds
from torch import Tensor

CASES = 60  # a seed and dtype, each forward and backward
SEEDS = seeds(2)
HEAD_DIMS = (8, 32, 40, 64, 64, 80, 96, 128, 128, 192, 256)


@dataclass(frozen=True)
class Case:
    """One random call: lengths of each sequence, which a batch has in common."""

    packed: bool
    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    heads: int
    heads_k: int
    head_dim: int
    head_dim_v: int
    rows_outside: bool  # (batch, rows, heads, head_dim) in memory
    mask: str = ""
    broadcast: tuple[int, ...] = ()  # dims of the mask that are 1
    slopes: int = 0  # dims of alibi_slopes
    sinks: bool = False
    dropout_p: float = 0.0
    given_lengths: bool = True  # max_seqlen_q and max_seqlen_k
    options: dict = field(default_factory=dict)


def _options(r: random.Random, head_dim: int) -> dict:
    options: dict = {}
    if r.random() < 0.5:
        options["bottom_right"] = True
    if r.random() < 0.4:
        options["is_causal"] = True
    elif r.random() < 0.4:
        options["window_right"] = r.choice((0, 3, 40, 200))
    if r.random() < 0.35:
        options["window_left"] = r.choice((0, 1, 16, 63, 64, 200))
    if r.random() < 0.3:
        options["softcap"] = r.choice((1.5, 5.0, 30.0))
    if r.random() < 0.3:
        options["scale"] = r.choice((0.0, -0.5, 1.0, 2.0)) / math.sqrt(head_dim)
    return options


def random_case(r: random.Random) -> Case:
    packed = r.random() < 0.4
    count = r.choice((1, 2, 3, 5)) if packed else r.choice((1, 2, 3))
    lengths = [[ac.random_length(r) for _ in range(count)] for _ in range(2)]
    if not packed:
        lengths = [[x[0]] * count for x in lengths]
    heads_k, group = r.choice((1, 2, 3)), r.choice((1, 1, 2, 4, 8))
    head_dim = r.choice(HEAD_DIMS)
    options = _options(r, head_dim)
    may_mask = not packed and not options.get("is_causal")
    return Case(
        packed=packed,
        lengths_q=tuple(lengths[0]),
        lengths_k=tuple(lengths[1]),
        heads=heads_k * group,
        heads_k=heads_k,
        head_dim=head_dim,
        head_dim_v=head_dim if r.random() < 0.8 else r.choice(HEAD_DIMS),
        rows_outside=r.random() < 0.5,
        mask=r.choice(("", "", "bool", "tiles", "own", "float32")) if may_mask else "",
        broadcast=tuple(n for n in range(4) if r.random() < 0.2),
        slopes=r.choice((0, 0, 1, 2)),
        sinks=r.random() < 0.25,
        dropout_p=r.choice((0.0, 0.0, 0.0, 0.1, 0.5)),
        given_lengths=r.random() < 0.7,
        options=options,
    )


def _mask(case: Case, dtype: torch.dtype, g: torch.Generator) -> Tensor | None:
    if not case.mask:
        return None
    shape = (len(case.lengths_q), case.heads, case.lengths_q[0], case.lengths_k[0])
    shape = tuple(1 if n in case.broadcast else size for n, size in enumerate(shape))
    if case.mask == "bool":
        return torch.rand(shape, generator=g, device=ac.DEVICE) > 0.3
    if case.mask == "tiles":  # visible and hidden ones, of about the kernels' sizes
        tiles = (*shape[:2], -(-shape[2] // 64), -(-shape[3] // 48))
        mask = torch.rand(tiles, generator=g, device=ac.DEVICE) > 0.5
        mask = mask.repeat_interleave(64, 2).repeat_interleave(48, 3)
        return mask[:, :, : shape[2], : shape[3]]
    value = torch.randn(shape, generator=g, device=ac.DEVICE).to(dtype)
    hidden = torch.rand(shape, generator=g, device=ac.DEVICE) < 0.2
    value = value.masked_fill(hidden, -math.inf)
    return value.float() if case.mask == "float32" else value


def _kept(case: Case, seed: int) -> list[Tensor] | Tensor | None:
    if not case.dropout_p:
        return None
    count = len(case.lengths_q)
    if not case.packed:
        shape = (count, case.heads, case.lengths_q[0], case.lengths_k[0])
        return ar.dropout_kept(seed, *shape, case.dropout_p)
    return [
        ar.dropout_kept(seed, count, case.heads, rows, columns, case.dropout_p)[index]
        for index, (rows, columns) in enumerate(zip(case.lengths_q, case.lengths_k, strict=True))
    ]


def run(case: Case, name: str, g: torch.Generator, seed: int) -> None:
    dtype = ac.DTYPES[name]
    count = len(case.lengths_q)
    starts = [[0, *torch.tensor(x).cumsum(0).tolist()] for x in (case.lengths_q, case.lengths_k)]
    widths = [(case.heads, case.head_dim), (case.heads_k, case.head_dim)]
    widths.append((case.heads_k, case.head_dim_v))
    operands = []
    for (heads, width), at, one in zip(
        widths,
        (starts[0], starts[1], starts[1]),
        (case.lengths_q[0], case.lengths_k[0], case.lengths_k[0]),
        strict=True,
    ):
        if case.packed:  # three rows belong to no sequence
            operands.append(ac.draw((at[-1] + 3, heads, width), dtype, g))
        else:
            layout = cases.Layout(order=(0, 2, 1, 3)) if case.rows_outside else None
            operands.append(ac.draw((count, heads, one, width), dtype, g, layout))
    q, k, v = operands
    grad = ac.gradient(q.new_empty(*q.shape[:-1], case.head_dim_v), g)
    options = dict(case.options)
    if case.slopes:
        shape = (case.heads,) if case.slopes == 1 else (count, case.heads)
        # Small ones: a float32 score of some hundreds is itself off by 1e-5.
        options["alibi_slopes"] = torch.rand(shape, generator=g, device=ac.DEVICE) / 10
    if case.sinks:
        options["sinks"] = torch.randn(case.heads, generator=g, device=ac.DEVICE)
    mask, kept = _mask(case, dtype, g), _kept(case, seed)
    named: dict = {"enable_gqa": True}
    if case.dropout_p:
        named["dropout_p"] = case.dropout_p
        named["dropout_seed"] = torch.tensor([seed], device=ac.DEVICE)
    if case.packed:
        for x, at, lengths in (
            ("q", starts[0], case.lengths_q), ("k", starts[1], case.lengths_k),
        ):  # fmt: skip
            named[f"cu_seqlens_{x}"] = torch.tensor(at, dtype=torch.int32, device=ac.DEVICE)
            if case.given_lengths:
                named[f"max_seqlen_{x}"] = max(max(lengths), 1)
        want = ar.packed_reference(q, k, v, grad, *starts, options, kept)
    else:
        want = ar.reference(q, k, v, grad, mask, kept, enable_gqa=True, **options)
    ours, logsumexp = ar.both(q, k, v, grad, mask, **options, **named)
    ar.check(name, "", ours, want, logsumexp)
    if case.sinks:  # that learn
        own = options["sinks"].clone().requires_grad_()
        given = {**options, **named, "sinks": own}
        out, _ = torch.ops.cubin.attention_forward(q, k, v, mask, **given)
        assert torch.equal(out, ours[0])
        (mine,) = torch.autograd.grad(out, own, grad)
        ar.check_sinks(name, own.detach(), mine, want, grad)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ac.FUSED)
def test_random_options(name: str, seed: int, nan_memory) -> None:
    r = random.Random(f"options {name} {seed}")
    g = ac.generator(seed)
    for index in range(CASES):
        case = random_case(r)
        try:
            run(case, name, g, r.getrandbits(62))
        except Exception as error:
            label = f"seed {seed}, {name}, case {index}: {case}"
            raise AssertionError(f"{label}: {error}") from error


def test_random_options_cover_each() -> None:
    """The generator draws what it claims to."""
    r = random.Random(0)
    drawn = [random_case(r) for _ in range(CASES * len(ac.FUSED) * 2)]
    assert sum(case.packed for case in drawn) > 100
    assert sum(0 in case.lengths_q + case.lengths_k for case in drawn) > 5
    for option in ("bottom_right", "is_causal", "window_left", "window_right", "softcap", "scale"):
        assert sum(option in case.options for case in drawn) > 30, option
    for chosen in ("mask", "slopes", "sinks", "dropout_p"):
        assert sum(bool(getattr(case, chosen)) for case in drawn) > 30, chosen
    assert sum(case.heads > case.heads_k for case in drawn) > 100
    assert sum(case.head_dim != case.head_dim_v for case in drawn) > 30
