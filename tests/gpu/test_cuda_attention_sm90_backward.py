"""The kernels of csrc/kernels/attention/sm90/backward.cu and backward_wide.cu: tails, bands,
grouped heads, strides, and nonfinite values."""

import math

import numerics
import pytest
import torch
from gpu import attention_cases as ac
from gpu import attention_reference as ar
from gpu import cases, hopper
from gpu.profiled import kernels_loaded, kernels_that_run

import torch_cubin

pytestmark = hopper.for_kernels

# batch, heads, heads of key, rows, columns, options.
CALLS = [
    (1, 2, 2, 96, 128, {}),
    (2, 4, 4, 257, 300, {}),
    (1, 1, 1, 1, 1, {}),
    (2, 3, 1, 1, 500, {}),
    (3, 2, 1, 64, 7, {}),
    (1, 2, 2, 700, 1, {}),
    (2, 6, 3, 1000, 1000, {"is_causal": True}),
    (1, 3, 1, 1000, 77, {"is_causal": True}),
    (2, 2, 1, 77, 1000, {"is_causal": True, "bottom_right": True}),
    (1, 2, 2, 900, 500, {"is_causal": True, "bottom_right": True}),  # 400 rows fully masked
    (2, 2, 2, 1500, 1500, {"window_left": 200, "window_right": 100}),
    (1, 2, 2, 700, 700, {"window_left": 30}),
    (1, 2, 2, 700, 900, {"window_right": 0, "window_left": 0}),
    (2, 6, 3, 1500, 1200, {"window_left": 64, "is_causal": True, "bottom_right": True}),
    # Blocks that take many work items, among them keys that no row sees.
    (20, 16, 16, 300, 700, {"window_left": 100, "window_right": 20, "bottom_right": True}),
    (8, 8, 4, 1500, 1500, {"window_left": 127, "is_causal": True}),
    (20, 8, 2, 250, 333, {"is_causal": True}),
    (1, 8, 8, 2100, 2100, {"is_causal": True}),
    (1, 4, 1, 1300, 2500, {}),
    (1, 2, 1, 300, 1111, {"scale": 0.01}),
    # Several work items a tile of keys; 7 do not divide the heads of a group.
    (1, 8, 1, 512, 512, {"is_causal": True}),
    (1, 14, 2, 400, 200, {}),
    (1, 3, 3, 1500, 1500, {"is_causal": True}),
]


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("name", ac.HALVES)
def test_gradients_against_float64(name: str, head_dim: int, nan_memory) -> None:
    dtype, g = ac.DTYPES[name], ac.generator(f"{name} {head_dim}")
    for number, (batch, heads, kv_heads, rows, columns, given) in enumerate(CALLS):
        options = {"enable_gqa": True, **given}
        for width, width_v in ((head_dim, head_dim), (head_dim - 24, head_dim - 8)):
            layout = cases.Layout()
            q = ac.draw((batch, heads, rows, width), dtype, g, layout)
            k = ac.draw((batch, kv_heads, columns, width), dtype, g, layout)
            v = ac.draw((batch, kv_heads, columns, width_v), dtype, g, layout)
            grad = ac.draw((batch, heads, rows, width_v), dtype, g, layout)
            if number % 2:  # (batch, rows, heads, columns) in memory
                q, k, v, grad = (
                    x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, grad)
                )
            label = f"{name} {width}/{width_v} {CALLS[number]}"
            ar.check_call(name, label, q, k, v, grad, **options)
    assert (
        f"sm90_backward_attention_{ac.SHORT[name]}_{ac.sm90_backward_tile(head_dim)}"
        in kernels_loaded()
    )


