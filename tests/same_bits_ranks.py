"""The same bits on one, two and four GPUs: a layer of two products that ranks share.

    torchrun --nproc-per-node 2 tests/same_bits_ranks.py     # or 4, or 1
    torchrun --nproc-per-node 2 tests/same_bits_ranks.py --parts 2 --only compiled

Prints, eager and compiled, one sha256 of a step's output and gradients, and its time, on meshes of
one rank and of more: equal under install(batch_invariant=True, tensor_parallel=4), and other ones
without the parts, which `--only` skips. The exit status says whether none differs under it, and
which tensors do. Each mesh compiles its own graphs, half a minute for all on four GPUs.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch_cubin

WIDTH, HIDDEN, STEPS = 2048, 8192, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def digest(tensor: Tensor) -> str:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return hashlib.sha256(whole.detach().float().contiguous().cpu().numpy().tobytes()).hexdigest()


def of_all(hashes: dict[str, str]) -> str:
    return hashlib.sha256("".join(hashes.values()).encode()).hexdigest()[:16]


def run(mesh: DeviceMesh, dtype: torch.dtype, compiled: bool) -> tuple[dict[str, str], float]:
    """The hashes of a step's results, and the milliseconds that one takes."""
    torch.manual_seed(0)
    model = Block().to("cuda", dtype)
    plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    call = torch.compile(model) if compiled else model
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(3, 333, WIDTH, generator=draw).to("cuda", dtype).requires_grad_()
    out = call(x)
    out.float().square().sum().backward()
    grads = {f"grad of {name}": each.grad for name, each in model.named_parameters()}
    found = {
        name: digest(each) for name, each in {"out": out, "grad of x": x.grad, **grads}.items()
    }
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(STEPS):
        call(x).float().square().sum().backward()
    torch.cuda.synchronize()
    return found, (time.perf_counter() - begin) / STEPS * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--only", choices=("eager", "compiled"))
    options = parser.parse_args()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    meshes = {
        count: init_device_mesh("cuda", (ranks // count, count), mesh_dim_names=("each", "tp"))
        for count in (1, 2, 4)
        if ranks % count == 0
    }
    wrong = 0
    for compiled in (False, True):
        if options.only == ("eager" if compiled else "compiled"):
            continue
        for dtype in (torch.bfloat16, torch.float32)[: 1 if compiled else 2]:
            for parts in (None, options.parts)[1 if options.only else 0 :]:
                with torch_cubin.install(batch_invariant=True, tensor_parallel=parts):
                    found = {n: run(mesh["tp"], dtype, compiled) for n, mesh in meshes.items()}
                names = list(next(iter(found.values()))[0])
                differ = [n for n in names if len({each[n] for each, _ in found.values()}) > 1]
                wrong += parts is not None and bool(differ)
                if rank == 0:
                    each = ", ".join(
                        f"{n}: {of_all(h)} {ms:.2f} ms" for n, (h, ms) in found.items()
                    )
                    print(f"{dtype} {compiled=} tensor_parallel={parts}: {each}", flush=True)
                    if parts is not None and differ:
                        print(f"DIFFERENT: {', '.join(differ)}", flush=True)
    dist.destroy_process_group()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
