"""install(): calls that it serves below autograd, and those that it passes on: both as without.

The file is over 500 lines because its tests share one process, whose dispatcher install() changes.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import many_threads
import pytest
import scaled_cases as cases
import torch
import torch.nn.functional as F
from drop_in_cases import DTYPES, integers, same
from installed import installed
from torch import Tensor

import torch_cubin
from torch_cubin import errors
from torch_cubin._drop_in import at_import, aten_kernels

ROOT = Path(__file__).resolve().parents[2]


def _served() -> dict[str, int]:
    return {row.function: row.calls for row in torch_cubin.report().served}


def _declined() -> dict[tuple[str, str], int]:
    return {(row.function, row.reason): row.calls for row in torch_cubin.report().declined}


def _out(call):
    """The call with out=, of a tensor that has the result's shape."""

    def with_out(*operands):
        out = torch.full_like(call(*operands), 9)
        result = call(*operands, out=out)
        assert result is out
        return out

    return with_out


# The operator, shapes of operands, and the call.
CALLS = [
    ("aten::mm", [(3, 4), (4, 5)], torch.mm),
    ("aten::mm.out", [(3, 4), (4, 5)], _out(torch.mm)),
    ("aten::mm", [(3, 0), (0, 5)], torch.mm),
    ("aten::mm", [(0, 4), (4, 5)], torch.mm),
    ("aten::mm", [(3, 4), (5, 4)], lambda a, b: a @ b.t()),
    ("aten::mm", [(2, 3, 4), (4, 5)], torch.matmul),
    ("aten::bmm", [(2, 3, 4), (2, 4, 5)], torch.bmm),
    ("aten::bmm.out", [(2, 3, 4), (2, 4, 5)], _out(torch.bmm)),
    ("aten::bmm", [(2, 3, 4), (4, 2, 5)], lambda a, b: torch.einsum("bij,jbk->bik", a, b)),
    ("aten::mv", [(3, 4), (4,)], torch.mv),
    ("aten::addmv.out", [(3, 4), (4,)], _out(torch.mv)),
    ("aten::addmm", [(5,), (3, 4), (4, 5)], torch.addmm),
    ("aten::addmm", [(3, 1), (3, 4), (4, 5)], lambda s, a, b: torch.addmm(s, a, b, beta=2)),
    ("aten::addmm", [(3, 5), (3, 4), (4, 5)], lambda *x: torch.addmm(*x, beta=0.5, alpha=2)),
    ("aten::addmm", [(5,), (3, 4), (4, 5)], lambda *x: torch.addmm(*x, beta=True, alpha=False)),
    ("aten::addmm", [(5,), (3, 4), (5, 4)], lambda b, x, w: F.linear(x, w, b)),
    ("aten::addmm.out", [(5,), (3, 4), (4, 5)], _out(torch.addmm)),
    ("aten::addmm_", [(3, 5), (3, 4), (4, 5)], lambda s, a, b: s.clone().addmm_(a, b, beta=2)),
    ("aten::addmm_", [(3, 5), (3, 4), (4, 5)], lambda s, a, b: s.clone().addmm_(a, b, beta=0)),
    ("aten::baddbmm", [(3, 5), (2, 3, 4), (2, 4, 5)], torch.baddbmm),
    ("aten::baddbmm.out", [(5,), (2, 3, 4), (2, 4, 5)], _out(torch.baddbmm)),
    ("aten::baddbmm_", [(2, 3, 5), (2, 3, 4), (2, 4, 5)], lambda s, a, b: s.clone().baddbmm_(a, b)),
    ("aten::addmv", [(3,), (3, 4), (4,)], torch.addmv),
    ("aten::addmv.out", [(1,), (3, 4), (4,)], _out(torch.addmv)),
    ("aten::addmv_", [(3,), (3, 4), (4,)], lambda s, a, b: s.clone().addmv_(a, b, alpha=3)),
    ("aten::sum.dim_IntList", [(5, 3)], lambda a: a.sum(0)),
    ("aten::sum.dim_IntList", [(5, 3, 2)], lambda a: a.sum((1, 0), keepdim=True)),
    ("aten::sum.dim_IntList", [(3, 5)], lambda a: a[:, 1:4].sum(-2, dtype=a.dtype)),
    ("aten::native_layer_norm", [(5, 3, 8), (8,), (8,)], lambda x, *w: F.layer_norm(x, (8,), *w)),
    ("aten::native_layer_norm", [(5, 3, 8), (3, 8)], lambda x, w: F.layer_norm(x, (3, 8), w)),
    ("aten::native_layer_norm", [(5, 8)], lambda x: F.layer_norm(x, (8,), eps=0.5)),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CALLS, ids=lambda case: case[0])
