"""tools/gpu_sanitize.py reads what compute-sanitizer writes."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = """
========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at vec_add+0xb0
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x7f81 is inside an allocation of 64 bytes
=========
========= Invalid __global__ write of size 2 bytes
=========     at void at::native::fill<float>(T1 *, int)+0x4f0 in fill.cu:12
=========     by thread (1,0,0) in block (0,0,0)
========= Invalid __shared__ read of size 2 bytes
=========     by thread (1,0,0) in block (0,0,0)
========= Program hit an error on CUDA API call to cuInit
========= ERROR SUMMARY: 3 errors
"""


def load():
    spec = importlib.util.spec_from_file_location("gpu_sanitize", ROOT / "tools/gpu_sanitize.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_reports_and_their_kernels() -> None:
    assert list(load().reports(OUTPUT.splitlines())) == [
        ("Uninitialized __global__ memory read of size 4 bytes", "vec_add"),
        ("Invalid __global__ write of size 2 bytes", "void at::native::fill<float>(T1 *, int)"),
        ("Invalid __shared__ read of size 2 bytes", "?"),
    ]


def test_skipped_files_exist() -> None:
    tool = load()
    files = {file.stem for file in (ROOT / "tests" / "gpu").glob("test_cuda_*.py")}
    assert {f"test_cuda_{name}" for name in tool.SKIPPED} < files
    assert len(tool.default_tests()) == len(files) - len(tool.SKIPPED)


NAMES = ("column_sums_rows_f16", "norm_rows_f16_256", "delta_attention_f32", "quantize_f16")


def test_kernels_that_the_record_lacks_are_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """By what stands in for the scenarios: a tool names one kernel, one scenario ends early, one
    ends badly."""
    import torch

    tool = load()
    (tmp_path / "torch_cubin" / "cubins").mkdir(parents=True)
    (tmp_path / "tests" / "gpu").mkdir(parents=True)
    kernels = [{"name": name, "arch": "sm_90a", "sha256": "a" * 64} for name in NAMES]
    manifest = tmp_path / "torch_cubin" / "cubins" / "manifest.json"
    manifest.write_text(json.dumps({"kernels": kernels}))
    sys.path.insert(0, str(ROOT / "tests"))
    from gpu import record, run_child, sanitized

    calls = []

    def run(scenario: str, name: str, *arguments: str, watched=(), **options) -> run_child.Result:
        calls.append((scenario, name, *arguments, tuple(watched)))
        if scenario == "experts_sanitize" and name == "racecheck":
            return run_child.Result(1, {}, "it ended")
        if scenario == "attention_sanitize" and name == "initcheck":
            return run_child.Result(
                86, {"wrong": []}, "=========     at delta_attention_f32+0x9f0", NAMES
            )
        answer = {"wrong": [], "was_ended": scenario == "rows_sanitize"}
        return run_child.Result(0, answer, "", NAMES[1:] if scenario == "rows_sanitize" else NAMES)

    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setattr(run_child, "run", run)
    monkeypatch.setattr(run_child, "sanitizer_version", lambda: "1")
    monkeypatch.setattr(record, "driver_version", lambda: "2")
    monkeypatch.setattr(record, "source_hash", lambda root: "3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "G")
    assert tool.run_kernels(2, 60) == 1
    assert ("rows_sanitize", "memcheck", "float16", (NAMES[0], NAMES[1])) in calls
    assert ("rows_sanitize", "initcheck", "float16", ()) in calls, "it must see all writes"
    assert ("rows_sanitize", "racecheck", "float16", ()) in calls, "it must watch all or none"
    assert not any(call[2:3] == ("bfloat16",) for call in calls), "they may add nothing"
    found = sanitized.read(tmp_path)
    assert found["reports"] == {"initcheck": {NAMES[2]: "at delta_attention_f32+0x9f0"}}
    of_all = {"cubin": "a" * 16, **dict.fromkeys(sanitized.TOOLS, 0)}
    assert NAMES[0] not in found["kernels"]
    assert found["kernels"][NAMES[1]] == found["kernels"][NAMES[2]] == of_all
    assert "racecheck" not in found["kernels"][NAMES[3]]
    output = capsys.readouterr().out
    assert "racecheck experts_sanitize : exit status 1, wrong: ['no answer']" in output
    calls.clear()
    tool.run_kernels(2, 60)
    assert {call[:2] for call in calls} == {
        ("attention_sanitize", "initcheck"),  # what was reported is run again
        ("experts_sanitize", "racecheck"),
        *(("rows_sanitize", name) for name in sanitized.TOOLS),
    }
