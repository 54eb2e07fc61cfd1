"""torch_cubin.moe on a GPU: the numbers of a loop over experts, gradients, determinism, graphs."""

from __future__ import annotations

import functools

import numerics
import pytest
import torch
import torch.nn.functional as F
from scaled_cases import BLOCK_1X128, BLOCK_128X128
from torch import Tensor

import torch_cubin
from torch_cubin._native import library
from torch_cubin._tuning import measure

pytestmark = pytest.mark.usefixtures("nan_memory")


ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "relu": F.relu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
# Experts, experts of a token, hidden, inner.
SMALL = (16, 4, 256, 384)


def layer(sizes: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
    """x, ids of which some are no expert's, weights, which are NaN there, w13, w2."""
    tokens, experts, k, hidden, inner = sizes
    made = {"generator": generator, "device": "cuda"}
    ids = torch.rand(tokens, experts + 2, **made).argsort(-1)[:, :k] - 1
    weights = torch.rand(tokens, k, **made)
    weights[(ids < 0) | (ids >= experts)] = torch.nan  # not used
    shapes = ((experts, 2 * inner, hidden), (experts, hidden, inner))
    return [
        torch.randn(tokens, hidden, dtype=dtype, **made),
        ids,
        weights,
        *(torch.randn(shape, dtype=dtype, **made) * shape[-1] ** -0.5 for shape in shapes),
    ]


def by_experts(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, activation: str = "silu"
) -> Tensor:
    out = torch.zeros_like(x, dtype=weights.dtype)
    for expert in range(len(w13)):
        token, place = torch.where(ids == expert)
        gate, up = (x[token] @ w13[expert].t()).chunk(2, -1)
        act = ACTIVATIONS.get(activation, torch.clone)  # none
        own = (act(gate) * up) @ w2[expert].t()
        out = out.index_add(0, token, own * weights[token, place, None])
    return out.to(x.dtype)


def mixed(w13: Tensor) -> Tensor:
    """Rows of gates and ups alternate, in memory that is laid out as w13's."""
    rows = w13.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return rows.mT.contiguous().mT if w13.stride(1) == 1 else rows.contiguous()


def _relative(dtype: torch.dtype) -> float:
    """cuBLAS divides K of float32 more finely, and PyTorch sums weights' gradients elsewhere."""
    return 8 * torch.finfo(dtype).eps if dtype == torch.float32 else 0.0


# Tokens, and the sizes of SMALL.
TRAINED = [
    *((tokens, *SMALL) for tokens in (1, 7, 300, 5000)),
    *((128, 8, 8, 136, 72), (2500, 128, 8, 512, 96), (700, 7, 3, 260, 100), (33, 4, 2, 51, 27)),
]
CASES = [
    (TRAINED[i], dtype, list(ACTIVATIONS)[i % 4])
    for i in range(len(TRAINED))
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
    # PyTorch adds up a product of one row of float32 as a tree, with fewer errors.
    if dtype != torch.float32 or TRAINED[i][0] > 1
]


@pytest.mark.parametrize(("sizes", "dtype", "activation"), CASES, ids=str)
def test_outputs_and_gradients(sizes, dtype, activation, generator: torch.Generator) -> None:
    args = layer(sizes, dtype, generator)
    if activation == "gelu":  # weights that are stored transposed, 32-bit ids, rows with gaps
        args[3:] = [weight.mT.contiguous().mT for weight in args[3:]]
        args[1] = args[1].int()
        padding = args[0].new_full((sizes[0], 8), torch.nan)
        args[0] = torch.cat([args[0], padding], 1)[:, : sizes[3]]
    if activation == "relu":
        args[2] = args[2].to(dtype)
    grad = torch.randn(args[0].shape, device="cuda", generator=generator).to(dtype)

    def run(function, tensors: list[Tensor], grad: Tensor) -> list[Tensor]:
        tensors = [x.detach().requires_grad_(x.is_floating_point()) for x in tensors]
        wanted = [x for x in tensors if x.requires_grad]
        out = function(*tensors, activation=activation)
        return [out.detach(), *torch.autograd.grad(out, wanted, grad)]

    ours, again = (run(torch_cubin.moe, args, grad) for _ in range(2))
    interleaved = functools.partial(torch_cubin.moe, interleaved=True)
    neighbours = run(interleaved, [*args[:3], mixed(args[3]), args[4]], grad)
    neighbours[3] = torch.cat([neighbours[3][:, ::2], neighbours[3][:, 1::2]], 1)
    args[2] = args[2].float()
    own = run(by_experts, args, grad)
    wide = [x.double() if x.is_floating_point() else x for x in args]
    reference = run(by_experts, wide, grad.double())
    names = "out", "x", "weights", "w13", "w2"
    for name, out, same, mixed_out, peer, right in zip(
        names, ours, again, neighbours, own, reference, strict=True
    ):
        judge = numerics.Judge(out.dtype)
        relative = _relative(out.dtype)
        own_right = peer.to(out.dtype), right, 1.0, relative
        judge.add(f"{name} {sizes} {activation}", out, *own_right)
        judge.add(f"interleaved {name} {sizes} {activation}", mixed_out, *own_right)
        judge.finish()
        assert torch.equal(out, same), name
        if name != "x":  # whose sums over w13's rows are in another order
            assert torch.equal(out, mixed_out), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradients_of_saved_tensors_that_hooks_moved(dtype, generator: torch.Generator) -> None:
    """To parts of larger tensors, which begin anywhere: a kernel that reads vectors would fault."""

    def moved(tensor: Tensor) -> Tensor:
        memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
        return memory[1:].view(tensor.shape).copy_(tensor)

    x, ids, *rest = layer((300, *SMALL), dtype, generator)
    operands = [x, *rest]
    for operand in operands:
        operand.requires_grad_()
    grad = torch.randn(300, SMALL[2], dtype=dtype, device="cuda", generator=generator)

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(torch_cubin.moe(x, ids, *rest), operands, grad)

    expected = gradients()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, moved):
        found = gradients()
    for own, other in zip(found, expected, strict=True):
        off, size = (x.nan_to_num().float().abs().max() for x in (own - other, other))
        assert off <= 0.01 * size


