"""Runs the randomised differential tests on a GPU with new seeds, and counts the calls.

    python tools/random_calls.py [--seconds 600] [--processes 12] [--first-seed 10000] [--json FILE]
    python tools/random_calls.py --only attention_options      (attention with every option alone)

Each call is compared with float64, or with the exact result: matmul and linear, attention with
every option (forward and backward), declared ops, products of groups (with every option), mixtures
of experts, products of 8-bit floats and their groups. Processes run side by side; each takes up to
a thousand consecutive seeds, until the time is up. A failure prints seed and case. Exit status 1 if
a call was wrong or a process crashed. Needs the built library and kernels and a torch with CUDA,
but no .venv.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests" / "gpu"
SEEDS = 1000  # a process
GRACE = 8  # seconds for tests that are running when the time is up
# The tests that processes run, interleaved. Products are the quickest and most of all calls.
SHARES = (
    "test_cuda_differential.py",
    "test_cuda_attention_options.py",
    "test_cuda_differential.py",
    "test_cuda_define_op_differential.py",
    "test_cuda_differential.py",
    "test_cuda_attention_differential.py",
    "test_cuda_differential.py",
    "test_cuda_differential.py",
    "test_cuda_grouped_differential.py",
    "test_cuda_grouped_options.py",
    "test_cuda_define_op_differential.py",
    "test_cuda_scaled_differential.py",
)


class Count:
    """A pytest plugin: ends the run in time, and counts the calls of passed tests."""

    def __init__(self, end: float, output: Path) -> None:
        self.end = end
        self.output = output
        self.calls = self.passed = 0
        self.failures: list[str] = []

    def pytest_collection_modifyitems(self, items: list) -> None:
        specs = [getattr(item, "callspec", None) for item in items]
        items[:] = [
            x for x, spec in zip(items, specs, strict=True) if spec and "seed" in spec.params
        ]
        items.sort(key=lambda item: item.callspec.params["seed"])

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed:
            self.failures.append(f"{report.nodeid}\n{report.longreprtext[-2000:]}")

    def pytest_runtest_makereport(self, item, call) -> None:
        if call.when == "call" and call.excinfo is None:
            self.passed += 1
            self.calls += item.module.CASES
        if call.when == "teardown":
            self.write()
        if time.time() > self.end:
            item.session.shouldstop = "the time is up"

    def write(self) -> None:
        """Writes the counts so far, because the process may be ended during a test."""
        text = json.dumps({"calls": self.calls, "tests": self.passed, "failures": self.failures})
        self.output.with_suffix(".new").write_text(text)
        self.output.with_suffix(".new").replace(self.output)


def worker(file: str, end: float, output: Path) -> int:
    import pytest

    count = Count(end, output)
    status = pytest.main(["-q", "-p", "no:cacheprovider", str(TESTS / file)], plugins=[count])
    count.write()
    return 0 if status in (pytest.ExitCode.OK, pytest.ExitCode.INTERRUPTED) else int(status)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--processes", type=int, default=min(12, os.cpu_count() or 1))
    parser.add_argument("--first-seed", type=int, default=10_000)
    parser.add_argument("--only", default="", help="files of tests whose name has this in it")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--end", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(options.worker, options.end, options.json)
    import torch

    if not torch.cuda.is_available():
        print("random_calls: torch finds no GPU here")
        return 1
    shares = [file for file in SHARES if options.only in file]
    if not shares:
        parser.error(f"--only {options.only}: expected a part of {', '.join(sorted(set(SHARES)))}")
    end = time.time() + options.seconds
    calls: Counter[str] = Counter()
    seeds: dict[str, list[int]] = {}
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for number in range(options.processes):
            file = shares[number % len(shares)]
            first = options.first_seed + SEEDS * number
            environment = {**os.environ, "TORCH_CUBIN_REQUIRE_GPU": "1"}
            environment["TORCH_CUBIN_TEST_SEED"] = f"{first}-{first + SEEDS - 1}"
            output, log = Path(folder) / f"{number}.json", Path(folder) / f"{number}.log"
            command = [sys.executable, __file__, "--worker", file, "--end", str(end)]
            with log.open("w") as stream:
                process = subprocess.Popen(
                    [*command, "--json", str(output)], cwd=ROOT, env=environment, stdout=stream,
                    stderr=subprocess.STDOUT,
                )  # fmt: skip
            started.append((file, first, process, output, log))
        for file, first, process, output, log in started:
            try:
                status = process.wait(max(0.1, end + GRACE - time.time()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                status = 0  # ended during a test, which is not counted
            answer = json.loads(output.read_text()) if output.is_file() else {}
            wrong = answer.get("failures", [])
            if not answer or (status != 0 and not wrong):
                text = log.read_text()[-2000:]
                wrong = [*wrong, f"{file} from seed {first} on ended with {status}: {text}"]
            calls[file] += answer.get("calls", 0)
            seeds.setdefault(file, []).append(first)
            failures += wrong
            got = answer.get("calls", 0)
            print(f"{file} from seed {first} on: {got} calls, {len(wrong)} failures")
    result = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC",
        "command": f"python tools/random_calls.py --seconds {options.seconds:g}"
        f" --processes {options.processes} --first-seed {options.first_seed}"
        + (f" --only {options.only}" if options.only else ""),
        "calls": sum(calls.values()),
        "by file": dict(calls),
        "first seeds": seeds,
        "failures": failures,
    }
    print("\n".join(failures))
    print(f"{result['calls']} random calls, {len(failures)} failures, on {result['gpu']}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if failures or not result["calls"] else 0


if __name__ == "__main__":
    sys.exit(main())
