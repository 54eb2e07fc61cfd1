"""torch_cubin.moe with recipe="block" on a GPU: its gradients, memory, graphs."""

from __future__ import annotations

import functools

import pytest
import torch
from moe_cases import products_of_8_bits
from scaled_cases import BLOCK_128X128
from test_cuda_moe import SMALL, by_experts, layer
from torch import Tensor

import torch_cubin

pytestmark = pytest.mark.usefixtures("nan_memory")

block_moe = functools.partial(torch_cubin.moe, recipe="block")


def trained(function, args: list[Tensor], grad: Tensor) -> list[Tensor]:
    """The output, and the gradients of x, the tokens' weights, w13 and w2."""
    tensors = [x.detach().requires_grad_(x.is_floating_point()) for x in args]
    out = function(*tensors)
    return [out.detach(), *torch.autograd.grad(out, [tensors[0], *tensors[2:]], grad)]


def gradient(x: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(x.shape, device="cuda", generator=generator).to(x.dtype)


def error_of(out: Tensor, right: Tensor) -> float:
    return float((out.double() - right.double()).norm() / right.double().norm())


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ((300, *SMALL), torch.bfloat16),
        ((5000, *SMALL), torch.float16),
        ((700, 7, 3, 272, 112), torch.bfloat16),
        ((60, 4, 2, 51, 27), torch.bfloat16),
        ((128, 8, 8, 136, 72), torch.float32),
        ((33, *SMALL), torch.float32),
        ((2500, 128, 8, 512, 128), torch.bfloat16),
    ],
    ids=str,
)
def test_outputs_and_gradients(sizes, dtype, generator: torch.Generator) -> None:
    args = layer(sizes, dtype, generator)
    if dtype == torch.float16:  # weights that are stored transposed, 32-bit ids, rows with gaps
        args[3:] = [weight.mT.contiguous().mT for weight in args[3:]]
        args[1] = args[1].int()
        args[0] = torch.cat([args[0], args[0]], 1)[:, : sizes[3]]
    grad = gradient(args[0], generator)
    found, again = (trained(block_moe, args, grad) for _ in range(2))
    wide = [x.double() if x.is_floating_point() else x for x in args]
    right = trained(by_experts, wide, grad.double())
    rounded = products_of_8_bits(args, grad)
    names = "out", "x", "weights", "w13", "w2"
    for name, own, same, other, true in zip(names, found, again, rounded, right, strict=True):
        assert torch.equal(own, same), name
        few = 2 if sizes[0] < 100 else 1  # elements of the gradients of tokens' weights
        assert error_of(own, true) < 0.09 * few, name
        # A value beside a half of two 8-bit numbers may be rounded to either.
        print(name, error_of(own, other))
        assert error_of(own, other) < 0.01, name
    assert [x.stride() for x in found[3:]] == [x.stride() for x in args[3:]]
    with torch.no_grad():
        assert torch.equal(block_moe(*args), found[0])
        assert torch.equal(torch_cubin.moe(*args[:3], **quantised_weights(*args[3:])), found[0])


def quantised_weights(w13: Tensor, w2: Tensor) -> dict[str, Tensor]:
    """Of the layer whose weights are 8-bit floats already."""
    made = {}
    for name, weight in (("w13", w13), ("w2", w2)):
        parts = [torch_cubin.ops.quantize(own, BLOCK_128X128) for own in weight]
        made[name] = torch.stack([data for data, _ in parts])
        made[f"{name}_scale"] = torch.stack([scale.t() for _, scale in parts])
    return made


@pytest.mark.parametrize("tokens", [64, 900])
def test_small_rows_keep_their_bits_beside_large_ones(tokens, generator: torch.Generator) -> None:
    args = layer((tokens, 4, 1, 256, 128), torch.float32, generator)
    args[1] = torch.arange(tokens, device="cuda")[:, None] % 4
    args[2] = torch.ones(tokens, 1, device="cuda")
    args[0][args[1][:, 0] % 2 == 1] *= 3000
    grad = gradient(args[0], generator)
    found = trained(block_moe, args, grad)
    right = trained(by_experts, [x.double() if x.is_floating_point() else x for x in args],
                    grad.double())  # fmt: skip
    for name, own, true in zip(("w13", "w2"), found[3:], right[3:], strict=True):
        assert max(map(error_of, own[::2], true[::2])) < 0.1, name
    alone = [args[0], args[1].masked_fill(args[1] != 2, -1), *args[2:]]
    for own, other in zip(trained(block_moe, alone, grad)[3:], found[3:], strict=True):
        assert torch.equal(own[2], other[2])


def test_numbers_that_are_not_finite_stay_with_their_expert(generator: torch.Generator) -> None:
    args = layer((300, 8, 1, 256, 128), torch.bfloat16, generator)
    args[1] = torch.arange(300, device="cuda")[:, None] % 8
    args[2] = torch.ones(300, 1, device="cuda")
    grad = gradient(args[0], generator)
    good = trained(block_moe, args, grad)
    args[0][9, 3], args[0][17, 200] = torch.nan, torch.inf  # both of expert 1
    bad = trained(block_moe, args, grad)
    rows = [row for row in range(300) if row not in (9, 17)]
    experts = [expert for expert in range(8) if expert != 1]
    for own, other in zip(bad[:3], good[:3], strict=True):
        assert torch.equal(own[rows], other[rows])
    for own, other in zip(bad[3:], good[3:], strict=True):
        assert torch.equal(own[experts], other[experts])
    assert bad[0][[9, 17]].isnan().all()
    assert bad[3][1].isnan().any()


