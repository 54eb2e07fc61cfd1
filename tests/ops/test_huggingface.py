"""torch_cubin.huggingface: models of transformers with attention "cubin" compute what they should.

Small ones, built from a config with random weights, so nothing is downloaded.
"""

from __future__ import annotations

import sys

import pytest
import torch
from recorded_ops import RecordedOps

import torch_cubin

transformers = pytest.importorskip("transformers", "4.53")

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
LAYERS = 2


@pytest.fixture(autouse=True)
def _registered() -> None:
    torch_cubin.huggingface.register()
    torch_cubin.huggingface.register()  # again, which changes nothing


def test_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        ImportError, match=r"torch_cubin \[input\]: .*register\(\) needs transformers"
    ):
        torch_cubin.huggingface.register()


def llama(**options):
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2, **options)
    return transformers.LlamaForCausalLM(config)


def bert(**options):
    config = transformers.BertConfig(**SMALL, **options)
    return transformers.BertForMaskedLM(config)


def vit(**options):
    sizes = {k: v for k, v in SMALL.items() if k not in ("vocab_size", "max_position_embeddings")}
    config = transformers.ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=5, **options)
    return transformers.ViTForImageClassification(config)


def make(build, device: str, **options) -> torch.nn.Module:
    torch.manual_seed(0)
    return build(attn_implementation="cubin", **options).to(device).eval()


