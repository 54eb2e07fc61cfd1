"""matmul and linear on the GPU against float64: every dtype, layout and class of shape.

Fresh memory holds NaN, every input lies between NaN guards (cases.place), and the limit is
PyTorch's own error in the same dtype (numerics.py).
"""

from __future__ import annotations

import itertools
import math
from functools import partial

import numerics
import pytest
import torch
import torch.nn.functional as F
from gpu import cases

from torch_cubin._native import library
from torch_cubin._tuning import measure

pytestmark = pytest.mark.usefixtures("nan_memory")

# M, N, K. A name for each, because that is what a failure prints.
SHAPES = {
    "one": (1, 1, 1),
    "tiny": (2, 3, 5),
    "tile": (128, 128, 128),
    "square": (1024, 1024, 1024),
    "tails": (129, 257, 65),
    "primes": (1009, 997, 1013),
    "k_one": (300, 300, 1),
    "k_deep": (64, 72, 40000),
    "row": (1, 4096, 4096),
    "row_deep": (1, 512, 28672),
    "rows_4": (4, 4096, 2048),
    "rows_16": (16, 6144, 4096),
    "rows_64": (64, 4096, 14336),
    "column": (4096, 1, 4096),
    "columns_8": (4096, 8, 1024),
    "wide": (256, 8192, 512),
}


def _operands(shape, mode_dtype, pair, g, integers):
    m, n, k = SHAPES[shape]
    layouts = cases.matrix_layouts(2)
    a = cases.place(cases.draw((m, k), mode_dtype, integers, g), layouts[pair[0]])
    b = cases.place(cases.draw((k, n), mode_dtype, integers, g), layouts[pair[1]])
    return a, b


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mode", cases.MODES)
def test_matmul_error(mode: str, shape: str, generator: torch.Generator) -> None:
    """Random normal inputs; a shape with few outputs is drawn often, so that limits mean much."""
    m, n, k = SHAPES[shape]
    draws = min(64, math.ceil(256 / (m * n)))
    with cases.math_mode(mode) as dtype:
        for pair in cases.all_layout_pairs():
            judge = numerics.Judge(dtype)
            for _ in range(draws):
                a, b = _operands(shape, dtype, pair, generator, integers=False)
                own = torch.matmul(a, b)
                cases.poison(m * n, dtype)
                out = torch.ops.cubin.matmul(a, b)
                assert out.is_contiguous()
                label = f"{mode} {shape} {(m, n, k)} {pair}"
                reference = numerics.reference_matmul(a, b)
                own = cases.peer(mode, own, reference, numerics.reference_matmul, a, b)
                judge.add(label, out, own, reference)
            judge.finish()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mode", cases.MODES)
def test_matmul_small_integers_are_exact(mode: str, shape: str, generator: torch.Generator) -> None:
    with cases.math_mode(mode) as dtype:
        for pair in cases.all_layout_pairs():
            a, b = _operands(shape, dtype, pair, generator, integers=True)
            cases.poison(a.shape[0] * b.shape[1], dtype)
            out = torch.ops.cubin.matmul(a, b)
            expected = torch.matmul(a.double(), b.double())
            numerics.check_exact(out, expected, f"{mode} {shape} {SHAPES[shape]} {pair}")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mode", cases.MODES)
def test_linear_with_fused_bias(mode: str, shape: str, generator: torch.Generator) -> None:
    m, n, k = SHAPES[shape]
    draws = min(64, math.ceil(256 / (m * n)))
    with cases.math_mode(mode) as dtype:
        for weight_layout in ("rows", "columns", "rows_ragged"):
            for bias_layout in (cases.Layout(), cases.Layout(step=3), cases.Layout(expand=(0,))):
                judge = numerics.Judge(dtype)
                for draw in range(draws + 1):
                    integers = draw == draws
                    x, weight = _operands(
                        shape, dtype, ("rows", weight_layout), generator, integers
                    )
                    weight = weight.t()
                    bias = cases.place(cases.draw((n,), dtype, integers, generator), bias_layout)
                    cases.poison(m * n, dtype)
                    out = torch.ops.cubin.linear(x, weight, bias)
                    reference = numerics.reference_linear(x, weight, bias)
                    label = f"{mode} {shape} {(m, n, k)} weight {weight_layout}, bias {bias_layout}"
                    if integers:
                        numerics.check_exact(out, reference, label)
                    else:
                        own = cases.peer(
                            mode,
                            F.linear(x, weight, bias),
                            reference,
                            partial(numerics.reference_linear, bias=bias),
                            x,
                            weight,
                        )
                        judge.add(label, out, own, reference)
                judge.finish()


