"""drop_in() in eager code: what it serves, what it leaves to PyTorch, and that both are right."""

from __future__ import annotations

import contextlib

import drop_in_cases as cases
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from drop_in_cases import integers, result_or_error, run, same

import torch_cubin
from torch_cubin import errors
from torch_cubin._drop_in import why_not
from torch_cubin._native import library

CALLS = [(case, dtype) for case in cases.SERVED for dtype in cases.DTYPES]


@pytest.mark.parametrize(
    ("case", "dtype"), CALLS, ids=lambda value: str(value) if value in cases.DTYPES else None
)
def test_served_call_equals_torch(case, dtype, device) -> None:
    name, shapes, call = case
    operands = [
        integers(*shape, dtype=dtype, device=device, seed=i) for i, shape in enumerate(shapes)
    ]
    expected = call(*operands)
    with torch.no_grad():
        result, ops, report = run(lambda: call(*operands))
    same(result, expected)
    assert ops.cubin() == 1
    assert ops.aten_products() == []
    assert [(row.function, row.dtype, row.calls) for row in report.served] == [
        (name, str(dtype).removeprefix("torch."), 1)
    ]
    assert report.declined == ()


@pytest.mark.parametrize("case", cases.SERVED, ids=cases.name_of)
def test_gradients_equal_torch(case, device) -> None:
    _, shapes, call = case

    def gradients() -> list[torch.Tensor]:
        operands = [
            integers(*shape, device=device, seed=i).requires_grad_()
            for i, shape in enumerate(shapes)
        ]
        call(*operands).sum().backward()
        return [operand.grad for operand in operands]

    expected = gradients()
    with torch_cubin.drop_in():
        result = gradients()
    for got, wanted in zip(result, expected, strict=True):
        same(got, wanted)


class Mine(torch.Tensor):
    """A subclass that keeps torch's default __torch_function__."""


def _sparse(a):
    return a.to_sparse()


# The reason that report() gives, and a call that PyTorch can do.
DECLINED = [
    ("dtype int64", lambda a: result_or_error(lambda: a.long() @ a.long())),
    ("dtype complex64", lambda a: torch.mm(a.to(torch.complex64), a.to(torch.complex64))),
    ("different dtypes", lambda a: result_or_error(lambda: torch.matmul(a, a.double()))),
    ("device meta", lambda a: torch.mm(a.to("meta"), a.to("meta")).shape),
    (
        "tensors on different devices",
        lambda a: result_or_error(lambda: torch.mm(a, _elsewhere(a)).shape),
    ),
    ("layout sparse_coo", lambda a: torch.mm(_sparse(a), a)),
    ("tensor subclass Mine", lambda a: a.as_subclass(Mine) @ a),
    ("tensor subclass Mine", lambda a: F.linear(a, a.as_subclass(Mine))),
    ("argument of type ndarray", lambda a: result_or_error(lambda: a.__rmatmul__(np.ones((4, 4))))),
    ("out= was given", lambda a: torch.mm(a, a, out=torch.empty_like(a))),
    ("in place", lambda a: a.clone().addmm_(a, a)),
    ("in place", lambda a: a[None].clone().baddbmm_(a[None], a[None], beta=0.5)),
    ("shapes that it does not take", lambda a: result_or_error(lambda: torch.mm(a, a[:3]))),
    ("shapes that it does not take", lambda a: result_or_error(lambda: torch.bmm(a[None], a))),
    ("shapes that it does not take", lambda a: result_or_error(lambda: torch.matmul(a, a[0, 0]))),
    ("shapes that it does not take", lambda a: result_or_error(lambda: torch.addmm(a[:3], a, a))),
    ("shapes that it does not take", lambda a: F.linear(a, a[0])),
    ("more than 64 dimensions", lambda a: (a[(None,) * 70] @ a)[(0,) * 70]),
    ("more than 64 dimensions", lambda a: F.linear(a[(None,) * 63], a)[(0,) * 63]),
    ("more than 64 dimensions", lambda a: result_or_error(lambda: torch.mm(a, a[(None,) * 63]))),
    (
        "more arguments than it takes",
        lambda a: result_or_error(lambda: torch.mm(a, a, torch.float32)),
    ),
    (
        "argument out_dtype",
        lambda a: result_or_error(lambda: torch.mm(a, a, out_dtype=torch.float32)),
    ),
    ("not two operands", lambda a: torch.einsum("ij->ji", a)),
    ("no index is summed over in both operands", lambda a: torch.einsum("ij,ij->ij", a, a)),
    ("an index summed over in one operand alone", lambda a: torch.einsum("ij,jk->k", a, a)),
    ("an index repeated in one operand", lambda a: torch.einsum("ii,ij->j", a, a)),
    ("an inner size of 1 that is broadcast", lambda a: torch.einsum("ij,jk->ik", a[:, :1], a)),
    (
        "an equation that torch.einsum refuses",
        lambda a: result_or_error(lambda: torch.einsum("ij,jk->iz", a, a)),
    ),
    ("no kernel for it in this version", lambda a: torch.tensordot(a, a, 1)),
    ("no kernel for it in this version", lambda a: torch.linalg.multi_dot([a, a, a])),
]


