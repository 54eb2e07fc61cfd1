"""drop_in() in eager code: what it serves, what it leaves to PyTorch, and that both are right."""

from __future__ import annotations

import contextlib
import threading

import drop_in_cases as cases
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from drop_in_cases import integers, run, same
from torch.backends import mha
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.checkpoint import CheckpointError, checkpoint

import torch_cubin
from torch_cubin._drop_in import why_not as _why_not
from torch_cubin._native import library as _lib

CALLS = [(case, dtype) for case in cases.SERVED for dtype in cases.DTYPES]


@pytest.mark.parametrize(
    ("case", "dtype"), CALLS, ids=lambda value: str(value) if value in cases.DTYPES else None
)
def test_served_call_equals_torch(case, dtype, device) -> None:
    name, shapes, call = case
    operands = [
        integers(*shape, dtype=dtype, device=device, seed=i) for i, shape in enumerate(shapes)
    ]
    expected = call(*operands)
    with torch.no_grad():
        result, ops, report = run(lambda: call(*operands))
    same(result, expected)
    assert ops.cubin() == 1
    assert ops.aten_products() == []
    assert [(row.function, row.dtype, row.calls) for row in report.served] == [
        (name, str(dtype).removeprefix("torch."), 1)
    ]
    assert report.declined == ()


@pytest.mark.parametrize("case", cases.SERVED, ids=cases.name_of)
def test_gradients_equal_torch(case, device) -> None:
    _, shapes, call = case

    def gradients() -> list[torch.Tensor]:
        operands = [
            integers(*shape, device=device, seed=i).requires_grad_()
            for i, shape in enumerate(shapes)
        ]
        call(*operands).sum().backward()
        return [operand.grad for operand in operands]

    expected = gradients()
    with torch_cubin.drop_in():
        result = gradients()
    for got, wanted in zip(result, expected, strict=True):
        same(got, wanted)


class Mine(torch.Tensor):
    """A subclass that keeps torch's default __torch_function__."""


def _sparse(a):
    return a.to_sparse()


# The reason that report() gives, and a call that PyTorch can do.
DECLINED = [
    ("dtype int64", lambda a: _or_error(lambda: a.long() @ a.long())),
    ("dtype complex64", lambda a: torch.mm(a.to(torch.complex64), a.to(torch.complex64))),
    ("different dtypes", lambda a: _or_error(lambda: torch.matmul(a, a.double()))),
    ("device meta", lambda a: torch.mm(a.to("meta"), a.to("meta")).shape),
    ("tensors on different devices", lambda a: _or_error(lambda: torch.mm(a, _elsewhere(a)).shape)),
    ("layout sparse_coo", lambda a: torch.mm(_sparse(a), a)),
    ("tensor subclass Mine", lambda a: a.as_subclass(Mine) @ a),
    ("tensor subclass Mine", lambda a: F.linear(a, a.as_subclass(Mine))),
    ("argument of type ndarray", lambda a: _or_error(lambda: a.__rmatmul__(np.ones((4, 4))))),
    ("out= was given", lambda a: torch.mm(a, a, out=torch.empty_like(a))),
    ("in place", lambda a: a.clone().addmm_(a, a)),
    ("in place", lambda a: a[None].clone().baddbmm_(a[None], a[None], beta=0.5)),
    ("shapes that it does not take", lambda a: _or_error(lambda: torch.mm(a, a[:3]))),
    ("shapes that it does not take", lambda a: _or_error(lambda: torch.bmm(a[None], a))),
    ("shapes that it does not take", lambda a: _or_error(lambda: torch.matmul(a, a[0, 0]))),
    ("shapes that it does not take", lambda a: _or_error(lambda: torch.addmm(a[:3], a, a))),
    ("shapes that it does not take", lambda a: F.linear(a, a[0])),
    ("more than 64 dimensions", lambda a: (a[(None,) * 70] @ a)[(0,) * 70]),
    ("more than 64 dimensions", lambda a: F.linear(a[(None,) * 63], a)[(0,) * 63]),
    ("more than 64 dimensions", lambda a: _or_error(lambda: torch.mm(a, a[(None,) * 63]))),
    ("more arguments than it takes", lambda a: _or_error(lambda: torch.mm(a, a, torch.float32))),
    ("argument out_dtype", lambda a: _or_error(lambda: torch.mm(a, a, out_dtype=torch.float32))),
    ("not two operands", lambda a: torch.einsum("ij->ji", a)),
    ("no index is summed over in both operands", lambda a: torch.einsum("ij,ij->ij", a, a)),
    ("an index summed over in one operand alone", lambda a: torch.einsum("ij,jk->k", a, a)),
    ("an index repeated in one operand", lambda a: torch.einsum("ii,ij->j", a, a)),
    ("an inner size of 1 that is broadcast", lambda a: torch.einsum("ij,jk->ik", a[:, :1], a)),
    (
        "an equation that torch.einsum refuses",
        lambda a: _or_error(lambda: torch.einsum("ij,jk->iz", a, a)),
    ),
    ("no kernel for it in this version", lambda a: torch.tensordot(a, a, 1)),
    ("no kernel for it in this version", lambda a: torch.linalg.multi_dot([a, a, a])),
]


