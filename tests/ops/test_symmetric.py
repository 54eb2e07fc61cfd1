"""cubin::syrk and cubin::symm_square by their references: definition, derivatives, transforms."""

from __future__ import annotations

import os

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.flop_counter import FlopCounterMode

import torch_cubin  # noqa: F401  (registers the ops)

syrk, symm_square = torch.ops.cubin.syrk, torch.ops.cubin.symm_square
OPS = {"syrk": (syrk, (2, 5, 3)), "symm_square": (symm_square, (2, 5, 5))}


def mirrored(full: torch.Tensor) -> torch.Tensor:
    return full.tril() + full.tril(-1).mT


def expected(name: str, operand: torch.Tensor, c=None, beta=0.0, alpha=1.0) -> torch.Tensor:
    out = alpha * (operand @ (operand.mT if name == "syrk" else operand))
    return mirrored(out if c is None or beta == 0 else out + beta * c)


def operand_of(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(OPS[name][1], dtype=dtype)


def of_two(name: str):
    def op(operand: torch.Tensor, c: torch.Tensor | None = None) -> torch.Tensor:
        return OPS[name][0](operand, c, beta=0.5, alpha=2.0)

    return op


@pytest.fixture(params=OPS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("c_shape", [None, (2, 5, 5), (5, 5), (5,), (1, 5, 1)], ids=str)
def test_definition(name: str, dtype: torch.dtype, c_shape) -> None:
    op, operand = OPS[name][0], operand_of(name, dtype)
    c = None if c_shape is None else torch.randn(c_shape, dtype=dtype)
    got = op(operand, c, beta=0.5, alpha=2.0)
    wide = expected(name, operand.double(), None if c is None else c.double(), 0.5, 2.0)
    torch.testing.assert_close(got, wide.to(dtype))
    assert torch.equal(got, got.mT)
    assert got.is_contiguous()


def test_defaults_ignore_c(name: str) -> None:
    operand = operand_of(name)
    nan = torch.full((5, 5), float("nan"), dtype=torch.float64)
    torch.testing.assert_close(OPS[name][0](operand, nan), expected(name, operand))


def test_only_the_lower_triangles_matter() -> None:
    a, c = operand_of("symm_square"), torch.randn(5, 5, dtype=torch.float64)
    got = symm_square(a, c, beta=2.0)
    assert torch.equal(got, symm_square(a, c.tril(), beta=2.0))
    torch.testing.assert_close(got.tril(), (a @ a + 2 * c).tril())


@pytest.mark.parametrize("c_dtype", [torch.bfloat16, torch.float32])
def test_float32_output(name: str, c_dtype: torch.dtype) -> None:
    operand, c = operand_of(name, torch.bfloat16), torch.randn(5, 5).to(c_dtype)
    got = OPS[name][0](operand, c, beta=0.5, out_dtype=torch.float32)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected(name, operand.float(), c.float(), 0.5))


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0), (2, 0, 4), (0, 3, 3)], ids=str)
def test_no_elements(shape) -> None:
    x = torch.randn(shape)
    assert torch.equal(syrk(x), x @ x.mT)
    if shape[-2:] == (3, 0):
        c = torch.randn(3, 3)
        assert torch.equal(syrk(x, c, beta=2.0), 2 * mirrored(c))
    if shape[-1] == shape[-2]:
        assert torch.equal(symm_square(x), x @ x)


def test_alpha_0_computes_no_product(name: str) -> None:
    operand = torch.full(OPS[name][1], float("nan"))
    c = torch.randn(5, 5)
    assert torch.equal(
        OPS[name][0](operand, c, beta=2.0, alpha=0.0), 2 * mirrored(c).expand(2, 5, 5)
    )


@pytest.mark.parametrize("with_c", [False, True])
def test_derivatives(name: str, with_c: bool) -> None:
    # The checks take a hundred derivatives of each element.
    args = [operand_of(name)[:, :3, :3].clone().requires_grad_()]
    if with_c:
        args.append(torch.randn(3, 3, dtype=torch.float64, requires_grad=True))
    op = of_two(name)
    gradcheck(
        op, args, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
    )
    gradgradcheck(op, args, fast_mode=True)


def test_gradient_of_matmul_with_its_own_transpose_is_unchanged() -> None:
    x = operand_of("syrk").requires_grad_()
    grad = torch.randn(2, 5, 5, dtype=torch.float64)
    ours = torch.autograd.grad(torch.ops.cubin.matmul(x, x.mT), x, grad)
    torch.testing.assert_close(ours, torch.autograd.grad(x @ x.mT, x, grad))


def test_opcheck(name: str) -> None:
    op = OPS[name][0].default
    operand, c = operand_of(name, torch.float32), torch.randn(5, 5)
    for args, options in (
        ((operand,), {}),
        ((operand, c), {"beta": 0.5, "alpha": 2.0}),
        ((operand.requires_grad_(), c.requires_grad_()), {"beta": 0.5}),
        ((operand_of(name, torch.bfloat16),), {"out_dtype": torch.float32}),
    ):
        torch.library.opcheck(op, args, options)


@pytest.mark.parametrize("dims", [(0, None), (2, None), (None, 0), (1, 2), (0, 0)], ids=str)
def test_vmap(name: str, dims) -> None:
    def mapped(shape, dim):
        if dim is None:
            return torch.randn(shape, dtype=torch.float64)
        return torch.randn((4, *shape), dtype=torch.float64).movedim(0, dim)

    operand, c = mapped(OPS[name][1], dims[0]), mapped((5, 5), dims[1])
    got = torch.vmap(of_two(name), in_dims=dims)(operand, c)
    rows = [
        expected(
            name,
            *(
                x if dim is None else x.select(dim, i)
                for x, dim in zip((operand, c), dims, strict=True)
            ),
            0.5,
            2.0,
        )
        for i in range(4)
    ]
    torch.testing.assert_close(got, torch.stack(rows))


