"""The kernels of csrc/kernels/attention/sm90/forward.cu: nonfinite values, and scores that jump.
Every one of them, tile by tile, is in test_cuda_attention_tiles.py."""

import math

import numerics
import pytest
import torch
from gpu import attention_cases as ac
from gpu import attention_reference as ar
from gpu import hopper

import torch_cubin

pytestmark = hopper.for_kernels


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", ac.HALVES)
def test_nonfinite_values_stay_in_their_rows(name: str, head_dim: int, nan_memory) -> None:
    """NaN in a query, and in a key that causal rows see from its own on; in the first block of a
    tile and in later ones, whose scores are then computed twice."""
    g = ac.generator(f"{name} {head_dim}")
    shape = (1, 4, 700, head_dim)
    q, k, v = (ac.draw(shape, ac.DTYPES[name], g) for _ in range(3))
    q[0, 0, 17, 3] = math.nan
    q[0, 0, 400, 3] = math.nan
    k[0, 1, 300, 5] = math.nan
    k[0, 2, 690, 5] = math.inf
    out, logsumexp = torch.ops.cubin.attention_forward(q, k, v, is_causal=True)
    want = torch.zeros(1, 4, 700, dtype=torch.bool, device=ac.DEVICE)
    want[0, 0, [17, 400]] = True
    want[0, 1, 300:] = True
    want[0, 2, 690:] = q[0, 2, 690:, 5] > 0  # a score of +inf; one of -inf is no weight
    assert torch.equal(out.isnan().any(-1), want)
    assert torch.equal(~logsumexp.isfinite(), want)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_row_maxima_that_jump(head_dim: int, nan_memory) -> None:
    """Rows whose maximum grows from one block of keys to the next by next to nothing, by what a
    shift of the reference takes up, and by more than an exponential can hold."""
    g = ac.generator(f"jump {head_dim}")
    q, k, v = (ac.draw((1, 1, 256, head_dim), torch.bfloat16, g) for _ in range(3))
    v = torch.cat([v, v, v], 2)
    for jump in (1, 8, 11, 13, 60, 87, 88, 100, 1000, 30000):
        # Keys run from the last block to the first: the first ones come late.
        steps = torch.cat([k * 0 + jump, k * 0 + jump / 2, k * 0], 2)
        keys = torch.cat([k, k, k], 2)
        keys[..., 0] = steps[..., 0]
        q[..., 0] = math.sqrt(head_dim)
        out, logsumexp = torch.ops.cubin.attention_forward(q, keys, v)
        scores = q.double() @ keys.double().mT / math.sqrt(head_dim)
        want = torch.softmax(scores, -1) @ v.double()
        error = ((out.double() - want).norm() / want.norm()).item()
        # The scores themselves are sums in float32.
        assert error < 5e-3 + jump * 2**-22, (jump, error)
        assert torch.allclose(logsumexp.double(), torch.logsumexp(scores, -1), rtol=2e-5), jump


@pytest.mark.parametrize("options", ["all", "causal", "mask", "numbers", "softcap", "ALiBi"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_warps_that_need_maxima_at_other_blocks(head_dim: int, options: str, nan_memory) -> None:
    """The four warps of a warpgroup, of 16 rows each, run the same products, while each has sums
    that are too large after another block of keys. A row's bits are those it has beside zeros."""
    g = ac.generator(f"warps {head_dim} {options}")
    rows, keys = 384, 1536
    q, k, v = (ac.draw((1, 2, n, head_dim), torch.bfloat16, g) for n in (rows, keys, keys))
    late = 1 - torch.arange(keys, device=ac.DEVICE) / keys  # the first keys come last
    warp = torch.arange(rows, device=ac.DEVICE) // 16 % 4
    q[..., 0] = warp * math.sqrt(head_dim)
    # Both sorts of steps: the sums of one warp are divided, a maximum is found for the next one.
    k[..., 0] = late.square() * 40 + (late > 0.6) * 60 * (late > 0.8)
    given: dict = {
        "all": {},
        "causal": {"is_causal": True, "bottom_right": True},
        "mask": {"attn_mask": torch.rand(rows, keys, device=ac.DEVICE) > 0.1},
        "numbers": {"attn_mask": torch.randn(rows, keys, device=ac.DEVICE).bfloat16()},
        "softcap": {"softcap": 100.0},
        "ALiBi": {"alibi_slopes": torch.tensor([0.01, -0.02], device=ac.DEVICE)},
    }[options]
    with torch_cubin.batch_invariant():
        out, logsumexp = torch.ops.cubin.attention_forward(q, k, v, **given)
        want = ar.reference(q, k, v, **given)
        ar.check("bfloat16", f"{head_dim} {options}", [out], want, logsumexp)
        for own in range(4):
            alone = torch.where((warp == own)[:, None], q, 0)
            found = torch.ops.cubin.attention_forward(alone, k, v, **given)
            numerics.check_bits(found[0][:, :, warp == own], out[:, :, warp == own])
            numerics.check_bits(found[1][:, :, warp == own], logsumexp[:, :, warp == own])
