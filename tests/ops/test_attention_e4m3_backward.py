"""attention_backward_e4m3, and torch_cubin.float8_attention, which calls it."""

from __future__ import annotations

import numerics
import pytest
import torch
from ops.e4m3_cases import formula, quantised

import torch_cubin

backward = torch.ops.cubin.attention_backward_e4m3
forward = torch.ops.cubin.attention_forward_e4m3
RAW = torch.ops.cubin._attention_backward_e4m3.default
# Of dq, dk and dv, relative to their norms. On a GPU grad_out has 4 bits for dq and dk, which is
# 2.7% of both, and dS has 3 bits for dq.
LIMITS = {"cpu": (1e-2, 1e-2, 5e-3), "cuda": (7e-2, 4e-2, 6e-3)}
CASES = {
    "plain": {},
    "causal": {"rows": 37, "keys": 37, "is_causal": True},
    "bottom right": {"rows": 9, "keys": 37, "is_causal": True, "bottom_right": True},
    "more rows than keys": {"rows": 37, "keys": 9, "is_causal": True},
    "window": {"rows": 60, "keys": 70, "window_left": 9, "window_right": 3},
    "one row": {"rows": 1, "keys": 50},
    "one key": {"rows": 50, "keys": 1},
    "groups": {"heads": 6, "shared": 2},
    "factors": {"descale": "qkv"},
    "factors of groups": {"descale": "qkv", "heads": 4, "shared": 2, "is_causal": True},
    "scale": {"scale": 0.3},
    "negative scale": {"scale": -0.3},
    "no scale": {"scale": 0.0},
    "other values": {"dim": 32, "dim_v": 80},
    "rows first": {"rows_first": True},
}


def make(device, *, batch=2, heads=2, shared=2, rows=40, keys=48, dim=32, dim_v=None, descale="",
         rows_first=False, **options):  # fmt: skip
    """The tensors and options of a forward."""

    def tensor(own_heads, length, width):
        if rows_first:
            return quantised((batch, length, own_heads, width), device).transpose(1, 2)
        return quantised((batch, own_heads, length, width), device)

    tensors = [
        tensor(heads, rows, dim),
        tensor(shared, keys, dim),
        tensor(shared, keys, dim_v or dim),
    ]
    for letter in descale:
        options[f"{letter}_descale"] = torch.rand(batch, shared, device=device) + 0.5
    return tensors, options


def wide(tensors, options):
    """The values of the tensors in float64, and the options of the formula."""
    options = {"bottom_right": False} | options
    heads = tensors[1].shape[1]
    result = []
    for tensor, letter in zip(tensors, "qkv", strict=True):
        factor = options.pop(f"{letter}_descale", None)
        x = tensor.double()
        if factor is not None:
            x = x * factor.double().repeat_interleave(x.shape[1] // heads, 1)[..., None, None]
        result.append(x.detach().requires_grad_())
    return result, options


def check(found, wanted, device, label):
    for name, x, y, limit in zip(("dq", "dk", "dv"), found, wanted, LIMITS[device], strict=True):
        assert x.dtype == torch.bfloat16
        assert x.shape == y.shape
        error = (x.double() - y).norm().item()
        # With one key dq and dk are differences of equal numbers.
        least = 1e-3 * y.numel() ** 0.5
        assert not numerics.exceeds(error, limit * y.norm().item() + least), (label, name, error)


@pytest.mark.parametrize("name", CASES)
def test_case(name, device):
    torch.manual_seed(0)
    tensors, options = make(device, **CASES[name])
    out, logsumexp = forward(*tensors, **options)
    grad_out = torch.randn(out.shape, device=device).bfloat16()
    found = backward(grad_out, *tensors, out, logsumexp, **options)
    values, rest = wide(tensors, options)
    wanted = torch.autograd.grad(formula(*values, **rest)[0], values, grad_out.double())
    check(found, wanted, device, name)
    for x, like in zip(found, tensors, strict=True):
        assert x.stride() == like.stride()
    again = backward(grad_out, *tensors, out, logsumexp, **options)
    assert all(map(torch.equal, found, again))


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"rows": 0}, {"keys": 0}], ids=str)
def test_empty(sizes, device):
    tensors, options = make(device, **sizes)
    out, logsumexp = forward(*tensors, **options)
    found = backward(out, *tensors, out, logsumexp, **options)
    assert [x.shape for x in found] == [x.shape for x in tensors]
    assert not any(x.any() for x in found)


@pytest.mark.parametrize(
    ("name", "value"),
    [("grad_out", torch.zeros(2, 2, 40, 32)), ("out", torch.zeros(2, 2, 40, 16).bfloat16()),
     ("logsumexp", torch.zeros(2, 2, 40).double())],
)  # fmt: skip
def test_wrong_tensors(name, value, device):
    tensors, options = make(device)
    out, logsumexp = forward(*tensors, **options)
    saved = {"grad_out": out, "out": out, "logsumexp": logsumexp, name: value.to(device)}
    grad_out, out, logsumexp = saved.values()
    text = rf"\[input\]: attention_backward_e4m3 argument '{name}'"
    with pytest.raises(RuntimeError, match=text):
        backward(grad_out, *tensors, out, logsumexp)


