"""Sinks that learn: fused as without them, with gradients of every order by the formula."""

from __future__ import annotations

import pytest
import torch
from ops.attention_samples import formula, kept_weights, make_qkv, ops
from ops.samples import DTYPES
from ops.test_attention_semantics import near
from recorded_ops import RecordedOps
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_cubin._ops import attention_autograd, attention_compose
from torch_cubin._ops.attention_checks import saved_dtype

SHAPES = ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6))
OFFSETS = ((0, 3, 3, 8, 10), (0, 4, 6, 6, 11))

# Dims of the tensors among them.
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True, "bottom_right": True},
    "fully masked rows": {"window_left": 1, "window_right": -1, "attn_mask": "rows"},
    "added mask": {"attn_mask": "added", "scale": 0.3},
    "scores": {"softcap": 1.5, "alibi_slopes": (4,), "window_left": 3, "is_causal": True},
}


def make_sinks(device: str, count: int = 4) -> torch.Tensor:
    return torch.randn(count, device=device).requires_grad_()


def with_tensors(options: dict, device: str) -> dict:
    mask = torch.randn(2, 1, 5, 7, device=device)
    rows = (mask > -0.5) & (torch.arange(5, device=device)[:, None] != 2)
    masks = {"rows": rows, "added": mask}
    made = {
        name: torch.rand(value, device=device) if isinstance(value, tuple) else value
        for name, value in options.items()
    }
    if "attn_mask" in made:
        made["attn_mask"] = masks[made["attn_mask"]]
    return {"enable_gqa": True, **made}


@pytest.fixture
def no_composition(monkeypatch) -> None:
    def composed(*args, **kwargs):
        raise AssertionError("composed of ops that hold the scores")

    monkeypatch.setattr(attention_compose, "attention", composed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients(options, dtype, device, no_composition):
    args, sinks = make_qkv(SHAPES, device, dtype, requires_grad=True), make_sinks(device)
    options = with_tensors(options, device)
    out, _ = ops.attention_forward(*args, **options, sinks=sinks)
    weight = torch.randn_like(out)
    wide = [x.detach().double().requires_grad_() for x in (*args, sinks)]
    expected, _ = formula(*wide[:3], **options, sinks=wide[3])
    expected = torch.autograd.grad(expected, wide, weight.double())
    grads = torch.autograd.grad(out, (*args, sinks), weight, retain_graph=True)
    for own, grad, wanted in zip((*args, sinks), grads, expected, strict=True):
        assert grad.dtype == own.dtype
        near(grad, wanted, torch.float32 if own is sinks and dtype is torch.float64 else dtype)
    # Asked for alone it is the same.
    assert torch.equal(torch.autograd.grad(out, sinks, weight)[0], grads[3])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_products_of_outputs_are_not_rounded(dtype, device):
    """As exact as the saved outputs are: the sums over columns and rows are float32's."""
    args = make_qkv(((2, 4, 50, 64), (2, 4, 50, 64), (2, 4, 50, 64)), device, dtype)
    sinks = make_sinks(device)
    out, logsumexp = ops.attention_forward(*args, sinks=sinks)
    weight = torch.randn_like(out)
    (grad,) = torch.autograd.grad(out, sinks, weight)
    weights = torch.exp(sinks.detach().double()[:, None] - logsumexp.detach().double())
    terms = weights * (weight.double() * out.detach().double()).sum(-1)
    near(grad, -terms.sum((0, 2)), torch.float32)


def test_saved_tensors_hooks_and_in_place_changes(device, no_composition):
    args, sinks = make_qkv(SHAPES, device), make_sinks(device)
    packed: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: packed.append(x.data_ptr()) or x, lambda x: x
    ):
        ops.attention_forward(*args, enable_gqa=True, sinks=sinks)
    assert sinks.data_ptr() in packed
    out, _ = ops.attention_forward(*args, enable_gqa=True, sinks=sinks)
    with torch.no_grad():
        sinks += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), sinks)