@pytest.mark.parametrize("b_layout", ["rows", "columns", "rows_ragged"])
@pytest.mark.parametrize("a_layout", ["rows", "columns", "columns_offset"])
def test_long_sums_of_float64(a_layout: str, b_layout: str, generator: torch.Generator) -> None:
    """One chain of 20,000 terms had three times the error of PyTorch, which splits it here."""
    m, n, k = 1024, 768, 20000
    layouts = cases.matrix_layouts(2)
    a = cases.place(cases.draw((m, k), torch.float64, False, generator), layouts[a_layout])
    b = cases.place(cases.draw((k, n), torch.float64, False, generator), layouts[b_layout])
    own = torch.matmul(a, b)
    cases.poison(m * n, torch.float64)
    out = torch.ops.cubin.matmul(a, b)
    label = f"float64 {(m, n, k)} {a_layout} {b_layout}"
    numerics.check_close(out, own, numerics.reference_matmul(a, b), label)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_config_is_exact_on_small_integers(dtype, generator: torch.Generator) -> None:
    """Tiles that end within an operand or a vector, K that ends within a k tile, few k tiles."""
    layouts = cases.matrix_layouts(2)
    for m, n, k in ((130, 132, 24), (129, 257, 1000), (200, 136, 4104), (256, 256, 16)):
        for pair in itertools.product(("rows", "columns"), repeat=2):
            a = cases.place(cases.draw((m, k), dtype, True, generator), layouts[pair[0]])
            b = cases.place(cases.draw((k, n), dtype, True, generator), layouts[pair[1]])
            exact = (a.double() @ b.double()).to(dtype)
            with measure.watching():
                torch.ops.cubin.matmul(a, b)
                plans = library.watched_plans()
                names = {config["name"] for plan in plans for config in plan["configs"]}
                for name in sorted(names):
                    library.force_config(name)
                    out = torch.ops.cubin.matmul(a, b)
                    library.force_config("")
                    assert torch.equal(out, exact), f"{name} {(m, n, k)} {pair}"


# Whole tiles of 128 x 256, more than any GPU has multiprocessors: blocks compute several of them.
ROUNDS = {
    "uneven": ((2176, 320), (320, 4352)),
    "least K": ((4096, 256), (256, 4096)),
    "less K": ((4096, 192), (192, 4096)),
    "column of tiles": ((33024, 512), (512, 256)),
    "batch": ((9, 1024, 512), (9, 512, 1024)),
    "broadcast": ((2, 1, 1024, 1024), (4, 1024, 2048)),
}


@pytest.mark.parametrize("name", ROUNDS)
@pytest.mark.parametrize("mode", ["float16", "bfloat16"])
def test_blocks_that_compute_several_tiles(
    mode: str, name: str, generator: torch.Generator
) -> None:
    shapes = ROUNDS[name]
    with cases.math_mode(mode) as dtype:
        for pair in itertools.product(("rows", "columns"), repeat=2):
            for integers in (True, False):
                a, b = (
                    cases.place(
                        cases.draw(shape, dtype, integers, generator),
                        cases.matrix_layouts(len(shape))[layout],
                    )
                    for shape, layout in zip(shapes, pair, strict=True)
                )
                own = torch.matmul(a, b)
                cases.poison(own.numel(), dtype)
                out = torch.ops.cubin.matmul(a, b)
                reference = numerics.reference_matmul(a, b)
                label = f"{mode} {name} {shapes} {pair}"
                if integers:
                    numerics.check_exact(out, reference, label)
                else:
                    numerics.check_close(out, own, reference, label)


@pytest.mark.parametrize("mode", ["float16", "bfloat16"])
def test_blocks_that_compute_several_tiles_add_a_bias(
    mode: str, generator: torch.Generator
) -> None:
    with cases.math_mode(mode) as dtype:
        x, weight, bias = (
            cases.place(cases.draw(shape, dtype, True, generator), cases.Layout())
            for shape in ((4096, 512), (4352, 512), (4352,))
        )
        cases.poison(4096 * 4352, dtype)
        out = torch.ops.cubin.linear(x, weight, bias)
        numerics.check_exact(out, numerics.reference_linear(x, weight, bias), mode)


BATCHES = {
    "3-D": ((7, 65, 40), (7, 40, 33)),
    "broadcast left": ((65, 40), (7, 40, 33)),
    "broadcast right": ((7, 65, 40), (40, 33)),
    "broadcast both": ((5, 1, 65, 40), (1, 6, 40, 33)),
    "six dims": ((2, 1, 3, 1, 2, 9, 16), (1, 2, 3, 2, 1, 16, 8)),
    "vector left": ((40,), (7, 40, 33)),
    "vector right": ((7, 65, 40), (40,)),
    "dot": ((4000,), (4000,)),
    "many tiny": ((70000, 8, 8), (70000, 8, 8)),
    "many rows": ((70000, 1, 16), (70000, 16, 3)),
    "attention": ((2, 12, 200, 64), (2, 12, 64, 200)),
}


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("mode", cases.MODES)
def test_batches(mode: str, name: str, generator: torch.Generator) -> None:
    a_shape, b_shape = BATCHES[name]
    with cases.math_mode(mode) as dtype:
        judge = numerics.Judge(dtype)
        for _ in range(64 if name == "dot" else 1):
            a = cases.place(cases.draw(a_shape, dtype, False, generator), cases.Layout())
            b = cases.place(cases.draw(b_shape, dtype, False, generator), cases.Layout())
            out = torch.ops.cubin.matmul(a, b)
            own = torch.matmul(a, b)
            reference = numerics.reference_matmul(a, b)
            own = cases.peer(mode, own, reference, numerics.reference_matmul, a, b)
            judge.add(f"{mode} {name}", out, own, reference)
        judge.finish()
        a, b = (cases.draw(shape, dtype, True, generator) for shape in (a_shape, b_shape))
        out = torch.ops.cubin.matmul(a, b)
        numerics.check_exact(out, a.double() @ b.double(), f"{mode} {name}")


