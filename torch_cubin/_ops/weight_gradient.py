"""Gradients of weights that accumulate in float32, with the same bits however a batch is cut."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_cubin import errors
from torch_cubin._ops import checks
from torch_cubin._ops.batch_invariant import batch_invariant
from torch_cubin._pytorch import dispatch_keys

_NAME = "torch_cubin.accumulate_weight_gradient"
# Cuts are then at multiples of 16 bytes, where kernels add alike.
_MULTIPLE = 8


@torch.no_grad()
def accumulate_weight_gradient(
    main_grad: Tensor, grad: Tensor, input: Tensor, *, tokens: int, last: bool = False
) -> None:
    """``main_grad += grad.t() @ input``, in chunks of ``tokens`` tokens.

    Each chunk is summed from zero, and added to ``main_grad`` in the order of the tokens. So a
    batch gives the same bits whole or cut into several calls, wherever the cuts are multiples of
    ``tokens``, for losses that are sums or that are scaled by powers of two. Under autocast, too,
    operands keep their dtype.

    Args:
        main_grad: (N, K) of float32 (float64 for operands of float64), contiguous; it is written.
        grad: (..., N), the gradient of the layer's output; the other dims are tokens.
        input: (..., K), the layer's input.
        tokens: of a chunk; a multiple of 8.
        last: whether the batch ends here. Only then may the number of tokens be no multiple of
            ``tokens``.
    """
    checks.require_tensors(_NAME, main_grad=main_grad, grad=grad, input=input)
    if grad.dim() < 2 or input.dim() < 2 or grad.shape[:-1] != input.shape[:-1]:
        shapes = f"{tuple(grad.shape)} and {tuple(input.shape)}"
        raise _fault("'grad' and 'input'", "do not fit", "(..., N) and (..., K)", shapes)
    if main_grad.shape != (grad.shape[-1], input.shape[-1]):
        wanted = str((grad.shape[-1], input.shape[-1]))
        raise _fault("'main_grad'", "has a wrong shape", wanted, str(tuple(main_grad.shape)))
    wide = torch.float64 if input.dtype == torch.float64 else torch.float32
    if main_grad.dtype != wide or grad.dtype != input.dtype:
        got = f"{main_grad.dtype}, {grad.dtype} and {input.dtype}"
        raise _fault("'main_grad'", "has a wrong dtype", f"{wide} for one dtype of operands", got)
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1 or tokens % _MULTIPLE:
        expected = f"a positive multiple of {_MULTIPLE}"
        raise _fault("'tokens'", "is no number of tokens of a chunk", expected, repr(tokens))
    count = grad.shape[:-1].numel()
    if count % tokens and not last:
        raise _fault(
            "'tokens'", "does not divide the batch, whose bits would depend on this cut",
            f"a multiple of {tokens} tokens", str(count),
            "Cut batches at multiples, and pass last=True where the batch ends.",
        )  # fmt: skip
    rows = [each.reshape(count, each.shape[-1]).split(tokens) for each in (grad, input)]
    with batch_invariant(), dispatch_keys.without_autocast():
        for chunk, own in zip(*rows, strict=True):
            torch.ops.cubin.addmm_into(main_grad, chunk.t(), own)


def _fault(what: str, problem: str, expected: str, got: str, advice: str = "") -> errors.Error:
    object = f"{_NAME} argument {what}"
    return errors.fault("input", object, problem, expected=expected, got=got, advice=advice)


__all__ = ["accumulate_weight_gradient"]