def _elsewhere(a: torch.Tensor) -> torch.Tensor:
    return a.cpu() if a.is_cuda else a.to("meta")


def _or_error(call):
    """The result, or the type of the error: what PyTorch refuses must stay refused, its way."""
    try:
        return call()
    except (TypeError, ValueError, RuntimeError) as error:
        return type(error).__name__


@pytest.mark.parametrize("case", DECLINED, ids=lambda case: case[0])
def test_declined_call_goes_to_torch_with_a_reason(case, device) -> None:
    reason, call = case
    a = integers(4, 4, device=device)
    expected = call(a)
    result, ops, report = run(lambda: call(a))
    assert ops.cubin() == 0
    assert [row.reason for row in report.declined] == [reason]
    assert report.served == ()
    if isinstance(expected, torch.Tensor):
        assert type(result) is type(expected)
        torch.testing.assert_close(result, expected)
    else:
        assert result == expected


def test_distributed_tensor_goes_to_torch(tmp_path) -> None:
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    from torch.distributed.tensor import Replicate, distribute_tensor

    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        mesh = distributed.init_device_mesh("cpu", (1,))
        tensor = distribute_tensor(integers(4, 4), mesh, [Replicate()])
        result, ops, report = run(lambda: torch.mm(tensor, tensor))
    finally:
        distributed.destroy_process_group()
    assert type(result) is type(tensor)
    assert [row.reason for row in report.declined] == ["tensor subclass DTensor"]
    assert ops.cubin() == 0


def test_beta_zero_ignores_the_input(device) -> None:
    nan = torch.full((5, 3), float("nan"), device=device)
    a, b = integers(5, 7, device=device), integers(7, 3, device=device)
    result, ops, _ = run(lambda: torch.addmm(nan, a, b, beta=0, alpha=2))
    same(result, 2 * (a @ b))
    assert ops.cubin() == 1
    batched, _, _ = run(lambda: torch.baddbmm(nan[None], a[None], b[None], beta=0))
    same(batched[0], a @ b)


def test_alpha_zero_ignores_the_product(device) -> None:
    nan = torch.full((5, 7), float("nan"), device=device)
    result, ops, _ = run(
        lambda: torch.addmm(integers(5, 3, device=device), nan, nan.t()[:, :3], beta=2, alpha=0)
    )
    same(result, 2 * integers(5, 3, device=device))
    assert ops.cubin() == 1


