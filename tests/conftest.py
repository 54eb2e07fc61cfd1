"""What every folder of tests shares: paths, the GPU gate, and what the summary says of both.

A test marked `gpu` (everything in tests/gpu is) needs a CUDA device, `gpu(2)` needs two. Where
they are missing the test is skipped, and the summary counts it; TORCH_CUBIN_REQUIRE_GPU=N makes
the lack of N devices a failure. The summary also says whether tests/gpu/last_run.json, the record
of the last whole run on a GPU, is of these sources, and of how many of the built kernels
tests/gpu/last_sanitized.json says what compute-sanitizer found.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent

SHOWN = 150  # tests that have not ended when a run is, at most
CI_LIMIT = 900  # seconds of .ci/run on two processors; more than 800 are shown in red
# A file's tests stay in one process (make test). These, which take a minute each, come first: with
# one of them last, the other processes would wait for it.
LONGEST = ("ops/test_over_aten.py", "faults/test_faults.py", "unit/test_packaging.py",
           "unit/test_fuzz_replay.py")  # fmt: skip

# Last, so that an installed torch_cubin wins over the sources where both could be imported.
for folder in (TESTS, ROOT):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))

# cuBLAS reads it when it makes its first handle, and torch.use_deterministic_algorithms refuses
# cuBLAS without it; the GPU tests compare with torch.matmul under that setting.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# Processes that run tests side by side share the processors: with a thread for each processor in
# every one of them, PyTorch's threads wait for one another, several times as long as they work. Nor
# do they need a pool each of torch.compile's compilers, nor the CPU code of its graphs in vectors,
# which is PyTorch's: without it, g++ takes a third less for each. What a test starts inherits all.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    workers = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

    # They share the GPUs as well: each begins with another one, which is its cuda:0.
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    first = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % max(gpus, 1)
    if first:
        order = (str((first + i) % gpus) for i in range(gpus))
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", ",".join(order))

from gpu import record, sanitized  # noqa: E402  (needs the path above)
from preloaded import PreloadedPython  # noqa: E402

_WORKER = "PYTEST_XDIST_WORKER" in os.environ
# What the reports of this run say, the tests that have yet to report, and, in the process that
# collects, whether it was asked for all of tests/gpu.
_run = {"counts": Counter(), "fault_cases": Counter(), "waiting": set(), "deselected": 0}
_run |= {"whole": False, "kernels": set(), "for_gpus": False}


@cache
def gpu_count() -> int:
    """The CUDA devices that torch sees (0 also where torch is missing)."""
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


@pytest.fixture(scope="session")
def torch_python() -> Iterator[PreloadedPython]:
    """Processes that have imported torch, and nothing of the package."""
    with PreloadedPython(["torch"]) as python:
        yield python


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "gpu(count=1): needs that many CUDA devices; skipped, and counted, without"
    )
    config.addinivalue_line(
        "markers", "fault_case(number, ...): shows the outcome of these cases of faults/cases.py"
    )
    config.addinivalue_line(
        "markers", "child(name, *arguments): uses the result of this scenario of tests/gpu/child.py"
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What it makes lives on: looking for garbage meanwhile takes a quarter of its time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {TESTS / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))
    for item in items:
        if TESTS / "gpu" in item.path.parents and item.get_closest_marker("gpu") is None:
            item.add_marker(pytest.mark.gpu)
        _run["for_gpus"] |= item.get_closest_marker("gpu") is not None
        cases = {case for marker in item.iter_markers("fault_case") for case in marker.args}
        item.user_properties += [("fault_case", case) for case in sorted(cases)]


def pytest_deselected(items: list[pytest.Item]) -> None:
    _run["deselected"] += len(items)


def pytest_collection_finish(session: pytest.Session) -> None:
    wanted = set((TESTS / "gpu").glob("test_*.py"))
    collected = {item.path for item in session.items}
    partial = _run["deselected"] or any("::" in argument for argument in session.config.args)
    options = session.config.option
    partial = partial or getattr(options, "setuponly", False)  # of each test no more than that
    _run["whole"] = wanted <= collected and not partial
    if not _WORKER and not options.collectonly:
        _run["waiting"] = {item.nodeid for item in session.items}
    # The modules and tests live to the end. Without them a whole collection of garbage, which some
    # tests ask for at every step, takes a tenth of its time.
    gc.freeze()


def _mark_of(nodeid: str) -> Path:
    """A file that is there while a process of this run runs the test."""
    name = hashlib.sha256(nodeid.encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"tests-{os.environ['PYTEST_XDIST_TESTRUNUID']}-{name}"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if _WORKER:
        # A test whose process ended, as at faulthandler_timeout, is run again by pytest-xdist.
        mark = _mark_of(item.nodeid)
        if mark.exists():
            pytest.fail("its process ended: see its traceback above", pytrace=False)
        mark.touch()
    marker = item.get_closest_marker("gpu")
    if marker is None:
        return
    wanted = marker.args[0] if marker.args else 1
    if gpu_count() >= wanted:
        return
    reason = f"needs {wanted} CUDA device{'s' if wanted > 1 else ''}, found {gpu_count()}"
    if int(os.environ.get("TORCH_CUBIN_REQUIRE_GPU") or 0) >= wanted:
        pytest.fail(f"{reason} (TORCH_CUBIN_REQUIRE_GPU is set)", pytrace=False)
    pytest.skip(reason)


def pytest_runtest_logfinish(nodeid: str) -> None:
    if _WORKER:
        _mark_of(nodeid).unlink(missing_ok=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    """Says it with each report: a worker's last words may never arrive."""
    report = yield
    report.of_a_whole_run = _run["whole"]
    return report


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_node_collection_finished(ids: list[str]) -> None:
    """Every worker collects all tests; the process that hands them out collects none."""
    _run["waiting"] = _run["waiting"] or set(ids)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.failed or report.skipped:
        _count(report)
    if report.when == "teardown":
        _run["kernels"].update(*(v for name, v in report.user_properties if name == "kernels"))
    if report.when == "teardown" and report.nodeid in _run["waiting"]:
        _run["waiting"].remove(report.nodeid)
        # Now, not at the run's end: that waits for the ends of all processes, and may be killed.
        if not _run["waiting"] and report.of_a_whole_run and gpu_count():
            counts, cases = dict(_run["counts"]), dict(_run["fault_cases"])
            record.write(ROOT, counts, cases, _run["kernels"])


