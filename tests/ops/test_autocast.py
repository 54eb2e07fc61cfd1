"""torch.autocast: the ops take their arguments in its dtype, as torch.matmul and F.linear do."""

from __future__ import annotations

import pytest
import torch
from ops.samples import assert_near, linear, make_all, matmul, reference_linear
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_cubin._pytorch import dispatch_keys

SHAPES = ((2, 3), (4, 3), (4,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grad", [False, True])
def test_as_torch(dtype, grad, device):
    x, w, bias = make_all(SHAPES, device, torch.float32)
    with torch.set_grad_enabled(grad), torch.autocast(device, dtype=dtype):
        out = matmul(x, w.t())
        assert out.dtype == dtype
        assert_near(out, torch.matmul(x, w.t()))
        assert_near(linear(x, w, bias), reference_linear(x, w, bias))
        assert_near(linear(x, w), reference_linear(x, w))


@pytest.mark.parametrize("name", ["matmul", "_matmul", "_matmul_autograd"])
def test_every_op_casts(name, device):
    x, w, _ = make_all(SHAPES, device, torch.float32)
    op = getattr(torch.ops.cubin, name)
    with torch.autocast(device, dtype=torch.bfloat16), torch.no_grad():
        assert_near(op(x, w.t()), torch.matmul(x, w.t()))
        assert_near(op(x.bfloat16(), w.t()), torch.matmul(x, w.t()))  # mixed before, one after


def test_arguments_by_name(device):
    x, w, bias = make_all(SHAPES, device, torch.float32)
    with torch.autocast(device, dtype=torch.bfloat16):
        expected = reference_linear(x, w, bias)
        assert_near(linear(x, w, bias=bias), expected)
        assert_near(linear(input=x, weight=w, bias=bias), expected)
        assert_near(matmul(self=x, other=w.t()), torch.matmul(x, w.t()))


def test_float64_is_not_cast(device):
    x, w, bias = make_all(SHAPES, device, torch.float64)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert matmul(x, w.t()).dtype == torch.float64
        assert linear(x, w, bias).dtype == torch.float64


def test_autocast_disabled_within_autocast(device):
    x, w, _ = make_all(SHAPES, device, torch.float32)
    with torch.autocast(device, dtype=torch.bfloat16):
        with torch.autocast(device, enabled=False):
            assert matmul(x, w.t()).dtype == torch.float32
        assert matmul(x, w.t()).dtype == torch.bfloat16
    assert matmul(x, w.t()).dtype == torch.float32


def test_the_dtype_is_read_at_each_call(device):
    x, w, _ = make_all(SHAPES, device, torch.float32)
    for dtype in (torch.float16, torch.bfloat16, torch.float16):
        with torch.autocast(device, dtype=dtype):
            assert matmul(x, w.t()).dtype == dtype


def test_gradients(device):
    args = make_all(SHAPES, device, torch.float32, requires_grad=True)
    results = []
    for op in (linear, reference_linear):
        with torch.autocast(device, dtype=torch.bfloat16):
            out = op(*args)
        grads = torch.autograd.grad(out.float().sum(), args)
        assert [grad.dtype for grad in grads] == [torch.float32] * 3
        results.append([grad.bfloat16() for grad in grads])
    assert_near(*results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_cross_entropy(dtype, bias, device):
    """Its products have autocast's dtype, whatever their operands' is; the loss is float32."""
    x, w, b = make_all(SHAPES, device, torch.float32, requires_grad=True)
    x, b = x.detach().to(dtype).requires_grad_(), b if bias else None
    target = torch.tensor([3, 0], device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = torch.ops.cubin.linear_cross_entropy(x, w, target, linear_bias=b)
        expected = torch.nn.functional.cross_entropy(reference_linear(x, w, b).float(), target)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    for grad, wanted in zip(
        *(torch.autograd.grad(y, (x, w)) for y in (out, expected)), strict=True
    ):
        torch.testing.assert_close(grad, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("recompute", [False, True])
def test_linear_cross_entropy_under_vmap(recompute, device):
    """vmap calls the ops below the public one, past its casts."""
    x, w = make_all(((2, 5, 4), (6, 4)), device, torch.float32, requires_grad=True)
    target = torch.tensor([1, 0, 3, -100, 2], device=device)

    def ours(x, w):
        return torch.ops.cubin.linear_cross_entropy(x, w, target, recompute=recompute)

    def theirs(x, w):
        return torch.nn.functional.cross_entropy(reference_linear(x, w).float(), target)

    with torch.autocast(device, dtype=torch.bfloat16):
        out, expected = (torch.func.vmap(op, (0, None))(x, w) for op in (ours, theirs))
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    for grad, wanted in zip(
        *(torch.autograd.grad(y.sum(), (x, w)) for y in (out, expected)), strict=True
    ):
        torch.testing.assert_close(grad, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("vmap", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_dtype_of_linear_cross_entropy(dtype, vmap, device):
    x, w = make_all(((2, 5, 4), (6, 4)), device, dtype)
    target = torch.tensor([1, 0, 3, -100, 2], device=device)

    def loss(x):
        return torch.ops.cubin.linear_cross_entropy(x, w, target)

    with torch.autocast(device, dtype=torch.bfloat16):
        out = torch.func.vmap(loss)(x) if vmap else loss(x[0])
    assert out.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.fixture
def autocast_of_fake_cuda():
    """torch.autocast("cuda") without a GPU; within it, tensors of that device may be fake."""
    enabled, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    with FakeTensorMode():
        yield
    torch.set_autocast_enabled("cuda", enabled)
    torch.set_autocast_dtype("cuda", dtype)


@pytest.mark.usefixtures("autocast_of_fake_cuda")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(("device", "dtype"), [("cuda", torch.float32), ("cpu", torch.bfloat16)])
def test_rows_under_vmap(device, dtype, grad):
    """Norms and losses run in float32 on CUDA, as without vmap."""
    ops, x = torch.ops.cubin, torch.empty(3, 5, 64, device=device, dtype=torch.bfloat16)
    w, target = x.flatten(0, 1).select(0, 0), torch.zeros(5, device=device, dtype=torch.long)
    calls = {
        "rms_norm": lambda x: ops.rms_norm(x, (64,), w),
        "add_rms_norm": lambda x: ops.add_rms_norm(x, x, (64,), w)[1],
        "layer_norm": lambda x: ops.layer_norm(x, (64,), w, w),
        "weight a sample": lambda x: ops.layer_norm(x, (64,), x.select(0, 0), w.float()),
        "cross_entropy": lambda x: ops.cross_entropy(x, target),
    }
    with torch.set_grad_enabled(grad):
        found = {name: torch.func.vmap(call)(x).dtype for name, call in calls.items()}
        with dispatch_keys.without_autocast():
            kept = {name: torch.func.vmap(call)(x).dtype for name, call in calls.items()}
    assert found == dict.fromkeys(calls, dtype)
    assert kept == dict.fromkeys(calls, torch.bfloat16)


@pytest.mark.parametrize("options", [{"recompute": True}, {"reduction": "none"}], ids=str)
def test_backward_of_linear_cross_entropy_in_a_region(options, device):
    """It has the dtype of the forward, which was outside."""
    x, w = make_all(((5, 4), (6, 4)), device, torch.float32, requires_grad=True)
    target = torch.tensor([1, 0, 3, -100, 2], device=device)
    results = []
    for enabled in (False, True):
        loss = torch.ops.cubin.linear_cross_entropy(x, w, target, **options).sum()
        with torch.autocast(device, dtype=torch.bfloat16, enabled=enabled):
            results.append(torch.autograd.grad(loss, (x, w)))
    assert all(map(torch.equal, *results))


def test_another_devices_autocast_changes_nothing():
    x, w, _ = make_all(SHAPES, "cpu", torch.float32)
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=torch.cuda.is_available()):
        assert matmul(x, w.t()).dtype == torch.float32


def test_under_transforms(device):
    x, w, _ = make_all(SHAPES, device, torch.float32)
    with torch.autocast(device, dtype=torch.bfloat16):
        for op in (matmul, torch.matmul):
            grad = torch.func.grad(lambda x, op=op: op(x, w.t()).float().sum())(x)
            assert grad.dtype == torch.float32
            batch = torch.func.vmap(op, (0, None))(torch.stack([x, x]), w.t())
            assert batch.dtype == torch.bfloat16


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", ["matmul", "linear", "activation", "addmm", "attention"])
def test_operands_of_two_dtypes_under_vmap(name, grad, device):
    """Activations of 16 bits, weights of 32: rules see operands that are cast."""
    x, w, b = make_all(((2, 3, 4), (5, 4), (5,)), device, torch.float32, requires_grad=grad)
    ops, kv = torch.ops.cubin, w[None, None]
    op = {
        "matmul": lambda x: matmul(x, w.t()),
        "linear": lambda x: linear(x, w, b),
        "activation": lambda x: linear(x, w, b, activation="relu"),
        "addmm": lambda x: ops.addmm(b, x, w.t()),
        "attention": lambda x: ops.scaled_dot_product_attention(x[None, None], kv, kv),
    }[name]
    with torch.autocast(device, dtype=torch.bfloat16):
        out = torch.func.vmap(op)(x.bfloat16())
        expected = torch.stack([op(each.bfloat16()) for each in x])
    assert out.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    if grad:
        found, wanted = (torch.autograd.grad(y.sum(), (x, w)) for y in (out, expected))
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=4e-2)


def test_errors_stay_readable(device):
    x, w, _ = make_all(SHAPES, device, torch.float32)
    with (
        torch.autocast(device, dtype=torch.bfloat16),
        pytest.raises(RuntimeError, match=r"torch_cubin \[input\].*cannot be multiplied"),
    ):
        matmul(x, w)
