#!/usr/bin/env python3
"""Runs the tests of the fault cases; prints a table of case, defined outcome and observed outcome.

    make fault-cases
    python tools/fault_cases.py [--json FILE]       (in a built checkout)

tests/faults/cases.py lists the cases; the mark `fault_case` links a test to one. Cases that need a
GPU run if there is one; otherwise the table shows the record in tests/gpu/last_run.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
sys.path[:0] = [str(TESTS), str(ROOT)]

from fake_driver.build import build  # noqa: E402
from faults.cases import CASES  # noqa: E402

MARK = re.compile(r"\bfault_case\(([\d, ]+)\)")


def marked() -> dict[Path, set[int]]:
    """The test files with marked cases, and the numbers of their cases."""
    found = {}
    for path in sorted(TESTS.rglob("*.py")):
        cases = {
            int(number) for match in MARK.findall(path.read_text()) for number in match.split(",")
        }
        if cases:
            found[path] = cases
    return found


def run(log: Path, files: list[Path], environment: dict[str, str], *options: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "fault_case", "-p", "no:cacheprovider"]
    command += ["--no-header", *options, *map(str, files)]
    environment = {**environment, "TORCH_CUBIN_FAULT_CASES": str(log)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode not in (0, 5):
        print(done.stdout[-6000:], done.stderr[-2000:], file=sys.stderr)


def recorded() -> tuple[str, dict[str, int]]:
    """The machine of the last GPU run, and the number of passed tests for each case."""
    try:
        record = json.loads((TESTS / "gpu" / "last_run.json").read_text())
    except OSError:
        return "no GPU", {}
    return f"{record['gpus']} {record['gpu']}, {record['date']}", record.get("fault_cases", {})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="the table as JSON")
    options = parser.parse_args()
    if not (ROOT / "torch_cubin" / "_C.so").is_file():
        print("fault cases: the library is not built: `make fault-cases` builds it, and runs this")
        return 1
    files = marked()
    fake = [path for path in files if path.parent.name == "faults" and path.stem[:5] == "fake_"]
    with tempfile.TemporaryDirectory() as name:
        log = Path(name) / "log"
        log.touch()
        run(log, [path for path in files if path not in fake], dict(os.environ))
        missing = build(Path(name))
        if missing:
            print(f"fault cases: no stand-in driver: {missing}", file=sys.stderr)
        else:
            environment = {**os.environ, "FAKE_CUDA_DEVICES": "2"}
            environment["LD_LIBRARY_PATH"] = f"{name}:{os.environ.get('LD_LIBRARY_PATH', '')}"
            for path in fake:  # each opens the driver once
                run(log, [path], environment, "-o", "python_files=fake_*.py")
        lines = [json.loads(line) for line in log.read_text().splitlines()]
    where, on_gpu = recorded()
    table = []
    for number, (case, outcome) in CASES.items():
        tests = [line for line in lines if number in line["cases"]]
        seen = Counter(line["outcome"] for line in tests)
        gpu = on_gpu.get(str(number), 0)
        names = sorted({line["test"].split("[")[0] for line in tests})
        table.append(
            {
                "case": number,
                "what": case,
                "outcome": outcome,
                "here": dict(seen),
                "gpu": gpu,
                "tests": names,
            }
        )
    print(f"Passed here, and by the record on a GPU ({where}).\n")
    bad = 0
    for row in table:
        passed, failed = row["here"].get("passed", 0), row["here"].get("failed", 0)
        wrong = failed > 0 or passed + row["gpu"] == 0
        bad += wrong
        print(f"{row['case']:2} {'NOT SHOWN' if wrong else 'shown'}: {row['what']}")
        print(f"     -> {row['outcome']}")
        print(f"     {passed} passed, {failed} failed here; {row['gpu']} passed on a GPU")
        for test in row["tests"]:
            print(f"       {test}")
    print(f"\n{len(table) - bad} of {len(table)} cases are shown")
    if options.json:
        options.json.write_text(json.dumps(table, indent=1) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
