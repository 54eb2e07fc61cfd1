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


def run(scan, monkeypatch, out, *options, most=None):
    """The types that main() tried; the run is cut after `most`."""
    tried = []

    def scan_all(types, jobs):
        for number, name in enumerate(types):
            if number == most:
                raise KeyboardInterrupt
            tried.append(name)
            yield name, {"result": "served"}
            assert name in json.loads(out.read_text())["models"]  # before the next type begins

    monkeypatch.setattr(scan, "scan_all", scan_all)
    monkeypatch.setattr(sys, "argv", ["scan", "--out", str(out), *options])
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        scan.main()
    return tried


def test_an_interrupted_run_is_resumed(scan, monkeypatch, tmp_path):
    out = tmp_path / "scan.json"
    everything = sorted(transformers.CONFIG_MAPPING.keys())
    assert run(scan, monkeypatch, out, most=5) == everything[:5]
    assert run(scan, monkeypatch, out, "--resume", most=7) == everything[5:12]
    assert run(scan, monkeypatch, out, "llama", "bert") == ["llama", "bert"]
    kept = json.loads(out.read_text())
    assert len(kept["models"]) == 14
    assert kept["counts"] == {"served": 14}
    assert kept["versions"]["transformers"] == transformers.__version__
    assert "torch" in kept["versions"]
    kept["versions"]["transformers"] = "4.53.0"  # another version's lines are not kept
    out.write_text(json.dumps(kept))
    assert run(scan, monkeypatch, out, "--resume", most=1) == everything[:1]
    assert list(json.loads(out.read_text())["models"]) == everything[:1]


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
