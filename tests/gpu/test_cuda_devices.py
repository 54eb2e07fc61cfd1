"""Devices: the op runs where its tensors are, refuses mixtures, and leaves the device as it was."""

from __future__ import annotations

from pathlib import Path

import numerics
import pytest
import torch
import torch.nn.functional as F
from ops import kv_cache_cases, test_context_parallel
from torch.nn import attention

CONTEXTS = [torch.no_grad, torch.enable_grad, torch.inference_mode]


def _ones(*shape: int, device: str = "cuda", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, device=device, dtype=dtype)


@pytest.mark.fault_case(37)
@pytest.mark.parametrize("context", CONTEXTS)
def test_cpu_and_cuda_are_an_input_error(context) -> None:
    with context():
        for a, b in [("cuda", "cpu"), ("cpu", "cuda")]:
            with pytest.raises(RuntimeError, match=r"\[input\].*cpu"):
                torch.ops.cubin.matmul(_ones(4, 4, device=a), _ones(4, 4, device=b))
            with pytest.raises(RuntimeError, match=r"\[input\].*cpu"):
                torch.ops.cubin.linear(_ones(4, 4, device=a), _ones(4, 4, device=b))
        with pytest.raises(RuntimeError, match=r"\[input\].*cpu"):
            torch.ops.cubin.linear(_ones(4, 4), _ones(4, 4), _ones(4, device="cpu"))


@pytest.mark.parametrize("context", CONTEXTS)
def test_bad_inputs_are_input_errors(context) -> None:
    with context():
        for a, b in [
            (_ones(4, 5), _ones(4, 5)),
            (_ones(2, 4, 5), _ones(3, 5, 4)),
            (_ones(4, 4), _ones(4, 4, dtype=torch.float16)),
            (_ones(4, 4, dtype=torch.int32), _ones(4, 4, dtype=torch.int32)),
            (_ones(4, 4, dtype=torch.complex64), _ones(4, 4, dtype=torch.complex64)),
            (_ones(), _ones(4)),
        ]:
            with pytest.raises(RuntimeError, match=r"torch_cubin \[input\]"):
                torch.ops.cubin.matmul(a, b)
        torch.cuda.synchronize()


@pytest.mark.fault_case(37)
def test_current_device_is_unchanged() -> None:
    for index in range(torch.cuda.device_count()):
        with torch.cuda.device(index):
            torch.ops.cubin.matmul(_ones(8, 8, device="cuda:0"), _ones(8, 8, device="cuda:0"))
            assert torch.cuda.current_device() == index


@pytest.mark.fault_case(37)
@pytest.mark.gpu(2)
@pytest.mark.parametrize("context", CONTEXTS)
def test_second_device_while_the_first_is_current(context) -> None:
    with context():
        for m, n, k in [(64, 96, 128), (1, 512, 4096), (16, 256, 8192), (3080, 4616, 264)]:
            for dtype in (torch.bfloat16, torch.float32, torch.float64):
                a = torch.randint(-3, 4, (m, k), device="cuda:1").to(dtype)
                b = torch.randint(-3, 4, (k, n), device="cuda:1").to(dtype)
                out = torch.ops.cubin.matmul(a, b)
                assert torch.cuda.current_device() == 0
                assert out.device == torch.device("cuda:1")
                numerics.check_exact(out, a.double() @ b.double())


def _near(mine: torch.Tensor, wanted: torch.Tensor, limit: float) -> None:
    error = (mine.double() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
    assert not numerics.exceeds(float(error), limit), float(error)


@pytest.mark.fault_case(37)
@pytest.mark.gpu(2)
@pytest.mark.parametrize("rows", [1, 200, 1100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_attention_on_the_second_device(dtype: torch.dtype, rows: int) -> None:
    """Forward and backward while the first is current, interleaved with it."""
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        q, k, v = (
            torch.randn(2, heads, length, 64, device=device, dtype=dtype, requires_grad=True)
            for heads, length in ((4, rows), (2, 1100), (2, 1100))
        )
        causal = rows == 1100
        out = torch.ops.cubin.scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=True
        )
        assert out.device == torch.device(device)
        grad = torch.randn_like(out)
        gradients = torch.autograd.grad(out, (q, k, v), grad)
        assert torch.cuda.current_device() == 0
        leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
        wanted = F.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=True)
        limit = 1e-2 if dtype == torch.bfloat16 else 1e-5
        _near(out.detach(), wanted.detach(), limit)
        for mine, theirs in zip(
            gradients, torch.autograd.grad(wanted, leaves, grad.double()), strict=True
        ):
            _near(mine, theirs, limit)


@pytest.mark.fault_case(37)
@pytest.mark.gpu(2)
@pytest.mark.parametrize("page_size", [0, 16])
def test_a_cache_of_keys_on_the_second_device(page_size: int) -> None:
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        args = kv_cache_cases.make(
            device, capacity=2000, lengths=[0, 17, 1990], new=2, rows=2, causal=True,
            page_size=page_size, rotary_dim=64,
        )  # fmt: skip
        wanted, *caches = kv_cache_cases.expected(**args)
        out = torch.ops.cubin.flash_attention_with_kvcache(**args)
        assert torch.cuda.current_device() == 0
        assert out.device == torch.device(device)
        _near(out, wanted, 1e-2)
        for name, cache in zip(("k_cache", "v_cache"), caches, strict=True):
            torch.testing.assert_close(args[name], cache, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu(2)
@pytest.mark.skipif(
    not hasattr(attention, "register_flash_attention_impl"), reason="this PyTorch has no registry"
)
def test_attention_of_sequences_split_over_both(tmp_path: Path) -> None:
    """Sequences split over both: a ring of calls through PyTorch's registry."""
    test_context_parallel.check(test_context_parallel.ranks("cuda", tmp_path))


@pytest.mark.fault_case(37)
@pytest.mark.gpu(2)
def test_second_devices_stream_is_used() -> None:
    a = torch.randint(-3, 4, (64, 64), device="cuda:1").float()
    late = torch.zeros_like(a)
    torch.ops.cubin.matmul(a, a)
    torch.cuda.synchronize(1)
    stream = torch.cuda.Stream("cuda:1")
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        late.copy_(a)
        with torch.cuda.device(0):
            # Device 0 is current; device 1's current stream is still the one set above.
            out = torch.ops.cubin.matmul(late, late)
    stream.synchronize()
    numerics.check_exact(out, a.double() @ a.double())


@pytest.mark.fault_case(37)
@pytest.mark.gpu(2)
@pytest.mark.parametrize("context", CONTEXTS)
def test_two_cuda_devices_are_an_input_error(context) -> None:
    with context(), pytest.raises(RuntimeError, match=r"\[input\].*cuda:1"):
        torch.ops.cubin.matmul(_ones(4, 4, device="cuda:0"), _ones(4, 4, device="cuda:1"))


@pytest.mark.gpu(2)
def test_backward_on_the_second_device() -> None:
    x = torch.randn(16, 32, device="cuda:1", requires_grad=True)
    weight = torch.randn(8, 32, device="cuda:1", requires_grad=True)
    torch.ops.cubin.linear(x, weight).sum().backward()
    numerics.check_close(
        x.grad,
        weight.detach().sum(0).expand(16, 32),
        weight.detach().double().sum(0).expand(16, 32),
    )
