"""Our ops of DTensors, and tensor, sequence and data parallel layers: four ranks on the CPU."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from programs import output_of
from torchrun import ROOT, torchrun

HERE = Path(__file__).resolve().parent
RANKS = 4


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What the ranks report, which is the same."""
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("this PyTorch has no gloo")
    folder = tmp_path_factory.mktemp("ranks")
    paths = [str(HERE.parents[1]), *filter(None, sys.path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "sharding_worker.py"), str(RANKS), str(folder)]
    output_of(command, env=environment, timeout=300)
    answers = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]
    assert all(each == answers[0] for each in answers)
    return answers[0]


def test_ops_and_checkpoints_of_shards_equal_those_of_whole_tensors(answer) -> None:
    assert answer["wrong"] == []


@pytest.mark.parametrize("door", ["drop_in", "install"])
@pytest.mark.parametrize("how", ["tensor", "sequence", "fsdp"])
def test_layers_are_right_with_pytorchs_collectives(answer, how, door) -> None:
    stock, ours = (answer["blocks"][f"{how}, {each}"] for each in ("stock", door))
    assert stock["right"]
    assert ours["right"]
    assert ours["collectives"] <= stock["collectives"]
    assert "aten::mm" in ours["served"]


def test_the_example_trains_alike_in_two_processes(answer) -> None:
    example = ROOT / "examples" / "tensor_parallel.py"
    said = torchrun(example, "--device", "cpu", "--steps", "3")
    assert "2 processes, cpu: loss" in said