@pytest.mark.parametrize("recipe", [None, "block"])
def test_gradients_in_a_graph_serve_other_ids(recipe, generator: torch.Generator) -> None:
    sizes = (64, *SMALL)
    args = layer(sizes, torch.bfloat16, generator)
    args[2] = args[2].nan_to_num(0.5)  # other ids are skipped later
    inputs = [x.requires_grad_(x.is_floating_point()) for x in args]
    wanted, grad = [x for x in inputs if x.requires_grad], torch.randn_like(args[0])

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(torch_cubin.moe(*inputs, recipe=recipe), wanted, grad)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = step()
    for _ in range(2):
        args[1].copy_(layer(sizes, torch.bfloat16, generator)[1])
        graph.replay()
        for out, right in zip(outs, step(), strict=True):
            assert torch.equal(out, right)


def test_a_graph_serves_other_ids(generator: torch.Generator) -> None:
    args = layer((64, *SMALL), torch.bfloat16, generator)
    args[2] = args[2].nan_to_num(0.5)  # other ids are skipped later
    with torch.no_grad():
        torch_cubin.moe(*args)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = torch_cubin.moe(*args)
        for _ in range(3):
            args[1].copy_(layer((64, *SMALL), torch.bfloat16, generator)[1])
            graph.replay()
            assert torch.equal(out, torch_cubin.moe(*args))


# Tokens, experts, experts of a token, hidden, inner: one chunk of ids and several, one token, tiles
# that are not full, rows that are no multiples of 16 bytes, more experts than threads of a block.
LAYERS = [
    (1, 16, 4, 256, 384),
    (300, 16, 4, 256, 384),
    (128, 8, 8, 136, 72),
    (2500, 128, 8, 512, 96),
    (700, 7, 3, 260, 100),
    (4100, 512, 1, 64, 64),
    (33, 4, 2, 51, 27),
]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("sizes", LAYERS, ids=str)
def test_a_layer_without_gradients(sizes, dtype, activation, generator: torch.Generator) -> None:
    x, ids, weights, w13, w2 = layer(sizes, dtype, generator)
    if activation == "gelu":  # weights that are stored transposed, 32-bit ids, rows with gaps
        w13, w2 = w13.mT.contiguous().mT, w2.mT.contiguous().mT
        ids = ids.int()
        x = torch.cat([x, x.new_full((len(x), 8), torch.nan)], 1)[:, : x.shape[1]]
    if activation == "relu":
        weights = weights.to(dtype)
    with torch.no_grad():
        out, again = (
            torch_cubin.moe(x, ids, weights, w13, w2, activation=activation) for _ in range(2)
        )
    peer = by_experts(x, ids, weights.float(), w13, w2, activation)
    right = by_experts(x.double(), ids, weights.double(), w13.double(), w2.double(), activation)
    judge = numerics.Judge(dtype)
    judge.add(f"{sizes} {activation}", out, peer, right, 1.0, _relative(dtype))
    judge.finish()
    assert torch.equal(out, again)
    with torch.no_grad():
        again = torch_cubin.moe(
            x, ids, weights, mixed(w13), w2, activation=activation, interleaved=True
        )
    assert torch.equal(out, again)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gate_without_an_activation(dtype: torch.dtype, generator: torch.Generator) -> None:
    """gate * up, which the raw op alone offers."""
    raw = torch.ops.cubin._moe
    x, ids, weights, w13, w2 = layer((300, *SMALL), dtype, generator)
    wide = [x.double(), ids, weights.double(), w13.double(), w2.double()]
    judge = numerics.Judge(dtype)
    with torch.no_grad():
        out = raw(x, ids, weights, w13, w2, "none", False)
        assert torch.equal(out, raw(x, ids, weights, mixed(w13), w2, "none", True))
    peer = by_experts(x, ids, weights.float(), w13, w2, "none")
    judge.add(f"{dtype}", out, peer, by_experts(*wide, "none"), 1.0, _relative(dtype))
    judge.finish()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", [(3000, *SMALL), (65536, 512, 8, 64, 64)])
