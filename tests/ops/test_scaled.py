"""cubin::scaled_matmul and cubin::quantize on the CPU: results, graphs, errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numerics
import pytest
import scaled_cases as cases
import torch
import torch.nn.functional as F
from scaled_cases import BLOCK_1X128, BLOCK_128X128, E4M3, E5M2, ROW, TENSOR, expected, operands
from torch import Tensor

import torch_cubin

op = torch.ops.cubin.scaled_matmul
quantize = torch.ops.cubin.quantize
# Not test_schema, which compares arguments by an op that 8-bit floats lack.
CHECKS = ("test_autograd_registration", "test_faketensor")


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("recipes", cases.PAIRS, ids=str)
def test_products(recipes) -> None:
    sizes = [(7, 264, 300), (1, 1, 1), (130, 1, 5), (0, 3, 4), (3, 0, 4), (3, 4, 0)]
    types = cases.TYPES if recipes in cases.WHOLE else cases.TYPES[:1]
    for number, size in enumerate(sizes):
        args = operands(*size, recipes, generator(), types[number % len(types)])
        bias = cases.integers((size[1],), generator())
        dtype = cases.OUT_DTYPES[number % 3]
        out = op(*args, bias=bias.to(dtype), output_dtype=dtype)
        assert out.dtype == dtype
        numerics.check_exact(out, expected(*args, bias), f"{size}")
        if recipes in cases.WHOLE:
            numerics.check_exact(op(*args, use_fast_accum=True), expected(*args), f"{size}")


def test_outputs_of_8_bits_saturate() -> None:
    """As torch._scaled_mm without scale_result."""
    a, b = (torch.tensor(rows).to(E4M3) for rows in ([[3.0], [-400], [torch.nan]], [[1.0, 2, 400]]))
    one = torch.ones(())
    out = op(a, b, one, TENSOR, one, TENSOR, output_dtype=E4M3)
    assert out.float()[:2].tolist() == [[3, 6, 448], [-384, -448, -448]]
    assert out.float()[2].isnan().all()


def test_scaling_types_of_torch_are_taken() -> None:
    args = operands(5, 7, 9, (ROW, TENSOR), generator())
    types = F.ScalingType
    out = op(*args[:3], types.RowWise, args[4], types.TensorWise)
    assert torch.equal(out, op(*args))


def test_scales_of_any_layout() -> None:
    a, b, scale_a, _, scale_b, _ = args = operands(
        130, 300, 1152, (BLOCK_1X128, BLOCK_128X128), generator()
    )
    wanted = op(*args)
    padded = torch.full((12, 3), torch.nan)
    padded[:9] = scale_b
    for own in (scale_b.contiguous(), scale_b.t().contiguous().t(), padded):
        assert torch.equal(op(a, b, scale_a.contiguous(), 4, own, 5), wanted)
    row = operands(6, 5, 4, (ROW, ROW), generator())
    wanted = op(*row)
    flat = op(*row[:2], row[2].flatten(), ROW, row[4].t(), ROW)
    assert torch.equal(flat, wanted)


def test_opcheck() -> None:
    args = operands(6, 5, 200, (BLOCK_1X128, BLOCK_128X128), generator())
    torch.library.opcheck(op.default, args, {"bias": torch.ones(5)}, test_utils=CHECKS)
    for recipe, options in ((4, {}), (5, {"transpose": True}), (4, {"gate": "silu"}), (1, {})):
        args = (torch.randn(130, 200), recipe)
        torch.library.opcheck(quantize.default, args, options, test_utils=CHECKS)


@pytest.mark.parametrize("shape", [(0, 200), (130, 0), (0, 0), (1, 1), (130, 257)], ids=str)
def test_fakes_have_the_same_strides(shape) -> None:
    for recipe in (ROW, BLOCK_1X128, BLOCK_128X128):
        for transpose in (False, True)[: 1 + (recipe != ROW)]:
            own = quantize(torch.ones(shape), recipe, transpose=transpose)
            fake = quantize(torch.ones(shape, device="meta"), recipe, transpose=transpose)
            assert [(x.shape, x.stride(), x.dtype) for x in own] == [
                (x.shape, x.stride(), x.dtype) for x in fake
            ]


def test_one_graph_serves_all_numbers_of_rows() -> None:
    weight, w_scale = quantize(torch.randn(64, 200), BLOCK_128X128)

    def layer(x: Tensor) -> Tensor:
        data, scale = quantize(x, BLOCK_1X128)
        return op(data, weight.t(), scale, BLOCK_1X128, w_scale, BLOCK_128X128)

    compiled = torch.compile(layer, backend="eager", fullgraph=True, dynamic=True)
    for rows in (3, 130):
        x = torch.randn(rows, 200)
        assert torch.equal(compiled(x), layer(x))


def test_derivatives_and_vmap_are_refused() -> None:
    args = operands(6, 5, 4, (ROW, ROW), generator())
    bias = torch.ones(5, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"\[input\]: scaled_matmul has no rule for derivatives"):
        op(*args, bias=bias)
    with torch.no_grad():
        op(*args, bias=bias)
    with pytest.raises(RuntimeError, match=r"\[input\]: quantize has no rule for derivatives"):
        quantize(torch.ones(3, 4, requires_grad=True), ROW)
    with pytest.raises(RuntimeError, match=r"\[input\]: quantize has no rule for torch.vmap"):
        torch.vmap(lambda x: quantize(x, ROW))(torch.ones(2, 3, 4))


def test_autocast_casts_nothing() -> None:
    args = operands(6, 5, 4, (ROW, ROW), generator())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(op(*args, output_dtype=torch.float32), op(*args).float())
        assert quantize(torch.full((1, 4), 1 / 3), ROW)[1].item() == torch.tensor(1 / 3) / 448


def made(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape).to(dtype)


A, B, ONE = made(6, 200, dtype=E4M3), made(200, 5, dtype=E4M3), made()


@pytest.mark.parametrize(
    ("args", "options", "match"),
    [
        ((A.float(), B, ONE, 0, ONE, 0), {}, "'mat_a' has a wrong dtype"),
        ((A, B[0], ONE, 0, ONE, 0), {}, "'mat_b' has a wrong shape"),
        ((A, B[:9], ONE, 0, ONE, 0), {}, "cannot be multiplied"),
        ((A.to(E5M2), B.to(E5M2), ONE, 0, ONE, 0), {}, "float8_e5m2 by float8_e5m2"),
        ((A, B, made(2), 0, ONE, 0), {}, "'scale_a' has a shape .*one element"),
        ((A, B, ONE, 0, made(6), 1), {}, "'scale_b' has a shape .*5 elements"),
        ((A, B, made(3, 2).t(), 1, made(5), 1), {}, "'scale_a' has a shape .*6 elements in one"),
        ((A, B, made(2, 6), 4, made(2, 1), 5), {}, r"'scale_a' has a shape .*\(6, 2\)"),
        ((A, B, made(6, 2), 4, made(3, 1), 5), {}, r"'scale_b' has a shape .*\(2, 1\)"),
        ((A, B, made(6, 2), 4, made(6, 1), 1), {}, "5 elements"),
        ((A, B, made(6, 2), 4, made(5), 1), {}, "mixes scales"),
        ((A, B, ONE, 3, ONE, 0), {}, "'scale_recipe_a' is not supported"),
        ((A, B, ONE.double(), 0, ONE, 0), {}, "'scale_a' has a wrong dtype"),
        ((A.to(E5M2), B, made(6, 2), 4, made(2, 1), 5), {}, "float8_e4m3fn alone"),
        ((A, B, ONE, 0, ONE, 0), {"bias": made(6)}, "'bias' has a wrong shape"),
        ((A, B, ONE, 0, ONE, 0), {"bias": made(5).double()}, "'bias' has a wrong dtype"),
        ((A, B, ONE, 0, ONE, 0), {"output_dtype": E5M2}, "'output_dtype' is not supported"),
    ],
)
def test_errors(args, options, match) -> None:
    with pytest.raises(RuntimeError, match=rf"torch_cubin \[input\]: scaled_matmul.*{match}"):
        op(*args, **options)
    with torch.device("meta"):
        fake = [x.to("meta") if isinstance(x, Tensor) else x for x in args]
        others = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in options.items()}
        with pytest.raises(RuntimeError, match=match):
            op(*fake, **others)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("recipe", [ROW, BLOCK_1X128, BLOCK_128X128])
def test_quantised_numbers(recipe, transpose, power_of_two) -> None:
    if recipe == ROW and transpose:
        return
    x = torch.randn(150, 200, generator=generator())
    x[5, 7], x[6, 8], x[140, 130] = torch.inf, -torch.inf, torch.nan
    x[9], x[128:, :128] = 0, 1e-43
    for dtype, step in ((E4M3, 2**-4), (E5M2, 2**-3)):
        options = {"transpose": transpose, "power_of_two": power_of_two, "dtype": dtype}
        data, scale = quantize(x, recipe, **options)
        own = x.t() if transpose else x
        assert scale.shape == cases.scale_shape(recipe, *own.shape)
        if power_of_two:
            assert torch.equal(scale.log2(), scale.log2().round())
        factors = cases.scales_of_elements(scale.double(), recipe, *own.shape)
        back = data.double() * factors
        finite = own.isfinite()
        assert torch.equal(back.isfinite(), finite)
        least = 2.0**-10 if dtype == E4M3 else 2.0**-17  # half of the smallest subnormal number
        limit = own.double().abs() * step + factors.broadcast_to(own.shape) * least
        assert ((back - own).abs() <= limit)[finite].all()
    assert quantize(torch.full((1, 4), 448.0), recipe, power_of_two=True)[1].item() == 1
    assert quantize(torch.full((1, 4), 449.0), recipe, power_of_two=True)[1].item() == 2


def test_gated() -> None:
    x = torch.randn(5, 2 * 200, generator=generator(), dtype=torch.bfloat16)
    gate, up = x.float().split(200, 1)
    data, scale = quantize(x, BLOCK_1X128, gate="silu")
    wanted, wanted_scale = quantize(F.silu(gate) * up, BLOCK_1X128)
    assert torch.equal(data.float(), wanted.float())
    assert torch.equal(scale, wanted_scale)


@pytest.mark.parametrize(
    ("args", "options", "match"),
    [
        ((made(3, 4).double(), ROW), {}, "'x' has a wrong dtype"),
        ((made(3), ROW), {}, "'x' has a wrong shape"),
        ((made(3, 4), TENSOR), {}, "'recipe' is not supported"),
        ((made(3, 4), ROW), {"transpose": True}, "'transpose' is not supported for RowWise"),
        ((made(3, 4), ROW), {"gate": "silu"}, "'gate' is supported for BlockWise1x128"),
        ((made(3, 4), BLOCK_1X128), {"gate": "gelu"}, "'gate' is not known"),
        ((made(3, 5), BLOCK_1X128), {"gate": "silu"}, "'x' has a wrong shape"),
        ((made(3, 4), ROW), {"dtype": torch.int8}, "'dtype' is not supported"),
    ],
)
def test_quantize_errors(args, options, match) -> None:
    with pytest.raises(RuntimeError, match=rf"torch_cubin \[input\]: quantize.*{match}"):
        quantize(*args, **options)


def test_the_examples_of_the_docs() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "fp8.md").read_text()
    names: dict[str, Any] = {}
    exec("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), names)
    y, dw = names["y"], names["dw"]
    assert y.shape == (8, 256)
    assert dw[1].eq(0).all()
    grads, x = (
        (names[name].float() * names[f"{name}_scale"].repeat_interleave(128, 1)[:, :200])[:, 50:]
        for name in ("grads", "x")
    )
    torch.testing.assert_close(dw[2].float(), grads @ x.t(), rtol=0.01, atol=0.01)
    assert isinstance(names["model"][0], torch_cubin.Float8Linear)
    assert type(names["model"][2]) is torch.nn.Linear
