"""One rank of PyTorch's context parallelism: `context_parallel_worker.py DEVICE RANK RANKS FOLDER`.

Attention over sequences whose rows are split over the ranks, forward and backward, as a ring
of calls of PyTorch's flash attention, behind which the implementation "cubin" stands. Each call's
logsumexp decides how the parts are added. Prints one JSON object.
"""

from __future__ import annotations

import json
import math
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import _attention as api
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import attention

import torch_cubin
from torch_cubin._drop_in import flash_implementation

SHAPE = {"cpu": (2, 4, 16, 8), "cuda": (2, 4, 1024, 64)}


def formula(q, k, v, is_causal: bool):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if is_causal:
        hidden = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores.softmax(-1) @ v


def options():
    """Of PyTorch's ring of calls; where they stand is private, and changes."""
    for name in ("_context_parallel._attention", "_attention"):
        module = sys.modules.get(f"torch.distributed.tensor.experimental.{name}")
        if hasattr(module, "_cp_options"):
            return module._cp_options
    raise AttributeError("_cp_options")


def step(mesh, device: str, is_causal: bool) -> list[float]:
    """Relative errors of the output and of the gradients, of whole sequences."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(SHAPE[device], device=device).bfloat16() for _ in range(4))
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out = formula(*leaves, is_causal)
    wanted = [out.detach(), *torch.autograd.grad(out, leaves, grad.double())]
    # Alternating from both ends, so that each rank has as much to do, where rows see those before.
    options().enable_load_balance = is_causal
    buffers = [q, k, v, grad]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4):
        own = [x.clone().requires_grad_() for x in (q, k, v)]
        shared = [DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in own]
        call = torch.ops.aten._scaled_dot_product_flash_attention
        out = call(*shared, 0.0, is_causal)[0]
        up = DTensor.from_local(grad.clone(), mesh, [Shard(2)], run_check=False)
        gradients = torch.autograd.grad(out, shared, up)
        parts = [x.to_local() for x in (out.detach(), *gradients)]
        whole = api.context_parallel_unshard(mesh, parts, [2] * 4)
    return [
        float((mine.double() - theirs).norm() / theirs.norm())
        for mine, theirs in zip(whole, wanted, strict=True)
    ]


def main(device: str, rank: int, ranks: int, folder: str) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank)
        attention.activate_flash_attention_impl("cubin")
    else:
        flash_implementation.Implementation("CPU")
    backend = "nccl" if device == "cuda" else "gloo"
    store = f"file://{folder}/store"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=ranks)
    mesh = init_device_mesh(device, (ranks,))
    errors = [step(mesh, device, is_causal) for is_causal in (True, False)]
    report = torch_cubin.report()
    dist.destroy_process_group()
    served = {row.function: row.calls for row in report.served}
    print(json.dumps({"errors": errors, "served": served, "declined": len(report.declined)}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
