"""The float64 reference of the GPU tests, cut in parts to save memory, is that of the whole."""

from __future__ import annotations

import pytest
import torch
from gpu import attention_reference as ar

ROWS, COLUMNS = 9, 11


@pytest.mark.parametrize("heads_at_a_time", [0.5, 1, 2, 5])
@pytest.mark.parametrize(("batch", "heads", "kv_heads"), [(7, 4, 2), (1, 6, 3), (5, 3, 3)])
def test_parts_are_the_whole(monkeypatch, batch, heads, kv_heads, heads_at_a_time) -> None:
    g = torch.Generator().manual_seed(batch)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    q, grad = (draw(batch, heads, ROWS, 16) for _ in range(2))
    k, v = (draw(batch, kv_heads, COLUMNS, 16) for _ in range(2))
    options = [
        {},
        {"alibi_slopes": torch.rand(batch, heads, generator=g), "sinks": draw(heads)},
        {"alibi_slopes": torch.rand(heads, generator=g)},
        {"attn_mask": draw(batch, 1, ROWS, COLUMNS) > 0},
        {"attn_mask": draw(1, heads, ROWS, COLUMNS)},
        {"attn_mask": draw(ROWS, COLUMNS)},
    ]
    for option in options:
        whole = ar._reference(q, k, v, grad, enable_gqa=True, **option)
        with monkeypatch.context() as patch:
            patch.setattr(ar, "MOST_SCORES", int(ROWS * COLUMNS * heads_at_a_time))
            parts = ar.reference(q, k, v, grad, enable_gqa=True, **option)
        for name in ("out", "logsumexp", "dq", "dk", "dv"):
            torch.testing.assert_close(getattr(parts, name), getattr(whole, name))
        assert parts.squares.keys() == whole.squares.keys()
        for name, square in whole.squares.items():
            torch.testing.assert_close(parts.squares[name], square)
