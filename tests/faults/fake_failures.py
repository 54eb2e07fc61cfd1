"""Every driver call fails once: a tagged error, and the same call succeeds the next time.

Each case is a forked process: a driver and a device are opened once. This process itself never
opens the driver.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
import torch
from faults.forked import error_of, forked

import torch_cubin
from torch_cubin import errors
from torch_cubin._native import library as _library

DATA = Path(__file__).resolve().parents[1] / "data"
# Without the extension module (test_faults.py), whose run shows every tag.
PLAIN = os.environ.get("TORCH_CUBIN_PLAIN_LAUNCH") == "1"

# What the code of a failure says wherever it comes from (cuda.h), and 999 by the call.
TAGS = {2: "oom", 400: "closed", 700: "fault", 900: "capture"}
# What may need the device's memory: without any it is called a second time.
WITH_MEMORY = {"cuLibraryLoadData", "cuLibraryGetKernel", "cuLibraryGetGlobal"}
WITH_MEMORY |= {"cuKernelGetFunction", "cuFuncGetAttribute", "cuLaunchKernelEx"}
OF_THE_CALL = ("driver", "launch", "no_kernel", "no_device", "input")
# No error: texts of errors; a destructor's call; a question whose answer the launch finds too; a
# symbol that is asked for by its name.
SILENT = {"cuGetErrorName", "cuGetErrorString", "cuCtxPopCurrent", "cuDriverGetVersion"}
# Called for counters alone (csrc/runtime/counters.cpp; fake_counters.py has their failures).
OF_COUNTERS = {"cuMemsetD8Async", "cuStreamCreate", "cuStreamDestroy", "cuStreamGetId"}
OF_COUNTERS |= {"cuThreadExchangeStreamCaptureMode", "cuUserObjectCreate", "cuUserObjectRelease"}
OF_COUNTERS |= {"cuGraphRetainUserObject"}


class Array:
    __cuda_array_interface__ = {
        "data": (1 << 40, False),
        "shape": (4,),
        "typestr": "<f4",
        "version": 3,
    }


CURRENT = ctypes.c_int32(-(2**31))  # TORCH_CUBIN_V1_CURRENT_DEVICE


def call(name: str, *arguments: object) -> None:
    """A function of the C ABI."""
    library = _library.load()
    part = library.torch_cubin_v1_error_part
    part.restype = ctypes.c_char_p
    function = getattr(library, f"torch_cubin_v1_{name}")
    function.restype = ctypes.c_void_p
    error = function(*arguments)
    if error:
        texts = [part(ctypes.c_void_p(error), which).decode() for which in (0, 1)]
        library.torch_cubin_v1_error_free(ctypes.c_void_p(error))
        raise errors.make(*texts)


def memory_and_devices() -> None:
    """What only the C ABI calls of the driver (csrc/abi): C++ programs allocate, copy and wait."""
    memory, size = ctypes.c_void_p(), ctypes.c_uint64(8)
    read = ctypes.create_string_buffer(8)
    call("set_device", 0)
    call("allocate", CURRENT, size, ctypes.byref(memory))
    try:
        call("copy", CURRENT, memory, b"12345678", size, None)
        call("copy", CURRENT, read, memory, size, None)
        call("synchronize", CURRENT, None)
        assert read.raw == b"12345678"
    finally:
        call("deallocate", CURRENT, memory)
        _library.load().torch_cubin_v1_set_device(0)  # resets what a failure may have left


def scenario(driver) -> None:
    """Every driver call that there is, and the right result of each launch."""
    module = torch_cubin.load(DATA / "several.sm_90a.cuda130.cubin")
    driver.declare(module)
    driver.declare_global("table", 64)
    x = torch.zeros(64)
    before = len(driver.launches())
    module["vec_add"](x, Array(), x, 64, grid=4, block=64, priority=-1, cooperative=True)
    module["vec_add"](x, x, x, 64, grid=16, block=64, cluster=16, shared_memory=100000)
    map = torch_cubin.TensorMap(torch.zeros(8, 64), (8, 32))
    module["structs"](1, bytes(12), map, x, grid=1, block=1)
    module.preload(0)
    torch_cubin.preload(module["small"], "cuda:0")
    assert _library.module_global(module._handle, 0, "table")[1] == 64
    assert module.unload()
    assert len(driver.launches()) == before + 3
    memory_and_devices()


def names() -> list[str]:
    library = ctypes.CDLL("libcuda.so.1")
    library.fake_functions.restype = ctypes.c_char_p
    return library.fake_functions().decode().split("\n")


def test_copies_in_a_green_context(driver):
    """Its default stream is meant, as launches mean it; another stream brings its own context."""

    def run() -> None:
        call("set_device", 0)
        read = ctypes.create_string_buffer(4)
        size = ctypes.c_uint64(4)
        driver.make_current(0x3000)
        for stream, pushes in ((None, 0), (1, 0), (2, 0), (0x5000, 1)):
            driver.reset()
            call("copy", CURRENT, read, b"1234", size, ctypes.c_void_p(stream))
            call("synchronize", CURRENT, ctypes.c_void_p(stream))
            assert driver.journal().count("cuCtxPushCurrent") == 2 * pushes, stream
        driver.reset()
        call("copy", ctypes.c_int32(1), read, b"1234", size, None)  # the other device's stream
        assert driver.journal().count("cuCtxPushCurrent") == 1
        driver.make_current(0x2000)
        with pytest.raises(errors.DriverError, match="or a green one of it"):
            call("copy", CURRENT, read, b"1234", size, None)

    forked(run)


def test_the_scenario_calls_all_of_the_driver(driver):
    def run() -> list[str]:
        scenario(driver)
        return sorted(set(driver.functions()) - set(driver.journal()))

    unused = {"cuDriverGetVersion", "cuGetErrorName", "cuGetErrorString"}
    assert forked(run) == sorted(unused | OF_COUNTERS)


@pytest.mark.fault_case(26, 27, 34)
@pytest.mark.parametrize("name", [name for name in names() if name not in SILENT | OF_COUNTERS])
def test_a_call_that_fails_once(driver, name):
    def run(code: int) -> list:
        driver.fail(name, code)
        failed = error_of(lambda: scenario(driver))
        scenario(driver)
        # What the failed run had loaded may stay: its module was not unloaded.
        return [failed, driver.violations(), driver.libraries()]

    few = name.startswith(("cuMem", "cuStreamSync", "cuCtxSet", "cuCtxGetDevice"))
    # One of each tag: fake_environment.py has every code, from a load and from a launch.
    for code in (1, 2, 700) if few or PLAIN else (1, 2, 400, 700, 900):
        error, violations, libraries = forked(lambda code=code: run(code))
        assert violations == []
        assert libraries <= 1
        if name == "cuStreamIsCapturing" and not error:
            continue  # a launch goes on without the answer
        if code == 2 and name in WITH_MEMORY:
            assert not error
            continue
        assert error, (name, code)
        tag = error[1].split("[")[1].split("]")[0] if "[" in error[1] else error[0]
        if code == 2 and name != "cuInit":
            assert error[0] == "OutOfMemoryError"
            assert error[1].startswith("CUDA out of memory.")
        elif name == "cuInit":
            assert tag == "driver", error
        elif name == "cuPointerGetAttribute" and code == 1:
            assert tag == "input", error
        else:
            assert tag in ((TAGS[code],) if code in TAGS else OF_THE_CALL), (code, error)


@pytest.mark.fault_case(26, 27)
@pytest.mark.parametrize("after", range(6))
def test_later_calls_that_fail(driver, after):
    """A failure in the middle of things, not at the first call."""

    def run(name: str) -> list:
        driver.fail(name, 1, after=after)
        errors = [error_of(lambda: scenario(driver)) for _ in range(after + 2)]
        return [[error for error in errors if error], error_of(lambda: scenario(driver))]

    for name in ("cuLibraryLoadData", "cuLibraryGetKernel", "cuLaunchKernelEx", "cuLibraryUnload"):
        failed, last = forked(lambda name=name: run(name))
        assert len(failed) == 1, (name, failed)
        assert last == []


@pytest.mark.fault_case(14, 24)
def test_missing_function(driver):
    def run() -> list[str]:
        driver.set("missing cuTensorMapEncodeTiled", 1)
        driver.set("version", 11080)
        return error_of(lambda: scenario(driver))

    kind, message = forked(run)
    assert kind == "DriverError"
    assert "has no function cuTensorMapEncodeTiled: expected a driver for CUDA 12.0" in message


@pytest.mark.fault_case(25)
def test_no_device(driver, monkeypatch):
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "0")
    kind, message = forked(lambda: error_of(lambda: scenario(driver)))
    assert kind == "NoDeviceError"
    assert "[no_device]" in message


@pytest.mark.fault_case(29)
def test_a_forked_process_gets_the_fork_error(driver):
    def run() -> list:
        module = torch_cubin.load(DATA / "several.sm_90a.cuda130.cubin")
        driver.declare(module)
        x = torch.zeros(4)

        def use() -> None:
            module["vec_add"](x, x, x, 4, grid=1, block=4)

        use()
        inside = forked(lambda: [error_of(use), error_of(module.unload)])
        use()
        return inside

    for kind, message in forked(run):
        assert kind == "ForkError", message
        assert "spawn" in message


@pytest.mark.fault_case(29)
def test_a_fork_before_the_first_use_works(driver):
    assert forked(lambda: error_of(lambda: scenario(driver))) == []


@pytest.mark.fault_case(13)
@pytest.mark.parametrize(
    ("sm", "files", "chosen"),
    [
        (90, "*", "vec_add.sm_90a.cuda124"),
        (80, "*", "vec_add.sm_80.cuda118"),
        (89, "*", "vec_add.sm_80.cuda118"),
        (120, "*", "vec_add.sm_120a.cuda130"),
        (103, "*", None),
        (121, "*", None),
        (100, "pointers", "pointers.sm_100f.cuda129"),
        (103, "pointers", "pointers.sm_100f.cuda129"),
        (90, "pointers", "pointers.sm_90.cuda124"),
    ],
)
def test_the_best_image_for_the_device(driver, sm, files, chosen):
    pattern = "pointers.*.cubin" if files == "pointers" else "vec_add.*.cubin"
    paths = sorted(DATA.glob(pattern))
    assert len(paths) >= 2

    def run() -> list:
        driver.set("sm", sm)
        module = torch_cubin.load(paths)
        driver.declare(module)
        kernel = module[module.names[0]]
        x = torch.zeros(4)
        arguments = [x if p.kind == "pointer" else bytes(p.size) for p in kernel.info.params]
        return [error_of(lambda: kernel(*arguments, grid=1, block=32)), driver.images()]

    error, images = forked(run)
    if chosen is None:
        assert error[0] == "ArchError"
        assert "has no code for Fake GPU: expected an image that runs on" in error[1]
        assert "sm_80" in error[1]
        assert "sm_90a" in error[1]
        return
    assert error == []
    (image,) = images
    assert bytes.fromhex(image) == (DATA / f"{chosen}.cubin").read_bytes()[:64]
