"""torch._scaled_mm and torch._scaled_mm_v2 (F.scaled_mm) as calls of cubin::scaled_matmul, and the
same of groups as calls of cubin::scaled_grouped_matmul; each returns the reason, a string, if it is
left to PyTorch."""

from __future__ import annotations

from typing import Any

import torch

from torch_cubin._drop_in.why_not import SHAPES, unlike, why_not_8_bit
from torch_cubin._ops.scaled import BLOCK_1X128, BLOCK_128X128, ROW, TENSOR

_cubin_scaled = torch.ops.cubin.scaled_matmul.default
_cubin_scaled_grouped = torch.ops.cubin.scaled_grouped_matmul.default
_OUTPUTS = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
_RECIPES = (TENSOR, ROW, BLOCK_1X128, BLOCK_128X128)
_OTHER_SCALES = "scales that it does not take"

Result = torch.Tensor | str


def _blocks(size: int) -> int:
    return (size + 127) // 128


def _fits(scale: torch.Tensor, recipe: int, size: int, k: int) -> bool:
    """Whether a scale has the shape that the op takes; `size`: rows of A or columns of B.

    It is scale_fits() of csrc/ops/scaled/checks.cpp once more: torch.compile, which traces it with
    symbols for sizes, cannot call C++. test_drop_in_scaled.py compares both.
    """
    shape, blocks = tuple(scale.shape), _blocks(k)
    if recipe == TENSOR:
        return scale.numel() == 1
    if recipe == ROW:
        return scale.numel() == size and (len(shape) < 2 or (len(shape) == 2 and 1 in shape))
    if recipe == BLOCK_1X128:
        return shape == (size, blocks)
    return shape in ((blocks, _blocks(size)), (_blocks(blocks * 32) * 4, _blocks(size)))


def _call(
    a: Any, b: Any, scales: tuple[Any, Any], recipes: tuple[int, int], bias: Any, dtype: Any,
    fast: bool,
) -> Result:  # fmt: skip
    if dtype not in _OUTPUTS:
        return f"an output of {str(dtype).removeprefix('torch.')}"
    (m, k), n = a.shape, b.shape[1]
    if b.shape[0] != k or (bias is not None and tuple(bias.shape) != (n,)):
        return SHAPES
    if (recipes[0] >= BLOCK_1X128) != (recipes[1] >= BLOCK_1X128):
        return _OTHER_SCALES
    if recipes[0] >= BLOCK_1X128 and not a.dtype == b.dtype == torch.float8_e4m3fn:
        return "scales of blocks of float8_e5m2"
    for scale, recipe, size in zip(scales, recipes, (m, n), strict=True):
        if not _fits(scale, recipe, size, k):
            return _OTHER_SCALES
    return _cubin_scaled(
        *(a, b, scales[0], recipes[0], scales[1], recipes[1]),
        bias=bias,
        output_dtype=dtype,
        use_fast_accum=fast,
    )


def _unlike_plain(lists: tuple[Any, ...], swizzles: tuple[Any, ...], contraction_dim: Any) -> str:
    """Why _v2 functions are left to PyTorch; "" if each operand has one scale and nothing else."""
    if not all(len(x) == 1 for x in lists):
        return "several scales of an operand"
    if any(swizzles):
        return "swizzled scales"
    return "argument contraction_dim" if len(contraction_dim) else ""


def scaled_mm_v2(
    input: Any,
    mat2: Any,
    scale_a: Any,
    recipe_a: Any,
    swizzle_a: Any,
    scale_b: Any,
    recipe_b: Any,
    swizzle_b: Any,
    bias: Any = None,
    out_dtype: Any = None,
    contraction_dim: Any = (),
    use_fast_accum: bool = False,
    *,
    out: Any = None,
    **others: Any,
) -> Result:
    """torch._scaled_mm_v2, which F.scaled_mm calls with lists of one scale and its recipe."""
    reason = unlike((), out, others) or _unlike_plain(
        (scale_a, scale_b, recipe_a, recipe_b), (*swizzle_a, *swizzle_b), contraction_dim
    )
    if reason:
        return reason
    recipes = recipe_a[0], recipe_b[0]
    if not all(recipe in _RECIPES for recipe in recipes):
        return _OTHER_SCALES
    scales = scale_a[0], scale_b[0]
    dtype = out_dtype or input.dtype
    return why_not_8_bit(input, mat2, *scales, bias) or _call(
        input, mat2, scales, recipes, bias, dtype, use_fast_accum
    )


