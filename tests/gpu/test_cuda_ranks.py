"""Models on two and four GPUs, by NCCL, under install(): forward, backward, an optimizer step."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from torchrun import ROOT, torchrun

SIZES = [pytest.param(ranks, marks=pytest.mark.gpu(ranks)) for ranks in (2, 4)]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict]:
    """By the number of ranks."""

    @functools.cache
    def of(ranks: int) -> dict:
        script = ROOT / "tests" / "gpu" / "rank_child.py"
        folder: Path = tmp_path_factory.mktemp("ranks")
        torchrun(script, str(folder), processes=ranks)
        return json.loads((folder / "answer.json").read_text())

    return of


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("plan", ["fsdp", "tensor", "sequence"])
def test_a_step_equals_that_of_one_gpu(answers, plan: str, ranks: int) -> None:
    answer = answers(ranks)
    found = answer[plan]
    assert found["error"] <= 1.25 * answer["alone"], answer
    before, after = found["collectives"]
    assert sum(after.values()) <= sum(before.values()), answer
    assert any(name.startswith("aten::mm") for name in found["served"]), answer
    assert any(name.startswith("aten::addmm") for name in found["served"]), answer
    assert any("attention" in name for name in found["served"]), answer


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("plan", ["fsdp", "tensor", "sequence"])
def test_a_checkpoint_loads_on_one_gpu_and_on_two(answers, plan: str, ranks: int) -> None:
    assert answers(ranks)[plan]["loads"] == [True, True]


@pytest.mark.gpu(2)
def test_the_example_trains_on_two_gpus() -> None:
    assert "2 processes, cuda: loss" in torchrun(ROOT / "examples" / "tensor_parallel.py")