def inputs(build, device: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    if build is vit:
        pixels = torch.randn(2, 3, 16, 16, device=device)
        return {"pixel_values": pixels, "labels": torch.tensor([1, 4], device=device)}
    ids = torch.randint(0, 64, (2, 9), device=device)
    return {"input_ids": ids, "labels": ids.clone()}


def padded(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    mask = torch.ones_like(given["input_ids"])
    mask[1, :3] = 0
    return {**given, "attention_mask": mask}


CASES = [(llama, False), (llama, True), (bert, False), (bert, True), (vit, False)]


@pytest.mark.parametrize(
    ("build", "padding"), CASES, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_logits_and_a_training_step_as_sdpa(build, padding, device):
    model, given = make(build, device), inputs(build, device)
    if padding:
        given = padded(given)
    results = []
    for name in ("cubin", "sdpa"):
        model.set_attn_implementation(name)
        with RecordedOps() as calls:
            out = model(**given)
        used = [op for op, *_ in calls.ours if op == "_attention_forward_autograd"]
        assert len(used) == (LAYERS if name == "cubin" else 0)
        model.zero_grad()
        out.loss.backward()
        results.append([out.logits.detach(), *(p.grad.clone() for p in model.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_training_with_dropout_runs(device):
    model = make(llama, device, attention_dropout=0.5).train()
    given = inputs(llama, device)
    torch.manual_seed(2)
    first = model(**given).loss
    assert model(**given).loss != first
    torch.manual_seed(2)
    assert model(**given).loss == first
    first.backward()


def attention_of_pytorch(ops: RecordedOps) -> list[str]:
    """Its own, however it is computed."""
    names = [name for name in ops.names if name.startswith("aten::")]
    return [name for name in names if "softmax" in name or "scaled_dot_product" in name]


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("padding", [False, True], ids=["whole", "padded"])
def test_greedy_generation_gives_the_same_tokens(cache, padding, device):
    model, given = make(llama, device), inputs(llama, device)
    del given["labels"]
    if padding:
        given = padded(given)
    options = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": cache}
    tokens = []
    torch_cubin.report(reset=True)
    for name in ("cubin", "sdpa"):
        model.set_attn_implementation(name)
        with torch.no_grad(), RecordedOps() as ops:
            tokens.append(model.generate(**given, **options, disable_compile=True))
        assert bool(attention_of_pytorch(ops)) == (name == "sdpa")
        if name == "cubin":  # the prefill and each further token
            served = torch_cubin.report(reset=True)
            assert {row.function: row.calls for row in served.served} == {
                "transformers attention": 8 * LAYERS
            }
            assert served.declined == ()
    assert tokens[0].shape == (2, 17)
    assert torch.equal(*tokens)


@pytest.mark.parametrize("lengths", [(5, 9), (1, 3, 8)], ids=str)
def test_packed_sequences_equal_single_calls(lengths, device):
    """Of several sequences in one row, separated by their positions, none sees another."""
    model = make(llama, device)
    torch.manual_seed(1)
    parts = [torch.randint(0, 64, (1, n), device=device) for n in lengths]
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])[None]
    torch_cubin.report(reset=True)
    with torch.no_grad(), RecordedOps() as ops:
        packed = model(torch.cat(parts, 1), position_ids=positions, use_cache=False).logits
        served = torch_cubin.report(reset=True)
        alone = [model(part, use_cache=False).logits for part in parts]
    assert attention_of_pytorch(ops) == []
    assert {row.function: row.calls for row in served.served} == {"transformers attention": LAYERS}
    assert served.declined == ()
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=1e-3, atol=1e-5)


def soft_capped(**options):
    sizes = {**SMALL, "num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 8}
    config = transformers.Gemma2Config(
        **sizes, attn_logit_softcapping=0.5, sliding_window=4, **options
    )
    return transformers.Gemma2ForCausalLM(config)


def with_sinks(**options):
    sizes = {**SMALL, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2}
    config = transformers.GptOssConfig(**sizes, num_experts_per_tok=1, sliding_window=4, **options)
    model = transformers.GptOssForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return model


def sparse(**options):
    if not hasattr(transformers, "DeepseekV32Config"):
        pytest.skip("this transformers has no model with an indexer of keys")
    experts = {"n_routed_experts": 2, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 1}
    ranks = {"q_lora_rank": 8, "kv_lora_rank": 8, "moe_intermediate_size": 8}
    heads = {"num_key_value_heads": 4, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    index = {"index_topk": 3, "index_n_heads": 2, "index_head_dim": 16}  # 3 of 9 columns
    config = transformers.DeepseekV32Config(
        **SMALL, **experts, **ranks, **heads, **index, v_head_dim=8, **options
    )
    return transformers.DeepseekV32ForCausalLM(config)


@pytest.mark.parametrize("build", [soft_capped, with_sinks, sparse])
def test_features_that_sdpa_lacks_match_eager(build, device):
    model, given = make(build, device), inputs(build, device)
    results = []
    for name in ("cubin", "eager"):
        model.set_attn_implementation(name)
        out = model(**given)
        model.zero_grad()
        out.loss.backward()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        results.append([out.logits.detach(), *grads])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_position_bias(device):
    if not hasattr(transformers.integrations.sdpa_attention, "create_position_bias_mask"):
        pytest.skip("this transformers adds the bias in its models")
    query = torch.randn(2, 4, 5, 8, device=device)
    bias = torch.randn(1, 4, 5, 5, device=device)
    layer = torch.nn.Module()
    for is_causal in (False, True):
        for mask in (None, torch.rand(2, 1, 5, 5, device=device) > 0.3):
            args = (layer, query, query, query, mask)
            options = {"is_causal": is_causal, "position_bias": bias}
            sdpa = transformers.integrations.sdpa_attention.sdpa_attention_forward
            expected, _ = sdpa(*args, **options)
            out, _ = torch_cubin.huggingface.attention(*args, **options)
            torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float"])
def test_columns_selected_by_an_indexer(mask, device):
    query = torch.randn(2, 4, 5, 8, device=device)
    indices = torch.rand(2, 5, 7, device=device).topk(3).indices.int()
    key = torch.randn(2, 4, 7, 8, device=device)
    sees = torch.zeros(2, 5, 7, dtype=torch.bool, device=device).scatter(-1, indices.long(), True)
    sees = sees.unsqueeze(1)
    if mask in ("bool", "float"):
        given = torch.rand(2, 1, 5, 7, device=device) > 0.3
        sees &= given
        if mask == "float":
            given = torch.zeros(2, 1, 5, 7, device=device).masked_fill(~given, -torch.inf)
    else:
        given = None
        sees &= torch.ones(5, 7, dtype=torch.bool, device=device).tril(0 if mask == "causal" else 7)
    out, _ = torch_cubin.huggingface.attention(
        torch.nn.Module(), query, key, key, given, is_causal=mask == "causal", indices=indices
    )
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, key, sees)
    some = sees.any(-1).expand(2, 4, 5).transpose(1, 2)  # min stands for -inf in masks of floats
    torch.testing.assert_close(out[some], expected.transpose(1, 2)[some])


def test_blocks_selected_by_an_indexer_are_refused(device):
    query = torch.randn(2, 4, 5, 8, device=device)
    blocks = torch.zeros(2, 5, 1, dtype=torch.int32, device=device)
    ends = torch.tensor([0, 2, 5], dtype=torch.int32, device=device)
    for packed in ({}, {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}):
        with pytest.raises(torch_cubin.errors.InputError, match="block_indices"):
            torch_cubin.huggingface.attention(
                *(torch.nn.Module(), query[:1], query[:1], query[:1], None),
                block_indices=blocks[:1],
                **packed,
            )
    with pytest.raises(torch_cubin.errors.InputError, match="head_mask"):
        torch_cubin.huggingface.attention(
            torch.nn.Module(), query, query, query, None, head_mask=torch.ones(query.shape[1])
        )


def test_asking_for_attention_weights_warns(device):
    query = torch.randn(2, 4, 5, 8, device=device)
    layer = torch.nn.Module()
    torch_cubin.report(reset=True)
    with pytest.warns(UserWarning, match="eager"):
        torch_cubin.huggingface.attention(layer, query, query, query, None, output_attentions=True)
    (row,) = torch_cubin.report(reset=True).declined
    assert (row.function, row.reason) == ("transformers attention weights", "output_attentions")


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled(device):
    model, given = make(llama, device), padded(inputs(llama, device))
    with torch.no_grad():
        expected = model(**given).logits
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(**given).logits, expected)


def test_drop_in_serves_sdpa(device):
    model, given = make(llama, device), inputs(llama, device)
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        expected = model(**given).logits
        with torch_cubin.drop_in():
            logits = model(**given).logits
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-5)
    calls = {row.function: row.calls for row in torch_cubin.report().served}
    assert calls["torch.nn.functional.scaled_dot_product_attention"] == LAYERS
    assert torch_cubin.report().declined == ()


def test_importing_torch_cubin_imports_no_transformers(torch_python):
    code = "import sys, torch_cubin; assert 'transformers' not in sys.modules"
    torch_python.output(code)


def bloom(**options):
    config = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)
    return transformers.BloomForCausalLM._from_config(config, **options)


def test_a_model_that_computes_attention_itself_is_refused(device):
    """It would add the mask that transformers makes for "sdpa" alone: none, where it is causal."""
    ids = torch.arange(9, device=device)[None]
    for compiled in (False, True):
        model = make(bloom, device)
        if compiled:
            model.forward = torch.compile(model.forward, backend="eager")
        with pytest.raises(
            Exception, match=r"torch_cubin \[input\]: .*BloomAttention.*drop_in\(\)"
        ):
            model(input_ids=ids)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("given", ["a mask", "indices", "nothing"])
def test_packed_sequences_do_not_see_each_other(given, causal, window, device):
    """Two of fewer rows than columns, whose last ones are each other's."""
    torch.manual_seed(0)
    rows, columns = [0, 4, 7], [0, 6, 11]
    query = torch.randn(1, 4, rows[-1], 16, device=device)
    key, value = (torch.randn(1, 2, columns[-1], 16, device=device) for _ in range(2))
    sees = torch.zeros(rows[-1], columns[-1], dtype=torch.bool, device=device)
    for i in range(2):
        part = sees[rows[i] : rows[i + 1], columns[i] : columns[i + 1]].fill_(True)
        last = part.shape[1] - part.shape[0]
        part &= part.tril(last) if causal else part
        if window:
            part &= part.triu(last + 1 - window).tril(last + window - 1)
    indices = None
    if given == "indices":
        indices = torch.arange(0, columns[-1], 2, device=device).expand(1, rows[-1], -1)
        sees[:, 1::2] = False
    mask = sees.clone()[None, None]
    mask[..., :4, 6:] = True  # columns of another sequence
    out, _ = torch_cubin.huggingface.attention(
        *(torch.nn.Module(), query, key, value, mask if given == "a mask" else None),
        is_causal=causal,
        indices=indices,
        sliding_window=window,
        cu_seq_lens_q=torch.tensor(rows, dtype=torch.int32, device=device),
        cu_seq_lens_k=torch.tensor(columns, dtype=torch.int32, device=device),
        max_length_q=4,
        max_length_k=6,
    )
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, sees, enable_gqa=True
    )
    some = sees.any(1)
    torch.testing.assert_close(out[:, some], wanted.transpose(1, 2)[:, some], rtol=1e-4, atol=1e-5)


