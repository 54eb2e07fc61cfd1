"""cubin::scaled_gated_matmul on a GPU: the bits of the ops that it consists of, by each kernel."""

from __future__ import annotations

import pytest
import torch
from scaled_cases import BLOCK_1X128, BLOCK_128X128, gated_by_steps
from torch import Tensor

from torch_cubin import ops
from torch_cubin._native import library
from torch_cubin._tuning import measure

pytestmark = pytest.mark.usefixtures("nan_memory")

op = ops.scaled_gated_matmul
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# M, N, K; the last has no kernel.
SIZES = [(1, 128, 128), (77, 384, 520), (300, 1280, 1024), (2500, 640, 2064), (130, 200, 256)]


def kernels_of(grouped: int) -> list[str]:
    found = [own for own in library.catalog()["kernels"] if own["family"] == "scaled"]
    return [own["name"] for own in found if own["gated"] and own["grouped"] == grouped]


def operands(m: int, n: int, k: int, groups: int, generator: torch.Generator) -> list[Tensor]:
    """With rows of zeros, of infinities, of NaN, and of numbers whose products are infinite in
    float16."""
    made = {"generator": generator, "device": "cuda"}
    x = torch.randn(m, k, **made)
    x[::7] *= 3000.0
    x[3::11], x[5::13, 1], x[6::17, k // 2] = 0.0, torch.inf, torch.nan
    a, a_scale = ops.quantize(x, BLOCK_1X128)
    a_scale[8::19] = 1e-40  # sums that are denormal, or zero of either sign
    parts = [
        ops.quantize(torch.randn(2 * n, k, **made) * k**-0.5, BLOCK_128X128)
        for _ in range(max(groups, 1))
    ]
    b = torch.stack([own for own, _ in parts]).mT
    b_scale = torch.stack([own.t() for _, own in parts]).mT
    return [a, b, a_scale, b_scale] if groups else [a, b[0], a_scale, b_scale[0]]


def assert_same_bits(
    results: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], rows: slice, what: str
) -> None:
    (data, scale), (right, right_scale) = results, wanted
    assert (data.shape, scale.shape) == (right.shape, right_scale.shape)
    # A NaN has one encoding of either sign.
    found, bits = (own[rows].view(torch.uint8) for own in (data, right))
    nan = right[rows].float().isnan()
    assert torch.equal(data[rows].float().isnan(), nan), what
    different = (found != bits) & ~nan
    assert not different.any(), f"{what}: {int(different.sum())} of {bits.numel()} differ"
    same = scale[rows].view(torch.int32) == right_scale[rows].view(torch.int32)
    assert same.all(), f"{what}: {int((~same).sum())} scales differ"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_product(sizes, dtype, generator: torch.Generator) -> None:
    args = operands(*sizes, 0, generator)
    wanted, of_powers = (gated_by_steps(args, dtype, powers) for powers in (False, True))
    for kernel in ("", *kernels_of(0)):
        with measure.watching():
            library.force_config(kernel)
            out = op(*args, dtype=dtype)
            powers = op(*args, dtype=dtype, power_of_two=True)
            part = op(args[0][40:], args[1], args[2][40:], args[3], dtype=dtype)
        assert_same_bits(out, wanted, slice(None), kernel)
        assert_same_bits(powers, of_powers, slice(None), f"{kernel} powers of two")
        assert [own.stride() for own in out] == [own.stride() for own in wanted]
        assert_same_bits(part, tuple(own[40:] for own in wanted), slice(None), f"{kernel} rows")
    if sizes[1] % 128 == 0:
        assert set(kernels_of(0)) <= {own["name"] for own in library.catalog()["loaded"]}


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_groups(sizes, wide: bool, generator: torch.Generator) -> None:
    """Empty ones, rows past the last end, and a wrong end."""
    m = sizes[0]
    args = operands(*sizes, 5, generator)
    for ends, written in (
        ((m // 3, m // 3, m // 2, m - m // 9, m - m // 9), m - m // 9),
        ((m // 3, m // 2, m // 2, m // 4, m), m),
        ((0, 0, 0, 0, 0), 0),
    ):
        offs = torch.tensor(ends, dtype=torch.int64 if wide else torch.int32, device="cuda")
        wanted = gated_by_steps(args, torch.bfloat16, offs=offs)
        for kernel in ("", *kernels_of(1)):
            with measure.watching():
                library.force_config(kernel)
                out = op(*args, offs=offs)
            assert_same_bits(out, wanted, slice(written), f"{kernel} {ends}")
            if kernel and sizes[1] % 128 == 0 and written < m:
                assert out[1][written:].isnan().all(), f"{kernel} {ends}: rows past the last end"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [*SIZES, (70, 77, 300), (70, 100, 300)], ids=str)
def test_gates_and_ups_in_two_matrices(sizes, dtype, generator: torch.Generator) -> None:
    """Beside one another in memory, or apart; scales of the same strides or of others."""
    m, n, k = sizes
    a, _, a_scale, _ = operands(*sizes, 0, generator)
    made = {"generator": generator, "device": "cuda"}
    pairs = [ops.quantize(torch.randn(n, k, **made) * k**-0.5, BLOCK_128X128) for _ in range(2)]
    (gate, gate_scale), (up, up_scale) = ((own.t(), scale) for own, scale in pairs)
    products = [
        ops.scaled_matmul(a, w, a_scale, BLOCK_1X128, s, BLOCK_128X128, output_dtype=dtype)
        for w, s in ((gate, gate_scale), (up, up_scale))
    ]
    wanted = ops.quantize(torch.cat(products, 1), BLOCK_1X128, gate="silu")
    odd = up.new_empty((n, k + 3))[:, 3:]
    odd.copy_(up.t())
    for kernel in ("", *kernels_of(0), "sm90_scaled_matmul_e4m3_promoted_64x64"):
        for mat_up, scale_up in (
            (up, up_scale), (odd.t(), up_scale.t().contiguous().t()), (up, up_scale.contiguous()),
        ):  # fmt: skip
            with measure.watching():
                library.force_config(kernel)
                out = op(
                    a, gate, a_scale, gate_scale, dtype=dtype, mat_up=mat_up, scale_up=scale_up
                )
            assert_same_bits(out, wanted, slice(None), kernel)
    for rows, width, depth in ((0, n, k), (m, 0, k), (m, n, 0)):
        blocks = -(-depth // 128)
        empty = op(
            a[:rows, :depth], gate[:depth, :width], a_scale[:rows, :blocks],
            gate_scale[:blocks, : -(-width // 128)], dtype=dtype,
            mat_up=up[:depth, :width], scale_up=up_scale[:blocks, : -(-width // 128)],
        )  # fmt: skip
        assert empty[0].shape == (rows, width)
        assert empty[0].float().eq(0).all()


def test_other_layouts_and_a_graph(generator: torch.Generator) -> None:
    m, n, k = 100, 256, 400
    a, b, a_scale, b_scale = args = operands(m, n, k, 0, generator)
    wanted = gated_by_steps(args, torch.bfloat16)
    wide = torch.zeros(m, k + 5, device="cuda", dtype=torch.uint8)
    wide[:, 5:] = a.view(torch.uint8)
    columns = b.t().contiguous().view(torch.uint8).t().contiguous().view(torch.float8_e4m3fn)
    others = (
        wide.view(torch.float8_e4m3fn)[:, 5:], columns, a_scale.contiguous(), b_scale.contiguous()
    )  # fmt: skip
    graph = torch.cuda.CUDAGraph()
    with measure.watching():
        for kernel in kernels_of(0):
            library.force_config(kernel)
            assert_same_bits(op(*others), wanted, slice(None), kernel)
        op(*args)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            out = op(*args)
    next_args = operands(m, n, k, 0, generator)
    for own, other in zip(args, next_args, strict=True):
        own.copy_(other)
    graph.replay()
    assert_same_bits(out, gated_by_steps(next_args, torch.bfloat16), slice(None), "graph")
    for args in (
        [a[:0], b, a_scale[:0], b_scale],
        [a, b[:, :0], a_scale, b_scale[:, :0]],
        [a[:, :0], b[:0], a_scale[:, :0], b_scale[:0]],
    ):
        assert_same_bits(op(*args), gated_by_steps(args, torch.bfloat16), slice(None), "empty")
