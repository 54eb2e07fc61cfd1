"""cubin::grouped_matmul on the CPU: what groups mean, derivatives, transforms, graphs, errors."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import torch_cubin

op = torch.ops.cubin.grouped_matmul
raw = torch.ops.cubin._grouped_matmul
INT = torch.int32


def ends_of(*sizes: int, dtype: torch.dtype = INT) -> Tensor:
    return torch.tensor(sizes).cumsum(0).to(dtype)


def expected(mat_a: Tensor, mat_b: Tensor, offs: Tensor) -> Tensor:
    """Made of torch's products; rows that belong to no group are zero."""
    ends = [int(end) for end in offs]
    parts = list(zip([0, *ends], ends, strict=False))
    if mat_a.dim() == 3:
        return expected(mat_b.mT, mat_a.mT, offs).mT
    if mat_b.dim() == 2:
        return torch.stack([mat_a[:, i:j] @ mat_b[i:j] for i, j in parts])
    products = [mat_a[i:j] @ own for (i, j), own in zip(parts, mat_b, strict=True)]
    return torch.cat([*products, mat_a.new_zeros(mat_a.shape[0] - ends[-1], mat_b.shape[-1])])


SIZES = [(4, 0, 5, 1), (0, 0, 0), (10,), (0, 10)]


def operands(mode: str, sizes: tuple[int, ...], **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    rows, groups = sum(sizes), len(sizes)
    shapes = {
        "rows": ((rows, 6), (groups, 6, 3)),
        "columns": ((groups, 3, 6), (6, rows)),
        "contraction": ((4, rows), (rows, 3)),
    }[mode]
    return [torch.randn(shape, dtype=torch.float64, **options) for shape in shapes]


@pytest.mark.parametrize("offs_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("mode", ["rows", "columns", "contraction"])
def test_products_of_groups(mode: str, sizes: tuple[int, ...], offs_dtype: torch.dtype) -> None:
    a, b = operands(mode, sizes)
    offs = ends_of(*sizes, dtype=offs_dtype)
    out = op(a, b, offs=offs)
    torch.testing.assert_close(out, expected(a, b, offs))
    assert out.is_contiguous()


@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_matrices_have_their_layout(transposed: bool) -> None:
    """Else autograd copies each gradient of a parameter to the parameter's layout."""
    a, b = operands("rows", (4, 0, 5))
    weight = (b.mT.contiguous() if transposed else b).requires_grad_()
    offs = ends_of(4, 0, 5)
    out = op(a, weight.mT if transposed else weight, offs=offs)
    (grad,) = torch.autograd.grad(out.square().sum(), weight)
    assert grad.is_contiguous()
    own = b.detach().requires_grad_()
    (want,) = torch.autograd.grad(expected(a, own, offs).square().sum(), own)
    torch.testing.assert_close(grad.mT if transposed else grad, want)


def test_two_batches_are_a_batched_product() -> None:
    a, b = torch.randn(3, 4, 5), torch.randn(3, 5, 2)
    torch.testing.assert_close(op(a, b), a @ b)
    with pytest.raises(RuntimeError, match=r"\[input\]: grouped_matmul argument 'offs' is given"):
        op(a, b, offs=ends_of(1, 1, 1))


def test_no_group() -> None:
    none = torch.empty(0, dtype=INT)
    assert op(torch.randn(0, 4), torch.randn(0, 4, 3), offs=none).shape == (0, 3)
    assert op(torch.randn(5, 4), torch.randn(0, 4, 3), offs=none).shape == (5, 3)
    assert op(torch.randn(4, 5), torch.randn(5, 3), offs=none).shape == (0, 4, 3)


@pytest.mark.parametrize(
    ("ends", "valid"),
    [((4, 2, 10), 4), ((4, 11, 10), 4), ((-1, 4, 10), 0), ((2, 6, 2**31 - 1), 6), ((4, 4, 3), 4)],
)
def test_wrong_ends_make_nan_of_what_follows(ends: tuple[int, ...], valid: int) -> None:
    a, b = torch.randn(10, 6), torch.randn(3, 6, 3)
    right = sum(end <= valid for end in ends[: ends.index(valid) + 1]) if valid else 0
    offs = torch.tensor(ends, dtype=INT)
    out = op(a, b, offs=offs)
    assert out[valid:].isnan().all()
    assert not out[:valid].isnan().any()
    gradients = op(a.t(), torch.randn(10, 2), offs=offs)
    assert gradients[right:].isnan().flatten(1).all(1).any()
    assert not gradients[:right].isnan().any()


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ((4, 2, 10), r"group 1: expected a number from 4 to 10, got 2"),
        ((4, 8, 11), r"group 2: expected a number from 8 to 10, got 11"),
        ((-1, 8, 10), r"group 0: expected a number from 0 to 10, got -1"),
    ],
)
def test_checked_ends(ends: tuple[int, ...], message: str, grad: bool, monkeypatch: Any) -> None:
    monkeypatch.setenv("TORCH_CUBIN_CHECK", "1")
    a, offs = torch.randn(10, 6, requires_grad=grad), torch.tensor(ends)
    for operands_ in ((a, torch.randn(3, 6, 3)), (a.t(), torch.randn(10, 3))):
        with pytest.raises(RuntimeError, match=rf"\[input\]: grouped_matmul .*{message}"):
            op(*operands_, offs=offs)
    assert op(a, torch.randn(3, 6, 3), offs=ends_of(4, 0, 6)).shape == (10, 3)


