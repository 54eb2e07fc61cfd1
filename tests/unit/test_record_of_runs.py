"""When tests/conftest.py writes the record of a run: a whole one, whatever becomes of its end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gpu import record

TESTS = Path(__file__).resolve().parents[1]

TORCH = """
from types import SimpleNamespace
__version__ = "2.11"
properties = SimpleNamespace(name="G", major=9, minor=0)
cuda = SimpleNamespace(
    is_available=lambda: True, device_count=lambda: 1, get_device_properties=lambda i: properties)
"""
PLUGIN = """
import os, time
def pytest_sessionfinish(session):
    if os.environ.get("HANG") == ("worker" if hasattr(session.config, "workerinput") else "main"):
        time.sleep(100)
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with the conftest of this one, two files of tests, and a torch that sees a GPU."""
    (tmp_path / "tests" / "gpu").mkdir(parents=True)
    for name in ("conftest.py", "preloaded.py", "gpu/record.py", "gpu/sanitized.py"):
        shutil.copy(TESTS / name, tmp_path / "tests" / name)
    (tmp_path / ".gitignore").touch()
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "torch.py").write_text(TORCH)
    (tmp_path / "plugins" / "hangs.py").write_text(PLUGIN)
    text = "def test_a(record_property): record_property('kernels', ['one', 'old'])\n"
    text += "def test_b(): pass\n"
    (tmp_path / "tests" / "gpu" / "test_one.py").write_text(text)
    cubins = tmp_path / "torch_cubin" / "cubins"
    cubins.mkdir(parents=True)
    archs = {"one": "sm_90a", "two": "sm_90", "three": "sm_80", "four": "sm_90a"}
    kernels = [{"name": name, "arch": arch} for name, arch in archs.items()]
    (cubins / "manifest.json").write_text(json.dumps({"kernels": kernels}))
    text = "import os, pytest\ndef test_c(): assert 'CRASH' not in os.environ or os._exit(1)\n"
    text += "@pytest.mark.skip\ndef test_d(): pass\n@pytest.fixture(scope='module')\n"
    text += "def late(request):\n  yield\n  request.session.items[-1].user_properties.append("
    text += "('kernels', ['two']))\ndef test_e(late): assert 'FAIL' not in os.environ\n"
    (tmp_path / "tests" / "gpu" / "test_two.py").write_text(text)
    return tmp_path


def run(tree: Path, *options: str, wait: bool = True, **environment: str) -> dict | None:
    """What the record says after a run; without `wait`, of one that is killed once it is there."""
    names = [name for name in os.environ if name.startswith(("PYTEST", "TORCH_CUBIN"))]
    environment = {**os.environ, **environment, "PYTHONPATH": str(tree / "plugins")}
    for name in names:
        environment.pop(name, None)
    # Other packages' plugins are not needed; hypothesis's alone takes as long as such a run.
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "hangs", "-q"]
    command += ["--rootdir", str(tree), *options]
    path = tree / record.RECORD
    with (tree / "output").open("w") as output:
        process = subprocess.Popen(
            command, cwd=tree, env=environment, stdout=output, start_new_session=True
        )
    try:
        end = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < end and (wait or not path.is_file()):
            time.sleep(0.05)
        assert (process.poll() is not None) == wait
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return json.loads(path.read_text()) if path.is_file() else None


PARALLEL = ("-p", "xdist", "-n2", "--dist", "loadfile")


@pytest.mark.parametrize("options", [(), PARALLEL], ids=["one process", "two"])
def test_a_whole_run_is_recorded(tree: Path, options: tuple[str, ...]) -> None:
    found = run(tree, *options, "tests/gpu")
    assert found is not None
    assert [found[name] for name in ("passed", "failed", "skipped")] == [4, 0, 1]
    # Of the kernels for this GPU, which none has launched: tests say it, and a file's end does.
    assert found["kernels"] == {"built": 3, "not_run": ["four"]}
    assert "2 of the package's 3 kernels run" in record.describe(tree)
    found = run(tree, *options, "tests/gpu", FAIL="1")
    assert found is not None
    assert [found[name] for name in ("passed", "failed", "skipped")] == [3, 1, 1]


@pytest.mark.parametrize(
    ("options", "hangs"), [((), "main"), (PARALLEL, "main"), (PARALLEL, "worker")]
)
def test_the_record_does_not_wait_for_the_end_of_the_run(
    tree: Path, options: tuple[str, ...], hangs: str
) -> None:
    """All tests have reported; then the run is killed."""
    found = run(tree, *options, "tests/gpu", wait=False, HANG=hangs)
    assert found is not None
    assert found["passed"] == 4


@pytest.mark.parametrize(
    "selection",
    [
        *[("-k", "not test_a", "tests/gpu"), ("tests/gpu", "--deselect", "tests/gpu/test_one.py")],
        *[("tests/gpu/test_one.py",), ("tests/gpu/test_one.py::test_a", "tests/gpu/test_two.py")],
        *[("--collect-only", "tests/gpu"), ("--setup-only", "tests/gpu")],
        *[(*PARALLEL, "-k", "not test_a", "tests/gpu"), (*PARALLEL, "tests/gpu/test_one.py")],
    ],
    ids=" ".join,
)
def test_a_partial_run_is_not_recorded(tree: Path, selection: tuple[str, ...]) -> None:
    assert run(tree, *selection) is None


@pytest.mark.parametrize(
    ("options", "environment"),
    [(("-x",), {"FAIL": "1"}), ((), {"CRASH": "1"})],
    ids=["stopped", "crash"],
)
def test_a_run_that_ends_early_is_not_recorded(
    tree: Path, options: tuple[str, ...], environment: dict[str, str]
) -> None:
    (tree / "tests" / "gpu" / "test_zzz.py").write_text("def test_z(): pass\n")
    assert run(tree, *options, "tests/gpu", **environment) is None
    if options:  # and names the tests that have not ended
        assert "tests have not ended:\n  tests/gpu/test_" in (tree / "output").read_text()


def test_a_test_that_ends_its_process_fails_once_and_the_others_go_on(tree: Path) -> None:
    # -rN: pytest's summary repeats the line, cut to the terminal's width, but whole where CI is
    # set.
    found = run(tree, *PARALLEL, "-rN", "tests/gpu", CRASH="1")
    assert found is not None
    assert [found[name] for name in ("passed", "failed", "skipped")] == [3, 1, 1]
    output = (tree / "output").read_text()
    assert output.count("crashed while running 'tests/gpu/test_two.py::test_c'") == 1
