"""What the built library asks of the system, and what it shows to others, read from its ELF file.

Nothing of CUDA or Python may be linked: that is what lets one file serve every torch and Python.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "torch_cubin" / "_C.so"
EXTENSION = ROOT / "torch_cubin" / "_launch.abi3.so"

spec = importlib.util.spec_from_file_location("portability", ROOT / "tools" / "portability.py")
portability = importlib.util.module_from_spec(spec)
spec.loader.exec_module(portability)

needs_readelf = pytest.mark.skipif(
    shutil.which("readelf") is None, reason="readelf (binutils) is not installed"
)
pytestmark = pytest.mark.skipif(not LIBRARY.is_file(), reason="not a built checkout")


@needs_readelf
def test_links_nothing_of_cuda_and_nothing_of_python():
    allowed = {
        *("libtorch.so", "libtorch_cpu.so", "libc10.so"),
        *("libstdc++.so.6", "libgcc_s.so.1", "libm.so.6", "libdl.so.2", "libc.so.6"),
        *("ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1", "libpthread.so.0"),
    }
    needed = set(portability.needed(LIBRARY))
    assert "libc.so.6" in needed, "readelf's output was not understood"
    assert needed <= allowed
    for name in ("libcuda", "libcudart", "libtorch_cuda", "libtorch_python", "libpython"):
        assert not [library for library in needed if library.startswith(f"{name}.")]


@needs_readelf
def test_carries_no_search_path_of_the_build_machine():
    assert not re.findall(r"\((?:RPATH|RUNPATH)\).*", portability.readelf(LIBRARY, "--dynamic"))


@needs_readelf
def test_exports_the_c_functions_and_nothing_else():
    exported = portability.exported(LIBRARY)
    assert exported
    ours = ("torch_cubin_", "aoti_torch_cubin_")  # the latter: what compiled graphs call
    assert [name for name in exported if not name.startswith(ours)] == []


def test_exports_what_python_calls():
    source = (ROOT / "torch_cubin" / "_native" / "library.py").read_text()
    wanted = set(re.findall(r"\.(torch_cubin_\w+)", source))
    assert wanted
    import torch  # noqa: F401  (its libraries, which _C.so needs)

    library = ctypes.CDLL(str(LIBRARY))
    assert [name for name in sorted(wanted) if not hasattr(library, name)] == []


@needs_readelf
def test_needs_no_glibc_above_2_28():
    by_version = portability.versions(LIBRARY)["GLIBC"]
    newer = {names[0]: version for version, names in by_version.items() if version > (2, 28)}
    assert newer == {}


@needs_readelf
def test_loads_wherever_the_wheel_tag_says():
    assert portability.too_new(LIBRARY) == [], portability.summary(LIBRARY)


@needs_readelf
def test_uses_no_python_symbol():
    undefined = portability.readelf(LIBRARY, "--dyn-syms")
    assert re.findall(r"UND\s+(_?Py\w+)", undefined) == []


def test_contains_no_path_of_the_build_machine():
    content = LIBRARY.read_bytes()
    for folder in {str(ROOT), str(Path.home()), "site-packages"}:
        assert folder.encode() not in content, f"'{folder}' stands in {LIBRARY.name}"


@needs_readelf
def test_portability_sees_a_symbol_that_is_too_new(monkeypatch):
    monkeypatch.setitem(portability.LIMITS, "GLIBC", (2, 1))
    assert any("GLIBC_2.2.5" in text for text in portability.too_new(LIBRARY))


# --- the extension module, which only Python loads ---

needs_extension = pytest.mark.skipif(not EXTENSION.is_file(), reason="built without Python.h")


@needs_extension
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_extension_serves_this_torch(device, torch_python):
    """Else calls are quietly some microseconds slower; whatever the default device is."""
    code = f"""
        import torch
        torch.set_default_device("{device}")
        from torch_cubin._native import launcher as _extension
        print(_extension.Launcher is not _extension.PlainLauncher)
    """
    environment = {**os.environ, "TORCH_CUBIN_PLAIN_LAUNCH": ""}
    done = torch_python.run(textwrap.dedent(code), env=environment)
    assert done.stdout == "True\n", done.stderr


@needs_extension
@needs_readelf
def test_the_extension_needs_libc_alone():
    assert set(portability.needed(EXTENSION)) <= {"libc.so.6", "libpthread.so.0"}
    assert portability.too_new(EXTENSION) == []


@needs_extension
@needs_readelf
def test_the_extension_exports_one_function():
    assert portability.exported(EXTENSION) == ["PyInit__launch"]
    assert str(ROOT).encode() not in EXTENSION.read_bytes()


@needs_extension
@needs_readelf
def test_the_extension_keeps_to_the_limited_api():
    """The one function outside 3.10's that may be used: 3.12 added it, and 3.9 had it already."""
    undefined = set(re.findall(r"UND\s+(_?Py\w+)", portability.readelf(EXTENSION, "--dyn-syms")))
    private = {name for name in undefined if name.startswith("_Py")}
    assert private <= {
        *("_Py_NoneStruct", "_Py_TrueStruct", "_Py_FalseStruct", "_Py_Dealloc"),
        *("_PyArg_ParseTuple_SizeT", "_PyObject_CallFunction_SizeT"),
    }
    assert "PyVectorcall_Call" in undefined
