"""install(batch_invariant=True): the operators over rows that it serves, and what audit() says."""

from __future__ import annotations

import concurrent.futures
from typing import Any

import pytest
import same_bits_draws
import torch
import torch.nn.functional as F

import torch_cubin
from torch_cubin import errors
from torch_cubin._drop_in import aten_kernels, row_kernels
from torch_cubin._ops.batch_invariant import is_batch_invariant


@pytest.fixture(autouse=True)
def registered():
    aten_kernels.register("CPU")


def _layer_norm(x):
    weight = torch.linspace(-1, 1, x.shape[-1], dtype=x.dtype, requires_grad=True)
    return F.layer_norm(x, x.shape[-1:], weight, weight + 1)


def _out(function):
    def call(x):
        wanted = function(x.detach())
        out = torch.empty_like(wanted)
        result = function(x.detach(), out=out)
        assert result is out
        return out

    return call


# The operator, and a call of a tensor of (3, 5, 8).
CALLS = [
    ("_softmax", lambda x: x.softmax(-1)),
    ("_softmax", lambda x: x.softmax(1)),
    ("_softmax", lambda x: x[0, 0].softmax(0)),
    ("_softmax", lambda x: x.transpose(0, 1).softmax(2)),
    ("_log_softmax", lambda x: x.log_softmax(-1)),
    ("_log_softmax", lambda x: F.cross_entropy(x.flatten(0, 1), torch.arange(15) % 8)),
    ("_log_softmax", lambda x: x.log_softmax(0)),
    ("native_layer_norm", _layer_norm),
    ("native_layer_norm", lambda x: F.layer_norm(x, x.shape[1:])),
    ("mean.dim", lambda x: F.rms_norm(x, (8,), torch.ones(8, dtype=x.dtype))),  # on the CPU
    ("sum.dim_IntList", lambda x: x.sum(-1)),
    ("sum.dim_IntList", lambda x: x.sum((1, 2), keepdim=True)),
    ("sum.dim_IntList", lambda x: x.sum(1)),
    ("sum.dim_IntList", lambda x: x[0, 0].sum(0)),
    ("sum.dim_IntList", lambda x: x[:, :, :0].sum(-1)),
    ("sum.IntList_out", _out(lambda x, out=None: torch.sum(x, -1, out=out))),
    ("sum.IntList_out", lambda x: x.logsumexp(-1)),
    ("mean.dim", lambda x: x.pow(2).mean(-1, keepdim=True)),
    ("mean.dim", lambda x: x.transpose(1, 2).mean((1, 2))),
    ("mean.out", _out(lambda x, out=None: torch.mean(x, 2, out=out))),
    ("var.correction", lambda x: x.var(-1)),
    ("var.correction", lambda x: x.var((1, 2), correction=0, keepdim=True)),
    ("std.correction", lambda x: x.std(-1)),
    ("var_mean.correction", lambda x: torch.stack(torch.var_mean(x, 1))),
    ("std_mean.correction", lambda x: torch.stack(torch.std_mean(x, -1))),
    ("linalg_vector_norm", lambda x: x.norm(dim=-1)),
    ("linalg_vector_norm", lambda x: torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)),
]


def _run(call, x):
    x = x.clone().requires_grad_()
    result = call(x)
    if result.requires_grad:
        result.backward(torch.full_like(result, 0.5))
    return result.detach(), x.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CALLS, ids=lambda case: case[0])
def test_calls_are_served_and_equal_pytorchs(case, dtype) -> None:
    op, call = case
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = _run(call, x)
    with torch_cubin.install(batch_invariant=True):
        result = _run(call, x)
        served = {row.function: row.calls for row in torch_cubin.report().served}
    assert served.get(f"aten::{op}"), served
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for own, wanted in zip(result, expected, strict=True):
        assert (own is None) == (wanted is None)
        if own is not None:
            assert own.stride() == wanted.stride()
            torch.testing.assert_close(own, wanted, rtol=tolerance, atol=tolerance)


