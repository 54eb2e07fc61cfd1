"""Muon's Newton-Schulz iteration for batches of matrices, with its symmetric products at half the
work. torch.optim.Muon needs none of this inside drop_in() or install(); it iterates on one matrix
at a time.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from torch_cubin import errors
from torch_cubin._ops import checks

# Those of torch.optim.Muon.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
# Steps of the Gram form before the matrix itself is multiplied. With more, the rounding errors of
# small singular values would grow by a^2 in every step.
_STEPS_TOGETHER = 3


def newton_schulz(
    grad: Tensor,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    *,
    steps: int = 5,
    eps: float = 1e-7,
    gram: bool = False,
) -> Tensor:
    """The orthogonal part of each matrix, approximately, as torch.optim.Muon computes it.

    Each step is ``x = a x + (b g + c g g) x`` with ``g = x x^T``, of the matrix or its transpose,
    whichever has fewer rows, divided by its norm.

    Args:
        grad: (..., M, N), of any floating dtype, on a GPU or the CPU.
        coefficients: a, b and c.
        steps: how many.
        eps: the least norm that a matrix is divided by.
        gram: iterate on g, in float16, and multiply x after every third step only. It rounds
            differently, with a smaller error, and is faster for large matrices of many columns,
            such as 4,096 x 16,384.

    Returns:
        bfloat16, of the shape of ``grad``.

    Raises:
        torch_cubin.Error: [input] for a tensor that is no floating-point matrix, or needs a
            derivative, which there is not; and for a negative number of steps.
    """
    checks.require_tensors("newton_schulz", grad=grad)
    if grad.dim() < 2 or not grad.is_floating_point():
        raise errors.fault(
            "input", "newton_schulz argument 'grad'", "is not a matrix of numbers",
            expected="a floating-point tensor with at least 2 dimensions",
            got=f"{grad.dtype} of shape {tuple(grad.shape)}",
        )  # fmt: skip
    if torch.is_grad_enabled() and grad.requires_grad:
        raise errors.fault(
            "input", "newton_schulz", "has no rule for derivatives",
            expected="a call outside of it", got="one inside",
            advice="Call it under torch.no_grad(), or on grad.detach().",
        )  # fmt: skip
    if steps < 0:
        raise errors.fault(
            "input", "newton_schulz argument 'steps'", "is negative", expected="0 or more",
            got=str(steps),
        )  # fmt: skip
    device = grad.device.type
    # Autocast would compute in its own dtype what the iteration computes in bfloat16 and float16.
    in_stated_dtypes = (
        torch.autocast(device, enabled=False)
        if torch.amp.is_autocast_available(device)
        else nullcontext()
    )
    with torch.no_grad(), in_stated_dtypes:
        return _orthogonal(grad, coefficients, steps, eps, gram)


def _orthogonal(
    grad: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float, gram: bool
) -> Tensor:
    tall = grad.shape[-2] > grad.shape[-1]
    x = grad.to(torch.bfloat16, copy=True)
    x = x.mT if tall else x
    x.div_(x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps))
    iterate = _by_gram if gram else _directly
    x = iterate(x, coefficients, steps)
    return x.mT if tall else x


def _gram(x: Tensor) -> Tensor:
    return torch.ops.cubin.syrk(x)


def _polynomial(g: Tensor, b: float, c: float) -> Tensor:
    """b g + c g g"""
    return torch.ops.cubin.symm_square(g, g, beta=b, alpha=c)


def _directly(x: Tensor, coefficients: tuple[float, float, float], steps: int) -> Tensor:
    a, b, c = coefficients
    for _ in range(steps):
        x = torch.ops.cubin.addmm(x, _polynomial(_gram(x), b, c), x, beta=a)
    return x


def _by_gram(x: Tensor, coefficients: tuple[float, float, float], steps: int) -> Tensor:
    """With p = b g + c g g, a step is x = (a + p) x, and then g is (a + p) g (a + p). All of these
    commute, so the factors of several steps are multiplied before x."""
    a, b, c = coefficients
    addmm = torch.ops.cubin.addmm
    for first in range(0, steps, _STEPS_TOGETHER):
        count = min(_STEPS_TOGETHER, steps - first)
        g = _gram(x.half())
        for step in range(count):
            p = _polynomial(g, b, c)
            if step == 0:
                factor = p.clone()
                factor.diagonal(dim1=-2, dim2=-1).add_(a)
            else:
                factor = addmm(factor, p, factor, beta=a)
            if step + 1 < count:
                g = addmm(g, p, g, beta=a)
                g = addmm(g, g, p, beta=a)
        x = torch.ops.cubin.matmul(factor, x.half()).bfloat16()
    return x
