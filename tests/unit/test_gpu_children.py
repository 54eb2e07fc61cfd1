"""The order of the GPU tests, and which of their child processes are started."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from preloaded import PreloadedPython

ROOT = Path(__file__).resolve().parents[2]

# Collects as one of several processes, starts the children of the collected tests, and runs none.
PLUGIN = """
import concurrent.futures, sys, pytest

class Pool:
    def submit(self, run, *arguments):
        print("child", *arguments)

def pytest_configure(config):
    if "worker" in sys.argv:
        config.workerinput, config.workeroutput = {"workerid": "gw0"}, {}

@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    (conftest,) = [m for m in list(sys.modules.values())
                   if str(getattr(m, "__file__", "")).endswith("tests/gpu/conftest.py")]
    conftest._pool = Pool()
    conftest._start_children(items)
    for item in items:
        print("test", item.path.stem, item.get_closest_marker("child") is not None)
"""


def collected(
    python: PreloadedPython, folder: Path, worker: bool, *names: str, **environment: str
) -> list[list[str]]:
    """The words of the lines above, for these files of tests/gpu."""
    (folder / "starts.py").write_text(PLUGIN)
    code = f"import sys, pytest; sys.path[:0] = [{str(folder)!r}]; "
    code += "sys.exit(pytest.main(sys.argv[1 + ('worker' in sys.argv) :]))"
    command = ["-c", *(["worker"] if worker else [])]
    command += ["--collect-only", "-qq", "-s", "-p", "no:cacheprovider"]
    command += ["-p", "starts", *(f"tests/gpu/test_cuda_{name}.py" for name in names)]
    kept = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    kept.pop("TORCH_CUBIN_SLOW_TESTS", None)
    kept["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    printed = python.output(code, argv=command, env={**kept, **environment}, cwd=ROOT)
    return [line.split() for line in printed.splitlines() if line[:5] in ("child", "test ")]


def test_children_of_skipped_tests_are_not_started(tmp_path: Path, torch_python) -> None:
    lines = collected(torch_python, tmp_path, True, "sanitizer")
    assert ["child", "sanitize", "memcheck"] in lines
    assert ["child", "sanitize", "initcheck"] not in lines
    lines = collected(torch_python, tmp_path, True, "sanitizer", TORCH_CUBIN_SLOW_TESTS="1")
    assert ["child", "sanitize", "initcheck"] in lines


@pytest.mark.parametrize("worker", [True, False])
def test_tests_that_wait_for_children_run_late(tmp_path: Path, torch_python, worker: bool) -> None:
    names = ("streams", "examples", "capture")
    lines = collected(torch_python, tmp_path, worker, *names)
    tests = [line[1:] for line in lines if line[0] == "test"]
    waits = [waiting == "True" for _, waiting in tests]
    if not worker:
        assert waits == sorted(waits)
        return
    order = list(dict.fromkeys(name.removeprefix("test_cuda_") for name, _ in tests))
    assert order == ["examples", "capture", "streams"], "those that take longest come first"
    for name in names:
        of_file = [w for (file, _), w in zip(tests, waits, strict=True) if file.endswith(name)]
        assert of_file[:-2] == sorted(of_file[:-2])
        assert of_file[-2:] == [False, False]
