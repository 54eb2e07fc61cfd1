"""torch_cubin._hub_attention: what transformers calls where a kernel of Hugging Face's hub (`make
hub`) is a model's attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ops.test_huggingface import LAYERS, inputs, llama, padded
from recorded_ops import RecordedOps
from torch.fx.experimental.proxy_tensor import make_fx

import torch_cubin
from torch_cubin import _hub_attention


@pytest.fixture
def hub_kernel(monkeypatch) -> str:
    """The name of an attention whose kernel transformers would load from the hub."""
    hub_kernels = pytest.importorskip("transformers.integrations.hub_kernels")
    if not hasattr(hub_kernels, "load_and_register_attn_kernel"):
        pytest.skip("of transformers 5")
    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda: True)
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda *_, **options: _hub_attention)
    return "someone/torch-cubin"


@pytest.mark.parametrize("padding", [False, True])
def test_a_model(hub_kernel, padding, device):
    torch.manual_seed(0)
    model, given = llama().to(device).eval(), inputs(llama, device)
    given = padded(given) if padding else given
    results = []
    for name in (hub_kernel, "sdpa"):
        model.set_attn_implementation(name)
        with RecordedOps() as calls:
            out = model(**given)
        used = [op for op, *_ in calls.ours if op == "_attention_forward_autograd"]
        assert len(used) == (LAYERS if name == hub_kernel else 0)
        model.zero_grad()
        out.loss.backward()
        logits = out.logits.detach()[given.get("attention_mask", given["input_ids"] >= 0) == 1]
        results.append([logits, *(p.grad.clone() for p in model.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_functions(device):
    """With flash-attn's arguments: windows whose right end causal calls ignore, sinks, a cache."""
    torch.manual_seed(0)
    ours, ops = _hub_attention, torch.ops.cubin
    q, k, v = (torch.randn(2, 6, heads, 8, device=device) for heads in (4, 2, 2))
    sinks, options = torch.randn(4, device=device), {"softcap": 2.0, "softmax_scale": 0.3}
    own = {"softcap": 2.0, "scale": 0.3, "sinks": sinks}
    wanted = ops.flash_attention(q, k, v, is_causal=True, window_left=2, **own)
    options |= {"causal": True, "window_size": (2, 2), "s_aux": sinks}
    assert torch.equal(ours.flash_attn_func(q, k, v, **options), wanted)
    ends = torch.tensor([0, 6, 12], dtype=torch.int32, device=device)
    flat = (x.flatten(0, 1) for x in (q, k, v))
    packed = ours.flash_attn_varlen_func(*flat, ends, ends, torch.tensor(6), 6, **options)
    torch.testing.assert_close(packed.view(2, 6, 4, 8), wanted)
    caches = [torch.zeros(2, 16, 2, 8, dtype=torch.bfloat16, device=device) for _ in range(2)]
    short = [x.bfloat16() for x in (q, k, v)]
    for begin, end in ((0, 4), (4, 6)):
        rows, *new = (x[:, begin:end] for x in short)
        cached = ours.flash_attn_with_kvcache(rows, *caches, *new, cache_seqlens=begin, **options)
        torch.testing.assert_close(cached.float(), wanted[:, begin:end], rtol=3e-2, atol=3e-2)
    both = ours.flash_attn_func(q, k, v, window_size=(1, 2))
    assert torch.equal(both, ops.flash_attention(q, k, v, window_left=1, window_right=2))
    numpys = {"window_size": (np.int64(1), np.int32(2)), "softcap": np.float32(0),
              "return_attn_probs": np.bool_(False)}  # fmt: skip
    assert torch.equal(ours.flash_attn_func(q, k, v, **numpys), both)


def test_windows_of_traced_sizes(device):
    def call(x):
        return _hub_attention.flash_attn_func(x, x, x, window_size=(x.shape[1] // 2, 0))

    x = torch.randn(2, 6, 2, 8, device=device)
    traced = make_fx(call, tracing_mode="symbolic")(x)
    assert torch.equal(traced(x), call(x))


@pytest.mark.parametrize(
    ("function", "argument", "value", "got"),
    [
        ("flash_attn_func", "return_attn_probs", True, "False, got True"),
        ("flash_attn_func", "softcap", None, "a number, got None"),
        ("flash_attn_func", "window_size", None, "two ints, got None"),
        ("flash_attn_varlen_func", "window_size", (4,), r"two ints, got \(4,\)"),
        ("flash_attn_varlen_func", "return_attn_probs", True, "False, got True"),
        ("flash_attn_varlen_func", "block_table", torch.zeros(2, 3), "None, got a tensor of .2, 3"),
        ("flash_attn_with_kvcache", "cache_leftpad", torch.zeros(2), "None, got a tensor of .2"),
        ("flash_attn_with_kvcache", "return_softmax_lse", True, "False, got True"),
        ("flash_attn_with_kvcache", "window_size", (None, 0), r"two ints, got \(None, 0\)"),
    ],
)
def test_arguments_that_are_refused(function, argument, value, got, device):
    x = torch.zeros(2, 6, 2, 8, device=device)
    args = [x] * (7 if "varlen" in function else 3)
    pattern = rf"{function} argument '{argument}' is not supported: expected {got}"
    with pytest.raises(torch_cubin.errors.InputError, match=pattern):
        getattr(_hub_attention, function)(*args, **{argument: value})
