"""Every kind of wrong launch (grid, block, cluster, stream, ...): class and message."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from unit import elf_builder
from wrong_calls import call, check, expect, x

import torch_cubin
from torch_cubin import errors

DATA = Path(__file__).resolve().parents[1] / "data"


class OtherStream:
    cuda_stream = 7
    device_index = 1


def launch(**keywords):
    return call(x, x, x, 64, **keywords)


WRONG = {
    # --- grid and block ---
    "no_grid": (
        launch(grid="absent"),
        errors.LaunchError,
        "the launch of kernel 'vec_add' needs a grid: expected grid=blocks or grid=(x, y, z), got "
        "none.",
    ),
    "no_block": (
        launch(block="absent"),
        errors.LaunchError,
        "the launch of kernel 'vec_add' needs a block: expected block=threads or block=(x, y, z), "
        "got none.",
    ),
    "empty_grid": (
        launch(grid=0),
        errors.LaunchError,
        "the launch of kernel 'vec_add' has an empty grid: expected at least 1 block in x, got "
        "grid (0, 1, 1). Skip the launch where there is nothing to do.",
    ),
    "negative_grid": (
        launch(grid=(1, -1)),
        errors.LaunchError,
        "the launch of kernel 'vec_add' has an empty grid: expected at least 1 block in y, got "
        "grid (1, -1, 1). Skip the launch where there is nothing to do.",
    ),
    "grid_x": (
        launch(grid=2**31),
        errors.LaunchError,
        "the launch of kernel 'vec_add' has too large a grid: expected at most 2147483647 in x, "
        "got grid (2147483648, 1, 1).",
    ),
    "grid_y": (
        launch(grid=(1, 65536)),
        errors.LaunchError,
        "the launch of kernel 'vec_add' has too large a grid: expected at most 65535 in y, got "
        "grid (1, 65536, 1). Put the largest extent in x, or loop in the kernel.",
    ),
    "grid_z": (
        launch(grid=(1, 1, 65536)),
        errors.LaunchError,
        "the launch of kernel 'vec_add' has too large a grid: expected at most 65535 in z, got "
        "grid (1, 1, 65536). Put the largest extent in x, or loop in the kernel.",
    ),
    "huge_grid": (
        launch(grid=2**70),
        errors.LaunchError,
        "the launch of kernel 'vec_add' has a grid out of range: expected 64 bits, got "
        "1180591620717411303424.",
    ),
    "grid_of_four": (
        launch(grid=(1, 1, 1, 1)),
        errors.LaunchError,
        "the launch of kernel 'vec_add' has a wrong grid: expected an int or 1 to 3 ints, got 4 of "
        "them.",
    ),
    "float_grid": (
        launch(grid=64 / 2),
        errors.LaunchError,
        "the launch of kernel 'vec_add' has a wrong grid: expected an int, got float.",
    ),
    "empty_block": (
        launch(block=(32, 0)),
        errors.LaunchError,
        "the launch of kernel 'vec_add' has a block that no GPU runs: expected 1 to 1024 threads "
        "in y, got block (32, 0, 1).",
    ),
    "block_z": (
        launch(block=(1, 1, 65)),
        errors.LaunchError,
        "the launch of kernel 'vec_add' has a block that no GPU runs: expected 1 to 64 threads in "
        "z, got block (1, 1, 65).",
    ),
    "block_product": (
        launch(block=(32, 33)),
        errors.LaunchError,
        "the launch of kernel 'vec_add' has too many threads a block: expected at most 1024, got "
        "1056, block (32, 33, 1).",
    ),
    "launch_bounds": (
        call(x, kernel="static_shared", block=129),
        errors.LaunchError,
        "the launch of kernel 'static_shared' has a larger block than the kernel was compiled for: "
        "expected at most 128 threads (__launch_bounds__), got 129, block (129, 1, 1).",
    ),
    # --- clusters, shared memory, the rest ---
    "cluster_of_the_binary": (
        call(x, kernel="cluster", grid=4, cluster=4),
        errors.LaunchError,
        "the launch of kernel 'cluster' has another cluster than the kernel was compiled for: "
        "expected cluster (2, 1, 1), got cluster (4, 1, 1).",
    ),
    "cluster_and_grid": (
        call(x, kernel="cluster", grid=3),
        errors.LaunchError,
        "the launch of kernel 'cluster' has a grid that is no whole number of clusters: expected a "
        "multiple of 2 blocks in x, got grid (3, 1, 1), cluster (2, 1, 1).",
    ),
    "large_cluster": (
        launch(grid=32, cluster=32),
        errors.LaunchError,
        "the launch of kernel 'vec_add' has too large a cluster: expected at most 16 blocks, got "
        "32, cluster (32, 1, 1).",
    ),
    "empty_cluster": (
        launch(cluster=0),
        errors.LaunchError,
        "the launch of kernel 'vec_add' has an empty cluster: expected at least 1 block in x, got "
        "cluster (0, 1, 1).",
    ),
    "shared_memory": (
        launch(shared_memory=232449),
        errors.LaunchError,
        "kernel 'vec_add' of ... needs more shared memory than a block may have: expected at most "
        "232448 dynamic bytes (232448 less 0 static), got 232449.",
    ),
    "static_and_dynamic_shared_memory": (
        call(x, kernel="static_shared", shared_memory=232448 - 1023),
        errors.LaunchError,
        "kernel 'static_shared' of ... needs more shared memory than a block may have: expected "
        "at most 231424 dynamic bytes (232448 less 1024 static), got 231425.",
    ),
    "negative_shared_memory": (
        launch(shared_memory=-1),
        errors.LaunchError,
        "the launch of kernel 'vec_add' has shared memory out of range: expected 0 or more bytes, "
        "as much as a block may have, got -1.",
    ),
    "cooperative": (
        launch(grid=265, cooperative=True),
        errors.LaunchError,
        "the launch of kernel 'vec_add' is cooperative and does not fit on Fake GPU: expected at "
        "most 264 blocks of 1 threads at once, got 265, grid (265, 1, 1). Launch fewer blocks and "
        "let each do more.",
    ),
    "priority": (
        launch(priority=1),
        errors.LaunchError,
        "the launch of kernel 'vec_add' has a priority that the device does not know: expected -5 "
        "(first) to 0 (last), got 1.",
    ),
    "stream_of_another_device": (
        launch(stream=OtherStream()),
        errors.InputError,
        "stream of the launch of kernel 'vec_add' is of another device than the arguments: "
        "expected a stream of cuda:0, got one of cuda:1.",
    ),
    "no_stream": (
        launch(stream="default"),
        errors.InputError,
        "stream of the launch of kernel 'vec_add' is no CUDA stream: expected a "
        "torch.cuda.Stream, an object with __cuda_stream__, or a handle as int, got 'default'.",
    ),
    "unknown_keyword": (
        launch(shared=5),
        errors.InputError,
        "the launch of kernel 'vec_add' has an unknown keyword: expected grid, block, "
        "shared_memory, cluster, cooperative, programmatic_dependent_launch, priority, stream, "
        "got shared.",
    ),
}


@pytest.mark.fault_case(20, 21, 22)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_launch(driver, several, name):
    expect(driver, several, WRONG[name])


@pytest.mark.fault_case(20)
def test_registers_limit_the_block(driver, vec_add):
    driver.set("max_threads", 512)
    with pytest.raises(errors.LaunchError) as raised:
        vec_add(x, x, x, 64, grid=1, block=513)
    check(
        raised.value,
        errors.LaunchError,
        "the launch of kernel 'vec_add' has a block that the kernel cannot have on Fake GPU: "
        "expected at most 512 threads (it needs 12 registers for each), got block (513, 1, 1). "
        "Launch smaller blocks.",
    )


@pytest.mark.fault_case(19)
@pytest.mark.parametrize("sizes", [[32756], [4] * 8189, [32757], [40000], [60000, 4], [8] * 5000])
def test_as_many_bytes_of_parameters_as_cuda_passes(driver, sizes):
    """32,764, in few parameters or many. Compilers make no kernels with more, but a file may claim
    it."""
    sizes = [8, *sizes]  # an address first
    ends = [*itertools.accumulate(sizes)]
    info = b"".join(
        elf_builder.param_v2(i, end - size, size)
        for i, (size, end) in enumerate(zip(sizes, ends, strict=True))
    )
    module = torch_cubin.load(elf_builder.Cubin(kernels=[elf_builder.Kernel(info=info)]).build())
    driver.declare(module)
    for preloaded in (False, True):  # a loaded kernel takes the fast path
        if preloaded:
            torch_cubin.preload(module["k"], 0)
        if ends[-1] <= 32764:
            module["k"](x, *map(bytes, sizes[1:]), grid=1, block=1)
            continue
        with pytest.raises(errors.ParamsError) as raised:
            module["k"](x, *map(bytes, sizes[1:]), grid=1, block=1)
        check(
            raised.value,
            errors.ParamsError,
            "the launch of kernel 'k' has more parameters than CUDA passes: expected at most 32764 "
            f"bytes, got {ends[-1]} bytes.",
        )
    assert len(driver.launches()) == (2 if ends[-1] <= 32764 else 0)


def test_shared_memory_that_only_a_launch_can_give(driver):
    """`reverse` has an `extern __shared__` array: without any its launch ends in a fault."""
    module = torch_cubin.load(DATA / "launch.sm_90a.cuda130.cubin")
    driver.declare(module)
    for given in (4, 1):  # before the kernel's first launch, and where it is ready
        with pytest.raises(errors.LaunchError) as raised:
            module["reverse"](x, x, 4, grid=1, block=32)
        check(
            raised.value,
            errors.LaunchError,
            "the launch of kernel 'reverse' gives no shared memory to a kernel that uses some and "
            "has none of its own: expected shared_memory=, as many bytes as the kernel's source or "
            "its compiler's notes say, got 0 bytes. How much it needs is in no cubin; a launch "
            "that reaches none of it may ask for 1 byte.",
        )
        module["reverse"](x, x, 4, grid=1, block=32, shared_memory=given)
    assert [launch["shared"] for launch in driver.launches()] == [4, 1]


@pytest.mark.fault_case(21)
def test_a_cluster_that_does_not_fit(driver, vec_add):
    driver.set("clusters", 0)
    for shared in (0, 1000):
        with pytest.raises(errors.LaunchError, match="does not fit on Fake GPU"):
            vec_add(x, x, x, 64, grid=8, block=1, cluster=8, shared_memory=shared)
    assert driver.launches() == []


@pytest.mark.fault_case(21)
def test_a_cooperative_grid_of_clusters(driver, vec_add):
    driver.set("clusters", 2)
    vec_add(x, x, x, 64, grid=8, block=1, cluster=4, cooperative=True)
    with pytest.raises(errors.LaunchError, match="at most 8 blocks"):
        vec_add(x, x, x, 64, grid=12, block=1, cluster=4, cooperative=True)
    vec_add(x, x, x, 64, grid=12, block=1, cluster=4)
    assert driver.calls("cuOccupancyMaxActiveClusters") == 1


def test_large_clusters_are_allowed_once(driver, vec_add):
    for _ in range(2):
        vec_add(x, x, x, 64, grid=16, block=1, cluster=16)
    assert driver.calls("cuKernelSetAttribute") == 1
    assert driver.launches()[1]["attributes"] == {"4": [16, 1, 1]}
