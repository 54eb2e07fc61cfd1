"""Ops of Triton's kernels on a GPU: the bits are those of Triton's own launches.

tests/triton_table.py lists the launches. The packages of tests/data/triton were compiled by
Triton 3.4, 3.6 and 3.9; they are run in a process that cannot import Triton.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu import hopper
from programs import output_of

import torch_cubin
import torch_cubin.producers.triton as tct
from torch_cubin import errors
from torch_cubin._native import library

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data" / "triton"
triton = pytest.importorskip("triton", reason="Triton is not installed")
table = pytest.importorskip("triton_table", exc_type=ImportError)

pytestmark = hopper.for_cubins


@pytest.fixture(scope="module", autouse=True)
def allocator() -> None:
    """Memory for Triton's own launches that need scratch."""
    triton.set_allocator(
        lambda size, align, stream: torch.empty(size, device="cuda", dtype=torch.int8)
    )


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def launched_by_triton(case) -> tuple[object, torch.Tensor]:
    inputs = case.inputs()
    out = case.out(*inputs) if case.out else torch.empty_like(inputs[0])
    grid, arguments = case.launch(out, *inputs)
    compiled = case.kernel[grid](*arguments, **case.options)
    torch.cuda.synchronize()
    return compiled, out


def run(op: torch_cubin.Op, case) -> torch.Tensor:
    inputs = case.inputs()
    made = op(*inputs)
    torch.cuda.synchronize()
    return inputs[-1] if made is None else made  # what it returns, or changes


@pytest.mark.parametrize("name", sorted(table.known()))
def test_bits_are_those_of_tritons_launcher(name: str, nan_memory) -> None:
    case = table.CASES[name]
    compiled, wanted = launched_by_triton(case)
    op = table.define(name, "triton_bits", compiled)
    before = library.launches()
    got = run(op, case)
    assert library.launches() == before + 1
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    assert torch.equal(as_bytes(got), as_bytes(wanted)), (got, wanted)


def test_enough_kernels_are_compared() -> None:
    """The test above launches each of these binaries through Triton and through torch_cubin."""
    compared = table.different_kernels()
    assert len(compared) >= table.LEAST_KERNELS, len(compared)
    missing = {
        kind: names for kind, (names, _) in table.KINDS.items()
        if not any(name in table.known() for name in names)
    }  # fmt: skip
    assert missing == {}, "of these kinds no case runs"


def test_compiled_ahead_of_time_is_the_same() -> None:
    name = "softmax"
    _, wanted = launched_by_triton(table.CASES[name])
    op = table.define(name, "triton_ahead", table.kernels_of(table.CASES[name]))
    assert torch.equal(run(op, table.CASES[name]), wanted)
    x = torch.randn(7, 100, device="cuda")
    torch.testing.assert_close(op(x), torch.softmax(x, dim=-1))
    compiled = torch.compile(lambda x: op(x) * 2, fullgraph=True)
    torch.testing.assert_close(compiled(x), torch.softmax(x, dim=-1) * 2)
    torch.library.opcheck(op.overload, (x,))