def test_factors_give_torchs_gradients(device) -> None:
    """Zeros, not None, where a factor is 0."""
    for factors in ({"beta": 0}, {"alpha": 0}, {"beta": 3, "alpha": 2}):
        gradients = []
        for inside in (False, True):
            operands = [integers(*s, device=device) for s in ((3,), (5, 7), (7, 3))]
            for operand in operands:
                operand.requires_grad_()
            with torch_cubin.drop_in() if inside else contextlib.nullcontext():
                torch.addmm(*operands, **factors).sum().backward()
            gradients.append([operand.grad for operand in operands])
        for own, wanted in zip(gradients[1], gradients[0], strict=True):
            same(own, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_gives_torchs_dtypes(dtype, device) -> None:
    a, half = integers(4, 4, device=device), integers(4, 4, device=device, dtype=dtype)
    double = a.double()
    calls = [
        lambda: a @ a,
        lambda: a @ half,
        lambda: F.linear(half, a, a[0]),
        lambda: torch.addmm(a[0], a, a),
        lambda: torch.baddbmm(half[None], a[None], a[None], beta=0),
        lambda: torch.einsum("ij,jk->ik", a, half),
        lambda: double @ double,
        lambda: torch.bmm(a[None], a[None]),
    ]
    for call in calls:
        with torch.autocast(device, dtype=dtype):
            expected = call()
            result, ops, _ = run(call)
        same(result, expected)
        assert ops.cubin() == 1
        assert not ops.aten_products()
    with torch.autocast(device, dtype=dtype):
        expected = _or_error(lambda: a @ double)
        assert run(lambda: _or_error(lambda: a @ double))[0] == expected


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("need_weights", [True, False])
def test_multihead_attention(need_weights, training, grad, device) -> None:
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True, device=device).train(training)
    x = torch.randn(2, 5, 8, device=device)
    with torch.set_grad_enabled(grad):
        expected = layer(x, x, x, need_weights=need_weights)
        (result, weights), ops, report = run(lambda: layer(x, x, x, need_weights=need_weights))
    torch.testing.assert_close(result, expected[0], rtol=1e-4, atol=1e-5)
    calls = {row.function: row.calls for row in report.served}
    if need_weights:  # the attention itself is two products then
        torch.testing.assert_close(weights, expected[1], rtol=1e-4, atol=1e-5)
        assert calls == {"torch.nn.functional.linear": 2, "torch.bmm": 2}
    else:
        attention = "torch.nn.functional.scaled_dot_product_attention"
        assert calls == {"torch.nn.functional.linear": 2, attention: 1}
    assert report.declined == ()
    assert ops.aten_products() == []


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("masked", [True, False], ids=["padding", "whole"])
def test_transformer_encoder(masked, training, grad, device) -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, device=device)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
    x = torch.randn(2, 5, 8, device=device)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2], device=device) if masked else None
    with torch.set_grad_enabled(grad):
        expected = model(x, src_key_padding_mask=mask)
        result, _, report = run(lambda: model(x, src_key_padding_mask=mask))
    kept = slice(None) if mask is None else ~mask
    torch.testing.assert_close(result[kept], expected[kept], rtol=1e-4, atol=1e-5)
    served = [(row.function, row.calls) for row in report.served]
    attention = "torch.nn.functional.scaled_dot_product_attention"
    assert served == [("torch.nn.functional.linear", 8), (attention, 2)]


def scaled_product(a, b):
    """A function that can be overridden, written as those of torch are."""
    if has_torch_function((a, b)):
        return handle_torch_function(scaled_product, (a, b), a, b)
    return 2 * (a @ b)


def unscaled_product(a, b):
    """Another, whose check a copy cannot leave out: it is no plain name."""
    if torch.overrides.has_torch_function((a, b)):
        return handle_torch_function(unscaled_product, (a, b), a, b)
    return a @ b


def test_a_users_overridable_function_is_entered(device) -> None:
    a = integers(4, 4, device=device)
    result, ops, _ = run(lambda: scaled_product(a, a))
    same(result, 2 * (a @ a))
    assert ops.cubin() == 1


def test_a_function_that_cannot_be_entered_is_called_as_it_is(device) -> None:
    a = integers(4, 4, device=device)
    result, ops, _ = run(lambda: unscaled_product(a, a))
    same(result, a @ a)
    assert ops.cubin() == 0


def test_a_subclass_keeps_its_own_meaning_of_a_python_function(device) -> None:
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return func.__name__

    a = integers(4, 4, device=device)
    result, _, _ = run(lambda: scaled_product(a, a.as_subclass(Loud)))
    assert result == "scaled_product"


def test_a_patched_torch_is_seen_inside_entered_functions(monkeypatch, device) -> None:
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True, device=device)
    x = torch.randn(2, 5, 8, device=device)
    run(lambda: layer(x, x, x)[0])  # the copy is made now
    monkeypatch.setattr(F, "softmax", lambda scores, dim: torch.zeros_like(scores))
    result, _, _ = run(lambda: layer(x, x, x)[0])
    torch.testing.assert_close(result, layer.out_proj.bias.expand_as(result))


def test_an_instance_within_itself(device) -> None:
    a, mode = integers(4, 4, device=device), torch_cubin.drop_in()
    with mode:
        with mode:
            a @ a
        assert not mha.get_fastpath_enabled()
        with torch_cubin.drop_in():  # not the outermost: the counts go on
            a @ a
        a @ a
    assert mha.get_fastpath_enabled()
    assert [row.calls for row in torch_cubin.report().served] == [3]


def nested_calls(device: str) -> dict:
    """Layers of torch with nested tensors, by the name that report() gives them."""
    options = {"batch_first": True, "device": device}
    attention = torch.nn.MultiheadAttention(8, 2, **options).eval()
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, **options).eval()
    stack = torch.nn.TransformerEncoder(layer, 2).eval()
    rows = [torch.randn(n, 8, device=device) for n in (5, 3)]
    x = torch.nested.nested_tensor(rows)
    return {
        "torch.nn.MultiheadAttention": (1, lambda: attention(x, x, x, need_weights=False)[0]),
        "torch.nn.TransformerEncoderLayer": (1, lambda: layer(src=x)),
        "torch.nn.TransformerEncoderLayer, twice": (2, lambda: stack(x)),
    }