def test_a_norms_backward_that_nobody_asks_for_a_gradient() -> None:
    x, weight = torch.randn(3, 8), torch.ones(8)
    with torch_cubin.install(batch_invariant=True):
        out, mean, rstd = torch.native_layer_norm(x, (8,), weight, weight, 1e-5)
        args = (out, x, (8,), mean, rstd, weight, weight, [False, False, False])
        assert torch.ops.aten.native_layer_norm_backward(*args) == (None, None, None)


# Calls that are left to PyTorch, and the beginning of the reason.
DECLINED = [
    (lambda x: x.sum(), row_kernels.WHOLE_TENSOR),
    (lambda x: x.mean((0, 1, 2)), row_kernels.WHOLE_TENSOR),
    (lambda x: x.sum(0), row_kernels.OVER_BATCH),
    (lambda x: x.sum((0, 2)), row_kernels.OVER_BATCH),
    (lambda x: x.long().sum(-1), "dtype int64"),
    (lambda x: torch.linalg.vector_norm(x, 1, dim=-1), "an order other than 2"),
    (lambda x: x.sum(-1, dtype=torch.float64), "a dtype that the sum"),
    (lambda x: x[..., :1].var(-1, correction=2).isnan(), "no degrees of freedom"),
    (lambda x: x[..., :0].var(-1, correction=-1).isnan(), "no degrees of freedom"),
]


@pytest.mark.parametrize("case", DECLINED, ids=lambda case: case[1][:20])
def test_other_calls_are_pytorchs(case) -> None:
    call, reason = case
    x = torch.arange(120.0).reshape(3, 5, 8)
    expected = call(x)
    with torch_cubin.install(batch_invariant=True):
        assert torch.equal(call(x), expected)
        declined = {row.reason for row in torch_cubin.report().declined}
    assert any(each.startswith(reason) for each in declined), declined


def test_rows_longer_than_the_kernels_take_are_left_to_pytorch() -> None:
    row = torch.empty(1, 2**31 - 2**20, dtype=torch.bfloat16, device="meta")
    calls = {
        "_softmax": (1, False),
        "_log_softmax_backward_data": (row, 1, row.dtype),
        "native_layer_norm": (row.shape[1:], None, None, 1e-5),
        "_fused_rms_norm": (row.shape[1:], None, None),
        "mean.dim": (1,),
    }
    for op, rest in calls.items():
        assert row_kernels.SERVED[op](row, *rest) == "rows that are too long", op


@pytest.mark.parametrize(
    "call",
    [lambda x: x.softmax(-1), lambda x: F.layer_norm(x, x.shape[-1:]), lambda x: x[..., :1].sum(1)],
    ids=["softmax", "layer_norm", "sum"],
)
def test_a_lack_of_memory_raises_pytorchs_type(call) -> None:
    huge = torch.ones(1, 1).expand(1 << 48, 2)
    with (
        torch_cubin.install(batch_invariant=True),
        pytest.raises(torch.OutOfMemoryError, match=r"\[oom\]"),
    ):
        call(huge)


WRONG = [
    (IndexError, lambda x: x.softmax(3)),
    (IndexError, lambda x: x[0, 0].softmax(1)),
    (IndexError, lambda x: x.log_softmax(-4)),
    (IndexError, lambda x: x.sum(5)),
    (IndexError, lambda x: x.sum((0, -4), dtype=torch.float64)),
    (IndexError, lambda x: x.sum((1, -2, 5))),
    (RuntimeError, lambda x: x.sum((1, -2))),
    (IndexError, lambda x: x.mean((1, 3))),
    (NotImplementedError, lambda x: torch.softmax(x.long(), -1)),
    (RuntimeError, lambda x: F.layer_norm(x, (7,))),
    (RuntimeError, lambda x: F.layer_norm(x.double(), (8,), torch.ones(8))),
    (RuntimeError, lambda x: F.rms_norm(x, (8,), torch.ones(7))),
]