def test_served_call_equals_torch(case, dtype) -> None:
    op, shapes, call = case
    operands = [integers(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]
    expected = call(*operands)
    with warnings.catch_warnings(), installed():
        warnings.simplefilter("error")
        result = call(*operands)
        assert op in _served()
        assert _declined() == {}
    same(result, expected)
    assert result.stride() == expected.stride()


@pytest.mark.parametrize("case", CALLS, ids=lambda case: case[0])
def test_gradients_equal_torch(case) -> None:
    op, shapes, call = case
    if op.endswith(".out") or call.__name__ == "with_out":
        pytest.skip("out= has no derivative")

    def gradients() -> list[torch.Tensor]:
        operands = [integers(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
        call(*operands).square().sum().backward()
        return [operand.grad for operand in operands]

    expected = gradients()
    with installed():
        result = gradients()
        assert _declined() == {}
        assert sum(_served().values()) > 0
    for got, wanted in zip(result, expected, strict=True):
        same(got, wanted)


A = torch.arange(12.0).reshape(3, 4)
B = torch.arange(20.0).reshape(4, 5)
S = torch.arange(5.0)

# The reason that report() gives, and a call that PyTorch can do.
DECLINED = [
    ("dtype int64", lambda: torch.mm(A.long(), B.long())),
    ("dtype complex64", lambda: torch.mm(A + 1j, B + 0j)),
    ("dtype complex64", lambda: torch.mm((A + 1j).conj(), B + 0j)),
    ("dtype int64", lambda: torch.addmm(S.long(), A.long(), B.long(), beta=3)),
    ("dtype complex64", lambda: torch.addmm(S + 0j, A + 1j, B + 0j, beta=2j)),
    ("dtype int64", lambda: torch.mv(A.long(), A.long()[0])),
    ("dtype int64", lambda: torch.bmm(A[None].long(), B[None].long())),
    ("dtype int64", lambda: A.long().sum(0)),
    ("dtype bool", lambda: (A > 3).sum(0, keepdim=True)),
    ("no elements", lambda: A[:0].sum(0)),
    (
        "a dtype of the result that is neither float32 nor the input's",
        lambda: A.sum(0, dtype=torch.float64),
    ),
    ("rows that are not contiguous and aligned", lambda: A.t().sum(0)),
    ("out= of another shape, or not contiguous", lambda: torch.mm(A, B, out=torch.empty(0))),
    ("out= of another shape, or not contiguous", lambda: torch.mm(A, B, out=torch.empty(5, 3).t())),
    ("out= that shares memory with an operand", lambda: _onto_itself()),
    ("out= of another shape, or not contiguous", lambda: torch.addmm(S, A, B, out=torch.empty(0))),
    (
        "out= of another shape, or not contiguous",
        lambda: torch.empty(5, 3).t().addmm_(A, B, beta=0),
    ),
    (
        "an empty matrix, and an addend of another shape",
        lambda: torch.addmv(S[0], A[:0], A[0], beta=2),  # PyTorch: of the addend's shape
    ),
    (
        "an empty matrix, and an addend of another shape",
        lambda: torch.addmv(S[:1], A[:, :0], A[0, :0]),
    ),
]


def _onto_itself() -> torch.Tensor:
    """out= that lies in the memory of an operand, and is not read from there."""
    base = torch.arange(32.0)
    return torch.mm(base[:16].view(4, 4), torch.zeros(4, 4), out=base[:16].view(4, 4)[:, :4]) * 0


@pytest.mark.parametrize("case", DECLINED, ids=lambda case: case[0])
def test_declined_call_runs_pytorch_s_kernel_with_a_reason(case) -> None:
    reason, call = case
    expected = call()
    with installed():
        result = call()
        assert [why for _, why in _declined()] == [reason]
        assert _served() == {}
    same(result, expected)
    assert result.stride() == expected.stride()


# Calls that raise, as text: a process without the package runs them, too.
WRONG = [
    "torch.mm(A, A)",
    "torch.mm(A[0], B)",
    "torch.mm(A, B[None])",
    "torch.mm(A, B.double())",
    "torch.mm(A, B, out=torch.empty(3, 5, dtype=torch.float64))",
    "torch.mm(A, A, out=torch.empty(3, 5))",
    "torch.bmm(A[None], A[None])",
    "torch.bmm(A, B)",
    "torch.bmm(A[None], B[None].double())",
    "torch.mv(A, S)",
    "torch.mv(A, A)",
    "torch.addmm(S, A, A)",
    "torch.addmm(A[0], A, B)",
    "torch.addmm(S.double(), A, B)",
    "torch.addmm(S, A, B, out=torch.empty(3, 5, dtype=torch.float64))",
    "torch.addmm(S.bool(), A.bool(), B.bool())",
    "torch.addmm(S, A, B, beta=1j)",
    "torch.baddbmm(S, A, B)",
    "torch.addmv(S, A, S)",
    "S.clone().addmm_(A, B)",
    "F.linear(A, B)",
    "F.linear(A, A, S)",
]
_RAISED = """
import json, torch
import torch.nn.functional as F
A = torch.arange(12.0).reshape(3, 4)
B = torch.arange(20.0).reshape(4, 5)
S = torch.arange(5.0)
def raised(text):
    try:
        return repr(eval(text))
    except Exception as error:
        return type(error).__name__, str(error)
print(json.dumps([raised(text) for text in json.loads('''CALLS''')]))
"""


def test_errors_are_pytorch_s_own(fresh_python) -> None:
    done = fresh_python.run(_RAISED.replace("CALLS", json.dumps(WRONG)))
    expected = json.loads(done.stdout)
    with installed():
        for text, (kind, message) in zip(WRONG, expected, strict=True):
            with pytest.raises(Exception) as caught:
                eval(text)
            assert (type(caught.value).__name__, str(caught.value)) == (kind, message), text


_MISSING = """
import torch, torch_cubin
from torch_cubin._drop_in import aten_kernels
A = torch.ones(3, 4)
def text(call):
    try:
        return call()
    except RuntimeError as error:
        return str(error)
def into_other_dtypes():
    dtypes = [getattr(torch, name) for name in "DTYPES".split()]
    for a, b, dtype in [(A, A.t(), dtype) for dtype in dtypes] + [(A, A.t().half(), torch.double)]:
        yield text(lambda: torch.mm(a, b, out=torch.empty(3, 3, dtype=dtype)))
        yield text(lambda: torch.bmm(a[None], b[None], out=torch.empty(1, 3, 3, dtype=dtype)))
expected = [*into_other_dtypes()]
aten_kernels.register("CPU")
torch_cubin.install(policy="all")
for own, text_of in zip(into_other_dtypes(), expected):
    assert own == text_of, (own, text_of)
print(text(lambda: torch.mm(A, A)), text(lambda: torch.bmm(A, A)))
print(text(lambda: torch.mv(A, A[0, :3])))
torch.addmm(A[0, :3], A, A.t().contiguous())
torch.nn.functional.layer_norm(A, (4,))
print([row.function for row in torch_cubin.report().served])
"""


def test_without_pytorch_s_texts_ours_say_the_same(fresh_python) -> None:
    """As on torch 2.11, which prints them to stderr alone."""
    norm = "_ZN2at3cpu17native_layer_normERKNS_6TensorEN3c108ArrayRefIlEERKSt8optionalIS1_ESA_d"
    missing = f"torch_exception_get_what_without_backtrace torch.library.get_kernel {norm}"
    dtypes = "float64 float16 bfloat16 float8_e4m3fn float8_e5m2 complex64 complex128 bool"
    code = _MISSING.replace("DTYPES", dtypes + " uint8 int8 int16 int32 int64")
    done = fresh_python.run(code, env={**os.environ, "TORCH_CUBIN_TEST_MISSING": missing})
    assert "mat1 and mat2 shapes cannot be multiplied (3x4 and 3x4)" in done.stdout
    assert "batch1 must be a 3D tensor" in done.stdout
    assert "size mismatch, got input (3), mat (3x4), vec (3)" in done.stdout
    # Neither addmm without get_kernel, nor a norm without PyTorch's.
    assert done.stdout.endswith("[]\n")
    assert done.stderr == ""


def test_a_pytorch_without_the_c_functions_is_an_error_that_changes_nothing(fresh_python) -> None:
    code = """
import torch, torch_cubin
from torch_cubin import errors
from torch_cubin._drop_in import aten_kernels
try:
    aten_kernels.register("CPU")
except errors.InternalError as error:
    print(error)
print(aten_kernels.is_ours("addmm", "CPU"), torch.mm(torch.ones(2, 2), torch.ones(2, 2)).sum())
"""
    missing = {**os.environ, "TORCH_CUBIN_TEST_MISSING": "aoti_torch_cpu_bmm_out"}
    printed = fresh_python.output(code, env=missing)
    assert "torch_cubin [internal]: PyTorch lacks C functions" in printed
    assert printed.endswith("False tensor(8.)\n")


def _python(code: str, path: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (path, str(ROOT)))),
        **environment,
    }
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return done


# --- beside the rest of PyTorch ---


def test_transforms_modes_and_layers() -> None:
    torch.manual_seed(0)
    a, b, s = torch.randn(3, 4), torch.randn(4, 5), torch.randn(5)
    cell = torch.nn.LSTMCell(4, 5)
    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(2, 3, 8)
    nested = torch.nested.nested_tensor([a[:2], a], layout=torch.jagged)

    def linear(v):
        return F.linear(v, b.t(), s)

    def autocast():
        with torch.autocast("cpu", torch.bfloat16):
            return linear(a)

    def inference():
        with torch.inference_mode():
            return attention(x, x, x)[0].clone()

    calls = {
        "vmap": lambda: torch.vmap(torch.mm, (0, None))(torch.stack([a, a + 1]), b),
        "vmap of both": lambda: torch.vmap(torch.mm)(torch.stack([a, a]), torch.stack([b, b])),
        "vmap of linear": lambda: torch.vmap(linear)(torch.stack([a, a + 1])),
        "grad": lambda: torch.func.grad(lambda v: linear(v).square().sum())(a),
        "jvp": lambda: torch.func.jvp(linear, (a,), (a,))[1],
        "hessian": lambda: torch.func.hessian(lambda v: (v @ b).square().sum())(a),
        "autocast": autocast,
        "inference mode": inference,
        "LSTMCell": lambda: cell(a)[0],
        "nested": lambda: F.linear(nested, b.t(), s).values(),
        "sparse": lambda: torch.mm(a.to_sparse_csr(), b),
        "negative view": lambda: torch.mm(torch._neg_view(a), b),
        "an operator by name": lambda: torch.ops.aten.mm(a, b),
        "make_fx": lambda: torch.fx.experimental.proxy_tensor.make_fx(linear)(a)(a),
        "trace": lambda: torch.jit.trace(linear, (a,))(a),
    }
    expected = {name: call() for name, call in calls.items()}
    with installed():
        for name, call in calls.items():
            torch_cubin.report(reset=True)
            torch.testing.assert_close(
                call(), expected[name], msg=lambda text, n=name: f"{n}: {text}"
            )
            if name != "sparse":
                assert _served(), name


def test_compiled_autograd(fresh_dynamo) -> None:
    from torch._dynamo import compiled_autograd

    enable = getattr(compiled_autograd, "_enable", None) or compiled_autograd.enable
    x, w, b = integers(3, 4), integers(5, 4, seed=1), integers(5, seed=2)

    def gradients() -> list[torch.Tensor]:
        leaves = [each.clone().requires_grad_() for each in (x, w, b)]
        result = F.linear(*leaves).square().sum()
        torch_cubin.report(reset=True)
        with enable(torch.compile(backend="eager")):
            result.backward()
        return [leaf.grad for leaf in leaves]

    expected = gradients()
    with installed():
        result = gradients()
        assert _served()["aten::mm"] == 2
    for got, wanted in zip(result, expected, strict=True):
        same(got, wanted)


def test_a_forked_child_is_served() -> None:
    a, b, s = integers(8, 8), integers(8, 8, seed=1), integers(8, seed=2)
    expected = torch.addmm(s, a, b)
    with installed():
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            status = 1
            try:
                torch_cubin.report(reset=True)
                equal = torch.equal(torch.addmm(s, a, b), expected)
                served = _served() == {"aten::addmm": 1}
                with torch_cubin.install(policy="all"):
                    equal &= torch.equal(torch.addmm(s, a, b), expected)
                status = 0 if equal and served else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        same(torch.addmm(s, a, b), expected)


def test_meta_and_fake_tensors_never_reach_it() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with installed():
        assert torch.mm(A.to("meta"), B.to("meta")).shape == (3, 5)
        with FakeTensorMode():
            assert torch.addmm(torch.empty(5), torch.empty(3, 4), torch.empty(4, 5)).shape == (3, 5)
        assert _served() == {}
        assert _declined() == {}


def test_several_dispatch_modes_and_flops() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import FlopCounterMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with installed(), Mode(), FlopCounterMode(display=False) as flops, Mode():
        result = torch.addmm(S, A, B)
    same(result, S + A @ B)
    assert flops.get_total_flops() == 2 * 3 * 4 * 5


def test_compiled_graphs_reach_it_by_out(fresh_dynamo) -> None:
    """Inductor's graphs call extern kernels, which are the operators' out= forms."""
    compiled = torch.compile(lambda a, b, s: torch.addmm(s, torch.mm(a, b), b.t() @ b))
    operands = integers(3, 4), integers(4, 4, seed=1), integers(4, seed=2)
    expected = compiled(*operands)  # compiled before
    with installed():
        same(compiled(*operands), expected)
        assert _served()["aten::mm.out"] == 2
        assert "aten::addmm.out" in _served()


# --- the switch ---


def test_handles_nest_and_removing_twice_does_nothing() -> None:
    aten_kernels.register("CPU")
    first = torch_cubin.install(policy="all")
    second = torch_cubin.install(policy="all")
    assert first.active
    assert "active" in repr(first)
    first.remove()
    first.remove()
    torch.mm(A, B)
    assert _served() == {"aten::mm": 1}
    second.remove()
    torch.mm(A, B)
    assert _served() == {"aten::mm": 1}
    assert not second.active
    with torch_cubin.install(policy="all"):
        torch.mm(A, B)
    assert _served() == {"aten::mm": 1}  # counted anew


def _groups() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    offs = torch.tensor([3, 3, 10], dtype=torch.int32)
    return torch.randn(10, 16).bfloat16(), torch.randn(3, 16, 8).bfloat16(), offs


@pytest.mark.parametrize("mode", ["rows", "columns", "contraction", "batches"])
def test_products_of_groups(mode: str) -> None:
    rows, matrices, offs = _groups()
    a, b, ends = {
        "rows": (rows, matrices, offs),
        "columns": (matrices, torch.randn(8, 16).bfloat16(), offs // 2),
        "contraction": (rows.t(), torch.randn(10, 8).bfloat16(), offs),
        "batches": (torch.randn(3, 2, 16).bfloat16(), matrices, None),
    }[mode]
    expected = torch._grouped_mm(a, b, offs=ends)
    with installed():
        out = torch._grouped_mm(a, b, offs=ends)
    assert _served() == {"aten::_grouped_mm": 1}
    assert out.stride() == expected.stride()
    if mode == "columns":  # what follows the last end is nobody's
        out, expected = out[:, :5], expected[:, :5]
    torch.testing.assert_close(out, expected)


def test_gradients_of_products_of_groups() -> None:
    rows, matrices, offs = _groups()
    rows.requires_grad_()
    matrices.requires_grad_()

    def gradients() -> tuple[torch.Tensor, ...]:
        out = F.grouped_mm(rows, matrices, offs=offs)
        return torch.autograd.grad(out.float().square().sum(), (rows, matrices))

    expected = gradients()
    with installed():
        torch.testing.assert_close(gradients(), expected)
    assert _served()["aten::_grouped_mm"] == 3


def test_products_of_groups_that_are_left_to_pytorch() -> None:
    rows, matrices, offs = _groups()
    name = "aten::_grouped_mm"
    with installed():
        out = torch._grouped_mm(rows, matrices[..., :7], offs=offs)
        with pytest.raises(RuntimeError, match="^Offsets have to be int32"):
            torch._grouped_mm(rows, matrices, offs=offs.long())
        with pytest.raises(RuntimeError, match="^Bias not supported yet"):
            torch._grouped_mm(rows, matrices, offs=offs, bias=torch.ones(8))
    torch.testing.assert_close(out[3:], rows[3:] @ matrices[2, :, :7])
    reason = "rows of results that are no multiples of 16 bytes"
    reasons = (reason, "shapes that it does not take", "a bias")
    declined = {key: calls for key, calls in _declined().items() if key[0] == name}
    assert declined == {(name, each): 1 for each in reasons}


def _scaled(rows: int, scales: str):
    """Operands of torch._scaled_mm, and the product in float32."""
    a, b = (
        torch.randn(rows, 32).to(torch.float8_e4m3fn),
        torch.randn(16, 32).to(torch.float8_e4m3fn),
    )
    scale_a, scale_b = torch.rand(rows, 1) + 1, torch.rand(1, 16) + 1
    if scales == "tensors":
        scale_a, scale_b = scale_a[:1], scale_b[:, :1]
    return (a, b.t(), scale_a, scale_b), (a.float() * scale_a) @ (b.t().float() * scale_b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scales", ["rows", "tensors"])
def test_products_of_8_bit_floats(scales: str, dtype: torch.dtype) -> None:
    operands, expected = _scaled(40, scales)
    a, b, scale_a, scale_b = operands
    bias = torch.randn(16).to(torch.bfloat16 if dtype == torch.float32 else dtype)
    recipe = F.ScalingType.RowWise if scales == "rows" else F.ScalingType.TensorWise
    with installed():
        outs = [
            torch._scaled_mm(*operands, bias=bias, out_dtype=dtype),
            F.scaled_mm(a, b, scale_a, recipe, scale_b, recipe, bias=bias, output_dtype=dtype),
        ]
    assert _served() == {"aten::_scaled_mm": 1, "aten::_scaled_mm_v2": 1}
    for out in outs:
        assert out.dtype == dtype
        torch.testing.assert_close(out.float(), expected + bias.float(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("recipes", cases.BLOCKS, ids=str)
def test_products_of_8_bit_floats_with_scales_of_blocks(recipes) -> None:
    """K / 128 is no multiple of 4, and M not of 4: PyTorch's products are wrong, or refuse it."""
    args = cases.operands(30, 272, 1152, recipes, torch.Generator().manual_seed(0))
    a, b, scale_a, _, scale_b, _ = args
    expected = cases.expected(*args).bfloat16()
    kinds = [F.ScalingType(recipe) for recipe in recipes]
    first = scale_a if recipes[0] == cases.BLOCK_1X128 else scale_a.t()
    second = scale_b.t() if recipes[1] == cases.BLOCK_1X128 else scale_b
    with installed():
        outs = [
            torch._scaled_mm(a, b, first, second, out_dtype=torch.bfloat16),
            F.scaled_mm(a, b, scale_a, kinds[0], scale_b, kinds[1]),
        ]
    assert _served() == {"aten::_scaled_mm": 1, "aten::_scaled_mm_v2": 1}
    assert all(torch.equal(out, expected) for out in outs)


def test_products_of_8_bit_floats_that_are_left_to_pytorch() -> None:
    rows, tensors = (_scaled(8, scales)[0] for scales in ("rows", "tensors"))
    options = {"out_dtype": torch.bfloat16}
    name = "aten::_scaled_mm"
    with installed("fastest"):
        torch._scaled_mm(*rows, **options, use_fast_accum=True)
        torch._scaled_mm(*tensors, **options)
        torch._scaled_mm(*tensors, scale_result=torch.ones(()))
        torch._scaled_mm(*tensors, out_dtype=torch.float8_e5m2)
        e4m3 = torch.zeros(16).to(torch.float8_e4m3fn)
        # Which PyTorch computes on some processors, and refuses on others.
        with contextlib.suppress(RuntimeError):
            torch._scaled_mm(*rows, **options)
        with contextlib.suppress(RuntimeError):
            torch._scaled_mm(*tensors, bias=e4m3, out_dtype=e4m3.dtype)
        with pytest.raises(RuntimeError):
            torch._scaled_mm(tensors[0], tensors[1][:24], *tensors[2:], **options)
        assert _served()[name] == 1  # and PyTorch's on the CPU multiplies by aten::mm
    declined = {key[1]: calls for key, calls in _declined().items() if key[0] == name}
    assert declined == {
        "scales of tensors, which are not known to be quicker": 1,
        "use_fast_accum=False, which is not known to be quicker": 1,
        "a scale of the result": 1,
        "a bias that it does not take": 1,
        "an out_dtype that it does not take": 1,
        "shapes that it does not take": 1,
    }


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({2: [], 3: []}, "several scales of an operand"),
        ({2: [torch.ones(())] * 2}, "several scales of an operand"),
        ({4: [1]}, "swizzled scales"),
        ({10: [1, 0]}, "argument contraction_dim"),
        ({3: [3], 6: [3]}, "scales that it does not take"),
        ({2: [torch.ones(8, 1)], 3: [1], 6: [4]}, "scales that it does not take"),
    ],
)
def test_lists_of_scales_that_are_left_to_pytorch(change, reason) -> None:
    """An operand has one scale, as it is: the second of two is not dropped silently."""
    a, b, scale_a, scale_b = _scaled(8, "tensors")[0]
    args = [a, b, [scale_a], [0], [], [scale_b], [0], [], None, torch.bfloat16, [], False]
    for place, value in change.items():
        args[place] = value
    with installed(), contextlib.suppress(RuntimeError, ValueError, IndexError):
        torch._scaled_mm_v2(*args)
    assert _declined()["aten::_scaled_mm_v2", reason] == 1
    assert "aten::_scaled_mm_v2" not in _served()


def test_products_of_groups_of_8_bit_floats() -> None:
    """The op serves, or returns nothing and says why; PyTorch has no kernel on the CPU."""
    op, name = torch.ops.cubin._aten_scaled_grouped_mm, "aten::_scaled_grouped_mm"
    a, b = (torch.randn(8, k).to(torch.float8_e4m3fn) for k in (32, 2 * 16 * 32))
    b = b[0].view(2, 16, 32).mT
    scales, offs = (torch.rand(8), torch.rand(2, 16)), torch.tensor([3, 8], dtype=torch.int32)
    args = [a, b, *scales, offs, None, None, torch.bfloat16, False]
    assert op(*args) == []
    with installed():
        (out,) = op(*args)
    right = torch.ops.cubin.scaled_grouped_matmul(a, b, scales[0], 1, scales[1], 1, offs=offs)
    assert torch.equal(out, right)
    assert _served()[name] == 1
    for place, value, reason in (
        (7, torch.float32, "an out_dtype that is not bfloat16"),
        (4, offs.long(), "offs that are not int32"),
        (5, scales[0], "a bias"),
        (2, scales[0].view(1, -1), "scales that are not of rows"),
        (0, a[:, :16], "shapes that it does not take"),
    ):
        changed = [*args]
        changed[place] = value
        with installed():
            assert op(*changed) == []
        assert _declined()[name, reason] >= 1
    lists = [a, b, [scales[0]], [1], [], [scales[1]], [1], []]
    rest, v2 = [offs, None, torch.bfloat16, [], False], torch.ops.cubin._aten_scaled_grouped_mm_v2
    with installed():
        assert torch.equal(v2(*lists, *rest)[0], right)
    for place, value, reason in (
        (3, [0], "scales that are not of rows"),
        (2, [scales[0]] * 2, "several scales of an operand"),
        (7, [1], "swizzled scales"),
    ):
        changed = [*lists]
        changed[place] = value
        with installed():
            assert v2(*changed, *rest) == []
        assert _declined()[name, reason] >= 1


def test_a_wrong_policy_is_refused() -> None:
    with pytest.raises(errors.InputError, match="policy"):
        torch_cubin.install(policy="quickest")


def test_the_dispatcher_calls_ours() -> None:
    aten_kernels.register("CPU")
    aten_kernels.register_over_rows("sum")
    left = [op for op in aten_kernels.OPERATORS if not aten_kernels.is_ours(op, "CPU")]
    # PyTorch's are CUDA's alone; the last is on the CPU, too, from torch 2.14 on.
    only_cuda = {"_fused_rms_norm", "_fused_rms_norm_backward", "_scaled_grouped_mm"}
    assert {*left} | {"_scaled_grouped_mm_v2"} == only_cuda | {"_scaled_grouped_mm_v2"}
    assert not aten_kernels.is_ours("dot", "CPU")


def test_many_threads_multiply_while_it_is_installed_and_removed() -> None:
    aten_kernels.register("CPU")
    a, b, s = integers(8, 8), integers(8, 8, seed=1), integers(8, seed=2)
    assert many_threads.wrong_products(a, b, s, 500) == []


@torch.jit.script
def _backward_until_stopped(grad: Tensor, w: Tensor, done: Tensor, stop: Tensor) -> None:
    ones = torch.ones(8, 1)
    while bool(stop == 0):
        total = torch.mm(grad, w.t()) + torch.bmm(grad[None], w[None])[0] + torch.sum(grad, [0])
        total += torch.ops.aten.native_layer_norm_backward(
            grad, w, [8], ones, ones, None, None, [True, False, False]
        )[0]
        done.add_(1 + 0 * int(total.sum()))  # TorchScript drops what nobody reads


def test_kernels_of_a_backward_run_beside_a_thread_that_keeps_pythons_lock() -> None:
    """TorchScript calls them: PyTorch's own backward takes the lock, to free tensors."""
    grad, w = integers(8, 8), integers(8, 8, seed=1)
    done, stop = torch.zeros(2, dtype=torch.int64)
    steps = ctypes.c_int64.from_address(done.data_ptr())
    interval = sys.getswitchinterval()
    with installed(), torch.no_grad():
        thread = threading.Thread(target=_backward_until_stopped, args=(grad, w, done, stop))
        thread.start()
        while steps.value == 0:
            time.sleep(0.01)
        sys.setswitchinterval(60)  # no other thread asks for the lock before
        before, sleep_with_lock = steps.value, ctypes.PyDLL(None).usleep
        for _ in range(1000):
            sleep_with_lock(10_000)
            if steps.value > before + 2:
                break
        during = steps.value - before
        sys.setswitchinterval(interval)
        stop.fill_(1)
        thread.join()
        assert {"aten::mm", "aten::bmm", "aten::native_layer_norm_backward"} <= {*_served()}
    assert during > 2


_FIRST = """
import threading, time, torch, torch_cubin
from torch_cubin._drop_in import aten_kernels
torch.set_num_threads(1)
a, s = torch.eye(4), torch.zeros(4)
stop, wrong = threading.Event(), []
def multiply():
    while not stop.is_set():
        try:
            results = torch.mm(a, a), torch.addmm(s, a, a), torch.diag(a.sum(0))
            results += (torch.bmm(a[None], a[None])[0],)
        except Exception as error:
            results = [torch.ones(1)]
            wrong.append(repr(error))
        if not all(torch.equal(result, a) for result in results):
            wrong.append(results)
threads = [threading.Thread(target=multiply) for _ in range(16)]
for thread in threads:
    thread.start()
time.sleep(0.05)
aten_kernels.register("CPU")
with torch_cubin.install():
    # A sum costs a microsecond more once ours is registered: not where no stored run compares it.
    sums = [aten_kernels.is_ours("sum.dim_IntList", "CPU")]
with torch_cubin.install(policy="all"):
    sums.append(aten_kernels.is_ours("sum.dim_IntList", "CPU"))
    time.sleep(0.05)
stop.set()
for thread in threads:
    thread.join()
print(wrong, sums)
"""


@pytest.mark.parametrize("again", range(5))
def test_the_first_registration_beside_threads_that_multiply(fresh_python, again) -> None:
    assert fresh_python.output(_FIRST) == "[] [False, True]\n"


# --- the environment variable ---

_PROGRAM = """
import sys, torch
loaded = "torch_cubin" in sys.modules
import torch_cubin
from torch_cubin._drop_in import aten_kernels, install
aten_kernels.register("CPU")
print(loaded, *((each.policy, each.batch_invariant) for each in install._active))
"""


@pytest.fixture
def site(tmp_path) -> str:
    """A folder with the entry point, as an installed wheel has it."""
    folder = tmp_path / "torch_cubin-0.1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_cubin\nVersion: 0.1.0\n")
    points = "[torch.backends]\ntorch_cubin = torch_cubin_autoload:load\n"
    assert '"torch_cubin = torch_cubin_autoload:load"' in (ROOT / "setup.py").read_text()
    (folder / "entry_points.txt").write_text(points)
    return str(tmp_path)


@pytest.mark.parametrize(
    ("value", "printed"),
    [
        ("all", "True ('all', False)"),
        ("batch_invariant", "True ('fastest', True)"),
        ("0", "False"),
    ],
)
def test_the_environment_installs_in_an_unchanged_program(site, value, printed) -> None:
    assert _python(_PROGRAM, site, TORCH_CUBIN_INSTALL=value).stdout.strip() == printed


def test_an_unknown_value_of_the_variable_names_the_variable(monkeypatch) -> None:
    monkeypatch.setenv("TORCH_CUBIN_INSTALL", "fast")
    with pytest.raises(errors.InputError, match=r"TORCH_CUBIN_INSTALL .*batch_invariant.*'fast'"):
        at_import.install_by_environment()


@pytest.mark.parametrize("name", ["mm", "bmm", "addmm", "baddbmm"])
def test_a_lack_of_memory_raises_pytorchs_type(name: str) -> None:
    """Programs catch it, to try again with less."""
    column = torch.ones(1, 1).expand(1 << 24, 1)  # times a row: 2^48 elements
    operands = [column, column.t()]
    if "b" in name:
        operands = [each[None] for each in operands]
    if "add" in name:
        operands.insert(0, torch.ones(()))
    with installed(), pytest.raises(torch.OutOfMemoryError, match=r"\[oom\]|allocate"):
        getattr(torch, name)(*operands)
