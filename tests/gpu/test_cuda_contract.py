"""Declared ops by the C++ API alone: real launches, graphs, streams, devices, versions, memory.

The kernels are those of tests/data/launch.cu, whose cubin is for compute capability 9.0. What needs
no GPU is in tests/faults/fake_contract*.py.
"""

from __future__ import annotations

import contracts
import pytest
import torch
from contracts import LAUNCH, changed, define, new_name
from gpu import hopper
from in_threads import in_threads

import torch_cubin

pytestmark = hopper.for_cubins


def op_of(contract: dict):
    (answer,) = define(contract, files=(LAUNCH,))
    assert answer["state"] == "defined"
    space, name = answer["name"].split("::")
    return getattr(getattr(torch.ops, space), name).default


def small(*shape: int, device: str = "cuda") -> torch.Tensor:
    """Small integers as float32: sums are exact."""
    return torch.randint(-9, 10, shape, device=device).float()


def add_into() -> dict:
    """out = x + y in place of what out held."""
    contract = contracts.vec_add()
    contract["schema"] = new_name("add_into") + "(Tensor x, Tensor y, Tensor(a!) out) -> ()"
    contract["outputs"] = []
    return contract


@pytest.mark.parametrize("shape", [(1,), (1000,), (33, 7, 5), (), (0, 3)])
def test_values(shape: tuple[int, ...]) -> None:
    op = op_of(contracts.vec_add())
    x, y = small(*shape), small(*shape)
    out = op(x, y)
    assert out.shape == x.shape
    assert torch.equal(out, x + y)


def test_errors_keep_their_text() -> None:
    op = op_of(contracts.vec_add())
    with pytest.raises(RuntimeError, match=r"torch_cubin \[input\]: .*'y'.*got float16"):
        op(small(3), small(3).half())
    with pytest.raises(RuntimeError, match=r"torch_cubin \[input\]: .*got cpu"):
        op(small(3), torch.zeros(3))


def test_a_failed_call_holds_no_memory() -> None:
    contract = changed(contracts.vec_add(), "kernels/0/block", [["numel", "x"], 1, 1])
    op = op_of(contract)
    x = small(5000)  # more threads than a block has: the launch is refused after the allocation
    before = torch.cuda.memory_allocated()
    for _ in range(10):
        with pytest.raises(RuntimeError, match=r"torch_cubin \[launch\]"):
            op(x, x)
    assert torch.cuda.memory_allocated() == before


def test_out_of_memory_reads_as_pytorchs() -> None:
    contract = changed(contracts.vec_add(), "tensors/out/shape", [1 << 44])
    op = op_of(contract)
    with pytest.raises(RuntimeError, match=r"^CUDA out of memory\. torch_cubin \[oom\]"):
        op(small(3), small(3))


@pytest.mark.parametrize("loaded", [False, True], ids=["first call", "later call"])
def test_in_a_cuda_graph(loaded: bool) -> None:
    """Also where the capture holds the very first call, which loads the module."""
    op = op_of(contracts.vec_add())
    x, y = small(1000), small(1000)
    if loaded:
        op(x, y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op(x, y)
    for _ in range(3):
        x.copy_(small(1000))
        graph.replay()
        assert torch.equal(out, x + y)


def test_a_swap_leaves_captured_kernels_alone() -> None:
    contract = contracts.vec_add()
    op = op_of(contract)
    x, y = small(1000), small(1000)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op(x, y)
    assert define(changed(contract, "kernels/0/block", [1024, 1, 1]), files=(LAUNCH,))[0][
        "state"
    ] == "swapped"  # fmt: skip
    x.copy_(small(1000))
    graph.replay()
    assert torch.equal(out, x + y)
    assert torch.equal(op(x, y), x + y)


def test_on_another_stream() -> None:
    """The launch goes to the current stream, after the wait there."""
    contract = {
        "schema": new_name("wait") + "(Tensor(a!) out, int cycles, int value) -> ()",
        "tensors": {"out": {"dtype": "int32", "shape": [1], "align": 4}},
        "outputs": [],
        "kernels": [
            {
                "images": [0],
                "kernel": "wait_and_write",
                "args": [
                    ["int64", ["number", "cycles"]],
                    ["pointer", "out"],
                    ["int32", ["number", "value"]],
                ],
                "grid": [1, 1, 1],
                "block": [1, 1, 1],
            }
        ],
    }
    op = op_of(contract)
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    op(out, 0, 1)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        op(out, 300_000_000, 2)
        done = stream.record_event()
        assert not done.query()  # it is this stream that waits
    stream.synchronize()
    assert out.item() == 2


def test_a_changed_tensor_is_noticed_by_backward() -> None:
    """The op counts the versions of what it writes to, as PyTorch's own ops do."""
    op = op_of(add_into())
    x = small(8).requires_grad_()
    saved = small(8)
    product = x * saved
    version = saved._version
    op(small(8), small(8), saved)
    assert saved._version == version + 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_no_derivative_is_an_error() -> None:
    op = op_of(contracts.vec_add())
    x = small(8).requires_grad_()
    with pytest.raises(RuntimeError, match="has no derivative"):
        op(x, small(8))
    with torch.no_grad():
        assert torch.equal(op(x, x), 2 * x)
    with torch.inference_mode():
        y = small(8)
        assert torch.equal(op(y, y), 2 * y)


def test_tensors_that_kernels_must_not_access_are_refused() -> None:
    """Lazy views and overlapping tensors that the op changes; elements without memory."""
    contract = contracts.vec_add()
    contract["schema"] = new_name("into") + "(Tensor x, Tensor y, Tensor(a!) out) -> ()"
    contract["outputs"] = []
    strided = {"dtype": "float32", "shape": ["*s"], "layout": "strided", "align": 4}
    contract["tensors"] = {"x": strided, "y": strided, "out": strided}
    op = op_of(contract)
    x, out = small(8), torch.zeros(8, device="cuda")
    for lazy in (torch._neg_view(out), torch.view_as_complex(out.view(4, 2)).conj().imag):
        with pytest.raises(RuntimeError, match=r"resolve_neg\(\)"):
            op(x[: lazy.numel()], x[: lazy.numel()], lazy)
    with pytest.raises(RuntimeError, match="overlaps itself"):
        op(x, x, out[:1].expand(8))
    with pytest.raises(RuntimeError, match="overlaps itself"):
        op(small(8, 4), small(8, 4), torch.zeros(64, device="cuda").as_strided((8, 4), (2, 1)))
    for offset in (0, 1):
        gone = small(9)[offset : offset + 8]
        gone.untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match="has elements but no memory"):
            op(x, gone, out)
    assert not out.any()
    op(x, x, out)
    assert torch.equal(out, 2 * x)