@pytest.mark.parametrize(("error", "call"), WRONG)
def test_wrong_calls_raise_pytorchs_errors(error, call) -> None:
    x = torch.randn(3, 5, 8)
    with pytest.raises(error) as wanted:
        call(x)
    with torch_cubin.install(batch_invariant=True):
        with pytest.raises(error) as raised:
            call(x)
        one = torch.tensor(3.0)  # a tensor without dims has one row
        assert one.sum(0) == one.mean(-1) == 3
        assert one.softmax(0) == 1
    assert raised.type is wanted.type is error
    assert str(wanted.value).splitlines()[0] in str(raised.value)


def test_nothing_is_served_without_the_switch() -> None:
    x = torch.randn(4, 8)
    with torch_cubin.install(policy="all"):
        x.softmax(-1)
        assert not torch_cubin.report().served
        with torch_cubin.batch_invariant():
            x.softmax(-1)
        assert [row.function for row in torch_cubin.report().served] == ["aten::_softmax"]
    with torch_cubin.batch_invariant():  # nothing is installed
        x.softmax(-1)
    with torch_cubin.install(batch_invariant=True), torch_cubin.batch_invariant(False):
        x.softmax(-1)
        assert not torch_cubin.report().served


def test_the_switch_is_the_processs() -> None:
    config = pytest.importorskip("torch._inductor.config")

    def options() -> list[Any]:
        names = ("batch_invariant", "emulate_precision_casts")
        return [getattr(config, name, None) for name in names]

    def state() -> tuple[Any, ...]:
        """Of this thread: the switch, Inductor's options, and the key that they give its caches."""
        return is_batch_invariant(), options(), config.get_hash()

    before = state()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:  # a thread that was before install()
        of_thread = pool.submit(state).result()
        handle = torch_cubin.install(batch_invariant=True)
        assert "batch-invariant" in repr(handle)
        assert is_batch_invariant()
        assert all(option is not False for option in options())
        assert pool.submit(state).result()[:2] == state()[:2]
        assert config.get_hash() != before[-1]
        assert pool.submit(config.get_hash).result() != of_thread[-1]
        with torch_cubin.install():  # the last one's applies
            assert not is_batch_invariant()
            assert options() == before[1]
        assert is_batch_invariant()
        pool.submit(handle.remove).result()  # in another thread than install()
        assert state()[:2] == before[:2]
        assert pool.submit(state).result() == of_thread
    with torch_cubin.install(batch_invariant=True), torch_cubin.batch_invariant(False):
        assert not is_batch_invariant()
    with pytest.raises(errors.InputError, match=r"\[input\].*batch_invariant"):
        torch_cubin.install(batch_invariant=1)


def _kinds(found: torch_cubin.Audit) -> dict[str, tuple[str, str]]:
    return {row.op: (row.ran, row.kind) for row in found.rows}


def test_kernels_of_rows_are_ours() -> None:
    """They stand over the kernels of sums and norms, which they call."""
    with torch_cubin.install(batch_invariant=True):
        ours = [op for op in ("sum.dim_IntList", "native_layer_norm") if _is_ours(op)]
    assert ours == ["sum.dim_IntList", "native_layer_norm"]


def _is_ours(op: str) -> bool:
    return aten_kernels.is_ours(op, "CPU")


@pytest.mark.parametrize("classes", [3, 50])
@pytest.mark.parametrize("padding_idx", [-1, 1])
@pytest.mark.parametrize("by_freq", [False, True])
def test_gradients_of_embeddings(by_freq: bool, padding_idx: int, classes: int) -> None:
    """PyTorch's kernel, of as many classes as tokens at least, under the switch alone."""
    ids, grad = torch.arange(20).view(4, 5) * 7 % 3, torch.randn(4, 5, 8)
    counts: list[int] = []

    def pytorchs(*args: Any) -> torch.Tensor:
        counts.append(args[2])
        return torch.ops.aten.embedding_dense_backward(*args)

    given = grad, ids, classes, padding_idx, by_freq
    wanted = torch.ops.aten.embedding_dense_backward(*given)
    kernel = row_kernels._embedding_backward(pytorchs)
    assert torch.equal(kernel(*given), wanted)
    with torch_cubin.install(batch_invariant=True):
        own = kernel(*given)
        assert torch.equal(torch.ops.aten.embedding_dense_backward(*given), wanted)
    assert torch.equal(own, wanted)
    assert own.untyped_storage().nbytes() == wanted.untyped_storage().nbytes()
    assert counts == [classes, max(classes, 20)]


