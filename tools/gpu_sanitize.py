"""Runs kernels or GPU tests under compute-sanitizer, and counts its reports of our kernels.

    python tools/gpu_sanitize.py kernels [--processes 12] [--seconds 600]
    python tools/gpu_sanitize.py {initcheck,memcheck,synccheck} [--processes 12] [--seconds 600]
                                 [--json FILE] [--output FILE] [tests ...]

`kernels` runs every built kernel for Hopper under memcheck, racecheck, synccheck and initcheck, by
the scenarios of tests/gpu/sanitized.py, except those whose cubins the record has already, and joins
what it found into tests/gpu/last_sanitized.json, scenario by scenario. When its time is up,
scenarios end after the call that runs, and what they have run counts. Exit status 1 if a tool
reported a kernel, a scenario did not end well, or a kernel was not run.

A tool runs tests, by default all files of tests/gpu except those in SKIPPED below. PyTorch's
caching allocator is off, so that each tensor is a separate allocation that ends at its last element
and starts uninitialised. Tests that need the allocator are skipped by name: capturing a CUDA graph
without it breaks the process, and its remaining tests fail. Failing tests do not count, reports do.
Reports about PyTorch's kernels are counted separately. Exit status 1 if there is a report about our
kernels or without a kernel name, if the time did not suffice for all tests, or if none ran.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RACECHECKS = 8  # of a GPU at once, beside `processes` of other tools: more only take longer
LEAST_SECONDS = 25  # for which a scenario is started; the start takes 5 to 8
SECONDS_TO_END = 12  # of a scenario whose time is up: of the call that runs, and of the tool
# Files that mostly compile, run sanitizers themselves, lose contexts, or need all GPU memory.
SKIPPED = (
    *("aoti", "cpp", "define_op_torch", "examples", "faults", "huge", "limits", "memory"),
    *("sanitizer", "tuning"),
)
NO_CAPTURES = "not graph and not captur and not replay and not beside_other_work"  # for pytest's -k
# Kernels with false reports of initcheck. The first two read sums that Hopper kernels stored or
# added by TMA, which the tool does not track; the GPU suite, which fills fresh memory with NaN,
# shows that they are complete. Triton's device_descriptor writes a tensor map by an atomic exchange
# (ptxas's code for tensormap.cp_fenceproxy) and drops the old value.
NOT_READ = ("sm90_backward_convert_attention", "finish_matmul", "device_descriptor")
REPORT = re.compile(r"^=+ +((?:Invalid|Uninitialized|Misaligned|Barrier|Race|Potential)\b.*)$")
PLACE = re.compile(r"^=+ +at (.+?)\+0x[0-9a-f]+")


def reports(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(error, kernel) of each report in the tool's output; "?" for a report without a kernel."""
    found = None
    for line in lines:
        if place := PLACE.match(line):
            if found:
                yield found, place.group(1)
            found = None
        elif report := REPORT.match(line):
            if found:
                yield found, "?"
            found = report.group(1)
    if found:
        yield found, "?"


def own_kernels() -> set[str]:
    """The names of the package's kernels, and of those in tests and examples."""
    manifest = json.loads((ROOT / "torch_cubin" / "cubins" / "manifest.json").read_text())
    names = {kernel["symbol"] for kernel in manifest["kernels"]}
    sys.path.insert(0, str(ROOT))
    import torch_cubin

    for folder in ("tests/data", "examples"):
        for path in (ROOT / folder).rglob("*.cubin"):
            names.update(kernel.name for kernel in torch_cubin.inspect(path).kernels)
    return names


def default_tests() -> list[str]:
    files = sorted((ROOT / "tests" / "gpu").glob("test_cuda_*.py"))
    return [str(file) for file in files if file.stem.removeprefix("test_cuda_") not in SKIPPED]


