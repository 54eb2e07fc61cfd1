"""`make hub`: the layout of a kernel of Hugging Face's hub, loaded by the library `kernels`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "torch_cubin"


@pytest.fixture(scope="module")
def hub():
    spec = importlib.util.spec_from_file_location("hub", ROOT / "tools" / "hub.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the wheel contains, of this checkout, without most kernels."""
    name = f"torch_cubin-0.1.0-py3-none-linux_{platform.machine()}.whl"
    path = tmp_path_factory.mktemp("wheel") / name
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(PACKAGE.rglob("*")):
            name = file.relative_to(ROOT)
            if file.is_file() and "__pycache__" not in name.parts and "cubins" not in name.parts:
                archive.write(file, name)
        for file in sorted((PACKAGE / "cubins").rglob("*.json")):
            archive.write(file, file.relative_to(ROOT))
        archive.writestr("torch_cubin/cubins/sm_90a/one.cubin", b"")
        archive.writestr("torch_cubin-0.1.0.dist-info/METADATA", "")
    return path


def test_the_layout_names_what_kernels_asks_for(hub, wheel, tmp_path) -> None:
    folders = hub.lay_out(wheel, tmp_path, ["cu126", "cu130"])
    machine = platform.machine()
    assert [folder.name for folder in folders] == [
        f"torch-stable-abi211-{backend}-{machine}-linux" for backend in ("cu126", "cu130")
    ]
    facts = json.loads((folders[0] / "metadata.json").read_text())
    assert facts["name"] == "torch-cubin"
    assert "9.0a" in facts["backend"]["archs"]
    assert not list(folders[0].glob("*.dist-info"))


def test_a_file_that_is_no_wheel_for_linux_is_refused(hub, tmp_path) -> None:
    with pytest.raises(SystemExit, match="expected a wheel for Linux"):
        hub.lay_out(tmp_path / "torch_cubin-0.1.0-py3-none-any.whl", tmp_path, ["cu130"])


# As `kernels` 0.17 does it (kernels/importer.py). The library is not among the tests' packages,
# because with it transformers would look for kernels on the hub.
IMPORTER = """
def get_local_kernel(path, backend):
    (folder,) = (path / "build").iterdir()
    name = json.loads((folder / "metadata.json").read_text())["id"]
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
"""
USE = """
path = Path(sys.argv[1])
ours = get_local_kernel(path, backend="cpu")
import torch_cubin
assert torch_cubin.__file__.startswith(sys.argv[1]), torch_cubin.__file__
a = torch.ones(2, 3)
with ours.drop_in():
    assert (a @ a.t()).sum() == 12
assert ours.report().served and ours.define_op and ours.ops
assert get_local_kernel(path, backend="cpu") is ours
"""


@pytest.mark.parametrize("importer", ["kernels", "alike"])
def test_it_loads_from_a_local_folder(hub, wheel, tmp_path, importer, torch_python) -> None:
    # Not by import: tools/kernels.py has that name, too.
    if importer == "kernels" and not list(importlib.metadata.distributions(name="kernels")):
        pytest.skip("needs `pip install kernels`")
    hub.lay_out(wheel, tmp_path, ["cpu"])
    loads = IMPORTER if importer == "alike" else "from kernels import get_local_kernel\n"
    code = f"import importlib.util, json, sys, torch\nfrom pathlib import Path\n{loads}{USE}"
    paths = [
        path for path in sys.path if path and Path(path).resolve() not in (ROOT, ROOT / "tools")
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    run = torch_python.run(
        code, argv=["-c", str(tmp_path)], env=environment, cwd=tmp_path, path=paths
    )
    assert run.returncode == 0, run.stderr
