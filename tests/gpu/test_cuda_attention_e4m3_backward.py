"""attention_backward_e4m3 on Hopper: csrc/kernels/attention/sm90/e4m3_backward.cu."""

import numerics
import pytest
import torch
from gpu import attention_cases as ac
from gpu import hopper
from ops.e4m3_cases import formula
from ops.test_attention_e4m3_backward import LIMITS, backward, forward, make, wide

import torch_cubin

pytestmark = hopper.for_kernels
DEVICE = ac.DEVICE
LONG = {
    "full": {"rows": 1500, "keys": 1300, "heads": 4, "shared": 4},
    "causal": {"rows": 2000, "keys": 2000, "heads": 4, "shared": 4, "is_causal": True},
    "many heads, causal": {"batch": 8, "rows": 700, "keys": 700, "heads": 16, "shared": 16,
                           "is_causal": True},
    "groups": {"rows": 1000, "keys": 1100, "heads": 8, "shared": 2, "descale": "qkv"},
    "window": {"rows": 1200, "keys": 1200, "window_left": 300, "window_right": 70, "descale": "kv"},
    "bottom right": {"rows": 500, "keys": 1500, "is_causal": True, "bottom_right": True},
    "more rows": {"rows": 1500, "keys": 500, "is_causal": True, "rows_first": True},
    "few rows": {"rows": 5, "keys": 3000},
    "pairs": {"rows": 700, "keys": 2500, "heads": 4, "shared": 2, "descale": "qkv"},
    "pairs, causal": {"batch": 1, "rows": 2400, "keys": 2400, "is_causal": True},
    "pairs, window": {"batch": 1, "rows": 2600, "keys": 2600, "window_left": 2100,
                      "window_right": 70},
    "window of many keys": {"batch": 1, "rows": 2600, "keys": 2600, "window_left": 300,
                            "window_right": 70},
    "pairs, few rows": {"rows": 100, "keys": 2305, "is_causal": True, "bottom_right": True},
    "pairs, few keys": {"batch": 3, "rows": 300, "keys": 200, "heads": 4, "shared": 2,
                        "descale": "qkv"},
    "pairs, four tiles": {"rows": 700, "keys": 500, "rows_first": True},
    "sharp": {"rows": 800, "keys": 800, "scale": 0.5, "is_causal": True},
}  # fmt: skip


def gradients(tensors, options, grad_out):
    """Those of the kernel and of the formula."""
    out, logsumexp = forward(*tensors, **options)
    found = backward(grad_out, *tensors, out, logsumexp, **options)
    values, rest = wide(tensors, options)
    wanted_out = formula(*values, **rest)[0]
    return found, torch.autograd.grad(wanted_out, values, grad_out.double())


def compare(found, wanted, label, limits=LIMITS["cuda"]):
    for name, x, y, limit in zip(("dq", "dk", "dv"), found, wanted, limits, strict=True):
        error = (x.double() - y).norm().item() / y.norm().item()
        assert not numerics.exceeds(error, limit), (label, name, error)


@pytest.mark.parametrize("dim", [64, 112, 128])
@pytest.mark.parametrize("name", LONG)
def test_long(name, dim, nan_memory):
    torch.manual_seed(dim)
    tensors, options = make(DEVICE, **{"dim": dim} | LONG[name])
    shape = (*tensors[0].shape[:3], tensors[2].shape[3])
    grad_out = torch.randn(shape, device=DEVICE).bfloat16()
    found, wanted = gradients(tensors, options, grad_out)
    # Sharp weights of the forward are off by as much as 8 bits are, which delta contains.
    limits = (0.12, 0.1, 6e-3) if name == "sharp" else LIMITS["cuda"]
    compare(found, wanted, name, limits)


def test_rows_of_any_magnitude(nan_memory):
    """Each row of grad_out has a factor of its own, so that small ones keep their bits."""
    torch.manual_seed(0)
    tensors, options = make(DEVICE, rows=600, keys=700, dim=128)
    exponents = torch.randint(-60, 20, (2, 2, 600, 1), device=DEVICE).float()
    grad_out = (torch.randn(2, 2, 600, 128, device=DEVICE) * torch.exp2(exponents)).bfloat16()
    (dq, dk, dv), wanted = gradients(tensors, options, grad_out)
    off = (dq.double() - wanted[0]).norm(dim=-1) / wanted[0].norm(dim=-1)
    assert off.max() < 0.15
    compare((dq, dk, dv), wanted, "rows")


