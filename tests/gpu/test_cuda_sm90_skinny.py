"""The kernels of csrc/kernels/matmul/sm90_skinny.cu: at most 64 rows of A, or columns of B.

The products here are large enough that the plan takes these kernels. Which of them is the quickest
depends on the GPU's memory: where every kernel must run, it is forced.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

import numerics
import pytest
import torch
from gpu import cases
from gpu.profiled import kernels_that_run
from gpu.repeats import count_different

import torch_cubin
from torch_cubin._native import library
from torch_cubin._tuning import measure

pytestmark = [
    pytest.mark.usefixtures("nan_memory"),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
        reason="wgmma is of compute capability 9.0 alone",
    ),
]

TOKENS = (5, 8, 13, 16, 27, 32, 50, 64)
# Rows of the weights, and K: tails of both; tiles of 64 rows and of more; K whole and split, and of
# the second-last one, whose padded rows are whole lines of the cache, divided evenly.
WEIGHTS = ((2056, 4104), (10504, 2056), (136, 8200), (28656, 520), (72, 64))
LAYOUTS = ("nt", "nn")  # the weights' K is contiguous, or their rows are


def product(tokens: int, rows: int, k: int, dtype: torch.dtype, layout: str, swapped: bool, g):
    """A and B of small integers: the weights are B [k, rows], or, swapped, A [rows, k]."""
    small = cases.place(cases.draw((tokens, k), dtype, True, g), cases.Layout(pad=8))
    weights = cases.draw((rows, k), dtype, True, g)
    order = (0, 1) if layout == "nt" else (1, 0)
    weights = cases.place(weights, cases.Layout(order=order, pad=16))
    return (weights, small.t()) if swapped else (small, weights.t())


def skinny_configs(a: torch.Tensor, b: torch.Tensor, r: random.Random) -> list[str]:
    """Configs with at most 64 of the weights' rows at a time and with more, where there are such,
    each with K whole or in any number of parts, and, where there are such, with K of all tiles
    divided evenly: kernels of the package are for one of them."""
    torch.ops.cubin.matmul(a, b)
    names = {config["name"] for plan in library.watched_plans() for config in plan["configs"]}
    groups: dict[tuple[bool, bool], list[str]] = {}
    for name in sorted(names):
        if name.startswith("sm90_skinny "):
            key = int(name.split()[1]) <= 64, "streamed" in name
            groups.setdefault(key, []).append(name)
    return [r.choice(group) for group in groups.values()]


def test_every_kernel_is_exact_on_small_integers(generator: torch.Generator) -> None:
    wrong = []
    r = random.Random(0)
    with torch.no_grad(), kernels_that_run() as ran:
        for dtype, layout, tokens, (rows, k) in itertools.product(
            (torch.float16, torch.bfloat16), LAYOUTS, TOKENS, WEIGHTS
        ):
            for swapped in (False, True):
                a, b = product(tokens, rows, k, dtype, layout, swapped, generator)
                expected = (a.double() @ b.double()).to(dtype)
                with measure.watching():
                    for config in ("", *skinny_configs(a, b, r)):
                        library.force_config(config)
                        cases.poison(expected.numel(), dtype)
                        if not torch.equal(torch.ops.cubin.matmul(a, b), expected):
                            size = f"{tokens} of {rows}x{k}"
                            wrong.append(f"{dtype} {layout} {size} swapped={swapped} {config}")
    assert wrong == []
    manifest = Path(torch_cubin.__file__).parent / "cubins" / "manifest.json"
    catalog = {
        kernel["name"]
        for kernel in json.loads(manifest.read_text())["kernels"]
        if kernel["kind"] == "sm90_skinny"
    }
    assert catalog - ran == set()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_bias_belongs_to_the_columns(dtype: torch.dtype, generator: torch.Generator) -> None:
    """Columns are the weights' rows, or the tokens where the weights are A."""
    for m, n, k in ((16, 2056, 1096), (2056, 16, 1096), (7, 10504, 520), (10504, 7, 520)):
        a = cases.draw((m, k), dtype, True, generator)
        weight = cases.draw((n, k), dtype, True, generator)
        for bias in (
            cases.draw((n,), dtype, True, generator),
            cases.draw((2 * n,), dtype, True, generator)[::2],
        ):
            expected = (a.double() @ weight.double().t() + bias.double()).to(dtype)
            cases.poison(expected.numel(), dtype)
            out = torch.ops.cubin.linear(a, weight, bias)
            assert torch.equal(out, expected), f"{dtype} {(m, n, k)} {bias.stride()}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_error(layout: str, generator: torch.Generator) -> None:
    judge = numerics.Judge(torch.bfloat16)
    for m, n, k in itertools.product((5, 16, 64), (2048, 4096), (1096, 8192)):
        a = cases.draw((m, k), torch.bfloat16, False, generator)
        b = cases.draw((n, k) if layout == "nt" else (k, n), torch.bfloat16, False, generator)
        b = b.t() if layout == "nt" else b
        out = torch.ops.cubin.matmul(a, b)
        reference = numerics.reference_matmul(a, b)
        judge.add(f"{layout} {(m, n, k)}", out, torch.matmul(a, b), reference)
    judge.finish()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_has_the_same_bits_among_any_number_of_rows(
    layout: str, generator: torch.Generator
) -> None:
    """Inside batch_invariant(); outside, speed decides how K is split."""
    for n, k in ((4096, 4096), (6144, 4096), (10240, 2048)):
        x = cases.draw((64, k), torch.bfloat16, False, generator)
        weight = cases.draw((n, k) if layout == "nt" else (k, n), torch.bfloat16, False, generator)
        b = weight.t() if layout == "nt" else weight
        with torch_cubin.batch_invariant():
            whole = torch.ops.cubin.matmul(x, b)
        for rows in (1, 4, 5, 8, 9, 16, 17, 32, 33, 63):
            with torch_cubin.batch_invariant():
                part = torch.ops.cubin.matmul(x[:rows], b)
            numerics.check_bits(part, whole[:rows], f"{layout} {rows} rows of {(n, k)}")
        with torch_cubin.batch_invariant():
            moved = torch.ops.cubin.matmul(x.roll(7, 0), b)
        numerics.check_bits(moved.roll(-7, 0), whole, f"{layout} rows moved {(n, k)}")


