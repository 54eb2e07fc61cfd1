"""torch_cubin.float8 and FP8Linear of transformers, on the CPU."""

from __future__ import annotations

import copy
import functools
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

import torch_cubin
from torch_cubin._ops import kept_weights


def relative_error(out: Tensor, wanted: Tensor) -> float:
    out, wanted = out.detach(), wanted.detach()
    return float((out.float() - wanted.float()).norm() / wanted.float().norm())


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(200, 300), nn.GELU(), nn.Linear(300, 130, bias=False)).bfloat16()


@pytest.mark.parametrize("recipe", ["block", "row"])
@torch.no_grad()
def test_a_model_of_8_bit_weights(recipe) -> None:
    plain, x = model(), torch.randn(2, 5, 200, dtype=torch.bfloat16)
    wanted = plain(x)
    own = torch_cubin.float8(plain, recipe)
    assert own is plain
    out = own(x)
    assert (out.shape, out.dtype) == (wanted.shape, wanted.dtype)
    assert relative_error(out, wanted) < 0.08
    assert torch.equal(torch.compile(own, backend="eager", fullgraph=True)(x), out)
    fresh = nn.Sequential(
        torch_cubin.Float8Linear(200, 300, recipe=recipe, dtype=torch.bfloat16),
        nn.GELU(),
        torch_cubin.Float8Linear(300, 130, bias=False, recipe=recipe),
    )
    fresh.load_state_dict(own.state_dict())
    assert torch.equal(fresh(x), out)


def test_the_state_is_that_of_deepseeks_checkpoints() -> None:
    layer = torch_cubin.float8(nn.Linear(200, 300))
    shapes = {name: (tuple(x.shape), x.dtype) for name, x in layer.state_dict().items()}
    assert shapes == {
        "weight": ((300, 200), torch.float8_e4m3fn),
        "weight_scale_inv": ((3, 2), torch.float32),
        "bias": ((300,), torch.float32),
    }
    scales = layer.weight_scale_inv.repeat_interleave(128, 0)[:300]
    weight = layer.weight.float() * scales.repeat_interleave(128, 1)[:, :200]
    x = torch.randn(7, 200)
    assert relative_error(layer(x), F.linear(x, weight, layer.bias)) < 0.05


@torch.no_grad()
def test_other_dtypes_of_a_model_leave_quantised_weights() -> None:
    layer, x = torch_cubin.float8(nn.Linear(200, 300)), torch.randn(7, 200)
    wanted, state = layer(x), {name: x.clone() for name, x in layer.state_dict().items()}
    for dtype in (torch.bfloat16, torch.float16):
        own = layer.to(dtype)
        assert own is layer
        assert layer.bias.dtype == dtype
        for name in ("weight", "weight_scale_inv"):
            assert torch.equal(getattr(layer, name), state[name])
        assert relative_error(layer(x.to(dtype)), wanted) < 0.03
    assert layer.to("meta").weight_scale_inv.device.type == "meta"


@torch.no_grad()
@pytest.mark.parametrize("swaps", [False, True])
def test_layers_that_share_parameters_do_so_in_another_dtype(swaps) -> None:
    both = torch_cubin.float8(nn.Sequential(nn.Linear(128, 128, False), nn.Linear(128, 128, False)))
    both[1].weight, both[1].weight_scale_inv = both[0].weight, both[0].weight_scale_inv
    kept, x = list(both.parameters()), torch.randn(7, 128)
    wanted = both(x)
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(swaps)
    try:
        assert torch.equal(both.half()(x), wanted)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    assert len(kept) == 2
    assert all(one is other for one, other in zip(both.parameters(), kept, strict=True))


@torch.no_grad()
def test_autocast() -> None:
    layer, x = torch_cubin.float8(nn.Linear(200, 300)), torch.randn(7, 200)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == F.linear(x, x).dtype == torch.bfloat16


def test_filters_and_shared_layers() -> None:
    own = model()
    own.append(own[0])
    names = []

    def chosen(name: str, layer: nn.Linear) -> bool:
        names.append(name)
        return name != "2"

    torch_cubin.float8(own, filter=chosen)
    assert names == ["0", "2", "3"]
    assert type(own[2]) is nn.Linear
    assert type(own[0]) is torch_cubin.Float8Linear
    assert own[3] is own[0]
    with pytest.warns(UserWarning, match="replaced no layer.*that `filter` accepts"):
        torch_cubin.float8(model(), filter=lambda name, layer: False)
    with pytest.warns(UserWarning, match="replaced no layer"):
        torch_cubin.float8(own[:1])  # a second time


def test_errors() -> None:
    for recipe, training in (("mx", False), ("row", True)):
        with pytest.raises(torch_cubin.Error, match=r"\[input\]: torch_cubin.float8 argument"):
            torch_cubin.float8(model(), recipe, training=training)
    layer = torch_cubin.float8(nn.Linear(200, 300))
    with pytest.raises(RuntimeError, match=r"no rule for derivatives.*training=True"):
        layer(torch.ones(2, 200, requires_grad=True))


