"""Arguments do not outlive a call: the boxed kernels release their arguments, also on errors."""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.func import vmap

ops = torch.ops.cubin
CALLS = 5
_ENDS = torch.tensor([1, 4])


def attention_options(tensor: torch.Tensor) -> dict:
    """Every tensor and every optional number that attention takes."""
    return {
        "alibi_slopes": tensor.new_ones(2, dtype=torch.float32),
        "sinks": tensor.new_ones(2, dtype=torch.float32),
        "scale": 0.5,
        "softcap": 2.0,
    }


def vmapped(call: Callable) -> Callable:
    return lambda x: vmap(call)(x)


# A function of x (3, 2, 4, 8) that is refused, wherever in the kernel or below it.
REFUSED = {
    "matmul": lambda x: ops.matmul(x, x),
    "linear": lambda x: ops.linear(x, x[0, 0, :, :3], x[0, 0, 0]),
    "linear, an activation": lambda x: ops.linear(x, x[0, 0], activation="swish"),
    "addmm": lambda x: ops.addmm(x, x, x.mT, alpha=2),
    "addmm, a dtype": lambda x: ops.addmm(x, x, x.mT, torch.float16),
    "addmm_into": lambda x: ops.addmm_into(x, x, x.mT),
    "grouped_matmul": lambda x: ops.grouped_matmul(x[0, 0], x[0], offs=_ENDS.to(x.device)),
    "add_rms_norm": lambda x: ops.add_rms_norm(x, x, (4, 8), x[0, 0, 0], 0.5),
    "softmax": lambda x: ops.softmax(x, 4),
    "_linears": lambda x: ops._linears(x, [x[0, 0], x[0, 0, :, :3]], [None, x[0, 0, 0]]),
    "_linear_glu": lambda x: ops._linear_glu(x, x[0, 0], x[0, 0, :2], "silu"),
    "attention": lambda x: ops.scaled_dot_product_attention(x, x[..., :4], x),
    "attention, a mask": lambda x: ops.scaled_dot_product_attention(x, x, x, x[..., :3], scale=2.0),
    "attention, dropout": lambda x: ops.scaled_dot_product_attention(
        x, x[..., :4], x, dropout_p=0.5
    ),
    "attention, dropout that vmap refuses": vmapped(
        lambda x: ops.scaled_dot_product_attention(x, x, x, x[..., :1], 0.5, scale=0.5)
    ),
    "flash_attention": lambda x: ops.flash_attention(x, x[..., :4], x, scale=0.5),
    "flash_attention, packed": lambda x: ops.flash_attention(x, x, **attention_options(x)),
    "flash_attention, dropout that vmap refuses": vmapped(
        lambda x: ops.flash_attention(x[None], x[None], x[None], dropout_p=0.5)
    ),
    "attention_forward": lambda x: ops.attention_forward(x, x, x[:, :, :1], **attention_options(x)),
    "attention_backward": lambda x: ops.attention_backward(
        x, x, x, x[:, :, :1], x, x[..., 0], **attention_options(x)
    ),
    "a raw op": lambda x: ops._attention_forward(x, x, x[..., :1, :], **attention_options(x)),
}
SERVED = {
    "matmul": lambda x: ops.matmul(x, x.mT),
    "linear": lambda x: ops.linear(x, x[0, 0], x[0, 0, :, 0]),
    "linear, an activation": lambda x: ops.linear(x, x[0, 0], x[0, 0, :, 0], activation="gelu"),
    "addmm": lambda x: ops.addmm(x[..., :4], x, x.mT, beta=2, alpha=3),
    "addmm, a dtype": lambda x: ops.addmm(x[..., :4], x, x.mT, x.dtype, beta=2),
    "addmm_into": lambda x: ops.addmm_into(x.detach()[..., :4].clone(), x.detach(), x.mT.detach()),
    "grouped_matmul": lambda x: ops.grouped_matmul(x[0, 0], x[0].mT, offs=_ENDS.to(x.device)),
    "add_rms_norm": lambda x: ops.add_rms_norm(x, x, (4, 8), x[0, 0], 0.5),
    "softmax": lambda x: ops.softmax(x, 1, dtype=torch.float64),
    "_linears": lambda x: ops._linears(x, [x[0, 0], x[0, 1, :2]], [x[0, 0, :, 0], None])[1],
    "_linear_glu": lambda x: ops._linear_glu(x, x[0, 0], x[0, 1], "silu"),
    "attention": lambda x: ops.scaled_dot_product_attention(x, x, x, x[..., :1], 0.5, scale=0.5),
    "flash_attention": lambda x: ops.flash_attention(x, x, x, scale=0.5, dropout_p=0.5),
    "attention_forward": lambda x: ops.attention_forward(x, x, x, **attention_options(x)),
}


def refused(call: Callable) -> Callable:
    def run(x: torch.Tensor) -> None:
        with pytest.raises(RuntimeError):
            call(x)

    return run


CASES = {f"refused: {name}": refused(call) for name, call in REFUSED.items()} | {
    f"served: {name}": call for name, call in SERVED.items()
}


@pytest.fixture(scope="module", autouse=True)
def _only_what_a_call_makes_is_collected() -> None:
    gc.collect()
    gc.freeze()  # what other tests have imported; there are 84 collections here


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("name", CASES)
def test_arguments_are_released(name, grad, device):
    """Counted are the owners of the tensor and those of its memory, which views share."""
    x = torch.randn(3, 2, 4, 8, device=device, requires_grad=grad)
    storage = x.untyped_storage()
    counts = []
    with torch.set_grad_enabled(grad):
        for calls in (1, CALLS):  # the first may fill a cache
            for _ in range(calls):
                CASES[name](x)
            gc.collect()
            counts.append((x._use_count(), torch._C._storage_Use_Count(storage._cdata)))
    assert counts[0] == counts[1]
    assert counts[0][0] <= 2  # the variable, and a gradient's accumulator at most


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_a_str_argument_is_released(device):
    """Counted is the memory of the process: a megabyte of text in each call."""
    x, text = torch.randn(4, 8, device=device), "x" * 2**20

    def call() -> None:
        with pytest.raises(RuntimeError):
            ops._linear_activation(x, x, None, text)

    call()
    before = _resident_bytes()
    for _ in range(100):
        call()
    assert _resident_bytes() - before < 50 * 2**20
