"""Masks that are added to the logits, in the kernels for Hopper: numbers, zeros and -inf by tile,
any stride and address, every option beside them, padding as models write it."""

import functools
import itertools
import math

import pytest
import torch
from gpu import attention_cases as ac
from gpu import attention_reference as ar
from gpu import hopper
from gpu.profiled import kernels_that_run

import torch_cubin

pytestmark = hopper.for_kernels

KINDS = ("numbers", "some hidden", "causal", "documents", "tiles", "padding", "large", "hidden")
# Rows, keys, dims of the mask that are 1, the step of its last dim and where it begins.
CALLS = [
    (900, 1000, (), 1, 0),
    (640, 1024, (), 1, 0),
    (900, 777, (1,), 1, 0),
    (900, 1001, (), 1, 7),  # no address of a row is a multiple of 16
    (1100, 1024, (0,), 1, 1),
    (700, 1300, (0, 1), 2, 0),
    (520, 2177, (2,), 1, 0),
    (1100, 3000, (0, 1), 1, 2),
    (800, 1200, (3,), 1, 0),
]


def draw_mask(kind: str, shape: tuple[int, ...], dtype: torch.dtype, g) -> torch.Tensor:
    """Numbers, zeros, and -inf, of a mask of four dims."""
    batch, heads, rows, keys = shape
    numbers = torch.randn(shape, generator=g, device=ac.DEVICE)
    chance = torch.rand(shape, generator=g, device=ac.DEVICE)
    i, j = torch.arange(rows, device=ac.DEVICE)[:, None], torch.arange(keys, device=ac.DEVICE)
    if kind == "some hidden":
        numbers[chance < 0.3] = -math.inf
    elif kind == "causal":
        numbers = torch.where(i >= j, 0.0, -math.inf).expand(shape)
    elif kind == "documents":
        numbers = torch.where(i // 330 == j // 330, numbers, -math.inf)
    elif kind == "tiles":  # visible, hidden and other ones, of about the kernels' sizes
        tiles = (batch, heads, -(-rows // 64), -(-keys // 80))
        chance = torch.rand(tiles, generator=g, device=ac.DEVICE)
        chance = chance.repeat_interleave(64, 2).repeat_interleave(80, 3)[:, :, :rows, :keys]
        numbers = torch.where(chance < 0.7, torch.where(chance < 0.4, -math.inf, 0.0), numbers)
        numbers[:, :, 100:170] = -math.inf
    elif kind == "padding":
        numbers = torch.where(j < keys - 260, 0.0, -math.inf).expand(shape)
    elif kind == "large":
        numbers = numbers * 1000
    elif kind == "hidden":
        numbers = torch.full(shape, -math.inf, device=ac.DEVICE)
    return numbers.to(dtype).clone()


def kernels_expected(head_dim: int, name: str) -> set[str]:
    tile = {64: "128x128x64", 128: "128x128x128", 256: "128x80x256"}[head_dim]
    return {
        "sm90_added_mask_attention",
        f"sm90_attention_{ac.SHORT[name]}_added_{tile}",
        "sm90_backward_added_mask_attention",
        f"sm90_backward_attention_{ac.SHORT[name]}_added_{ac.sm90_backward_tile(head_dim)}",
    }


# float16 takes the same paths through the same sources.
NAMED_KINDS = [
    *itertools.product(["bfloat16"], KINDS),
    ("float16", "numbers"),
    ("float16", "tiles"),
]


@pytest.mark.parametrize("floats", [False, True], ids=["own", "float32"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("name", "kind"), NAMED_KINDS)
def test_masks_of_numbers(name: str, kind: str, head_dim: int, floats: bool, nan_memory) -> None:
    dtype, g = ac.DTYPES[name], ac.generator(f"{name} {head_dim} {kind} {floats}")
    for number, (rows, keys, broadcast, step, begin) in enumerate(CALLS):
        if kind in ("causal", "tiles") and not {2, 3}.isdisjoint(broadcast):
            continue
        q, grad = (ac.draw((2, 4, rows, head_dim), dtype, g) for _ in range(2))
        k, v = (ac.draw((2, 2, keys, head_dim), dtype, g) for _ in range(2))
        sizes = [2, 4, rows, keys * step + begin]
        for dim in broadcast:
            sizes[dim] = 1
        mask = draw_mask(kind, tuple(sizes), torch.float32 if floats else dtype, g)
        if sizes[3] > 1:
            mask = mask[..., begin::step]
        band = {"window_left": 300, "window_right": 200} if number % 2 else {}
        if number == 0:
            with kernels_that_run() as kernels:
                ar.both(q, k, v, grad, mask, enable_gqa=True, **band)
            assert kernels >= kernels_expected(head_dim, name)
        label = f"{name} {head_dim} {kind} {floats} {CALLS[number]}"
        ar.check_call(name, label, q, k, v, grad, mask, enable_gqa=True, **band)


@pytest.mark.parametrize("option", ac.SCORE_KINDS)
@pytest.mark.parametrize("floats", [False, True], ids=["own", "float32"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", ac.HALVES)
def test_options_beside_masks_of_numbers(
    name: str, head_dim: int, floats: bool, option: str, nan_memory
) -> None:
    dtype, g = ac.DTYPES[name], ac.generator(f"{name} {head_dim} {floats} {option}")
    q, grad = (ac.draw((2, 4, 1100, head_dim), dtype, g) for _ in range(2))
    k, v = (ac.draw((2, 2, 1100, head_dim), dtype, g) for _ in range(2))
    options = {"enable_gqa": True, **ac.score_options(option, 2, 4, g)}
    rest, kept = ar.without_dropout(options, (2, 4, 1100, 1100))
    mask = draw_mask("tiles", (2, 4, 1100, 1100), torch.float32 if floats else dtype, g)
    with kernels_that_run() as kernels:
        ours, logsumexp = ar.both(q, k, v, grad, mask, **options)
    want = ar.reference(q, k, v, grad, mask, kept, **rest)
    label = f"{name} {head_dim} {floats} {option}"
    ar.check(name, label, ours, want, logsumexp)
    if option == "sinks":  # which these kernels take, too
        assert kernels >= kernels_expected(head_dim, name)
        return
    tile = {64: "128x128x64", 128: "128x128x128", 256: "128x64x256"}[head_dim]
    assert f"sm90_attention_{ac.SHORT[name]}_general_added_{tile}" in kernels
    tile = ac.sm90_backward_tile(head_dim)
    assert f"sm90_backward_attention_{ac.SHORT[name]}_general_{tile}" in kernels


# Those that a mask of float16 holds, and the others.
PADDING = [
    *itertools.product(ac.HALVES, [False, True], [-1e4, "least"]),
    *itertools.product(["float16"], [True], [-1e9, -1e10, -1e20, -1e30]),
    *itertools.product(["bfloat16"], [False, True], [-1e9, -1e10, -1e20, -1e30]),
]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("name", "floats", "value"), PADDING)
def test_padding_by_large_numbers(
    name: str, floats: bool, value: float | str, head_dim: int, nan_memory
) -> None:
    """Models hide keys so: whole blocks of keys, too, before those that a row sees. And rows of
    nothing else: they are finite, and without a gradient they disturb no other's."""
    dtype, g = ac.DTYPES[name], ac.generator(f"least {name} {head_dim} {floats} {value}")
    mask_dtype = torch.float32 if floats else dtype
    hidden = torch.finfo(mask_dtype).min if value == "least" else float(value)
    for rows, keys in ((900, 1000), (640, 777)):
        q, grad = (ac.draw((2, 4, rows, head_dim), dtype, g) for _ in range(2))
        k, v = (ac.draw((2, 2, keys, head_dim), dtype, g) for _ in range(2))
        mask = draw_mask("numbers", (2, 1, rows, keys), mask_dtype, g)
        mask[torch.rand(mask.shape, generator=g, device=ac.DEVICE) < 0.3] = hidden
        mask[..., 250:420] = mask[..., -200:] = hidden
        mask[:, :, 33] = hidden
        with_gradient, _ = ar.both(q, k, v, grad, mask, enable_gqa=True)
        assert all(bool(x.isfinite().all()) for x in with_gradient)
        grad[:, :, 33] = 0
        seen = torch.arange(rows, device=ac.DEVICE) != 33
        (out, dq, dk, dv), _ = ar.both(q, k, v, grad, mask, enable_gqa=True)
        assert all(bool(x.isfinite().all()) for x in (out, dq, dk, dv))
        parts = (q[:, :, seen], k, v, grad[:, :, seen], mask[:, :, seen])
        want = ar.reference(*parts, enable_gqa=True)
        label = f"{name} {head_dim} {floats} {value} {rows} {keys}"
        ar.check(name, label, [out[:, :, seen], dq[:, :, seen], dk, dv], want)


@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
@pytest.mark.parametrize("keys", [256, 777])
def test_a_single_sequence_has_the_bits_that_it_has_in_a_batch(head_dim: int, keys: int) -> None:
    """Also where the numbers behind its last key are the next sequence's."""
    g = ac.generator(f"alone {head_dim} {keys}")
    q = ac.draw((6, 8, 1024, head_dim), torch.bfloat16, g)
    k, v = (ac.draw((6, 8, keys, head_dim), torch.bfloat16, g) for _ in range(2))
    mask = draw_mask("causal", (6, 1, 1024, keys), torch.bfloat16, g)
    mask[0] = 0
    call = torch.ops.cubin.attention_forward
    with torch_cubin.batch_invariant():
        together = call(q, k, v, mask)
        for b in range(6):
            own = slice(b, b + 1)
            alone = call(q[own], k[own], v[own], mask[own])
            for mine, want in zip(alone, together, strict=True):
                assert torch.equal(mine, want[own]), b


@pytest.mark.parametrize("kind", ["", "softcap", "dropout"])
@pytest.mark.parametrize("floats", [False, True], ids=["own", "float32"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_nonfinite_values_reach_only_the_rows_that_see_them(
    head_dim: int, floats: bool, kind: str, nan_memory
) -> None:
    """NaN and +inf of the mask in their rows; NaN in a value that the mask hides by -inf in no
    gradient."""
    g = ac.generator(f"finite {head_dim} {floats}")
    dtype = torch.float32 if floats else torch.bfloat16
    q, k, v, grad = (ac.draw((1, 2, 700, head_dim), torch.bfloat16, g) for _ in range(4))
    mask = draw_mask("numbers", (1, 2, 700, 700), dtype, g)
    mask[0, 0, 17, 300], mask[0, 0, 400, 5] = math.nan, math.inf
    mask[0, 1, :, 300] = -math.inf
    options = ac.score_options(kind, 1, 2, g) if kind else {}
    (out, dq, _, _), logsumexp = ar.both(q, k, v, grad, mask, **options)
    want = torch.zeros(1, 2, 700, dtype=torch.bool, device=ac.DEVICE)
    want[0, 0, [17, 400]] = True
    assert torch.equal(out.isnan().any(-1), want)
    assert torch.equal(~logsumexp.isfinite(), want)
    assert torch.equal(dq.isnan().any(-1), want)
    clean_q, clean_k = q[:, 1:], k[:, 1:].clone()
    rest = (clean_q, clean_k, v[:, 1:].clone(), grad[:, 1:].clone(), mask[:, 1:])
    before, _ = ar.both(*rest, **options)
    with torch.no_grad():
        args = [clean_q, clean_k, rest[2]]
        out, lse = torch.ops.cubin.attention_forward(*args, mask[:, 1:], **options)
        backward = functools.partial(torch.ops.cubin.attention_backward, rest[3], **options)
        args[2][0, 0, 300] = math.nan  # seen by no row
        after = backward(*args, out, lse, mask[:, 1:])
        for mine, other in zip(after, before[1:], strict=True):
            assert torch.equal(mine, other)
        args[1][0, 0, 300] = math.nan
        dq, dk, dv = backward(*args, out, lse, mask[:, 1:])
    assert not dk.isnan().any()
    assert not dv.isnan().any()


def test_large_planes() -> None:
    """Offsets beyond 2^31 bytes in the mask, and in the buffers made from it."""
    g = ac.generator("planes")
    rows, heads = 8192, 17
    q, grad = (ac.draw((1, heads, rows, 64), torch.bfloat16, g) for _ in range(2))
    k, v = (ac.draw((1, heads, rows, 64), torch.bfloat16, g) for _ in range(2))
    mask = torch.empty(1, heads, rows, rows, dtype=torch.bfloat16, device=ac.DEVICE)
    for head in range(heads):
        mask[0, head].normal_(generator=g)
    ours, _ = ar.both(q, k, v, grad, mask)
    part = [x[:, -1:] for x in (q, k, v, grad, mask)]
    alone, _ = ar.both(*part)
    for mine, want in zip(ours, alone, strict=True):
        difference = (mine[:, -1:].double() - want.double()).norm() / want.double().norm()
        assert float(difference) < 1e-2


@pytest.mark.parametrize(("head_dim", "floats"), itertools.product([64, 128, 256], [False, True]))
def test_the_same_bits_eager_and_in_a_graph(head_dim: int, floats: bool) -> None:
    g = ac.generator(f"graph {head_dim}")
    q, k, v, grad = (ac.draw((2, 3, 700, head_dim), torch.bfloat16, g) for _ in range(4))
    mask = draw_mask("tiles", (2, 1, 700, 700), torch.float32 if floats else torch.bfloat16, g)
    first, _ = ar.both(q, k, v, grad, mask)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        out, lse = torch.ops.cubin.attention_forward(q, k, v, mask)
        results = [out, *torch.ops.cubin.attention_backward(grad, q, k, v, out, lse, mask)]
    for _ in range(2):
        graph.replay()
        for mine, want in zip(results, first, strict=True):
            assert torch.equal(mine, want)
    mask.copy_(draw_mask("documents", (2, 1, 700, 700), mask.dtype, g))
    graph.replay()
    for mine, want in zip(results, ar.both(q, k, v, grad, mask)[0], strict=True):
        assert torch.equal(mine, want)