def _count(report: pytest.TestReport) -> None:
    cases = [value for name, value in report.user_properties if name == "fault_case"]
    if cases and "TORCH_CUBIN_FAULT_CASES" in os.environ and not hasattr(report, "node"):
        line = {"cases": cases, "test": report.nodeid, "outcome": report.outcome}
        line["gpu"] = "gpu" in report.keywords
        with open(os.environ["TORCH_CUBIN_FAULT_CASES"], "a") as file:
            file.write(json.dumps(line) + "\n")
    if "gpu" not in report.keywords:
        return
    _run["counts"][report.outcome] += 1
    if report.passed:
        _run["fault_cases"].update(cases)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reasons = Counter(
        str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        for report in terminalreporter.stats.get("skipped", [])
        if "gpu" in getattr(report, "keywords", ())
    )
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(
            f"GPU tests not run: {count}: {reason.removeprefix('Skipped: ')}", yellow=True
        )
    if _run["counts"] or _run["for_gpus"]:  # tests start many runs, to which it says nothing
        terminalreporter.write_line(record.describe(ROOT))
        terminalreporter.write_line(sanitized.describe(ROOT))
    if waiting := sorted(_run["waiting"]):  # ended early, as by tools/gpu_tests.py at a time limit
        terminalreporter.write_line(f"{len(waiting)} tests have not ended:", red=True)
        for test in waiting[:SHOWN]:
            terminalreporter.write_line(f"  {test}")
    if "CI_BEGAN" in os.environ:  # by .ci/run
        seconds = round(time.time()) - int(os.environ["CI_BEGAN"])
        late = seconds > CI_LIMIT - 100
        terminalreporter.write_line(f"CI: {seconds} s of at most {CI_LIMIT} s", red=late)
