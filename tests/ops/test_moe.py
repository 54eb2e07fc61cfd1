"""torch_cubin.moe and transformers' experts on the CPU."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import torch_cubin

HIDDEN, INNER, EXPERTS = 12, 20, 5


def layer(tokens: int = 9, k: int = 2, **options: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    options = {"dtype": torch.float64, **options}
    return {
        "x": torch.randn(tokens, HIDDEN, **options),
        "topk_ids": torch.stack([torch.randperm(EXPERTS)[:k] for _ in range(tokens)]),
        "topk_weights": torch.rand(tokens, k, **options),
        "w13": torch.randn(EXPERTS, 2 * INNER, HIDDEN, **options),
        "w2": torch.randn(EXPERTS, HIDDEN, INNER, **options),
    }


def expected(x, topk_ids, topk_weights, w13, w2, b13=None, b2=None, act=F.silu) -> Tensor:
    rows = []
    for token, own_ids, own_weights in zip(x, topk_ids, topk_weights, strict=True):
        row = torch.zeros_like(token)
        for expert, weight in zip(own_ids.tolist(), own_weights, strict=True):
            if 0 <= expert < len(w13):
                gate, up = F.linear(token, w13[expert], None if b13 is None else b13[expert]).chunk(
                    2
                )
                out = F.linear(act(gate) * up, w2[expert], None if b2 is None else b2[expert])
                row = row + weight * out
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_outputs(k: int, ids_dtype: torch.dtype) -> None:
    args = layer(k=k)
    args["topk_ids"] = args["topk_ids"].to(ids_dtype)
    torch.testing.assert_close(torch_cubin.moe(**args), expected(**args))


def mixed(weight: Tensor) -> Tensor:
    """Rows (of dim 1) of gates and ups alternate, in place of gates above ups."""
    return weight.unflatten(1, (2, INNER)).transpose(1, 2).flatten(1, 2).contiguous()


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
def test_activations(activation: str) -> None:
    args = layer()
    act = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu,
           "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}[activation]  # fmt: skip
    right = expected(**args, act=act)
    torch.testing.assert_close(torch_cubin.moe(**args, activation=activation), right)
    args["w13"] = mixed(args["w13"])
    out = torch_cubin.moe(**args, activation=activation, interleaved=True)
    torch.testing.assert_close(out, right)


def test_interleaved_biases_and_refusals() -> None:
    args = layer()
    b13, b2 = torch.randn(EXPERTS, 2 * INNER).double(), torch.randn(EXPERTS, HIDDEN).double()
    right = expected(**args, b13=b13, b2=b2)
    args["w13"] = mixed(args["w13"])
    out = torch_cubin.moe(**args, b13=mixed(b13), b2=b2, interleaved=True)
    torch.testing.assert_close(out, right)
    with pytest.raises(torch_cubin.errors.InputError, match="splits its rows itself"):
        torch_cubin.moe(**args, activation=lambda rows: rows[:, ::2], interleaved=True)


def test_a_gate_of_the_model_and_transposed_weights() -> None:
    args = layer()

    def interleaved(rows: Tensor) -> Tensor:
        return F.silu(rows[:, ::2]) * rows[:, 1::2]

    mixed = dict(args)
    mixed["w13"] = args["w13"].view(EXPERTS, 2, INNER, HIDDEN).transpose(1, 2).flatten(1, 2)
    mixed["w2"] = args["w2"].mT.contiguous().mT
    out = torch_cubin.moe(**mixed, activation=interleaved)
    torch.testing.assert_close(out, expected(**args))


@pytest.mark.parametrize("biases", [False, True])
def test_ids_of_no_expert_are_skipped(biases: bool) -> None:
    args = layer(k=3)
    args["topk_ids"][::2, 0] = EXPERTS
    args["topk_ids"][1::3, 2] = -1
    args["topk_ids"][4] = 2**31 - 1
    if biases:
        made = {"dtype": torch.float64}
        args |= {"b13": torch.randn(EXPERTS, 2 * INNER, **made)}
        args |= {"b2": torch.randn(EXPERTS, HIDDEN, **made)}
    out = torch_cubin.moe(**args)
    torch.testing.assert_close(out, expected(**args))
    assert out[4].eq(0).all()


def test_weights_of_skipped_ids_are_not_used() -> None:
    args = layer(k=3, requires_grad=True)
    args["topk_ids"][::2, 0] = -1
    args["topk_weights"].data[::2, 0] = float("nan")
    names = ("x", "topk_weights", "w13", "w2")
    tensors = [args[name] for name in names]
    out, want = torch_cubin.moe(**args), expected(**args)
    torch.testing.assert_close(out, want)
    got = torch.autograd.grad(out.square().sum(), tensors)
    torch.testing.assert_close(got, torch.autograd.grad(want.square().sum(), tensors))


def test_no_token() -> None:
    args = {name: x[:0] if x.dim() == 2 else x for name, x in layer().items()}
    assert torch_cubin.moe(**args).shape == (0, HIDDEN)


def test_derivatives() -> None:
    args = layer(requires_grad=True)
    args["topk_ids"][0, 0] = EXPERTS
    names = ("x", "topk_weights", "w13", "w2")
    tensors = [args[name] for name in names]
    got = torch.autograd.grad(torch_cubin.moe(**args).square().sum(), tensors)
    want = torch.autograd.grad(expected(**args).square().sum(), tensors)
    torch.testing.assert_close(got, want)


def gradients(args: dict[str, Any], wanted: list[str], function: Any = torch_cubin.moe) -> Any:
    """Of a product of the outputs with fixed numbers, whose gradients are no constants."""
    tensors = {name: x.detach().requires_grad_(name in wanted) for name, x in args.items()}
    out = function(**tensors)
    grad = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return torch.autograd.grad(out, [tensors[name] for name in wanted], grad)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
def test_derivatives_of_activations(activation: str) -> None:
    args, names = layer(k=3), ["x", "topk_weights", "w13", "w2"]
    act = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu,
           "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}[activation]  # fmt: skip
    got = gradients(args, names, functools.partial(torch_cubin.moe, activation=activation))
    right = gradients(args, names, functools.partial(expected, act=act))
    torch.testing.assert_close(got, right)
    args["w13"] = mixed(args["w13"])
    ours = functools.partial(torch_cubin.moe, activation=activation, interleaved=True)
    got = list(gradients(args, names, ours))
    torch.testing.assert_close(got, [*right[:2], mixed(right[2]), right[3]])


@pytest.mark.parametrize(
    "wanted", [["x"], ["topk_weights"], ["w13"], ["w2"], ["x", "w2"], ["topk_weights", "w13"]]
)
def test_derivatives_of_some(wanted: list[str]) -> None:
    args = layer()
    torch.testing.assert_close(gradients(args, wanted), gradients(args, wanted, expected))


def test_gradients_have_the_layout_of_their_weights() -> None:
    args, names = layer(), ["w13", "w2"]
    for stored in (args, {**args, **{name: args[name].mT.contiguous().mT for name in names}}):
        got = gradients(stored, names)
        assert [x.stride() for x in got] == [stored[name].stride() for name in names]
        torch.testing.assert_close(got, gradients(args, names, expected))


@pytest.mark.parametrize("sizes", [(0, 2, INNER), (9, 0, INNER), (9, 2, 0)], ids=str)
def test_derivatives_without_products_are_zero(sizes: tuple[int, int, int]) -> None:
    tokens, k, inner = sizes
    args = layer(tokens=max(tokens, 1), k=max(k, 1))
    args = {name: x[:tokens] if x.dim() == 2 else x for name, x in args.items()}
    args |= {name: args[name][:, :k] for name in ("topk_ids", "topk_weights")}
    args |= {"w13": args["w13"][:, : 2 * inner], "w2": args["w2"][..., :inner]}
    for got, name in zip(gradients(args, ["x", "w13", "w2"]), ("x", "w13", "w2"), strict=True):
        assert got.shape == args[name].shape
        assert got.eq(0).all()


def test_checkpointing_and_a_tensor_that_is_two_arguments() -> None:
    args = layer()
    args["w13"] = args["w13"][:, :HIDDEN, :]
    args["w2"] = args["w2"][..., : HIDDEN // 2]
    names = ["x", "topk_weights", "w13", "w2"]

    def checkpointed(**tensors: Tensor) -> Any:
        run = functools.partial(torch_cubin.moe, **tensors)
        return torch.utils.checkpoint.checkpoint(run, use_reentrant=False)

    torch.testing.assert_close(gradients(args, names, checkpointed), gradients(args, names))
    weights = args["w13"].detach().requires_grad_()
    shared = {**args, "w13": weights, "w2": weights[..., : HIDDEN // 2]}
    for create_graph in (False, True):
        got, want = (
            torch.autograd.grad(f(**shared).square().sum(), weights, create_graph=create_graph)
            for f in (torch_cubin.moe, expected)
        )
        torch.testing.assert_close(got, want)


def test_saved_tensors_that_hooks_return_with_other_strides() -> None:
    args, names = layer(), ["x", "topk_weights", "w13", "w2"]

    def apart(tensor: Tensor) -> Tensor:
        return torch.stack((tensor.detach(),) * 2, -1)[..., 0]

    expected_gradients = gradients(args, names)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, apart):
        torch.testing.assert_close(gradients(args, names), expected_gradients)


def test_a_result_may_be_written_to() -> None:
    args, names = layer(), ["x", "w13"]
    found = gradients(args, names, lambda **own: torch_cubin.moe(**own).add_(1))
    torch.testing.assert_close(found, gradients(args, names))


def test_second_derivatives() -> None:
    args = layer(tokens=3)
    args["topk_ids"][0, 0] = EXPERTS
    small = [args["x"][:, :3], args["topk_weights"], args["w13"][:, :4, :3], args["w2"][:, :3, :2]]
    inputs = [x.clone().requires_grad_() for x in small]

    def function(x: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        return torch_cubin.moe(x, args["topk_ids"], weights, w13, w2, interleaved=True)

    assert torch.autograd.gradgradcheck(function, inputs, check_fwd_over_rev=True)


def test_the_op_without_derivatives() -> None:
    """torch_cubin.moe calls it where nothing is differentiated."""
    args = list(layer().values())
    torch.library.opcheck(torch.ops.cubin._moe, (*args, "silu", False))
    out, before, order = torch.ops.cubin._moe_forward(*args, "silu", False)
    torch.testing.assert_close(out, torch_cubin.moe(*args))
    torch.library.opcheck(torch.ops.cubin._moe_forward, (*args, "silu", True))
    x, _, weights, w13, w2 = args
    backward = (torch.randn_like(out), x, weights, w13, w2.mT.contiguous().mT, before, order)
    for asked in ((True, True, True), (False, True, False)):
        torch.library.opcheck(torch.ops.cubin._moe_backward, (*backward, "silu", True, *asked))
    half = [x.bfloat16() if x.is_floating_point() else x for x in args]
    half[2] = args[2].float()
    out = torch_cubin.moe(*half)
    assert out.dtype == torch.bfloat16
    right = expected(*(x.double() if x.is_floating_point() else x for x in half))
    torch.testing.assert_close(out.double(), right, rtol=0.02, atol=0.3)
    half[3] = args[3].float()
    with pytest.raises(RuntimeError, match=r"\[input\]: moe argument 'w13' has another dtype"):
        torch.ops.cubin._moe(*half, "silu", False)


def test_transforms() -> None:
    args = layer()
    x, *rest = args.values()
    tangent = torch.randn_like(x)
    out = torch.func.jvp(lambda x: torch_cubin.moe(x, *rest), (x,), (tangent,))
    torch.testing.assert_close(out, torch.func.jvp(lambda x: expected(x, *rest), (x,), (tangent,)))
    with torch.no_grad():
        many = torch.func.vmap(lambda x: torch_cubin.moe(x, *rest))(torch.stack([x, tangent]))
    torch.testing.assert_close(many, torch.stack([expected(x, *rest), expected(tangent, *rest)]))


def test_autocast_keeps_the_weights_of_the_sum() -> None:
    args = layer(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = torch_cubin.moe(**args)
    rounded = {name: x.bfloat16() if x.is_floating_point() else x for name, x in args.items()}
    torch.testing.assert_close(
        out, torch_cubin.moe(**{**rounded, "topk_weights": args["topk_weights"]})
    )


def test_compile_makes_one_graph_of_all_sizes() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(torch_cubin.moe, backend=counter, fullgraph=True, dynamic=True)
    for tokens in (9, 4, 17):
        args = layer(tokens=tokens)
        torch.testing.assert_close(compiled(**args), expected(**args))
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topk_ids": torch.zeros(9, 2)}, "'topk_ids' has a wrong dtype"),
        ({"topk_ids": torch.zeros(9, dtype=torch.int64)}, "'topk_ids' has a wrong rank"),
        ({"topk_weights": torch.zeros(9, 3)}, "'topk_ids' and topk_weights do not fit"),
        ({"w2": torch.zeros(4, HIDDEN, INNER)}, "'w13' and w2 are of other numbers"),
        ({"activation": "swish"}, "'activation' is not known"),
        ({"topk_weights": torch.ones(9, 2, dtype=torch.int64)}, "'topk_weights' has a wrong dtype"),
        # The rest would broadcast, or be read in part.
        (
            {"w13": torch.zeros(EXPERTS, 3, HIDDEN), "w2": torch.zeros(EXPERTS, HIDDEN, 2)},
            "'w13' and w2 do not fit together",
        ),
        ({"b13": torch.zeros(EXPERTS, 1)}, "'b13' has a wrong shape"),
        ({"b13": torch.zeros(2 * INNER)}, "'b13' has a wrong shape"),
        ({"b2": torch.zeros(EXPERTS + 1, HIDDEN)}, "'b2' has a wrong shape"),
    ],
)
def test_errors(change: dict[str, Any], message: str) -> None:
    with pytest.raises(torch_cubin.Error, match=rf"\[input\]: torch_cubin.moe argument {message}"):
        torch_cubin.moe(**{**layer(), **change})


transformers = pytest.importorskip("transformers")


def _small(name: str) -> Any:
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    }  # fmt: skip
    config = getattr(transformers, f"{name}Config")(**sizes)
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config).double().eval()


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "GptOss"])
def test_a_models_experts(name: str) -> None:
    if not hasattr(transformers.PreTrainedModel, "set_experts_implementation"):
        pytest.skip("transformers 4 has experts in loops")
    torch_cubin.huggingface.register()
    model, ids = _small(name), torch.arange(24).view(2, 12)
    results = []
    for implementation in ("eager", "cubin"):
        model.set_experts_implementation(implementation)
        model.zero_grad()
        out = model(ids, labels=ids)
        out.loss.backward()
        results.append((out.logits, [p.grad for p in model.parameters() if p.grad is not None]))
    torch.testing.assert_close(results[1], results[0])


def quantized(weight: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Data and scales of each matrix, in the layout of checkpoints."""
    parts = [torch.ops.cubin.quantize(each, 5, **options) for each in weight]
    return torch.stack([data for data, _ in parts]), torch.stack([s.t() for _, s in parts])


