"""Modules: laziness, threads, unload, captures, preload."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path

import pytest
import torch
from in_threads import in_threads
from unit import elf_builder

import torch_cubin
from torch_cubin import errors

DATA = Path(__file__).resolve().parents[1] / "data"
SEVERAL = DATA / "several.sm_90a.cuda130.cubin"
x = torch.zeros(64)


def add(kernel, n=64, **keywords):
    kernel(x, x, x, n, grid=1, block=64, **keywords)


def test_nothing_touches_the_driver_before_the_first_launch(driver):
    module = torch_cubin.load(SEVERAL)
    assert list(module) == list(module.names)
    assert len(module) == 8
    assert "vec_add" in module
    assert "nope" not in module
    assert module["vec_add"].info.params[3].size == 4
    assert module["vec_add"] is module["vec_add"]
    assert module.images[0].arch == "sm_90a"
    assert "8 kernels" in repr(module)
    assert "vec_add" in repr(module["vec_add"])
    with pytest.raises(errors.NoKernelError, match="expected 'vec_add'"):
        module["vec_ad"]
    with pytest.raises(LookupError):
        module["vec_add\0"]
    module.unload()
    assert driver.journal() == []


def test_sources(driver):
    content = SEVERAL.read_bytes()
    for source in (SEVERAL, str(SEVERAL), content, bytearray(content), memoryview(content)):
        assert torch_cubin.load(source).names == torch_cubin.load([source]).names
    with pytest.raises(errors.FileError):
        torch_cubin.load("/nowhere.cubin")
    with pytest.raises(errors.ImageError):
        torch_cubin.load(content[:-1])
    with pytest.raises(errors.InputError):
        torch_cubin.load(5)
    with pytest.raises(errors.InputError):
        torch_cubin.load([])
    assert driver.journal() == []


def test_images_must_agree_on_parameters():
    """An arch set packs its arguments once: the sizes must be the same everywhere."""

    def cubin(second: int, sm: int = 90) -> bytes:
        info = elf_builder.param(0, 0, 8) + elf_builder.param(1, 8, second)
        info += elf_builder.value(0x19, 8 + second)
        flags = 0x06000004 | sm << 8
        return elf_builder.Cubin(kernels=[elf_builder.Kernel("k", info)], flags=flags).build()

    assert torch_cubin.load([cubin(4), cubin(4)]).names == ("k",)
    others = torch_cubin.load([cubin(4), cubin(8, sm=80), SEVERAL])
    assert {"k", "vec_add"} <= set(others)  # who asks for other kernels of these files gets them
    assert others["vec_add"] is others["vec_add"]
    for _ in range(2):
        with pytest.raises(errors.ParamsError, match="2 parameters of 8, 4 bytes, got 2 param"):
            others["k"]


def test_only_the_kernel_defined_by_two_objects_is_refused(driver):
    """As a template's, which is a weak symbol of every object that instantiates it."""

    def image(own: str, filler: int) -> bytes:
        info = elf_builder.param(0, 0, 8) + elf_builder.value(0x19, 8)
        weak = elf_builder.Kernel("weak", info, code=bytes([filler]) * 16)
        kernels = [elf_builder.Kernel(own, info), weak]
        return elf_builder.Cubin(kernels=kernels).build()

    module = torch_cubin.load([image("a", 0), image("b", 1)])
    driver.declare(module)
    libraries = driver.libraries()
    module.preload(0)
    for own in ("a", "b"):
        module[own](x, grid=1, block=32)
    assert driver.libraries() == libraries + 2
    # Its bytes are the driver's by now.
    with pytest.raises(errors.ImageError, match="'weak' for sm_90 is in two of the files"):
        module["weak"]
    assert module.unload() is True
    same = torch_cubin.load([image("a", 0), image("a", 0)])
    assert same["weak"].name == "weak"


def test_a_module_is_loaded_once_and_launches_make_no_other_calls(driver, vec_add):
    add(vec_add)
    first = driver.journal()
    assert first.count("cuLibraryLoadData") == 1
    driver.reset()
    add(vec_add)
    assert driver.journal() == ["cuStreamIsCapturing", "cuLaunchKernelEx"]


def test_the_default_stream_gets_the_devices_context(driver, vec_add):
    """A stream brings its context, the default one means that of the current one."""
    around = ["cuCtxGetCurrent", "cuCtxPushCurrent", "cuLaunchKernelEx", "cuCtxPopCurrent"]
    asked = ["cuCtxGetCurrent"] * 2  # whether it is the device's, then whether it is a green one
    add(vec_add)
    with driver.default_streams():
        for context in (0, 0x1001, 0xABC):  # none, the other device's, one that somebody made
            driver.make_current(context)
            driver.reset()
            add(vec_add)
            assert driver.journal() == [*asked, *around]
            assert driver.launches()[-1]["device"] == 0
        driver.make_current(0x1000)
        driver.reset()
        add(vec_add)
        assert driver.journal() == ["cuCtxGetCurrent", "cuLaunchKernelEx"]
    driver.make_current(0)