def scaled_mm_v1(
    input: Any,
    mat2: Any,
    scale_a: Any,
    scale_b: Any,
    bias: Any = None,
    scale_result: Any = None,
    out_dtype: Any = None,
    use_fast_accum: bool = False,
    *,
    out: Any = None,
    **others: Any,
) -> Result:
    """torch._scaled_mm, whose scales' shapes say what they are."""
    if scale_result is not None:
        return "argument scale_result"
    reason = unlike((), out, others) or why_not_8_bit(input, mat2, scale_a, scale_b, bias)
    if reason:
        return reason
    (m, k), n = input.shape, mat2.shape[1]
    blocks, a, b = _blocks(k), tuple(scale_a.shape), tuple(scale_b.shape)
    if scale_a.numel() == scale_b.numel() == 1:
        recipes = (TENSOR, TENSOR)
    elif a == (m, 1) and b == (1, n):
        recipes = (ROW, ROW)
    elif a in ((m, blocks), (_blocks(m), blocks)) and b in ((blocks, n), (blocks, _blocks(n))):
        first, second = a == (m, blocks), b == (blocks, n)
        scale_a, scale_b = scale_a if first else scale_a.t(), scale_b.t() if second else scale_b
        recipes = (
            BLOCK_1X128 if first else BLOCK_128X128,
            BLOCK_1X128 if second else BLOCK_128X128,
        )
    else:
        return _OTHER_SCALES
    dtype = input.dtype if out_dtype is None else out_dtype
    return _call(input, mat2, (scale_a, scale_b), recipes, bias, dtype, use_fast_accum)


def scaled_grouped_mm_v1(
    input: Any,
    mat2: Any,
    scale_a: Any,
    scale_b: Any,
    offs: Any = None,
    bias: Any = None,
    scale_result: Any = None,
    out_dtype: Any = None,
    use_fast_accum: bool = False,
    **others: Any,
) -> Result:
    """torch._scaled_grouped_mm, whose scales are of rows: (M,) and (groups, N); where groups divide
    K, (groups * M,) and (groups * N,)."""
    others |= {"bias": bias} if bias is not None else {}
    others |= {"scale_result": scale_result} if scale_result is not None else {}
    if others:
        return f"argument {next(iter(others))}"
    if offs is None or offs.dim() != 1 or offs.dtype != torch.int32:
        return "offs that it does not take"
    of_k = mat2.dim() == 2
    reason = why_not_8_bit(input, mat2, scale_a, scale_b, offs, (2, 2) if of_k else (2, 3))
    if reason:
        return reason
    groups, m, n = offs.shape[0], input.shape[0], mat2.shape[-1]
    if input.shape[1] != mat2.shape[-2] or not (of_k or groups == mat2.shape[0]):
        return SHAPES
    if not input.dtype == mat2.dtype == torch.float8_e4m3fn or out_dtype != torch.bfloat16:
        return "dtypes that it does not take"
    shapes = ((groups * m,), (groups * n,)) if of_k else ((m,), (groups, n))
    if (tuple(scale_a.shape), tuple(scale_b.shape)) != shapes:
        return _OTHER_SCALES
    if of_k:
        scale_a, scale_b = scale_a.view(groups, m), scale_b.view(groups, n)
    return _cubin_scaled_grouped(
        *(input, mat2, scale_a, ROW, scale_b, ROW),
        offs=offs,
        output_dtype=out_dtype,
        use_fast_accum=use_fast_accum,
    )


def scaled_grouped_mm_v2(
    input: Any,
    mat2: Any,
    scale_a: Any,
    recipe_a: Any,
    swizzle_a: Any,
    scale_b: Any,
    recipe_b: Any,
    swizzle_b: Any,
    offs: Any = None,
    bias: Any = None,
    out_dtype: Any = None,
    contraction_dim: Any = (),
    use_fast_accum: bool = False,
    **others: Any,
) -> Result:
    """torch._scaled_grouped_mm_v2, which F.scaled_grouped_mm calls with lists of one scale."""
    reason = _unlike_plain(
        (scale_a, scale_b, recipe_a, recipe_b), (*swizzle_a, *swizzle_b), contraction_dim
    )
    if reason:
        return reason
    if recipe_a[0] != ROW or recipe_b[0] != ROW:
        return _OTHER_SCALES
    return scaled_grouped_mm_v1(
        *(input, mat2, scale_a[0], scale_b[0], offs, bias, None, out_dtype, use_fast_accum),
        **others,
    )
