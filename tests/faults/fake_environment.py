"""The machine around a launch: drivers, devices, memory, files that change, the process's end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from fake_driver.build import cuda_include
from faults.forked import error_of, forked
from in_threads import in_threads
from preloaded import PreloadedPython
from programs import output_of

import torch_cubin
from torch_cubin import errors

DATA = Path(__file__).resolve().parents[1] / "data"
SEVERAL = DATA / "several.sm_90a.cuda130.cubin"
VEC_ADD = DATA / "vec_add.sm_90a.cuda124.cubin"
# Errors without a text in the header: a failed assertion, and memory that cannot be corrected.
FAULTS = {"CUDA_ERROR_ASSERT", "CUDA_ERROR_ECC_UNCORRECTABLE"}
# Without the extension module (test_faults.py), which is what an interpreter's end may trip over.
PLAIN = os.environ.get("TORCH_CUBIN_PLAIN_LAUNCH") == "1"
x = torch.zeros(64)


def launch(driver, source=SEVERAL, **keywords) -> None:
    module = torch_cubin.load(source)
    driver.declare(module)
    module["vec_add"](x, x, x, 64, grid=1, block=64, **keywords)


def documented_faults() -> set[str]:
    """The codes after which, cuda.h says, the process must be started again."""
    header = (cuda_include() / "cuda.h").read_text()
    text = header[header.index("typedef enum cudaError_enum") : header.index("} CUresult;")]
    found = re.findall(r"/\*\*(.*?)\*/\s*(CUDA_ERROR_\w+)", text, re.DOTALL)
    return {name for said, name in found if "relaunch" in said or "terminated" in said}


@pytest.mark.fault_case(26)
def test_every_code_of_the_driver(driver):
    """Its tag, its name and its text, from a load and from a launch."""

    def run() -> dict[str, list]:
        found = {}
        launch(driver)
        for code in driver.errors():
            for name in ("cuLibraryLoadData", "cuLaunchKernelEx"):
                driver.fail(name, code, times=2)
                found[f"{name} {code}"] = error_of(lambda: launch(driver))
                driver.fail(name, code, times=0)
        launch(driver)
        return {"found": found, "violations": driver.violations()}

    result = forked(run)
    assert result["violations"] == []
    faults = documented_faults() | FAULTS
    assert len(faults) > 10
    codes = driver.errors()
    assert len(codes) > 90
    for key, error in result["found"].items():
        name, number = key.split()
        code = codes[int(number)]
        expected = "driver" if name == "cuLibraryLoadData" else "launch"
        if code in faults:
            expected = "fault"
        elif code == "CUDA_ERROR_OUT_OF_MEMORY":
            expected = "oom"
        elif 900 <= int(number) <= 908:
            expected = "capture"
        elif int(number) in (4, 400, 709):
            expected = "closed"
        assert error, key
        assert f"torch_cubin [{expected}]" in error[1], (key, error)
        assert f"{code} ({number}): asked for by the test" in error[1], (key, error)


@pytest.mark.fault_case(14)
def test_an_image_that_is_newer_than_the_driver(driver):
    def run() -> list:
        driver.set("version", 12040)
        driver.fail("cuLibraryLoadData", 200)
        newer = error_of(lambda: launch(driver))
        driver.fail("cuLibraryLoadData", 200)
        return [newer, error_of(lambda: launch(driver, VEC_ADD)), error_of(lambda: launch(driver))]

    newer, old_enough, again = forked(run)
    assert newer[0] == "DriverError"
    assert "is newer than the CUDA driver: expected a driver for CUDA 13.0 or newer" in newer[1]
    assert "got one for CUDA 12.4, which says CUDA_ERROR_INVALID_IMAGE (200)" in newer[1]
    assert "newer than the CUDA driver" not in old_enough[1]
    assert again == []


@pytest.mark.fault_case(14)
def test_a_driver_before_cuda_12(driver):
    def run() -> list:
        driver.set("version", 11080)
        return error_of(lambda: launch(driver))

    kind, message = forked(run)
    assert kind == "DriverError"
    assert "is too old: expected CUDA 12.0 or newer, got 11.8" in message


@pytest.mark.fault_case(24)
@pytest.mark.skipif(PLAIN, reason="no launch is made")
def test_no_driver_at_all(tmp_path):
    """The import and the CPU work; the first use says which library it was."""
    code = f"""
        import torch, torch_cubin
        torch.ops.cubin.matmul(torch.ones(2, 2), torch.ones(2, 2))
        module = torch_cubin.load({str(SEVERAL)!r})
        for _ in range(2):
            try:
                torch_cubin.preload(module, "cuda:0")
            except torch_cubin.Error as error:
                print(type(error).__name__, error)
    """
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-c", textwrap.dedent(code)]
    lines = output_of(command, env=environment).strip().splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("DriverError torch_cubin [driver]: libcuda.so.1 could not be opened")
        assert "libcuda.so.1: cannot open shared object file" in line


@pytest.mark.fault_case(24)
def test_the_toolkits_stub_of_the_driver(driver):
    """Its cuInit gives a code of its own (34); the message says where the library lies."""

    def run() -> list:
        driver.fail("cuInit", 34)
        return [error_of(lambda: launch(driver)), error_of(lambda: launch(driver))]

    first, again = forked(run)
    assert first[0] == "DriverError"
    assert "libcuda.so.1 is the toolkit's stub, not a driver" in first[1]
    assert f"got {os.environ['LD_LIBRARY_PATH'].split(':')[0]}" in first[1]
    assert "LD_LIBRARY_PATH" in first[1]
    assert again == []


@pytest.mark.fault_case(25)
def test_a_part_of_a_gpu_runs_by_its_own_multiprocessors(driver):
    """As an instance of MIG does: a cooperative grid that a whole GPU takes does not fit there."""

    def run() -> list:
        driver.set("multiprocessors", 16)
        fits = error_of(lambda: launch_grid(driver, 32))
        return [fits, error_of(lambda: launch_grid(driver, 33))]

    fits, too_many = forked(run)
    assert fits == []
    assert too_many[0] == "LaunchError"
    assert "at most 32 blocks" in too_many[1]


def launch_grid(driver, grid: int) -> None:
    module = torch_cubin.load(SEVERAL)
    driver.declare(module)
    module["vec_add"](x, x, x, 64, grid=grid, block=64, cooperative=True)


@pytest.mark.fault_case(33)
@pytest.mark.parametrize("code", [400, 709])
def test_a_destroyed_context(driver, code):
    def run() -> list:
        launch(driver)
        driver.fail("cuLaunchKernelEx", code)
        return error_of(lambda: launch(driver))

    kind, message = forked(run)
    assert kind == "ClosedError"
    assert "restart the process" in message


@pytest.mark.fault_case(34)
@pytest.mark.parametrize(
    "name", ["cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelGetFunction", "cuLaunchKernelEx"]
)
def test_out_of_memory_is_retried_once(driver, name):
    def run(times: int) -> list:
        driver.fail(name, 2, times=times)
        before = driver.calls(name)
        error = error_of(lambda: launch(driver))
        return [error, driver.calls(name) - before, driver.violations()]

    assert forked(lambda: run(1)) == [[], 2, []]
    error, calls, violations = forked(lambda: run(9))
    assert calls == 2
    assert violations == []
    assert error[0] == "OutOfMemoryError"
    assert error[1].startswith("CUDA out of memory. torch_cubin [oom]")


@pytest.mark.fault_case(35)
def test_a_fault_names_the_kernel_that_ran_last(driver):
    def run() -> list:
        module = torch_cubin.load(SEVERAL)
        driver.declare(module)
        module["static_shared"](x, grid=1, block=64)
        module["vec_add"](x, x, x, 64, grid=1, block=64)
        del module
        driver.fail("cuLaunchKernelEx", 700, times=2)
        return [error_of(lambda: launch(driver, VEC_ADD)) for _ in range(2)]

    for kind, message in forked(run):
        assert kind == "FaultError"
        assert "after kernel 'vec_add'" in message
        assert "restart it" in message


@pytest.mark.fault_case(23)
def test_the_limit_of_shared_memory_is_only_raised(driver):
    """The stand-in calls a lower value a violation, which every test looks for at its end."""
    module = torch_cubin.load(SEVERAL)
    driver.declare(module)

    def work(first: int) -> None:
        for i in range(50):
            shared = (first + 997 * i) % 200_000
            module["vec_add"](x, x, x, 64, grid=1, block=64, shared_memory=shared)

    in_threads(work, [(i * 31_000,) for i in range(6)])
    assert len(driver.launches()) == 300
    assert driver.violations() == []


@pytest.mark.fault_case(22)
def test_shared_memory_at_the_limit_and_past_it(driver):
    module = torch_cubin.load(SEVERAL)
    driver.declare(module)
    for kernel, static in (("vec_add", 0), ("static_shared", 1024)):
        arguments = (x, x, x, 64) if kernel == "vec_add" else (x,)
        for shared in (48 * 1024, 232_448 - static):
            module[kernel](*arguments, grid=1, block=64, shared_memory=shared)
            assert driver.launches()[-1]["shared"] == shared
        with pytest.raises(errors.LaunchError, match=f"at most {232_448 - static} dynamic bytes"):
            module[kernel](*arguments, grid=1, block=64, shared_memory=232_449 - static)


@pytest.mark.fault_case(11)
def test_the_bytes_that_were_read_are_loaded(driver, tmp_path):
    """The file is another one, or gone, by the time of the first launch."""
    path = tmp_path / "kernel.cubin"
    content = VEC_ADD.read_bytes()
    for change in (lambda: path.write_bytes(SEVERAL.read_bytes()), path.unlink):
        path.write_bytes(content)
        module = torch_cubin.load(path)
        driver.declare(module)
        change()
        before = len(driver.images())
        module["vec_add"](x, x, x, 64, grid=1, block=64)
        assert driver.images()[before:] == [content[:64].hex()]


@pytest.mark.fault_case(11)
def test_a_file_that_changes_all_the_time(driver, tmp_path):
    """Each load sees one of the two files whole."""
    contents = [VEC_ADD.read_bytes(), SEVERAL.read_bytes()]
    path, other = tmp_path / "kernel.cubin", tmp_path / "other"
    path.write_bytes(contents[0])
    stop = threading.Event()

    def swap() -> None:
        for i in range(10**9):
            other.write_bytes(contents[i % 2])
            other.replace(path)
            if stop.is_set():
                return

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for _ in range(100):
            module = torch_cubin.load(path)
            driver.declare(module)
            module["vec_add"](x, x, x, 64, grid=1, block=64)
            size = len(contents[0] if len(module) == 1 else contents[1])
            assert driver.images()[-1] == contents[0 if len(module) == 1 else 1][:64].hex(), size
    finally:
        stop.set()
        thread.join()


EXITS = {
    "handles": "kept = [module, module['vec_add']]",
    "thread": """