def _elsewhere(a: torch.Tensor) -> torch.Tensor:
    return a.cpu() if a.is_cuda else a.to("meta")


@pytest.mark.parametrize("case", DECLINED, ids=lambda case: case[0])
def test_declined_call_goes_to_torch_with_a_reason(case, device) -> None:
    reason, call = case
    a = integers(4, 4, device=device)
    expected = call(a)
    result, ops, report = run(lambda: call(a))
    assert ops.cubin() == 0
    assert [row.reason for row in report.declined] == [reason]
    assert report.served == ()
    if isinstance(expected, torch.Tensor):
        assert type(result) is type(expected)
        torch.testing.assert_close(result, expected)
    else:
        assert result == expected


def test_distributed_tensor_goes_to_torch(tmp_path) -> None:
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    from torch.distributed.tensor import Replicate, distribute_tensor

    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        mesh = distributed.init_device_mesh("cpu", (1,))
        tensor = distribute_tensor(integers(4, 4), mesh, [Replicate()])
        result, ops, report = run(lambda: torch.mm(tensor, tensor))
    finally:
        distributed.destroy_process_group()
    assert type(result) is type(tensor)
    assert [row.reason for row in report.declined] == ["tensor subclass DTensor"]
    assert ops.cubin() == 0


def test_beta_zero_ignores_the_input(device) -> None:
    nan = torch.full((5, 3), float("nan"), device=device)
    a, b = integers(5, 7, device=device), integers(7, 3, device=device)
    result, ops, _ = run(lambda: torch.addmm(nan, a, b, beta=0, alpha=2))
    same(result, 2 * (a @ b))
    assert ops.cubin() == 1
    batched, _, _ = run(lambda: torch.baddbmm(nan[None], a[None], b[None], beta=0))
    same(batched[0], a @ b)


def test_alpha_zero_ignores_the_product(device) -> None:
    nan = torch.full((5, 7), float("nan"), device=device)
    result, ops, _ = run(
        lambda: torch.addmm(integers(5, 3, device=device), nan, nan.t()[:, :3], beta=2, alpha=0)
    )
    same(result, 2 * integers(5, 3, device=device))
    assert ops.cubin() == 1


def test_factors_give_torchs_gradients(device) -> None:
    """Zeros, not None, where a factor is 0."""
    for factors in ({"beta": 0}, {"alpha": 0}, {"beta": 3, "alpha": 2}):
        gradients = []
        for inside in (False, True):
            operands = [integers(*s, device=device) for s in ((3,), (5, 7), (7, 3))]
            for operand in operands:
                operand.requires_grad_()
            with torch_cubin.drop_in() if inside else contextlib.nullcontext():
                torch.addmm(*operands, **factors).sum().backward()
            gradients.append([operand.grad for operand in operands])
        for own, wanted in zip(gradients[1], gradients[0], strict=True):
            same(own, wanted)


def test_training_a_model_equals_torch(device) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4, bias=False)
    ).to(device)
    x, y = torch.randn(6, 8, device=device), torch.randn(6, 4, device=device)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        F.mse_loss(model(x), y).backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = gradients()
    with torch_cubin.drop_in():
        result = gradients()
    for got, wanted in zip(result, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4)], ids=str)
def test_served_results_may_be_changed_in_place(shape, bias, device) -> None:
    layer = torch.nn.Linear(4, 4, bias=bias, device=device)
    x = integers(*shape, device=device).requires_grad_()
    layer(x).relu().sum().backward()
    expected, x.grad = x.grad, None
    with torch_cubin.drop_in():
        layer(x).relu_().sum().backward()
    torch.testing.assert_close(x.grad, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("tag", "declined"), [("arch", True), ("hash", False)])
def test_a_gpu_without_kernels_falls_back_to_torch_but_a_broken_catalog_raises(
    tag, declined, monkeypatch
) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    error = {"tag": tag, "message": f"torch_cubin [{tag}]: as a test wants it"}
    facts = {"index": 0, "name": "Old", "sm": 75, "arch": None, "arch_error": error}
    monkeypatch.setattr(why_not, "_refused", {})
    monkeypatch.setattr(library, "device", lambda index: facts)
    with FakeTensorMode(), torch_cubin.drop_in():
        a = torch.empty(4, 4, device="cuda")
        assert torch.mm(a, a).shape == (4, 4)
    report = torch_cubin.report()
    assert [row.reason for row in report.declined] == ["no kernels for sm_75"] * declined
    assert len(report.served) == (not declined)


def test_as_a_decorator_and_with_an_argument() -> None:
    @torch_cubin.drop_in()
    def product(a):
        """The product."""
        return a @ a

    torch_cubin.report()
    product(torch.ones(4, 4))
    assert product.__doc__ == "The product."
    with torch_cubin.drop_in():
        pass
    product(torch.ones(4, 4))
    assert "matmul" in str(torch_cubin.report())
    for wrong in (lambda: torch_cubin.drop_in(torch.nn.Linear(2, 2)), torch_cubin.drop_in):
        with pytest.raises(errors.InputError, match=r"drop_in"):
            wrong()(torch.nn.Linear(2, 2))