def run(
    tool: str, tests: list[str], processes: int, seconds: float, logs: Path
) -> tuple[str, bool]:
    """Returns pytest's output, and whether it was ended after `seconds`. The sanitizer's output
    goes to files in `logs`."""
    command = ["compute-sanitizer", "--tool", tool, "--target-processes", "all"]
    command += ["--report-api-errors", "no", "--print-limit", "100000", "--show-backtrace", "no"]
    if tool == "initcheck":
        # The tool does not track TMA writes, so it would report every copy of a result to the host:
        # thousands of reports, which take most of its time.
        command += ["--check-api-memory-access", "no"]
    # Each pytest worker and each process of a test opens a connection to the tool. With the default
    # of ten, the eleventh waits forever.
    command += ["--max-connections", "256"]
    command += ["--log-file", str(logs / "%p.log")]
    command += [
        sys.executable,
        "-m",
        "pytest",
        *tests,
        "-k",
        NO_CAPTURES,
        "-p",
        "no:cacheprovider",
        "-v",
    ]
    if processes > 1:
        command += ["-n", str(processes)]
    environment = {
        **os.environ,
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "TORCH_CUBIN_REQUIRE_GPU": "1",
        "TORCH_CUBIN_TEST_FILL": "0",
        "TORCH_CUBIN_TEST_LIMIT": str(int(seconds)),
    }
    output, cut_off = logs / "pytest.txt", False
    with output.open("w") as file:
        pytest = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            pytest.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(pytest.pid, 9)
            pytest.wait()
            cut_off = True
    return output.read_text(), cut_off


