"""tools/gpu_tests.py where its run is ended early."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
SLOW = """
def test_first():
    pass

def test_wrong():
    assert False, "seen before the end"

def test_slow():
    import time
    print("begun", file=open({begun!r}, "w"), flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize(
    "sigint", [signal.SIG_DFL, signal.SIG_IGN], ids=["foreground", "background"]
)
@pytest.mark.parametrize("group", [False, True], ids=["process", "group"])
def test_pytest_reports_what_it_has_when_the_run_is_ended(
    tmp_path: Path, group: bool, sigint: signal.Handlers
) -> None:
    """`timeout 300 python tools/gpu_tests.py` sends its signal to the whole group. A shell's
    background jobs ignore SIGINT."""
    (tmp_path / "test_some.py").write_text(SLOW.format(begun=str(tmp_path / "begun")))
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", str(tmp_path)]
    script = f"import signal, sys; signal.signal(signal.SIGINT, {int(sigint)})\n"
    script += f"sys.path.insert(0, {str(TOOLS)!r})\n"
    script += f"import gpu_tests; sys.exit(gpu_tests.run({words!r}))"
    command = [sys.executable, "-c", script]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # their import takes longer
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    while not (tmp_path / "begun").is_file():
        assert process.poll() is None
        time.sleep(0.05)
    (os.killpg if group else os.kill)(process.pid, signal.SIGTERM)
    output = process.communicate(timeout=50)[0]
    assert "seen before the end" in output
    assert "1 failed, 1 passed" in output
