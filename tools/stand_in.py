"""Runs a tool on the tests' stand-in driver, whose device reports an H200's attributes.

Products are planned by their sizes, layouts and the device's facts, so that a machine without a GPU
can ask which kernels an H200 or an H100 would run. Needs a CPU build of torch and kernels for
sm_90a (`make build`).
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

# The memory's clock (kHz) and bus width (bits).
MEMORY = {"h200": (3201000, 6144), "h100": (2619000, 5120)}
NAMES = {"h200": "NVIDIA H200", "h100": "NVIDIA H100 80GB HBM3"}


def comparison(about: str, counted: str, show: int) -> argparse.Namespace:
    """The arguments of a tool that records what random calls run, and compares it after a change;
    `counted` names the calls, `show` is how many changes are printed."""
    parser = argparse.ArgumentParser(description=about.split("\n")[0])
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("record", type=Path)
    parser.add_argument(f"--{counted}", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--gpu", choices=MEMORY, default="h200")
    parser.add_argument("--show", type=int, default=show, metavar="CHANGES")
    return parser.parse_args()


def is_there() -> bool:
    return "FAKE_CUDA_DEVICES" in os.environ


def run_again(gpu: str = "h200", *more: str, name: str | None = None) -> int:
    """Runs this script again with more arguments, in a process that finds the stand-in (whose GPU
    gets another name on request); returns its exit status."""
    from fake_driver.build import build

    clock, bus = MEMORY[gpu]
    with tempfile.TemporaryDirectory() as folder:
        missing = build(Path(folder))
        if missing:
            print(missing, file=sys.stderr)
            return 1
        environment = {
            **os.environ,
            "LD_LIBRARY_PATH": folder,
            "FAKE_CUDA_DEVICES": "1",
            "STAND_IN_MEMORY": f"{clock} {bus}",
            "FAKE_CUDA_NAME": name or NAMES[gpu],
        }
        return subprocess.run([sys.executable, *sys.argv, *more], env=environment).returncode


def driver(family: str = "matmul") -> tuple[Any, list[dict[str, Any]]]:
    """The stand-in driver, reporting the GPU's memory, and the package's kernels of a family, which
    are registered with it."""
    ctypes.CDLL("libtorch_cuda.so", mode=ctypes.RTLD_GLOBAL)
    from fake_driver.control import FakeDriver
    from faults import catalogs

    driver = FakeDriver()
    clock, bus = os.environ["STAND_IN_MEMORY"].split()
    driver.set("memory_clock", int(clock))
    driver.set("memory_bus", int(bus))
    kernels = catalogs.kernels_of(family)
    catalogs.declare(driver, kernels)
    return driver, kernels


def random_size(rng: random.Random) -> int:
    """1 to 18,820; often a small one, often a multiple of 8 or 64."""
    if rng.random() < 0.25:
        return rng.choice((1, 2, 3, 4, 5, 8, 16, 17, 32, 33, 48, 64, 96, 100, 128))
    size = int(2 ** rng.uniform(0, 14.2))
    step = rng.choice((1, 8, 64))
    return max(step, size // step * step)