def run_kernels(processes: int, seconds: float) -> int:
    """Joins what the record lacks into it."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import torch
    from gpu import answers, run_child, sanitized
    from gpu import record as of_suite

    ends = time.monotonic() + seconds
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [*map(str, range(torch.cuda.device_count()))]
    kernels, record, lock = sanitized.built(ROOT), sanitized.read(ROOT), threading.Lock()
    about = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "gpu": torch.cuda.get_device_name(),
        "driver": of_suite.driver_version(),
        "sanitizer": run_child.sanitizer_version(),
        "torch": torch.__version__,
        "sources": of_suite.source_hash(ROOT),
    }

    def absent_of(tool: str) -> list[str]:
        """Also those that it reported: a scenario may have been to blame."""
        return sorted({*sanitized.missing(record, kernels, tool), *record["reports"].get(tool, {})})

    work = []  # with the names of kernels that it may add
    # Those that have seen fewest first; racechecks have workers of their own.
    for tool in sorted(sanitized.TOOLS, key=lambda tool: -len(absent_of(tool))):
        absent = absent_of(tool)
        may_add = {
            scenario: [name for name in absent if re.search(scenario.kernels, name)]
            for scenario in sanitized.SCENARIOS
        }
        first = sorted(may_add, key=lambda scenario: -len(may_add[scenario]))
        work += [(tool, scenario, may_add[scenario]) for scenario in first if may_add[scenario]]
    failed = []

    def watch(number: int) -> None:
        tool, scenario, may_add = work[number]
        with lock:  # others may have added some meanwhile
            absent = sorted({*may_add} & {*absent_of(tool)})
        if not absent:
            return
        label = f"{tool} {scenario.name} {' '.join(scenario.arguments)}"
        left, began = ends - time.monotonic(), time.monotonic()
        if left < LEAST_SECONDS:
            failed.append(f"{label}: no time left")
            return
        # One thread each: their processes share the processors.
        own = {"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)], "OMP_NUM_THREADS": "1",
               answers.ENDS: str(time.time() + left - SECONDS_TO_END)}  # fmt: skip
        # initcheck has to see what the others write. Where racecheck watches some kernels alone,
        # another one's launch ends in an illegal access, blocking or not (2025.3.1).
        watched = () if tool in ("initcheck", "racecheck") else absent
        done = run_child.run(
            scenario.name, tool, *scenario.arguments, seconds=left, variables=own, watched=watched
        )
        named = sanitized.named_in(done.output, kernels) if done.returncode == 86 else {}
        wrong = done.answer.get("wrong", ["no answer"])
        with lock:
            if done.returncode not in (0, 86) or wrong or (done.returncode == 86 and not named):
                print(done.output[:1500], "[...]", done.output[-1500:], sep="\n", flush=True)
                failed.append(f"{label}: exit status {done.returncode}, wrong: {wrong}"[:500])
            else:
                # Not what a call of PyTorch's or a copy happened to run.
                ran = {name: kernels[name] for name in absent if name in done.kernels}
                if sanitized.is_cut_off(done.output):  # one that is not named may be next
                    ran = {name: cubin for name, cubin in ran.items() if name in named}
                    failed.append(f"{label}: more reports than are printed")
                sanitized.join(record, about, tool, ran, named)
                sanitized.write(ROOT, record, kernels)
            took, early = time.monotonic() - began, done.answer.get("was_ended", False)
            print(f"{label}: {len(done.kernels)} kernels, {len(named)} reported, {took:.0f} s"
                  f"{', ended early' if early else ''}", flush=True)  # fmt: skip

    slow = [number for number, (tool, *_) in enumerate(work) if tool == "racecheck"]
    quick = [number for number in range(len(work)) if number not in slow]
    with (
        concurrent.futures.ThreadPoolExecutor(RACECHECKS * len(gpus)) as of_races,
        concurrent.futures.ThreadPoolExecutor(processes) as others,
    ):
        races = of_races.map(watch, slow)
        list(others.map(watch, quick))
        list(races)
    print(*failed, sanitized.describe(ROOT), sep="\n")
    for tool in sanitized.TOOLS:
        if absent := sanitized.missing(record, kernels, tool):
            print(f"{tool} has not seen: {' '.join(absent)}")
        for name, report in record["reports"].get(tool, {}).items():
            print(f"{tool} reported {name}: {report}")
    found = any(record["reports"].values())
    absent = any(sanitized.missing(record, kernels, tool) for tool in sanitized.TOOLS)
    return 1 if failed or found or absent else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("tool", choices=("kernels", "initcheck", "memcheck", "synccheck"))
    parser.add_argument("tests", nargs="*")
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--output", type=Path, help="where pytest's output is kept: a line a test")
    options = parser.parse_args()
    if options.tool == "kernels":
        return run_kernels(options.processes, options.seconds)
    tests = options.tests or default_tests()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)
        output, cut_off = run(options.tool, tests, options.processes, options.seconds, logs)
        files = sorted(logs.glob("*.log"))
        found = [
            report
            for file in files
            for report in reports(file.read_text(errors="replace").splitlines())
        ]
    names = own_kernels()
    done = collections.Counter(re.findall(r" (PASSED|FAILED|ERROR|SKIPPED) ", output))
    ours = collections.Counter(
        f"{kernel}: {what}"
        for what, kernel in found
        if kernel == "?" or kernel.split("(")[0] in names
    )
    unseen = {
        report: count
        for report, count in ours.items()
        if options.tool == "initcheck" and report.startswith(NOT_READ)
    }
    ours -= collections.Counter(unseen)
    result = {
        "tool": options.tool,
        "seconds": round(time.monotonic() - began),
        "processes under the tool": len(files),
        "ended before all tests had run": cut_off,
        "tests": dict(done),
        "reports in kernels of this project": dict(ours),
        "reports of what the TMA or an exchange wrote": unseen,
        "reports in other kernels": len(found) - sum(ours.values()) - sum(unseen.values()),
        "other kernels": collections.Counter(
            kernel[:80] for what, kernel in found if kernel.split("(")[0] not in names
        ).most_common(10),
    }
    print(output[-1500:])
    if options.output:
        options.output.write_text(output)
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if ours or cut_off or not done["PASSED"] else 0


if __name__ == "__main__":
    sys.exit(main())
