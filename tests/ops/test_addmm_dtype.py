"""addmm(out_dtype=) and addmm_into: products of 16-bit operands added to float32."""

from __future__ import annotations

import pytest
import torch
from ops.test_opcheck import CHECKS
from torch import Tensor

import torch_cubin  # noqa: F401  (registers the ops)

ops = torch.ops.cubin
SHAPES = [  # input, mat1, mat2
    ((5, 3), (5, 7), (7, 3)),
    ((3,), (5, 7), (7, 3)),
    ((), (5, 7), (7, 3)),
    ((2, 5, 3), (2, 5, 7), (7, 3)),
    ((5, 1), (2, 5, 7), (2, 7, 3)),
    ((5,), (5, 7), (7,)),
    ((3,), (7,), (7, 3)),
    ((), (7,), (7,)),
    ((5, 3), (5, 0), (0, 3)),
    ((0, 3), (0, 7), (7, 3)),
]


def draw(shapes, dtype=torch.bfloat16, input_dtype=torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    dtypes = (input_dtype, dtype, dtype)
    return [torch.randn(shape).to(own) for shape, own in zip(shapes, dtypes, strict=True)]


def expected_of(input: Tensor, a: Tensor, b: Tensor, beta: float, alpha: float) -> Tensor:
    return beta * input.double() + alpha * (a.double() @ b.double())


@pytest.mark.parametrize("factors", [(1, 1), (0.5, 2), (0, 1), (1, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_values(shapes, dtype, factors) -> None:
    input, a, b = draw(shapes, dtype)
    beta, alpha = factors
    expected = expected_of(input, a, b, beta, alpha).float()
    for given in (input, input.to(dtype)):
        out = ops.addmm(given, a, b, out_dtype=torch.float32, beta=beta, alpha=alpha)
        assert out.dtype == torch.float32
        assert out.is_contiguous()
        wanted = expected_of(given, a, b, beta, alpha).float()
        torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
    out = input.expand(expected.shape).contiguous()
    address = out.data_ptr()
    assert ops.addmm_into(out, a, b, beta=beta, alpha=alpha) is None
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert out.data_ptr() == address


def test_the_operands_dtype_is_addmm_itself() -> None:
    input, a, b = draw(SHAPES[0], input_dtype=torch.bfloat16)
    out = ops.addmm(input, a, b, torch.bfloat16, beta=2)
    assert torch.equal(out, ops.addmm(input, a, b, beta=2))
    into = input.clone()
    ops.addmm_into(into, a, b, beta=2)
    assert torch.equal(into, out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_factors_that_sums_cannot_hold_are_infinite(dtype) -> None:
    """As in kernels, which take them in the type of the sums."""
    input, a, b = (torch.ones(shape, dtype=dtype) for shape in ((3,), (5, 7), (7, 3)))
    inf = 1e300 if dtype == torch.float64 else torch.inf
    assert set(ops.addmm(input, a, b, beta=1e300).view(-1).tolist()) == {inf}
    assert set(ops.addmm(input, a, b, beta=0, alpha=-1e300).view(-1).tolist()) == {-7 * inf}
    assert set(ops.addmm(input, a[:, :0], b[:0], beta=-1e300).view(-1).tolist()) == {-inf}


def test_into_any_layout() -> None:
    input, a, b = draw(SHAPES[0])
    memory = torch.full((9, 11), 7.0)
    for out in (memory[1:6, 2:5], memory.t()[3:8, 4:7], memory[::2, ::4]):
        before = memory.clone()
        out.copy_(input)
        ops.addmm_into(out, a, b)
        torch.testing.assert_close(out, expected_of(input, a, b, 1, 1).float())
        out.fill_(0)
        places = memory == 0
        assert torch.equal(memory[~places], before[~places])
        memory.fill_(7)


def test_saved_tensors_notice_the_write() -> None:
    _, a, b = draw(SHAPES[0])
    x = torch.ones(5, 3, requires_grad=True)
    out = torch.randn(5, 3)
    y = x * out
    ops.addmm_into(out, a, b)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("suffix", ["", "_autograd"])
def test_opcheck(suffix) -> None:
    for shapes in SHAPES[:6]:
        tensors = draw(shapes, torch.float32)
        if suffix:
            tensors = [tensor.requires_grad_() for tensor in tensors]
        op = getattr(ops, f"_addmm_dtype{suffix}")
        factors = {"beta": 0.5, "alpha": 2.0}
        torch.library.opcheck(op, (*tensors, torch.float32), factors, test_utils=CHECKS)
    out, a, b = draw(SHAPES[0])
    torch.library.opcheck(getattr(ops, f"_addmm_into{suffix}"), (out, a, b), test_utils=CHECKS)
    torch.library.opcheck(ops.addmm_into, (out, a, b), test_utils=CHECKS)
    torch.library.opcheck(ops.addmm.dtype, (out, a, b, torch.float32), test_utils=CHECKS)


def test_fake_outputs_have_the_dtype() -> None:
    out = ops.addmm(*draw(SHAPES[3]), out_dtype=torch.float32)
    fake = ops.addmm(*(x.to("meta") for x in draw(SHAPES[3])), out_dtype=torch.float32)
    assert (fake.dtype, fake.shape, fake.stride()) == (out.dtype, out.shape, out.stride())


def test_derivatives_have_the_arguments_dtypes() -> None:
    leaves = [x.requires_grad_() for x in draw(SHAPES[0])]
    out = ops.addmm(*leaves, out_dtype=torch.float32, beta=2, alpha=0.5)
    grads = torch.autograd.grad(out.square().sum(), leaves)
    assert [grad.dtype for grad in grads] == [leaf.dtype for leaf in leaves]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    own = torch.autograd.grad(expected_of(*wide, 2, 0.5).square().sum(), wide)
    for grad, expected in zip(grads, own, strict=True):
        torch.testing.assert_close(grad.double(), expected, rtol=0.02, atol=0.05)


def test_derivatives_in_float64() -> None:
    leaves = [x.double().requires_grad_() for x in draw(SHAPES[1])]

    def call(*args: Tensor) -> Tensor:
        return ops.addmm(*args, out_dtype=torch.float64, beta=0.5, alpha=2)

    torch.autograd.gradcheck(call, leaves, check_forward_ad=True)
    torch.autograd.gradgradcheck(call, leaves)


def test_tangents_have_the_outputs_dtype() -> None:
    primals = tuple(draw(SHAPES[0]))
    _, tangent = torch.func.jvp(lambda *x: ops.addmm(*x, out_dtype=torch.float32), primals, primals)
    assert tangent.dtype == torch.float32


def test_vmap() -> None:
    input, a, b = draw(((4, 5, 3), (4, 5, 7), (7, 3)))
    out = torch.vmap(
        lambda c, x: ops.addmm(c, x, b, out_dtype=torch.float32, beta=2), randomness="error"
    )(input, a)
    torch.testing.assert_close(out, expected_of(input, a, b, 2, 1).float())


def test_autocast_keeps_the_addend() -> None:
    c, a, b = draw(SHAPES[0], torch.float32)
    near = torch.full_like(c, 1 + 2**-12)  # would be 1 in bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        out = ops.addmm(near, a * 0, b, out_dtype=torch.float32)
        ops.addmm_into(c, a, b)
    assert torch.equal(out, near)
    assert c.dtype == torch.float32


def test_compile() -> None:
    c, a, b = draw(SHAPES[0])

    def step(c: Tensor, a: Tensor, b: Tensor) -> Tensor:
        ops.addmm_into(c, a, b)
        return ops.addmm(c, a, b, out_dtype=torch.float32) * 2

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    ours = c.clone()
    out, own = compiled(ours, a, b), step(c, a, b)
    torch.testing.assert_close((out, ours), (own, c))


def test_addmm_into_refuses_transforms() -> None:
    c, a, b = draw(SHAPES[0])
    with pytest.raises(RuntimeError, match=r"\[input\]: addmm_into has no rule for derivatives"):
        ops.addmm_into(c, a.requires_grad_(), b)
    with pytest.raises(RuntimeError, match=r"\[input\]: addmm_into has no rule for torch.vmap"):
        torch.vmap(lambda x: ops.addmm_into(c, x, b))(a.detach()[None])
    with torch.no_grad():
        ops.addmm_into(c, a, b)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_errors(mode) -> None:
    c, a, b = draw(SHAPES[0])
    d = c.double()
    wide, flat = torch.zeros(8, 8), torch.zeros(3, 1)
    cases = [
        (lambda: ops.addmm(c, a, b, out_dtype=torch.float16), "'out_dtype'", "float16"),
        (lambda: ops.addmm(d, d, d.t(), out_dtype=torch.float32), "'out_dtype'", "float32"),
        (lambda: ops.addmm(c.half(), a, b, out_dtype=torch.float32), "'input'", "float16"),
        (lambda: ops.addmm(c[:, :2], a, b, out_dtype=torch.float32), "'input'", "(5, 2)"),
        (lambda: ops.addmm_into(c[0], a, b), "addmm_into argument 'out'", "(3,)"),
        (lambda: ops.addmm_into(d, a, b), "addmm_into argument 'out'", "float64"),
        (lambda: ops.addmm_into(flat.expand(3, 5).t(), a, b), "'out'", "expanded"),
        (lambda: ops.addmm_into(wide, wide, wide), "shares memory with 'mat1'", "both"),
        (lambda: ops.addmm_into(wide[:, :4], wide[:, :4], wide[:4, 4:]), "'mat1'", "both"),
        (lambda: ops.addmm_into(None, a, b), "'out' is missing", "None"),
        (lambda: ops.addmm(c, None, b, out_dtype=torch.float32), "'mat1' is missing", "None"),
    ]
    for call, *parts in cases:
        with mode(), pytest.raises(RuntimeError, match=r"torch_cubin \[input\]") as caught:
            call()
        for part in parts:
            assert part in str(caught.value)
