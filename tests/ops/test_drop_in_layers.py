"""drop_in() around PyTorch's Python functions and layers: attention, encoders, nested tensors."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from drop_in_cases import another_thread_inside, integers, run, same
from in_threads import in_threads
from torch.backends import mha
from torch.overrides import handle_torch_function, has_torch_function

import torch_cubin


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
    """Another, whose check a copy cannot skip: it is no plain name."""
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


def test_an_instance_can_be_entered_twice(device) -> None:
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
    with another_thread_inside(), torch.inference_mode():
        assert mha.get_fastpath_enabled()
        torch.testing.assert_close(padded(call()), expected, rtol=0, atol=0)


def test_threads_with_and_without_drop_in_are_interleaved(device) -> None:
    """Half of the threads serve, all see nested tensors; each has the results of its own kind."""
    nested = nested_calls(device)["torch.nn.TransformerEncoderLayer"][1]
    linear = torch.nn.Linear(8, 8, device=device).eval()
    x = torch.randn(3, 8, device=device)
    with torch.inference_mode():
        expected, product = padded(nested()), linear(x)

    def work(serve: bool) -> None:
        for _ in range(20):
            with torch_cubin.drop_in() if serve else contextlib.nullcontext():
                with torch.inference_mode():
                    torch.testing.assert_close(padded(nested()), expected, rtol=0, atol=0)
                    torch.testing.assert_close(linear(x), product)
                assert mha.get_fastpath_enabled() is not serve

    in_threads(work, [(i % 2 == 0,) for i in range(4)])
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


def test_fused_inference_path_is_disabled_inside_and_restored_outside() -> None:
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


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="PyTorch has it from 2.13 on")
def test_linear_cross_entropy(device) -> None:
    x, w, b = (torch.randn(shape, device=device) for shape in ((4, 3), (5, 3), (5,)))
    target = torch.tensor([1, -100, 4, 0], device=device)
    options = {"linear_bias": b, "weight": b.abs(), "reduction": "sum", "label_smoothing": 0.1}
    for served in ({}, options):
        expected = F.linear_cross_entropy(x, w, target, **served)
        result, ops, report = run(lambda o=served: F.linear_cross_entropy(x, w, target, **o))
        torch.testing.assert_close(result, expected)
        (row,) = report.served
        assert (row.function, row.calls) == ("torch.nn.functional.linear_cross_entropy", 1)
        assert ops.aten_products() == []
    probabilities = torch.full((4, 5), 0.2, device=device)
    _, _, report = run(lambda: F.linear_cross_entropy(x, w, probabilities))
    (row,) = report.declined
    assert row.reason == "targets that are not classes"
