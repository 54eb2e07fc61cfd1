"""Trains a block of a transformer by several processes, tensor parallel, with kernels from cubins.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py                  # a GPU a process
    torchrun --nproc-per-node 4 examples/tensor_parallel.py --device cpu

Attention is `torch.ops.cubin.scaled_dot_product_attention` of DTensors, whose heads the processes
share; the linear layers are PyTorch's, which `torch_cubin.install()` serves on GPUs. Each process
also trains the whole block alone. The exit status says whether both have the same losses.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

# The checkout's torch_cubin, unless one is installed.
sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch_cubin

WIDTH, HEADS, ROWS, BATCH = 256, 8, 64, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (
            layer(h).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        heads = torch.ops.cubin.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(-2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def train(block: nn.Module, x: Tensor, target: Tensor, steps: int) -> list[float]:
    # Not foreach, the default on GPUs: it refuses DTensors beside tensors (weights of the norms).
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1, foreach=False)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss(block(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("torchrun starts it: torchrun --nproc-per-node 2 examples/tensor_parallel.py")
    device = torch.device(options.device, int(os.environ.get("LOCAL_RANK", 0)))
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))

    torch.manual_seed(0)
    x, target = (torch.randn(BATCH, ROWS, WIDTH, device=device) for _ in range(2))
    alone = Block().to(device)
    shared = Block().to(device)
    shared.load_state_dict(alone.state_dict())
    columns = dict.fromkeys(("q", "k", "v", "gate", "up"), ColwiseParallel())
    rows = dict.fromkeys(("out", "down"), RowwiseParallel())
    parallelize_module(shared, mesh, {**columns, **rows})

    with torch_cubin.install():
        losses = [train(block, x, target, options.steps) for block in (alone, shared)]
    difference = max(abs(a - b) / a for a, b in zip(*losses, strict=True))
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} processes, {device.type}: loss {losses[1][0]:.4f} -> "
              f"{losses[1][-1]:.4f}, alone {losses[0][-1]:.4f}")  # fmt: skip
        print(torch_cubin.report())
    dist.destroy_process_group()
    return 0 if difference < 1e-3 else 1


if __name__ == "__main__":
    sys.exit(main())
