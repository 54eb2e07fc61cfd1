"""Models on two GPUs, by NCCL, under install(): forward, backward and a step of the optimizer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _torchrun(*arguments: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    paths = [str(ROOT), *filter(None, sys.path)]
    run = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr[-4000:]
    return run.stdout


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> dict:
    script = str(ROOT / "tests" / "gpu" / "rank_child.py")
    said = _torchrun(script, str(tmp_path_factory.mktemp("checkpoints")))
    return json.loads(said.splitlines()[-1])


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
    assert "2 processes, cuda: loss" in _torchrun(str(ROOT / "examples" / "tensor_parallel.py"))
