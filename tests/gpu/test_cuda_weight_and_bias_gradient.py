"""The gradients of a linear layer's weight and bias out of one kernel: exact, whichever config
computes them, the same bits each time, and what autograd takes."""

from __future__ import annotations

import numerics
import pytest
import torch
import torch.nn.functional as F
from gpu import cases

from torch_cubin._native import library
from torch_cubin._tuning import measure

op = torch.ops.cubin._weight_and_bias_gradient
# rows, outputs, inputs: one tile and parts of one, several waves, long sums of few tiles, rows
# that are no multiple of a k block, and what no tensor map describes.
SIZES = [
    (64, 8, 8),
    (1000, 136, 200),
    (129, 1032, 1544),
    (8200, 768, 264),
    (20000, 64, 72),
    (4104, 4608, 1160),
    (33, 7, 5),
    (300, 1027, 129),
]


def small_integers(shape: tuple[int, ...], dtype: torch.dtype, generator) -> torch.Tensor:
    return torch.randint(-2, 3, shape, generator=generator, device="cuda").to(dtype)


def expected_of(grad: torch.Tensor, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weight = grad.double().t() @ input.double()
    return weight.to(grad.dtype), grad.double().sum(0).to(grad.dtype)


def check(grad: torch.Tensor, input: torch.Tensor, label: str) -> None:
    for out, expected in zip(op(grad, input), expected_of(grad, input), strict=True):
        numerics.check_exact(out, expected, label)


@pytest.mark.usefixtures("filled_memory")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_small_integers_are_exact(sizes, dtype, generator: torch.Generator) -> None:
    rows, outputs, inputs = sizes
    grad = small_integers((rows, outputs), dtype, generator)
    input = small_integers((rows, inputs), dtype, generator)
    check(grad, input, f"{sizes}")


@pytest.mark.usefixtures("filled_memory")
def test_every_config_is_exact(generator: torch.Generator) -> None:
    """Split and streamed ones among them, whose parts of K have sums of their own."""
    ran = set()
    for rows, outputs, inputs in [(8200, 768, 264), (4104, 1160, 648), (2056, 2312, 1544)]:
        grad = small_integers((rows, outputs), torch.bfloat16, generator)
        input = small_integers((rows, inputs), torch.bfloat16, generator)
        with measure.watching():
            op(grad, input)
            (plan,) = library.watched_plans()
            # Of the product; what it leaves is finished by another kernel.
            configs = [f"finish/{config['name']}" for config in plan["configs"]]
            for config in (*configs, "split"):
                library.force_config(config)
                check(grad, input, f"{rows} x {outputs} x {inputs} by '{config}'")
                ran.add(config)
    if torch.cuda.get_device_capability()[0] == 9:
        assert len(ran) > 30
        assert any("streamed" in name for name in ran)


def test_results_are_deterministic(generator: torch.Generator) -> None:
    grad = cases.draw((12008, 1280), torch.bfloat16, False, generator)
    input = cases.draw((12008, 1280), torch.bfloat16, False, generator)
    first = op(grad, input)
    for _ in range(50):
        for out, again in zip(first, op(grad, input), strict=True):
            numerics.check_bits(again, out)


@pytest.mark.parametrize("shape", [(4, 300, 512), (1000, 512), (3, 2, 5, 520)], ids=str)
@pytest.mark.parametrize("frozen", ["", "weight", "bias", "input"])
def test_autograd_takes_it(shape, frozen: str, generator: torch.Generator) -> None:
    input = cases.draw(shape, torch.bfloat16, False, generator)
    weight = cases.draw((384, shape[-1]), torch.bfloat16, False, generator)
    bias = cases.draw((384,), torch.bfloat16, False, generator)
    leaves = {"input": input, "weight": weight, "bias": bias}
    grad = cases.draw((*shape[:-1], 384), torch.bfloat16, False, generator)
    wanted = [x.requires_grad_() for name, x in leaves.items() if name != frozen]
    own = torch.autograd.grad(F.linear(input, weight, bias), wanted, grad)
    out = torch.ops.cubin.linear(input, weight, bias)
    ours = torch.autograd.grad(out, wanted, grad)
    exact = [x.detach().double().requires_grad_() for x in leaves.values()]
    kept = [x for x, name in zip(exact, leaves, strict=True) if name != frozen]
    reference = torch.autograd.grad(F.linear(*exact), kept, grad.double())
    for x, y, z in zip(ours, own, reference, strict=True):
        numerics.check_close(x, y, z, frozen)


def test_sums_are_rounded_once(generator: torch.Generator) -> None:
    """Of the float32 sum, as those of the weight's gradient are."""
    grad = cases.draw((32768, 768), torch.bfloat16, False, generator)
    input = cases.draw((32768, 768), torch.bfloat16, False, generator)
    _, bias = op(grad, input)
    numerics.check_close(bias, grad.sum(0), grad.double().sum(0), "bias")
