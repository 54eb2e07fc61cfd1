"""What a process may be when the package is used: locale, folder, other copies, interpreters."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import contracts
import pytest
from preloaded import PreloadedPython
from programs import output_of

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"


@pytest.fixture
def forked(torch_python: PreloadedPython) -> Callable[..., list[str]]:
    """What a process prints that does not end as an interpreter does."""

    def run(script: str, *, env: dict[str, str] | None = None) -> list[str]:
        path = [str(ROOT), str(TESTS), *sys.path]
        printed = torch_python.output(
            script, path=path, env={**os.environ, **(env or {})}, cwd=ROOT
        )
        return printed.splitlines()

    return run


def run(script: str, *folders: Path, env: dict[str, str] | None = None) -> list[str]:
    """What a process of its own prints, which must end well; `folders` come first on its path."""
    paths = os.pathsep.join(map(str, folders or (ROOT, TESTS)))
    printed = output_of(
        [sys.executable, "-c", script],
        timeout=300,
        env=dict(os.environ, PYTHONPATH=paths, **(env or {})),
        cwd=ROOT,
    )
    return printed.splitlines()


DEFAULTS = {
    "0.25": 0.25,
    "-0.25": -0.25,
    "1.": 1.0,
    ".5": 0.5,
    "1.5e3": 1500.0,
    "1e-3": 0.001,
    "0.1": 0.1,
    "1.7976931348623157e308": 1.7976931348623157e308,
    "3": 3.0,
}
FLOATS = """
import locale
if {name!r}:
    locale.setlocale(locale.LC_ALL, {name!r})
    assert locale.localeconv()["decimal_point"] == ","
import contracts, torch
contract = contracts.vec_add("test_locale::op")
arguments = "".join(f", float f{{i}}={{text}}" for i, text in enumerate({defaults!r}))
contract["schema"] = f"test_locale::op(Tensor x, Tensor y{{arguments}}, float? g=0.75) -> Tensor"
contract["kernels"][0]["grid"][0] = ["select", ["lt", ["number", "f0"], 0.5], 1, 2]
(answer,) = contracts.define(contract)
print(answer["schema"])
for argument in torch.ops.test_locale.op.default._schema.arguments[2:]:
    print(argument.default_value)
"""


@pytest.mark.fault_case(45)
@pytest.mark.parametrize("name", ["", "de_DE.UTF-8"])
def test_defaults_of_floats_in_every_locale(name: str, tmp_path: Path, forked) -> None:
    environment = {}
    if name:
        if shutil.which("localedef") is None or not Path("/usr/share/i18n/locales/de_DE").is_file():
            pytest.skip("this system cannot make the locale de_DE.UTF-8")
        made = ["localedef", "-i", "de_DE", "-f", "UTF-8", str(tmp_path / name)]
        subprocess.run(made, check=True)
        environment["LOCPATH"] = str(tmp_path)
    schema, *found = forked(FLOATS.format(name=name, defaults=list(DEFAULTS)), env=environment)
    assert [float(text) for text in found] == [*DEFAULTS.values(), 0.75]
    assert "float f0=0.25" in schema  # as it was written


GONE = """
import os, tempfile
import torch_cubin
from torch_cubin import embed, errors
folder = tempfile.mkdtemp()
os.chdir(folder)
os.rmdir(folder)
def tag(function, *arguments):
    try:
        function(*arguments)
    except errors.Error as error:
        return error.tag
    return "none"
print(tag(torch_cubin.load, "a.cubin"), tag(torch_cubin.inspect, "a.cubin"))
print(tag(torch_cubin.load_package, "a"), tag(torch_cubin.load_package, "."))
print(tag(embed.write_unit, "u.c", [{cubin!r}]))
print(torch_cubin.load({cubin!r})["vec_add"].name)
"""


@pytest.mark.fault_case(45)
def test_a_deleted_working_directory(forked) -> None:
    lines = forked(GONE.format(cubin=str(contracts.SEVERAL)))
    assert lines == ["file file", "file file", "file", "vec_add"]


TWO = """
import sys
import torch, torch_cubin
first = torch_cubin.__file__
for name in [name for name in sys.modules if name.split(".")[0] == "torch_cubin"]:
    del sys.modules[name]