def dequantized(data: Tensor, scale: Tensor) -> Tensor:
    rows, columns = data.shape[-2:]
    whole = scale.repeat_interleave(128, -2).repeat_interleave(128, -1)
    return data.double() * whole[..., :rows, :columns]


def float8_layer(tokens: int = 9, k: int = 2, hidden: int = 200, inner: int = 168) -> Any:
    """Arguments of a layer of 8-bit floats, and of the same layer in float64."""
    torch.manual_seed(0)
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16)
    ids = torch.stack([torch.randperm(EXPERTS)[:k] for _ in range(tokens)])
    weights = torch.rand(tokens, k)
    w13, s13 = quantized(torch.randn(EXPERTS, 2 * inner, hidden) * hidden**-0.5)
    w2, s2 = quantized(torch.randn(EXPERTS, hidden, inner) * inner**-0.5)
    own = {"x": x, "topk_ids": ids, "topk_weights": weights, "w13": w13, "w2": w2}
    wide = {"w13": dequantized(w13, s13), "w2": dequantized(w2, s2)}
    exact = {"x": x.double(), "topk_ids": ids, "topk_weights": weights.double(), **wide}
    return {**own, "w13_scale": s13, "w2_scale": s2}, exact


def error_of(out: Tensor, right: Tensor) -> float:
    """In parts of the result. Rows that are rounded to 8 bits twice have about 0.04."""
    return float((out.double() - right).norm() / right.norm())