def test_audit() -> None:
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)

    def step() -> None:
        y = F.linear(torch.relu(x), weight)
        (y.softmax(-1) + y.mean(-1, keepdim=True)).sum().backward()

    with torch_cubin.audit() as found:
        assert str(found) == "no op ran"
        step()
    kinds = _kinds(found)
    assert kinds["aten::mm"] == kinds["aten::_softmax"] == ("PyTorch", "deterministic")
    assert kinds["aten::relu"] == kinds["aten::t"] == ("PyTorch", "batch-invariant")
    assert not found.batch_invariant
    assert found.deterministic
    with torch_cubin.install(batch_invariant=True), torch_cubin.audit(strict=True) as found:
        step()
        kinds = _kinds(found)
        for op in ("mm", "_softmax", "_softmax_backward_data", "mean"):
            assert kinds[f"aten::{op}"] == ("cubin", "batch-invariant"), op
        assert found.batch_invariant
        x.long().sum(-1)  # exact
        weight.sum(0)  # by nature
        one = torch.tensor([1])
        for bad in (lambda: x.cumsum(0), lambda: torch.zeros(3).index_add(0, one, x[0, :1])):
            with pytest.raises(errors.ModeError, match="may give a row other bits"):
                bad()
    with torch_cubin.audit(strict=True), pytest.raises(errors.ModeError, match="aten::mm"):
        x @ weight.t()  # which takes a TypeError for an unknown operand
    assert not found.deterministic
    assert found.rows[0].kind == "neither"
    assert "aten::index_add" in str(found)
    with pytest.raises(errors.InputError, match="strict"):
        torch_cubin.audit(strict=1)


def test_audit_in_inference_mode() -> None:
    x = torch.randn(4, 8)
    installed = torch_cubin.install(batch_invariant=True)
    with torch.inference_mode(), installed, torch_cubin.audit(strict=True) as found:
        F.linear(x, x).softmax(-1)
    assert {"aten::mm", "aten::_softmax"} <= _kinds(found).keys()


def test_row_parallel_linear() -> None:
    """Four ranks are in sharding_worker.py."""
    x, weight, bias = torch.randn(3, 5, 24), torch.randn(7, 24), torch.randn(7)
    for dtype in (torch.float32, torch.bfloat16):
        tensors = [each.to(dtype) for each in (x, weight, bias)]
        wanted = F.linear(*tensors)
        for parts in (1, 2, 3, 4):
            out = torch_cubin.row_parallel_linear(*tensors, parts=parts)
            assert out.dtype == dtype
            torch.testing.assert_close(out, wanted, rtol=1e-2, atol=1e-2)
        one = torch_cubin.row_parallel_linear(tensors[0][1, 2], tensors[1], tensors[2], parts=4)
        assert torch.equal(one, out[1, 2])
    for arguments, parts in (((x, weight), 0), ((x, weight), 5), ((x[..., :3], weight), 1)):
        with pytest.raises(errors.InputError, match="row_parallel_linear"):
            torch_cubin.row_parallel_linear(*arguments, parts=parts)


def test_autocast_rounds_no_sums() -> None:
    """Of parts of K, which become one row of 16 bits; and of gradients that accumulate."""
    draw = torch.Generator().manual_seed(4)
    x, weight, grad = (torch.randn(n, 512, generator=draw) for n in (16, 24, 16))
    given = x.bfloat16(), weight.bfloat16()
    wanted = torch_cubin.row_parallel_linear(*given, parts=8)
    main = [torch.zeros(512, 512) for _ in range(2)]
    torch_cubin.accumulate_weight_gradient(main[0], grad, x, tokens=8)
    with torch.autocast("cpu", torch.bfloat16):
        for operands in ((x, weight), given, (x.bfloat16(), weight)):
            out = torch_cubin.row_parallel_linear(*operands, parts=8)
            assert out.dtype == torch.bfloat16
            assert torch.equal(out, wanted)
        torch_cubin.accumulate_weight_gradient(main[1], grad, x, tokens=8)
    assert torch.equal(*main)