NESTED = list(nested_calls("cpu"))


def padded(nested: torch.Tensor) -> torch.Tensor:
    return nested.to_padded_tensor(0.0)


@pytest.mark.parametrize("name", NESTED)
def test_nested_tensors_are_left_to_torchs_fused_layers(name, device) -> None:
    times, call = nested_calls(device)[name]
    with torch.inference_mode():
        expected = padded(call())
        result, ops, report = run(lambda: padded(call()))
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    assert ops.cubin() == 0
    declined = [(row.function, row.reason, row.calls) for row in report.declined]
    assert declined == [(name.split(",")[0], "nested tensor", times)]


@pytest.mark.parametrize("name", NESTED)
def test_a_drop_in_leaves_the_nested_tensors_of_other_threads_alone(name, device) -> None:
    call = nested_calls(device)[name][1]
    with torch.inference_mode():
        expected = padded(call())
    inside, done = threading.Event(), threading.Event()

    def hold() -> None:
        with torch_cubin.drop_in():
            inside.set()
            done.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    try:
        assert inside.wait(60)
        assert mha.get_fastpath_enabled()
        with torch.inference_mode():
            torch.testing.assert_close(padded(call()), expected, rtol=0, atol=0)
    finally:
        done.set()
        holder.join()


def test_threads_with_and_without_drop_in_take_turns(device) -> None:
    """Half of the threads serve, all see nested tensors; each has the results of its own kind."""
    nested = nested_calls(device)["torch.nn.TransformerEncoderLayer"][1]
    linear = torch.nn.Linear(8, 8, device=device).eval()
    x = torch.randn(3, 8, device=device)
    with torch.inference_mode():
        expected, product = padded(nested()), linear(x)
    failures: list[BaseException] = []

    def work(serve: bool) -> None:
        try:
            for _ in range(20):
                with torch_cubin.drop_in() if serve else contextlib.nullcontext():
                    with torch.inference_mode():
                        torch.testing.assert_close(padded(nested()), expected, rtol=0, atol=0)
                        torch.testing.assert_close(linear(x), product)
                    assert mha.get_fastpath_enabled() is not serve
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i % 2 == 0,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert mha.get_fastpath_enabled()


def test_nested_tensors_under_another_mode_are_refused_as_by_torch(device) -> None:
    class Other(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    call = nested_calls(device)["torch.nn.MultiheadAttention"][1]
    with torch.inference_mode(), Other():
        with pytest.raises(AssertionError, match="NestedTensor"):
            call()
        with torch_cubin.drop_in():
            with pytest.raises(AssertionError, match="NestedTensor"):
                call()
            a = integers(4, 4, device=device)
            a @ a  # the modes are as they were
    assert [row.calls for row in torch_cubin.report().served] == [1]


def test_the_layers_can_be_scripted_and_traced_by_fx(device) -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, device=device).eval()
    x = torch.randn(2, 5, 8, device=device)
    with torch.inference_mode():
        torch.testing.assert_close(torch.jit.script(layer)(x), layer(x), rtol=1e-4, atol=1e-5)
    graph = torch.fx.symbolic_trace(torch.nn.Sequential(layer))
    assert [node.op for node in graph.graph.nodes] == ["placeholder", "call_module", "output"]


def test_fused_inference_path_is_off_inside_and_as_it_was_outside() -> None:
    for before in (True, False):
        mha.set_fastpath_enabled(before)
        try:
            with torch_cubin.drop_in():
                assert not mha.get_fastpath_enabled()
                with torch_cubin.drop_in():
                    pass
                assert not mha.get_fastpath_enabled()
            assert mha.get_fastpath_enabled() is before
        finally:
            mha.set_fastpath_enabled(True)


def test_training_a_model_equals_torch(device) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4, bias=False)
    ).to(device)
    x, y = torch.randn(6, 8, device=device), torch.randn(6, 4, device=device)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        F.mse_loss(model(x), y).backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = gradients()
    with torch_cubin.drop_in():
        result = gradients()
    for got, wanted in zip(result, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4)], ids=str)
def test_what_is_served_may_be_changed_in_place(shape, bias, device) -> None:
    layer = torch.nn.Linear(4, 4, bias=bias, device=device)
    x = integers(*shape, device=device).requires_grad_()
    layer(x).relu().sum().backward()
    expected, x.grad = x.grad, None
    with torch_cubin.drop_in():
        layer(x).relu_().sum().backward()
    torch.testing.assert_close(x.grad, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(4, 4), (3, 4), (2, 3, 4)], ids=str)