def test_weights_of_8_bit_floats() -> None:
    args, exact = float8_layer(k=3)
    for each in (args, exact):
        each["topk_ids"][::2, 0] = -1
    out, right = torch_cubin.moe(**args), expected(**exact)
    assert out.dtype == torch.bfloat16
    assert error_of(out, right) < 0.05
    order = ("x", "topk_ids", "topk_weights", "w13", "w13_scale", "w2", "w2_scale")
    # PyTorch cannot compare 8-bit floats on the CPU, as test_schema does.
    checks = ("test_autograd_registration", "test_faketensor")
    tensors = [args[name] for name in order]
    torch.library.opcheck(torch.ops.cubin._moe_float8, tensors, test_utils=checks)
    empty = {name: value[:0] if value.dim() == 2 else value for name, value in args.items()}
    assert torch_cubin.moe(**empty).shape == (0, 200)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(torch_cubin.moe(**{**args, "x": args["x"].float()}), out)
    with pytest.raises(RuntimeError, match=r"\[input\]: moe_float8 has no rule for derivatives"):
        torch_cubin.moe(**{**args, "x": args["x"].requires_grad_()})


def test_special_numbers_and_ue8m0_scales_of_8_bit_floats() -> None:
    """Blocks of zeros, scales of a checkpoint's 8 bits, and rows that are not finite, which stay
    their own."""
    args, exact = float8_layer()
    for name in ("w13", "w2"):
        weight = exact[name].float()
        weight[1, :128, :128] = 0
        args[name], scale = quantized(weight, power_of_two=True)
        args[f"{name}_scale"] = scale.to(torch.float8_e8m0fnu)
        exact[name] = dequantized(args[name], scale)
    out, right = torch_cubin.moe(**args), expected(**exact)
    assert error_of(out, right) < 0.05
    x = args["x"].clone()
    x[3, 5], x[4, 199] = torch.nan, torch.inf
    bad = torch_cubin.moe(**{**args, "x": x})
    assert bad[3:5].isnan().all()
    kept = [row for row in range(len(x)) if row not in (3, 4)]
    assert torch.equal(bad[kept], out[kept])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w13_scale": None}, "torch_cubin.moe argument 'w13_scale' is missing"),
        ({"activation": "gelu"}, "torch_cubin.moe argument 'activation' is not supported"),
        ({"b2": torch.zeros(EXPERTS, 200)}, "torch_cubin.moe argument 'b2' is not supported"),
        ({"w2_scale": torch.ones(EXPERTS, 2, 1)}, "moe argument 'w2_scale' has a wrong shape"),
        ({"w2_scale": torch.ones(EXPERTS, 2, 2).double()}, "moe argument 'w2_scale' has a wrong"),
        ({"w2": torch.zeros(EXPERTS, 200, 168)}, "moe argument 'w2' has a wrong dtype"),
    ],
)
def test_errors_of_8_bit_floats(change: dict[str, Any], message: str) -> None:
    args, _ = float8_layer()
    with pytest.raises(RuntimeError, match=rf"\[input\]: {message}"):
        torch_cubin.moe(**{**args, **change})


