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
x = torch.ones(1, 2, 1, 8)
assert torch.equal(ours.flash_attn_func(x, x, x), x) and ours.flash_attn_varlen_func
assert ours.flash_attn_with_kvcache
assert get_local_kernel(path, backend="cpu") is ours
"""


# Layers of a model, as transformers decorates its own; the forward of each on its own first.
LAYERS = """
class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.rand(8)), 1e-3
    def forward(self, hidden_states):
        return F.rms_norm(hidden_states, (8,), self.weight, self.variance_epsilon)

class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 16, bias=False), nn.Linear(8, 16, bias=False)
        self.down_proj = nn.Linear(16, 8)
    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

class Layer(nn.Linear):
    pass

NAMES = {"RMSNorm": Norm, "SwiGLUMLP": MLP, "Linear": Layer}
torch.manual_seed(0)
x, eager = torch.randn(3, 8), {}
"""
KERNELIZE = """
from kernels import Mode, LocalLayerRepository, kernelize, use_kernel_forward_from_hub
from kernels import use_kernel_mapping
mapping = {}
for name, cls in NAMES.items():
    use_kernel_forward_from_hub(name)(cls)
    mapping[name] = {"cpu": {
        mode | Mode.TORCH_COMPILE: LocalLayerRepository(path, layer_name=name)
        for mode in (Mode.INFERENCE, Mode.TRAINING)
    }}
model = nn.Sequential(Norm(), MLP(), Layer(8, 4))
wanted = model(x)
with use_kernel_mapping(mapping):
    model = kernelize(model, mode=Mode.TRAINING, device="cpu", use_fallback=False)
forwards = [layer.forward.__func__ for layer in model]
assert forwards == [getattr(ours.layers, name).forward for name in NAMES], forwards
torch.testing.assert_close(model(x), wanted)
"""
REPLACED = """
ours = get_local_kernel(path, backend="cpu")
for name, make in (("RMSNorm", Norm), ("SwiGLUMLP", MLP), ("Linear", lambda: Layer(8, 4))):
    layer = make()
    wanted = layer(x)
    layer.forward = types.MethodType(getattr(ours.layers, name).forward, layer)
    torch.testing.assert_close(layer(x), wanted)
    layer(x).sum().backward()
for changes in (
    lambda gate: gate.register_forward_hook(lambda module, args, out: 2 * out),
    lambda gate: gate.register_forward_pre_hook(lambda module, args: (2 * args[0],)),
    lambda gate: setattr(gate, "forward", lambda x: 2 * F.linear(x, gate.weight)),
):
    layer = MLP()
    changes(layer.gate_proj)
    wanted = layer(x)
    torch.testing.assert_close(types.MethodType(ours.layers.SwiGLUMLP.forward, layer)(x), wanted)
norm = Norm().bfloat16()
assert types.MethodType(ours.layers.RMSNorm.forward, norm)(x).dtype == torch.float32
"""
IMPORTS = """
import importlib.util, json, sys, torch, types
import torch.nn.functional as F
from pathlib import Path
from torch import nn
"""


@pytest.mark.parametrize("importer", ["kernels", "alike"])
def test_it_loads_from_a_local_folder(hub, wheel, tmp_path, importer, torch_python) -> None:
    # Not by import: tools/kernels.py has that name, too.
    if importer == "kernels" and not list(importlib.metadata.distributions(name="kernels")):
        pytest.skip("needs `pip install kernels`")
    hub.lay_out(wheel, tmp_path, ["cpu"])
    loads = IMPORTER if importer == "alike" else "from kernels import get_local_kernel\n"
    code = f"{IMPORTS}{loads}{USE}{LAYERS}{REPLACED}"
    if importer == "kernels":
        code += KERNELIZE
    paths = [
        path for path in sys.path if path and Path(path).resolve() not in (ROOT, ROOT / "tools")
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    torch_python.output(code, argv=["-c", str(tmp_path)], env=environment, cwd=tmp_path, path=paths)
