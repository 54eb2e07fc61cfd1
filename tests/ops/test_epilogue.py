"""linear(activation=) and addmm: values rounded once, derivatives, transforms, vmap, compile."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from ops.samples import DTYPES
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import torch_cubin

ops = torch.ops.cubin
ACTIVATIONS = {
    "none": lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}
PRODUCTS = [  # mat1, mat2, input
    ((3, 4), (4, 5), (3, 5)),
    ((3, 4), (4, 5), (5,)),
    ((3, 4), (4, 5), (3, 1)),
    ((3, 4), (4, 5), ()),
    ((3, 4), (4,), (3,)),
    ((4,), (4, 5), (5,)),
    ((4,), (4,), ()),
    ((2, 3, 4), (2, 4, 5), (2, 3, 5)),
    ((2, 3, 4), (4, 5), (3, 5)),
    ((2, 3, 4), (4, 5), (2, 1, 5)),
    ((6, 1, 3, 4), (2, 4, 5), (6, 1, 3, 1)),
    ((4,), (2, 4, 5), (2, 5)),
    ((2, 3, 4), (4,), (2, 3)),
]
FACTORS = [(1.0, 1.0), (0.5, 2.0), (0.0, 3.0), (2.0, 0.0), (-1.0, 1.0)]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def operands(dtype: torch.dtype = torch.float64, grad: bool = False) -> list[torch.Tensor]:
    made = [randn(*s, seed=i, dtype=dtype) for i, s in enumerate([(3, 5, 7), (4, 7), (4,)])]
    return [x.requires_grad_(grad) for x in made]


def factors_of(shapes, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    a, b, i = (randn(*s, seed=n, dtype=dtype) for n, s in enumerate(shapes))
    return [i, a, b]


def added(beta: float, alpha: float):
    return lambda i, a, b: beta * i + alpha * (a @ b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_rounded_once(name: str, dtype: torch.dtype, device) -> None:
    x, weight, bias = (t.to(device) for t in operands(dtype))
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    for own_bias in (bias, None):
        addend = None if own_bias is None else bias.to(wide)
        expected = F.linear(x.to(wide), weight.to(wide), addend)
        expected = ACTIVATIONS[name](expected).to(dtype)
        with torch.no_grad():
            out = ops.linear(x, weight, own_bias, activation=name)
        again = ops.linear(x, weight, own_bias, activation=name)  # nothing requires grad
        for result in (out, again):
            assert result.is_contiguous()
            if device == "cpu" and wide != dtype:
                assert torch.equal(result, expected)
            else:
                torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_derivatives_of_an_activation(name: str) -> None:
    def call(*args):
        return ops.linear(*args, activation=name)

    def torch_call(*args):
        return ACTIVATIONS[name](F.linear(*args))

    args = operands(grad=True)
    torch.testing.assert_close(call(*args), torch_call(*args))
    torch.autograd.gradcheck(call, args, check_forward_ad=True)
    torch.autograd.gradgradcheck(call, args, fast_mode=True)
    row, weight, bias = args[0][0, 0].detach(), args[1].detach(), args[2].detach()
    for transform in (torch.func.hessian, torch.func.jacrev, torch.func.jacfwd):
        results = [
            transform(lambda x, f=f: f(x, weight, bias).sum())(row) for f in (call, torch_call)
        ]
        torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    "dims", [(0, None, None), (1, 0, None), (None, 2, 0), (0, None, 1)], ids=str
)
@pytest.mark.parametrize("name", ["none", "relu", "gelu_tanh"])
def test_vmap_of_an_activation(name: str, dims) -> None:
    shapes = [(5, 7), (4, 7), (4,)]
    args = []
    for i, (shape, dim) in enumerate(zip(shapes, dims, strict=True)):
        whole = list(shape)
        if dim is not None:
            whole.insert(dim, 3)
        args.append(randn(*whole, seed=i))

    def call(*args):
        return ops.linear(*args, activation=name)

    def torch_call(*args):
        return ACTIVATIONS[name](F.linear(*args))

    torch.testing.assert_close(torch.vmap(call, dims)(*args), torch.vmap(torch_call, dims)(*args))
    gradients = [
        torch.vmap(torch.func.grad(lambda *x, f=f: f(*x).sum(), argnums=(0, 1, 2)), dims)(*args)
        for f in (call, torch_call)
    ]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("factors", FACTORS, ids=str)
@pytest.mark.parametrize("shapes", PRODUCTS, ids=str)
def test_addmm_is_the_scaled_sum(shapes, factors, device) -> None:
    beta, alpha = factors
    for dtype in DTYPES:
        args = [t.to(device) for t in factors_of(shapes, dtype)]
        wide = [t.float() if dtype.itemsize == 2 else t for t in args]
        expected = added(beta, alpha)(*wide).to(dtype)
        out = ops.addmm(*args, beta=beta, alpha=alpha)
        torch.testing.assert_close(out, expected)
        assert out.is_contiguous()
        with torch.no_grad(), torch_cubin.batch_invariant():
            torch.testing.assert_close(ops.addmm(*args, beta=beta, alpha=alpha), expected)


@pytest.mark.parametrize("shapes", PRODUCTS, ids=str)
def test_derivatives_of_addmm(shapes) -> None:
    def call(*args):
        return ops.addmm(*args, beta=0.5, alpha=2)

    args = factors_of(shapes)
    leaves = [t.clone().requires_grad_() for t in args]
    torch.autograd.gradcheck(call, leaves, check_forward_ad=True)
    torch.autograd.gradgradcheck(call, leaves, fast_mode=True)
    for transform in (torch.func.jacrev, torch.func.jacfwd):
        results = [transform(f, (0, 1, 2))(*args) for f in (call, added(0.5, 2))]
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("batched", list(itertools.product([True, False], repeat=3))[:-1], ids=str)
@pytest.mark.parametrize("shapes", PRODUCTS, ids=str)
def test_vmap_of_addmm(shapes, batched) -> None:
    args = [
        randn(3, *t.shape, seed=7) if batch else t
        for t, batch in zip(factors_of(shapes), batched, strict=True)
    ]
    dims = tuple(0 if batch else None for batch in batched)

    def call(*args):
        return ops.addmm(*args, beta=0.5, alpha=2)

    wanted = added(0.5, 2)
    torch.testing.assert_close(torch.vmap(call, dims)(*args), torch.vmap(wanted, dims)(*args))
    gradients = [
        torch.vmap(torch.func.grad(lambda *x, f=f: f(*x).sum(), argnums=(0, 1, 2)), dims)(*args)
        for f in (call, wanted)
    ]
    torch.testing.assert_close(*gradients)


def test_a_zero_factor_does_not_read_its_operand(device) -> None:
    nan, a, b = (torch.ones(s, device=device) for s in ((3, 5), (3, 4), (4, 5)))
    nan[:] = torch.nan
    assert torch.equal(ops.addmm(nan, a, b, beta=0, alpha=2), torch.full_like(nan, 8.0))
    assert torch.equal(ops.addmm(a @ b, nan[:, :4], b, beta=2, alpha=0), torch.full_like(nan, 8.0))
    none, alpha = a[:, :0], float("nan")  # of no product
    assert torch.equal(ops.addmm(a @ b, none, b[:0], alpha=alpha), a @ b)
    assert not ops.syrk(none, alpha=alpha).any()
    empty = ops.addmm(a @ b, a[:, :0], b[:0], beta=2)
    assert torch.equal(empty, torch.full_like(nan, 8.0))
    with torch.no_grad():
        out = ops.linear(a[:, :0], b[:0].t(), -torch.ones(5, device=device), activation="relu")
    assert torch.equal(out, torch.zeros_like(nan))


@pytest.mark.parametrize("grad", [False, True])
def test_opcheck(grad: bool, device) -> None:
    suffix = "_autograd" if grad else ""
    activation = getattr(ops, f"_linear_activation{suffix}").default
    addmm = getattr(ops, f"_addmm{suffix}").default
    args = [t.detach().to(device).requires_grad_(grad) for t in operands()]
    opcheck(activation, (*args, "gelu"))
    opcheck(activation, (args[0], args[1], None, "silu"))
    for shapes in PRODUCTS[:8]:
        tensors = [t.to(device).requires_grad_(grad) for t in factors_of(shapes)]
        opcheck(addmm, tuple(tensors), {"beta": 0.5, "alpha": 2.0})


def test_one_graph_forward_and_backward(device) -> None:
    def function(x, weight, bias):
        return ops.addmm(bias, ops.linear(x, weight, bias, activation="gelu"), weight, beta=2)

    def torch_function(x, weight, bias):
        return 2 * bias + F.gelu(F.linear(x, weight, bias)) @ weight

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (3, 5, 8):
        gradients = []
        for call in (compiled, torch_function):
            args = [
                randn(*s, seed=1).to(device).requires_grad_() for s in ((rows, 4), (4, 4), (4,))
            ]
            out = call(*args)
            out.square().sum().backward()
            gradients.append([out.detach(), *(t.grad for t in args)])
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("grad", [False, True])
def test_autocast_and_flops(grad: bool, device) -> None:
    x, weight, bias = (t.float().to(device).requires_grad_(grad) for t in operands())
    with torch.autocast(device, dtype=torch.bfloat16), FlopCounterMode(display=False) as counter:
        assert ops.linear(x, weight, bias, activation="silu").dtype == torch.bfloat16
        assert ops.addmm(bias, x, weight.t()).dtype == torch.bfloat16
    assert counter.get_total_flops() == 2 * (2 * 15 * 7 * 4)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "relu", "silu"])
def test_checkpointing(use_reentrant: bool, activation: str, device) -> None:
    x, weight, bias = (t.to(device).requires_grad_() for t in operands())

    def block(x: torch.Tensor) -> torch.Tensor:
        return ops.linear(x, weight, bias, activation=activation)

    expected = torch.autograd.grad(block(x).sum(), (x, weight, bias))
    checkpoint(block, x, use_reentrant=use_reentrant).sum().backward()
    torch.testing.assert_close((x.grad, weight.grad, bias.grad), expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad], ids=["no_grad", "grad"])
@pytest.mark.parametrize("leaf", [False, True])
def test_mistakes(mode, leaf: bool, device) -> None:
    x, weight, bias = (t.to(device).requires_grad_(leaf) for t in operands())
    a, b = torch.ones(3, 4, device=device).requires_grad_(leaf), torch.ones(4, 5, device=device)
    cases = [
        (lambda: ops.linear(x, weight, bias, activation="swish"), "activation", "'swish'"),
        (lambda: ops.linear(x, weight, bias, activation=""), "activation", "''"),
        (lambda: ops.linear(x, weight, activation="none\0"), "activation", r"'none\x00'"),
        (lambda: ops.linear(x, weight.half(), bias, activation="relu"), "linear", "float16"),
        (lambda: ops.linear(x, weight[:, :-1], bias, activation="gelu"), "linear", "weight"),
        (lambda: ops.linear(x, weight, bias[:-1], activation="silu"), "linear", "bias"),
        (
            lambda: ops.linear(*(t.detach().short() for t in (x, weight)), activation="relu"),
            "int16",
        ),
        (lambda: ops.addmm(a, a, b), "addmm argument 'input'", "(3, 5)"),
        (lambda: ops.addmm(b, a, b.double()), "addmm argument 'mat2'", "float64"),
        (lambda: ops.addmm(b.double()[0], a, b), "addmm argument 'input'", "float64"),
        (lambda: ops.addmm(b[0], a, b.t()), "mat2.size(-2)", "last size of mat1"),
        (lambda: ops.addmm(b[None, 0, None], a, b), "addmm argument 'input'", "(1, 1, 5)"),
    ]
    for call, *parts in cases:
        with mode(), pytest.raises(RuntimeError) as caught:
            call()
        text = str(caught.value)
        assert text.startswith("torch_cubin [input]: "), text
        assert all(part in text for part in parts), text


def test_the_old_calls_of_linear_stay(device) -> None:
    x, weight, bias = (t.to(device) for t in operands())
    expected = F.linear(x, weight, bias)
    torch.testing.assert_close(ops.linear(x, weight, bias), expected)
    torch.testing.assert_close(ops.linear(input=x, weight=weight, bias=bias), expected)
    torch.testing.assert_close(ops.linear.default(x, weight, bias=bias), expected)
    assert str(ops.linear.default._schema).count("activation") == 1
