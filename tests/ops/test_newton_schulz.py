"""torch_cubin.newton_schulz: Muon's iteration, of batches, and on Gram matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.optim import _muon

import torch_cubin

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def exact(grad: Tensor, steps: int = 5) -> Tensor:
    a, b, c = COEFFICIENTS
    x = grad.double()
    x = x / x.norm(dim=(-2, -1), keepdim=True)
    for _ in range(steps):
        g = x @ x.mT
        x = a * x + (b * g + c * g @ g) @ x
    return x


def error(x: Tensor, grad: Tensor, steps: int = 5) -> float:
    want = exact(grad, steps)
    return float((x.double() - want).norm() / want.norm())


def draw(*shape: int) -> Tensor:
    """Singular values of very different sizes."""
    torch.manual_seed(0)
    return torch.randn(shape) * torch.linspace(0.01, 3, shape[-1]) ** 2


SHAPES = [(48, 48), (48, 96), (96, 48), (3, 32, 64), (2, 2, 64, 32)]


@pytest.mark.parametrize("gram", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_as_accurate_as_muons(shape, gram: bool) -> None:
    grad = draw(*shape)
    before = grad.clone()
    got = torch_cubin.newton_schulz(grad, gram=gram)
    assert got.dtype == torch.bfloat16
    assert got.shape == grad.shape
    assert torch.equal(grad, before)
    matrices = grad.reshape(-1, *shape[-2:])
    own = torch.stack(
        [_muon._zeropower_via_newtonschulz(x, COEFFICIENTS, 5, 1e-7) for x in matrices]
    ).view(shape)
    assert error(got, grad) <= 1.2 * error(own, grad)


@pytest.mark.parametrize("steps", range(8))
def test_any_number_of_steps(steps: int) -> None:
    grad = draw(24, 64)
    for gram in (False, True):
        assert error(torch_cubin.newton_schulz(grad, steps=steps, gram=gram), grad, steps) < 0.03


@pytest.mark.parametrize("gram", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_changes_no_bit(dtype: torch.dtype, gram: bool) -> None:
    grad = draw(16, 24)
    own = torch_cubin.newton_schulz(grad, gram=gram)
    with torch.autocast("cpu", dtype=dtype):
        got = torch_cubin.newton_schulz(grad, gram=gram)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, own)


def test_bfloat16_input_is_not_overwritten() -> None:
    grad = draw(16, 16).bfloat16()
    before = grad.clone()
    torch_cubin.newton_schulz(grad)
    assert torch.equal(grad, before)


@pytest.mark.parametrize("grad", [torch.ones(3), torch.ones(3, 3, dtype=torch.int32)], ids=str)
def test_errors(grad: Tensor) -> None:
    with pytest.raises(torch_cubin.Error, match=r"\[input\]: newton_schulz argument 'grad'"):
        torch_cubin.newton_schulz(grad)
    with pytest.raises(torch_cubin.Error, match=r"\[input\]: newton_schulz argument 'steps'"):
        torch_cubin.newton_schulz(torch.ones(3, 3), steps=-1)


def test_a_derivative_is_not_cut_off_silently() -> None:
    grad = draw(8, 8).requires_grad_()
    with pytest.raises(torch_cubin.Error, match=r"\[input\]: newton_schulz has no rule for deriv"):
        torch_cubin.newton_schulz(grad)
    with torch.no_grad():
        assert not torch_cubin.newton_schulz(grad).requires_grad
