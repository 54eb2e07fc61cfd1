"""Models on two GPUs, by NCCL, under install(): forward, backward and a step of the optimizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torchrun import ROOT, torchrun


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> dict:
    script = ROOT / "tests" / "gpu" / "rank_child.py"
    folder: Path = tmp_path_factory.mktemp("ranks")
    torchrun(script, str(folder))
    return json.loads((folder / "answer.json").read_text())


@pytest.mark.gpu(2)
@pytest.mark.parametrize("plan", ["fsdp", "tensor", "sequence"])
def test_a_step_equals_that_of_one_gpu(answer, plan: str) -> None:
    found = answer[plan]
    assert found["error"] <= 1.25 * answer["alone"], answer
    before, after = found["collectives"]
    assert sum(after.values()) <= sum(before.values()), answer
    assert any(name.startswith("aten::mm") for name in found["served"]), answer
    assert any(name.startswith("aten::addmm") for name in found["served"]), answer
    assert any("attention" in name for name in found["served"]), answer


@pytest.mark.gpu(2)
@pytest.mark.parametrize("plan", ["fsdp", "tensor", "sequence"])
def test_a_checkpoint_of_two_gpus_loads_on_one(answer, plan: str) -> None:
    assert answer[plan]["loads"]


@pytest.mark.gpu(2)
def test_the_example_trains_on_two_gpus() -> None:
    assert "2 processes, cuda: loss" in torchrun(ROOT / "examples" / "tensor_parallel.py")
