"""Gradients of attention: by the backward op or composed, of every order, none silently wrong."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from ops.attention_samples import (
    SHAPES,
    SHARED,
    attention,
    case_id,
    formula,
    kept_weights,
    make_qkv,
    ops,
    reference,
    stock,
)
from ops.samples import DTYPES, assert_near
from ops.test_attention_semantics import OPTIONS, near, option_id, with_tensors
from ops.test_transforms import TRANSFORMS
from recorded_ops import RecordedOps
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

SMALL = ((2, 2, 3), (2, 3, 3), (2, 3, 2))
CROSS = ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8))


def stock_gradients(args, weight, *rest, **options) -> list[torch.Tensor]:
    """Of torch's attention, in float64."""
    args = [arg.detach().double().requires_grad_() for arg in args]
    rest = [
        x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in rest
    ]
    out = reference(*args, *rest, **options)
    return torch.autograd.grad(out, args, weight.double(), materialize_grads=True)


def check(shapes, device, dtype, *rest, **options) -> None:
    args = make_qkv(shapes, device, dtype, requires_grad=True)
    out = attention(*args, *rest, **options)
    weight = torch.randn_like(out)
    grads = torch.autograd.grad(out, args, weight)
    expected = stock_gradients(args, weight, *rest, **options)
    for arg, grad, wanted in zip(args, grads, expected, strict=True):
        assert grad.shape == arg.shape
        near(grad, wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shapes", SHAPES, ids=case_id)
def test_as_torch(shapes, dtype, device):
    check(shapes, device, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shapes", SHARED, ids=case_id)
def test_heads_of_a_group(shapes, dtype, device):
    check(shapes, device, dtype, enable_gqa=True)
    check(shapes, device, dtype, enable_gqa=True, is_causal=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masks_and_scales(dtype, device):
    mask = torch.randn(3, 5, 7, device=device)
    for one in (mask > -0.5, mask, mask.to(dtype), mask[:, :1], (mask > 0)[0]):
        check(CROSS, device, dtype, one)
    check(CROSS, device, dtype, scale=0.2)
    check(CROSS, device, dtype, is_causal=True)


def test_wide_heads(device):
    check(((1, 2, 5, 264), (1, 2, 7, 264), (1, 2, 7, 8)), device, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=option_id)
def test_options(options, dtype, device):
    args = make_qkv(CROSS, device, dtype, requires_grad=True)
    options = with_tensors(options, device)
    out, _ = ops.attention_forward(*args, **options)
    weight = torch.randn_like(out)
    wide = [arg.detach().double().requires_grad_() for arg in args]
    expected = torch.autograd.grad(formula(*wide, **options)[0], wide, weight.double())
    for grad, wanted in zip(torch.autograd.grad(out, args, weight), expected, strict=True):
        near(grad, wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout_under_a_fixed_seed(dtype, device):
    args = make_qkv(CROSS, device, dtype, requires_grad=True)
    seed = torch.tensor([99], device=device)
    out, _ = ops.attention_forward(*args, None, 0.4, False, seed)
    weight = torch.randn_like(out)
    kept = kept_weights((2, 3, 5, 7), 0.4, seed, device)
    wide = [arg.detach().double().requires_grad_() for arg in args]
    expected = torch.autograd.grad(formula(*wide, kept=kept)[0], wide, weight.double())
    for grad, wanted in zip(torch.autograd.grad(out, args, weight), expected, strict=True):
        near(grad, wanted, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_sequences(dtype, device):
    args = make_qkv(((8, 4, 8), (11, 2, 8), (11, 2, 6)), device, dtype, requires_grad=True)
    q_at, k_at = (
        torch.tensor(x, dtype=torch.int32, device=device) for x in ((0, 3, 3, 8), (0, 4, 6, 11))
    )
    options = {"cu_seqlens_q": q_at, "cu_seqlens_k": k_at, "enable_gqa": True, "is_causal": True}
    out, _ = ops.attention_forward(*args, **options)
    weight = torch.randn_like(out)
    grads = torch.autograd.grad(out, args, weight)
    for i in range(3):
        rows, columns = slice(q_at[i], q_at[i + 1]), slice(k_at[i], k_at[i + 1])
        parts = (args[0][rows], args[1][columns], args[2][columns])
        wide = [x.detach().double().transpose(0, 1).requires_grad_() for x in parts]
        one, _ = formula(*wide, enable_gqa=True, is_causal=True)
        expected = torch.autograd.grad(one, wide, weight[rows].double().transpose(0, 1))
        for grad, own, wanted in zip(grads, (rows, columns, columns), expected, strict=True):
            near(grad[own].transpose(0, 1), wanted, dtype)


GRADCHECKS = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 0.7},
    "window": {"window_left": 1, "window_right": 1},
}


@pytest.mark.parametrize("name", GRADCHECKS)
def test_gradcheck(name, device):
    args = make_qkv(SMALL, device, torch.float64, requires_grad=True)
    options = GRADCHECKS[name]
    with warnings.catch_warnings():  # the older vmap of is_grads_batched loops, and says so
        warnings.filterwarnings("ignore", "There is a performance drop")
        assert gradcheck(
            lambda *args: ops.attention_forward(*args, **options),  # of the logsumexp as well
            args,
            check_forward_ad=True,
            check_batched_grad=True,
            check_batched_forward_grad=True,
            check_undefined_grad=True,
        )
    assert gradgradcheck(lambda *args: ops.attention_forward(*args, **options)[0], args)


def test_gradgradcheck_in_every_mixture(device):
    args = make_qkv(SMALL, device, torch.float64, requires_grad=True)
    assert gradgradcheck(attention, args, check_fwd_over_rev=True, check_rev_over_rev=True)


def test_gradcheck_of_a_mask(device):
    args = make_qkv(SMALL, device, torch.float64, requires_grad=True)
    for shape in ((2, 3), (2, 1, 3), (2, 2, 1)):
        mask = torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True)
        assert gradcheck(attention, (*args, mask), check_forward_ad=True)
        assert gradcheck(attention, (*(arg.detach() for arg in args), mask))
    assert gradgradcheck(attention, (*args, mask))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_a_mask_as_torch(dtype, device):
    args = make_qkv(CROSS, device, dtype, requires_grad=True)
    for shape in ((5, 7), (2, 1, 5, 7), (3, 1, 7)):
        mask = torch.randn(shape, dtype=dtype, device=device, requires_grad=True)
        out = attention(*args, mask)
        weight = torch.randn_like(out)
        wide = [x.detach().double().requires_grad_() for x in (*args, mask)]
        expected = torch.autograd.grad(stock(*wide), wide, weight.double())
        grads = torch.autograd.grad(out, (*args, mask), weight)
        for grad, wanted in zip(grads, expected, strict=True):
            near(grad, wanted, dtype)


def test_gradients_of_dropout_of_second_order(device):
    args = make_qkv(SMALL, device, torch.float64, requires_grad=True)
    seed = torch.tensor([3], device=device)

    def dropped(*args):
        return ops.attention_forward(*args, None, 0.5, False, seed)[0]

    assert gradcheck(dropped, args, check_forward_ad=True)
    assert gradgradcheck(dropped, args)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logsumexp_has_a_gradient(dtype, device):
    args = make_qkv(CROSS, device, dtype, requires_grad=True)
    wide = [arg.detach().double().requires_grad_() for arg in args]
    out, logsumexp = ops.attention_forward(*args, is_causal=True)
    expected, expected_logsumexp = formula(*wide, is_causal=True)
    for loss in (lambda out, lse: lse.sum(), lambda out, lse: (out * lse.unsqueeze(-1)).sum()):
        grads = torch.autograd.grad(
            loss(out, logsumexp), args, retain_graph=True, materialize_grads=True
        )
        wanted = torch.autograd.grad(
            loss(expected, expected_logsumexp), wide, retain_graph=True, materialize_grads=True
        )
        for one, other in zip(grads, wanted, strict=True):
            near(one, other, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_double_backward(dtype, device):
    shapes = ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8))
    args = make_qkv(shapes, device, dtype, requires_grad=True)
    results = []
    for op in (attention, lambda *args, **options: formula(*args, **options)[0]):
        wide = args if op is attention else [arg.detach().double().requires_grad_() for arg in args]
        out = op(*wide, is_causal=True, enable_gqa=True)
        first = torch.autograd.grad(out.sin().sum(), wide, create_graph=True)
        results.append(torch.autograd.grad(sum(g.pow(2).sum() for g in first), wide))
    for one, other in zip(*results, strict=True):
        near(one, other, dtype)


def test_one_tensor_as_query_key_and_value(device):
    x = torch.randn(2, 5, 4, dtype=torch.float64, device=device, requires_grad=True)
    results = []
    for op in (attention, lambda *args: formula(*args)[0]):
        (first,) = torch.autograd.grad(op(x, x, x).sin().sum(), x, create_graph=True)
        results.append([first.detach(), *torch.autograd.grad(first.pow(2).sum(), x)])
    assert_near(*results)


@pytest.mark.parametrize("wanted", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0)])
@pytest.mark.parametrize("second_order", [False, True])
def test_only_what_requires_grad_gets_one(wanted, second_order, device):
    args = make_qkv(CROSS, device)
    for arg, need in zip(args, wanted, strict=True):
        arg.requires_grad_(bool(need))
    with RecordedOps() as calls:
        out = attention(*args)
        out.sin().sum().backward(create_graph=second_order)
    assert [arg.grad is not None for arg in args] == [bool(need) for need in wanted]
    if not second_order:
        names = [name for name, *_ in calls.ours]
        assert names == ["_attention_forward_autograd", "_attention_backward"]
    wide = [arg.detach().double().requires_grad_(arg.requires_grad) for arg in args]
    given = [arg for arg in wide if arg.requires_grad]
    grads = [arg.grad for arg in args if arg.grad is not None]
    expected = torch.autograd.grad(stock(*wide).sin().sum(), given)
    for grad, other in zip(grads, expected, strict=True):
        near(grad.detach(), other, torch.float32)
        assert grad.requires_grad == second_order


