"""Models of transformers on the GPU: generation through `huggingface.register()`, and through
PyTorch's registry of flash attention. Case by case: tests/ops/test_huggingface.py."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch.nn import attention

import torch_cubin
from torch_cubin._drop_in import aten_kernels, transformers_layers

# Marks the tests instead of skipping the file: a run that collects nothing of it would not be
# complete (record.py).
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)

LAYERS, NEW = 2, 8
SIZES = {
    "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500,
    "max_position_embeddings": 512,
}  # fmt: skip


def model(dtype: torch.dtype) -> torch.nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, attn_implementation="sdpa")
    return transformers.LlamaForCausalLM(config).to("cuda", dtype).eval()


def inputs(padding: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(0, 500, (2, 200), device="cuda")
    mask = torch.ones_like(ids)
    mask[1, : 70 if padding else 0] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("padding", [False, True], ids=["whole", "padded"])
def test_greedy_generation_gives_the_same_tokens(cache: str | None, padding: bool) -> None:
    """In float32, so that no rounding decides; report() says what ran."""
    torch_cubin.huggingface.register()
    llama, given = model(torch.float32), inputs(padding)
    options = {"max_new_tokens": NEW, "do_sample": False, "cache_implementation": cache}
    tokens = []
    for name in ("cubin", "sdpa"):
        llama.set_attn_implementation(name)
        torch_cubin.report(reset=True)
        with torch.no_grad():
            tokens.append(llama.generate(**given, **options, disable_compile=True))
        report = torch_cubin.report(reset=True)
        calls = {"transformers attention": NEW * LAYERS} if name == "cubin" else {}
        assert {row.function: row.calls for row in report.served} == calls
        assert report.declined == ()
    assert tokens[0].shape == (2, 200 + NEW)
    assert torch.equal(*tokens)


@torch.no_grad()
@pytest.mark.parametrize("padding", [False, True], ids=["whole", "padded"])
def test_sdpa_with_a_mask_reads_shared_heads_unrepeated_under_install(padding: bool) -> None:
    """A step of decoding with a static cache, and a padded batch, beside float32."""
    import transformers

    def call(dtype: torch.dtype) -> torch.Tensor:
        llama, given = model(dtype), inputs(padding)
        if padding:
            return llama(**given).logits[given["attention_mask"].bool()]
        cache = transformers.StaticCache(config=llama.config, max_cache_len=256)
        llama(given["input_ids"][:, :-1], past_key_values=cache)
        at = torch.full((2, 1), given["input_ids"].shape[1] - 1, device="cuda")
        return llama(given["input_ids"][:, -1:], past_key_values=cache, position_ids=at).logits

    exact, stock = call(torch.float32), call(torch.bfloat16)
    with torch_cubin.install(policy="all"):
        ours = call(torch.bfloat16)
        calls = {row.function: row.calls for row in torch_cubin.report().served}
    assert calls["transformers attention"] == LAYERS
    errors = [(each.float() - exact).square().mean().sqrt().item() for each in (ours, stock)]
    assert errors[0] <= 1.2 * errors[1], errors


def mixture(dtype: torch.dtype) -> torch.nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        **SIZES, head_dim=64, moe_intermediate_size=128, num_experts=8, num_experts_per_tok=2
    )
    return transformers.Qwen3MoeForCausalLM(config).to("cuda", dtype).eval()


# The layer's operators that one of ours replaces, of those that report() counts.
LAYER_CALLS = {
    model: {"transformers gate_proj and up_proj": LAYERS, "aten::_fused_rms_norm": 2 * LAYERS + 1},
    mixture: {"transformers experts": LAYERS, "aten::_fused_rms_norm": 4 * LAYERS + 1},
}


@torch.no_grad()
@pytest.mark.parametrize("build", LAYER_CALLS)
@pytest.mark.parametrize("policy", ["fastest", "all"])
def test_layers_that_models_write_out_under_install(build: Any, policy: str) -> None:
    """In bfloat16, beside float32."""
    given = inputs(False)
    exact, stock = (build(x)(**given).logits for x in (torch.float32, torch.bfloat16))
    with torch_cubin.install(policy=policy):
        ours = build(torch.bfloat16)(**given).logits
        calls = {row.function: row.calls for row in torch_cubin.report().served}
    if policy == "all" or aten_kernels.shipped_rows(torch.cuda.get_device_name()):
        assert {name: calls.get(name) for name in LAYER_CALLS[build]} == LAYER_CALLS[build]
    errors = [(each.float() - exact).square().mean().sqrt().item() for each in (ours, stock)]
    assert errors[0] <= 1.1 * errors[1], errors


@pytest.mark.parametrize("build", LAYER_CALLS)
def test_a_training_step_of_such_layers_under_install(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, beside float32: no gradient's error is much larger than PyTorch's."""
    monkeypatch.setattr(transformers_layers, "_ROWS_WITH_GRADIENTS", 1)
    ids = inputs(False)["input_ids"]

    def gradients(dtype: torch.dtype) -> list[torch.Tensor]:
        one = build(dtype)
        one(ids, labels=ids).loss.backward()
        return [p.grad.float() for p in one.parameters()]

    exact, stock = gradients(torch.float32), gradients(torch.bfloat16)
    with torch_cubin.install(policy="all"):
        ours = gradients(torch.bfloat16)
    for one, other, true in zip(ours, stock, exact, strict=True):
        assert (one - true).norm() <= 1.5 * (other - true).norm() + 1e-3 * true.norm()