def test_checkpointing(shape, bias, device) -> None:
    layer = torch.nn.Sequential(
        torch.nn.Linear(4, 4, bias=bias), torch.nn.ReLU(), torch.nn.Linear(4, 4)
    ).to(device)
    x = integers(*shape, device=device).requires_grad_()
    layer(x).square().sum().backward()
    expected, x.grad = x.grad, None
    with torch_cubin.drop_in():
        checkpoint(layer, x, use_reentrant=False).square().sum().backward()
        torch.testing.assert_close(x.grad, expected, rtol=1e-4, atol=1e-4)
        result = checkpoint(layer, x, use_reentrant=False)
    with pytest.raises(CheckpointError):  # never another gradient
        result.square().sum().backward()


def test_vmap_and_grad_inside(device) -> None:
    a, b = integers(3, 4, 5, device=device), integers(5, 2, device=device)
    with torch_cubin.drop_in():
        mapped = torch.vmap(lambda row: row @ b)(a)
        gradient = torch.func.grad(lambda w: (a[0] @ w).sum())(b)
    same(mapped, a @ b)
    same(gradient, a[0].sum(0)[:, None].expand(5, 2))


def test_other_threads_are_served_only_where_they_enter(device) -> None:
    a = integers(4, 4, device=device)
    seen: dict[str, int] = {}

    def work(name: str, enter: bool) -> None:
        with cases.Ops() as counting:
            if enter:
                with torch_cubin.drop_in():
                    a @ a
            else:
                a @ a
        seen[name] = counting.cubin()

    with torch_cubin.drop_in():
        threads = [
            threading.Thread(target=work, args=(name, name == "enters"))
            for name in ("enters", "does not")
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [row.calls for row in torch_cubin.report().served] == [1]
    assert seen == {"enters": 1, "does not": 0}


def test_the_mode_is_gone_after_an_error(device) -> None:
    a = integers(4, 4, device=device)
    with pytest.raises(ZeroDivisionError), torch_cubin.drop_in():
        raise ZeroDivisionError
    with cases.Ops() as ops:
        a @ a
    assert ops.cubin() == 0
    assert mha.get_fastpath_enabled()


def test_other_modes_keep_working_around_and_inside(device) -> None:
    with torch.device(device), torch_cubin.drop_in(), torch.device(device):
        a = torch.ones(3, 3)
        assert a.device.type == device
        result = a @ a
    same(result, torch.full((3, 3), 3.0, device=device))
    assert [row.calls for row in torch_cubin.report().served] == [1]


def test_fake_tensors_are_served() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), torch_cubin.drop_in():
        result = torch.empty(5, 7) @ torch.empty(7, 3)
        assert result.shape == (5, 3)
    assert [row.calls for row in torch_cubin.report().served] == [1]


@pytest.mark.parametrize(("tag", "declined"), [("arch", True), ("hash", False)])
def test_a_gpu_without_kernels_goes_to_torch_and_a_broken_catalog_does_not(
    tag, declined, monkeypatch
) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    error = {"tag": tag, "message": f"torch_cubin [{tag}]: as a test wants it"}
    facts = {"index": 0, "name": "Old", "sm": 75, "arch": None, "arch_error": error}
    monkeypatch.setattr(_why_not, "_refused", {})
    monkeypatch.setattr(_lib, "device", lambda index: facts)
    with FakeTensorMode(), torch_cubin.drop_in():
        a = torch.empty(4, 4, device="cuda")
        assert torch.mm(a, a).shape == (4, 4)
    report = torch_cubin.report()
    assert [row.reason for row in report.declined] == ["no kernels for sm_75"] * declined
    assert len(report.served) == (not declined)


def _addmv(a, b):
    return torch.addmv(b, a, b, beta=0)


@pytest.mark.parametrize("function", [torch.dot, torch.vdot, torch.inner, torch.mv, _addmv])
def test_autocast_of_what_it_does_not_lower(device: str, function) -> None:
    """dot, vdot and inner stay float32 under autocast on every device, mv and addmv on the CPU."""
    x = torch.randn((3, 3) if function in (torch.mv, _addmv) else (3,), device=device)
    y = torch.randn(3, device=device)
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast(device, dtype=dtype):
            wanted = function(x, y)
            with torch_cubin.drop_in():
                out = function(x, y)
        assert out.dtype == wanted.dtype
        torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)
