"""Declared ops over time: failing calls, redefinition, threads, preload."""

from __future__ import annotations

import gc
import os
import sys
import textwrap
import threading
import weakref

import contracts
import pytest
import torch
from contract_calls import op_of, refused
from contracts import changed, define, new_name
from fake_driver import tensors
from faults.forked import forked
from programs import output_of

import torch_cubin
from torch_cubin import errors

pytestmark = pytest.mark.usefixtures("declared")


def test_every_slot_runs_its_own_op(driver):
    """The whole pool, in a child: ops stay as long as their process."""

    def run() -> list[int]:
        free = 1024 - len(contracts.ops())
        made = [changed(contracts.vec_add(), "kernels/0/grid", [i + 1, 1, 1]) for i in range(free)]
        define(*made)
        x = tensors.empty(5)
        for contract in reversed(made):
            name = contract["schema"].split("(")[0]
            getattr(torch.ops.test_contracts, name.split("::")[1])(x, x)
        return [launch["grid"][0] for launch in driver.launches()]

    grids = forked(run)
    assert grids == list(range(len(grids), 0, -1))
    assert len(grids) > 1000


def test_nothing_leaks_when_a_call_fails(driver):
    """Every argument and output is released, wherever a call fails: by weak references."""
    schema = "(Tensor x, Tensor? y, Tensor[] zs, str s, int? n, float? f, ScalarType d) -> Tensor"
    contract = contracts.vec_add()
    contract["schema"] = new_name() + schema
    contract["tensors"] = {
        "x": {"dtype": "float32", "shape": ["m"]},
        "y": {"dtype": "float32", "shape": ["m"]},
        "zs": {"dtype": "float32", "shape": ["m"]},
        "out": {"dtype": "float32", "shape": [["floordiv", ["number", "m"], ["number", "n"]]]},
    }
    contract["scratch"] = [{"name": "more", "dtype": "float32", "shape": [3]}]
    contract["kernels"][0].update(
        args=[["pointer", "x"], ["pointer", "y"], ["pointer", "out"], ["int32", ["number", "n"]]],
        when=["is", "s", "relu"],
        grid=[1, 1, 1],
    )
    op = op_of(contract)

    def call(x=8, y=8, zs=(8, 8), s="relu", n=2, d=torch.float16) -> None:
        made = [tensors.empty(x), tensors.empty(y), *(tensors.empty(z) for z in zs)]
        alive = [weakref.ref(tensor.untyped_storage()) for tensor in made]
        counts = [torch._C._storage_Use_Count(t.untyped_storage()._cdata) for t in made]
        try:
            out = op(made[0], made[1], made[2:], s, n, 0.5, d)
            assert torch._C._storage_Use_Count(out.untyped_storage()._cdata) == 2
            failed = False
        except RuntimeError:
            failed = True
        after = [torch._C._storage_Use_Count(t.untyped_storage()._cdata) for t in made]
        assert after == counts
        del made
        gc.collect()
        assert not any(reference() for reference in alive)
        return failed

    assert call() is False
    for wrong in (
        {"x": 9}, {"y": 7}, {"zs": (8, 9)}, {"zs": ()}, {"s": "gelu"}, {"n": 0}, {"n": None},
        {"n": -1}, {"n": 2**40},
    ):  # fmt: skip
        expected = wrong != {"zs": ()}
        assert call(**wrong) is expected, wrong
    for name in ("cuLibraryLoadData", "cuLaunchKernelEx", "cuCtxGetCurrent"):
        driver.reset()
        contract["schema"] = new_name() + schema
        op = op_of(contract)
        driver.fail(name, 1)
        assert call() is True, name
        assert call() is False, name


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_memory_does_not_grow(driver):
    """A hundred thousand calls, good and bad, with an argument of every type."""
    schema = "(Tensor x, Tensor? y, Tensor[] zs, str s, int? n, float? f, bool? b) -> Tensor"
    contract = contracts.vec_add()
    contract["schema"] = new_name() + schema
    contract["tensors"] = {
        name: {"dtype": "float32", "shape": ["m"]} for name in ("x", "y", "zs", "out")
    }
    contract["kernels"][0].update(when=["is", "s", "relu" * 50], grid=[1, 1, 1])
    op = op_of(contract)
    x, wrong = tensors.empty(8), tensors.empty(9)
    driver.quiet(True)
    try:

        def calls(count: int) -> None:
            for _ in range(count):
                op(x, x, [x, x], "relu" * 50, 3, 0.5, True)
                with pytest.raises(RuntimeError):
                    op(x, x, [x, wrong], "relu" * 50, 3, 0.5, True)

        calls(2000)
        before = resident()
        calls(20_000)
        assert resident() - before < 2 << 20  # the smallest leak would be 20,000 * 16 bytes
    finally:
        driver.quiet(False)


