"""The ranks of test_sharding.py: our ops of DTensors on the CPU, beside those of whole tensors.

python sharding_worker.py RANKS FOLDER      writes FOLDER/RANK.json

Over 500 lines, because four processes that have formed a group run all of it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import torch_cubin
from torch_cubin._drop_in import aten_kernels
from torch_cubin._ops.scaled import ROW

ops = torch.ops.cubin
B, M, K, N, H = 4, 8, 16, 12, 4
R, S0, S1, S2, P = Replicate(), Shard(0), Shard(1), Shard(2), Partial()


def tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


x, w, b, c = tensor(B, M, K), tensor(N, K), tensor(N), tensor(N, K, seed=1)
q, k, v = (tensor(B, H, M, K, seed=i) for i in range(3))
k2, v2 = k[:, :2], v[:, :2]
kept = tensor(B, M, K, seed=5)
experts, ends = tensor(2, K, N), torch.tensor([3, M])
square = tensor(2, B, M, M)
labels = torch.arange(M) % K
slopes, mask = tensor(H).abs(), tensor(B, 1, M, M) > 0


def grouped(mat_a: torch.Tensor, mat_b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    return ops.grouped_matmul(mat_a, mat_b, offs=offs)


# Name, the call, its tensors, their placements, and the placements of the (first) result.
CASES: list[tuple[str, Any, list[torch.Tensor], list[Any], Any]] = [
    ("linear column", ops.linear, [x, w, b], [R, S0, S0], S2),
    ("linear row", ops.linear, [x, w], [S2, S1], P),
    ("linear row, bias", ops.linear, [x, w, b], [S2, S1, R], P),
    ("linear data", ops.linear, [x, w, b], [S0, R, R], S0),
    ("linear rows", ops.linear, [x, w, b], [S1, R, R], S1),
    ("gelu column", lambda *t: ops.linear(*t, activation="gelu"), [x, w, b], [R, S0, S0], S2),
    ("gelu row", lambda *t: ops.linear(*t, activation="gelu"), [x, w, b], [S2, S1, R], None),
    ("matmul column", ops.matmul, [x, w.t()], [R, S1], S2),
    ("matmul row", ops.matmul, [x, w.t()], [S2, S0], P),
    ("matmul batch", ops.matmul, [x, x.mT], [S0, S0], S0),
    ("matmul broadcast", ops.matmul, [x[:1], x.mT], [R, S0], S0),
    ("matmul of vectors", ops.matmul, [x[0, 0], x[0, 1]], [S0, S0], P),
    ("addmm", ops.addmm, [b, x[0], w.t()], [S0, R, S1], S1),
    ("addmm row", lambda *t: ops.addmm(*t, beta=0.5), [b, x[0], w.t()], [R, S1, S0], P),
    ("grouped column", grouped, [x[0], experts, ends], [R, S2, R], S1),
    ("grouped row", grouped, [x[0], experts, ends], [S1, S1, R], P),
    ("grouped sums", grouped, [x[0].t(), x[1], ends], [S0, R, R], S1),
    ("syrk batch", ops.syrk, [x], [S0], S0),
    ("syrk row", ops.syrk, [x], [S2], P),
    ("syrk, addend", lambda *t: ops.syrk(*t, beta=0.5), [x, square[0, 0]], [S2, R], P),
    ("syrk rows", ops.syrk, [x], [S1], None),
    ("square", lambda *t: ops.symm_square(*t, beta=0.5), [square[0], square[1]], [S0, S0], S0),
    ("square rows", ops.symm_square, [square[0]], [S1], None),
    ("glu", lambda *t: ops._linear_glu(*t, "silu"), [x, w, c], [R, S0, S0], S2),
    ("linears", lambda *t: ops._linears(t[0], t[1:], [])[1], [x, w, c], [R, S0, S0], S2),
    ("linears row", lambda *t: ops._linears(t[0], t[1:], [])[0], [x, w, c], [S2, S1, S1], P),
    ("one of linears", lambda *t: ops._linears(t[0], t[1:], [])[0], [x, w], [R, S0], S2),
    ("aux", lambda *t: ops._linear_activation_aux(*t, "gelu")[1], [x, w, b], [R, S0, S0], S2),
    ("rms_norm", lambda *t: ops.rms_norm(t[0], [K], t[1]), [x, w[0]], [S0, R], S0),
    ("rms_norm rows", lambda *t: ops.rms_norm(t[0], [K], t[1]), [x, w[0]], [S1, R], S1),
    ("rms_norm columns", lambda *t: ops.rms_norm(t[0], [K], t[1]), [x, w[0]], [S2, S0], None),
    ("add_rms_norm", lambda *t: ops.add_rms_norm(*t, [K])[0], [x, kept], [S1, S1], S1),
    ("layer_norm", lambda *t: ops.layer_norm(t[0], [K], *t[1:]), [x, w[0], w[1]], [S1, R, R], S1),
    ("layer_norm of two dims", lambda x: ops.layer_norm(x, [M, K]), [x], [S0], S0),
    ("softmax", lambda x: ops.softmax(x, -1), [x], [S1], S1),
    ("softmax columns", lambda x: ops.log_softmax(x, -1), [x], [S2], None),
    ("losses", lambda *t: ops.cross_entropy(*t, reduction="none"), [x[0], labels], [S0, S0], S0),
    (
        "a sum of losses",
        lambda *t: ops.cross_entropy(*t, reduction="sum"),
        [x[0], labels],
        [S0, S0],
        P,
    ),
    ("a mean loss", lambda *t: ops.cross_entropy(*t), [x[0], labels], [S0, S0], R),
    (
        "weighted",
        lambda *t: ops.cross_entropy(t[0], t[1], t[2].detach(), reduction="sum"),
        [x[0], labels, w[0].abs()],
        [S0, R, R],
        P,
    ),
    ("linear loss", ops.linear_cross_entropy, [x[0], w, labels], [S0, R, S0], R),
    ("sdpa heads", ops.scaled_dot_product_attention, [q, k, v], [S1] * 3, S1),
    ("sdpa batch", ops.scaled_dot_product_attention, [q, k, v], [S0] * 3, S0),
    ("sdpa mask", ops.scaled_dot_product_attention, [q, k, v, mask], [S1, S1, S1, R], S1),
    (
        "sdpa grouped",  # 2 heads of keys on 4 ranks: they are gathered
        lambda *t: ops.scaled_dot_product_attention(*t, enable_gqa=True, is_causal=True),
        [q, k2, v2],
        [S0, S0, S0],
        S0,
    ),
    (
        "slopes",
        lambda *t: ops.attention_forward(*t[:3], alibi_slopes=t[3])[0],
        [q, k, v, slopes],
        [S1, S1, S1, S0],
        S1,
    ),
]


def full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def check_case(mesh: Any, case: tuple[Any, ...]) -> str:
    name, call, tensors, placements, expected = case
    learns = [t.is_floating_point() and t is not slopes for t in tensors]
    plain = [t.clone().requires_grad_(learn) for t, learn in zip(tensors, learns, strict=True)]
    want = call(*plain)
    sharded = [
        distribute_tensor(t.clone(), mesh, [p]).requires_grad_(learn)
        for t, p, learn in zip(tensors, placements, learns, strict=True)
    ]
    got = call(*sharded)
    if expected is not None and tuple(got.placements) != (expected,):
        return f"{name}: {got.placements}"
    if not torch.allclose(full(got), want, atol=1e-4):
        return f"{name}: wrong by {(full(got) - want).abs().max()}"
    with torch.no_grad():  # the op without a derivative
        if not torch.allclose(full(call(*sharded)), want, atol=1e-4):
            return f"{name}: wrong without gradients"
    want.square().sum().backward()
    full(got).square().sum().backward()
    for p, s in zip(plain, sharded, strict=True):
        if p.grad is not None and not torch.allclose(full(s.grad), p.grad, atol=1e-3, rtol=1e-3):
            return f"{name}: a wrong gradient, {s.placements}"
    return ""


def check_written(mesh: Any) -> list[str]:
    """Ops that write an argument: on its own shards, or refused."""
    out, a, m = tensor(M, N), tensor(M, K), tensor(K, N)
    want = out + a @ m
    wrong = []
    for placements in ([S0, S0, R], [S1, R, S1], [R, R, R], [S0, R, R]):
        parts = [
            distribute_tensor(t.clone(), mesh, [p])
            for t, p in zip((out, a, m), placements, strict=True)
        ]
        ops.addmm_into(*parts)
        if not torch.allclose(full(parts[0]), want, atol=1e-4):
            wrong.append(f"addmm_into {placements}")
    for placement in (S0, S1, R):
        part = distribute_tensor(out.clone(), mesh, [placement])
        ops._scale_into(part, distribute_tensor(torch.tensor(0.5), mesh, [R]))
        if not torch.equal(full(part), out * 0.5):
            wrong.append(f"_scale_into {placement}")
    return wrong


def check_row_sums(mesh: Any) -> list[str]:
    """They stay on the rows' ranks; rows that ranks share are gathered."""
    wrong, want = [], ops._row_sums(x, 0, 2.0, torch.float32)
    for placement, wanted in ((S0, S0), (S1, S1), (S2, R)):
        part = distribute_tensor(x, mesh, [placement])
        got = ops._row_sums(part, 0, 2.0, torch.float32)
        if tuple(got.placements) != (wanted,) or not torch.equal(full(got), want):
            wrong.append(f"_row_sums {placement}: {got.placements}")
    return wrong