@pytest.mark.parametrize("head_dim", [64, 96, 256])
def test_gradients_of_a_sequence_among_others(head_dim: int) -> None:
    """Under batch_invariant(): otherwise few sequences have more work items a tile of keys."""
    g = ac.generator(f"among {head_dim}")
    q, grad = (ac.draw((16, 8, 512, head_dim), torch.bfloat16, g) for _ in range(2))
    k, v = (ac.draw((16, 2, 512, head_dim), torch.bfloat16, g) for _ in range(2))
    options = {"is_causal": True, "enable_gqa": True}

    def differs() -> bool:
        (_, *all_of_them), _ = ar.both(q, k, v, grad, **options)
        (_, *alone), _ = ar.both(*(x[3:4] for x in (q, k, v, grad)), **options)
        return any(not torch.equal(a[3:4], b) for a, b in zip(all_of_them, alone, strict=True))

    with torch_cubin.batch_invariant():
        assert not differs()
    assert differs()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.child("attention_alone", name)) for name in ac.HALVES],
)
def test_wide_heads_without_pairs_of_blocks(name: str, child) -> None:
    answer = child.check()
    assert answer["wrong"] == []
    assert f"sm90_backward_attention_{ac.SHORT[name]}_added_64x64x256" in answer["loaded"]
    assert f"sm90_backward_attention_{ac.SHORT[name]}_general_64x64x256" in answer["loaded"]
    assert not any(x.endswith(("64x128x256", "48x256x128")) for x in answer["loaded"])
    assert name == "float16" or "sm90_e4m3_backward_attention_48x128x128" in answer["loaded"]


