"""Heads wider than any kernel: products, and the softmax of csrc/kernels/softmax/rows.cu, by a warp
a row or, past 4,096 keys, by a block. Forward, backward and dropout, against the CPU reference."""

from __future__ import annotations

import itertools

import pytest
import torch
from gpu import attention_child
from gpu.profiled import kernels_loaded

# The lanes that split a row of scores: keys of each.
KEYS = {"8": 300, "1": 5000}  # by the kernel's last number, rows a block
OPTIONS = ({}, {"is_causal": True}, {"dropout_p": 0.3})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_wide_heads_are_composed(dtype: torch.dtype) -> None:
    wrong = []
    torch.manual_seed(0)
    for (rows, keys), given in itertools.product(KEYS.items(), OPTIONS):
        q = torch.randn(1, 2, 37, 264, dtype=dtype)
        k, v = (torch.randn(1, 2, keys, 264, dtype=dtype) for _ in range(2))
        grad = torch.randn_like(q)
        options = dict(given)
        if "dropout_p" in given:
            options["dropout_seed"] = torch.tensor([12345])
        want = attention_child._both([q, k, v], grad, options)
        on_gpu = attention_child._on_gpu(options)
        ours = attention_child._both([x.cuda() for x in (q, k, v)], grad.cuda(), on_gpu)
        names = ("out", "logsumexp", "dq", "dk", "dv")
        for name, mine, expected in zip(names, ours, want, strict=True):
            if not attention_child._near(mine, expected, dtype):
                wrong.append(f"{dtype} {keys} keys, {rows} rows a block, {given}: {name}")
    assert wrong == []
    short = {torch.float32: "f32", torch.float64: "f64"}[dtype]
    loaded = kernels_loaded()
    kinds = ("forward", "backward")
    assert {f"rows_softmax_{short}_{kind}_{n}" for kind in kinds for n in KEYS} - loaded == set()


@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_dropout_of_weights(dtype: torch.dtype, keys: int) -> None:
    """What second derivatives of attention with dropout call: the numbers of the forward."""
    torch.manual_seed(0)
    weights, seed = torch.rand(2, 3, 37, keys, dtype=dtype), torch.tensor([12345])
    drop = torch.ops.cubin._attention_dropout
    want = drop(weights, seed, 0.3)
    out = drop(weights.cuda(), seed.cuda(), 0.3)
    assert torch.equal(out.cpu() == 0, want == 0)
    torch.testing.assert_close(out.cpu(), want, rtol=1e-6, atol=0)
    assert abs(float((want == 0).double().mean()) - 0.3) < 0.01
    assert drop(weights.cuda(), seed.cuda(), 1.0).eq(0).all()
    short = {torch.float32: "f32", torch.float64: "f64"}[dtype]
    rows = {length: rows for rows, length in KEYS.items()}[keys]
    loaded = kernels_loaded()
    assert f"rows_softmax_{short}_dropout_{rows}" in loaded
