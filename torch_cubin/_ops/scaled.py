"""scaled_matmul, scaled_grouped_matmul, scaled_gated_matmul (csrc/ops/scaled/scaled.h) and quantize
(csrc/ops/quantize/quantize.h): fake kernels, and errors for transforms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from torch_cubin._ops import checks, raw_ops, refusals
from torch_cubin._ops.raw_ops import QUANTIZE, SCALED, SCALED_GATED, SCALED_GROUPED
from torch_cubin._pytorch import operators

# The numbers of torch.nn.functional.ScalingType.
TENSOR, ROW, BLOCK_1X128, BLOCK_128X128 = 0, 1, 4, 5
_BLOCK = 128


def _scaled_matmul(
    mat_a: Tensor,
    mat_b: Tensor,
    scale_a: Tensor,
    scale_recipe_a: int,
    scale_b: Tensor,
    scale_recipe_b: int,
    *,
    bias: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    tensors = {"mat_a": mat_a, "mat_b": mat_b, "scale_a": scale_a, "scale_b": scale_b, "bias": bias}
    recipes = scale_recipe_a, scale_recipe_b
    return _fake_product(SCALED, "scaled", tensors, recipes, output_dtype, use_fast_accum)


def _scaled_grouped_matmul(
    mat_a: Tensor,
    mat_b: Tensor,
    scale_a: Tensor,
    scale_recipe_a: int,
    scale_b: Tensor,
    scale_recipe_b: int,
    *,
    offs: Tensor,
    output_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    rows: Tensor | None = None,
    out_rows: Tensor | None = None,
    activation: str = "none",
) -> Tensor:
    tensors = {"mat_a": mat_a, "mat_b": mat_b, "scale_a": scale_a, "scale_b": scale_b, "offs": offs}
    options = {"bias": bias, "scale": scale, "rows": rows, "out_rows": out_rows}
    recipes = scale_recipe_a, scale_recipe_b
    out = _fake_product(
        *(SCALED_GROUPED, "scaled_grouped", {**tensors, **options}, recipes, output_dtype),
        use_fast_accum,
        activation=activation,
    )
    if mat_b.dim() == 2:  # the groups divide K
        return out.new_empty([offs.shape[0], *out.shape])
    count, columns = out.shape
    count = count if rows is None else rows.shape[0]
    return out.new_empty([count, columns if activation == "none" else columns // 2])


def _scaled_gated_matmul(
    mat_a: Tensor,
    mat_b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    gate: str = "silu",
    offs: Tensor | None = None,
    dtype: torch.dtype | None = None,
    mat_up: Tensor | None = None,
    scale_up: Tensor | None = None,
    power_of_two: bool = False,
) -> tuple[Tensor, Tensor]:
    tensors = {"mat_a": mat_a, "mat_b": mat_b, "scale_a": scale_a, "scale_b": scale_b, "offs": offs}
    given = _given(SCALED_GATED, {**tensors, "mat_up": mat_up, "scale_up": scale_up})
    call = {"gate": gate, "dtype": _name_of(torch.bfloat16 if dtype is None else dtype)}
    checks.ask("scaled_gated", {"tensors": _described(given), **call})
    rows, columns = mat_a.shape[0], mat_b.shape[-1] // (2 if mat_up is None else 1)
    data = mat_a.new_empty(rows, columns, dtype=torch.float8_e4m3fn)
    blocks = (columns + _BLOCK - 1) // _BLOCK
    return data, mat_a.new_empty(blocks, rows, dtype=torch.float32).t()


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _given(op: str, tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Those that are not None, which are checked to be dense."""
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    for name, tensor in given.items():
        checks.check_dense(op, name, tensor)
    return given


def _described(given: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: checks.described(tensor) for name, tensor in given.items()}


def _fake_product(
    op: str,
    check: str,
    tensors: Mapping[str, Tensor | None],
    recipes: tuple[int, int],
    output_dtype: torch.dtype | None,
    use_fast_accum: bool,
    **options: Any,
) -> Tensor:
    """Checks the call and returns the whole product without data."""
    given = _given(op, tensors)
    dtype = torch.bfloat16 if output_dtype is None else output_dtype
    call = {
        "tensors": _described(given),
        "recipe_a": recipes[0],
        "recipe_b": recipes[1],
        "output_dtype": _name_of(dtype),
        "use_fast_accum": use_fast_accum,
        **options,
    }
    checks.ask(check, call)
    mat_a, mat_b = given["mat_a"], given["mat_b"]
    shape = checks.product_shape(list(mat_a.shape), list(mat_b.shape[-2:]))
    return mat_a.new_empty(shape, dtype=dtype)


def _quantize(
    x: Tensor,
    recipe: int,
    *,
    transpose: bool = False,
    power_of_two: bool = False,
    gate: str = "none",
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    checks.check_dense(QUANTIZE, "x", x)
    dtype = torch.float8_e4m3fn if dtype is None else dtype
    call = {"recipe": recipe, "transpose": transpose, "power_of_two": power_of_two, "gate": gate}
    checks.ask("quantize", {"x": checks.described(x), "dtype": _name_of(dtype), **call})
    rows, k = x.shape
    if gate != "none":
        k = k // 2
    if transpose:
        rows, k = k, rows
    data, blocks = x.new_empty(rows, k, dtype=dtype), (k + _BLOCK - 1) // _BLOCK
    if recipe == ROW:
        return data, x.new_empty(rows, 1, dtype=torch.float32)
    if recipe == BLOCK_1X128:
        scale = x.new_empty(blocks, rows, dtype=torch.float32)
    else:
        scale = x.new_empty((rows + _BLOCK - 1) // _BLOCK, blocks, dtype=torch.float32)
    return data, scale.t()


def register(library: torch.library.Library) -> None:
    fakes: dict[str, Callable[..., Any]] = {
        SCALED: _scaled_matmul,
        SCALED_GROUPED: _scaled_grouped_matmul,
        SCALED_GATED: _scaled_gated_matmul,
        QUANTIZE: _quantize,
    }
    for op, fake in fakes.items():
        for name in raw_ops.raw_names(op):
            operators.register_fake(f"cubin::{name}", fake, library)
    advice = "Call it under torch.no_grad(); its derivative needs operands in other scales."
    for op in (SCALED, SCALED_GROUPED, SCALED_GATED):
        refusals.refuse_transforms(library, op, advice=advice)
    advice = (
        "Call it under torch.no_grad(), or on x.detach(); layers that "
        "torch_cubin.float8(model, training=True) makes have derivatives."
    )
    refusals.refuse_transforms(library, QUANTIZE, advice=advice)
