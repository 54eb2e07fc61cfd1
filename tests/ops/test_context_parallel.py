"""PyTorch's context parallelism through the implementation "cubin": two ranks, on the CPU. On two
GPUs: tests/gpu/test_cuda_devices.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.nn import attention

HERE = Path(__file__).resolve().parent
RANKS = 2
SDPA = "aten::_scaled_dot_product_flash_attention"


def ranks(device: str, folder: Path) -> list[dict]:
    """What each rank says."""
    pytest.importorskip("torch.distributed.tensor.experimental._attention")
    paths = [str(HERE.parents[1]), str(HERE.parent), *filter(None, sys.path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "NCCL_NVLS_ENABLE": "0"}
    script = str(HERE / "context_parallel_worker.py")
    processes = [
        subprocess.Popen(
            [sys.executable, script, device, str(rank), str(RANKS), str(folder)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (out, error) in zip(processes, said, strict=True):
        assert process.returncode == 0, out + error[-4000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


def check(answers: list[dict]) -> None:
    for answer in answers:
        for errors in answer["errors"]:
            assert len(errors) == 4
            assert all(error < 1e-2 for error in errors), answer
        # Two calls a rank and direction, causal or not.
        assert answer["served"] == {SDPA: 4, f"{SDPA}_backward": 4}
        assert answer["declined"] == 0


@pytest.mark.skipif(
    not hasattr(attention, "register_flash_attention_impl"), reason="this PyTorch has no registry"
)
@pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="this PyTorch has no gloo"
)
def test_two_ranks_on_the_cpu(tmp_path: Path) -> None:
    check(ranks("cpu", tmp_path))