def test_training() -> None:
    """Gradients beside float32's, and the same in a compiled graph."""
    torch.manual_seed(0)
    plain = nn.Linear(200, 300)
    own = torch_cubin.float8(plain, training=True)
    assert own.weight is plain.weight
    assert own.state_dict().keys() == plain.state_dict().keys()
    x, grad = torch.randn(3, 50, 200, requires_grad=True), torch.randn(3, 50, 300)
    tensors = (x, own.weight, own.bias)
    wanted = torch.autograd.grad(plain(x), tensors, grad)
    out = own(x)
    assert relative_error(out, plain(x)) < 0.05
    found = torch.autograd.grad(out, tensors, grad)
    for mine, theirs in zip(found, wanted, strict=True):
        assert relative_error(mine, theirs) < 0.06
    compiled = torch.compile(own, backend="aot_eager", fullgraph=True)
    for mine, theirs in zip(torch.autograd.grad(compiled(x), tensors, grad), found, strict=True):
        assert torch.equal(mine, theirs)
    with torch.autocast("cpu", torch.bfloat16):
        assert own(x).dtype == torch.bfloat16


def test_second_derivatives_are_refused() -> None:
    """A penalty of a gradient would lack a term, without an error, beside another loss."""
    layer = torch_cubin.float8(nn.Linear(64, 64), training=True)
    x = torch.randn(3, 64, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"\[input\]: quantize has no rule for derivatives"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    (own,) = torch.autograd.grad(layer(x.detach()).sum(), layer.weight, create_graph=True)
    assert not own.requires_grad
    parameters = dict(layer.named_parameters())
    with pytest.raises(torch_cubin.Error, match=r"\[input\]: a layer of torch_cubin.float8"):
        torch.func.grad(lambda p: torch.func.functional_call(layer, p, (x,)).sum())(parameters)


def test_kept_weights_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight's copies serve the forwards and backwards of all micro-batches until it changes."""
    made, make = [], kept_weights._copies
    monkeypatch.setattr(kept_weights, "_copies", lambda weight: made.append(weight) or make(weight))
    own, x = torch_cubin.float8(model(), training=True), torch.randn(4, 200).bfloat16()
    parameters = list(own.parameters())

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(own(x).float().square().sum(), parameters)

    right = gradients()
    with torch_cubin.keep_float8_weights():
        assert all(map(torch.equal, gradients() + gradients(), right + right))
        assert len(made) == 2  # layers
        with torch.no_grad():
            parameters[0].mul_(2)
        changed = gradients()
        assert len(made) == 3
    assert all(map(torch.equal, changed, gradients()))


def test_kept_weights_that_are_replaced() -> None:
    own, x = torch_cubin.float8(model(), training=True), torch.randn(4, 200).bfloat16()
    weight, state = own[0].weight, {name: 2 * x for name, x in own.state_dict().items()}
    memory = bytearray(2 * weight.numel())

    def replace(factor: float) -> None:  # by another storage at the same address
        data = torch.frombuffer(memory, dtype=weight.dtype).view_as(weight)
        weight.data = data.copy_(state["0.weight"] * factor)

    def outputs() -> list[Tensor]:
        outs = []
        for factor in (1.0, -1.0):
            replace(factor)
            outs.append(own(x))
        return outs

    right, version = outputs(), weight._version
    with torch_cubin.keep_float8_weights():
        outs = outputs()
        assert weight._version == version  # as with other storage's, nothing but that tells
        with pytest.raises(RuntimeError, match="weakref"):
            torch.utils.swap_tensors(weight, nn.Parameter(weight.detach().clone()))
        own.load_state_dict(state, assign=True)
        outs.append(own(x))
    assert all(map(torch.equal, outs, [*right, own(x)]))


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}], ids=["fused", "foreach"])
def test_kept_weights_end_with_a_step(options) -> None:
    """Fused optimizers write without a new version."""
    own, x = torch_cubin.float8(model(), training=True), torch.randn(4, 200).bfloat16()
    optimizer = torch.optim.AdamW(own.parameters(), lr=0.1, **options)
    with torch_cubin.keep_float8_weights():
        own(x).float().square().sum().backward()
        optimizer.step()
        kept = own(x)
    assert torch.equal(kept, own(x))