def test_launches_use_the_default_stream_of_a_green_context(driver, vec_add):
    """PyTorch makes one current (torch.cuda.green_contexts), and its own work goes there."""
    add(vec_add)
    green, primary = 0x3000 - 0x1000, 0
    with driver.default_streams():
        for context, device in ((0x3000, green), (0x3001, primary)):  # its device's, another's
            driver.make_current(context)
            driver.reset()
            add(vec_add)
            assert driver.launches()[-1]["device"] == device
            assert driver.journal()[-1] == ("cuLaunchKernelEx" if device else "cuCtxPopCurrent")
    driver.make_current(0x3000)
    driver.reset()
    add(vec_add)  # PyTorch's other streams have their own context, regardless of the current one
    assert driver.launches()[-1]["device"] == primary
    driver.make_current(0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"grid": 0}, {"grid": -1}, {"grid": (1, 65536)}, {"grid": 1 << 31}, {"grid": (1, 1, 65536)},
        {"block": 0}, {"block": -64}, {"block": 1025}, {"block": (1, 1, 65)}, {"block": (64, 64)},
        {"block": (1 << 32, 1 << 32)}, {"shared_memory": -1}, {"shared_memory": 1 << 31},
        {"shared_memory": 1 << 40},
    ],
)  # fmt: skip
def test_the_fast_launch_path_refuses_what_the_checked_path_refuses(driver, vec_add, wrong):
    """A second launch on a device makes fewer queries; a refused launch stays refused."""
    x = torch.zeros(64)
    vec_add(x, x, x, 64, grid=1, block=64)
    driver.reset()
    with pytest.raises(errors.LaunchError):
        vec_add(x, x, x, 64, **{"grid": 1, "block": 64, **wrong})
    assert driver.launches() == []


@pytest.mark.fault_case(28)
def test_sixteen_threads_launch_at_once(driver, several):
    barrier = threading.Barrier(16)

    def work(index: int) -> None:
        kernel = several["vec_add"]
        barrier.wait()
        for call in range(50):
            add(kernel, 1000 * index + call, shared_memory=(index % 4) * 30000)

    in_threads(work, [(i,) for i in range(16)])
    assert driver.calls("cuLibraryLoadData") == 1
    seen = sorted(
        int.from_bytes(bytes.fromhex(launch["params"][3]), "little") for launch in driver.launches()
    )
    assert seen == sorted(1000 * index + call for index in range(16) for call in range(50))


@pytest.mark.fault_case(28)
def test_a_loader_that_fails_in_one_thread_only(driver, several):
    """One error for one call; every other call launches."""
    driver.fail("cuLibraryLoadData", 1)
    kernel = several["vec_add"]
    outcomes = []

    def work() -> None:
        try:
            add(kernel)
            outcomes.append("right")
        except errors.Error as error:
            outcomes.append(error.tag)

    in_threads(work, [()] * 8)
    assert sorted(outcomes) == ["driver"] + ["right"] * 7


@pytest.mark.fault_case(32)
def test_unload_waits_then_gives_back(driver, several):
    kernel = several["vec_add"]
    add(kernel)
    before = driver.libraries()
    assert several.unload() is True
    assert driver.libraries() == before - 1
    journal = driver.journal()
    assert journal.index("cuCtxSynchronize") < journal.index("cuLibraryUnload")
    assert several.unload() is True
    assert driver.journal() == journal
    for use in (
        lambda: add(kernel),
        lambda: several["vec_add"],
        lambda: several["small"],
        lambda: several.preload(0),
        lambda: torch_cubin.preload(kernel, 0),
        lambda: several.global_tensor("table", torch.float32, device=0),
        several.__enter__,
    ):
        with pytest.raises(errors.ClosedError, match="was unloaded"):
            use()
    assert "unloaded" in repr(several)


def test_with_unloads(driver):
    with torch_cubin.load(SEVERAL) as module:
        driver.declare(module)
        add(module["vec_add"])
        loaded = driver.libraries()
    assert driver.libraries() == loaded - 1
    with pytest.raises(ZeroDivisionError), torch_cubin.load(SEVERAL) as module:
        driver.declare(module)
        add(module["vec_add"])
        raise ZeroDivisionError
    assert driver.libraries() == loaded - 1


@pytest.mark.fault_case(32)
def test_unload_while_threads_launch(driver, several):
    """Every launch happens or is refused; none meets a library that is gone (see `clean`)."""
    kernel = several["vec_add"]
    stop, problems, counts = threading.Event(), [], []

    def work() -> None:
        count = 0
        try:
            while not stop.is_set():
                add(kernel)
                count += 1
        except errors.ClosedError:
            pass
        except Exception as error:  # reported below
            problems.append(error)
        counts.append(count)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    assert several.unload() is True
    stop.set()
    for thread in threads:
        thread.join()
    assert problems == []
    assert all(counts)


