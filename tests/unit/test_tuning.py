"""Tuning as far as it needs no GPU: operands as a product names them, and a sweep's files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import torch_cubin
from torch_cubin import __main__ as command_line
from torch_cubin._tuning import measure, sweep
from torch_cubin._tuning.products import Operands, Product

WAYS = ("sm90 128x128", "sm90 64x128 share_b")


@pytest.mark.parametrize("layout", ["nt", "nn", "tn", "tt"])
@pytest.mark.parametrize("sizes", [(64, 96, 128), (63, 95, 127), (8, 1, 3), (64, 95, 128)])
@pytest.mark.parametrize(("dtype", "batch"), [("bfloat16", 1), ("tf32", 3), ("float64", 1)])
def test_operands_lie_as_the_product_says(monkeypatch, layout, sizes, dtype, batch) -> None:
    class Properties:
        L2_cache_size = 1 << 20

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    product = Product.of_layout(*sizes, layout, dtype, batch)
    m, n, k = sizes
    pairs = Operands(torch.device("cpu")).sets(product)
    assert len(pairs) > 1
    ends = set()
    for a, b in pairs:
        lead = () if batch == 1 else (batch,)
        assert (a.shape, b.shape) == ((*lead, m, k), (*lead, k, n))
        for x, access, along_k in (
            (a, product.a, layout[0] == "n"),
            (b.mT, product.b, layout[1] == "t"),
        ):
            assert x.stride(-1 if along_k else -2) == 1
            row, step = (x.shape[-1], x.stride(-2)) if along_k else (x.shape[-2], x.stride(-1))
            assert step >= row
            aligned = x.data_ptr() % 16 == 0 and step * x.element_size() % 16 == 0
            assert aligned == (not access.endswith("elements"))
            offset = x.storage_offset() * x.element_size()  # of memory that begins at a line
            lines = offset % 128 == 0 and step * x.element_size() % 128 == 0
            assert lines == access.endswith("lines")
            assert access.startswith("k" if along_k else "own")
            ends.add(x.data_ptr())
    assert len(ends) == 2 * len(pairs)  # no two share memory


def test_products_have_names() -> None:
    assert str(Product.of_layout(1, 2, 8, "nt", "bfloat16")) == "1x2x8 nt bfloat16"
    assert str(Product.of_layout(64, 63, 9, "nn", "float16", 4)) == "4x64x63x9 NN float16"
    line = Product.of_layout(64, 64, 64, "tn", "tf32").line()
    assert (line["math"], line["a"], line["b"]) == ("tf32", "own_lines", "own_lines")
    assert "dtype" not in line


def times(gain: float, product: Product | None = None) -> measure.Times:
    rounds = {
        WAYS[0]: [10.0, 11.0, 10.0],
        WAYS[1]: [10 / gain, 11 / gain, 10 / gain],
        measure.TORCH: [12.0, 12.0, 12.0],
    }
    product = product or Product.of_layout(64, 64, 64, "nt", "bfloat16")
    return measure.Times(product, rounds, dict.fromkeys(WAYS, 1.0), WAYS[0])


def test_another_way_must_be_clearly_quicker() -> None:
    assert times(1.005).best() == WAYS[0]
    assert times(1.05).best() == WAYS[1]
    assert times(0.9).best() == WAYS[0]
    line = sweep.line_of(times(1.25))
    assert line["best"] == WAYS[1]
    assert line["gain"] == pytest.approx(0.25)
    assert line["torch"] == pytest.approx(1.5)


def test_a_sweep_goes_on_where_its_file_ends(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    assert sweep.read_lines(path) == []
    first, second = sweep.line_of(times(1.25)), sweep.line_of(times(0.9))
    path.write_text(json.dumps(first) + "\n" + json.dumps(second)[:40])
    assert sweep.read_lines(path) == [first]  # the process ended in the middle of a line
    path.write_text(json.dumps(second)[:40] + "\n" + json.dumps(first) + "\n")
    with pytest.raises(torch_cubin.Error, match=r"\[input\].*is damaged"):
        sweep.read_lines(path)


def test_a_table_holds_what_is_quicker(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sweep, "measured_on", lambda: {"gpu": "a GPU"})
    other = Product.of_layout(64, 64, 128, "nt", "bfloat16")
    lines = [sweep.line_of(times(1.25)), sweep.line_of(times(1.0, other))]
    table = sweep.table_of(lines)
    (entry,) = table["products"]
    kept = {**sweep.line_of(times(1.0, other)), "tuned": WAYS[0]}  # of the table that was there
    assert len(sweep.table_of([*lines, kept])["products"]) == 2
    assert entry == {**Product.of_layout(64, 64, 64, "nt", "float16").line(), "way": WAYS[1]}
    sweep.write_table(table, tmp_path / "new" / "table.json")
    assert json.loads((tmp_path / "new" / "table.json").read_text()) == table


def test_the_standard_sweep_names_no_product_twice() -> None:
    products = list(sweep.standard_products())
    assert len(set(products)) == len(products) > 200


@pytest.mark.skipif(torch.cuda.is_available(), reason="what happens without a GPU")
def test_without_a_gpu(capsys) -> None:
    with pytest.raises(torch_cubin.Error, match=r"\[no_device\].*tune"):
        torch_cubin.tune([(1, 2, 3)])
    assert command_line.main(["tune", "--sweep"]) == 1
    assert "[no_device]" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["1x2", "1x2x0", "axbxc", ""])
def test_shapes_of_the_command_line(text) -> None:
    with pytest.raises(torch_cubin.Error, match=r"\[input\].*MxNxK"):
        sweep.shape_of(text)


def test_a_table_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(torch_cubin.Error, match=r"\[file\]"):
        torch_cubin.load_tuned(tmp_path / "missing.json")
    (tmp_path / "text.json").write_text("no JSON")
    with pytest.raises(torch_cubin.Error, match=r"\[file\]"):
        torch_cubin.load_tuned(tmp_path / "text.json")
