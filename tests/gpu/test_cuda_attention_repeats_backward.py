"""Attention's backward on Hopper gives the same bits ten thousand times, beside other work."""

from __future__ import annotations

import pytest
import torch
from gpu import attention_cases as ac
from gpu.test_cuda_attention_repeats import CASES, check, make

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9,
    reason="sm90 kernels run on Hopper alone",
)


@pytest.mark.parametrize(("kind", "head_dim", "name"), CASES)
def test_backward(kind: str, head_dim: int, name: str) -> None:
    args, grad, options = make(kind, head_dim, ac.DTYPES[name])
    with torch.no_grad():
        out, logsumexp = torch.ops.cubin.attention_forward(*args, **options)
    rest = (grad, *args, out, logsumexp)
    check(lambda: list(torch.ops.cubin.attention_backward(*rest, **options)))
