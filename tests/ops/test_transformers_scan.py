"""tools/transformers_scan.py: the comparison, and the list that a run cut by time leaves behind."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def scan(monkeypatch):
    monkeypatch.setattr(sys, "path", ["", str(ROOT), *sys.path])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    path = ROOT / "tools" / "transformers_scan.py"
    spec = importlib.util.spec_from_file_location("transformers_scan", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def models_of(path):
    return json.loads(path.read_text())["models"]


def run(scan, monkeypatch, out, *options, most=None):
    """The types that main() tried; the run is cut after `most`."""
    tried = []

    def scan_all(types, jobs):
        for number, name in enumerate(types):
            if number == most:
                raise KeyboardInterrupt
            tried.append(name)
            yield name, {"result": "served"}
            assert name in models_of(out.with_suffix(".unfinished"))  # before the next type begins

    monkeypatch.setattr(scan, "scan_all", scan_all)
    monkeypatch.setattr(sys, "argv", ["scan", "--out", str(out), *options])
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        scan.main()
    return tried


def test_an_interrupted_run_is_resumed(scan, monkeypatch, tmp_path):
    out = tmp_path / "scan.json"
    unfinished = out.with_suffix(".unfinished")
    everything = sorted(transformers.CONFIG_MAPPING.keys())
    assert run(scan, monkeypatch, out, most=5) == everything[:5]
    assert run(scan, monkeypatch, out, most=7) == everything[5:12]
    assert not out.exists()
    kept = json.loads(unfinished.read_text())
    assert kept["counts"] == {"served": 12}
    assert {"transformers", "torch", "sources"} == kept["made_by"].keys()
    kept["made_by"]["transformers"] = "4.53.0"  # another version's lines are not kept
    unfinished.write_text(json.dumps(kept))
    assert run(scan, monkeypatch, out, most=1) == everything[:1]
    assert list(models_of(unfinished)) == everything[:1]
    assert run(scan, monkeypatch, out) == everything[1:]
    assert not unfinished.exists()
    assert sorted(models_of(out)) == everything
    assert run(scan, monkeypatch, out) == everything  # a complete list is made anew


def test_the_list_of_the_tree_is_complete():
    assert len(models_of(ROOT / "docs" / "transformers_scan.json")) > 700


@pytest.mark.parametrize(
    ("model_type", "result"),
    [
        ("llama", "served"),
        ("aimv2_text_model", "served"),  # a part of a model, which AutoModel does not know
        ("glm4v_text", "served"),  # rotary sections, which a small head_dim does not hold
        ("bros", "refused"),  # wants boxes
    ],
)
def test_types_of_several_kinds(scan, model_type, result):
    import torch_cubin.huggingface

    torch_cubin.huggingface.register()
    line = scan.scan(model_type)
    assert line["result"] == result, line