def test_continuous_batching(device):
    """5.23 and newer take no implementation of others there, and run on a thread of their own."""
    if device == "cpu":
        pytest.importorskip("psutil", reason="transformers asks it for the memory")
    version = tuple(map(int, transformers.__version__.split(".")[:2]))
    if version < (5, 17):
        pytest.skip("of transformers 5.17 and newer")
    model, prompts = make(llama, device), [[5, 6, 7, 8, 9], [11, 12, 13]]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    wanted = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=device)
        wanted.append(model.generate(ids, **options, eos_token_id=None)[0, len(prompt) :].tolist())
    served = "transformers attention"
    if version >= (5, 23):
        model.set_attn_implementation("sdpa")
        model.forward = torch_cubin.drop_in()(model.forward)
        served = "torch.nn.functional.scaled_dot_product_attention"
    options |= {"eos_token_id": -1, "num_blocks": 8, "max_batch_tokens": 32, "block_size": 32}
    config = transformers.GenerationConfig(**options)
    torch_cubin.report(reset=True)
    found = model.generate_batch(prompts, generation_config=config, progress_bar=False)
    assert sorted(x.generated_tokens for x in found.values()) == sorted(wanted)
    assert served in [row.function for row in torch_cubin.report().served]


def test_diffusers_by_its_native_backend(device):
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    model.to(device).eval().set_attention_backend("native")
    sizes = {
        "hidden_states": (1, 16, 4), "encoder_hidden_states": (1, 8, 32), "img_ids": (16, 3),
        "pooled_projections": (1, 32), "timestep": (1,), "txt_ids": (8, 3),
    }  # fmt: skip
    given = {name: torch.rand(size, device=device) for name, size in sizes.items()}
    with torch.no_grad():
        wanted = model(**given).sample
        with torch_cubin.drop_in():
            out = model(**given).sample
            names = [row.function for row in torch_cubin.report().served]
    assert "torch.nn.functional.scaled_dot_product_attention" in names
    torch.testing.assert_close(out, wanted, rtol=1e-3, atol=1e-4)


