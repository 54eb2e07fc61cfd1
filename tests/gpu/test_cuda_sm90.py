"""Every kernel of csrc/kernels/matmul/sm90.cu and sm90_ping_pong.cu, not only those that are
chosen: a child process for each tile, whose catalog holds nothing else. And thousands of runs of
what exchanges sums."""

import json
import random
from pathlib import Path

import numerics
import pytest
import torch
from gpu import cases, hopper
from gpu.repeats import count_different

import torch_cubin
from torch_cubin._native import library
from torch_cubin._tuning import measure

LAUNCH = Path(__file__).resolve().parents[1] / "data" / "launch.sm_90a.cuda130.cubin"
MANIFEST = Path(torch_cubin.__file__).resolve().parent / "cubins" / "manifest.json"


KINDS = ("sm90", "sm90_ping_pong")


def tiles() -> list[tuple[str, str]]:
    """("sm90", "128x256"), ...: the kinds and tiles of the package's kernels."""
    kernels = json.loads(MANIFEST.read_text())["kernels"] if MANIFEST.is_file() else []
    kernels = [k for k in kernels if k["family"] == "matmul" and k["kind"] in KINDS]
    found = {(k["kind"], *k["tile"][:2]) for k in kernels}
    return [(kind, f"{m}x{n}") for kind, m, n in sorted(found)]


@hopper.for_kernels
@pytest.mark.parametrize(
    ("kind", "name"),
    [pytest.param(*tile, marks=pytest.mark.child("tile", *tile)) for tile in tiles()],
)
def test_every_kernel_of_a_tile(kind: str, name: str, child) -> None:
    answer = child.check()
    assert answer["wrong"] == []
    assert answer["unused"] == []
    assert answer["kernels"] > 0
    assert answer["calls"] > 30 * answer["kernels"]


def test_the_package_has_the_sm90_kernels() -> None:
    """The package that was built for Hopper has the kernels."""
    if torch.cuda.get_device_capability()[0] == 9:
        assert len(tiles()) >= 10


def configs_of(a: torch.Tensor, b: torch.Tensor, text: str) -> list[str]:
    """The configs of a product whose names end so, the quickest by the model first."""
    with measure.watching():
        torch.ops.cubin.matmul(a, b)
        plans = library.watched_plans()
    configs = sorted((w["microseconds"], w["name"]) for plan in plans for w in plan["configs"])
    return [name for _, name in configs if name.endswith(text)]


# How blocks split K: over clusters, joined through memory; over a cluster's two, four or eight
# blocks; over blocks whose sums a second kernel adds. And operands that four blocks share.
RACY = {
    " streamed": (3080, 4616, 264),
    " split_k": (200, 264, 4104),
    " four_k": (200, 264, 4104),
    " eight_k": (200, 112, 1832),
    "split": (136, 200, 8008),
    " share_both": (1032, 1544, 1032),
}


@hopper.for_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape", [(960, 576, 1032), (896, 904, 520), (72, 1000, 776), (8, 200, 264)]
)
def test_boxes_outside_that_are_not_loaded_reach_no_result(shape, dtype, generator) -> None:
    """Weight gradients multiply what shared memory held before, here NaN, for rows and columns that
    do not exist (sm90_edge.cuh)."""
    m, n, k = shape
    a = cases.draw((k, m), dtype, True, generator).mT
    b = cases.draw((k, n), dtype, True, generator)
    expected = (a.double() @ b.double()).to(dtype)
    nan_a, nan_b = torch.full_like(a, torch.nan), torch.full_like(b, torch.nan)
    names = [name for name in configs_of(a, b, "") if name.startswith("sm90 ")]
    wrong = []
    with torch.no_grad(), measure.watching():
        for name in names:
            library.force_config(name)
            torch.ops.cubin.matmul(nan_a, nan_b)
            if not torch.equal(torch.ops.cubin.matmul(a, b), expected):
                wrong.append(name)
    assert len(names) > 30
    assert wrong == []


# Of one warpgroup, two and three: blocks with one tile start early.
EARLY = ["64x32", "64x64", "64x64 four_k", "64x96", "64x128", "64x192"]
EARLY += ["128x64", "128x128 split_k", "192x160", "192x192"]
# Those of one wave whose last tiles begin sooner, so that no row or column of theirs is outside.
OVERLAPPING = [*EARLY, "64x64 share_both", "64x128 share_both", "128x64 share_a", "128x128"]


def check_chain(config: str, x: torch.Tensor, generator: torch.Generator) -> None:
    """Each product takes rows of the one before, in another order, and its own operand was written
    just before: columns of x in a linear layer, or rows in a weight gradient if there are more."""
    rows, columns = x.shape
    long = max(rows, columns)
    with torch.no_grad(), measure.watching():
        library.force_config(f"sm90 {config}")
        for _ in range(20):
            expected = got = x
            for _ in range(6):
                order = torch.randperm(long, device="cuda", generator=generator)
                selection = torch.nn.functional.one_hot(order, long).to(torch.bfloat16)
                if rows < columns:
                    expected = expected[:, order]
                    got = torch.ops.cubin.linear(got, selection)
                else:
                    expected = expected[order.argsort()]
                    got = torch.ops.cubin.matmul(selection.mT, got)
            assert torch.equal(got, expected)
        assert f"sm90 {config}" in {plan["chosen"] for plan in library.watched_plans()}