def check_scaled(mesh: Any) -> list[str]:
    """Products of 8-bit floats with scales of rows: rows and columns are sharded."""

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        (a, scale_a), (b, scale_b) = ops.quantize(a, ROW), ops.quantize(b, ROW)
        return ops.scaled_matmul(a, b.t(), scale_a, ROW, scale_b.t(), ROW)

    wrong, whole = [], (x[0], w)
    for placements, wanted in (((S0, R), S0), ((R, S0), S1), ((S1, S1), R)):
        parts = [distribute_tensor(t, mesh, [p]) for t, p in zip(whole, placements, strict=True)]
        got = product(*parts)
        if tuple(got.placements) != (wanted,) or not torch.equal(full(got), product(*whole)):
            wrong.append(f"scaled_matmul {placements}: {got.placements}")
    return wrong


def ops_without_rules() -> list[str]:
    """Public ops forward to those with rules; what generated code calls (out= variants and
    below_autograd) and what stands under aten's operators sees local tensors."""
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("cubin::_")}
    known = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    known = {str(op).replace(".", "::", 1).removesuffix(".default") for op in known}
    local = (".out", ".below_autograd")
    return sorted(n for n in names - known if not n.endswith(local) and "::_aten_" not in n)


def check_two_dims(ranks: int) -> list[str]:
    """Data and tensor parallel at once, and columns that the ranks cannot share equally."""
    mesh = init_device_mesh("cpu", (2, ranks // 2))
    odd, more = tensor(N - 1, K), tensor(N - 1)
    wrong = []
    for weight, bias in ((w, b), (odd, more)):
        plain = [t.clone().requires_grad_() for t in (x, weight, bias)]
        want = ops.linear(*plain, activation="silu")
        placements = ([S0, R], [R, S0], [R, S0])
        parts = [
            distribute_tensor(t.clone(), mesh, p).requires_grad_()
            for t, p in zip((x, weight, bias), placements, strict=True)
        ]
        got = ops.linear(*parts, activation="silu")
        if tuple(got.placements) != (S0, S2) or not torch.allclose(full(got), want, atol=1e-4):
            wrong.append(f"two dims {tuple(weight.shape)}: {got.placements}")
        want.square().sum().backward()
        full(got).square().sum().backward()
        for p, s in zip(plain, parts, strict=True):
            if not torch.allclose(full(s.grad), p.grad, atol=1e-3, rtol=1e-3):
                wrong.append(f"two dims {tuple(weight.shape)}: a wrong gradient")
    return wrong


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.norm2 = nn.RMSNorm(K), nn.RMSNorm(K)
        self.q, self.k, self.v, self.o = (nn.Linear(K, K, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(K, 2 * K, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * K, K, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        q, k, v = (
            layer(h).unflatten(-1, (-1, K // H)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        heads = ops.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(heads.transpose(1, 2).flatten(-2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def split(mesh: Any, how: str) -> Block:
    block = Block()
    rows = {"output_layouts": Shard(1), "use_local_output": False} if how == "sequence" else {}
    if how == "fsdp":
        fully_shard(block, mesh=mesh)
    else:
        plan: dict[str, Any] = dict.fromkeys(("q", "k", "v", "gate", "up"), ColwiseParallel())
        plan |= dict.fromkeys(("o", "down"), RowwiseParallel(**rows))
        if how == "sequence":
            columns = ColwiseParallel(input_layouts=Shard(1))
            plan |= dict.fromkeys(("q", "k", "v", "gate", "up"), columns)
            plan |= dict.fromkeys(("norm", "norm2"), SequenceParallel())
        parallelize_module(block, mesh, plan)
    return block


def served_by(door: Callable[..., Any]) -> Any:
    """As on a GPU, where drop_in() serves below autograd, too."""
    aten_kernels.register("CPU")
    aten_kernels.below_autograd = lambda: True
    return door(policy="all")


DOORS: dict[str, Callable[[], Any]] = {
    "stock": contextlib.nullcontext,
    "drop_in": functools.partial(served_by, torch_cubin.drop_in),
    "install": functools.partial(served_by, torch_cubin.install),
}


def check_block(mesh: Any, how: str, door: str) -> dict[str, Any]:
    x = tensor(B, M, K)
    reference = Block()
    want = reference(x)
    want.square().sum().backward()
    block = split(mesh, how)
    inputs = distribute_tensor(x, mesh, [Shard(1)]) if how == "sequence" else x
    with CommDebugMode() as communication, DOORS[door]():
        got = block(inputs)
        got.square().sum().backward()
    served = [] if door == "stock" else [row.function for row in torch_cubin.report().served]
    right = torch.allclose(full(got), want, atol=1e-4)
    for name, parameter in block.named_parameters():
        expected = dict(reference.named_parameters())[name].grad
        if how == "sequence" and name.startswith("norm"):
            continue  # a partial sum by design of SequenceParallel
        right &= torch.allclose(full(parameter.grad), expected, atol=1e-3)
    collectives = communication.get_total_counts()
    return {"right": right, "collectives": collectives, "served": sorted({*served})}


def check_checkpoint(mesh: Any, how: str, folder: str) -> str:
    """A block of all ranks is saved after a step, and loaded into blocks of two ranks each."""
    block, path = split(mesh, how), f"{folder}/{how}"
    with torch_cubin.drop_in():
        block(tensor(B, M, K)).square().sum().backward()
    torch.optim.SGD(block.parameters(), lr=0.1).step()
    checkpoint.save(block.state_dict(), checkpoint_id=path)
    pairs = init_device_mesh("cpu", (mesh.size() // 2, 2), mesh_dim_names=("pairs", "ranks"))
    state = split(pairs["ranks"], how).state_dict()
    checkpoint.load(state, checkpoint_id=path)
    same = all(torch.equal(full(state[key]), full(x)) for key, x in block.state_dict().items())
    return "" if same else f"{how}: the checkpoint of two ranks differs"


def check_experts(mesh: Any) -> list[str]:
    """Experts divided among the ranks, which exchange tokens: a grouped product of a rank's own."""
    ranks, own, tokens, group = mesh.size(), 2, 6, mesh.get_group()
    weights, x = tensor(own * ranks, K, N), tensor(tokens * ranks, K)
    expert_of = torch.arange(tokens * ranks) * 5 % 7 % (own * ranks)  # one is empty

    def exchange(rows: torch.Tensor, to: list[int], of: list[int]) -> torch.Tensor:
        return all_to_all_single_autograd(rows, to, of, group)

    def layer(x: torch.Tensor, weight: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        order = expert.argsort(stable=True)
        sent = torch.bincount(expert, minlength=own * ranks)
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=group)
        splits = [each.view(ranks, own).sum(1).tolist() for each in (got, sent)]
        rows = exchange(x[order], *splits)
        # From each rank in turn, the rows of its first expert here, then those of its second.
        local = torch.arange(own).repeat(ranks).repeat_interleave(got).argsort(stable=True)
        offs = got.view(ranks, own).sum(0).cumsum(0).to(torch.int32)
        out = ops.grouped_matmul(rows[local], weight, offs=offs)[local.argsort()]
        return exchange(out, *splits[::-1])[order.argsort()]

    mine = slice(mesh.get_local_rank() * tokens, (mesh.get_local_rank() + 1) * tokens)
    held = slice(mesh.get_local_rank() * own, (mesh.get_local_rank() + 1) * own)
    parts = [x[mine].clone().requires_grad_(), weights[held].clone().requires_grad_()]
    out = layer(*parts, expert_of[mine])
    out.square().sum().backward()
    whole = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
    want = torch.einsum("tk,tkn->tn", whole[0], whole[1][expert_of])
    want.square().sum().backward()
    pairs = {
        "result": (out, want[mine]),
        "gradient of tokens": (parts[0].grad, whole[0].grad[mine]),
        "gradient of experts": (parts[1].grad, whole[1].grad[held]),
    }
    near = functools.partial(torch.allclose, atol=1e-4, rtol=1e-4)
    return [f"experts: {name}" for name, pair in pairs.items() if not near(*pair)]


def check_row_parallel(mesh: Any) -> list[str]:
    """One, two and four ranks sum K in the same order."""

    def run(x: torch.Tensor, w: torch.Tensor, group: Any) -> tuple[torch.Tensor, ...]:
        x, w, own = (each.detach().clone().requires_grad_() for each in (x, w, b))
        out = torch_cubin.row_parallel_linear(x, w, own, parts=4, group=group)
        return out, *torch.autograd.grad(out.square().sum(), (x, w, own))

    pairs = init_device_mesh("cpu", (mesh.size() // 2, 2), mesh_dim_names=("pairs", "ranks"))
    wrong, want = [], run(x, w, None)
    torch.testing.assert_close(want[0], F.linear(x, w, b))
    for ranks in (mesh, pairs["ranks"]):
        group = ranks.get_group()
        got = run(*(t.chunk(group.size(), -1)[group.rank()] for t in (x, w)), group)
        whole = [t.chunk(group.size(), -1)[group.rank()] for t in want[1:3]]
        for name, own, expected in zip(("out", "input", "weight", "bias"), got,
                                       (want[0], *whole, want[3]), strict=True):  # fmt: skip
            if not torch.equal(own, expected):
                wrong.append(f"row_parallel_linear, {group.size()} ranks: {name}")
    return wrong


class Gated(nn.Module):
    """With an activation that is exact: others differ on the CPU by the place of an element."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up, self.down = nn.Linear(K, 64), nn.Linear(K, 64), nn.Linear(64, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.gate(x)) * self.up(x))


def check_tensor_parallel(mesh: Any) -> list[str]:
    """One, two and four ranks have the same bits by install(tensor_parallel=4), and not without;
    outputs that are gathered and scattered."""

    def run(ranks: Any, dtype: torch.dtype, sequence: bool) -> list[torch.Tensor]:
        rows: dict[str, Any] = {"output_layouts": Shard(1)} if sequence else {}
        columns: dict[str, Any] = {"input_layouts": Shard(1)} if sequence else {}
        plan: dict[str, Any] = dict.fromkeys(("gate", "up"), ColwiseParallel(**columns))
        plan["down"] = RowwiseParallel(**rows, use_local_output=False)
        model = parallelize_module(Gated().to(dtype), ranks, plan)
        own = distribute_tensor(x.to(dtype), ranks, [S1 if sequence else R]).requires_grad_()
        out = model(own)
        out.square().sum().backward()
        return [full(t) for t in (out, own.grad, *(p.grad for p in model.parameters()))]

    aten_kernels.register("CPU")
    size = mesh.size()
    one = init_device_mesh("cpu", (size, 1), mesh_dim_names=("others", "ranks"))["ranks"]
    two = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("others", "ranks"))["ranks"]
    wrong = []
    for dtype, sequence in ((torch.float32, False), (torch.bfloat16, True)):
        for parts in (None, 4):
            with torch_cubin.install(batch_invariant=True, tensor_parallel=parts):
                want, *others = (run(ranks, dtype, sequence) for ranks in (one, two, mesh))
            same = [all(map(torch.equal, each, want)) for each in others]
            if same != [parts is not None] * 2:
                wrong.append(f"tensor_parallel={parts}, {dtype}: {same}")
    with torch_cubin.install(batch_invariant=True, tensor_parallel=2):
        run(two, torch.float32, False)
        try:
            run(mesh, torch.float32, False)
            wrong.append("two parts on four ranks")
        except torch_cubin.Error as error:
            if "more ranks than parts" not in str(error):
                wrong.append(str(error))
    return wrong


def check_float8(mesh: Any) -> list[str]:
    """Layers of 8-bit floats under FSDP2: training, and weights that are stored in 8 bits."""
    wrong = []
    for training in (True, False):
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(K, N), nn.GELU(), nn.Linear(N, K, bias=False))
            models.append(torch_cubin.float8(model, training=training))
        whole, sharded = models
        for layer in (sharded[0], sharded[2], sharded):
            fully_shard(layer, mesh=mesh)
        with torch.set_grad_enabled(training):
            want, got = whole(x), sharded(x)
        if not torch.equal(got, want):
            wrong.append(f"float8, training {training}: output")
        if training:
            want.square().sum().backward()
            got.square().sum().backward()
        for name, parameter in sharded.named_parameters():
            plain = whole.get_parameter(name)
            if not torch.equal(full(parameter.float()), plain.float()):  # gloo has no float8
                wrong.append(f"float8, training {training}: {name}")
            if training and not torch.allclose(full(parameter.grad), plain.grad, rtol=1e-4):
                wrong.append(f"float8: gradient of {name}")
    return wrong


def main(rank: int, ranks: int, folder: str) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    wrong = []
    for case in CASES:
        try:
            wrong.append(check_case(mesh, case))
        except Exception as error:
            wrong.append(f"{case[0]}: {type(error).__name__} {str(error)[:300]}")
    wrong += check_written(mesh)
    wrong += check_row_sums(mesh)
    wrong += check_scaled(mesh)
    wrong += [f"{name} has no sharding rule" for name in ops_without_rules()]
    wrong += check_two_dims(ranks)
    wrong += check_experts(mesh)
    wrong += check_row_parallel(mesh)
    wrong += [check_checkpoint(mesh, how, folder) for how in ("tensor", "fsdp")]
    wrong += check_float8(mesh)
    blocks = {
        f"{how}, {door}": check_block(mesh, how, door)
        for door in DOORS  # the first without ours, which stay registered
        for how in ("tensor", "sequence", "fsdp")
    }
    wrong += check_tensor_parallel(mesh)
    answer = {"wrong": [each for each in wrong if each], "blocks": blocks}
    Path(folder, f"{rank}.json").write_text(json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()


def fork(ranks: int, folder: str) -> int:
    """The imports, which take as long as the work, are done once. Returns the exit status."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=main, args=(rank, ranks, folder)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return int(any(process.exitcode for process in processes))


if __name__ == "__main__":
    sys.exit(fork(int(sys.argv[1]), sys.argv[2]))
