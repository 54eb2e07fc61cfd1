"""torch_cubin.float8 on a GPU: inference, and training whose loss falls as in bfloat16."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_cubin


def relative_error(out: Tensor, wanted: Tensor) -> float:
    return float((out.float() - wanted.float()).norm() / wanted.float().norm())


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(300, 520), nn.GELU(), nn.Linear(520, 72))
    return layers.to("cuda", torch.bfloat16)


@torch.no_grad()
def test_inference() -> None:
    for recipe in ("block", "row"):
        plain = model()
        for rows in (1, 7, 300):
            x = torch.randn(2, rows, 300, device="cuda", dtype=torch.bfloat16)
            wanted = plain(x)
            assert relative_error(torch_cubin.float8(model(), recipe)(x), wanted) < 0.08


def test_training_learns_as_in_bfloat16() -> None:
    curves = []
    for training in (False, True):
        own = model()
        if training:
            torch_cubin.float8(own, training=True)
        optimizer = torch.optim.AdamW(own.parameters(), 2e-3)
        x = torch.randn(700, 300, device="cuda", dtype=torch.bfloat16)
        y = torch.randn(700, 72, device="cuda", dtype=torch.bfloat16)
        losses = []
        for _ in range(300):
            loss = F.mse_loss(own(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        curves.append(torch.stack(losses).float())
    plain, own = curves
    assert plain[-1] < 0.5 * plain[0]
    assert (own - plain).abs().max() < 0.05


def test_training_takes_no_more_memory_than_in_bfloat16() -> None:
    def peak(training: bool) -> int:
        before = torch.cuda.memory_allocated()
        layers = [layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.GELU())]
        model = nn.Sequential(*layers).to("cuda", torch.bfloat16)
        if training:
            torch_cubin.float8(model, training=True)
        x = torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16)
        for _ in range(2):  # the second step has gradients and a workspace
            torch.cuda.reset_peak_memory_stats()
            model(x).sum().backward()
        return torch.cuda.max_memory_allocated() - before

    stock, own = peak(False), peak(True)
    assert own <= stock
