"""The options of grouped_matmul on a GPU: bias, scale, rows, out_rows, activation."""

from __future__ import annotations

import random

import grouped_options
import numerics
import pytest
import torch
from gpu.seeds import seeds

import torch_cubin  # noqa: F401  (registers the ops)

pytestmark = pytest.mark.usefixtures("nan_memory")

op = torch.ops.cubin.grouped_matmul
CASES = 40  # a seed and dtype
SIZES = [0, 0, 1, 3, 16, 40, 64, 100, 257]


def wide(given: dict) -> dict:
    return {
        name: x.double() if torch.is_tensor(x) and x.is_floating_point() else x
        for name, x in given.items()
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("seed", seeds(2))
def test_random_options(seed: int, dtype: torch.dtype) -> None:
    source = random.Random(seed)
    judge = numerics.Judge(dtype)
    for index in range(CASES):
        sizes = tuple(source.choices(SIZES, k=source.randint(1, 60)))
        k, n = source.choice([8, 57, 64, 72, 200, 512]), source.choice([1, 8, 51, 64, 136, 520])
        options = tuple(x for x in grouped_options.OPTIONS if source.random() < 0.5)
        rest = source.choice([0, 5])
        if sum(sizes) + rest == 0:
            continue
        args = source, sizes, k, n, options, dtype, "cuda", rest
        (a, b), given = grouped_options.draw(*args)
        out = op(a, b, **given)
        peer, stored = grouped_options.expected(a, b, given)
        right, _ = grouped_options.expected(a.double(), b.double(), wide(given))
        label = f"seed {seed}, case {index}: {options} {sizes} {k} {n} {given.get('activation')}"
        judge.add(label, out[stored], peer[stored], right[stored])
        if dtype != torch.float32:  # whose options are steps of PyTorch's, which begin with zeros
            assert out[~stored].isnan().logical_or(out[~stored] == 0).all(), label
        assert torch.equal(op(a, b, **given)[stored], out[stored]), label
    judge.finish()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients(dtype: torch.dtype) -> None:
    options = ("bias", "scale", "rows", "out_rows", "activation")
    args = random.Random(5), (40, 0, 100, 3), 72, 136, options, dtype, "cuda", 6
    (a, b), given = grouped_options.draw(*args)
    names = ["bias", "scale"]

    def gradients(call, a, b, given, dtype):
        inputs = [x.to(dtype).detach().requires_grad_() for x in (a, b)]
        inputs += [given[name].detach().requires_grad_() for name in names]
        out = call(*inputs[:2], given | dict(zip(names, inputs[2:], strict=True)))
        weight = torch.linspace(-1, 1, out.shape[0], device="cuda", dtype=torch.float64)
        return torch.autograd.grad((out.double().sum(1) * weight).sum(), inputs)

    ours = gradients(lambda a, b, x: op(a, b, **x), a, b, given, dtype)
    peers = gradients(lambda a, b, x: grouped_options.expected(a, b, x)[0], a, b, given, dtype)
    rights = gradients(lambda a, b, x: grouped_options.expected(a, b, x)[0], a, b, wide(given),
                       torch.float64)  # fmt: skip
    again = gradients(lambda a, b, x: op(a, b, **x), a, b, given, dtype)
    for out, same, peer, right in zip(ours, again, peers, rights, strict=True):
        judge = numerics.Judge(out.dtype)
        judge.add("gradient", out, peer, right)
        judge.finish()
        assert torch.equal(out, same)


def test_wrong_ends_and_empty_operands() -> None:
    args = random.Random(1), (100, 50, 60), 64, 72, ("bias", "out_rows"), torch.bfloat16, "cuda"
    (a, b), given = grouped_options.draw(*args)
    good, stored = grouped_options.expected(a, b, given)
    given["offs"] = torch.tensor([100, 90, 210], device="cuda")
    out, places = op(a, b, **given), given["out_rows"].long()
    known = (places >= 0) & (places < len(out))
    assert out[places[100:][known[100:]]].isnan().all()
    own = places[:100][known[:100]]
    torch.testing.assert_close(out[own], good[own], rtol=0.02, atol=0.02)
    # Without K there is the bias alone.
    given["offs"] = torch.tensor([100, 150, 210], device="cuda")
    out = op(a[:, :0], b[:, :0], **given)
    want, stored = grouped_options.expected(a[:, :0], b[:, :0], given)
    assert torch.equal(out[stored], want[stored])
    # Nor do rows that mat_a does not have add anything.
    rows = torch.zeros(210, dtype=torch.int32, device="cuda")
    given |= {"rows": rows}
    assert torch.equal(op(a[:0], b, **given)[stored], want[stored])
    with torch.no_grad():
        none = torch.zeros(0, dtype=torch.int32, device="cuda")
        made = op(a, b[:0], offs=none, bias=given["bias"][:0])
    assert made.shape == (210, 72)