def test_a_sequence_alone_has_the_same_bits():
    torch.manual_seed(0)
    tensors, options = make(DEVICE, batch=5, rows=700, keys=700, dim=128, is_causal=True)
    grad_out = torch.randn(tensors[0].shape, device=DEVICE).bfloat16()
    out, logsumexp = forward(*tensors, **options)
    together = backward(grad_out, *tensors, out, logsumexp, **options)
    part = slice(2, 3)
    alone = backward(
        grad_out[part], *(x[part] for x in tensors), out[part], logsumexp[part], **options
    )
    for x, y in zip(together, alone, strict=True):
        assert torch.equal(numerics.bits(x[part].contiguous()), numerics.bits(y))


def test_the_same_bits_again(nan_memory):
    torch.manual_seed(0)
    tensors, options = make(DEVICE, batch=2, heads=8, shared=8, rows=2048, keys=2048, dim=128)
    grad_out = torch.randn(tensors[0].shape, device=DEVICE).bfloat16()
    out, logsumexp = forward(*tensors, **options)
    first = backward(grad_out, *tensors, out, logsumexp, **options)
    for _ in range(20):
        again = backward(grad_out, *tensors, out, logsumexp, **options)
        assert all(map(torch.equal, first, again))


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_gradients_that_are_not_finite(value):
    """A row's make its dq NaN, and dk of the keys that it sees, and no others."""
    torch.manual_seed(0)
    tensors, options = make(DEVICE, batch=1, rows=300, keys=300, dim=128, is_causal=True)
    grad_out = torch.randn(tensors[0].shape, device=DEVICE).bfloat16()
    grad_out[0, 1, 100, 5] = value
    (dq, dk, dv), _ = gradients(tensors, options, grad_out)
    wanted = torch.zeros(1, 2, 300, dtype=torch.bool, device=DEVICE)
    wanted[0, 1, 100] = True
    assert torch.equal(dq.isnan().any(-1), wanted)
    seen = torch.zeros_like(wanted)
    seen[0, 1, :101] = True
    assert torch.equal(dk.isnan().any(-1), seen)
    assert not dv.isfinite().all(-1)[seen].any()
    assert dv[..., :5].isfinite().all()


@pytest.mark.parametrize("value", [0.0, -2.0, 1e4, 1e-4])
@pytest.mark.parametrize("name", ["q_descale", "k_descale", "v_descale"])
def test_factors_of_any_size(name, value):
    torch.manual_seed(0)
    tensors, options = make(DEVICE, rows=200, keys=200, dim=64, descale="qkv", scale=1e-3)
    options[name][1, 1] = value
    grad_out = torch.randn(tensors[0].shape, device=DEVICE).bfloat16()
    found, wanted = gradients(tensors, options, grad_out)
    for x, y in zip(found, wanted, strict=True):
        assert x.isfinite().all()
        assert ((x[1, 1].double() - y[1, 1]).norm() <= 0.3 * y[1, 1].norm() + 1e-6).all()


def test_float8_attention_trains():
    """Eight steps of a layer's weights lower a loss as those of bfloat16 do."""
    losses = {}
    for name in ("bfloat16", "float8"):
        torch.manual_seed(0)
        x = torch.randn(2, 256, 4 * 64, device=DEVICE).bfloat16()
        target = torch.randn(2, 256, 4 * 64, device=DEVICE).bfloat16()
        weight = (torch.randn(3 * 256, 256, device=DEVICE) / 16).requires_grad_()
        losses[name] = []
        for _ in range(8):
            q, k, v = (x @ weight.bfloat16().t()).unflatten(-1, (3, 4, 64)).permute(2, 0, 3, 1, 4)
            if name == "float8":
                out = torch_cubin.float8_attention(q, k, v, is_causal=True)
            else:
                out = torch.ops.cubin.scaled_dot_product_attention(q, k, v, is_causal=True)
            loss = (out.transpose(1, 2).flatten(2) - target).float().square().mean()
            losses[name].append(loss.item())
            (grad,) = torch.autograd.grad(loss, weight)
            with torch.no_grad():
                weight -= 50.0 * grad
    assert losses["bfloat16"][-1] < losses["bfloat16"][0]
    assert losses["float8"] == pytest.approx(losses["bfloat16"], rel=0.02)
