"""torch_cubin.tune: every config of a product is exact, and tables do what they say."""

from __future__ import annotations

import json
from pathlib import Path

import numerics
import pytest
import torch
from gpu import cases, hopper

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


def configs_of(a: torch.Tensor, b: torch.Tensor) -> list[str]:
    """Of the product itself: what follows a copy of its operands is planned, too."""
    with measure.watching():
        torch.ops.cubin.matmul(a, b)
        plans = library.watched_plans()
    kinds = (access(a), access(b.mT))
    (plan,) = [p for p in plans if (p["product"]["a"], p["product"]["b"]) == kinds]
    return [config["name"] for config in plan["configs"]]


def copies(plan: dict) -> int:
    """How many of its configs copy operands: the product has more than what follows a copy."""
    return sum(config["name"].startswith("pad") for config in plan["configs"])


@pytest.mark.parametrize("mode", ["float16", "bfloat16", "tf32", "float32", "float64"])
def test_every_config_is_exact_on_small_integers(mode: str, generator: torch.Generator) -> None:
    wrong, count = [], 0
    orders = [((0, 1), (1, 0)), ((0, 1), (0, 1)), ((1, 0), (0, 1)), ((1, 0), (1, 0))]
    with cases.math_mode(mode) as dtype:
        for m, n, k in SHAPES:
            # float64 has few kernels: few configs of each product.
            for a_order, b_order in orders[: 4 if mode in ("bfloat16", "tf32", "float64") else 2]:
                a = cases.place(
                    cases.draw((m, k), dtype, True, generator), cases.Layout(order=a_order)
                )
                b = cases.place(
                    cases.draw((k, n), dtype, True, generator), cases.Layout(order=b_order)
                )
                expected = (a.double() @ b.double()).to(dtype)
                names = configs_of(a, b)
                with measure.watching():
                    for name in names:
                        library.force_config(name)
                        cases.poison(m * n, dtype)
                        out = torch.ops.cubin.matmul(a, b)
                        count += 1
                        if not torch.equal(out, expected):
                            wrong.append(f"{mode} {(m, n, k)} {a_order} {b_order} {name}")
    assert wrong == []
    assert count > 3 * len(SHAPES)


# Every remainder of 8, K that ends within a vector of 16 bytes or is shorter than one,
# sizes below and above a tile, and K long enough to be split.
ANYWHERE = [
    *((64, 64, 63), (97, 156, 66), (130, 70, 33), (1, 129, 129), (65, 3, 200), (257, 200, 5)),
    *(
        (300, 333, 777),
        (129, 127, 1),
        (201, 517, 132),
        (70, 140, 2053),
        (300, 1000, 5201),
        (520, 1000, 1301),
    ),
]


@pytest.mark.parametrize("layout", ["nt", "nn"])
@pytest.mark.parametrize("offsets", [(0, 0), (1, 3), (7, 2), (5, 0), (0, 6)])
def test_every_config_with_rows_that_begin_anywhere(
    layout: str, offsets: tuple[int, int], generator: torch.Generator
) -> None:
    """Aligned operands beside unaligned ones; what lies around them in memory is NaN."""
    wrong, seen = [], set()
    dtype = torch.bfloat16
    for m, n, k in ANYWHERE:
        for pad in (0, 1, 8 - k % 8):
            a = cases.place(
                cases.draw((m, k), dtype, True, generator),
                cases.Layout(offset=offsets[0], pad=pad),
            )
            order = (1, 0) if layout == "nt" else (0, 1)
            b = cases.place(
                cases.draw((k, n), dtype, True, generator),
                cases.Layout(order=order, offset=offsets[1], pad=pad),
            )
            bias = cases.draw((n,), dtype, True, generator)
            product = a.double() @ b.double()
            with measure.watching():
                torch.ops.cubin.matmul(a, b)
                plans = library.watched_plans()
                # Those of the product, and of what follows a copy of its operands.
                for name in sorted(
                    {config["name"] for plan in plans for config in plan["configs"]}
                ):
                    library.force_config(name)
                    cases.poison(m * n, dtype)
                    if not torch.equal(torch.ops.cubin.matmul(a, b), product.to(dtype)):
                        wrong.append(f"{(m, n, k)} {layout} {offsets} {pad} {name}")
                    taken = library.watched_plans()
                    own = max(taken, key=copies)["chosen"]
                    # What follows a copy runs where the copy was chosen.
                    seen |= {p["chosen"] for p in taken} if own.startswith("pad") else {own}
                    with_bias = torch.ops.cubin.linear(a, b.mT, bias)
                    if not torch.equal(with_bias, (product + bias.double()).to(dtype)):
                        wrong.append(f"{(m, n, k)} {layout} {offsets} {pad} {name}, bias")
    assert wrong == []
    if torch.cuda.get_device_capability()[0] == 9:
        assert {"split", "pad ab", "sm90 64x64 read"} <= seen
        # Which tile is chosen after a copy is the prices' choice.
        assert any(name.startswith("sm90 ") and not name.endswith(" read") for name in seen)


@hopper.for_kernels
def test_split_sums_replay_in_a_graph(generator: torch.Generator) -> None:
    """K in parts, whose sums a second kernel adds: the same bits in eager calls and replays."""
    a = cases.draw((136, 8008), torch.bfloat16, False, generator)
    b = cases.draw((200, 8008), torch.bfloat16, False, generator).mT
    with measure.watching():
        library.force_config("split")
        graph = torch.cuda.CUDAGraph()
        torch.ops.cubin.matmul(a, b)
        assert "split" in {plan["chosen"] for plan in library.watched_plans()}
        with torch.cuda.graph(graph):
            out = torch.ops.cubin.matmul(a, b)
        for _ in range(20):
            a.normal_(generator=generator)
            graph.replay()
            assert torch.equal(out, torch.ops.cubin.matmul(a, b))
    numerics.check_close(out, a @ b, a.double() @ b.double(), "split")


def test_tune_measures_what_a_callable_multiplies(tmp_path: Path) -> None:
    a = torch.randn(96, 1024, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16)
    tuning = torch_cubin.tune(lambda: torch.ops.cubin.linear(a, w))
    assert [str(t.product) for t in tuning.times] == ["96x512x1024 nt bfloat16"]
    assert "96x512x1024" in str(tuning)
    tuning.save(tmp_path / "tuned.json")
    assert torch_cubin.load_tuned(tmp_path / "tuned.json") == len(tuning.table["products"])


def test_a_table_overrides_the_cost_model(tmp_path: Path) -> None:
    """Every config that a table names is used from then on, regardless of the model."""
    a = torch.randn(200, 1032, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(1032, 640, device="cuda", dtype=torch.bfloat16)
    product = Product.of_layout(200, 640, 1032, "nn", "bfloat16")
    for name in configs_of(a, b)[:5]:
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
