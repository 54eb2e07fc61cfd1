"""Every kernel of csrc/kernels/matmul/anywhere.cu, forced: exact on small integers among NaN."""

from __future__ import annotations

import pytest
import torch
from gpu import forced_products, hopper
from gpu.forced_products import among_nan

import torch_cubin
from torch_cubin._native import library
from torch_cubin._tuning import measure

pytestmark = hopper.for_kernels

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "tf32": torch.float32}
# Rows of A, columns of B, K: tails of all dims, less than a tile, K of one part, of two, of many.
SHAPES = [
    (3, 5, 1), (5, 33, 3), (64, 129, 32), (65, 129, 31), (200, 301, 64), (333, 77, 33),
    (130, 511, 63), (96, 137, 40), (257, 1001, 9), (70, 190, 17), (500, 70, 50), (129, 203, 128),
    (61, 259, 127), (140, 70, 65), (77, 145, 577), (200, 66, 1033), (35, 201, 2050),
    (130, 129, 195), (70, 130, 53), (333, 201, 61), (70, 66, 1901),
]  # fmt: skip
LAYOUTS = ("nt", "nn", "tn", "tt")


@pytest.fixture(autouse=True)
def tf32():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def operands(
    batch: tuple[int, ...], m: int, n: int, k: int, layout: str, number: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    a_sizes = (m, k) if layout[0] == "n" else (k, m)
    b_sizes = (k, n) if layout[1] == "n" else (n, k)
    a = among_nan((*batch, *a_sizes), number % 4, number % 9, dtype)
    b = among_nan((*batch, *b_sizes), 3 - number % 4, 8 - number % 9, dtype)
    return a if layout[0] == "n" else a.mT, b if layout[1] == "n" else b.mT


def offered(a: torch.Tensor, b: torch.Tensor) -> set[str]:
    return forced_products.offered("anywhere", a, b)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("short", DTYPES)
def test_every_config(short: str, layout: str) -> None:
    dtype = DTYPES[short]
    wrong, ran = [], set()
    with torch.no_grad(), measure.watching():
        for number, (m, n, k) in enumerate(SHAPES):
            batch = (3,) if number % 5 == 4 else ()
            a, b = operands(batch, m, n, k, layout, number, dtype)
            configs, failed = forced_products.check_integers("anywhere", a, b)
            ran |= configs
            wrong += failed
    assert wrong == []
    kernels = [k for k in library.catalog()["kernels"] if k["kind"] == "anywhere"]
    names = {k["name"].split("_", 3)[3] for k in kernels if f"_{short}_" in k["name"]}
    splits = ("", *(f" {count} splits" for count in range(2, 9)))
    every = {f"anywhere {name}{text}" for name in names for text in splits if "_" not in name}
    in_memory = {name for name in ran if name.endswith(" splits in memory")}
    assert len(in_memory) >= 3
    assert {name.split()[1] for name in in_memory} == {"64x64"}
    assert ran - in_memory == every | {f"anywhere {n.replace('_', ' ')}" for n in names if "_" in n}


@pytest.mark.parametrize("short", DTYPES)
def test_results_that_begin_anywhere(short: str) -> None:
    """Nothing beside an output is written, whatever address its rows begin at."""
    dtype = DTYPES[short]
    with torch.no_grad(), measure.watching():
        for number, (m, n, k) in enumerate(SHAPES):
            if k > 64:
                continue
            a, b = operands((), m, n, k, "nt", number, dtype)
            memory = torch.full((m * n + 40,), 77.0, device="cuda", dtype=dtype)
            begin = 16 + number % 9
            out = memory[begin : begin + m * n].view(m, n)
            exact = (a.double() @ b.double()).to(dtype)
            for config in offered(a, b):
                library.force_config(config)
                torch.ops.cubin._matmul.out(a, b, out=out.fill_(torch.nan))
                assert torch.equal(out, exact), (m, n, k, config)
                assert (memory[:begin] == 77).all()
                assert (memory[begin + m * n :] == 77).all()


@pytest.mark.parametrize("short", DTYPES)
def test_random_numbers(short: str) -> None:
    dtype = DTYPES[short]
    k = 61 if short == "tf32" else 1061
    a = torch.randn(1003, k, device="cuda").to(dtype)
    b = torch.randn(777, k, device="cuda").to(dtype).mT
    # Of operands whose rows are whole vectors: without, PyTorch has no TF32, and is more exact.
    rows = (torch.nn.functional.pad(x, (0, -k % 8, 0, -len(x) % 8)) for x in (a, b.mT))
    own = torch.matmul(next(rows), next(rows).mT)[: len(a), : b.shape[1]]
    forced_products.check_random_numbers("anywhere", a, b, own)


def test_a_product_with_its_transpose_is_symmetric() -> None:
    """Bit for bit, as those of symmetric kernels."""
    for layout in ("nt", "tn"):
        for dtype in DTYPES.values():
            x = torch.randn(2, 391, 47, device="cuda").to(dtype)
            x = x if layout == "nt" else x.mT.contiguous().mT
            with torch.no_grad(), measure.watching():
                configs = offered(x.clone(), x.mT)
                for config in configs:
                    library.force_config(config)
                    out = torch.ops.cubin.matmul(x, x.mT)
                    assert torch.equal(out, out.mT), (layout, dtype, config)
            assert configs


@pytest.mark.parametrize("short", DTYPES)
@pytest.mark.parametrize("backend", ["anywhere", "unaligned", "sm90 64x64 read"])
def test_a_product_with_its_transpose_is_exact(backend: str, short: str) -> None:
    """Blocks at the diagonal read rows once: not where B is but a part of A, or other rows; and an
    operand that ends with a whole vector is read to there."""
    dtype = DTYPES[short]
    wrong, ran = [], set()
    sizes = [(28, 240), (40, 222), (64, 47), (118, 64), (33, 130), (74, 530), (97, 1030), (263, 64)]
    with torch.no_grad(), measure.watching():
        for number, (m, k) in enumerate(sizes * 2):
            batch = (3,) if number % 3 == 2 else ()
            gap, offset = (0, 0) if number < len(sizes) else (number % 4, number % 9)
            along_k = among_nan((*batch, m, k), gap, offset, dtype)
            along_m = among_nan((*batch, k, m), gap, offset, dtype).mT
            memory = torch.randint(-3, 4, (m * k + 64,), device="cuda").to(dtype)
            closer = [memory.as_strided((m, k), (pitch, 1), offset) for pitch in (k, k - k % 8)]
            pairs = [(x, x.mT) for x in (along_k, along_m)]
            pairs += [(x[..., : m // 2, :], x.mT) for x in (along_k, along_m)]
            pairs += [(x, x[..., : m // 2, :].mT) for x in (along_k, along_m)]
            for a, b in [*pairs, (closer[0], closer[1].mT)]:
                configs, failed = forced_products.check_integers(backend, a, b)
                ran |= configs
                wrong += failed
    assert wrong == []
    assert ran or (backend.endswith("read") and short == "tf32")


def test_where_bits_may_not_depend_on_rows_kernels_have_those_of_a_copy() -> None:
    """Under batch_invariant() the kernels here that add K in one chain, and those of sm90.cu
    and unaligned.cu that do; not those whose warpgroups or blocks divide K."""
    ran, wrong = set(), []
    for n, k, layout in ((130, 33, "nt"), (257, 127, "nn"), (70, 600, "nt"), (300, 65, "tn")):
        for dtype in (torch.bfloat16, torch.float16):
            b = torch.randn((n, k) if layout[1] == "t" else (k, n), device="cuda").to(dtype)
            b = b.mT if layout[1] == "t" else b
            x = torch.randn(400, k, device="cuda").to(dtype)
            with torch.no_grad(), torch_cubin.batch_invariant(), measure.watching():
                library.force_config("pad ab")
                whole = torch.ops.cubin.matmul(x, b)
                for rows in (1, 65, 399):
                    a = x[:rows] if layout[0] == "n" else x[:rows].t().contiguous().t()
                    library.force_config("")
                    for config in forced_products.offered("", a, b):
                        library.force_config(config)
                        ran.add(config)
                        if not torch.equal(torch.ops.cubin.matmul(a, b), whole[:rows]):
                            wrong.append(f"{rows} x {n} x {k} {layout} {dtype} {config}")
    assert wrong == []
    assert "sm90 64x64 read" in ran
    assert {name for name in ran if name.startswith("anywhere")} == {
        "anywhere 64x128", "anywhere 128x128 short"
    }  # fmt: skip
    assert "unaligned 32x64 in order" in ran
