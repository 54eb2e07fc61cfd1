"""torch_cubin.tune: every way that a product can be run is exact, and tables do what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gpu import cases

import torch_cubin
from torch_cubin._native import library
from torch_cubin._tuning import measure
from torch_cubin._tuning.products import Product

pytestmark = pytest.mark.usefixtures("nan_memory")

# Tails in every dim, few rows, long K, rows that begin between lines of the cache, batches.
SHAPES = [
    *((256, 384, 512), (300, 1000, 520), (1031, 520, 2049), (64, 1096, 2048), (8, 5000, 1024)),
    *((1, 777, 4096), (4, 1025, 129), (129, 257, 264), (520, 24, 1000), (2100, 2200, 328)),
]


def access(x: torch.Tensor) -> str:
    """How an operand [own dim, k] lies in memory, as tuned tables say it."""
    along_k = x.stride(1) == 1
    step = x.stride(0) if along_k else x.stride(1)
    step *= x.element_size() * (x.shape[0] > 1 or not along_k)  # a single row has none
    rows = "elements"
    for name, size in (("vectors", 16), ("lines", 128)):
        if x.data_ptr() % size == 0 and step % size == 0:
            rows = name
    return f"{'k' if along_k else 'own'}_{rows}"


def ways_of(a: torch.Tensor, b: torch.Tensor) -> list[str]:
    """Of the product itself: what follows a copy of its operands is planned, too."""
    with measure.watching():
        torch.ops.cubin.matmul(a, b)
        plans = library.watched_plans()
    kinds = (access(a), access(b.mT))
    (plan,) = [p for p in plans if (p["product"]["a"], p["product"]["b"]) == kinds]
    return [way["name"] for way in plan["ways"]]


@pytest.mark.parametrize("mode", ["float16", "bfloat16", "tf32", "float32"])
def test_every_way_is_exact_on_small_integers(mode: str, generator: torch.Generator) -> None:
    wrong, count = [], 0
    orders = [((0, 1), (1, 0)), ((0, 1), (0, 1)), ((1, 0), (0, 1)), ((1, 0), (1, 0))]
    with cases.math_mode(mode) as dtype:
        for m, n, k in SHAPES:
            for a_order, b_order in orders[: 4 if mode == "bfloat16" else 2]:
                a = cases.place(
                    cases.draw((m, k), dtype, True, generator), cases.Layout(order=a_order)
                )
                b = cases.place(
                    cases.draw((k, n), dtype, True, generator), cases.Layout(order=b_order)
                )
                expected = (a.double() @ b.double()).to(dtype)
                names = ways_of(a, b)
                with measure.watching():
                    for name in names:
                        library.force_way(name)
                        cases.poison(m * n, dtype)
                        out = torch.ops.cubin.matmul(a, b)
                        count += 1
                        if not torch.equal(out, expected):
                            wrong.append(f"{mode} {(m, n, k)} {a_order} {b_order} {name}")
    assert wrong == []
    assert count > 3 * len(SHAPES)


def test_tune_measures_what_a_callable_multiplies(tmp_path: Path) -> None:
    a = torch.randn(96, 1024, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16)
    tuning = torch_cubin.tune(lambda: torch.ops.cubin.linear(a, w))
    assert [str(t.product) for t in tuning.times] == ["96x512x1024 nt bfloat16"]
    assert "96x512x1024" in str(tuning)
    tuning.save(tmp_path / "tuned.json")
    assert torch_cubin.load_tuned(tmp_path / "tuned.json") == len(tuning.table["products"])


def test_a_table_decides(tmp_path: Path) -> None:
    """Every way that is named in a table is taken from then on, whatever the model says."""
    a = torch.randn(200, 1032, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(1032, 640, device="cuda", dtype=torch.bfloat16)
    product = Product.of_layout(200, 640, 1032, "nn", "bfloat16")
    for name in ways_of(a, b)[:5]:
        library.add_tuned_table(
            {
                "version": 1,
                "gpu": torch.cuda.get_device_name(),
                "products": [{**product.line(), "way": name}],
            }
        )
        with measure.watching():
            out = torch.ops.cubin.matmul(a, b)
            (plan,) = [p for p in library.watched_plans() if p["product"] == product.line()]
        assert plan["chosen"] == plan["tuned"] == name
        torch.testing.assert_close(out, a @ b, rtol=0.05, atol=1)


def test_a_table_of_another_gpu_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps({"version": 1, "gpu": "NVIDIA Z999", "products": []}))
    with pytest.raises(torch_cubin.Error, match=r"\[input\].*measured on a GPU.*NVIDIA Z999"):
        torch_cubin.load_tuned(path)


def test_tune_of_shapes() -> None:
    tuning = torch_cubin.tune([(16, 256, 512), (64, 64, 64)], layout="nn", dtype=torch.float16)
    assert len(tuning.times) == 2
    for times in tuning.times:
        assert times.best() in times.rounds
        assert times.chosen in times.rounds
