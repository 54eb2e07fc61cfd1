"""The kernels of csrc/kernels/attention/sm90/forward.cu: nonfinite values, and scores that jump.
Every one of them, tile by tile, is in test_cuda_attention_tiles.py."""

import math

import pytest
import torch
from gpu import attention_cases as ac
from gpu import hopper

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