def test_scratch_and_shared_memory() -> None:
    """`reverse` stages a row in dynamic shared memory, more than 48 KiB of it."""
    contract = {
        "schema": new_name("reverse") + "(Tensor x) -> Tensor",
        "tensors": {
            "x": {"dtype": "float32", "shape": ["n"]},
            "out": {"dtype": "float32", "shape": ["n"]},
        },
        "outputs": ["out"],
        "scratch": [{"name": "unused", "dtype": "float64", "shape": [["mul", 2, ["number", "n"]]]}],
        "kernels": [
            {
                "images": [0],
                "kernel": "reverse",
                "args": [["pointer", "x"], ["pointer", "out"], ["int32", ["number", "n"]]],
                "grid": [1, 1, 1],
                "block": [256, 1, 1],
                "shared_memory": ["mul", 4, ["number", "n"]],
            }
        ],
    }
    op = op_of(contract)
    for n in (1, 1000, 20_000, 50_000):
        x = small(n)
        assert torch.equal(op(x), x.flip(0))


def test_a_tensor_map() -> None:
    contract = {
        "schema": new_name("tma") + "(Tensor x, int row, int column) -> Tensor",
        "tensors": {
            "x": {"dtype": "float32", "shape": ["m", "n"], "layout": "rows"},
            "out": {"dtype": "float32", "shape": [8, 16]},
        },
        "outputs": ["out"],
        "kernels": [
            {
                "images": [0],
                "kernel": "tma_box",
                "args": [
                    ["tensor_map", {"tensor": "x", "box": [8, 16]}],
                    ["int32", ["number", "row"]],
                    ["int32", ["number", "column"]],
                    ["int32", ["numel", "out"]],
                    ["pointer", "out"],
                ],
                "grid": [1, 1, 1],
                "block": [128, 1, 1],
            }
        ],
    }
    op = op_of(contract)
    wide = small(64, 128)
    for x in (wide, wide[:, :96]):
        for row, column in ((0, 0), (5, 12), (40, 64)):
            assert torch.equal(op(x, row, column), x[row : row + 8, column : column + 16])
    # Past the end there are zeros.
    assert torch.equal(op(wide, 60, 0)[4:], torch.zeros(4, 16, device="cuda"))


def test_many_threads() -> None:
    op = op_of(contracts.vec_add())

    def work() -> None:
        x, y = small(10_000), small(10_000)
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            for _ in range(100):
                assert torch.equal(op(x, y), x + y)

    in_threads(work, [()] * 8)


@pytest.mark.gpu(2)
def test_two_devices() -> None:
    op = op_of(contracts.vec_add())
    for device in ("cuda:1", "cuda:0"):
        x = small(100, device=device)
        assert torch.equal(op(x, x), 2 * x)
        assert str(op(x, x).device) == device
    with pytest.raises(RuntimeError, match="another device"):
        op(small(3, device="cuda:0"), small(3, device="cuda:1"))


def test_preload_leaves_only_launches() -> None:
    contract = contracts.vec_add()
    op = op_of(contract)
    contracts.preload(contract["schema"].split("(")[0])
    before = torch_cubin._native.library.launches()
    x = small(5)
    assert torch.equal(op(x, x), 2 * x)
    assert torch_cubin._native.library.launches() == before + 1


def test_a_package(tmp_path) -> None:
    contract = contracts.vec_add()
    folder = contracts.write_package(tmp_path, contract, files=(LAUNCH,))
    (answer,) = contracts.load_package(folder)
    op = getattr(torch.ops.test_contracts, answer["name"].split("::")[1])
    x = small(777)
    assert torch.equal(op(x, x), 2 * x)


def test_compile_without_a_fake_is_an_error() -> None:
    """Python registers fakes; without one, torch.compile raises an error and computes nothing
    wrong."""
    op = op_of(contracts.vec_add())
    x = small(16)
    with pytest.raises(Exception, match="[Ff]ake|[Mm]eta|[Uu]nsupported"):
        torch.compile(lambda x: op(x, x) + 1, fullgraph=True, backend="eager")(x)
