"""drop_in() on a GPU: eager code below autograd, for one thread and the threads of backward()."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import _get_current_function_mode_stack

import torch_cubin


def served() -> dict[str, int]:
    return {row.function: row.calls for row in torch_cubin.report().served}


def block(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    up, bias, down = weights
    hidden = F.gelu(F.linear(x, up, bias))
    q = hidden.view(2, 64, 4, 64).transpose(1, 2)
    attended = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    return F.linear(attended.transpose(1, 2).reshape(128, 256), down)


@pytest.fixture
def operands() -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": torch.bfloat16}
    shapes = [(256, 256), (256,), (256, 256)]
    weights = [(torch.randn(shape, **options) / 16).requires_grad_() for shape in shapes]
    return torch.randn(128, 256, **options), weights


def test_backward_runs_ours_on_pytorch_s_own_thread(operands) -> None:
    x, weights = operands
    expected = torch.autograd.grad(block(x, weights).float().square().sum(), weights)
    with torch_cubin.drop_in(policy="all"):
        assert _get_current_function_mode_stack() == []
        out = block(x, weights)
        forward = served()
        result = torch.autograd.grad(out.float().square().sum(), weights)
        both = served()
    assert forward["aten::addmm"] == 1
    assert forward["aten::mm"] == 1
    assert both["aten::mm"] == 1 + 3  # up, down, and what flows into the attention
    assert any("attention_backward" in name for name in both)
    assert torch_cubin.report().declined == ()
    for own, wanted in zip(result, expected, strict=True):
        torch.testing.assert_close(own, wanted, rtol=3e-2, atol=3e-2 * wanted.abs().max().item())


def test_backward_outside_runs_pytorch_s(operands) -> None:
    x, weights = operands
    with torch_cubin.drop_in(policy="all"):
        out = block(x, weights)
        before = served()
    out.float().square().sum().backward()
    assert served() == before


def test_other_threads_and_the_thread_afterwards_are_not_served() -> None:
    a = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
    with torch_cubin.drop_in(policy="all"):
        a @ a
        thread = threading.Thread(target=lambda: a @ a)
        thread.start()
        thread.join()
        assert served() == {"aten::mm": 1}
    a @ a
    assert served() == {"aten::mm": 1}


def test_compiled_before_and_called_inside(operands) -> None:
    x, weights = operands
    torch._dynamo.reset()
    compiled = torch.compile(block)
    with torch.no_grad():
        expected = compiled(x, weights)
        with torch_cubin.drop_in(policy="all"):
            result = compiled(x, weights)
            assert {"aten::addmm.out", "aten::mm.out"} <= set(served())
    torch.testing.assert_close(result, expected, rtol=3e-2, atol=3e-2)


def test_a_scope_in_a_compiled_function_has_our_ops() -> None:
    torch._dynamo.reset()

    @torch.compile(fullgraph=True)
    def function(a):
        with torch_cubin.drop_in():
            return a @ a

    a = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        torch.testing.assert_close(function(a), a @ a, rtol=2e-2, atol=2e-1)
    assert "cubin::matmul" in {row.op for row in torch_cubin.report().ran}


def test_the_fused_path_of_attention_layers_is_pytorch_s_and_its_products_are_ours() -> None:
    layer = torch.nn.MultiheadAttention(256, 4, batch_first=True, device="cuda").bfloat16().eval()
    x = torch.randn(2, 64, 256, device="cuda", dtype=torch.bfloat16)
    with torch.inference_mode():
        expected = layer(x, x, x, need_weights=False)[0]
        with torch_cubin.drop_in(policy="all"):
            result = layer(x, x, x, need_weights=False)[0]
            assert served() != {}
    torch.testing.assert_close(result, expected, rtol=3e-2, atol=3e-2)
