"""Plans of products that are only described: what tools ask, and the order of a plan's sums."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from fake_driver import tensors
from faults import catalogs
from faults.forked import error_of, forked

from torch_cubin._native import library
from torch_cubin._tuning import measure
from torch_cubin._tuning.products import Product

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import plan_changes


@pytest.fixture
def catalog(driver, tmp_path, monkeypatch) -> None:
    catalogs.install(driver, tmp_path, monkeypatch, catalogs.kernels_of("matmul"))


def described(m: int, n: int, k: int, layout: str, dtype: str) -> dict:
    product = Product.of_layout(m, n, k, layout, dtype)
    return {**product.line(), "dtype": product.dtype}


@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
@pytest.mark.parametrize("size", [(256, 512, 1024), (16, 4096, 4096), (100, 1001, 300)])
def test_a_described_product_is_planned_as_the_same_product_of_tensors(
    driver, catalog, layout: str, size: tuple[int, int, int]
) -> None:
    m, n, k = size

    def run() -> list:
        a = tensors.strided((m, k), (k, 1) if layout[0] == "n" else (1, m), torch.bfloat16)
        b = tensors.strided((k, n), (n, 1) if layout[1] == "n" else (1, k), torch.bfloat16)
        with measure.watching():
            torch.ops.cubin._matmul(a, b)
            plans = library.watched_plans()
        (planned,) = library.planned([described(m, n, k, layout, "bfloat16")], configs=True)
        same = [plan for plan in plans if plan["product"]["k"] == k and plan["product"]["m"] == m]
        return [[plan["chosen"] for plan in same], planned]

    chosen, planned = forked(run)
    assert planned["chosen"] in chosen
    times = {config["name"]: config["microseconds"] for config in planned["configs"]}
    assert times[planned["chosen"]] == pytest.approx(planned["microseconds"])


@pytest.mark.parametrize(("columns", "least"), [(80, 1.1), (128, 0.9)])
def test_zeros_beside_few_columns_have_a_price(driver, catalog, columns, least) -> None:
    """A block alone fills all of a box with them, one of eight a part of each box that they share:
    of 80 columns a tile of 128 takes longer alone, of 128 it does not."""

    def run() -> list:
        return library.planned([described(5736, columns, 1024, "nn", "bfloat16")], configs=True)

    (planned,) = forked(run)
    times = {config["name"]: config["microseconds"] for config in planned["configs"]}
    assert least < times["sm90 64x128"] / times["sm90 64x128 eight_b"] < least + 0.15


def test_the_order_of_sums_does_not_depend_on_the_number_of_rows(driver, catalog) -> None:
    """Inside batch_invariant(), whatever the planner prefers: plans with the same sum_order give
    the same bits."""

    def run() -> list:
        products = plan_changes.random_products(3000, seed=3)
        products = [p for p in products if p["batch_invariant"] and p["a"].startswith("k_")]
        orders = []
        for m in (1, 3, 64, 1000, 8192):
            plans = library.planned([{**p, "m": m, "batch": 1} for p in products])
            orders.append([plan["sum_order"] for plan in plans])
        return [products, orders]

    products, orders = forked(run)
    assert len(products) > 300
    changed = [
        f"{product}: {by_rows}"
        for product, *by_rows in zip(products, *orders, strict=True)
        if len(set(by_rows)) > 1
    ]
    assert not changed, changed[:5]


def test_a_malformed_product_is_refused(driver, catalog) -> None:
    def run() -> list:
        good = described(8, 8, 8, "nt", "float16")
        wrong = [{**good, "m": -1}, {**good, "math": "x"}, {**good, "a": 3}, {"m": 1}, 3]
        return [error_of(lambda each=each: library.planned([each])) for each in wrong]

    for kind, text in forked(run):
        assert kind == "InputError"
        assert text.startswith("torch_cubin [input]: a product cannot be planned")


def test_the_plan_is_the_config_of_the_least_predicted_time(driver, catalog) -> None:
    """Rewrites included; inside batch_invariant() the order of sums comes first. Large float32
    takes large tiles: a small one, whose cost counted four of the six blocks that a multiprocessor
    holds, was chosen at half their speed."""

    def run() -> list:
        products = plan_changes.random_products(1500, seed=7)
        products = [p for p in products if not p["batch_invariant"]]
        products += [described(size, size, size, "tn", "float32") for size in (2048, 4096)]
        return [products, library.planned(products, configs=True)]

    products, plans = forked(run)
    assert len(products) > 1000
    assert [plan["chosen"] for plan in plans[-2:]] == ["simt 128x128x8"] * 2
    for product, plan in zip(products, plans, strict=True):
        least = min(plan["configs"], key=lambda config: config["microseconds"])
        assert plan["microseconds"] == pytest.approx(least["microseconds"]), product
        names = [config["name"] for config in plan["configs"]]
        assert plan["chosen"] in names
        assert len(set(names)) == len(names), product


def test_operands_are_swapped_inside_of_batch_invariant_too(driver, catalog) -> None:
    def run() -> list:
        product = described(640, 2560, 16384, "tn", "bfloat16")
        asked = [product, {**product, "batch_invariant": True}]
        return [plan["configs"] for plan in library.planned(asked, configs=True)]

    swapped = [any(" swapped" in c["name"] for c in configs) for configs in forked(run)]
    assert swapped == [True, True]


def test_a_tile_that_only_the_catalog_knows_is_planned(driver, tmp_path, monkeypatch) -> None:
    """docs/architecture.md: no host file lists tiles."""
    kernels = catalogs.kernels_of("matmul")
    like = next(k for k in kernels if k["name"] == "sm90_matmul_bf16_nt_128x192")
    new = {**like, "name": "sm90_matmul_bf16_nt_128x208", "tile": [128, 208, 64]}
    catalogs.install(driver, tmp_path, monkeypatch, [*kernels, new])

    def run() -> list:
        # 16 rows and 8 columns of its tiles are one wave.
        (plan,) = library.planned([described(2048, 1664, 4096, "nt", "bfloat16")], configs=True)
        return plan

    plan = forked(run)
    assert plan["chosen"].startswith("sm90 128x208")


def test_the_products_of_splits_are_planned_on_request(driver, catalog) -> None:
    """As benchmarks/planner_regret.py asks for them: what "split" runs its product on."""

    def run() -> list:
        product = described(384, 384, 16384, "tn", "bfloat16")
        parts = {**product, "split_sums": True, "float_output": True}
        return library.planned([product, parts], configs=True)

    whole, parts = forked(run)
    assert not any(c["name"].endswith(" splits") for c in whole["configs"])
    names = [c["name"] for c in parts["configs"]]
    assert parts["chosen"] in names
    assert all(re.fullmatch(r"sm90 \d+x\d+( \w+)? \d+ splits", name) for name in names)


def test_batch_invariant_splits_are_the_parts_of_k(driver, catalog) -> None:
    """Other splits would add K up in another order than kernels that sum the parts themselves."""

    def run() -> list:
        product = {**described(128, 1536, 8192, "nt", "bfloat16"), "batch_invariant": True}
        parts = {**product, "split_sums": True, "float_output": True}
        return library.planned([product, parts], configs=True)

    whole, parts = forked(run)
    assert "split" in [c["name"] for c in whole["configs"]]
    assert parts["configs"]
    assert all(c["name"].endswith(" 4 splits") for c in parts["configs"])


def test_pairs_that_split_k_are_batch_invariant_where_it_has_two_parts(driver, catalog) -> None:
    parts = {(6144, 8192): 1, (2048, 8192): 2, (1536, 8192): 4}

    def run() -> list:
        sizes = [(m, *weight) for m in (64, 128) for weight in parts]
        asked = [described(*size, "nt", "bfloat16") for size in sizes]
        plans = library.planned([{**p, "batch_invariant": True} for p in asked], configs=True)
        return [
            [size, [c["name"] for c in plan["configs"] if c["name"].startswith("sm90 ")]]
            for size, plan in zip(sizes, plans, strict=True)
        ]

    for (_, *weight), names in forked(run):
        split = {name for name in names if name.endswith("_k")}
        assert all(name.endswith(" split_k") for name in split)
        assert bool(split) == (parts[tuple(weight)] == 2)
        if parts[tuple(weight)] > 1:  # the others add all parts in one block
            assert all(name.endswith(" parts") for name in set(names) - split)


def test_rows_outside_of_a_tile_take_time_inside_of_batch_invariant(driver, catalog) -> None:
    """32 rows of 4096 x 14336 by 64x32 took 50 us, and 64 rows 31 (H200)."""

    def run() -> dict:
        product = {**described(32, 4096, 14336, "nt", "bfloat16"), "batch_invariant": True}
        (plan,) = library.planned([product], configs=True)
        return plan

    plan = forked(run)
    times = {config["name"]: config["microseconds"] for config in plan["configs"]}
    assert plan["chosen"].startswith("sm90_skinny ")
    assert times["sm90 64x32"] > 1.2 * plan["microseconds"]


def test_float32_rings_take_no_row_that_ends_within_a_vector(driver, catalog) -> None:
    """A single row may: cp.async reads a part of its last vector, but memcheck counts all of it.
    Under batch_invariant() there is a ring for any strides."""
    rings = {f"simt {tile}" for tile in ("128x64x16", "64x48x64", "64x32x64", "32x32x64")}
    of_any_strides = "simt 16x32x64"

    def run() -> list:
        row = {"m": 1, "n": 512, "batch": 1, "math": "float32", "dtype": "float32"}
        access = {"a": "k_vectors", "b": "own_vectors"}
        cases = [(k, alike) for k in (1024, 1026) for alike in (False, True)]
        products = [{**row, **access, "k": k, "batch_invariant": alike} for k, alike in cases]
        plans = library.planned(products, configs=True)
        names = [[config["name"] for config in plan["configs"]] for plan in plans]
        return list(zip(cases, names, strict=True))

    for (k, batch_invariant), names in forked(run):
        assert (rings & set(names)) == (rings if k % 4 == 0 else set())
        assert (of_any_strides in names) == (k % 4 == 0 or batch_invariant)
        assert "simt 64x64x8" in names


def test_terms_of_other_values_change_the_predictions(driver, catalog) -> None:
    """As benchmarks/fit_planner.py asks for them."""

    def run() -> list:
        products = [described(256, 512, 1024, "nt", "bfloat16")]
        terms = library.planner_terms()
        (plan,) = library.planned(products, configs=True)
        more = {"launch": terms["launch"] + 5}
        (slower,) = library.planned(products, configs=True, terms=more)
        wrong = [{"launches": 1}, {"launch": "5"}]
        errors = [error_of(lambda e=e: library.planned(products, terms=e)) for e in wrong]
        return [plan, slower, errors]

    plan, slower, errors = forked(run)
    times = {config["name"]: config["microseconds"] for config in plan["configs"]}
    for config in slower["configs"]:
        if config["name"].startswith("sm90 "):
            assert config["microseconds"] == pytest.approx(times[config["name"]] + 5)
    for kind, text in errors:
        assert kind == "InputError"
        assert text.startswith("torch_cubin [input]: a term of the planner is not known")


def test_loads_that_start_early_spare_time(driver, catalog) -> None:
    """A lone tile's do (sm90.cu), but not in clusters, nor by one warpgroup in batches, nor where a
    tile has two blocks of K at most and the output is more than sixteen times as long as wide, nor
    where many blocks read rows that begin within sectors. Those of a block's further tiles do,
    too."""

    def run() -> list:
        one_wave, more = (
            described(512, 512, 512, "nt", "bfloat16"),
            described(2048, 2048, 512, "nt", "bfloat16"),
        )
        short, long, within, at_sectors = (
            described(m, n, k, "nt", "bfloat16")
            for m, n, k in ((272, 1032, 112), (184, 5736, 40), (96, 7472, 216), (96, 7472, 208))
        )
        products = [one_wave, more, short, {**one_wave, "batch": 2}, long, within, at_sectors]
        early = library.planned(products, configs=True)
        late = library.planned(products, configs=True, terms={"early_cycles": 0})
        return [early, late]

    def sooner(early: dict, late: dict) -> set[str]:
        times = {config["name"]: config["microseconds"] for config in late["configs"]}
        names = {c["name"] for c in early["configs"] if c["microseconds"] < times[c["name"]]}
        return {name for name in names if name.startswith("sm90 ")}

    one_wave, more, *others = (sooner(*plans) for plans in zip(*forked(run), strict=True))
    assert {"sm90 64x64", "sm90 64x128"} <= one_wave
    for name in one_wave:
        assert re.fullmatch(r"sm90 \d+x\d+( swapped)?", name), name
    assert {"sm90 64x64", "sm90 128x128 ping_pong", "sm90 128x128 share_a"} <= more
    assert "sm90 128x256" in more  # 128 tiles
    assert "sm90 128x256 share_a" not in more
    lone = ["sm90 64x64", "sm90 64x128", "sm90 64x192", "sm90 64x128", "sm90 64x128"]
    assert [name in names for name, names in zip(lone, others, strict=True)] == [
        *(True, False, False, False, True)
    ]


def test_rows_that_begin_at_sectors_load_sooner_than_those_that_begin_within(driver, catalog):
    def run() -> list:
        products = [described(2048, 2048, k, "nt", "bfloat16") for k in (4096, 4080, 4072)]
        return library.planned(products, configs=True)

    lines, sectors, within = (
        next(c["microseconds"] for c in plan["configs"] if c["name"] == "sm90 64x64")
        for plan in forked(run)
    )
    assert lines < sectors < within


def test_an_activation_costs_less_in_ping_pong_tiles_of_128x128(driver, catalog) -> None:
    """1024 x 6144 x 4096 on an H200: GELU takes 4.2 us more than none by 128x128 in ping-pong, and
    7.3 by 128x192, which was chosen."""

    def run() -> list:
        plain = {**described(1024, 6144, 4096, "nt", "bfloat16"), "bias": True}
        return library.planned([plain, {**plain, "activation": 2}], configs=True)

    plain, gelu = (
        {config["name"]: config["microseconds"] for config in plan["configs"]}
        for plan in forked(run)
    )
    names = "sm90 128x128 ping_pong share_a", "sm90 128x192 share_b"
    ping_pong, others = (gelu[name] - plain[name] for name in names)
    assert 0 < ping_pong < others


def test_plan_changes_finds_nothing_where_nothing_changed(driver, catalog, capsys) -> None:
    def run() -> list:
        products = plan_changes.random_products(200, seed=5)
        plans = [plan_changes.as_recorded(plan) for plan in plan_changes.plans_of(products)]
        same = plan_changes.compare(products, plans, show=3)
        number = next(i for i, p in enumerate(products) if p["batch_invariant"])
        other = [list(plan) for plan in plans]
        other[number] = ["another", 1.0, plans[number][2] + 1]
        return [same, plan_changes.compare(products, other, show=3)]

    assert forked(run) == [0, 1]


def prices_of(driver, **product) -> tuple[str, dict[str, float]]:
    """The choice for a product of 16 bits, both operands along K, and microseconds by config."""
    case = {"batch": 1, "math": "16_bit", "a": "k_vectors", "b": "k_vectors", **product}
    (plan,) = forked(lambda: library.planned([case], configs=True))
    return plan["chosen"], {config["name"]: config["microseconds"] for config in plan["configs"]}


def test_results_that_threads_store_are_priced_by_panels_and_by_pairs_of_tiles(
    driver, catalog
) -> None:
    """H200: 2890 x 2890 x 40 takes 12.5 us by 192x192, 19.7 by 128x192 in ping-pong, of whose three
    tiles of a block one warpgroup stores two; 600 x 2049 x 64 3.7 by 64x192, 4.8 by 128x80."""
    chosen, prices = prices_of(driver, m=2890, n=2890, k=40)
    assert "ping_pong" not in chosen
    assert prices["sm90 128x192 ping_pong"] > 1.1 * prices["sm90 192x192"]
    _, prices = prices_of(driver, m=600, n=2049, k=64)
    assert prices["sm90 128x80"] > prices["sm90 64x192"]