sys.path.insert(0, {other!r})
try:
    import torch_cubin
except ImportError as error:
    print(str(error).startswith("torch_cubin [file]: "), first.rpartition("/")[0] in str(error))
print(torch.ops.cubin.matmul(torch.eye(2), torch.eye(2)).tolist())
"""


def test_a_second_copy_is_refused(tmp_path: Path, forked) -> None:
    ignored = shutil.ignore_patterns("cubins", "__pycache__")
    shutil.copytree(ROOT / "torch_cubin", tmp_path / "torch_cubin", ignore=ignored)
    lines = forked(TWO.format(other=str(tmp_path)))
    assert lines == ["True True", "[[1.0, 0.0], [0.0, 1.0]]"]


UNBUILT = """
import os, sys
sys.path[:] = [{clone!r}, *(x for x in sys.path if not os.path.exists(x + "/torch_cubin/_C.so"))]
sys.path += {behind!r}
try:
    import torch_cubin
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize("installed", [True, False])
def test_sources_that_are_not_built_name_the_installed_package_that_they_hide(
    installed: bool, tmp_path: Path, forked
) -> None:
    ignored = shutil.ignore_patterns("cubins", "__pycache__", "*.so")
    shutil.copytree(ROOT / "torch_cubin", tmp_path / "torch_cubin", ignore=ignored)
    behind = [str(ROOT)] if installed else []
    (text,) = forked(UNBUILT.format(clone=str(tmp_path), behind=behind))
    library = tmp_path / "torch_cubin" / "_C.so"
    assert text.startswith(f"torch_cubin [file]: library '{library}' is missing: expected ")
    assert (str(ROOT / "torch_cubin") in text) == installed


SUB = """
import importlib
import {before}
try:
    interpreters = importlib.import_module("_interpreters")
    execute = interpreters.exec
except ImportError:
    interpreters = importlib.import_module("_xxsubinterpreters")
    execute = interpreters.run_string
script = '''
try:
    import torch_cubin
except ImportError as error:
    text = str(error)
else:
    text = ""
assert text.startswith("torch_cubin [internal]: torch_cubin cannot be imported"), text
import sys
assert "torch" not in sys.modules
'''
sub = interpreters.create()
failure = execute(sub, script)
assert not failure, failure
interpreters.destroy(sub)
print("done")
"""


@pytest.mark.parametrize("before", ["torch_cubin", ""])
def test_a_subinterpreter_is_refused_and_the_process_ends_well(before: str) -> None:
    if sys.version_info >= (3, 15):
        pytest.skip("interpreters have another module there")
    assert run(SUB.format(before=before or "sys")) == ["done"]


def test_import_makes_nothing_on_the_default_device(forked) -> None:
    """It would start CUDA, and no process could be forked from then on."""
    script = """
import torch
torch.set_default_device("cuda")
import torch_cubin
print(torch.cuda.is_initialized())
torch.set_default_device("meta")
with torch_cubin.drop_in():
    layer = torch.nn.Linear(3, 3, device="cpu")
    x = torch.ones(2, 3, device="cpu", requires_grad=True)
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).sum().backward()
print(x.grad.device)
"""
    assert forked(script) == ["False", "cpu"]


ELSEWHERE = """
import os, sys
sys.path.insert(0, os.fsdecode({folder!r}))
import torch, torch_cubin
print(os.fsencode(torch_cubin.__file__).startswith({folder!r}))
torch_cubin.install().remove()
print(torch.ops.cubin.matmul(torch.eye(2), torch.eye(2)).tolist())
"""


def test_a_package_whose_path_is_not_utf_8(tmp_path: Path, forked) -> None:
    """PyTorch's registry takes no such name of the file that registers."""
    folder = os.fsencode(tmp_path) + b"/\xff"
    os.mkdir(folder)
    os.symlink(os.fsencode(ROOT / "torch_cubin"), folder + b"/torch_cubin")
    assert forked(ELSEWHERE.format(folder=folder)) == ["True", "[[1.0, 0.0], [0.0, 1.0]]"]
