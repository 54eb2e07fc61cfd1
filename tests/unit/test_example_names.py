"""Names in examples/: `python examples/x.py` puts that folder first of all where imports look."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
# Where torch imports what it can do without, and where transformers lists that.
FILES = {
    "torch": ("_dynamo/**/*.py", "_inductor/**/*.py", "utils/*.py"),
    "transformers": ("utils/import_utils.py",),
}
# transformers asks for a package `kernels` by its version, so a folder without one is none to it.
HARMLESS = {("transformers", "kernels")}
IMPORT = rb"^[ \t]*(?:from|import)[ \t]+(\w+)|_is_package_available\(\"(\w+)"


@pytest.mark.parametrize("package", FILES)
def test_no_example_has_the_name_of_a_package_that_is_imported(package: str) -> None:
    """Even a folder without Python in it: imported, it is an empty package."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"needs {package}")
    taken = {
        name.decode()
        for pattern in FILES[package]
        for file in Path(spec.origin).parent.glob(pattern)
        for names in re.findall(IMPORT, file.read_bytes(), re.M)
        for name in names
    }
    assert {"torch", "triton"} <= taken | {"triton" * (package == "transformers")}
    names = {path.stem for path in EXAMPLES.iterdir() if path.name != "__pycache__"}
    assert {name for name in names & taken if (package, name) not in HARMLESS} == set()


def test_an_example_runs_as_a_program(torch_python) -> None:
    """Its optimizer imports torch._dynamo, which looks for Triton."""
    script = EXAMPLES / "train_transformer.py"
    argv = [str(script), "--device", "cpu", "--steps", "1", "--plot", os.devnull]
    path = [str(EXAMPLES), *sys.path]
    done = torch_python.run(script.read_text(), argv=argv, path=path)
    assert "Traceback" not in done.stderr, done.stderr
    assert "1 steps in torch.float32 on cpu" in done.stdout, done.stderr