@hopper.for_kernels
@pytest.mark.parametrize("config", OVERLAPPING)
def test_a_chain_of_few_tiles_reads_what_the_kernel_before_wrote(config: str, generator) -> None:
    """Blocks that start early load nothing too soon; last tiles begin sooner than others would, so
    that two store the same results."""
    check_chain(config, cases.draw((72, 776), torch.bfloat16, True, generator), generator)


@hopper.for_kernels
@pytest.mark.parametrize("config", ["64x64", "64x64 four_k", "64x128"])
def test_a_chain_of_few_tiles_of_weight_gradients(config: str, generator) -> None:
    """The same of A^T B, whose boxes lie along M and N."""
    check_chain(config, cases.draw((776, 72), torch.bfloat16, True, generator), generator)


@hopper.for_kernels
@pytest.mark.parametrize("config", OVERLAPPING)
def test_sums_in_place_of_tiles_partly_outside(config: str, generator: torch.Generator) -> None:
    """What a tile adds to no other one has stored to."""
    a = cases.draw((200, 1032), torch.bfloat16, True, generator)
    b = cases.draw((136, 1032), torch.bfloat16, True, generator).mT
    c = cases.draw((200, 136), torch.bfloat16, True, generator)
    expected = (c.double() - a.double() @ b.double()).to(c.dtype)
    with torch.no_grad(), torch_cubin.drop_in(), measure.watching():
        c.clone().addmm_(a, b, alpha=-1)
        offered = {each["name"] for plan in library.watched_plans() for each in plan["configs"]}
        if f"sm90 {config}" not in offered:
            pytest.skip("not offered where sums are added to")
        library.force_config(f"sm90 {config}")
        for _ in range(50):
            assert torch.equal(c.clone().addmm_(a, b, alpha=-1), expected)
        assert f"sm90 {config}" in {plan["chosen"] for plan in library.watched_plans()}


@hopper.for_kernels
@pytest.mark.parametrize(
    ("config", "shape"), [(" four_k", (72, 544, 4016)), (" eight_k", (200, 112, 1832))]
)
def test_parts_of_k_are_added_in_one_order_beside_the_end(config, shape, generator) -> None:
    """Where the last rows are no whole tile: two tiles that both had some of them would add their
    parts in other orders. Parts cancel out here, so that results are what rounding leaves."""
    m, n, k = shape
    a = cases.draw((m, k), torch.bfloat16, False, generator)
    a[:, k // 2 :] = -a[:, : k // 2]
    b = cases.draw((n, k), torch.bfloat16, False, generator)
    b[:, k // 2 :] = b[:, : k // 2]
    forced = configs_of(a, b.mT, config)[0]
    with torch.no_grad(), measure.watching():
        library.force_config(forced)
        first = torch.ops.cubin.matmul(a, b.mT)
        assert forced in {plan["chosen"] for plan in library.watched_plans()}
        assert first.count_nonzero() > 0.1 * first.numel()
        assert count_different(lambda: [torch.ops.cubin.matmul(a, b.mT)], [first]) == 0


@hopper.for_kernels
@pytest.mark.parametrize("config", RACY)
def test_ten_thousand_repeats_beside_other_work(config: str, generator: torch.Generator) -> None:
    m, n, k = RACY[config]
    a = cases.draw((m, k), torch.bfloat16, False, generator)
    b = cases.draw((n, k), torch.bfloat16, False, generator).mT
    if config == " streamed":  # weight gradients alone are
        a, b = a.mT.contiguous().mT, b.contiguous()
    forced = configs_of(a, b, config)[0]
    with torch.no_grad(), measure.watching():
        library.force_config(forced)
        first = torch.ops.cubin.matmul(a, b)
        assert forced in {plan["chosen"] for plan in library.watched_plans()}
        assert count_different(lambda: [torch.ops.cubin.matmul(a, b)], [first]) == 0
    numerics.check_close(first, a @ b, numerics.reference_matmul(a, b), forced)


@hopper.for_kernels
def test_streamed_tiles_while_other_kernels_hold_multiprocessors(
    generator: torch.Generator,
) -> None:
    """The block that finishes a tile waits for parts of blocks that may not run yet: two products
    at a time, whose blocks get multiprocessors as others leave them, come to their end and are
    right. (The wait is bounded: after it, whichever block comes last finishes the tile.)"""
    a = cases.draw((264, 3080), torch.bfloat16, True, generator).mT
    b = cases.draw((264, 4616), torch.bfloat16, True, generator)
    expected = (a.double() @ b.double()).bfloat16()
    hold = torch_cubin.load(LAUNCH)["wait_and_write"]
    written = torch.zeros(1, dtype=torch.int32, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(3)]
    names = configs_of(a, b, " streamed")
    names = names[:: max(1, len(names) // 6)]
    r = random.Random(0)
    wrong = []
    torch.cuda.synchronize()
    with torch.no_grad(), measure.watching():
        for name in names * 8:
            library.force_config(name)
            # One block a multiprocessor, some of them for longer than a finisher waits.
            for blocks, cycles in ((r.choice((20, 66, 100)), 30_000_000), (131, 1_000_000)):
                hold(
                    *(cycles, written, 1), grid=blocks, block=32, shared_memory=200_000,
                    stream=streams[0],
                )  # fmt: skip
            outs = []
            for stream in streams[1:]:
                with torch.cuda.stream(stream):
                    outs += [torch.ops.cubin.matmul(a, b) for _ in range(3)]
            torch.cuda.synchronize()
            wrong += [name for out in outs if not torch.equal(out, expected)]
    assert len(names) >= 4
    assert wrong == []