@pytest.mark.parametrize("mode", ["rows", "columns", "contraction"])
def test_derivatives_of_every_order(mode: str) -> None:
    a, b = operands(mode, (2, 0, 3), requires_grad=True)
    offs = ends_of(2, 0, 3)

    def call(a: Tensor, b: Tensor) -> Tensor:
        return op(a, b, offs=offs)

    assert torch.autograd.gradcheck(call, (a, b), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call, (a, b), check_fwd_over_rev=True)


@pytest.mark.parametrize("mode", ["rows", "columns", "contraction"])
def test_what_belongs_to_no_group_has_a_zero_gradient(mode: str) -> None:
    a, b = operands(mode, (2, 0, 3, 4), requires_grad=True)
    if mode != "contraction":
        a, b = (a, b[:3]) if mode == "rows" else (a[:3], b)
    offs = ends_of(2, 0, 3)
    out = op(a, b, offs=offs)
    keep = {"rows": out[:5], "columns": out[:, :5], "contraction": out}[mode]
    got = torch.autograd.grad(keep.square().sum(), (a, b))
    want = torch.autograd.grad(expected(a, b, offs).square().sum(), (a, b))
    torch.testing.assert_close(got, want)


def test_a_gradient_that_is_expanded() -> None:
    a, b = operands("rows", (4, 6), requires_grad=True)
    offs = ends_of(4, 6)
    got = torch.autograd.grad(op(a, b, offs=offs).sum(), (a, b))
    want = torch.autograd.grad(expected(a, b, offs).sum(), (a, b))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("mode", ["rows", "columns", "contraction"])
@pytest.mark.parametrize("grad", [False, True])
def test_opcheck(mode: str, grad: bool) -> None:
    a, b = operands(mode, (4, 0, 6), requires_grad=grad)
    torch.library.opcheck(op, (a, b), {"offs": ends_of(4, 0, 6)})


@pytest.mark.parametrize("zero_rest", [False, True])
def test_opcheck_of_the_raw_op(zero_rest: bool) -> None:
    a, b = operands("rows", (4, 0, 6))
    torch.library.opcheck(raw, (a, b, ends_of(4, 0, 6), zero_rest))
    autograd = torch.ops.cubin._grouped_matmul_autograd
    args = (a.requires_grad_(), b.requires_grad_(), ends_of(4, 0, 6), zero_rest)
    torch.library.opcheck(autograd, args)