def test_derivatives_are_refused(device):
    tensors, options = make(device)
    out, logsumexp = forward(*tensors, **options)
    with pytest.raises(RuntimeError, match=r"\[input\]: attention_backward_e4m3 has no rule for"):
        backward(out.requires_grad_(), *tensors, out, logsumexp)


@pytest.mark.parametrize("name", ["plain", "factors of groups", "rows first"])
def test_opcheck(name, device):
    tensors, options = make(device, **CASES[name])
    with torch.no_grad():
        out, logsumexp = forward(*tensors, **options)
        args = (out, *tensors, out, logsumexp)
        torch.library.opcheck(RAW, args, options, test_utils=["test_faketensor"])


def operands(device, heads=4, shared=2, rows=64):
    shapes = ((2, heads, rows, 32), (2, shared, rows, 32), (2, shared, rows, 32))
    return [torch.randn(s, device=device).bfloat16().requires_grad_() for s in shapes]


def test_float8_attention(device):
    """Against gradients of the operands as they are: rounding them is most of the difference."""
    torch.manual_seed(0)
    q, k, v = operands(device)
    out = torch_cubin.float8_attention(q, k, v, is_causal=True)
    grad_out = torch.randn(out.shape, device=device).bfloat16()
    found = torch.autograd.grad(out, (q, k, v), grad_out)
    values = [x.detach().double().requires_grad_() for x in (q, k, v)]
    group = [values[0], *(x.repeat_interleave(2, 1) for x in values[1:])]
    wanted_out = torch.nn.functional.scaled_dot_product_attention(*group, is_causal=True)
    wanted = torch.autograd.grad(wanted_out, values, grad_out.double())
    assert (out.double() - wanted_out).norm() < 0.1 * wanted_out.norm()
    for x, y in zip(found, wanted, strict=True):
        assert x.dtype == torch.bfloat16
        assert (x.double() - y).norm() < 0.12 * y.norm()


def test_float8_attention_of_zeros(device):
    q, k, v = operands(device)
    zero = torch.zeros_like(v).requires_grad_()
    out = torch_cubin.float8_attention(q, k, zero)
    assert not out.any()
    (grad,) = torch.autograd.grad(out.sum(), (zero,))
    assert grad.isfinite().all()


def test_float8_attention_compiled(device, fresh_dynamo):
    q, k, v = operands(device)
    compiled = torch.compile(torch_cubin.float8_attention, backend="aot_eager", fullgraph=True)
    wanted = torch_cubin.float8_attention(q, k, v, is_causal=True)
    assert torch.equal(compiled(q, k, v, is_causal=True), wanted)
    for x, y in zip(
        torch.autograd.grad(compiled(q, k, v).square().sum(), (q, k, v)),
        torch.autograd.grad(torch_cubin.float8_attention(q, k, v).square().sum(), (q, k, v)),
        strict=True,
    ):
        assert torch.equal(x, y)


def test_float8_attention_without_rows(device):
    q, k, v = operands(device)
    out = torch_cubin.float8_attention(q[:, :, :0], k, v)
    assert out.shape == (*q.shape[:2], 0, v.shape[3])


def test_float8_attention_rounds_no_head_without_its_scale(device):
    """A NaN makes its head NaN: no factor would be right for the head's other elements."""
    q, k, v = operands(device)
    own = torch_cubin.float8_attention(q, k, v)
    with torch.no_grad():
        v[0, 0, -1, 0] = torch.nan
    out = torch_cubin.float8_attention(q, k, v)
    heads = q.shape[1] // k.shape[1]
    assert out[0, :heads].isnan().all()
    assert torch.equal(out[0, heads:], own[0, heads:])


def test_float8_attention_refuses_values_of_other_heads(device):
    q, k, v = operands(device)
    with pytest.raises(torch_cubin.Error, match=r"\[input\].*'value' has a wrong number of heads"):
        torch_cubin.float8_attention(q, k, v[:, :1].expand(-1, k.shape[1] + 1, -1, -1))


@pytest.mark.parametrize("changed", ["dtype", "rank", "heads"])
def test_float8_attention_refuses(changed, device):
    q, k, v = operands(device)
    other = {"dtype": k.float(), "rank": k[0], "heads": k.repeat(1, 2, 1, 1)[:, :3]}[changed]
    with pytest.raises(
        torch_cubin.Error, match=r"\[input\]: torch_cubin.float8_attention argument"
    ):
        torch_cubin.float8_attention(q, other, v)
