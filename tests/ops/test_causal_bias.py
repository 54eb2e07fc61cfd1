"""torch.nn.attention.bias.CausalBias, whose memory holds nothing, as an argument of our ops."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from declared import vec_add
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import torch_cubin

VARIANTS = [causal_upper_left, causal_lower_right]


def operands(device, rows=4, columns=6):
    torch.manual_seed(0)
    return [torch.randn(2, 2, n, 8, device=device) for n in (rows, columns, columns)]


def attention(q, k, v, bias):
    return torch.ops.cubin.scaled_dot_product_attention(q, k, v, bias)


def default(q, k, v, bias):
    return torch.ops.cubin.scaled_dot_product_attention.default(q, k, v, attn_mask=bias)


def forward(q, k, v, bias):
    return torch.ops.cubin.attention_forward(q, k, v, bias)[0]


def drop_in(q, k, v, bias):
    with torch_cubin.drop_in():
        return F.scaled_dot_product_attention(q, k, v, bias)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("call", [attention, default, forward, drop_in])
@pytest.mark.parametrize("columns", [4, 6])
@pytest.mark.parametrize("variant", VARIANTS)
def test_as_mask(variant, columns, call, grad, device):
    q, k, v = operands(device, columns=columns)
    bias = variant(4, columns)
    with torch.set_grad_enabled(grad):
        out = call(q, k, v, bias)
    assert type(out) is torch.Tensor
    wanted = F.scaled_dot_product_attention(q, k, v, bias._materialize(device))
    torch.testing.assert_close(out, wanted)


@pytest.mark.parametrize("call", [attention, forward])
@pytest.mark.parametrize("variant", VARIANTS)
def test_compiled(variant, call, device):
    q, k, v = operands(device)
    bias = variant(4, 6)
    out = torch.compile(call, backend="aot_eager")(q, k, v, bias)
    wanted = F.scaled_dot_product_attention(q, k, v, bias._materialize(device))
    torch.testing.assert_close(out, wanted)


def test_causal_bias_is_refused_by_other_ops(device):
    q, k, v = operands(device)
    bias, op = causal_lower_right(4, 6), vec_add()
    for call in (
        lambda: attention(q, k, v, causal_lower_right(3, 6)),
        lambda: torch.ops.cubin.scaled_dot_product_attention(q, k, v, bias, is_causal=True),
        lambda: torch.ops.cubin.matmul(bias, bias.mT),
        lambda: torch.ops.cubin.flash_attention(bias, k, v),
        lambda: op(bias, bias),
    ):
        with pytest.raises((RuntimeError, ValueError), match=r"\[input\]: .*CausalBias"):
            call()
