"""Fixtures of the tests that run on the stand-in driver (fake_*.py: see test_faults.py)."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

DATA = Path(__file__).resolve().parents[1] / "data"


@pytest.fixture(scope="session")
def driver():
    """The stand-in driver, with CPU tensors standing for those of its device 0."""
    from fake_driver.control import FakeDriver

    from torch_cubin._kernels import arguments, global_memory, tensor_map
    from torch_cubin._native import launcher

    ctypes.CDLL("libtorch_cuda.so", mode=ctypes.RTLD_GLOBAL)
    arguments.DEVICE_TYPE = "cpu"
    tensor_map.DEVICE_TYPES = ("cpu", "cuda")
    global_memory.DEVICE_TYPE = 1  # DLPack's number for the CPU
    if launcher.Launcher is not launcher.PlainLauncher:
        from torch_cubin import _launch

        launcher.configure(_launch, "CPU")
    return FakeDriver()


@pytest.fixture(autouse=True)
def clean(request: pytest.FixtureRequest):
    """Nothing recorded or failing at the start; no rule of the driver broken at the end."""
    if not request.path.name.startswith("fake_"):  # test_faults.py, which has the real driver
        yield
        return
    driver = request.getfixturevalue("driver")
    driver.reset()
    yield
    assert driver.violations() == []


@pytest.fixture
def several(driver):
    """A fresh module with vec_add, structs, small, cluster and more."""
    import torch_cubin

    module = torch_cubin.load(DATA / "several.sm_90a.cuda130.cubin")
    driver.declare(module)
    return module


@pytest.fixture
def vec_add(several):
    return several["vec_add"]


@pytest.fixture
def declared(driver, clean) -> None:
    """The kernels that the contracts of contract_calls.py name."""
    from contract_calls import declare

    declare(driver)


@pytest.fixture
def catalog(driver) -> None:
    """The stand-in knows the kernels of products."""
    from faults import catalogs

    catalogs.declare(driver, catalogs.kernels_of("matmul"))


@pytest.fixture
def attention_catalog(driver, tmp_path, monkeypatch) -> dict[str, dict]:
    """Installs the attention kernels for Hopper; these by name."""
    from faults import catalogs

    kernels = catalogs.kernels_of("attention")
    catalogs.install(driver, tmp_path, monkeypatch, kernels)
    return {kernel["name"]: kernel for kernel in kernels}