def launch_for_ever():
    while True:
        module["vec_add"](x, x, x, 64, grid=1, block=64)
import threading
for _ in range(8):
    threading.Thread(target=launch_for_ever, daemon=True).start()
""",
    "exception": "kept = module['vec_add']; raise ValueError('on purpose')",
    "cycle": "cycle = [module, module['vec_add']]; cycle.append(cycle); module.cycle = cycle",
    "atexit": """
import atexit
atexit.register(lambda: module["vec_add"](x, x, x, 64, grid=1, block=64))
""",
    "fork": "import os; pid = os.fork(); pid == 0 and sys.exit(0); os.waitpid(pid, 0)",
    "os._exit": "import os; os._exit(0)",
}


@pytest.fixture(scope="module")
def fresh_python():
    with PreloadedPython(["torch"]) as python:
        yield python


@pytest.mark.fault_case(36)
@pytest.mark.parametrize("kind", ("thread",) if PLAIN else EXITS)
def test_exits(kind, request):
    """The status that is asked for, no output but an exception's, no core."""
    code = f"""
import ctypes, sys, torch, torch_cubin
ctypes.CDLL("libtorch_cuda.so", mode=ctypes.RTLD_GLOBAL)
from fake_driver.control import FakeDriver
from torch_cubin._kernels import arguments
from torch_cubin._native import launcher
arguments.DEVICE_TYPE = "cpu"
if launcher.Launcher is not launcher.PlainLauncher:
    from torch_cubin import _launch
    launcher.configure(_launch, "CPU")
module = torch_cubin.load({str(SEVERAL)!r})
FakeDriver().declare(module)
x = torch.zeros(64)
module["vec_add"](x, x, x, 64, grid=1, block=64)
{EXITS[kind]}
"""
    if PLAIN or kind == "handles":  # a whole start; the others begin where torch is imported
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    else:
        fresh_python = request.getfixturevalue("fresh_python")
        done = fresh_python.run(code, finalize=True, timeout=120)
    assert done.stdout == ""
    if kind == "exception":
        assert done.returncode == 1
        assert done.stderr.strip().endswith("ValueError: on purpose")
    else:
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""


@pytest.mark.fault_case(15)
@pytest.mark.parametrize(
    "name", ["", "x" * 65536, "vec_add\0", "vec_add ", "VEC_ADD", "\ud800", "vec_add\udcff"]
)
def test_names_without_a_kernel(name):
    """Those that no UTF-8 has, too, in messages that can be printed."""
    module = torch_cubin.load(SEVERAL)
    assert name not in module
    with pytest.raises(errors.NoKernelError) as caught:
        module[name]
    assert len(str(caught.value).encode()) < 1000
