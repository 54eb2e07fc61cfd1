"""Tensor subclasses on a GPU that have no memory of their own: named, and nothing is launched."""

from __future__ import annotations

import pytest
import torch
from declared import vec_add
from fake_driver import tensors
from faults import catalogs


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, *sizes, dtype=torch.float32):
        return torch.Tensor._make_wrapper_subclass(cls, sizes, dtype=dtype, device="cuda:0")

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        with torch._C._DisableTorchDispatch():
            return func(*args, **(kwargs or {}))


def real(*sizes):
    return tensors.empty(*sizes)


ops = torch.ops.cubin
CALLS = {
    "matmul, first": lambda made: ops._matmul(made(8, 8), real(8, 8)),
    "matmul, second": lambda made: ops._matmul(real(8, 8), made(8, 8)),
    "linear, bias": lambda made: ops._linear(real(8, 8), real(8, 8), made(8)),
    "addmm": lambda made: ops._addmm(made(8, 8), real(8, 8), real(8, 8)),
    "attention": lambda made: ops._scaled_dot_product_attention(
        real(1, 2, 8, 64), made(1, 2, 8, 64), real(1, 2, 8, 64), None, 0.0, False
    ),
    "attention, mask": lambda made: ops._scaled_dot_product_attention(
        *(real(1, 2, 8, 64) for _ in range(3)), made(8, 8), 0.0, False
    ),
    "norm's gradient, mean": lambda made: ops._norm_backward(
        *(real(8, 64), None, real(8, 64), made(8, 1), real(8, 1), real(64), 1, 1e-5, True, True),
        None,
    ),
    "norm's gradient, rstd": lambda made: ops._norm_backward(
        *(real(8, 64), None, real(8, 64), real(0), made(8, 1), real(64), 1, 1e-5, False, True),
        None,
    ),
    "scale": lambda made: ops._scale_into(made(8, 8), real()),
    "declared": lambda made: vec_add().overload(real(8, 8), made(8, 8)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrapper_without_memory_is_named(driver, name) -> None:
    families = ("matmul", "attention", "rows")
    catalogs.declare(driver, [kernel for each in families for kernel in catalogs.kernels_of(each)])
    call = CALLS[name]
    with pytest.raises((RuntimeError, ValueError), match=r"\[input\].*a Wrapper"):
        call(Wrapper)
    with pytest.raises((RuntimeError, ValueError), match=r"\[input\].*no memory.*a Tensor"):
        call(tensors.without_memory)
    assert driver.launches() == []


def test_a_loss_without_memory_is_refused(driver) -> None:
    catalogs.declare(driver, catalogs.kernels_of("rows"))
    grad, logits, target = real(), real(8, 64), tensors.empty(8, dtype=torch.int64)
    for given in ((tensors.without_memory(8), real(8)), (real(8), tensors.without_memory(8))):
        with pytest.raises((RuntimeError, ValueError), match=r"\[input\].*no memory"):
            ops._cross_entropy_backward(
                *(grad, logits, target, None, real(), *given, "mean", -100, 0.0)
            )
    assert driver.launches() == []