def test_no_autograd_graph_without_grad_mode(device):
    args = make_qkv(CROSS, device, requires_grad=True)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), RecordedOps() as calls:
            assert not attention(*args).requires_grad
        assert [name.lstrip("_") for name, *_ in calls.ours] == ["scaled_dot_product_attention"]
    detached = [arg.detach() for arg in args]
    assert not attention(*detached).requires_grad
    out, logsumexp = ops.attention_forward(*args)
    assert out.requires_grad
    assert logsumexp.requires_grad


def test_no_derivative_of_aten_leaks_from_the_raw_ops(device):
    """The CPU kernels may be made of ATen, whose derivatives would hide a missing one of ours."""
    args = make_qkv(CROSS, device, requires_grad=True)
    detached = [arg.detach() for arg in args]
    saved = ops._attention_forward(*detached)
    calls = (
        lambda *args: ops._scaled_dot_product_attention(*args),
        lambda *args: ops._attention_forward(*args)[0],
        lambda *args: ops._attention_backward(saved[0], *args, *saved)[0],
    )
    for op in calls:
        out = op(*args)
        with pytest.warns(UserWarning, match="autograd kernel was not registered"):
            out.sum().backward()
        assert all(arg.grad is None for arg in args)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(detached[0], torch.ones_like(args[0]))
            assert forward_ad.unpack_dual(op(dual, *detached[1:])).tangent is None