@pytest.mark.fault_case(32)
def test_an_unload_that_fails_can_be_repeated(driver, several):
    kernel = several["vec_add"]
    add(kernel)
    for name in ("cuCtxSynchronize", "cuLibraryUnload"):
        driver.fail(name, 1)
        with pytest.raises(errors.DriverError, match=name):
            several.unload()
        with pytest.raises(errors.ClosedError):
            add(kernel)
    before = driver.libraries()
    assert several.unload() is True
    assert driver.libraries() == before - 1


@pytest.mark.fault_case(30, 32)
def test_a_captured_kernel_stays_loaded(driver, several):
    kernel = several["vec_add"]
    with driver.setting("capturing", 1):
        add(kernel)
    loaded = driver.libraries()
    with pytest.warns(RuntimeWarning, match="stays loaded: it is needed by a CUDA graph"):
        assert several.unload() is False
    assert driver.libraries() == loaded
    assert driver.calls("cuCtxSynchronize") == 0
    with pytest.raises(errors.ClosedError):
        add(kernel)
    with pytest.warns(RuntimeWarning):
        assert several.unload() is False


@pytest.mark.fault_case(32)
def test_no_unload_during_a_capture(driver, several):
    kernel = several["vec_add"]
    add(kernel)
    capturing = driver.setting("capturing", 1)
    with capturing, pytest.raises(errors.CaptureError, match="Unload it after the capture"):
        several.unload()
    assert driver.calls("cuCtxSynchronize") == 0  # which would end the capture
    add(kernel)
    assert several.unload() is True


@pytest.mark.fault_case(30)
def test_the_first_launch_inside_a_capture_makes_no_forbidden_call(driver, several):
    with driver.setting("capturing", 1):
        add(several["vec_add"], shared_memory=100000)
    assert not {"cuCtxSynchronize", "cuLibraryUnload"} & set(driver.journal())
    assert len(driver.launches()) == 1


def test_preload_leaves_only_the_launch(driver, several):
    torch_cubin.preload(several, "cuda:1")
    assert driver.calls("cuKernelGetFunction") == len(several)
    torch_cubin.preload(several["vec_add"], 0)
    driver.reset()
    add(several["vec_add"])
    assert set(driver.journal()) <= {
        *("cuCtxGetCurrent", "cuCtxPushCurrent", "cuStreamIsCapturing"),
        *("cuLaunchKernelEx", "cuCtxPopCurrent"),
    }
    for wrong in ("vec_add", several.names):
        with pytest.raises(errors.InputError):
            torch_cubin.preload(wrong, 0)
    with pytest.raises(errors.InputError):
        torch_cubin.preload(several, "cpu")
    with pytest.raises(errors.NoDeviceError):
        torch_cubin.preload(several, 2)
    for far in (2**32, -(2**32), 2**64 + 1):  # which are devices 0 and 1 in 32 bits
        with pytest.raises(errors.NoDeviceError, match=f"got {far}"):
            torch_cubin.preload(several, far)


def test_dropped_modules(driver):
    """What the driver holds stays when Python's objects go; a kernel keeps its module."""
    module = torch_cubin.load(SEVERAL)
    driver.declare(module)
    kernel = module["vec_add"]
    del module
    gc.collect()
    add(kernel)
    loaded = driver.libraries()
    del kernel
    gc.collect()
    assert driver.libraries() == loaded
    for _ in range(20):
        torch_cubin.load(SEVERAL)["vec_add"]
    gc.collect()
    assert driver.libraries() == loaded


def test_two_libraries_are_compared_once(driver):
    """Not once for each kernel that both have."""
    info = elf_builder.param(0, 0, 8) + elf_builder.value(0x19, 8)
    cubin = elf_builder.Cubin(kernels=[elf_builder.Kernel(f"k{i}", info) for i in range(2000)])
    cubin.sections = [elf_builder.Section(".note.filler", elf_builder.NOTE, bytes(16 << 20))]
    content = cubin.build()

    def seconds(images: list[bytes]) -> float:
        start = time.thread_time()
        assert len(torch_cubin.load(images)) == 2000
        return time.thread_time() - start

    one, two = seconds([content]), seconds([content, content])
    assert two < 10 * one + 0.3


def test_each_interleaved_cluster_shape_is_queried_once(driver, several):
    kernel = several["vec_add"]
    shapes = [(2, 0), (4, 0), (2, 1024)]
    for _ in range(3):
        for cluster, shared in shapes:
            kernel(x, x, x, 64, grid=8, block=64, cluster=cluster, shared_memory=shared)
    assert driver.calls("cuOccupancyMaxActiveClusters") <= len(shapes) + 2  # two may share a slot
    sizes = [launch["attributes"]["4"][0] for launch in driver.launches()]
    assert sizes == [cluster for cluster, _ in shapes] * 3
