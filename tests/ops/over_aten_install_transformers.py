"""install() and drop_in() under transformers' attention "sdpa": where there is a mask, heads that
share keys and values are not repeated, and a boolean one stays boolean."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from installed import installed
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import torch_cubin
from torch_cubin._drop_in import aten_kernels

LAYERS, HEADS, SHARED = 2, 4, 2
SERVED = "transformers attention"


@pytest.fixture(scope="module")
def transformers() -> Any:
    """Imported for the first time where install() is active already."""
    with installed():
        return pytest.importorskip("transformers", "4.53")


@pytest.fixture(autouse=True)
def _kernels_with_masks() -> Iterator[None]:
    """PyTorch may choose one; in other tests it is to compute by its math backend alone."""
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        yield


@pytest.fixture
def model(transformers) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, vocab_size=64,
        num_attention_heads=HEADS, num_key_value_heads=SHARED, max_position_embeddings=64,
        attn_implementation="sdpa",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def padded() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :3] = 0
    return {"input_ids": torch.randint(64, (2, 9)), "attention_mask": mask}


class Repeated(TorchDispatchMode):
    """Counts copies of keys or values for each head that shares them."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.clone.default and result.dim() == 5:
            self.calls += 1
        return result


def counts() -> int:
    return sum(row.calls for row in torch_cubin.report().served if row.function == SERVED)


def call(model: torch.nn.Module, **given: Any) -> tuple[torch.Tensor, int]:
    """The logits, and how many copies were made."""
    torch_cubin.report(reset=True)
    with Repeated() as repeated:
        return model(**given).logits, repeated.calls


@torch.no_grad()
def test_padded_calls_have_the_same_logits_without_copies(model) -> None:
    own, copies = call(model, **padded())
    assert (copies, counts()) == (2 * LAYERS, 0)
    with installed():
        ours, copies = call(model, **padded())
        assert (copies, counts()) == (0, LAYERS)
    torch.testing.assert_close(ours, own)
    assert call(model, **padded())[1] == 2 * LAYERS  # after remove()


@torch.no_grad()
def test_drop_in_serves_them_in_its_thread(model, monkeypatch) -> None:
    aten_kernels.register("CPU")
    monkeypatch.setattr(aten_kernels, "below_autograd", lambda: True)
    own, _ = call(model, **padded())
    copied: list[int] = []
    with torch_cubin.drop_in(policy="all"):
        ours, copies = call(model, **padded())
        assert (copies, counts()) == (0, LAYERS)
        other = threading.Thread(target=lambda: copied.append(call_without_gradients(model)))
        other.start()
        other.join()
        with torch_cubin.drop_in():  # "fastest", which knows nothing of a CPU
            assert call(model, **padded())[1] == 2 * LAYERS
    assert copied == [2 * LAYERS]
    torch.testing.assert_close(ours, own)
    assert call(model, **padded())[1] == 2 * LAYERS


def call_without_gradients(model: torch.nn.Module) -> int:
    with torch.no_grad(), sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        return call(model, **padded())[1]


@torch.no_grad()
def test_decoding_with_a_static_cache_has_the_same_logits_without_copies(
    model, transformers
) -> None:
    ids = torch.arange(18).view(2, 9)

    def step() -> tuple[torch.Tensor, int]:
        cache = transformers.StaticCache(config=model.config, max_cache_len=16)
        model(input_ids=ids[:, :-1], past_key_values=cache)
        at = torch.full((2, 1), 8)
        return call(model, input_ids=ids[:, -1:], past_key_values=cache, position_ids=at)

    own, _ = step()
    with installed():
        ours, copies = step()
        assert (copies, counts()) == (0, LAYERS)
    torch.testing.assert_close(ours, own)


def operands() -> tuple[torch.Tensor, ...]:
    """Query, key, value and a mask."""
    torch.manual_seed(2)
    mask = torch.ones(2, 1, 5, 7).tril(2) > 0
    return torch.randn(2, HEADS, 5, 8), *torch.randn(2, 2, SHARED, 7, 8), mask


def attention_of(transformers: Any, *given: torch.Tensor | None, **options: Any) -> torch.Tensor:
    """By the function that transformers calls for a layer."""
    layer = SimpleNamespace(num_key_value_groups=HEADS // SHARED)
    return transformers.AttentionInterface()["sdpa"](layer, *given, **options)[0]


def test_the_function_of_a_layer(transformers) -> None:
    own = attention_of(transformers, *operands(), scaling=0.3)
    with installed():
        torch.testing.assert_close(attention_of(transformers, *operands(), scaling=0.3), own)
        assert counts() == 1


@pytest.mark.parametrize(("rows", "dtype"), [(64, torch.bool), (63, torch.bool), (64, None)])
def test_a_boolean_mask_of_many_queries(rows: int, dtype: torch.dtype | None, transformers) -> None:
    """Without shared heads."""
    query, key, value = torch.randn(3, 2, HEADS, rows, 8)
    mask = torch.ones(2, 1, rows, rows).tril() > 0
    if dtype is None:
        mask = torch.where(mask, 0.0, -torch.inf)
    sdpa, layer = transformers.AttentionInterface()["sdpa"], SimpleNamespace()
    own = sdpa(layer, query, key, value, mask)[0]
    with installed():
        torch.testing.assert_close(sdpa(layer, query, key, value, mask)[0], own)
        assert counts() == (rows == 64 and dtype is not None)


@pytest.mark.parametrize(
    "case",
    [
        *("gradient", "vmap", "tangent", "dual tensors", "no mask", "bias", "dropout"),
        *("a mask of two dimensions", "a mask for all keys at once", "another backend"),
    ],
)
def test_calls_that_stay_transformers_own(case: str, transformers) -> None:
    query, key, value, mask = operands()
    attend = functools.partial(attention_of, transformers)
    with installed():
        if case == "gradient":
            attend(query.requires_grad_(), key, value, mask).sum().backward()
        elif case == "vmap":
            torch.func.vmap(attend)(*(x[None] for x in (query, key, value, mask)))
        elif case == "tangent":
            torch.func.jvp(lambda q: attend(q, key, value, mask), (query,), (query,))
        elif case == "dual tensors":
            with forward_ad.dual_level():
                attend(forward_ad.make_dual(query, query), key, value, mask)
        elif case == "a mask of two dimensions":
            attend(query, key, value, mask[0, 0])
        elif case == "a mask for all keys at once":
            attend(query, key, value, mask[..., :1])
        elif case == "no mask":
            attend(query, key, value, None, is_causal=False)
        elif case == "bias":
            attend(query, key, value, mask, position_bias=torch.randn(1, HEADS, 5, 7))
        elif case == "dropout":
            attend(query, key, value, mask, dropout=0.5)
        else:
            with sdpa_kernel(SDPBackend.MATH):
                attend(query, key, value, mask)
        assert counts() == 0


@torch.no_grad()
def test_the_policy_fastest_leaves_what_was_not_measured(model) -> None:
    with installed("fastest"):
        call(model, **padded())
        assert counts() == 0


def test_a_function_of_the_programs_own_is_not_replaced(transformers, monkeypatch) -> None:
    from torch_cubin._drop_in import transformers_sdpa

    interface = transformers.AttentionInterface
    monkeypatch.setattr(interface, "_global_mapping", {"sdpa": print})
    transformers_sdpa._wrap_in(transformers.modeling_utils)
    assert interface()["sdpa"] is print