def test_scratch_in_a_cuda_graph() -> None:
    name = "descriptors made on the device, in scratch"
    op = table.define(name, "triton_graph", table.kernels_of(table.CASES[name], ("sm_90a",)))
    x = torch.randn(96, 80, device="cuda")
    op(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op(x)
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert torch.equal(out, 2 * x)


def test_scratch_that_is_zeroed(nan_memory) -> None:
    (kernel,) = tct.compile(table.add, "*fp32:16, *fp32:16, *fp32:16, i32, 256", "sm_90a")
    op = tct.define_op(
        "triton_zeroed::copy(Tensor x) -> Tensor",
        kernel=kernel,
        tensors={"x": "float32[n]", "out": "float32[n]"},
        scratch={"zeros": "float32[n] zeroed"},
        args={"x_ptr": "x", "y_ptr": "zeros", "out_ptr": "out"},
        grid=lambda n, BLOCK: torch_cubin.cdiv(n, BLOCK),
    )
    for n in (1, 1000, 100_000):
        x = torch.randn(n, device="cuda")
        assert torch.equal(op(x), x)


def test_calls_choose_among_specialisations() -> None:
    kernels = [
        kernel
        for signature in (
            "*fp32:16, *fp32:16, *fp32:16, i32:16, 256",
            "*fp32, *fp32, *fp32, i32, 256",
        )
        for kernel in tct.compile(table.add, signature, "sm_90a")
    ]
    op = table.define("add", "triton_variants", kernels)
    requires = [kernel.get("requires", ()) for kernel in op.contract["kernels"]]
    assert requires[0], requires
    assert not requires[1], requires
    for start, n in ((0, 4096), (0, 1001), (1, 4096), (3, 77)):
        x, y = torch.randn(n + start, device="cuda")[start:], torch.randn(n, device="cuda")
        assert torch.equal(op(x, y), x + y)
    only = table.define("add", "triton_specialised", kernels[0])
    x = torch.randn(1001, device="cuda")
    before = library.launches()
    with pytest.raises(errors.InputError, match=r"argument 'n' a multiple of 16, got 1001"):
        only(x, x)
    assert library.launches() == before


def test_cuda_source_compiled_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the NVRTC that PyTorch brings, with CUDA's headers where they are installed."""
    monkeypatch.setenv("TORCH_CUBIN_CACHE", str(tmp_path))
    source = """
#include <cstdint>
template <class T, int N> __global__ void axpy(T* y, const T* x, T a, int32_t n) {
  const int first = (blockIdx.x * blockDim.x + threadIdx.x) * N;
  for (int i = first; i < first + N && i < n; ++i) y[i] += a * x[i];
}
"""
    module = torch_cubin.compile(source, names=["axpy<float, 4>", "axpy<double, 1>"])
    for dtype, name, step in (
        (torch.float32, "axpy<float,4>", 4),
        (torch.float64, "axpy<double,1>", 1),
    ):
        x, y = (torch.randn(1001, device="cuda", dtype=dtype) for _ in range(2))
        wanted = y + 2 * x
        scalar = torch_cubin.float64(2) if step == 1 else torch_cubin.float32(2)
        module[name](y, x, scalar, 1001, grid=-(-1001 // (64 * step)), block=64)
        torch.testing.assert_close(y, wanted)
    assert list(tmp_path.glob("*.compiled"))


def test_the_example_runs_without_triton(tmp_path: Path) -> None:
    """An autotuned matmul and flash attention, compiled ahead of time; tune() chooses."""
    printed = output_of(
        [sys.executable, str(ROOT / "examples" / "triton_kernels.py")],
        timeout=120,
        env={**os.environ, "TORCH_CUBIN_CACHE": str(tmp_path)},
    )
    for words in ("Triton cannot be imported here", "attention 1x6/3x100x700x128 causal: error",
                  "argument 'N' a multiple of 16", "times as fast as the first"):  # fmt: skip
        assert words in printed, printed
    assert "WRONG" not in printed
    (kept,) = (tmp_path / "tuned").glob("*.json")
    table = json.loads(kept.read_text())
    assert table["gpu"] == torch.cuda.get_device_name()
    (call,) = table["ops"][0]["calls"]
    assert call["key"] == {"a": ["float16", [512, 4096]], "b": ["float16", [4096, 4096]]}


def test_every_tuned_configuration_is_exact(tmp_path: Path, monkeypatch, nan_memory) -> None:
    monkeypatch.setenv("TORCH_CUBIN_CACHE", str(tmp_path))
    ops = torch_cubin.load_package(ROOT / "examples" / "triton_ahead_of_time" / "package")
    op = ops["triton_example::matmul"]
    shapes = [(512, 1024, 768), (64, 4096, 512)]
    calls = []
    for m, n, k in shapes:
        a = torch.randint(-3, 4, (m, k), device="cuda").half()
        calls.append((a, torch.randint(-3, 4, (k, n), device="cuda").half()))
    before = [(a.clone(), b.clone()) for a, b in calls]
    tuning = torch_cubin.tune(op, calls)
    for (a, b), (a_before, b_before) in zip(calls, before, strict=True):
        assert torch.equal(a, a_before)
        assert torch.equal(b, b_before)
    assert len(tuning.calls) == len(shapes)
    assert all(len(one.rounds) == 5 and not one.differ for one in tuning.calls), str(tuning)
    # Every configuration gives the exact sums of small integers; and the table decides.
    for (a, b), one in zip(calls, tuning.calls, strict=True):
        library.watch_op(op.name)
        for kernel in one.rounds:
            library.force_kernel(kernel)
            assert torch.equal(op(a, b).double(), a.double() @ b.double())
        library.watch_op(None)
        assert torch.equal(op(a, b).double(), a.double() @ b.double())
        # The times prove nothing here: other tests run on the same GPU. Which kernel a table's
        # line runs is tested on the stand-in driver (tests/faults/fake_tuned_calls.py).
    torch_cubin.load_tuned(tuning.save(tmp_path / "table.json") or tmp_path / "table.json")
    # An op that changes an argument is measured on copies of it.
    kernels = [
        kernel for block in (128, 512)
        for kernel in tct.compile(table.add, f"*fp32, *fp32, *fp32, i32, {block}", "sm_90a")
    ]  # fmt: skip
    adds = tct.define_op(
        "triton_tuned_in_place::add_(Tensor(a!) x, Tensor y) -> ()",
        kernel=[torch_cubin.KernelChoice(kernels[0], when=lambda x: x.numel() > 0), kernels[1]],
        tensors={"x": "float32[n]", "y": "float32[n]"},
        args={"x_ptr": "x", "y_ptr": "y", "out_ptr": "x"},
        grid=lambda n, BLOCK: torch_cubin.cdiv(n, BLOCK),
    )
    x, y = torch.ones(10_000, device="cuda"), torch.ones(10_000, device="cuda")
    (narrow,) = torch_cubin.tune(adds, (x, y)).calls
    assert (len(narrow.rounds), len(narrow.elsewhere)) == (1, 1)
    (wide,) = torch_cubin.tune(adds, {"x": x, "y": y}, any_condition=True).calls
    assert (len(wide.rounds), wide.differ) == (2, {})
    assert x.sum() == 10_000
    adds(x, y)
    assert x.sum() == 20_000


def test_autotuned_configurations() -> None:
    configs = [
        triton.Config({"BLOCK": 128}, num_warps=4),
        triton.Config({"BLOCK": 512}, num_warps=8),
    ]
    tuned = triton.autotune(configs, key=["n"])(table.add)
    for n in (1024, 65536):
        x, y = torch.randn(n, device="cuda"), torch.randn(n, device="cuda")
        out = torch.empty_like(x)
        tuned[lambda meta, n=n: (triton.cdiv(n, meta["BLOCK"]),)](x, y, out, n)
    op = tct.define_op(
        "triton_tuned::add(Tensor x, Tensor y) -> Tensor",
        kernel=tuned,
        tuned=True,
        tensors={"x": "float32[n]", "y": "float32[n]", "out": "float32[n]"},
        args={"x_ptr": "x", "y_ptr": "y", "out_ptr": "out"},
        grid=lambda n, BLOCK: torch_cubin.cdiv(n, BLOCK),
    )
    entries = {values[0]: group for values, group in op.contract["tuned"]["entries"]}
    assert entries.keys() == {1024, 65536}
    for n in (1024, 65536, 4096):
        x, y = torch.randn(n, device="cuda"), torch.randn(n, device="cuda")
        assert torch.equal(op(x, y), x + y)


NEVER_ENDS = """
import sys, torch, triton
sys.path.insert(0, sys.argv[1])
import triton_table as table
from triton.tools.tensor_descriptor import TensorDescriptor
rows, m, n, k = int(sys.argv[2]), 128, 128, 256
a, b = (torch.randn(size, k, device="cuda", dtype=torch.float16) for size in (m, n))
c = torch.empty(m, n, device="cuda", dtype=torch.float16)
maps = (TensorDescriptor.from_tensor(a, [rows, 64]), TensorDescriptor.from_tensor(b, [128, 64]))
table.halved_matmul[(m // rows, 1)](*maps, c, k, n, rows, 128, 64, num_warps=4, num_stages=3)
print("launched", flush=True)
torch.cuda.synchronize()
print("ended", (c - a @ b.t()).abs().max().item() < 0.5)
"""


@pytest.mark.parametrize("rows", [64, 128])
def test_launches_refused_as_endless_do_not_end_under_tritons_launcher(rows: int) -> None:
    """In a process of its own, which is ended. The kernel for 64 rows is right."""
    if triton.__version__.split(".")[:2] != ["3", "6"]:
        pytest.skip("a fault of Triton 3.6")
    child = subprocess.Popen(
        [sys.executable, "-c", NEVER_ENDS, str(ROOT / "tests"), str(rows)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout.readline() == "launched\n"
    try:
        said, _ = child.communicate(timeout=60 if rows == 64 else 4)
    except subprocess.TimeoutExpired:
        child.kill()
        said, _ = child.communicate()
    assert ("ended True" in said) == (rows == 64), said


CHILD = """
import sys
sys.modules["triton"] = None  # importing it raises
import json, torch, torch_cubin
folder, inputs = sys.argv[1:]
ops = {name.split("::")[1]: op for name, op in torch_cubin.load_package(folder).items()}
given = torch.load(inputs)
wrong, rounded = [], []
for name, op in ops.items():
    arguments, wanted = given[name]
    arguments = [a.cuda() if isinstance(a, torch.Tensor) else a for a in arguments]
    got = op(*arguments)
    same = got.view(-1).view(torch.uint8).cpu(), wanted.reshape(-1).view(torch.uint8)
    close = torch.equal(*same)
    if not close and got.dtype.is_floating_point:
        a, b = got.cpu().double(), wanted.double()
        close = bool(((a - b).abs() <= 2e-3 * (1 + b.abs())).all())
        rounded.append(name)
    if not close:
        wrong.append(name)
print(json.dumps({"ops": sorted(ops), "wrong": wrong, "rounded": rounded}))
"""


@pytest.mark.parametrize("version", ["3.4.0", "3.6.0", "3.9.0"])
def test_packages_run_without_triton(version: str, tmp_path: Path) -> None:
    """Their results are those of this Triton: compilers differ in the order of their sums."""
    manifest = json.loads((DATA / f"package_{version}" / "manifest.json").read_text())
    names = [op["schema"].split("::")[1].split("(")[0] for op in manifest["ops"]]
    given = {}
    for name, case in table.known().items():
        if table.op_name(name) not in names:
            continue
        _, wanted = launched_by_triton(case)
        # .cpu() makes strided and unaligned inputs plain; their values stay.
        inputs = [a.cpu() if isinstance(a, torch.Tensor) else a for a in case.inputs()]
        given[table.op_name(name)] = inputs, wanted.cpu()
    assert sorted(given) == sorted(names)
    torch.save(given, tmp_path / "given.pt")
    command = [sys.executable, "-c", CHILD, str(DATA / f"package_{version}")]
    printed = output_of(
        [*command, str(tmp_path / "given.pt")],
        timeout=120,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    answer = json.loads(printed.splitlines()[-1])
    assert answer["ops"] == sorted(names)
    assert not answer["wrong"], answer
    # Bits differ where compilers may order sums otherwise, and nowhere else.
    assert all(name.startswith(("matmul", "softmax")) for name in answer["rounded"]), answer
