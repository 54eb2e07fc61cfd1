"""Random calls of grouped_matmul with options, and what they are to give, for tests on the CPU and
on GPUs."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "relu": F.relu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
OPTIONS = ("bias", "scale", "rows", "out_rows", "activation")


def draw(
    source: random.Random,
    sizes: tuple[int, ...],
    k: int,
    n: int,
    options: tuple[str, ...],
    dtype: torch.dtype,
    device: str = "cpu",
    rest: int = 0,
) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
    """Operands and keyword arguments; n columns of results. Some numbers are no rows."""
    generator = torch.Generator(device).manual_seed(source.randrange(2**31))
    made: dict[str, Any] = {"device": device, "generator": generator}
    count, groups = sum(sizes) + rest, len(sizes)
    columns = 2 * n if "activation" in options else n
    tokens = max(1, count // 2) if "rows" in options else count

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, **made).to(dtype)

    b = normal(groups, columns, k) * max(1, k) ** -0.5
    if source.random() < 0.5:
        b = b.mT.contiguous().mT
    given: dict[str, Any] = {"offs": torch.tensor(sizes, device=device).cumsum(0).int()}
    if "bias" in options:
        given["bias"] = normal(groups, columns)
    if "scale" in options:
        given["scale"] = torch.rand(count, **made) - 0.5
    if "rows" in options:
        given["rows"] = torch.randint(-1, tokens + 1, (count,), dtype=torch.int32, **made)
    if "out_rows" in options:
        order = torch.randperm(count, **made).int()
        given["out_rows"] = order.where(order % 7 != 3, source.choice([-1, count, 2**31 - 1]))
        given["out_rows"][sum(sizes) :] = order[0]  # rows of no group go nowhere
    if "activation" in options:
        given["activation"] = source.choice(list(ACTIVATIONS))
    return (normal(tokens, k), b.mT), given


def expected(a: Tensor, b: Tensor, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The result in the operands' dtype, and whether each row of it is stored to."""
    offs = given["offs"].tolist()
    if "rows" in given:
        numbers = given["rows"].long()
        known = (numbers >= 0) & (numbers < a.shape[0])
        a = torch.where(known[:, None], a[numbers.clamp(0, a.shape[0] - 1)], 0)
    parts = []
    for group, (start, end) in enumerate(zip([0, *offs], offs, strict=False)):
        own = a[start:end] @ b[group]
        if "bias" in given:
            own = own + given["bias"][group]
        if "activation" in given:
            gate, up = own.chunk(2, -1)
            own = ACTIVATIONS[given["activation"]](gate) * up
        if "scale" in given:
            own = (own * given["scale"][start:end, None]).to(a.dtype)
        parts.append(own)
    rows = torch.cat(parts)
    out = rows.new_zeros(a.shape[0], rows.shape[1])
    stored = torch.zeros(a.shape[0], dtype=torch.bool, device=a.device)
    places = torch.arange(len(rows), device=a.device)
    if "out_rows" in given:
        places = given["out_rows"][: len(rows)].long()
        known = (places >= 0) & (places < a.shape[0])
        rows, places = rows[known], places[known]
    return out.index_put((places,), rows), stored.index_put((places,), stored.new_ones(()))
