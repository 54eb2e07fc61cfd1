"""drop_in() with autocast, checkpointing, torch.func, other modes and other threads."""

from __future__ import annotations

import drop_in_cases as cases
import pytest
import torch
import torch.nn.functional as F
from drop_in_cases import integers, result_or_error, run, same
from in_threads import in_threads
from torch.backends import mha
from torch.utils.checkpoint import CheckpointError, checkpoint

import torch_cubin


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_gives_torchs_dtypes(dtype, device) -> None:
    a, half = integers(4, 4, device=device), integers(4, 4, device=device, dtype=dtype)
    double = a.double()
    calls = [
        lambda: a @ a,
        lambda: a @ half,
        lambda: F.linear(half, a, a[0]),
        lambda: torch.addmm(a[0], a, a),
        lambda: torch.baddbmm(half[None], a[None], a[None], beta=0),
        lambda: torch.einsum("ij,jk->ik", a, half),
        lambda: double @ double,
        lambda: torch.bmm(a[None], a[None]),
    ]
    for call in calls:
        with torch.autocast(device, dtype=dtype):
            expected = call()
            result, ops, _ = run(call)
        same(result, expected)
        assert ops.cubin() == 1
        assert not ops.aten_products()
    with torch.autocast(device, dtype=dtype):
        expected = result_or_error(lambda: a @ double)
        assert run(lambda: result_or_error(lambda: a @ double))[0] == expected


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(4, 4), (3, 4), (2, 3, 4)], ids=str)
def test_checkpointing(shape, bias, device) -> None:
    layer = torch.nn.Sequential(
        torch.nn.Linear(4, 4, bias=bias), torch.nn.ReLU(), torch.nn.Linear(4, 4)
    ).to(device)
    x = integers(*shape, device=device).requires_grad_()
    layer(x).square().sum().backward()
    expected, x.grad = x.grad, None
    with torch_cubin.drop_in():
        checkpoint(layer, x, use_reentrant=False).square().sum().backward()
        torch.testing.assert_close(x.grad, expected, rtol=1e-4, atol=1e-4)
        result = checkpoint(layer, x, use_reentrant=False)
    with pytest.raises(CheckpointError):  # never another gradient
        result.square().sum().backward()


def test_vmap_and_grad_inside(device) -> None:
    a, b = integers(3, 4, 5, device=device), integers(5, 2, device=device)
    with torch_cubin.drop_in():
        mapped = torch.vmap(lambda row: row @ b)(a)
        gradient = torch.func.grad(lambda w: (a[0] @ w).sum())(b)
    same(mapped, a @ b)
    same(gradient, a[0].sum(0)[:, None].expand(5, 2))


def test_drop_in_serves_only_threads_that_enter_it(device) -> None:
    a = integers(4, 4, device=device)
    seen: dict[str, int] = {}

    def work(name: str, enter: bool) -> None:
        with cases.Ops() as counting:
            if enter:
                with torch_cubin.drop_in():
                    a @ a
            else:
                a @ a
        seen[name] = counting.cubin()

    with torch_cubin.drop_in():
        in_threads(work, [("enters", True), ("does not", False)])
        assert [row.calls for row in torch_cubin.report().served] == [1]
    assert seen == {"enters": 1, "does not": 0}


def test_the_mode_is_gone_after_an_error(device) -> None:
    a = integers(4, 4, device=device)
    with pytest.raises(ZeroDivisionError), torch_cubin.drop_in():
        raise ZeroDivisionError
    with cases.Ops() as ops:
        a @ a
    assert ops.cubin() == 0
    assert mha.get_fastpath_enabled()


def test_other_modes_keep_working_around_and_inside(device) -> None:
    with torch.device(device), torch_cubin.drop_in(), torch.device(device):
        a = torch.ones(3, 3)
        assert a.device.type == device
        result = a @ a
    same(result, torch.full((3, 3), 3.0, device=device))
    assert [row.calls for row in torch_cubin.report().served] == [1]


def test_fake_tensors_are_served() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), torch_cubin.drop_in():
        result = torch.empty(5, 7) @ torch.empty(7, 3)
        assert result.shape == (5, 3)
    assert [row.calls for row in torch_cubin.report().served] == [1]


def _addmv(a, b):
    return torch.addmv(b, a, b, beta=0)


@pytest.mark.parametrize("function", [torch.dot, torch.vdot, torch.inner, torch.mv, _addmv])
def test_autocast_of_what_it_does_not_lower(device: str, function) -> None:
    """dot, vdot and inner stay float32 under autocast on every device, mv and addmv on the CPU."""
    x = torch.randn((3, 3) if function in (torch.mv, _addmv) else (3,), device=device)
    y = torch.randn(3, device=device)
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast(device, dtype=dtype):
            wanted = function(x, y)
            with torch_cubin.drop_in():
                out = function(x, y)
        assert out.dtype == wanted.dtype
        torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("inner", [1, 2])
@pytest.mark.parametrize(
    ("equation", "shapes"),
    [("ij,jk->ik", ((2, 0), (0, 3))), ("bi,bi->b", ((2, 0), (2, 0))), ("i,ij->j", ((0,), (0, 3)))],
)
def test_autocast_of_an_einsum_over_one_element(device: str, equation, shapes, inner) -> None:
    """Where the sum is of one term, torch.einsum has no product that autocast would lower; on a GPU
    it lowers the arguments of torch.einsum itself."""
    a, b = (torch.randn([n or inner for n in shape], device=device) for shape in shapes)
    with torch.autocast(device, dtype=torch.bfloat16):
        wanted = torch.einsum(equation, a, b)
        with torch_cubin.drop_in():
            out = torch.einsum(equation, a, b)
    lowered = inner > 1 or device == "cuda"
    assert out.dtype == wanted.dtype == (torch.bfloat16 if lowered else torch.float32)
    torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)
    assert len(torch_cubin.report().served) == inner - 1


@pytest.mark.parametrize("compiled", [False, True])
def test_fake_cuda_tensors_are_served_where_there_is_no_gpu(compiled) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def function(a, weight, heads):
        return F.linear(a, weight) @ weight, F.scaled_dot_product_attention(heads, heads, heads)

    torch._dynamo.reset()
    with FakeTensorMode(), torch.no_grad(), torch_cubin.drop_in():
        a, weight = torch.empty(5, 8, device="cuda"), torch.empty(8, 8, device="cuda")
        heads = torch.empty(1, 2, 5, 8, device="cuda")
        call = torch.compile(function, backend="eager", fullgraph=True) if compiled else function
        out, attended = call(a, weight, heads)
    assert (out.shape, out.device.type, attended.shape) == ((5, 8), "cuda", heads.shape)
    report = torch_cubin.report()
    assert len(report.served) == 3
    assert {row.device for row in report.served} == {"cuda"}
    assert report.declined == ()