def test_audit_of_our_own_ops() -> None:
    x = torch.randn(4, 8)
    with torch_cubin.audit() as found:
        torch.ops.cubin.matmul(x, x.t())
        torch.ops.cubin.softmax(x, -1)
        with torch_cubin.batch_invariant():
            torch.ops.cubin.matmul(x, x.t())
            q, mask = torch.randn(1, 1, 4, 8), torch.ones(4, 4).tril()
            for each, p in ((None, 0.0), (mask.bool(), 0.0), (mask, 0.0), (None, 0.5)):
                torch.ops.cubin.scaled_dot_product_attention(q, q, q, each, p)
    reasons = {row.because: row.calls for row in found.rows if "attention" in row.op}
    assert reasons.pop("under the switch") == 2
    assert set(reasons.values()) == {1}
    assert len(reasons) == 2
    kinds = [(row.op, row.kind) for row in found.rows if row.ran == "cubin"]
    assert ("cubin::_matmul", "deterministic") in kinds  # no gradient is to be taken
    assert ("cubin::_matmul", "batch-invariant") in kinds
    assert ("cubin::_softmax_autograd", "batch-invariant") in kinds


def test_weight_gradients_however_a_batch_is_cut() -> None:
    draw = torch.Generator().manual_seed(3)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        grad, x = (torch.randn(2, 60, n, generator=draw).to(dtype) for n in (5, 7))
        grad, x = grad.flatten(0, 1), x.flatten(0, 1)
        wide = torch.float64 if dtype == torch.float64 else torch.float32

        def added(cuts, grad=grad, x=x, wide=wide, tokens=32) -> torch.Tensor:
            main = torch.ones(5, 7, dtype=wide)
            for i, (own, rows) in enumerate(zip(grad.split(cuts), x.split(cuts), strict=True)):
                last = i == len(cuts) - 1
                add = torch_cubin.accumulate_weight_gradient
                add(main, own, rows, tokens=tokens, last=last)
            return main

        whole = added([120])
        torch.testing.assert_close(whole, 1 + grad.to(wide).t() @ x.to(wide), rtol=1e-4, atol=1e-4)
        for cuts in ([32, 88], [96, 24], [32, 32, 32, 24], [64, 56]):
            assert torch.equal(added(cuts), whole), cuts
        assert not torch.equal(added([120], tokens=40), whole), "chunks have nothing to show here"
        for cuts in ([40, 80], [119, 1]):
            with pytest.raises(errors.InputError, match="depend on this cut"):
                added(cuts)
    main = torch.zeros(5, 7)
    for arguments, tokens in (
        ((main, grad, x), 32),  # float64
        ((main[:, :6], grad.float(), x.float()), 32),
        ((main, grad.float()[1:], x.float()), 32),
        ((main, grad.float(), x.float()), 12),
        ((main, grad.float(), x.float()), 0),
    ):
        with pytest.raises(errors.InputError, match="accumulate_weight_gradient"):
            torch_cubin.accumulate_weight_gradient(*arguments, tokens=tokens, last=True)


def test_random_models_batches_and_cuts() -> None:
    """tests/same_bits_draws.py draws more, on a GPU a thousand."""
    assert same_bits_draws.differences(range(12), "cpu") == (12, [])
    without = (same_bits_draws.difference(seed, "cpu") for seed in range(12))
    assert any(without), "the switch has nothing to show here"


def test_draws_without_a_gpu_say_what_to_do(monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["same_bits_draws.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        same_bits_draws.main()
    assert "--device cpu" in capsys.readouterr().err
