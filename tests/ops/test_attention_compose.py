"""Attention by composition: values, derivatives of every order, and the private ops in it."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from ops.attention_samples import SHAPES, SHARED, case_id, formula, kept_weights, make_qkv
from ops.samples import assert_near
from ops.test_transforms import TRANSFORMS
from recorded_ops import RecordedOps
from torch.autograd import gradcheck, gradgradcheck
from torch.func import vmap

from torch_cubin._ops import attention_checks, attention_compose, softmax

ops = torch.ops.cubin
SMALL = ((1, 2, 2, 2), (1, 1, 3, 2), (1, 1, 3, 2))  # few numbers: each is moved by gradcheck

# What a call adds to query, key and value; a function of the device, for scores (2, 4, 5, 7).
FEATURES = {
    "plain": lambda device: {},
    "scale": lambda device: {"scale": 0.3},
    "causal": lambda device: {"is_causal": True},
    "window": lambda device: {"window_left": 2, "window_right": 1},
    "bottom right": lambda device: {"is_causal": True, "bottom_right": True},
    "softcap": lambda device: {"softcap": 1.5, "scale": 1.0},
    "alibi": lambda device: {"alibi_slopes": torch.rand(4, device=device)},
    "alibi of each batch": lambda device: {"alibi_slopes": torch.rand(2, 4, device=device)},
    "sinks": lambda device: {"sinks": torch.randn(4, device=device)},
    "bool mask": lambda device: {"attn_mask": torch.rand(5, 7, device=device) > 0.3},
    "float mask": lambda device: {"attn_mask": torch.randn(4, 1, 7, device=device)},
    "mask of each batch": lambda device: {"attn_mask": torch.randn(2, 1, 5, 7, device=device)},
    "all": lambda device: {
        "attn_mask": torch.randn(2, 4, 5, 7, device=device),
        "window_left": 3,
        "bottom_right": True,
        "softcap": 2.0,
        "alibi_slopes": torch.rand(4, device=device),
        "sinks": torch.randn(4, device=device),
    },
}
DTYPES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def make_call(name: str, device: str, dtype: torch.dtype = torch.float64) -> tuple[list, dict]:
    """query, key and value of 4 heads, of which two share a key; and the arguments of a feature."""
    qkv = make_qkv(((2, 4, 5, 6), (2, 2, 7, 6), (2, 2, 7, 3)), device, dtype)
    return qkv, {"enable_gqa": True, **FEATURES[name](device)}


def check_near(actual, expected, limit: float) -> None:
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=limit, atol=limit)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("name", FEATURES)
def test_values_and_gradients_by_the_formula(name, dtype, device):
    qkv, options = make_call(name, device, dtype)
    inputs = [*qkv, *(x for x in options.values() if torch.is_tensor(x) and x.dtype != torch.bool)]
    for tensor in inputs:
        tensor.requires_grad_()
    outputs = attention_compose.attention(*qkv, **options)
    expected = formula(*qkv, **options)
    assert outputs[0].dtype == dtype
    assert outputs[1].dtype == attention_checks.saved_dtype(qkv[0])
    check_near(outputs, expected, DTYPES[dtype])
    weights = [torch.randn_like(x) for x in outputs]
    grads = torch.autograd.grad(outputs, inputs, weights)
    wanted = torch.autograd.grad(expected, inputs, [x.double() for x in weights])
    assert [x.dtype for x in grads] == [x.dtype for x in inputs]
    # float32 tensors beside float64 ones get gradients of float32.
    for grad, other in zip(grads, wanted, strict=True):
        check_near([grad], [other], 4 * max(DTYPES[dtype], DTYPES[grad.dtype]))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("name", FEATURES)
def test_ops_without_gradients_agree(name, dtype, device):
    """On CUDA, float64 is composed in C++: by the same kernels, and with its own backward."""
    qkv, options = make_call(name, device, dtype)
    limit = DTYPES[dtype]
    for tensor in qkv:
        tensor.requires_grad_()
    outputs = attention_compose.attention(*qkv, **options)
    grad = torch.randn_like(outputs[0])
    expected = torch.autograd.grad(outputs[0], qkv, grad)
    with torch.no_grad():
        found = ops.attention_forward(*qkv, **options)
        check_near(found, outputs, limit)
        check_near(ops.attention_backward(grad, *qkv, *found, **options), expected, 4 * limit)


@pytest.mark.parametrize("head_dims", [(300, 7), (8, 520)], ids=["wide", "wide value"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_wide_heads(head_dims, dtype, device):
    e, ev = head_dims
    q, k, v = make_qkv(((2, 6, 9, e), (2, 2, 33, e), (2, 2, 33, ev)), device, dtype)
    expected = formula(q, k, v, enable_gqa=True)
    with torch.no_grad():
        check_near(ops.attention_forward(q, k, v, enable_gqa=True), expected, DTYPES[dtype])
    check_near(attention_compose.attention(q, k, v, enable_gqa=True), expected, DTYPES[dtype])


@pytest.mark.parametrize("columns", [1, 31, 33, 4096, 4097, 20000])
def test_long_rows(columns, device):
    """A row is a warp's up to 4096 columns, the block's beyond."""
    q, k, v = make_qkv(
        ((1, 2, 3, 8), (1, 2, columns, 8), (1, 2, columns, 8)), device, torch.float64
    )
    for tensor in (q, k, v):
        tensor.requires_grad_()
    outputs = attention_compose.attention(q, k, v, softcap=3.0)
    expected = formula(q, k, v, softcap=3.0)
    check_near(outputs, expected, 1e-12)
    check_near(
        torch.autograd.grad(outputs[0].sin().sum(), (q, k, v)),
        torch.autograd.grad(expected[0].sin().sum(), (q, k, v)),
        1e-12,
    )


@pytest.mark.parametrize("shapes", SHAPES + SHARED, ids=case_id)
def test_every_shape_as_torch(shapes, device):
    q, k, v = make_qkv(shapes, device, torch.float64, requires_grad=True)
    options = {"enable_gqa": shapes in SHARED}
    if 0 in shapes[0][:-2]:  # torch 2.11 divides by the number of heads, and dies
        expected = formula(q, k, v, **options)[0]
    else:
        expected = F.scaled_dot_product_attention(q, k, v, **options)
    out, logsumexp = attention_compose.attention(q, k, v, **options)
    assert_near(out, expected)
    assert logsumexp.shape == out.shape[:-1]
    weight = torch.randn_like(expected)
    grads = torch.autograd.grad(out, (q, k, v), weight)
    assert_near(grads, torch.autograd.grad(expected, (q, k, v), weight))


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 0, 1), (1, 0, 2)], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 5, 4), (2, 1, 5, 4), (1, 3, 1, 4)], ids=str)
def test_output_lies_in_memory_as_query(shape, order, device):
    base = torch.randn([*(shape[i] for i in order), shape[3]], dtype=torch.float64, device=device)
    q = base.permute([*(order.index(i) for i in range(3)), 3]).requires_grad_()
    out, _ = attention_compose.attention(q, q, q)
    assert list(out.stride()) == attention_checks.output_strides(q, out.shape)
    assert_near(out, F.scaled_dot_product_attention(q, q, q))


GRADCHECKED = {
    "mask": lambda device: {"attn_mask": torch.randn(2, 1, 3, device=device).double()},
    "window": lambda device: {"window_left": 1, "is_causal": True, "bottom_right": True},
    "softcap": lambda device: {"softcap": 1.5},
    "alibi": lambda device: {"alibi_slopes": torch.rand(2, device=device)},
    "sinks": lambda device: {"sinks": torch.randn(2, device=device)},
    "dropout": lambda device: {
        "dropout_p": 0.4,
        "dropout_seed": torch.tensor([7], device=device),
    },
}


def gradcheck_call(name: str, device: str):
    options = {"enable_gqa": True, **GRADCHECKED[name](device)}
    inputs = make_qkv(SMALL, device, torch.float64, requires_grad=True)
    mask = options.pop("attn_mask", None)
    if mask is None:
        return lambda *qkv: attention_compose.attention(*qkv, **options), inputs
    inputs.append(mask.requires_grad_())
    return lambda *qkvm: attention_compose.attention(*qkvm, **options), inputs


@pytest.mark.parametrize("name", GRADCHECKED)
def test_gradcheck(name, device):
    call, inputs = gradcheck_call(name, device)
    assert gradcheck(
        call,
        inputs,
        check_forward_ad=True,
        check_batched_grad=True,
        check_batched_forward_grad=True,
        check_undefined_grad=True,
    )


@pytest.mark.parametrize("name", GRADCHECKED)
def test_gradgradcheck(name, device):
    call, inputs = gradcheck_call(name, device)
    assert gradgradcheck(
        call, inputs, check_fwd_over_rev=True, check_rev_over_rev=True, fast_mode=True
    )


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("argument", ["query", "key", "attn_mask"])
def test_transforms(name, argument, device):
    tensors = dict(
        zip(("query", "key", "value"), make_qkv(SMALL, device, torch.float64), strict=True),
        attn_mask=torch.randn(2, 2, 3, dtype=torch.float64, device=device),
    )
    options = {"enable_gqa": True, "softcap": 2.0, "window_right": 1}

    def scalar(attention):
        def f(x):
            out, logsumexp = attention(**{**tensors, argument: x}, **options)
            return out.sin().sum() + logsumexp.cos().sum()

        return f

    x = tensors[argument]
    expected = TRANSFORMS[name](scalar(formula))(x)
    assert_near(TRANSFORMS[name](scalar(attention_compose.attention))(x), expected)


@pytest.mark.parametrize("batched", ["query", "key", "attn_mask", "alibi_slopes", "sinks"])
@pytest.mark.parametrize("rank", [2, 4])
def test_vmap_over_one_argument(batched, rank, device):
    shapes = {"query": (2, 2, 4, 3), "key": (2, 2, 5, 3), "value": (2, 2, 5, 3)}
    tensors = {
        name: torch.randn(shape[4 - rank :], dtype=torch.float64, device=device)
        for name, shape in shapes.items()
    }
    tensors["attn_mask"] = torch.randn((2, 1, 4, 5)[4 - rank :], device=device).double()
    heads = 1 if rank == 2 else 2
    tensors["alibi_slopes"] = torch.rand(heads, device=device)
    tensors["sinks"] = torch.rand(heads, device=device)
    own = torch.stack([tensors[batched], tensors[batched] * 2, tensors[batched] - 1], 1)

    def call(x):
        return attention_compose.attention(**{**tensors, batched: x})

    expected = [call(x) for x in own.unbind(1)]
    for found, wanted in zip(vmap(call, 1)(own), zip(*expected, strict=True), strict=True):
        assert_near(found, torch.stack(wanted))


def test_vmap_of_dropout_drops_alike(device):
    q, k, v = make_qkv(((3, 2, 4, 8), (2, 5, 8), (2, 5, 8)), device, torch.float64)
    seed = torch.tensor([5], device=device)

    def call(q, seed):
        return attention_compose.attention(q, k, v, None, 0.5, False, seed)[0]

    assert_near(vmap(call, (0, None))(q, seed), torch.stack([call(x, seed) for x in q]))
    seeds = torch.tensor([[5], [6], [7]], device=device)
    expected = torch.stack([call(x, s) for x, s in zip(q, seeds, strict=True)])
    assert_near(vmap(call)(q, seeds), expected)


def test_dropout_by_the_formula(device):
    qkv = make_qkv(((2, 3, 40, 8), (2, 3, 70, 8), (2, 3, 70, 8)), device, torch.float64)
    for tensor in qkv:
        tensor.requires_grad_()
    seed = torch.tensor([2**40 + 11], device=device)
    with torch.no_grad():
        kept = kept_weights((2, 3, 40, 70), 0.25, seed, device)
    assert abs(kept.ne(0).double().mean().item() - 0.75) < 0.02
    out, logsumexp = attention_compose.attention(*qkv, None, 0.25, False, seed)
    expected, sums = formula(*qkv, kept=kept)
    check_near((out, logsumexp), (expected, sums), 1e-12)
    weight = torch.randn_like(out)
    grads = torch.autograd.grad(out, qkv, weight)
    check_near(grads, torch.autograd.grad(expected, qkv, weight), 1e-12)


def test_dropout_with_p_one(device):
    q, k, v = make_qkv(SHAPES[0], device, torch.float64, requires_grad=True)
    seed = torch.tensor([1], device=device)
    out, logsumexp = attention_compose.attention(q, k, v, None, 1.0, False, seed)
    assert not out.any()
    assert logsumexp.isfinite().all()
    assert not any(x.any() for x in torch.autograd.grad(out.sum(), (q, k, v)))


def test_fully_masked_rows(device):
    q, k, v = make_qkv(SHAPES[1], device, torch.float64, requires_grad=True)
    mask = torch.zeros(4, 7, dtype=torch.float64, device=device)
    mask[1] = -math.inf
    for own in (mask.clone().requires_grad_(), mask == 0):
        out, logsumexp = attention_compose.attention(q, k, v, own)
        assert not out[:, :, 1].any()
        assert (logsumexp[:, :, 1] == -math.inf).all()
        assert_near(out, F.scaled_dot_product_attention(q, k, v, own))
        inputs = [q, k, v] + ([own] if own.requires_grad else [])
        grads = torch.autograd.grad(out.sin().sum(), inputs)
        assert all(grad.isfinite().all() for grad in grads)
        assert not grads[0][:, :, 1].any()
        assert not own.requires_grad or not grads[3][1].any()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_infinity_in_the_query_propagate_as_in_pytorch(value, device):
    q, k, v = make_qkv(SHAPES[0], device, torch.float64)
    q[0, 1, 2, 3] = value
    k[0, 1, :, 3] = k[0, 1, :, 3].abs()  # one infinity less the same is NaN, as in PyTorch
    out, logsumexp = attention_compose.attention(q, k, v)
    expected = F.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(out, expected, equal_nan=True)
    assert logsumexp[0, 1, 2].isnan()
    assert logsumexp.isnan().sum() == 1


# Views, copies and fills.
COMPUTE_NOTHING = (
    *("view", "reshape", "expand", "transpose", "permute", "squeeze", "detach", "clone", "copy"),
    *("empty", "zeros", "ones", "slice", "select", "alias", "as_strided", "unsafe"),
)


def test_forward_and_first_order_run_our_kernels(device):
    qkv, options = make_call("all", device)
    for x in qkv:
        x.requires_grad_()
    # What sums these two's gradients is an op of torch, as for a mask that is broadcast.
    options |= {"dropout_p": 0.5, "dropout_seed": torch.tensor([3], device=device)}
    mask = options.pop("attn_mask").double().requires_grad_()
    with RecordedOps() as found:
        out, _ = attention_compose.attention(*qkv, mask, **options)
        torch.autograd.grad(out, [*qkv, mask], torch.ones_like(out))
    names = {name for name in found.names if not any(x in name for x in COMPUTE_NOTHING)}
    assert all(name.startswith("cubin::") for name in names), names


def test_an_option_has_the_same_type_in_every_op():
    """Also in the op of caches and in the private softmax, where it has no default."""
    names = ("attention_forward", "attention_backward", "flash_attention", "_attention_softmax",
             "flash_attention_with_kvcache")  # fmt: skip
    schemas = [getattr(ops, name).default._schema for name in names]
    types = [{each.name: str(each.type) for each in schema.arguments} for schema in schemas]
    for name in softmax.OPTIONS:
        assert len({own[name] for own in types if name in own}) == 1
        assert sum(name in own for own in types) >= 3
    private = {each.name: each for each in schemas[3].arguments}
    assert not any(each.has_default_value() for each in private.values())
    assert tuple(private) == ("scores", *softmax.OPTIONS)


def test_nothing_lives_longer_than_its_graph(device):
    """Saved outputs would be kept by a cycle through the graph, if they were saved carelessly."""
    gc.collect()
    gc.disable()
    try:
        q, k, _ = make_qkv(SHAPES[0], device, torch.float64, requires_grad=True)
        scores = (q @ k.mT).contiguous()
        probs, logsumexp = softmax.softmax(scores, None, None, None, 1.0, 0.0, False, -1, -1, False)
        alive = weakref.ref(probs)
        assert alive() is not None
        del probs, logsumexp
        assert alive() is None
    finally:
        gc.enable()


def raw_calls(device: str):
    options = {"dtype": torch.float64, "device": device}
    scores = torch.randn(2, 3, 4, 5, **options)
    probs = torch.rand(2, 3, 4, 5, **options)
    rows = torch.rand(2, 3, 4, **options)
    mask = torch.randn(3, 1, 5, **options)
    heads = torch.rand(3, device=device)
    return {
        "softmax": (softmax.softmax, (scores, mask, heads, heads, 0.5, 2.0, False, -1, 1, True)),
        "softmax_backward": (softmax.softmax_backward, (scores, probs, rows, scores, 0.5, 2.0)),
        "dropout": (softmax.dropout, (probs, torch.tensor([9], device=device), 0.4)),
    }


@pytest.mark.parametrize("name", ["softmax", "softmax_backward", "dropout"])
def test_opcheck(name, device):
    op, args = raw_calls(device)[name]
    torch.library.opcheck(op, args)
    args = tuple(
        x.clone().requires_grad_() if torch.is_tensor(x) and x.is_floating_point() else x
        for x in args
    )
    torch.library.opcheck(op, args)


@pytest.mark.parametrize("name", ["softmax", "softmax_backward", "dropout"])
def test_raw_ops_take_any_strides(name, device):
    op, args = raw_calls(device)[name]
    strided = [
        torch.stack([x, x], -1)[..., 0] if torch.is_tensor(x) and x.is_floating_point() else x
        for x in args
    ]
    expected, found = op(*args), op(*strided)
    for one, other in zip(
        found if isinstance(found, tuple) else [found],
        expected if isinstance(expected, tuple) else [expected],
        strict=True,
    ):
        assert torch.equal(one, other)


def test_raw_softmax_backward_needs_scores_that_softcap_changes(device):
    op, (grad, probs, rows, _, *numbers) = raw_calls(device)["softmax_backward"]
    with pytest.raises(RuntimeError, match=r"\[input\]: .*'scores' is missing: .*, got none"):
        op(grad, probs, rows, None, *numbers)


@pytest.mark.parametrize(
    "change",
    [
        {0: torch.zeros(2, 3, 4, dtype=torch.float64)},
        {0: torch.zeros(2, 3, 4, 5, dtype=torch.bfloat16)},
        {1: torch.zeros(4, 1, 5)},
        {1: torch.zeros(3, 1, 5, dtype=torch.int32)},
        {2: torch.zeros(4)},
        {3: torch.zeros(3, dtype=torch.float64)},
    ],
    ids=["rank", "dtype", "mask's shape", "mask's dtype", "slopes", "sinks"],
)
def test_raw_softmax_refuses(change, device):
    op, args = raw_calls(device)["softmax"]
    args = [change[i].to(device) if i in change else x for i, x in enumerate(args)]
    with pytest.raises(RuntimeError, match=r"torch_cubin \[input\]"):
        op(*args)


def test_packed_sequences_are_refused(device):
    q = torch.randn(5, 2, 8, device=device, dtype=torch.float64)
    offsets = torch.tensor([0, 2, 5], device=device, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"torch_cubin \[input\]"):
        attention_compose.attention(q, q, q, cu_seqlens_q=offsets, cu_seqlens_k=offsets)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled(dynamic, device, fresh_dynamo):
    q, k, v = make_qkv(SHARED[0], device, torch.float64, requires_grad=True)
    mask = torch.randn(5, 7, dtype=torch.float64, device=device, requires_grad=True)

    def call(q, k, v, mask):
        return ops.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    out, expected = compiled(q, k, v, mask), call(q, k, v, mask)
    assert torch.equal(out, expected)
    weight = torch.randn_like(out)
    inputs = (q, k, v, mask)
    assert_near(
        torch.autograd.grad(out, inputs, weight), torch.autograd.grad(expected, inputs, weight)
    )
