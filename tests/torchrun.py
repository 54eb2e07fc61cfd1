"""Runs a script in several processes of this machine by torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def torchrun(script: Path, *arguments: str, processes: int = 2, seconds: float = 120) -> str:
    """Returns what the script printed; fails if a process fails or they take longer."""
    # By its own choice torchrun gives the processes the host's name, which may not be resolvable.
    launcher = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={processes}"]
    paths = [str(ROOT), *filter(None, sys.path)]
    run = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *launcher, str(script), *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # Without NVLink multicast: some virtual machines refuse it.
        env={"NCCL_NVLS_ENABLE": "0", **os.environ, "OMP_NUM_THREADS": "1",
             "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    try:
        out, error = run.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        # SIGTERM, at which torchrun ends its processes: they would outlive SIGKILL.
        run.terminate()
        out, error = run.communicate(timeout=60)
        raise AssertionError(f"no end after {seconds} s\n{out}{error[-4000:]}") from None
    assert run.returncode == 0, out + error[-4000:]
    return out
