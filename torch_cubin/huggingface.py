"""The attention implementation "cubin" for models of Hugging Face's transformers.

    torch_cubin.huggingface.register()
    model = AutoModel.from_pretrained(name, attn_implementation="cubin")

Importing this module does not import transformers; :func:`register` does.
"""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from torch_cubin import errors
from torch_cubin._drop_in import report
from torch_cubin._pytorch.compiler import assume_constant_result

NAME = "cubin"
_REPORTED = "transformers attention"


def register() -> None:
    """Add "cubin" to the attention implementations that transformers knows.

    It takes what "sdpa" takes and masks are made as for "sdpa"; logits soft-capped (Gemma 2) and
    attention sinks (GPT-OSS), which "sdpa" lacks, are served too, and heads that share keys and
    values are not repeated. Prefill and cached generation, static caches and padded batches
    included, run from cubins; :func:`torch_cubin.report` counts the calls, and says where the
    weights were asked for, which no call gives. Calling it again changes nothing.

    Raises:
        ImportError: transformers is missing, or older than 4.53.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        fault = errors.fault(
            "input",
            "torch_cubin.huggingface.register()",
            f"needs transformers ({error})",
            expected="an installed transformers, 4.53 or newer",
        )
        raise type(error)(str(fault), name=error.name) from error

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, _mask_function(AttentionMaskInterface()["sdpa"]))


@cache
def _mask_function(make: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """transformers' function for the masks of "sdpa", for models that ask for the attention."""

    def mask(*args: Any, config: Any = None, **kwargs: Any) -> Tensor | None:
        own = _own_attention(type(config))
        if own:
            raise errors.fault(
                "input", 'attention "cubin"', f"is not asked by {own}, which computes it itself",
                expected="a model whose layers ask transformers' AttentionInterface",
                got=f"a model of {type(config).__name__}",
                advice='Load it with attn_implementation="eager" and call it under '
                "torch_cubin.drop_in().",
            )  # fmt: skip
        return make(*args, config=config, **kwargs)

    return mask


@assume_constant_result
@cache
def _own_attention(config_class: type) -> str:
    """The attention layer of a model that never asks transformers' interface; "" for none.

    Such a layer adds the mask that it gets to its scores, and "sdpa" makes none where is_causal
    says the same: the model would not be causal. What tells the two apart is in the code of the
    layers that stand beside a config, in the modules modeling_* of its package.
    """
    for cls in config_class.__mro__:
        package = cls.__module__.rpartition(".")[0]
        for name, module in list(sys.modules.items()):
            parent, _, leaf = name.rpartition(".")
            if parent == package and leaf.startswith("modeling_") and module is not None:
                for layer in _attention_layers(module):
                    names = _names_in(layer)
                    if "softmax" in names and not names & {"ALL_ATTENTION_FUNCTIONS", "AttentionInterface"}:
                        return layer.__name__
    return ""


def _attention_layers(module: types.ModuleType) -> Iterator[type]:
    for value in list(vars(module).values()):
        if isinstance(value, type) and issubclass(value, torch.nn.Module):
            if value.__module__ == module.__name__ and "Attention" in value.__name__:
                yield value


def _names_in(layer: type) -> set[str]:
    """Global names and attributes that the methods of a class use, its base classes' too."""
    names: set[str] = set()
    for cls in layer.__mro__[: layer.__mro__.index(torch.nn.Module)]:
        for value in vars(cls).values():
            function = getattr(value, "__wrapped__", value)
            if isinstance(function, types.FunctionType):
                names.update(function.__code__.co_names)
    return names


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls for a layer.

    Args:
        module: the layer; `module.is_causal` (default True) says what no mask means.
        query: (batch, heads, rows, head_dim).
        key: (batch, heads that divide those of query, columns, head_dim).
        value: as key; head_dim may be another.
        attention_mask: bool (False hides) or added to the scores; broadcasts to
            (batch, heads, rows, columns).
        position_bias: added to the scores as well (T5).
        softcap: scores become softcap * tanh(scores / softcap).
        s_aux: (heads,): a logit that joins each row's softmax, without a value.
        indices: (batch, rows, any number): the columns that each row sees, of those that the mask
            lets it see (DeepSeek V3.2).
        block_indices: the same by blocks (MiniMax M3), of an unknown size: refused.

    Returns:
        (batch, rows, heads, head_dim of value), contiguous, and None for the weights.
    """
    if kwargs.get("output_attentions"):
        warnings.warn(
            'attention "cubin" gives no attention weights: use "eager" where they are wanted',
            stacklevel=2,
        )
        if not torch.compiler.is_compiling():
            report.count_declined(f"{_REPORTED} weights", "output_attentions")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    # NOTE: this order, because under torch.compile with dynamic sizes the first is symbolic.
    is_causal = query.shape[2] > 1 and attention_mask is None and is_causal
    if position_bias is not None:
        from transformers.integrations.sdpa_attention import create_position_bias_mask

        attention_mask = create_position_bias_mask(
            position_bias, attention_mask, is_causal, query, key
        )
        is_causal = False
    if block_indices is not None:
        raise errors.fault(
            "input", 'attention "cubin"', "is given blocks of keys that each query is to see",
            expected="a model without block_indices", got=type(module).__name__,
            advice='Give this model attn_implementation="sdpa".',
        )  # fmt: skip
    if indices is not None:
        attention_mask = _selected(indices, attention_mask, is_causal, query, key)
        is_causal = False
    options = {"scale": scaling, "enable_gqa": query.shape[1] != key.shape[1]}
    if softcap is None and s_aux is None:
        out = torch.ops.cubin.scaled_dot_product_attention(
            query, key, value, attention_mask, dropout, is_causal, **options
        )
    else:
        seed = torch.randint(2**63 - 1, (1,), device=query.device) if dropout > 0 else None
        out, _ = torch.ops.cubin.attention_forward(
            *(query, key, value, attention_mask, dropout, is_causal, seed),
            **options,
            softcap=softcap or 0.0,
            sinks=None if s_aux is None else s_aux.float(),
        )
    if torch.compiler.is_compiling():
        report.count_traced_served(_REPORTED, out.dtype, out.device.type)
    else:
        report.count_served(_REPORTED, (query, key), out)
    # A view already: the output lies in memory as query does, whose heads models put last.
    return out.transpose(1, 2).contiguous(), None


def _selected(
    indices: Tensor, mask: Tensor | None, is_causal: bool, query: Tensor, key: Tensor
) -> Tensor:
    """The mask without the columns that are not among `indices`.

    Models of sparse attention make it themselves for "eager" and "sdpa" alone, by these names, and
    hand the indices to every other implementation.
    """
    rows, columns = query.shape[2], key.shape[2]
    hidden = torch.ones(*indices.shape[:-1], columns, dtype=torch.bool, device=key.device)
    hidden = hidden.scatter(-1, indices.long(), False).unsqueeze(1)
    if mask is None:
        return ~hidden & ~hidden.new_ones(rows, columns).triu(1) if is_causal else ~hidden
    if mask.dtype == torch.bool:
        return mask & ~hidden
    return mask.masked_fill(hidden, torch.finfo(mask.dtype).min)
