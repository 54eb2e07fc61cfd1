"""Tuned tables on the stand-in driver: which calls read them, their effect, and refused tables."""

from __future__ import annotations

import re

import pytest
import torch
from fake_driver import tensors
from faults import catalogs
from faults.forked import error_of, forked

import torch_cubin
from torch_cubin._native import library
from torch_cubin._tuning import measure
from torch_cubin._tuning.products import Product

GPU = "Fake GPU"
PRODUCT = Product.of_layout(256, 512, 1024, "nt", "bfloat16")


@pytest.fixture
def catalog(driver, tmp_path, monkeypatch) -> None:
    catalogs.install(driver, tmp_path, monkeypatch, catalogs.kernels_of("matmul"))


def table_of(config: str, gpu: str = GPU) -> dict:
    return {"version": 1, "gpu": gpu, "products": [{**PRODUCT.line(), "way": config}]}


def multiply(m: int = 256, dtype: torch.dtype = torch.bfloat16) -> None:
    a = tensors.empty(m, 1024, dtype=dtype)
    torch.ops.cubin._matmul(a, tensors.strided((1024, 512), (1, 1024), dtype))


def watched(m: int = 256, dtype: torch.dtype = torch.bfloat16) -> dict:
    with measure.watching():
        multiply(m, dtype)
        return library.watched_plans()[0]


def test_every_config_can_be_forced_and_has_one_name(driver, catalog) -> None:
    def run() -> list:
        names = [config["name"] for config in watched()["configs"]]
        taken = []
        with measure.watching():
            for name in names:
                library.force_config(name)
                multiply()
                taken.append(library.watched_plans()[0]["chosen"])
        return [names, taken]

    names, taken = forked(run)
    assert len(names) > 20
    assert len(set(names)) == len(names)
    assert taken == names


def test_the_product_of_splits_runs_the_config_behind_the_slash_or_raises(driver, catalog) -> None:
    """A sweep of splits would otherwise time the planner's own choice under another name."""

    def run() -> list:
        a = tensors.empty(64, 16384, dtype=torch.bfloat16)
        b = tensors.strided((16384, 64), (1, 16384), torch.bfloat16)

        def forced(name: str) -> str:
            library.force_config(name)
            torch.ops.cubin._matmul(a, b)
            return next(e["kernel"] for e in driver.launches()[-2:] if "sm90" in e["kernel"])

        with measure.watching():
            kernels = [forced(f"split/sm90 64x{n} 4 splits") for n in (64, 128)]
            wrong = error_of(lambda: forced("split/sm90 64x7 4 splits"))
        return [kernels, wrong]

    kernels, (_, text) = forked(run)
    assert kernels == [f"sm90_matmul_bf16_nt_64x{n}" for n in (64, 128)]
    assert text.startswith("torch_cubin [input]: the forced config 'split/sm90 64x7 4 splits'")


def test_a_config_that_would_be_ignored_is_an_error(driver, catalog) -> None:
    """Scripts timed the planner's choice under other configs' names: nothing watched the plans."""

    def run() -> list:
        library.force_config("")
        return error_of(lambda: library.force_config("sm90 64x64"))

    _, text = forked(run)
    assert text.startswith("torch_cubin [input]: the forced config 'sm90 64x64' would not be used")


def test_a_config_is_forced_with_every_epilogue(driver, catalog) -> None:
    """No table names those configs; tests and sweeps do."""

    def run() -> list:
        x, weight = (tensors.empty(rows, 1024, dtype=torch.bfloat16) for rows in (256, 512))
        turned = tensors.strided((1024, 512), (1, 1024), torch.bfloat16)
        bias = tensors.empty(512, dtype=torch.bfloat16)
        kernels = []
        with measure.watching():
            for config in ("sm90 64x64", "sm90 128x128 share_a", "sm90 128x64 split_k"):
                library.force_config(config)
                torch.ops.cubin._linear_activation(x, weight, bias, "gelu")
                torch.ops.cubin._addmm(bias, x, turned, beta=0.5, alpha=2)
                kernels += [each["kernel"] for each in driver.launches()[-2:]]
            assert library.watched_plans() == []
        return kernels

    tiles = ("64x64", "128x128", "128x64")
    assert forked(run) == [f"sm90_matmul_bf16_nt_{tile}" for tile in tiles for _ in range(2)]


def test_a_table_decides_for_its_products(driver, catalog) -> None:
    def run() -> list:
        plan = watched()
        predicted, names = plan["chosen"], [config["name"] for config in plan["configs"]]
        other = next(n for n in names if n != predicted and n.startswith("sm90 ") and "x64" in n)
        library.add_tuned_table(table_of(other))
        chosen = [watched()["chosen"], watched(dtype=torch.float16)["chosen"]]
        chosen.append(watched(255)["chosen"])
        # A config that this library, or this case, does not have is none.
        library.add_tuned_table(table_of("sm90 7x7"))
        return [predicted, other, *chosen, watched()["chosen"]]

    predicted, other, same, float16, other_shape, unknown = forked(run)
    assert same == float16 == other
    assert other_shape != other
    assert unknown == predicted


def test_a_table_that_is_added_replaces_what_was_planned(driver, catalog) -> None:
    def run() -> list:
        multiply()  # planned and remembered
        before = watched()
        other = next(
            w["name"]
            for w in before["configs"]
            if w["name"] != before["chosen"] and w["name"].startswith("sm90 ")
        )
        first = driver.launches()[-1]["kernel"]
        library.add_tuned_table(table_of(other))
        multiply()
        return [
            before["chosen"],
            first,
            other,
            driver.launches()[-1]["kernel"],
            watched()["chosen"],
        ]

    predicted, first, other, second, chosen = forked(run)
    assert chosen == other != predicted
    tile = other.split(" ")[1]
    assert second == f"sm90_matmul_bf16_nt_{tile}"
    assert first.startswith("sm90_matmul_bf16_nt_")


def test_batch_invariant_products_ask_no_table(driver, catalog) -> None:
    def run() -> list:
        with torch_cubin.batch_invariant():
            multiply()
            kernels = [driver.launches()[-1]["kernel"]]
            for config in ("sm90 64x64", "sm90 128x256", "sm90 128x64"):
                library.add_tuned_table(table_of(config))
                multiply()
                kernels.append(driver.launches()[-1]["kernel"])
            return kernels

    assert len(set(forked(run))) == 1


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (table_of("sm90 64x64", gpu="H999"), "does not have: expected Fake GPU, got H999"),
        ({"version": 2, "gpu": GPU, "products": []}, "cannot be used.*version 2"),
        ({"version": 1, "products": []}, "cannot be used.*gpu"),
        ({"version": 1, "gpu": GPU, "products": [{"m": 1}]}, 'the line {"m":1}'),
        (
            {"version": 1, "gpu": GPU, "products": [{**PRODUCT.line(), "a": "x", "way": ""}]},
            "'x' is not known",
        ),
    ],
)
def test_a_wrong_table_is_refused_and_changes_nothing(driver, catalog, table, message) -> None:
    def run() -> list:
        before = watched()["chosen"]
        error = error_of(lambda: library.add_tuned_table(table))
        return [error, before, watched()["chosen"]]

    (_, text), before, after = forked(run)
    assert text.startswith("torch_cubin [input]: a tuned table")
    assert re.search(message, text), text
    assert before == after