def test_a_model_with_layers_of_both_kinds_is_causal(device):
    """BigBird-Pegasus: its encoder computes attention itself, its decoder calls the
    attention function, whose arguments do not say that it is causal."""
    config = transformers.BigBirdPegasusConfig(
        vocab_size=64, d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=48,
        encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=48,
    )  # fmt: skip
    ids = torch.arange(9, device=device)[None]
    results = []
    for name in ("eager", "cubin"):
        torch.manual_seed(0)
        model = transformers.BigBirdPegasusForCausalLM._from_config(
            config, attn_implementation=name
        )
        with torch.no_grad():
            results.append(model.to(device).eval()(input_ids=ids).logits)
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-5)


def test_an_encoder_that_was_never_made_for_sdpa_is_not_causal(device):
    """ALIGN's text layers have no `is_causal`, and without a mask every token sees every other."""
    config = transformers.AlignTextConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=48,
    )  # fmt: skip
    ids = torch.arange(3, 12, device=device)[None]
    results = []
    for name in ("eager", "cubin"):
        torch.manual_seed(0)
        model = transformers.AlignTextModel._from_config(config, attn_implementation=name)
        with torch.no_grad():
            results.append(model.to(device).eval()(input_ids=ids).last_hidden_state)
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-5)


def test_layers_that_say_causal_in_a_model_never_made_for_sdpa_see_everything(device):
    """BridgeTower's cross-modal layers say `is_causal`, and get a mask that hides nothing."""
    size = {"hidden_size": 64, "num_hidden_layers": 2, "initializer_factor": 5.0}
    config = transformers.BridgeTowerConfig(
        **size, num_attention_heads=4, intermediate_size=48,
        text_config={**size, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 64},
        vision_config={**size, "patch_size": 8, "image_size": 32},
    )  # fmt: skip
    ids = torch.arange(3, 12, device=device)[None]
    pixels = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(1)).to(device)
    results = []
    for name in ("eager", "cubin"):
        torch.manual_seed(0)
        model = transformers.BridgeTowerModel._from_config(config, attn_implementation=name)
        with torch.no_grad():
            out = model.to(device).eval()(input_ids=ids, pixel_values=pixels)
        results.append((out.text_features, out.image_features))
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-5)