def test_compile_and_dynamic_shapes(name: str) -> None:
    op = torch.compile(of_two(name), fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (3, 6):
        shape = (n, 4) if name == "syrk" else (n, n)
        operand = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        c = torch.randn(n, n, dtype=torch.float64)
        torch.testing.assert_close(op(operand, c), of_two(name)(operand, c))
        (ours,) = torch.autograd.grad(op(operand, c).sum(), operand)
        (eager,) = torch.autograd.grad(of_two(name)(operand, c).sum(), operand)
        torch.testing.assert_close(ours, eager)
    torch._dynamo.reset()


def test_autocast(name: str) -> None:
    operand, c = operand_of(name, torch.float32), torch.randn(5, 5)
    with torch.autocast("cpu", torch.bfloat16):
        assert OPS[name][0](operand, c, beta=1.0).dtype == torch.bfloat16
        got = OPS[name][0](operand, c, beta=1.0, out_dtype=torch.float32)
    # The addend of a float32 output is not rounded first.
    want = expected(name, operand.bfloat16().float(), c, 1.0)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_flops(name: str) -> None:
    operand = operand_of(name)
    with FlopCounterMode(display=False) as counter:
        OPS[name][0](operand)
    assert counter.get_total_flops() == 2 * 2 * 5 * 5 * operand.shape[-1]


@pytest.mark.parametrize(
    ("op", "args", "options", "match"),
    [
        (syrk, (torch.randn(3),), {}, "syrk argument 'x' is no matrix"),
        (symm_square, (torch.randn(2, 3),), {}, "symm_square argument 'a' is not square"),
        (syrk, (torch.randn(3, 3), torch.randn(4, 4)), {}, "does not broadcast to the product"),
        (syrk, (torch.randn(3, 3), torch.randn(3, 3).double()), {}, "syrk argument 'c'"),
        (syrk, (torch.ones(3, 3, dtype=torch.int64),), {}, "syrk argument 'x'"),
        (syrk, (torch.randn(3, 3),), {"out_dtype": torch.float16}, "out_dtype"),
        (syrk, (torch.randn(3, 3).to_sparse(),), {}, "unsupported layout"),
    ],
    ids=[
        "vector",
        "not square",
        "c of another size",
        "c of another dtype",
        "integers",
        "out_dtype",
        "sparse",
    ],
)
def test_errors(op, args, options, match: str) -> None:
    with pytest.raises(RuntimeError, match=rf"torch_cubin \[input\]: .*{match}"):
        op(*args, **options)
    if not args[0].is_sparse:
        with pytest.raises(RuntimeError, match=rf"torch_cubin \[input\]: .*{match}"):
            op(*(x.to("meta") for x in args), **options)


CHECKED = """
import torch, torch_cubin
op, a, c = torch.ops.cubin.symm_square, torch.randn(3, 3), torch.randn(3, 3)
nan, inf = float("nan"), float("inf")
symmetric = a + a.t()
op(symmetric, symmetric, beta=1.0)
op(symmetric, c)  # c is not read
op(a, alpha=0.0)  # nor is a
torch.ops.cubin.syrk(a)
op(symmetric * (1 + 1e-6 * a), symmetric, beta=1.0)  # rounded otherwise than its transpose
for value in (nan, inf):
    op(symmetric * value)
    op(symmetric.index_fill(0, torch.tensor(1), value).index_fill(1, torch.tensor(1), value))
op(torch.zeros(3, 3))
op(a[:0, :0])


def with_elements(matrix, row, column, above, below):
    matrix = matrix.clone()
    matrix[row, column], matrix[column, row] = above, below
    return matrix


of_tf32 = with_elements(symmetric, 0, 1, 0.01 * symmetric.abs().max(), 0.0)
for allowed in (True, False):
    torch.backends.cuda.matmul.allow_tf32 = allowed
    if allowed:
        op(of_tf32)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for gram in (False, True):
            torch_cubin.newton_schulz(torch.randn(16, 24, dtype=dtype), gram=gram)
for args in (
    (a, symmetric),
    (of_tf32, symmetric),
    (with_elements(a, 2, 2, nan, nan), symmetric),
    (with_elements(symmetric, 0, 1, nan, 0.0), symmetric),
    (with_elements(symmetric, 0, 1, inf, -inf), symmetric),
    (symmetric, c),
    (symmetric, with_elements(torch.zeros(3, 3), 2, 1, 0.0, nan)),
):
    try:
        op(*args, beta=1.0)
    except RuntimeError as error:
        print(error)
"""


@pytest.mark.parametrize("checks", ["0", "1"])
def test_environment_variable_refuses_asymmetric_arguments(checks: str, fresh_python) -> None:
    printed = fresh_python.output(CHECKED, env=os.environ | {"TORCH_CUBIN_CHECK": checks})
    lines = printed.splitlines()
    refused = "aaaaacc" if checks == "1" else ""
    for line, argument in zip(lines, refused, strict=True):
        assert f"torch_cubin [input]: symm_square argument '{argument}' is not symmetric" in line


def test_an_unknown_value_of_the_environment_variable(monkeypatch) -> None:
    monkeypatch.setenv("TORCH_CUBIN_CHECK", "true")
    mats, ends = torch.ones(2, 2), torch.tensor([2], dtype=torch.int32)
    calls = (
        lambda: torch.ops.cubin.syrk(mats),
        lambda: torch.ops.cubin.grouped_matmul(mats, mats[None], offs=ends),
    )
    for call in calls:
        with pytest.raises(RuntimeError, match=r"TORCH_CUBIN_CHECK has an unknown value: .*'true'"):
            call()
