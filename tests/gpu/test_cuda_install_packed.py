"""install() under attention of packed sequences and of nested tensors, on a GPU."""

from __future__ import annotations

import contextlib

import numerics
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_cubin

PACKED = (100, 1, 300, 7)  # rows of each sequence


def attend_packed(operands: list[torch.Tensor], install: tuple[bool, bool], causal: bool):
    """Output, logsumexp and gradients, with install() on in the forward, in the backward."""

    def on(yes: bool):
        return torch_cubin.install(policy="all") if yes else contextlib.nullcontext()

    *leaves, grad = [x.detach().clone() for x in operands]
    for leaf in leaves:
        leaf.requires_grad_()
    ends = torch.tensor([0, *PACKED], device="cuda").cumsum(0).int()
    with on(install[0]):
        out, logsumexp, *_ = torch.ops.aten._flash_attention_forward(
            *leaves, ends, ends, max(PACKED), max(PACKED), 0.0, causal, False
        )
    with on(install[1]):
        out.backward(grad)
    return [out, logsumexp, *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shared", [4, 2])
def test_packed_sequences_are_served_forward_and_backward(shared: int, causal: bool) -> None:
    """Also where only one of the two is; each sequence is as by itself."""
    torch.manual_seed(0)
    heads = (4, shared, shared, 4)
    operands = [torch.randn(sum(PACKED), n, 64, device="cuda", dtype=torch.bfloat16) for n in heads]
    leaves = [x.double().requires_grad_() for x in operands[:3]]
    alone = [
        F.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in each), is_causal=causal, enable_gqa=True
        )[0].transpose(0, 1)
        for each in zip(*(x.split(PACKED) for x in leaves), strict=True)
    ]
    exact = torch.cat(alone)
    exact.backward(operands[3].double())
    exact = [exact, *(leaf.grad for leaf in leaves)]
    stock = attend_packed(operands, (False, False), causal)
    name = "aten::_flash_attention_"
    for install in ((True, True), (True, False), (False, True)):
        torch_cubin.report(reset=True)
        own = attend_packed(operands, install, causal)
        served = [row.function for row in torch_cubin.report().served]
        assert name + ("backward" if install[1] else "forward") in served
        torch.testing.assert_close(own.pop(1), stock[1], rtol=1e-4, atol=1e-4)
        for mine, theirs, wanted in zip(own, [stock[0], *stock[2:]], exact, strict=True):
            assert mine.stride() == theirs.stride()
            error = (mine.double() - wanted).abs().max().item()
            limit = 2 * (theirs.double() - wanted).abs().max().item()
            limit += numerics.ulp(mine.dtype, wanted.abs().max().item())
            assert not numerics.exceeds(error, limit), (install, error, limit)


def test_nested_tensors_are_served() -> None:
    ends = torch.tensor([0, *PACKED], device="cuda").cumsum(0)
    values = torch.randn(3, sum(PACKED), 4, 64, device="cuda", dtype=torch.bfloat16)
    with torch_cubin.install(policy="all"), sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        nested = [torch.nested.nested_tensor_from_jagged(x, ends).transpose(1, 2) for x in values]
        out = F.scaled_dot_product_attention(*nested).transpose(1, 2).values()
        served = [row.function for row in torch_cubin.report().served]
    assert "aten::_flash_attention_forward" in served
    rows = slice(101, 401)
    one = [x[rows].transpose(0, 1)[None].double() for x in values]
    wanted = F.scaled_dot_product_attention(*one)[0].transpose(0, 1)
    torch.testing.assert_close(out[rows].double(), wanted, rtol=2e-2, atol=2e-2)