def test_tangents_of_dual_tensors(device):
    args, tangents = (make_qkv(SMALL, device, torch.float64) for _ in range(2))
    _, expected = torch.func.jvp(lambda *args: formula(*args)[0], tuple(args), tuple(tangents))
    for grad in (True, False):
        with torch.set_grad_enabled(grad), forward_ad.dual_level():
            duals = map(forward_ad.make_dual, args, tangents)
            both = forward_ad.unpack_dual(attention(*duals)).tangent
            none = forward_ad.unpack_dual(attention(*args)).tangent
        assert_near(both, expected)
        assert none is None


@pytest.mark.parametrize("name", TRANSFORMS)
def test_under_transforms(name, device):
    x = torch.randn(2, 3, 3, dtype=torch.float64, device=device)

    def f(op):
        return lambda x: op(x, x.sin(), x.cos(), is_causal=True).sin().sum()

    expected = TRANSFORMS[name](f(lambda *args, **options: formula(*args, **options)[0]))(x)
    assert_near(TRANSFORMS[name](f(attention))(x), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_transforms_of_other_dtypes(dtype, device):
    query, key, value = make_qkv(CROSS, device, dtype)

    def loss(op):
        return lambda query: op(query, key, value, enable_gqa=False).double().sin().sum()

    grad = torch.func.grad(loss(attention))(query)
    assert grad.dtype == dtype
    near(grad, torch.func.grad(lambda q: loss(stock)(q))(query.double().to(dtype)), dtype)
    per_sample = torch.func.vmap(torch.func.grad(lambda q: attention(q, key, value).sum()))
    assert per_sample(torch.stack([query, query])).shape == (2, *query.shape)


def test_backward_is_an_op_that_can_be_differentiated(device):
    args = make_qkv(SMALL, device, torch.float64, requires_grad=True)
    gradient = torch.randn(2, 2, 2, dtype=torch.float64, device=device, requires_grad=True)

    def backward(gradient, *args):
        out, logsumexp = ops.attention_forward(*args)
        return ops.attention_backward(gradient, *args, out, logsumexp)

    expected = torch.autograd.grad(attention(*args), args, gradient)
    assert_near(list(backward(gradient, *args)), list(expected))
    assert gradcheck(backward, (gradient, *args))


def tagged(call) -> str:
    with pytest.raises(RuntimeError, match=r"torch_cubin \[input\]: ") as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("name", ["sinks", "alibi_slopes"])
def test_per_head_parameters_have_gradients(name, device):
    args = make_qkv(SMALL, device, torch.float64, requires_grad=True)
    own = torch.rand(2, device=device, requires_grad=True)
    for some in (args, [arg.detach() for arg in args]):
        out, logsumexp = ops.attention_forward(*some, **{name: own})
        expected, expected_logsumexp = formula(*some, **{name: own})
        (grad,) = torch.autograd.grad(out.sin().sum() + logsumexp.sum(), own)
        loss = expected.sin().sum() + expected_logsumexp.sum()
        assert_near(grad, torch.autograd.grad(loss, own)[0])

    def loss(x):
        return ops.attention_forward(*args, **{name: x})[0].sin().sum()

    expected = torch.func.grad(lambda x: formula(*args, **{name: x})[0].sin().sum())(own.detach())
    assert_near(torch.func.grad(loss)(own.detach()), expected)
    with torch.no_grad():
        assert not ops.attention_forward(*args, **{name: own})[0].requires_grad


def test_a_sink_of_minus_infinity_has_no_gradient_for_fully_masked_rows(device):
    """exp(-inf - -inf), if it were computed."""
    args = make_qkv(SMALL, device, torch.float64)
    sinks = torch.tensor([-torch.inf, 0.5], device=device, requires_grad=True)
    mask = torch.ones(2, 3, dtype=torch.bool, device=device)
    mask[1] = False

    def loss(sinks):
        return ops.attention_forward(*args, mask, sinks=sinks)[0].sin().sum()

    (grad,) = torch.autograd.grad(loss(sinks), sinks, create_graph=True)
    assert grad[0] == 0
    assert grad[1] != 0
    (second,) = torch.autograd.grad(grad.sum(), sinks)
    assert second.isfinite().all()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(sinks.detach(), torch.ones_like(sinks))
        assert_near(forward_ad.unpack_dual(loss(dual)).tangent.float(), grad.sum())


def test_missing_second_derivatives_raise(device):
    args = make_qkv(CROSS, device)
    saved = ops.attention_forward(*args)
    out = saved[0]
    given = [out, *args, *saved]
    for i, name in ((4, "out"), (5, "logsumexp")):
        own = [x.detach().requires_grad_(j == i) for j, x in enumerate(given)]
        assert f"'{name}'" in tagged(lambda own=own: ops.attention_backward(*own))

    def by_query(query):
        return ops.attention_backward(out, query, *args[1:], *saved)[0].sum()

    tagged(lambda: torch.func.grad(by_query)(args[0]))
    tagged(lambda: torch.func.jvp(by_query, (args[0],), (args[0],)))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(args[0], torch.ones_like(args[0]))
        tagged(lambda: by_query(dual))
    # No differentiated tensor reaches it here.
    torch.func.grad(lambda x: (x * by_query(args[0])).sum())(args[0])

    rows = [torch.randn(6, 2, 8, device=device, requires_grad=True) for _ in range(3)]
    offsets = torch.tensor([0, 2, 6], dtype=torch.int32, device=device)
    packed = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    out, _ = ops.attention_forward(*rows, **packed)
    tagged(lambda: torch.autograd.grad(out.sin().sum(), rows, create_graph=True))
    tagged(lambda: torch.autograd.grad(ops.attention_forward(*rows, **packed)[1].sum(), rows))


@pytest.mark.parametrize("kind", ["plain", "mask", "dropout", "float64"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(use_reentrant, kind, device):
    dtype = torch.float64 if kind == "float64" else torch.float32
    args = make_qkv(CROSS, device, dtype, requires_grad=True)
    mask = None
    if kind == "mask":
        mask = torch.randn(5, 7, device=device, requires_grad=True)
        args.append(mask)

    def block(query, key, value, mask=None):
        return attention(query.sin(), key, value, mask, 0.5 if kind == "dropout" else 0.0)

    results = []
    for run in (block, functools.partial(checkpoint, block, use_reentrant=use_reentrant)):
        torch.manual_seed(11)
        out = run(*args)
        torch.rand(3, device=device)  # the state goes on before backward computes again
        for arg in args:
            arg.grad = None
        out.sum().backward()
        results.append([out.detach(), *(arg.grad for arg in args)])
    assert_near(*results)


def test_nested_and_selective_checkpointing(device):
    args = make_qkv(CROSS, device, requires_grad=True)

    def block(query, key, value):
        return attention(attention(query, key, value).sin(), key, value)

    def nested(query, key, value):
        inner = checkpoint(attention, query, key, value, use_reentrant=False)
        return attention(inner.sin(), key, value)

    expected = torch.autograd.grad(block(*args).sum(), args)
    out = checkpoint(nested, *args, use_reentrant=False)
    assert_near(torch.autograd.grad(out.sum(), args), expected)
    saved = [ops._attention_forward_autograd.default]  # what a policy sees of the public op
    contexts = functools.partial(create_selective_checkpoint_contexts, saved)
    with RecordedOps() as calls:
        out = checkpoint(block, *args, use_reentrant=False, context_fn=contexts)
        assert_near(torch.autograd.grad(out.sum(), args), expected)
    assert [name for name, *_ in calls.ours].count("_attention_forward_autograd") == 2


def test_saved_tensors_hooks_and_in_place_changes(device):
    args = make_qkv(CROSS, device, requires_grad=True)
    expected = torch.autograd.grad(attention(*args).sum(), args)
    with torch.autograd.graph.save_on_cpu():
        out = attention(*args)
    assert_near(torch.autograd.grad(out.sum(), args), expected)

    mask = torch.zeros(5, 7, device=device)
    for change in (0, 1, 2, "mask", "out"):
        copies = [arg * 1 for arg in args]
        out = attention(*copies, mask)
        changed = {"mask": mask, "out": out}[change] if isinstance(change, str) else copies[change]
        with torch.no_grad():
            changed.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_an_error_of_a_saved_tensor_hook_keeps_its_text(device):
    def refuse(tensor):
        raise ValueError("nothing may be saved here")

    args = make_qkv(CROSS, device, requires_grad=True)
    with (
        torch.autograd.graph.saved_tensors_hooks(refuse, lambda t: t),
        pytest.raises(RuntimeError, match="nothing may be saved here"),
    ):
        attention(*args)


def test_backward_under_autocast_keeps_the_dtype_of_the_forward(device):
    """As torch's own does: casting would round gradients of a float32 attention to 16 bits."""
    args = make_qkv(CROSS, device, requires_grad=True)
    expected = torch.autograd.grad(attention(*args).sum(), args)
    out = attention(*args)
    with torch.autocast(device, dtype=torch.bfloat16):
        grads = torch.autograd.grad(out.sum(), args)
    assert all(map(torch.equal, grads, expected))