@pytest.mark.parametrize("mode", cases.MODES)
def test_results_stay_inside_their_memory(mode: str, generator: torch.Generator) -> None:
    """The output takes a hole between two live blocks, whose bytes must not change."""
    checked = 0
    with cases.math_mode(mode) as dtype:
        size = torch.finfo(dtype).bits // 8
        for m, n, k in [(33, 65, 40), (1, 1000, 64), (127, 129, 33), (5, 3, 4096), (250, 40, 16)]:
            a, b = (cases.draw(s, dtype, True, generator) for s in ((m, k), (k, n)))
            expected = a.double() @ b.double()
            torch.ops.cubin.matmul(a, b)
            block = -(-m * n * size // 512) * 512
            torch.cuda.synchronize()
            filler = [
                torch.full((block,), 0x5A, dtype=torch.uint8, device="cuda") for _ in range(64)
            ]
            pointers = {tensor.data_ptr(): index for index, tensor in enumerate(filler)}
            middle = next(
                index
                for pointer, index in pointers.items()
                if pointer - block in pointers and pointer + block in pointers
            )
            hole = filler[middle].data_ptr()
            before, after = filler[pointers[hole - block]], filler[pointers[hole + block]]
            filler[middle] = None
            out = torch.ops.cubin.matmul(a, b)
            numerics.check_exact(out, expected, f"{mode} {(m, n, k)}")
            if out.data_ptr() == hole:
                checked += 1
                assert bool((before == 0x5A).all())
                assert bool((after == 0x5A).all())
    assert checked >= 3, "the allocator gave the hole to something else"


@pytest.mark.fault_case(43)
@pytest.mark.parametrize("mode", cases.MODES)
def test_nan_and_inf_propagate_as_in_pytorch(mode: str, generator: torch.Generator) -> None:
    with cases.math_mode(mode) as dtype:
        for m, n, k in [(70, 50, 40), (1, 300, 129), (130, 140, 2000)]:
            a, b = (cases.draw(s, dtype, False, generator) for s in ((m, k), (k, n)))
            a[0, 3], a[m // 2, k - 1] = torch.inf, torch.nan
            b[k // 2, n - 1], b[0, 0] = -torch.inf, torch.inf
            out, own = torch.ops.cubin.matmul(a, b), torch.matmul(a, b)
            numerics.check_same_class(out, own, f"{mode} {(m, n, k)}")


@pytest.mark.fault_case(43)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_denormals_are_kept(dtype: torch.dtype) -> None:
    a = torch.full((16, 8), torch.finfo(dtype).tiny / 4, dtype=dtype, device="cuda")
    b = torch.eye(8, 24, dtype=dtype, device="cuda")
    numerics.check_exact(torch.ops.cubin.matmul(a, b), torch.matmul(a.double(), b.double()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_are_accumulated_in_float32(dtype: torch.dtype) -> None:
    """5,000 ones: a float16 accumulator stops at 2048, a bfloat16 one at 256."""
    for m, n in [(1, 1), (64, 64), (3, 100)]:
        a = torch.ones(m, 5000, dtype=dtype, device="cuda")
        b = torch.ones(5000, n, dtype=dtype, device="cuda")
        out = torch.ops.cubin.matmul(a, b)
        numerics.check_exact(out, torch.full((m, n), 5000.0, device="cuda"))


@pytest.mark.fault_case(38)
@pytest.mark.parametrize("mode", cases.MODES)
def test_zero_sizes(mode: str) -> None:
    with cases.math_mode(mode) as dtype:
        for a_shape, b_shape in [
            ((0, 5), (5, 3)), ((4, 0), (0, 3)), ((4, 5), (5, 0)), ((0,), (0,)), ((0,), (0, 7)),
            ((3, 4, 0), (0, 2)), ((0, 4, 5), (5, 3)), ((2, 1, 4, 0), (3, 0, 5)), ((0, 0), (0, 0)),
        ]:  # fmt: skip
            a, b = (torch.ones(s, dtype=dtype, device="cuda") for s in (a_shape, b_shape))
            cases.poison(64, dtype)
            out, own = torch.ops.cubin.matmul(a, b), torch.matmul(a, b)
            numerics.check_bits(out, own, f"{a_shape} @ {b_shape}")
        x, weight, bias = (
            torch.ones(s, dtype=dtype, device="cuda") for s in ((4, 0), (3, 0), (3,))
        )
        numerics.check_bits(torch.ops.cubin.linear(x, weight), F.linear(x, weight))
        numerics.check_bits(torch.ops.cubin.linear(x, weight, bias), F.linear(x, weight, bias))
