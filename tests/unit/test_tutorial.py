"""docs/your_own_kernel.md, as far as it goes without a GPU."""

from __future__ import annotations

import re
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import tutorial

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a GPU is here: tests/gpu/test_cuda_examples.py runs it all"
)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc, found none")
def test_every_step_of_the_tutorial_runs(tmp_path: Path, torch_python) -> None:
    """In a process of its own: it defines ops. Then the wheel, alone in another."""
    code = f"import tutorial; print(tutorial.run({str(tmp_path)!r}, gpu=False))"
    assert "{'cuda': 1, 'sh': 3, 'python': 4, 'python file': 2}" in torch_python.output(code)
    (wheel,) = tmp_path.glob("mine-*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    code = "import mine, torch; print(mine.silu, torch.ops.mine.silu_backward.default)"
    printed = torch_python.output(code, path=[str(site), *sys.path], cwd="/")
    assert printed.startswith("<torch_cubin.Op 'mine::silu(Tensor x) -> Tensor'>")


def test_the_committed_cubin_is_of_this_source() -> None:
    (source,) = (text for language, _, text in tutorial.steps() if language == "cuda")
    assert source.split("\n", 1)[1] == Path(f"{tutorial.KERNEL}.cu").read_text()


def test_nothing_names_a_package_or_a_page_that_does_not_exist() -> None:
    """torch_cubin is not on PyPI: a bare requirement could be somebody else's package."""
    pages = [tutorial.PAGE, tutorial.ROOT / "torch_cubin" / "embed.py"]
    pages += (tutorial.ROOT / "examples").rglob("setup.py")
    for page in pages:
        for requirement in re.findall(r"^ *install_requires=\[(.*?)\]", page.read_text(), re.M):
            assert "torch_cubin" not in requirement or "torch_cubin @ " in requirement, page
    found = (tutorial.ROOT / "torch_cubin" / "lib" / "pkgconfig" / "torch_cubin.pc").read_text()
    assert "URL" not in found
