"""The README stays a first screen, its links lead somewhere, and every variable is explained."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import torch_cubin

ROOT = Path(__file__).resolve().parents[2]
VARIABLE = re.compile(r'(?:environ\b[^"\n]{0,12}|getenv\()"(TORCH_CUBIN_\w+)"')


def test_readme_is_a_first_screen() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_the_first_example_runs(torch_python) -> None:
    """As written, on tensors without memory; in its own process: install() stays."""
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    before = "import torch\nmodel, x = torch.relu, torch.zeros(2)\n"
    after = "assert c.shape == (4096, 4096)\nassert o.shape == (4, 16, 2048, 128)\n"
    program = before + code.replace('"cuda"', '"meta"') + after
    torch_python.output(program)


def test_the_kernel_of_the_readme_becomes_an_op(tmp_path: Path, monkeypatch) -> None:
    """As written, but for the launch and the name of the op, which lives as long as the process."""
    first, _, page = (ROOT / "README.md").read_text().partition("## A kernel of your own")
    op = re.search(r"```python\n(vec_add = .*?)```", first, re.DOTALL)[1]
    source = re.search(r"```cuda\n(// vec_add.cu: (nvcc [^(]*) \(.*?)```", page, re.DOTALL)
    steps = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    monkeypatch.chdir(tmp_path)
    Path("vec_add.cu").write_text(source[1])
    subprocess.run(shlex.split(source[2]), check=True)
    text = re.sub(r"^(x, y, z =|kernel\().*\n", "", op + steps, flags=re.M)
    names: dict = {"torch": torch, "torch_cubin": torch_cubin}
    exec(text.replace("mylib::", "of_the_readme::"), names)
    x = torch.empty(3, 4, device="meta")
    assert names["vec_add"](x, x).shape == (3, 4)
    assert Path("kernels/manifest.json").is_file()


def test_the_page_of_ops_explains_every_environment_variable() -> None:
    sources = [ROOT / "setup.py"]
    for folder in ("torch_cubin", "csrc", "tests"):
        sources += [p for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".cpp", ".h")]
    read = {name for path in sources for name in VARIABLE.findall(path.read_text())}
    explained = set(
        re.findall(r"^\| `(TORCH_CUBIN_\w+)` \|", (ROOT / "docs/ops.md").read_text(), re.M)
    )
    assert len(read) > 6
    assert read - explained == set()