@pytest.mark.parametrize("shapes", [((5, 8), (7, 8), (7, 8)), ((3, 2, 2, 5, 8), (2, 7, 8), (7, 8))])
def test_any_number_of_dims(shapes, device, no_composition):
    heads = shapes[0][-3] if len(shapes[0]) > 2 else 1
    args, sinks = make_qkv(shapes, device), make_sinks(device, heads)
    wide = sinks.detach().double().requires_grad_()
    matrices = [x.reshape(-1, *x.shape[-2:]) if x.dim() < 3 else x for x in args]
    (expected,) = torch.autograd.grad(formula(*matrices, sinks=wide)[0].sin().sum(), wide)
    (grad,) = torch.autograd.grad(ops.attention_forward(*args, sinks=sinks)[0].sin().sum(), sinks)
    near(grad, expected)


def test_dropout(device, no_composition):
    args, sinks = make_qkv(SHAPES, device), make_sinks(device)
    seed = torch.tensor([99], device=device)
    kept = kept_weights((2, 4, 5, 7), 0.4, seed, device)
    wide = sinks.detach().double().requires_grad_()
    expected, _ = formula(*args, kept=kept, enable_gqa=True, sinks=wide)
    (expected,) = torch.autograd.grad(expected.sin().sum(), wide)
    out, _ = ops.attention_forward(*args, None, 0.4, False, seed, enable_gqa=True, sinks=sinks)
    near(torch.autograd.grad(out.sin().sum(), sinks)[0], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_sequences(dtype, device, no_composition):
    """One of no rows, one without keys, and rows that belong to none, whose gradient may be
    anything."""
    shapes = ((12, 4, 8), (12, 2, 8), (12, 2, 6))
    args, sinks = make_qkv(shapes, device, dtype, requires_grad=True), make_sinks(device)
    at = [torch.tensor(x, dtype=torch.int32, device=device) for x in OFFSETS]
    out, _ = ops.attention_forward(
        *args, enable_gqa=True, is_causal=True, cu_seqlens_q=at[0], cu_seqlens_k=at[1], sinks=sinks
    )
    weight = torch.randn_like(out)
    weight[10:] = torch.nan
    grads = torch.autograd.grad(out, (*args, sinks), weight)
    total = torch.zeros(4, dtype=torch.float64, device=device)
    for i in range(4):
        rows, columns = (slice(int(x[i]), int(x[i + 1])) for x in at)
        parts = (args[0][rows], args[1][columns], args[2][columns])
        wide = [x.detach().double().transpose(0, 1).requires_grad_() for x in parts]
        own = sinks.detach().double().requires_grad_()
        one, _ = formula(*wide, enable_gqa=True, is_causal=True, sinks=own)
        expected = torch.autograd.grad(one, (*wide, own), weight[rows].double().transpose(0, 1))
        total += expected[3]
        for grad, part, wanted in zip(grads, (rows, columns, columns), expected, strict=False):
            near(grad[part].transpose(0, 1), wanted, dtype)
    near(grads[3], total, dtype)


def test_flash_attention(device, no_composition):
    args = [torch.randn(2, 5, 4, 8, device=device, requires_grad=True) for _ in range(3)]
    sinks = make_sinks(device)
    out = ops.flash_attention(*args, is_causal=True, sinks=sinks)
    wide = [x.detach().double().requires_grad_() for x in (*args, sinks)]
    expected, _ = formula(*(x.transpose(1, 2) for x in wide[:3]), is_causal=True, sinks=wide[3])
    expected = torch.autograd.grad(expected.sin().sum(), wide)
    for grad, wanted in zip(
        torch.autograd.grad(out.sin().sum(), (*args, sinks)), expected, strict=True
    ):
        near(grad, wanted)


@pytest.mark.parametrize("of_logsumexp", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_second_order(dtype, of_logsumexp, device):
    """Of every gradient by every tensor."""
    args, sinks = make_qkv(SHAPES, device, dtype, requires_grad=True), make_sinks(device)
    wide = [x.detach().double().requires_grad_() for x in (*args, sinks)]
    results = []
    for op, tensors in ((ops.attention_forward, [*args, sinks]), (formula, wide)):
        out, logsumexp = op(*tensors[:3], is_causal=True, enable_gqa=True, sinks=tensors[3])
        loss = out.sin().sum() + (logsumexp.sin().sum() if of_logsumexp else 0)
        first = torch.autograd.grad(loss, tensors, create_graph=True)
        second = torch.autograd.grad(sum(x.pow(2).sum() for x in first), tensors)
        results.append([*(x.detach() for x in first), *second])
    for one, other in zip(*results, strict=True):
        near(one, other, torch.float32)


def test_in_a_compiled_graph(device):
    args, sinks = make_qkv(SHAPES, device, requires_grad=True), make_sinks(device)

    def loss(*tensors):
        options = {"is_causal": True, "enable_gqa": True, "sinks": tensors[3]}
        return ops.attention_forward(*tensors[:3], **options)[0].sin().sum()

    ours = torch.compile(loss, backend="aot_eager", fullgraph=True)
    tensors = (*args, sinks)
    expected = torch.autograd.grad(loss(*tensors), tensors)
    for one, other in zip(torch.autograd.grad(ours(*tensors), tensors), expected, strict=True):
        near(one, other)


def test_trainable_slopes_do_not_hide_the_sinks(device):
    """Slopes are composed; sinks beside them get their gradient all the same."""
    args, sinks = make_qkv(SHAPES, device), make_sinks(device)
    slopes = torch.rand(4, device=device, requires_grad=True)
    results = []
    for op in (ops.attention_forward, formula):
        out, _ = op(*args, enable_gqa=True, sinks=sinks, alibi_slopes=slopes)
        results.append(torch.autograd.grad(out.sin().sum(), (sinks, slopes)))
    for one, other in zip(*results, strict=True):
        near(one, other)


def test_packed_sequences_with_trainable_slopes_are_refused(device):
    args, sinks = make_qkv(((8, 4, 8),) * 3, device), make_sinks(device)
    at = torch.tensor([0, 3, 8], dtype=torch.int32, device=device)
    options = {"cu_seqlens_q": at, "cu_seqlens_k": at, "sinks": sinks}
    slopes = torch.rand(4, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"\[input\]: attention_forward argument 'alibi_slopes'"):
        ops.attention_forward(*args, **options, alibi_slopes=slopes)
    out, _ = ops.attention_forward(*args, **options)
    (grad,) = torch.autograd.grad(out.sin().sum(), sinks, create_graph=True)
    with pytest.raises(RuntimeError, match=r"argument 'cu_seqlens_q' cannot be differentiated so"):
        torch.autograd.grad(grad.sum(), sinks)


@pytest.mark.parametrize(
    "shape", [(2, 4, 5, 8), (3, 4, 5, 6), (5, 8), (2, 3, 4, 5, 8), (0, 4, 5, 8)]
)
def test_shapes_of_the_op_that_a_gpu_has(shape):
    """As a trace of backward() calls it: 16-bit types and float32 with gradients off."""
    heads = shape[-3] if len(shape) > 2 else 1
    for dtype in DTYPES:
        for mode in (torch.no_grad, torch.enable_grad):
            with FakeTensorMode(), mode(), RecordedOps() as found:
                out = torch.empty(shape, device="cuda", dtype=dtype)
                logsumexp = torch.empty(shape[:-1], device="cuda", dtype=saved_dtype(out))
                sinks = torch.empty(heads, device="cuda")
                grad = attention_autograd._gradient_of_sinks(out, out, logsumexp, sinks)
            assert (grad.shape, grad.dtype) == (sinks.shape, torch.float32)
            by_kernel = mode is torch.no_grad and dtype is not torch.float64
            assert ("cubin::_attention_sinks_gradient" in found.names) == by_kernel