def test_a_swap_takes_effect(driver):
    contract = contracts.vec_add()
    op = op_of(contract)
    x = tensors.empty(300)
    op(x, x)
    (answer,) = define(contract)
    assert answer["state"] == "same"
    (answer,) = define(changed(contract, "kernels/0/block", [64, 1, 1]))
    assert answer["state"] == "swapped"
    op(x, x)
    assert [launch["block"][0] for launch in driver.launches()] == [256, 64]


def test_swaps_while_threads_call(driver):
    contract = contracts.vec_add()
    op = op_of(contract)
    x = tensors.empty(300)
    stop, problems, counts = threading.Event(), [], []

    def work() -> None:
        count = 0
        try:
            while not stop.is_set():
                op(x, x)
                count += 1
        except Exception as error:  # reported below
            problems.append(error)
        counts.append(count)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for index in range(50):
        define(changed(contract, "kernels/0/block", [32 * (1 + index % 4), 1, 1]))
    stop.set()
    for thread in threads:
        thread.join()
    assert problems == []
    assert all(counts)
    assert {launch["block"][0] for launch in driver.launches()} <= {32, 64, 96, 128, 256}


def test_preload(driver):
    contract = contracts.vec_add()
    op = op_of(contract)
    name = contract["schema"].split("(")[0]
    contracts.preload(name, 1)
    assert driver.calls("cuKernelGetFunction") == 1
    contracts.preload(name, 0)
    driver.reset()
    op(tensors.empty(4), tensors.empty(4))
    assert "cuLibraryLoadData" not in driver.journal()
    with pytest.raises(errors.InputError, match="not a declared op"):
        contracts.preload("nothing::here")
    with pytest.raises(errors.NoDeviceError):
        contracts.preload(name, 7)


def test_the_image_that_suits_the_device(driver):
    files = sorted(contracts.DATA.glob("vec_add.sm_*.cubin"))
    contract = changed(contracts.vec_add(), "kernels/0/images", list(range(len(files))))
    op = op_of(contract, files=files)
    for file in files:
        driver.declare(torch_cubin.load(file))
    op(tensors.empty(4), tensors.empty(4))
    assert len(driver.images()) == 1
    only = changed(contracts.vec_add(), "kernels/0/images", [0])
    op = op_of(only, files=[file for file in files if "sm_80" in file.name])
    refused(op, tensors.empty(4), tensors.empty(4), match="sm_80", tag="arch")
    with pytest.raises(errors.ArchError):
        contracts.preload(only["schema"].split("(")[0])


def test_driver_errors_have_their_tags(driver):
    op = op_of(contracts.vec_add())
    x = tensors.empty(4)
    for name, code, tag in (("cuLibraryLoadData", 2, "oom"), ("cuLaunchKernelEx", 700, "fault"),
                            ("cuLaunchKernelEx", 1, "launch")):  # fmt: skip
        driver.fail(name, code, times=2)  # a lack of memory is met by a second try
        with pytest.raises(RuntimeError, match=rf"torch_cubin \[{tag}\]"):
            op(x, x)
        driver.fail(name, code, times=0)
    op(x, x)


@pytest.mark.skipif(os.environ.get("TORCH_CUBIN_PLAIN_LAUNCH") == "1", reason="no Python launches")
def test_an_error_of_the_environment_is_raised_by_the_first_call(driver, tmp_path):
    """A process that never asks for the environment's packages; the second call succeeds."""
    good = contracts.write_package(tmp_path / "good", contracts.vec_add("env_good::add"))
    code = f"""
        import ctypes, sys, torch
        torch.ops.load_library({str(torch_cubin._native.library.PATH)!r})
        ctypes.CDLL("libtorch_cuda.so", mode=ctypes.RTLD_GLOBAL)
        from fake_driver import tensors
        x = tensors.empty(0)
        held = lambda: torch._C._storage_Use_Count(x.untyped_storage()._cdata)
        before = held(), sys.getrefcount(x)
        try:
            torch.ops.env_good.add(x, x)
        except RuntimeError as error:
            print(error)
        tensor_uses = x._use_count()
        assert (held(), sys.getrefcount(x)) == before
        assert tensor_uses == 1, tensor_uses
        print(torch.ops.env_good.add(x, x).shape)
    """
    environment = {
        **os.environ,
        "TORCH_CUBIN_PACKAGES": f"/nowhere:{good}",
        "PYTHONPATH": str(contracts.DATA.parent),
    }
    printed = output_of([sys.executable, "-c", textwrap.dedent(code)], env=environment)
    first, second = printed.splitlines()
    assert first.startswith("torch_cubin [file]: package '/nowhere' does not exist")
    assert second == "torch.Size([0])"
