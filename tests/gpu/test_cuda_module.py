"""A user's own cubins: every kind of argument and launch, streams, captures, unload, globals.

The kernels are those of tests/data/launch.cu, whose cubin is for compute capability 9.0.
"""

from __future__ import annotations

import ctypes
import gc
import math
import runpy
import struct
import threading
import time
from pathlib import Path

import pytest
import torch
from gpu import hopper
from in_threads import in_threads

import torch_cubin
from torch_cubin import errors

DATA = Path(__file__).resolve().parents[1] / "data"
LAUNCH = DATA / "launch.sm_90a.cuda130.cubin"

pytestmark = hopper.for_cubins


@pytest.fixture(scope="module")
def module() -> torch_cubin.Module:
    return torch_cubin.load(LAUNCH)


@pytest.fixture(params=["called", "plainly"])
def launched(request: pytest.FixtureRequest):
    """A kernel as users call it, and through the Python path that takes over where C does not."""
    if request.param == "called":
        return lambda kernel: kernel
    return lambda kernel: kernel._launch_plainly


def small(*shape: int, device: str = "cuda") -> torch.Tensor:
    """Small integers as float32: sums are exact."""
    return torch.randint(-9, 10, shape, device=device).float()


# --- arguments ---


@pytest.mark.parametrize("n", [1, 255, 1000, 100_003])
def test_vec_add(module, launched, n: int) -> None:
    x, y, z = small(n), small(n), torch.full((n + 1,), math.nan, device="cuda")
    launched(module["vec_add"])(x, y, z, n, grid=(n + 255) // 256, block=256)
    assert torch.equal(z[:n], x + y)
    assert z[n].isnan()


@pytest.mark.parametrize("source", ["path", "bytes", "arch_set"])
def test_sources(source: str) -> None:
    paths = sorted(DATA.glob("vec_add.*.cubin"))
    one = DATA / "vec_add.sm_90a.cuda124.cubin"
    given = {"path": one, "bytes": one.read_bytes(), "arch_set": paths}[source]
    x, y, z = small(300), small(300), torch.empty(300, device="cuda")
    with torch_cubin.load(given) as module:
        module["vec_add"](x, y, z, 300, grid=2, block=256)
    assert torch.equal(z, x + y)


@pytest.mark.fault_case(13)
def test_an_image_for_another_gpu() -> None:
    module = torch_cubin.load(DATA / "vec_add.sm_80.cuda118.cubin")
    x = small(4)
    with pytest.raises(errors.ArchError, match="sm_80"):
        module["vec_add"](x, x, x, 4, grid=1, block=32)


def echo_arguments(case: str) -> tuple:
    if case == "smallest":
        return (True, -128, 255, -32768, 65535, -(2**31), 2**32 - 1, 1.1, -(2**63), 0.1, None)
    if case == "largest":
        limits = (127, 0, 32767, 0, 2**31 - 1, 0, -math.inf, 2**63 - 1, math.inf, 2**64 - 16)
        return (False, *limits)
    if case == "scalars":
        return (
            *(torch_cubin.uint8(1), torch_cubin.int8(-5), torch_cubin.uint8(200)),
            *(torch_cubin.int16(-300), torch_cubin.float16(1.5), torch_cubin.int32(-7)),
            *(torch_cubin.uint32(7), torch_cubin.float32(0.1), torch_cubin.int64(2**40)),
            *(torch_cubin.float64(0.1), torch_cubin.uint64(64)),
        )
    numpy = pytest.importorskip("numpy")
    return (
        *(numpy.bool_(True), numpy.int8(-5), numpy.uint8(200), numpy.int16(-300)),
        *(torch_cubin.bfloat16(1.5), numpy.int32(-7), numpy.uint32(7), numpy.float32(0.1)),
        *(numpy.int64(2**40), numpy.float64(0.1), ctypes.c_void_p(64)),
    )


ECHOED = {
    "smallest": (1, -128, 255, -32768, 65535, -(2**31), 2**32 - 1, 1.1, -(2**63), 0.1, 0),
    "largest": (0, 127, 0, 32767, 0, 2**31 - 1, 0, -math.inf, 2**63 - 1, math.inf, -16),
    "scalars": (1, -5, 200, -300, 0x3E00, -7, 7, 0.1, 2**40, 0.1, 64),
    "numpy": (1, -5, 200, -300, 0x3FC0, -7, 7, 0.1, 2**40, 0.1, 64),
}


@pytest.mark.parametrize("case", ECHOED)
def test_scalars_arrive_as_they_were(module, launched, case: str) -> None:
    out = torch.zeros(11, dtype=torch.int64, device="cuda")
    launched(module["echo"])(*echo_arguments(case), out, grid=1, block=1)
    expected = list(ECHOED[case])
    expected[7] = struct.unpack("<i", struct.pack("<f", expected[7]))[0]
    expected[9] = struct.unpack("<q", struct.pack("<d", expected[9]))[0]
    assert out.tolist() == expected


class Scale(ctypes.Structure):
    _fields_ = [
        ("factor", ctypes.c_float),
        ("offset", ctypes.c_int32),
        ("shift", ctypes.c_double),
        ("sign", ctypes.c_int8),
    ]


def structured(*values):
    """The same as a NumPy structured scalar."""
    numpy = pytest.importorskip("numpy")
    fields = [("factor", "f4"), ("offset", "i4"), ("shift", "f8"), ("sign", "i1")]
    return numpy.array([values], dtype=numpy.dtype(fields, align=True))[0]


@pytest.mark.parametrize("kind", ["ctypes", "numpy", "bytes"])
def test_a_struct_by_value(module, kind: str) -> None:
    values = (2.5, -3, 0.5, -1)
    make = {
        "ctypes": Scale,
        "numpy": structured,
        "bytes": lambda *numbers: struct.pack("<fidb7x", *numbers),
    }[kind]
    by = make(*values)
    x, out = small(500), torch.empty(500, device="cuda")
    module["scale"](by, x, out, 500, grid=2, block=256)
    assert torch.equal(out, -(x * 2.5 - 3 + 0.5))


@pytest.mark.parametrize(("row", "column"), [(0, 0), (5, 16), (60, 28), (-2, -4)])
def test_a_tensor_map(module, row: int, column: int) -> None:
    """A box of 8 x 16 out of 64 x 32: outside the tensor it is zero."""
    whole = small(64, 40)
    tensor = whole[:, :32]
    map = torch_cubin.TensorMap(tensor, (8, 16))
    out = torch.full((8, 16), math.nan, device="cuda")
    module["tma_box"](map, row, column, 128, out, grid=1, block=128)
    padded = torch.nn.functional.pad(tensor, (16, 16, 8, 8))
    assert torch.equal(out, padded[row + 8 : row + 16, column + 16 : column + 32])


def test_a_tensor_map_fills_with_nan(module) -> None:
    map = torch_cubin.TensorMap(small(8, 16), (8, 16), oob_fill="nan")
    out = torch.zeros(8, 16, device="cuda")
    module["tma_box"](map, 4, 0, 128, out, grid=1, block=128)
    assert bool(out[4:].isnan().all())
    assert not bool(out[:4].isnan().any())


def test_strided_and_foreign_arrays(module) -> None:
    class Foreign:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.__cuda_array_interface__ = tensor.__cuda_array_interface__

    x, y = small(20, 20), small(300)
    z = torch.empty(300, device="cuda")
    module["vec_add"](torch_cubin.strided(x.t()), Foreign(y), Foreign(z), 300, grid=2, block=256)
    assert torch.equal(z, x.flatten()[:300] + y)
    with pytest.raises(errors.InputError, match="not contiguous"):
        module["vec_add"](x.t(), y, z, 300, grid=2, block=256)
    with pytest.raises(errors.InputError, match="not contiguous"):
        module["vec_add"](Foreign(x.t()), y, z, 300, grid=2, block=256)
    host = torch.zeros(300)
    with pytest.raises(errors.InputError, match="expected a cuda tensor, got cpu"):
        module["vec_add"](host, y, z, 300, grid=2, block=256)


# --- launches ---


@pytest.mark.fault_case(22)
@pytest.mark.parametrize("n", [12_288, 12_289, 58_112])
def test_dynamic_shared_memory(module, n: int) -> None:
    """48 KB exactly, just above it, and all that a block may have."""
    x, out = torch.randn(n, device="cuda"), torch.empty(n, device="cuda")
    module["reverse"](x, out, n, grid=1, block=256, shared_memory=4 * n)
    assert torch.equal(out, x.flip(0))


@pytest.mark.fault_case(22)
def test_too_much_shared_memory(module) -> None:
    x = small(4)
    with pytest.raises(errors.LaunchError, match="at most 232448 dynamic bytes"):
        module["reverse"](x, x, 4, grid=1, block=32, shared_memory=232449)


def test_cooperative(module) -> None:
    blocks = torch.cuda.get_device_properties(0).multi_processor_count
    arrived = torch.zeros(1, dtype=torch.int32, device="cuda")
    parts, out = (torch.zeros(blocks, dtype=torch.int32, device="cuda") for _ in range(2))
    module["grid_sum"](arrived, parts, out, grid=blocks, block=32, cooperative=True)
    assert out.tolist() == [blocks * (blocks + 1) // 2] * blocks
    with pytest.raises(errors.LaunchError, match="is cooperative and does not fit"):
        module["grid_sum"](arrived, parts, out, grid=10**6, block=32, cooperative=True)


@pytest.mark.fault_case(21)
@pytest.mark.parametrize("size", [1, 2, 8, 16])
def test_clusters(module, size: int) -> None:
    out = torch.full((32,), -1, dtype=torch.int32, device="cuda")
    module["cluster_ranks"](out, grid=32, block=32, cluster=size)
    assert out.tolist() == [i % size + 100 * size for i in range(32)]


def test_a_cluster_of_the_binary(module) -> None:
    out = torch.full((8,), -1, dtype=torch.int32, device="cuda")
    module["cluster_of_two"](out, grid=8, block=32)
    assert out.tolist() == [200, 201] * 4
    with pytest.raises(errors.LaunchError, match="no whole number of clusters"):
        module["cluster_of_two"](out, grid=7, block=32)


def test_dependent_launches_and_priorities(module) -> None:
    x, y, z = small(1000), small(1000), torch.empty(1000, device="cuda")
    shape = {"grid": 4, "block": 256}
    for _ in range(3):
        module["vec_add"](x, y, z, 1000, programmatic_dependent_launch=True, **shape)
    module["vec_add"](x, y, z, 1000, priority=0, **shape)
    assert torch.equal(z, x + y)
    with pytest.raises(errors.LaunchError, match="priority"):
        module["vec_add"](x, y, z, 1000, priority=100, **shape)


# --- streams and devices ---


def cycles(milliseconds: float) -> int:
    return int(milliseconds * 2e6)  # of a clock of about 2 GHz


@pytest.mark.fault_case(37)
def test_launches_go_to_the_current_stream(module) -> None:
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        module["wait_and_write"](cycles(30), out, 5, grid=1, block=1)
    assert not side.query()
    assert torch.cuda.current_stream().query()
    side.synchronize()
    assert out.item() == 5


@pytest.mark.parametrize("as_handle", [False, True])
def test_launches_on_a_given_stream(module, as_handle: bool) -> None:
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    stream = side.cuda_stream if as_handle else side
    module["wait_and_write"](cycles(30), out, 6, grid=1, block=1, stream=stream)
    assert not side.query()
    side.synchronize()
    assert out.item() == 6


def test_threads_that_never_touched_cuda(module) -> None:
    fresh = torch_cubin.load(LAUNCH)
    inputs = [(small(500), small(500), torch.empty(500, device="cuda")) for _ in range(16)]
    torch.cuda.synchronize()
    barrier = threading.Barrier(16)

    def work(index: int) -> None:
        barrier.wait()
        for _ in range(20):
            fresh["vec_add"](*inputs[index], 500, grid=2, block=256)

    in_threads(work, [(i,) for i in range(16)])
    torch.cuda.synchronize()
    assert all(torch.equal(z, x + y) for x, y, z in inputs)


@pytest.mark.fault_case(37)
@pytest.mark.parametrize("stream", ["default", "side"])
@pytest.mark.parametrize("current", ["none", "somebody's"])
def test_launches_with_any_current_context(module, current: str, stream: str) -> None:
    """A launch that follows another on its device asks for less, and needs the right context."""
    cuda = ctypes.CDLL("libcuda.so.1")
    x, y, z = small(500), small(500), torch.zeros(500, device="cuda")
    chosen = torch.cuda.Stream() if stream == "side" else torch.cuda.default_stream()
    module["vec_add"](x, y, z, 500, grid=2, block=256)
    torch.cuda.synchronize()
    primary, other = ctypes.c_void_p(), ctypes.c_void_p()
    assert cuda.cuCtxGetCurrent(ctypes.byref(primary)) == 0
    if current == "somebody's":
        assert cuda.cuCtxCreate_v4(ctypes.byref(other), None, 0, 0) == 0
        # It is current now, and PyTorch's own work would go to its default stream.
        assert cuda.cuCtxSetCurrent(primary) == 0
    try:
        with torch.cuda.stream(chosen):
            torch.cuda._sleep(cycles(20))  # the launch has to wait for this stream's work
            x.fill_(7)
            assert cuda.cuCtxSetCurrent(other) == 0
            for _ in range(2):
                module["vec_add"](x, y, z, 500, grid=2, block=256)
            left = ctypes.c_void_p()
            assert cuda.cuCtxGetCurrent(ctypes.byref(left)) == 0
            assert left.value == other.value
    finally:
        assert cuda.cuCtxSetCurrent(primary) == 0
        if other:
            assert cuda.cuCtxDestroy_v2(other) == 0
    torch.cuda.synchronize()
    assert torch.equal(z, y + 7)


@pytest.mark.fault_case(37)
@pytest.mark.gpu(2)
def test_two_devices(module) -> None:
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        x, y = small(500, device=device), small(500, device=device)
        z = torch.empty(500, device=device)
        module["vec_add"](x, y, z, 500, grid=2, block=256)
        assert torch.equal(z, x + y)
    assert torch.cuda.current_device() == 0
    near = small(500, device="cuda:0")
    with pytest.raises(errors.InputError, match="another device"):
        module["vec_add"](near, y, z, 500, grid=2, block=256)
    with pytest.raises(errors.InputError, match="is of another device"):
        module["vec_add"](x, y, z, 500, grid=2, block=256, stream=torch.cuda.Stream("cuda:0"))
    tables = [module.global_tensor("table", torch.float32, (4,), i) for i in range(2)]
    tables[0].copy_(torch.ones(4))
    tables[1].copy_(torch.zeros(4))
    assert tables[0].tolist() == [1] * 4


# --- captures ---


@pytest.mark.fault_case(30)
@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_first_use_inside_a_capture(mode: str) -> None:
    """The captured call loads the module; replays go on after the Python objects are gone."""
    x, y, z = small(300), small(300), torch.zeros(300, device="cuda")
    module = torch_cubin.load(LAUNCH)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        module["vec_add"](x, y, z, 300, grid=2, block=256)
        with pytest.raises(errors.LaunchError):
            module["vec_add"](x, y, z, 300, grid=0, block=256)
        module["reverse"](z, x, 300, grid=1, block=256, shared_memory=100_000)
    assert not z.any()
    with pytest.warns(RuntimeWarning, match="stays loaded"):
        assert module.unload() is False
    with pytest.raises(errors.ClosedError):
        module["vec_add"]
    del module
    gc.collect()
    for _ in range(100):
        x.copy_(small(300))
        before = x + y
        graph.replay()
    assert torch.equal(z, before)
    assert torch.equal(x, before.flip(0))


@pytest.mark.fault_case(30)
def test_capture_after_preload() -> None:
    x, y, z = small(300), small(300), torch.zeros(300, device="cuda")
    module = torch_cubin.load(LAUNCH)
    torch_cubin.preload(module)
    torch_cubin.preload(module["vec_add"], "cuda:0")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        module["vec_add"](x, y, z, 300, grid=2, block=256)
    graph.replay()
    assert torch.equal(z, x + y)


@pytest.mark.fault_case(32)
def test_no_unload_inside_a_capture() -> None:
    x, y, z = small(300), small(300), torch.zeros(300, device="cuda")
    module = torch_cubin.load(LAUNCH)
    module["vec_add"](x, y, z, 300, grid=2, block=256)
    other = torch_cubin.load(LAUNCH)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        other["vec_add"](x, y, z, 300, grid=2, block=256)
        with pytest.raises(errors.CaptureError, match="cannot be unloaded while"):
            module.unload()
    z.zero_()
    graph.replay()
    assert torch.equal(z, x + y)
    assert module.unload() is True
    z.zero_()
    graph.replay()
    assert torch.equal(z, x + y)


# --- unload and globals ---


@pytest.mark.fault_case(32)
def test_unload_waits_for_submitted_work() -> None:
    module = torch_cubin.load(LAUNCH)
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    kernel = module["wait_and_write"]
    kernel(0, out, 1, grid=1, block=1)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    start = time.perf_counter()
    kernel(cycles(60), out, 7, grid=1, block=1, stream=side)
    submitted = time.perf_counter() - start
    assert module.unload() is True
    assert side.query()
    assert time.perf_counter() - start > submitted + 0.01
    assert out.item() == 7
    with pytest.raises(errors.ClosedError):
        kernel(0, out, 1, grid=1, block=1)


def test_global_variables() -> None:
    module = torch_cubin.load(LAUNCH)
    table = module.global_tensor("table", torch.float32, (2, 2))
    counter = module.global_tensor("counter", torch.int32)
    assert table.device == torch.device("cuda", torch.cuda.current_device())
    table.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    out = torch.empty(32, device="cuda")
    module["use_globals"](out, grid=1, block=32)
    assert out.tolist() == [1, 2, 3, 4] * 8
    table.copy_(table.cpu() * 10)
    module["use_globals"](out, grid=1, block=32)
    assert out.tolist() == [10, 20, 30, 40] * 8
    assert counter.shape == ()
    assert counter.item() == 64
    counter.fill_(5)
    module["use_globals"](out, grid=1, block=32)
    assert counter.item() == 37
    with pytest.raises(errors.NoKernelError):
        module.global_tensor("tables", torch.float32, (4,))
    with pytest.raises(errors.InputError, match="expected 16 bytes, got 20 bytes"):
        module.global_tensor("table", torch.float32, (5,))
    with pytest.warns(RuntimeWarning, match="2 tensors"):
        assert module.unload() is False
    assert table.sum().item() == 100
    del table, counter
    assert module.unload() is True


def test_a_global_tensor_keeps_its_module() -> None:
    table = torch_cubin.load(LAUNCH).global_tensor("table", torch.float32, (4,))
    gc.collect()
    table.copy_(torch.full((4,), 3.0))
    assert (table + 1).tolist() == [4] * 4


def test_the_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    path = DATA.parents[1] / "examples" / "vec_add.py"
    monkeypatch.setattr("sys.argv", [str(path)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == 0
    assert "right" in capsys.readouterr().out


def test_refused_calls_leave_the_context_whole(module) -> None:
    x = small(4)
    with pytest.raises(errors.LaunchError, match="at most 1024"):
        module["vec_add"](x, x, x, 4, grid=1, block=(32, 33))
    with pytest.raises(errors.ParamsError, match="4 bytes"):
        module["vec_add"](x, x, x, x, grid=1, block=32)
    module["vec_add"](x, x, x, 0, grid=1, block=32)
    torch.cuda.synchronize()