def test_a_models_experts_of_8_bit_floats() -> None:
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    if not hasattr(fp8, "ALL_FP8_EXPERTS_FUNCTIONS"):
        pytest.skip("transformers 4 has no layers of 8-bit experts")
    torch_cubin.huggingface.register()
    args, exact = float8_layer(hidden=256, inner=128)
    config = transformers.Qwen3MoeConfig(
        num_experts=EXPERTS, num_experts_per_tok=2, hidden_size=256, moe_intermediate_size=128
    )
    layer = fp8.FP8Experts(config, block_size=(128, 128)).requires_grad_(False)
    layer.gate_up_proj.copy_(args["w13"])
    layer.gate_up_proj_scale_inv.copy_(args["w13_scale"])
    layer.down_proj.copy_(args["w2"])
    layer.down_proj_scale_inv.copy_(args["w2_scale"])
    run = fp8.ALL_FP8_EXPERTS_FUNCTIONS["cubin"]
    inputs = args["x"], args["topk_ids"], args["topk_weights"]
    out = run(layer, *inputs)
    torch.testing.assert_close(out, torch_cubin.moe(**args))
    assert error_of(out, expected(**exact)) < 0.05
    layer.limit = 7.0
    with pytest.raises(torch_cubin.Error, match=r"\[input\]: experts .* gates with a limit"):
        run(layer, *inputs)
