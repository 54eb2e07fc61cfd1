"""What torch_cubin.moe(recipe="block") computes: products of the numbers that 8-bit floats are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from scaled_cases import BLOCK_1X128, BLOCK_128X128, scales_of_elements
from torch import Tensor

import torch_cubin


def rounded(x: Tensor, recipe: int = BLOCK_1X128, *, columns: bool = False) -> Tensor:
    """The numbers that x has after it is quantised, in float64; blocks are 128 of each column's."""
    data, scale = torch_cubin.ops.quantize(x, recipe, transpose=columns)
    own = data.double() * scales_of_elements(scale, recipe, *data.shape).double()
    return own.t() if columns else own


def products_of_8_bits(args: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    """The output, and the gradients of x, the tokens' weights, w13 and w2, expert by expert.

    Blocks of 128 rows are an expert's own. Sums that the layer stores have its dtype, those of this
    function are exact.
    """
    x, ids, weights, w13, w2 = args
    dtype = x.dtype
    out, x_grad = (torch.zeros(x.shape, dtype=torch.float64, device=x.device) for _ in range(2))
    weights_grad = torch.zeros(weights.shape, dtype=torch.float64, device=x.device)
    grads13, grads2 = [], []
    for expert, (own13, own2) in enumerate(zip(w13, w2, strict=True)):
        token, place = torch.where(ids == expert)
        first, second = rounded(own13, BLOCK_128X128), rounded(own2, BLOCK_128X128)
        by = weights[token, place, None].double()
        before = (rounded(x[token]) @ first.t()).to(dtype)
        gate, up = (half.double().requires_grad_() for half in before.chunk(2, 1))
        inside = F.silu(gate) * up
        data, scale = torch_cubin.ops.quantize(before, BLOCK_1X128, gate="silu")
        gated = data.double() * scales_of_elements(scale, BLOCK_1X128, *data.shape).double()
        out.index_add_(0, token, by * (gated @ second.t()).to(dtype).double())

        rows = grad[token]
        inside_grad = (rounded(rows) @ second).to(dtype).double()
        weights_grad[token, place] = (inside_grad * inside.detach()).sum(1)
        halves = torch.autograd.grad(inside, (gate, up), inside_grad * by)
        before_grad = torch.cat(halves, 1).to(dtype)
        weighted = (by * inside.detach()).to(dtype)
        grads2.append(rounded(rows, columns=True).t() @ rounded(weighted, columns=True))
        grads13.append(rounded(before_grad, columns=True).t() @ rounded(x[token], columns=True))
        x_grad.index_add_(0, token, (rounded(before_grad) @ first).to(dtype).double())
    return [out, x_grad, weights_grad, torch.stack(grads13), torch.stack(grads2)]
