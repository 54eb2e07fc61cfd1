"""Differentiable calls, and what hooks on saved tensors may return for what a call has saved."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

import torch_cubin

ops = torch.ops.cubin
ENDS, CUTS = (30, 30, 110, 150), (0, 33, 33, 100, 170)


def _ints(values: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=like.device)


def _classes(x: Tensor, count: int) -> Tensor:
    numbers = torch.arange(x.shape[0], device=x.device) * 7 % count
    return numbers.where(numbers % 5 != 0, -100)


def _experts(x: Tensor) -> Tensor:
    return torch.arange(2 * x.shape[0], device=x.device).view(-1, 2) * 5 % 7 % 6


def _packed(q: Tensor, k: Tensor, v: Tensor, **options: Tensor) -> Tensor:
    cuts = _ints(CUTS, q)
    ends = {"cu_seqlens_q": cuts, "cu_seqlens_k": cuts, "max_seqlen_q": 70, "max_seqlen_k": 70}
    out: Tensor = ops.flash_attention(q, k, v, is_causal=True, **ends, **options)
    return out


def _grouped(a: Tensor, b: Tensor, *bias: Tensor, **options: str) -> Tensor:
    given = {"bias": bias[0]} if bias else {}
    out: Tensor = ops.grouped_matmul(a, b, offs=_ints(ENDS, a), **given, **options)
    return out


def _loss(x: Tensor, **options: object) -> Tensor:
    loss: Tensor = ops.cross_entropy(x, _classes(x, x.shape[1]), **options)
    return loss


def _linear_loss(x: Tensor, w: Tensor, b: Tensor, recompute: bool) -> Tensor:
    given = {"linear_bias": b, "recompute": recompute}
    loss: Tensor = ops.linear_cross_entropy(x, w, _classes(x, w.shape[0]), **given)
    return loss


_HEADS = ((2, 4, 70, 64), (2, 4, 90, 64), (2, 4, 90, 64))
_LAYER = ((2, 65, 136), (264, 136), (264,))
_EXPERTS = ((90, 136), (90, 2), (6, 144, 136), (6, 136, 72))
# A function of tensors, and their shapes.
CASES: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "matmul": (ops.matmul, ((200, 136), (136, 264))),
    "matmul of odd sizes": (ops.matmul, ((77, 61), (61, 93))),
    "matmul of a batch": (ops.matmul, ((3, 72, 64), (64, 80))),
    "matmul of a vector": (ops.matmul, ((300, 520), (520,))),
    "few rows": (ops.linear, ((5, 1024), (1024, 1024))),
    "linear": (ops.linear, _LAYER),
    "activation": (lambda *x: ops.linear(*x, activation="gelu"), _LAYER),
    "addmm": (lambda *x: ops.addmm(*x, beta=0.5, alpha=2), ((264,), (130, 136), (136, 264))),
    "syrk": (lambda x, c: ops.syrk(x, c, beta=0.5), ((2, 136, 72), (136, 136))),
    "gate": (lambda *x: ops._linear_glu(*x, "silu"), ((130, 136), (264, 136), (264, 136))),
    "groups": (_grouped, ((150, 136), (4, 136, 72))),
    "groups with options": (
        lambda *x: _grouped(*x, activation="silu"),
        ((150, 136), (4, 136, 144), (4, 144)),
    ),
    "groups of K": (_grouped, ((136, 150), (150, 72))),
    "experts": (lambda x, *rest: torch_cubin.moe(x, _experts(x), *rest), _EXPERTS),
    "experts in pairs": (
        lambda x, *rest: torch_cubin.moe(x, _experts(x), *rest, interleaved=True),
        _EXPERTS,
    ),
    **{
        f"{name} of {columns}": (function, ((rows, columns), *((columns,),) * parameters))
        for rows, columns in ((64, 128), (64, 768), (64, 777), (64, 4096), (5, 20001))
        for name, function, parameters in (
            ("rms_norm", lambda x, w: ops.rms_norm(x, x.shape[1:], w), 1),
            ("layer_norm", lambda x, w, b: ops.layer_norm(x, x.shape[1:], w, b), 2),
            ("softmax", lambda x: ops.softmax(x, -1), 0),
            ("log_softmax", lambda x: ops.log_softmax(x, -1), 0),
            ("cross_entropy", _loss, 0),
            ("losses", lambda x: _loss(x, reduction="none", label_smoothing=0.1), 0),
        )
    },
    "linear loss": (lambda *x: _linear_loss(*x, False), ((130, 136), (520, 136), (520,))),
    "linear loss, twice": (lambda *x: _linear_loss(*x, True), ((130, 136), (520, 136), (520,))),
    **{
        f"attention of {columns}": (
            ops.scaled_dot_product_attention,
            tuple((*shape[:3], columns) for shape in _HEADS),
        )
        for columns in (40, 64, 96, 128, 256)
    },
    "attention with a mask": (
        lambda q, k, v: ops.scaled_dot_product_attention(
            q, k, v, torch.ones(70, 90, dtype=torch.bool, device=q.device).tril(9)
        ),
        _HEADS,
    ),
    "attention and its mask": (ops.scaled_dot_product_attention, (*_HEADS, (4, 70, 90))),
    "packed attention": (_packed, ((170, 4, 64), (170, 2, 64), (170, 2, 64))),
}


def inputs_of(name: str, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Of a case, the same ones each time."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for shape in CASES[name][1]:
        values = torch.randn(shape, generator=generator) * (0.1 if len(shape) > 1 else 1)
        made.append(values.to(device, dtype).requires_grad_())
    return made


def _at_odd_address(tensor: Tensor) -> Tensor:
    memory = tensor.new_empty(tensor.numel() + 1)
    return memory[1:].view(tensor.shape).copy_(tensor)


def _in_wider_rows(tensor: Tensor) -> Tensor:
    memory = tensor.new_zeros(*tensor.shape[:-1], (tensor.shape or (1,))[-1] + 3)
    return memory[..., 1 : memory.shape[-1] - 2].view(tensor.shape).copy_(tensor)


def _apart(tensor: Tensor) -> Tensor:
    return torch.stack((tensor, tensor), -1)[..., 0]


def _turned(tensor: Tensor) -> Tensor:
    dims = tuple(range(tensor.dim()))[::-1]
    return tensor.permute(dims).contiguous().permute(dims)


MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "at an odd address": _at_odd_address,
    "in wider rows": _in_wider_rows,
    "apart": _apart,
    "turned": _turned,
}


@contextlib.contextmanager
def saved_elsewhere(move: Callable[[Tensor], Tensor]) -> Iterator[None]:
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: tensor, lambda tensor: move(tensor.detach())
    ):
        yield