def test_a_tokens_bits_do_not_depend_on_the_other_tokens(sizes, dtype, generator) -> None:
    x, ids, weights, w13, w2 = layer(sizes, dtype, generator)
    with torch.no_grad():
        out = torch_cubin.moe(x, ids, weights, w13, w2)
        for part in (slice(5, 6), slice(40, 57), slice(100, 1100)):
            own = torch_cubin.moe(x[part], ids[part], weights[part], w13, w2)
            assert torch.equal(own, out[part])


def test_one_tokens_nan_stays_its_own(generator: torch.Generator) -> None:
    x, ids, weights, w13, w2 = layer((500, *SMALL), torch.bfloat16, generator)
    ids[7] = torch.arange(4, device="cuda")
    bad = x.clone()
    bad[7] = torch.nan
    with torch.no_grad():
        out, with_nan = (torch_cubin.moe(rows, ids, weights, w13, w2) for rows in (x, bad))
    assert with_nan[7].isnan().all()
    out[7] = with_nan[7] = 0
    assert torch.equal(out, with_nan)


def quantized_weights(weight: Tensor) -> tuple[Tensor, Tensor]:
    parts = [torch.ops.cubin.quantize(own, BLOCK_128X128) for own in weight]
    return torch.stack([data for data, _ in parts]), torch.stack([scale.t() for _, scale in parts])


def by_float8_steps(x, ids, weights, w13, s13, w2, s2) -> Tensor:
    """The ops that moe of 8-bit floats consists of, one after the other."""
    k, flat = ids.shape[1], ids.flatten()
    own = torch.where((flat < 0) | (flat >= len(w13)), len(w13), flat)
    order = own.argsort(stable=True)
    offs = own.bincount(minlength=len(w13) + 1)[: len(w13)].cumsum(0)
    skipped, last = own == len(w13), offs[-1]
    places = torch.where(skipped, -1, order.argsort()).int().view(-1, k)
    rows = x[order // k]
    for gate, weight, scale in (("none", w13, s13), ("silu", w2, s2)):
        data, scales = torch.ops.cubin.quantize(rows, BLOCK_1X128, gate=gate)
        rows = torch.ops.cubin.scaled_grouped_matmul(
            *(data, weight.mT, scales, BLOCK_1X128, scale.mT, BLOCK_128X128),
            offs=offs,
            output_dtype=x.dtype,
        )
    assert rows[last:].isnan().all()  # not written
    return torch.ops.cubin._expert_sum(rows, order // k, order, places, weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "sizes",
    [
        *((1, *SMALL), (130, 8, 3, 520, 128), (700, 5, 2, 1000, 640), (3000, *SMALL)),
        (33, 4, 2, 256, 72),  # no kernel
    ],
    ids=str,
)
def test_8_bit_floats_have_the_bits_of_their_steps(sizes, dtype, generator) -> None:
    """With each kernel that gates and quantises, and those that the call takes; rows of zeros, of
    infinities, and of numbers whose products are."""
    x, ids, weights, w13, w2 = layer(sizes, dtype, generator)
    x[::7] *= 3000.0
    x[3::11], x[5::13, 1], x[6::17, 200] = 0.0, torch.inf, torch.nan
    args = [x, ids, weights, *quantized_weights(w13), *quantized_weights(w2)]
    wanted = by_float8_steps(*args)
    kernels = [own for own in library.catalog()["kernels"] if own["family"] == "scaled"]
    gated = [own["name"] for own in kernels if own["gated"] and own["grouped"] == 1]
    assert gated
    for kernel in ("", *gated):
        with measure.watching():
            library.force_config(kernel)
            out = torch.ops.cubin._moe_float8(*args)
            again = torch.ops.cubin._moe_float8(*args)
        assert torch.equal(out.view(torch.uint8), again.view(torch.uint8)), kernel
        same = (out == wanted) | (out.isnan() & wanted.isnan())
        assert same.all(), f"{kernel}: {int((~same).sum())} of {out.numel()} differ"
        part = torch.ops.cubin._moe_float8(x[5:17], ids[5:17], weights[5:17], *args[3:])
        assert torch.equal(part.nan_to_num(), out[5:17].nan_to_num()), kernel
    loaded = {own["name"] for own in library.catalog()["loaded"]}
    assert set(gated) <= loaded or sizes[-1] % 128 > 0