STREAMED = "sm90_skinny 64 rows streamed"
PAIRS = f"{STREAMED} in pairs"


@pytest.fixture
def forced(request: pytest.FixtureRequest) -> Iterator[None]:
    with measure.watching():
        library.force_config(request.param)
        yield
        library.force_config("")


@pytest.mark.parametrize(
    ("forced", "tokens"),
    [("sm90_skinny 64 rows 2 splits", 64), (STREAMED, 32), (PAIRS, 64)],
    indirect=["forced"],
)
def test_ten_thousand_repeats_beside_other_work(
    forced, tokens: int, generator: torch.Generator
) -> None:
    """A cluster's blocks exchange sums, and so do blocks that divide the K of all tiles evenly:
    their order must not show."""
    x = cases.draw((tokens, 4096), torch.bfloat16, False, generator)
    weight = cases.draw((4096, 4352), torch.bfloat16, False, generator)
    with torch.no_grad():
        first = torch.ops.cubin.matmul(x, weight)
        assert count_different(lambda: [torch.ops.cubin.matmul(x, weight)], [first]) == 0


@pytest.mark.parametrize(
    ("forced", "size", "tokens"),
    [("", 1024, 16), (STREAMED, 4352, 16), (PAIRS, 4352, 48)],
    indirect=["forced"],
)
def test_a_chain_reads_what_the_kernel_before_wrote(
    forced, size: int, tokens: int, generator
) -> None:
    """Each product's tokens are the one's before, and its weights were written just before: blocks
    that start early must not load either too soon, nor count parts of tiles among those of the
    kernel before."""
    with torch.no_grad():
        for _ in range(50):
            x = cases.draw((tokens, size), torch.bfloat16, True, generator)
            expected, got = x.double(), x
            for _ in range(6):
                chosen = torch.randint(0, size, (size,), device="cuda", generator=generator)
                selection = torch.nn.functional.one_hot(chosen, size).to(torch.bfloat16)
                b = selection if size > 1024 else selection.t()
                expected = expected @ b.double()
                got = torch.ops.cubin.matmul(got, b)
            assert torch.equal(got.double(), expected)


def test_k_of_all_tiles_divided_evenly_is_exact(generator: torch.Generator) -> None:
    """Tiles of two blocks and of three, one of which has a part in the middle of K; more tiles than
    blocks."""
    wrong = []
    sizes = (
        (64, 4416, 8200), (64, 12288, 1032), (128, 12288, 1032), (64, 28672, 520),
        (128, 28672, 520),
    )  # fmt: skip
    with torch.no_grad(), measure.watching():
        for tokens, (rows, columns, k) in itertools.product((5, 32, 64), sizes):
            if tokens > 32 and rows > 64:
                continue
            a = cases.draw((tokens, k), torch.bfloat16, True, generator)
            b = cases.draw((k, columns), torch.bfloat16, True, generator)
            expected = (a.double() @ b.double()).to(torch.bfloat16)
            library.force_config(PAIRS if tokens > 32 else f"sm90_skinny {rows} rows streamed")
            for _ in range(3):
                cases.poison(expected.numel(), torch.bfloat16)
                if not torch.equal(torch.ops.cubin.matmul(a, b), expected):
                    wrong.append(f"{tokens} x {columns} x {k} by {rows} rows")
            library.force_config("")
    assert wrong == []
