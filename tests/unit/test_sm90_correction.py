"""The table that corrects the planner's model of time (csrc/ops/matmul/sm90_correction_table.h)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "csrc" / "ops" / "matmul" / "sm90_correction_table.h"
MOST_NUMBERS = 40


def tables() -> dict[str, str]:
    parts = re.split(r'\{"([^"]+)",', TABLE.read_text())
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_a_gpu_has_few_numbers_and_small_ones() -> None:
    assert set(tables()) == {"NVIDIA H200", "NVIDIA H100 80GB HBM3"}
    for gpu, text in tables().items():
        numbers = [float(word) for word in re.findall(r"-?0\.\d+", text)]
        assert 20 < len(numbers) <= MOST_NUMBERS, gpu
        assert max(map(abs, numbers)) < 0.15, gpu


@pytest.mark.parametrize("gpu", ["h200", "h100"])
def test_the_correction_improves_the_choices(gpu: str) -> None:
    """On the sweeps in the tree: regret of products of more than 64 rows and columns."""
    torch = pytest.importorskip("torch")
    if torch.version.cuda is not None:
        pytest.skip("the stand-in driver needs a CPU build of torch")
    run = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "planner_regret.py", "--gpu", gpu],
        capture_output=True,
        text=True,
        check=True,
    )
    (others,) = re.findall(rf"{gpu} others: \d+ products, regret ([\d.]+)%", run.stdout)
    assert float(others) < {"h200": 3.1, "h100": 4.3}[gpu]