@pytest.mark.parametrize("dims", [(0, None, None), (None, 1, None), (0, 2, 0), (None, None, 0)])
def test_vmap(dims: tuple[int | None, ...]) -> None:
    torch.manual_seed(0)
    offs = torch.stack([ends_of(4, 0, 5), ends_of(0, 9, 0)])
    tensors = [torch.randn(9, 6), torch.randn(3, 6, 2), offs[0]]
    batched = [torch.stack([tensors[0], tensors[0] + 1]), torch.stack([tensors[1], -tensors[1]])]
    batched.append(offs)
    args = [
        own if dim is None else all_.movedim(0, dim)
        for own, all_, dim in zip(tensors, batched, dims, strict=True)
    ]

    def call(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
        return op(a, b, offs=ends)

    out = torch.vmap(call, in_dims=dims)(*args)
    for i in range(2):
        own = [x if dim is None else x.select(dim, i) for x, dim in zip(args, dims, strict=True)]
        torch.testing.assert_close(out[i], call(*own))


def test_torch_func() -> None:
    a, b = operands("rows", (4, 6))
    offs = ends_of(4, 6)

    def loss(a: Tensor, b: Tensor) -> Tensor:
        return op(a, b, offs=offs).square().sum()

    def reference(a: Tensor, b: Tensor) -> Tensor:
        return expected(a, b, offs).square().sum()

    torch.testing.assert_close(
        torch.func.grad(loss, (0, 1))(a, b), torch.func.grad(reference, (0, 1))(a, b)
    )
    torch.testing.assert_close(
        torch.func.hessian(loss, 1)(a, b), torch.func.hessian(reference, 1)(a, b)
    )


def test_compile_makes_one_graph_of_all_sizes() -> None:
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True, dynamic=True)
    def call(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        return op(a.relu(), b.mT, offs=offs) * 2

    for sizes in ((3, 5), (7, 0), (1, 12)):
        a, b, offs = torch.randn(sum(sizes), 6), torch.randn(2, 4, 6), ends_of(*sizes)
        torch.testing.assert_close(call(a, b, offs), 2 * expected(a.relu(), b.mT, offs))
    assert len(graphs) == 1


def test_compiled_training() -> None:
    a, b = operands("rows", (4, 0, 6), requires_grad=True)
    offs = ends_of(4, 0, 6)

    def loss(a: Tensor, b: Tensor) -> Tensor:
        return op(a, b, offs=offs).square().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    got = torch.autograd.grad(compiled(a, b), (a, b))
    torch.testing.assert_close(got, torch.autograd.grad(loss(a, b), (a, b)))


def test_inductor_calls_an_extern_kernel() -> None:
    torch._dynamo.reset()
    a, b = torch.randn(10, 6), torch.randn(3, 6, 4)
    with torch.no_grad():
        out, code = run_and_get_code(torch.compile(lambda a, b, c: op(a, b, offs=c)), a, b, _OFFS)
    torch.testing.assert_close(out, expected(a, b, _OFFS))
    assert "cubin" in code[0]


def test_export() -> None:
    class Experts(torch.nn.Module):
        def forward(self, a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
            return op(a, b, offs=offs)

    rows = torch.export.Dim("rows", min=2)
    a, b, offs = torch.randn(8, 6), torch.randn(2, 6, 4), ends_of(3, 5)
    exported = torch.export.export(Experts(), (a, b, offs), dynamic_shapes=({0: rows}, None, None))
    a, offs = torch.randn(11, 6), ends_of(4, 7)
    torch.testing.assert_close(exported.module()(a, b, offs), expected(a, b, offs))


def test_autocast_casts_the_operands() -> None:
    a, b = torch.randn(8, 6), torch.randn(2, 6, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = op(a, b, offs=ends_of(3, 5))
    torch.testing.assert_close(out, expected(a.bfloat16(), b.bfloat16(), ends_of(3, 5)))


def test_a_rows_bits_do_not_depend_on_the_other_rows() -> None:
    a, b = torch.randn(64, 48), torch.randn(2, 48, 40)
    with torch_cubin.batch_invariant():
        whole = op(a, b, offs=ends_of(40, 24))
        part = op(a[:5], b, offs=ends_of(5, 0))
    assert torch.equal(whole[:5], part)


def test_random_groups() -> None:
    source = random.Random(0)
    for _ in range(200):
        sizes = tuple(source.choice([0, 0, 1, 2, 7, 16]) for _ in range(source.randint(1, 9)))
        mode = source.choice(["rows", "columns", "contraction"])
        a, b = operands(mode, sizes)
        torch.testing.assert_close(op(a, b, offs=ends_of(*sizes)), expected(a, b, ends_of(*sizes)))


_A, _B, _OFFS = torch.randn(10, 6), torch.randn(3, 6, 4), ends_of(4, 0, 6)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: op(_A, _B), "argument 'offs' is missing"),
        (lambda: op(_A, _B, offs=_OFFS.float()), "argument 'offs' has a wrong dtype"),
        (lambda: op(_A, _B, offs=_OFFS[:2]), "argument 'offs' has a wrong shape"),
        (lambda: op(_A, _B, offs=_OFFS[None]), "argument 'offs' has a wrong shape"),
        (lambda: op(_A, _B, offs=_OFFS, bias=_A), "argument 'bias' has a wrong shape"),
        (lambda: op(_A, _B, offs=_OFFS, bias=_B[:, 0].double()), "argument 'bias' has another"),
        (lambda: op(_A, _B, offs=_OFFS, scale=_A[:, 0].half()), "argument 'scale' has a wrong dty"),
        (lambda: op(_A, _B, offs=_OFFS, scale=_A[:3, 0]), "argument 'scale' has a wrong shape"),
        (lambda: op(_A, _B, offs=_OFFS, rows=_OFFS[None]), "argument 'rows' has a wrong shape"),
        (lambda: op(_A, _B, offs=_OFFS, rows=_OFFS.long()), "argument 'rows' has a wrong dtype"),
        (lambda: op(_A, _B, offs=_OFFS, out_rows=_OFFS), "argument 'out_rows' has a wrong shape"),
        (lambda: op(_A, _B, offs=_OFFS, activation="tanh"), "activation"),
        (lambda: op(_A, _B[..., :3], offs=_OFFS, activation="silu"), "has no two halves"),
        (lambda: op(_A.t(), _A, offs=_OFFS, scale=_A[:, 0]), "has options of rows for groups of K"),
        (lambda: op(_B.mT, _A.t(), offs=_OFFS, scale=_A[:, 0]), "has options of rows for a mat_a"),
        (lambda: op(_A, _B, offs=_OFFS, out_dtype=torch.half), "argument 'out_dtype' differs"),
        (lambda: op(_A, _B.double(), offs=_OFFS), "argument 'mat_b' has another dtype"),
        (lambda: op(_A.int(), _B.int(), offs=_OFFS), "argument 'mat_a' has an unsupported dtype"),
        (lambda: op(_A[0], _B, offs=_OFFS), "takes matrices"),
        (lambda: op(_B, _A[0], offs=_OFFS), "takes matrices"),
        (lambda: op(_A, _B[:, :5], offs=_OFFS), "cannot be multiplied"),
        (lambda: op(_A.to_sparse(), _B, offs=_OFFS), "unsupported layout.*functional.grouped_mm"),
        (lambda: op(None, _B, offs=_OFFS), "argument 'mat_a' is missing"),
    ],
)
def test_errors(call: Any, message: str, grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        error = pytest.raises(RuntimeError, match=rf"\[input\]: grouped_matmul.* ?{message}")
        with error:
            call()


def test_fake_tensors_get_the_same_errors() -> None:
    with torch._subclasses.FakeTensorMode() as mode:
        a, b, offs = (mode.from_tensor(x) for x in (_A, _B, _OFFS))
        assert op(a, b, offs=offs).shape == (10, 4)
        with pytest.raises(RuntimeError, match=r"\[input\]: grouped_matmul .*cannot be multiplied"):
            op(a, b[:, :5], offs=offs)


def test_the_examples_of_the_docs() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "moe.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    example, by_options, _, training, *_, model = blocks
    names: dict[str, Any] = {}
    exec(example, names)
    x, w13, w2, expert, out = (names[name] for name in ("x", "w13", "w2", "expert", "out"))
    gate, up = torch.einsum("tk,tnk->tn", x, w13[expert]).chunk(2, -1)
    want = torch.einsum("tk,tnk->tn", torch.nn.functional.silu(gate) * up, w2[expert])
    torch.testing.assert_close(out, want, atol=1e-4, rtol=1e-4)
    exec(by_options, names)
    torch.testing.assert_close(names["out"], out)
    exec(training, names)
    assert names["master13"].grad.shape == w13.shape
    pytest.importorskip("transformers")
    exec(model, {})


def test_flops() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        op(_A, _B, offs=_OFFS)
    assert counter.get_total_flops() == 2 * 10 * 6 * 4