@pytest.mark.parametrize("build", LAYER_CALLS)
def test_a_sequence_has_the_same_bits_alone(build: Any) -> None:
    ids = inputs(False)["input_ids"]
    with torch_cubin.install(batch_invariant=True):
        one = build(torch.bfloat16)
        with torch.no_grad():
            both, alone = one(ids).logits, one(ids[1:]).logits
        trained = one(ids).logits
    assert torch.equal(both[1:], alone)
    assert torch.equal(both, trained)


@torch.no_grad()
def test_a_compiled_mixture_of_experts_calls_ours_under_install() -> None:
    given, one = inputs(False), mixture(torch.bfloat16)
    with torch_cubin.install(policy="all"):
        eager = one(**given).logits
        compiled = torch.compile(one.model.layers[0].mlp, fullgraph=True)
        rows = torch.randn(2, 200, SIZES["hidden_size"], device="cuda", dtype=torch.bfloat16)
        torch_cubin.report(reset=True)
        out = compiled(rows)
        torch.testing.assert_close(out, one.model.layers[0].mlp(rows), rtol=2e-2, atol=2e-2)
        traced = {row.function: row.traced for row in torch_cubin.report().served}
        assert traced["transformers experts"] == 1
        assert torch.isfinite(eager).all()


@pytest.mark.skipif(
    not hasattr(attention, "register_flash_attention_impl"), reason="this PyTorch has no registry"
)
def test_an_unmodified_model_under_sdpa() -> None:
    """transformers' "sdpa" in bfloat16, forward and backward, behind PyTorch's own dispatch."""
    llama = model(torch.bfloat16)
    ids = inputs(False)["input_ids"]
    results = []
    for active in (False, True):
        torch_cubin.report(reset=True)
        if active:
            attention.activate_flash_attention_impl("cubin")
        try:
            with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
                out = llama(ids, labels=ids)
                llama.zero_grad()
                out.loss.backward()
        finally:
            if active:
                attention.restore_flash_attention_impl()
        report = torch_cubin.report(reset=True)
        served = {row.function: row.calls for row in report.served}
        name = "aten::_scaled_dot_product_flash_attention"
        assert served == ({name: LAYERS, f"{name}_backward": LAYERS} if active else {})
        assert report.declined == ()
        gradients = [p.grad.float() for p in llama.parameters()]
        results.append([out.logits.detach().float(), *gradients])
    for one, other in zip(*results, strict=True):
        assert (one - other).norm() <= 2e-2 * one.norm()
