"""Faults on a real GPU: kernels that break the context, lost contexts, captures, memory, exits.

The kernels are those of tests/data/faults, whose cubins are for compute capability 9.0. What loses
the context happens in a process of its own (fault_child.py).
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
import torch
from gpu import hopper, run_child
from in_threads import in_threads

import torch_cubin
from torch_cubin import errors

DATA = Path(__file__).resolve().parents[1] / "data"
FAULTS = DATA / "faults" / "faults.sm_90a.cuda130.cubin"
LAUNCH = DATA / "launch.sm_90a.cuda130.cubin"

pytestmark = hopper.for_cubins


class Parameters(ctypes.Structure):
    _fields_ = [("values", ctypes.c_int32 * 8189)]


@pytest.fixture(scope="module")
def module() -> torch_cubin.Module:
    return torch_cubin.load(FAULTS)


@pytest.mark.fault_case(19)
def test_as_many_parameters_as_a_launch_takes(module) -> None:
    """32,764 bytes; the compiler makes no kernel of more."""
    out = torch.zeros(1, dtype=torch.int64, device="cuda")
    values = Parameters((ctypes.c_int32 * 8189)(*range(8189)))
    module["most_parameters"](out, values, grid=1, block=1)
    assert out.item() == sum(range(8189))
    with pytest.raises(errors.ParamsError):
        module["most_parameters"](out, bytes(32757), grid=1, block=1)


@pytest.mark.fault_case(22)
@pytest.mark.parametrize("dynamic", [49_152 - 1024, 49_152, 231_424])
def test_shared_memory_of_both_kinds(module, dynamic: int) -> None:
    """48 KiB in all, 48 KiB dynamic, and what a block may have less the 1,024 static bytes."""
    x = torch.randint(-9, 10, (256,), dtype=torch.int32, device="cuda")
    out = torch.empty_like(x)
    module["static_and_dynamic"](x, out, dynamic, grid=1, block=256, shared_memory=dynamic)
    assert torch.equal(out, x.flip(0) + x.view(-1, 2).flip(1).flatten())


@pytest.mark.fault_case(22)
def test_one_byte_too_much_shared_memory(module) -> None:
    x = torch.zeros(256, dtype=torch.int32, device="cuda")
    text = r"at most 231424 dynamic bytes \(232448 less 1024 static\), got 231425"
    with pytest.raises(errors.LaunchError, match=text):
        module["static_and_dynamic"](x, x, 231_424, grid=1, block=256, shared_memory=231_425)


@pytest.mark.fault_case(23)
def test_threads_with_little_and_much_shared_memory() -> None:
    """Of one kernel: a small launch must not lower the limit under a large one."""
    module = torch_cubin.load(LAUNCH)

    def work(n: int, seed: int) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            x = torch.randn(n, device="cuda", generator=generator)
            for _ in range(300):
                out = torch.empty(n, device="cuda")
                module["reverse"](x, out, n, grid=1, block=256, shared_memory=4 * n)
                assert torch.equal(out, x.flip(0)), f"{n} elements"

    sizes = (1, 12_288, 12_289, 58_112)  # 58,112 floats are all that a block may have
    in_threads(work, [(n, i) for i, n in enumerate(sizes)])


@pytest.mark.fault_case(25)
@pytest.mark.child("fault_no_device")
def test_no_visible_device(child) -> None:
    kind, message = child.check()["error"]
    assert kind == "NoDeviceError"
    assert "torch_cubin [no_device]: the CUDA driver found no device" in message
    assert "CUDA_VISIBLE_DEVICES" in message


FAULTING = {
    "illegal_address": "CUDA_ERROR_ILLEGAL_ADDRESS (700)",
    "misaligned_address": "CUDA_ERROR_MISALIGNED_ADDRESS (716)",
    "trap": "CUDA_ERROR_LAUNCH_FAILED (719)|CUDA_ERROR_ILLEGAL_INSTRUCTION (715)",
    "assertion": "CUDA_ERROR_ASSERT (710)",
}


@pytest.mark.fault_case(35)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.child("fault_kernel", name)) for name in FAULTING]
)
def test_a_kernel_that_faults(child, name: str) -> None:
    answer = child.check()
    assert answer["pytorchs"]
    for kind, message in answer["later"]:
        assert kind == "FaultError"
        assert "torch_cubin [fault]: the launch of kernel 'set'" in message
        assert any(code in message for code in FAULTING[name].split("|")), message
        assert f"after kernel '{name}'" in message
        assert "restart it" in message
    assert answer["op"]


@pytest.mark.fault_case(33)
@pytest.mark.child("fault_reset")
def test_a_context_that_was_reset(child) -> None:
    answer = child.check()
    for kind, message in answer["errors"]:
        assert kind == "ClosedError", answer
        assert "restart the process" in message


@pytest.mark.fault_case(31)
@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, marks=pytest.mark.child("fault_capture", mode))
        for mode in ("global", "thread_local", "relaxed")
    ],
)
def test_a_first_use_while_another_thread_captures(child, mode: str) -> None:
    answer = child.check()
    assert answer["capture"] == [], answer
    assert answer["x"] == [3] * 16 + [2] * 16
    assert answer["second"] == []
    if answer["first"]:  # refused, and nothing is broken by it
        assert answer["first"][0] == "CaptureError"
    assert answer["y"] == [5] * 32


@pytest.mark.fault_case(36)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.child("fault_exit", kind))
        for kind in ("handles", "thread", "fork", "fork and exit", "exception")
    ],
)
def test_exits(child, kind: str) -> None:
    assert child.returncode == (3 if kind == "exception" else 0), child.output
    assert child.answer == {"ended": kind}
    lines = [line for line in child.output.splitlines() if line]
    assert len(lines) == 1, child.output


@pytest.mark.fault_case(29)
@pytest.mark.child("fault_fork_threads")
def test_a_fork_while_threads_launch(child) -> None:
    """Locks of the driver or of ours may be held by a thread that the child does not have."""
    answer = child.check()
    assert len(answer["said"]) == 20
    assert [
        text for text in answer["said"] if '["ForkError", "torch_cubin [fork]: ' not in text
    ] == []
    assert answer["after"] == [3] * 32


@pytest.mark.fault_case(34)
@pytest.mark.skipif(
    "TORCH_CUBIN_SLOW_TESTS" not in os.environ,
    reason="takes all of the GPU's memory, from other tests too: TORCH_CUBIN_SLOW_TESTS=1",
)
@pytest.mark.parametrize("kind", ["cached", "used"])
def test_no_memory_for_a_kernel(kind: str) -> None:
    answer = run_child.run("fault_memory", kind).check()
    assert answer["value"] == [7] * 32
    assert answer["reserved"] > 10 << 30
    if kind == "cached":
        assert answer["first"] == []
    else:
        assert answer["first"][0] == "OutOfMemoryError"
        assert answer["first"][1].startswith("CUDA out of memory. torch_cubin [oom]")
