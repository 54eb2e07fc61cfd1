"""One rank of test_cuda_ranks.py: a model of several GPUs under install(), beside that of one GPU.

    torchrun --nproc-per-node 4 tests/gpu/rank_child.py FOLDER           # NCCL
    torchrun --nproc-per-node 4 tests/gpu/rank_child.py FOLDER cpu       # gloo, to try this file

Rank 0 writes FOLDER/answer.json. Errors are those of the parameters after a step of the optimizer,
relative to the update in the norm, against one GPU in float32 without install().
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import torch_cubin
from torch_cubin._drop_in import aten_kernels

WIDTH, HEADS, ROWS, BATCH, LAYERS = 512, 8, 128, 4, 2
RATE = 1000.0  # so that an update is large beside the rounding of bfloat16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (
            layer(h).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(-2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def whole(value: Any) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def step(model: nn.Module, x: Tensor, target: Tensor) -> None:
    # Not foreach, the default on GPUs: it refuses DTensors beside tensors (weights of the norms).
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, foreach=False)
    (whole(model(x)).float() - target).square().mean().backward()
    optimizer.step()


def fsdp(model: Any, mesh: Any) -> None:
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def tensor_parallel(model: Any, mesh: Any) -> None:
    columns = dict.fromkeys(("q", "k", "v", "gate", "up"), ColwiseParallel())
    for layer in model:
        parallelize_module(layer, mesh, {**columns, "out": RowwiseParallel(),
                                         "down": RowwiseParallel()})  # fmt: skip


def sequence_parallel(model: Any, mesh: Any) -> None:
    columns = ColwiseParallel(input_layouts=Shard(1))
    rows = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    plan: dict[str, Any] = dict.fromkeys(("q", "k", "v", "gate", "up"), columns)
    plan |= dict.fromkeys(("out", "down"), rows)
    plan |= dict.fromkeys(("norm", "norm2"), SequenceParallel())
    for layer in model:
        parallelize_module(layer, mesh, plan)


PLANS: dict[str, Callable[[Any, Any], None]] = {
    "fsdp": fsdp,
    "tensor": tensor_parallel,
    "sequence": sequence_parallel,
}


class Run:
    def __init__(self, device: torch.device, folder: str) -> None:
        self.device, self.folder = device, folder
        self.mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        torch.manual_seed(0)
        self.start = {name: each.bfloat16() for name, each in self.model().state_dict().items()}
        self.x = torch.randn(BATCH, ROWS, WIDTH, device=device, dtype=torch.bfloat16)
        self.target = torch.randn(BATCH, ROWS, WIDTH, device=device)
        model = self.model(torch.float32)
        step(model, self.x.float(), self.target)
        self.wanted = model.state_dict()

    def model(self, dtype: torch.dtype = torch.bfloat16) -> Any:
        with self.device:
            model = nn.Sequential(*[Block() for _ in range(LAYERS)])
        if hasattr(self, "start"):
            model.load_state_dict(self.start)
        return model.to(dtype)

    def error(self, state: dict[str, Any]) -> float:
        wrong = update = 0.0
        for name, wanted in self.wanted.items():
            wrong += (whole(state[name]).float() - wanted).square().sum().item()
            update += (wanted - self.start[name].float()).square().sum().item()
        return (wrong / update) ** 0.5

    def trained(self, plan: Callable[[Any, Any], None]) -> tuple[Any, dict[str, int]]:
        model, x = self.model(), self.x
        plan(model, self.mesh)
        if plan is sequence_parallel:
            x = distribute_tensor(x, self.mesh, [Shard(1)])
        with CommDebugMode() as communication:
            step(model, x, self.target)
        counts = {str(op): count for op, count in communication.get_comm_counts().items()}
        return model, counts

    def loads_on_fewer(self, name: str, model: Any) -> list[bool]:
        """Whether the checkpoint of all ranks is that of a model on one GPU, and on two."""
        path = os.path.join(self.folder, name)
        checkpoint.save(model.state_dict(), checkpoint_id=path)
        own = {key: whole(value) for key, value in model.state_dict().items()}
        alone = self.model().state_dict()
        checkpoint.load(alone, checkpoint_id=path, no_dist=True)
        names = ("pairs", "ranks")
        pairs = init_device_mesh(self.device.type, (dist.get_world_size() // 2, 2),
                                 mesh_dim_names=names)  # fmt: skip
        on_two = self.model()
        PLANS[name](on_two, pairs["ranks"])
        state = on_two.state_dict()
        checkpoint.load(state, checkpoint_id=path)
        return [
            all(torch.equal(whole(loaded[key]), value) for key, value in own.items())
            for loaded in (alone, state)
        ]

    def answer(self, name: str) -> dict[str, Any]:
        plan = PLANS[name]
        _, before = self.trained(plan)
        with torch_cubin.install(policy="all"):
            model, after = self.trained(plan)
            served = {row.function: row.calls for row in torch_cubin.report().served}
        return {
            "error": self.error(model.state_dict()),
            "collectives": [before, after],
            "served": served,
            "loads": self.loads_on_fewer(name, model),
        }


def main(folder: str, kind: str = "cuda") -> None:
    warnings.filterwarnings("ignore")
    limit = datetime.timedelta(seconds=60)  # a collective that hangs ends its process
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, timeout=limit)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=limit)
        aten_kernels.register("CPU")
    run = Run(device, folder)
    alone = run.model()
    step(alone, run.x, run.target)
    answer: dict[str, Any] = {"alone": run.error(alone.state_dict())}
    for name in PLANS:
        answer[name] = run.answer(name)
    if dist.get_rank() == 0:
        Path(folder, "answer.json").write_text(json.dumps(answer))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