@pytest.mark.parametrize("kind", [x for x in ac.SCORE_KINDS if x != "sinks"])
@pytest.mark.parametrize("name", ac.HALVES)
def test_wide_heads_with_options(name: str, kind: str, nan_memory) -> None:
    """One warpgroup makes the weights; the other has of the scores what it hands over."""
    dtype, g = ac.DTYPES[name], ac.generator(f"{name} {kind}")
    for number, (batch, heads, kv_heads, rows, columns, given) in enumerate(CALLS):
        options = {"enable_gqa": True, **given, **ac.score_options(kind, batch, heads, g)}
        width, width_v = [(256, 256), (192, 192), (232, 136)][number % 3]
        q = ac.draw((batch, heads, rows, width), dtype, g)
        k = ac.draw((batch, kv_heads, columns, width), dtype, g)
        v = ac.draw((batch, kv_heads, columns, width_v), dtype, g)
        grad = ac.gradient(q.new_empty(batch, heads, rows, width_v), g)
        with kernels_that_run() as names:
            ours, _ = ar.both(q, k, v, grad, **options)
        rest, kept = ar.without_dropout(options, (batch, heads, rows, columns))
        want = ar.reference(q, k, v, grad, kept=kept, **rest)
        ar.check(name, f"{name} {width}/{width_v} {CALLS[number]} {kind}", ours, want)
        if kind == "no scale":
            assert not any(bool(x.any()) for x in ours[1:3])
        if rows * columns > 200_000:  # the portable kernels are quicker for few
            assert f"sm90_backward_attention_{ac.SHORT[name]}_general_64x128x256" in names


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("factor", [5, 20, -3])
def test_large_scores(head_dim: int, factor: int, nan_memory) -> None:
    """One weight is nearly all of a row, and for -3 all scores are far below zero."""
    g = ac.generator(f"{head_dim} {factor}")
    q, k, v, grad = (ac.draw((1, 2, 600, head_dim), torch.bfloat16, g) for _ in range(4))
    q, k = (q.abs() * 3, k.abs() * -3) if factor < 0 else (q * factor, k * factor)
    (_, *grads), _ = ar.both(q, k, v, grad, is_causal=True)
    want = ar.reference(q, k, v, grad, is_causal=True)
    own = ar.pytorch(q, k, v, grad, is_causal=True)[1:]
    for which, mine, theirs in zip(("dq", "dk", "dv"), grads, own, strict=True):
        expected = getattr(want, which)
        ours, yardstick = (
            float((x.double() - expected).norm() / expected.norm()) for x in (mine, theirs)
        )
        assert not numerics.exceeds(ours, 2 * yardstick + 2**-8), (which, ours, yardstick)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_nonfinite_values_reach_only_the_rows_that_see_them(head_dim: int, nan_memory) -> None:
    """A value of NaN, which causal rows see from its own on, and one gradient of inf. Rows before
    and after have their dq, and other heads keep their bits."""
    g = ac.generator(head_dim)
    q, k, v, grad = (ac.draw((1, 3, 500, head_dim), torch.bfloat16, g) for _ in range(4))
    with torch.no_grad():
        out, logsumexp = torch.ops.cubin.attention_forward(q, k, v, is_causal=True)
        call = torch.ops.cubin.attention_backward
        clean = call(grad, q, k, v, out, logsumexp, is_causal=True)
        v[0, 0, 300, 3] = math.nan
        out[0, 0, 300:, 3] = math.nan
        grad[0, 1, 100, 5] = math.inf
        dq, dk, dv = call(grad, q, k, v, out, logsumexp, is_causal=True)
    assert bool(dq[0, 0, 300:].isnan().any(-1).all())
    assert not bool(dq[0, 0, :300].isnan().any())
    assert not bool(dv[0, 0].isnan().any())
    assert bool(dk[0, 0].isnan().any(-1).all())
    assert not bool(dq[0, 1, :100].isnan().any())
    assert not bool(dq[0, 1, 101:].isnan().any())
    assert bool(dq[0, 1, 100].isnan().any())
    for mine, want in zip((dq, dk, dv), clean, strict=True):
        numerics.check_bits(mine[:, 2], want[:, 2])


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_fully_masked_rows_and_keys(head_dim: int, nan_memory) -> None:
    g = ac.generator(head_dim)
    q, grad = (ac.draw((2, 4, 700, head_dim), torch.bfloat16, g) for _ in range(2))
    k, v = (ac.draw((2, 4, 400, head_dim), torch.bfloat16, g) for _ in range(2))
    (out, dq, dk, dv), _ = ar.both(q, k, v, grad, is_causal=True, bottom_right=True)
    assert bool((out[:, :, :300] == 0).all())
    assert bool((dq[:, :, :300] == 0).all())
    assert bool((dq[:, :, 301:] != 0).any(-1).all())
    # Row i sees keys i to i + 9 of 400: none of 100 rows sees those from 109 on.
    short = [x[:, :, :100].contiguous() for x in (q, grad)]
    (_, dq, dk, dv), _ = ar.both(short[0], k, v, short[1], window_left=0, window_right=9)
    assert bool((dk[:, :, 109:] == 0).all())
    assert bool((dv[:, :, 109:] == 0).all())
    assert bool((dv[:, :, :109] != 0).any(-1).all())


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_masks_that_leave_sums_of_dq_empty(head_dim: int, nan_memory) -> None:
    """Tiles of keys of few heads are in sets, each with a sum of dq. A set whose keys a mask hides
    from all queries, or from a tile of them, has never written its sum."""
    g = ac.generator(head_dim)
    q, grad = (ac.draw((1, 2, 500, head_dim), torch.bfloat16, g) for _ in range(2))
    k, v = (ac.draw((1, 1, 1100, head_dim), torch.bfloat16, g) for _ in range(2))
    half = torch.arange(1100, device=q.device) >= 600
    of_rows = (torch.arange(500, device=q.device) < 250)[:, None] == half
    for mask in (half.expand(500, 1100), ~half.expand(500, 1100), of_rows):
        label = f"{head_dim} {int(mask.sum())}"
        ar.check_call("bfloat16", label, q, k, v, grad, mask, enable_gqa=True)


def test_calls_for_the_portable_kernels() -> None:
    g = ac.generator("portable")
    q, k, v, grad = (ac.draw((1, 2, 200, 256), torch.bfloat16, g) for _ in range(4))
    with kernels_that_run() as names:
        ar.check_call("bfloat16", "a large softcap", q, k, v, grad, softcap=200.0)
    assert any(name.startswith("backward_attention_bf16") for name in names)
    assert not any(name.startswith("sm90_backward") for name in names)