def test_kept_weights_end_with_a_replayed_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may hold the step of an optimizer, of which no version counter tells."""
    own, x = torch_cubin.float8(model(), training=True), torch.randn(4, 200).bfloat16()
    weight = next(own.parameters())
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: weight.data.mul_(-2))
    kept_weights._forget_at_steps.__wrapped__()  # as the first scope of a process does
    with torch_cubin.keep_float8_weights():
        before = own(x)
        torch.cuda.CUDAGraph.replay(None)  # type: ignore[arg-type]
        kept = own(x)
    assert not torch.equal(kept, before)
    assert torch.equal(kept, own(x))


@torch.no_grad()
def test_copies_and_saved_states() -> None:
    own, x = torch_cubin.float8(model()), torch.randn(5, 200, dtype=torch.bfloat16)
    out, file = own(x), io.BytesIO()
    assert torch.equal(copy.deepcopy(own)(x), out)
    torch.save(own.state_dict(), file)
    file.seek(0)
    with torch.device("meta"):
        empty = torch_cubin.float8(model())
    empty.load_state_dict(torch.load(file), assign=True)
    assert torch.equal(empty(x), out)
    assert own(x[:0]).shape == (0, 130)


def test_checkpointing_and_no_rows() -> None:
    own, x = torch_cubin.float8(model(), training=True), torch.randn(5, 200).bfloat16()
    run = functools.partial(torch.utils.checkpoint.checkpoint, own, use_reentrant=False)
    parameters = list(own.parameters())
    found = [torch.autograd.grad(f(x).float().square().sum(), parameters) for f in (own, run)]
    assert all(map(torch.equal, *found))
    for gradient in torch.autograd.grad(own(x[:0]).sum(), parameters):
        assert gradient.eq(0).all()


def test_rows_with_nan_and_infinities_stay_their_own() -> None:
    x = torch.randn(5, 200, dtype=torch.bfloat16)
    x[1, 3], x[2, 199] = torch.nan, torch.inf
    for training in (False, True):
        out = torch_cubin.float8(model(), training=training)(x)
        assert out[1:3].isnan().all()
        assert out[[0, 3, 4]].isfinite().all()


def test_fp8_linear_of_transformers(monkeypatch) -> None:
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    torch_cubin.huggingface.unregister()
    own = lambda input, *args, **options: input.new_zeros(1)  # noqa: E731
    monkeypatch.setattr(fp8, "fp8_linear", own)
    torch_cubin.huggingface.register()
    registered = fp8.fp8_linear
    torch_cubin.huggingface.register()
    assert fp8.fp8_linear is registered is not own
    x, plain = torch.randn(2, 3, 200), nn.Linear(200, 300)
    for scale_fmt in ("float", "ue8m0"):
        layer = fp8.FP8Linear(200, 300, (128, 128), scale_fmt=scale_fmt, has_bias=True)
        options = {"power_of_two": scale_fmt == "ue8m0"}
        data, scale = torch_cubin.ops.quantize(plain.weight.detach(), 5, **options)
        layer.weight.data, layer.bias.data = data, plain.bias.detach()
        layer.weight_scale_inv.data = scale.t().contiguous().to(layer.weight_scale_inv.dtype)
        assert relative_error(layer(x), plain(x)) < 0.05
    layer.block_size = None
    assert layer(x).shape == (1,)
    reasons = [row.reason for row in torch_cubin.report(reset=True).declined]
    assert "scales that do not belong to blocks of 128 x 128" in reasons
    torch_cubin.huggingface.unregister()
    assert fp8.fp8_linear is own


def with_more(method: str, *args: Any) -> nn.Linear:
    layer = nn.Linear(64, 64)
    getattr(layer, method)(*args)
    return layer


@pytest.mark.parametrize(
    ("layer", "message"),
    [(with_more("register_forward_hook", len), "layer '0' has what a new .*got forward_hooks"),
     (with_more("register_state_dict_pre_hook", len), "got state_dict_pre_hooks"),
     (with_more("register_buffer", "extra", torch.ones(1)), r"got buffers \['extra'\]"),
     (with_more("add_module", "lora", nn.Linear(64, 2)), r"got modules \['lora'\]"),
     (nn.TransformerEncoderLayer(64, 2, 64), "0.linear1. has a parent that reads")],
)  # fmt: skip
def test_layers_of_which_something_would_be_lost_are_refused(layer, message) -> None:
    with pytest.raises(ValueError, match=message):
        torch_cubin.float8(nn.Sequential(layer))


def test_a_trained_layer_becomes_one_for_inference_and_keeps_attributes() -> None:
    layer = nn.Linear(64, 64)
    layer.tag = "own"
    model = torch_cubin.float8(nn.Sequential(layer), training=True)
    assert model[0].tag == "own"
    model = torch_cubin.float8(model)
    assert type(model[0]) is torch_cubin.Float8Linear
    assert model[0].tag == "own"


def test_a_state_that_is_not_quantised_is_refused() -> None:
    layers = torch_cubin.float8(nn.Sequential(nn.Linear(64, 64)))
    with pytest.raises(ValueError, match=r"state '0\.weight' is not quantised"):
        layers.load_state_dict(nn.Sequential(nn.Linear(64, 64)).state_dict(), strict=False)
