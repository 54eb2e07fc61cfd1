"""Attention's backward on Hopper gives the same bits ten thousand times, beside other work."""

from __future__ import annotations

import pytest
import torch
from gpu import attention_cases as ac
from gpu import hopper
from gpu.test_cuda_attention_repeats import CASES, check, make

pytestmark = hopper.for_kernels


@pytest.mark.parametrize(("kind", "head_dim", "name"), CASES)
def test_backward(kind: str, head_dim: int, name: str) -> None:
    args, grad, options = make(kind, head_dim, ac.DTYPES[name])
    with torch.no_grad():
        out, logsumexp = torch.ops.cubin.attention_forward(*args, **options)
    rest = (grad, *args, out, logsumexp)
    check(lambda: list(torch.ops.cubin.attention_backward(*rest, **options)))