@pytest.mark.parametrize("tokens", [256, 4096])
def test_training_takes_no_more_memory_than_in_bfloat16(
    tokens, generator: torch.Generator, freed_memory: None
) -> None:
    args = layer((tokens, 32, 4, 1024, 512), torch.bfloat16, generator)
    args = [x.requires_grad_(x.is_floating_point()) for x in args]
    peaks = []
    for function in (torch_cubin.moe, block_moe):
        for _ in range(2):  # the first call loads kernels
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            function(*args).float().square().mean().backward()
            peaks.append(torch.cuda.max_memory_allocated() - before)
            for x in args:
                x.grad = None
    print(tokens, peaks)
    assert peaks[3] <= peaks[1]


def test_a_loss_falls_as_in_bfloat16(generator: torch.Generator) -> None:
    args = layer((512, 8, 2, 256, 128), torch.float32, generator)
    args[2] = args[2].nan_to_num(0.0)
    wanted = gradient(args[0], generator)
    losses = []
    for function in (torch_cubin.moe, block_moe):
        own = [x.clone().requires_grad_(x.is_floating_point()) for x in args]
        optimizer = torch.optim.Adam([x for x in own if x.requires_grad], lr=2e-3)
        for _ in range(30):
            with torch.autocast("cuda", torch.bfloat16):
                out = function(*own)
            loss = (out - wanted).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(float(loss.detach()))
    print(losses)
    start = float(wanted.square().mean())
    assert losses[1] < 0.8 * start
    assert abs(losses[1] - losses[0]) < 0.03 * start


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_kept_copies_give_the_same_bits(dtype, generator: torch.Generator) -> None:
    """Of sizes that are no multiples of 128 or of 8, in both layouts of weights."""
    for sizes, turns in (((300, *SMALL), True), ((700, 7, 3, 272, 112), False),
                         ((60, 4, 2, 51, 27), False), ((40, 1, 1, 136, 72), True)):  # fmt: skip
        args = layer(sizes, dtype, generator)
        if turns:
            args[3:] = [weight.mT.contiguous().mT for weight in args[3:]]
        for weight in args[3:]:
            kept = torch.ops.cubin._float8_copies(weight)
            host = torch.ops.cubin._float8_copies(weight.cpu())
            for own, right in zip(kept, host, strict=True):
                assert own.stride() == right.stride()
                assert torch.equal(own.cpu().view(right.dtype).float(), right.float())
        grad = gradient(args[0], generator)
        right = trained(block_moe, args, grad)
        with torch_cubin.keep_float8_weights():
            for _ in range(2):
                for out, wanted in zip(trained(block_moe, args, grad), right, strict=True):
                    assert torch.equal(out.nan_to_num(), wanted.nan_to_num()), sizes


def test_a_graph_has_copies_of_its_own(generator: torch.Generator) -> None:
    """Two micro-batches share them; replays quantise what the weights are then."""
    args = layer((300, *SMALL), torch.bfloat16, generator)
    tensors = [x.detach().requires_grad_(x.is_floating_point()) for x in args]
    grad = gradient(args[0], generator)

    def step() -> list[Tensor]:
        outs = [block_moe(*tensors) for _ in range(2)]
        grads = torch.autograd.grad(outs, tensors[3:], [grad, grad])
        return [*outs, *grads]

    def launches(run) -> int:
        before = torch_cubin._native.library.launches()
        run()
        return torch_cubin._native.library.launches() - before

    torch.cuda.synchronize()
    with torch_cubin.keep_float8_weights():
        step()  # the copies of eager calls are not the graph's
        graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
        found = []
        for graph in graphs:
            with torch.cuda.graph(graph):
                found.append(step())
        kept = launches(step)  # eager, once more
    assert kept < launches(step)
    for factor in (1.0, -0.5, 3.0):
        with torch.no_grad():
            for weight in tensors[3:]:
                weight.mul_(factor)
        right = step()
        for graph, own in zip(graphs, found, strict=True):
            graph.replay()
            assert all(map(torch.equal, own, right))


def test_a_replayed_graph_writes_to_kept_weights(generator: torch.Generator) -> None:
    """As a captured step of an optimizer does, of which no version counter tells."""
    args = layer((300, *SMALL), torch.bfloat16, generator)
    tensors = [x.detach().requires_grad_(x.is_floating_point()) for x in args]
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for weight in tensors[3:]:
                weight.mul_(-0.5)
    with torch_cubin.keep_float8_weights():
        before = block_moe(*tensors)
        graph.replay()
        after = block_moe(*tensors)
    assert not torch.equal(before, after)
    assert torch.equal(after, block_moe(*tensors))
