"""The implementation "cubin" for Hugging Face's transformers: attention, experts, FP8Linear.

    torch_cubin.huggingface.register()
    model = AutoModel.from_pretrained(name, attn_implementation="cubin")

Importing this module does not import transformers; :func:`register` does. It is over 500 lines
because each of attention's arguments that transformers passes needs its own check.
"""

from __future__ import annotations

import contextlib
import inspect
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
from torch_cubin._pytorch.modules import is_plain

NAME = "cubin"
_REPORTED = "transformers attention"
_FP8_LINEAR = "transformers fp8_linear"


def register() -> None:
    """Adds "cubin" to the attention implementations of transformers, and to those of experts.

    It supports the arguments and masks of "sdpa", and also soft-capped logits (Gemma 2) and
    attention sinks (GPT-OSS), which "sdpa" lacks; heads that share keys and values are not
    repeated. Prefill and cached generation, with static caches and padded batches, run from cubins.
    :func:`torch_cubin.report` counts the calls, and lists requests for attention weights, which are
    not returned. Calling it again changes nothing.

    `experts_implementation="cubin"` computes mixtures of experts by :func:`torch_cubin.moe`
    (transformers 5), in float16 and bfloat16 on Hopper, and on the CPU; those of checkpoints in
    8-bit floats too, for inference.

    FP8Linear, the layer of checkpoints in 8-bit floats, computes blocks of 128 x 128 by
    :func:`torch_cubin.ops.quantize` and `scaled_matmul` on Hopper and on the CPU; other calls go to
    transformers' own function, and :func:`torch_cubin.report` lists them. :func:`unregister` puts
    that function back.

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
    AttentionInterface.register(f"paged|{NAME}", paged_attention)
    AttentionMaskInterface.register(NAME, _mask_function(AttentionMaskInterface()["sdpa"]))
    # Older ones have neither: their experts are loops, and FP8Linear calls Triton directly.
    with contextlib.suppress(ImportError):
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        ALL_EXPERTS_FUNCTIONS.register(NAME, experts)
    with contextlib.suppress(ImportError):
        from transformers.integrations import finegrained_fp8

        interface = getattr(finegrained_fp8, "ALL_FP8_EXPERTS_FUNCTIONS", None)
        if interface is not None:
            interface.register(NAME, float8_experts)
        own = getattr(finegrained_fp8, "fp8_linear", None)
        if own is not None and not hasattr(own, _OTHERS):
            finegrained_fp8.fp8_linear = _fp8_linear_before(own)


def unregister() -> None:
    """Puts back transformers' own function of FP8Linear. The names that :func:`register` added
    stay, and nothing asks for them by itself."""
    module: Any = sys.modules.get("transformers.integrations.finegrained_fp8")
    if module is not None:
        module.fp8_linear = getattr(module.fp8_linear, _OTHERS, module.fp8_linear)


_OTHERS = "torch_cubin_others"  # attribute of our function: transformers' own


def _fp8_linear_before(others: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """FP8Linear's function, which calls `others` where a weight's scales are not ours."""
    from torch_cubin._ops import float8

    def fp8_linear(
        input: Tensor,
        weight: Tensor,
        weight_scale_inv: Tensor,
        block_size: Any = None,
        bias: Tensor | None = None,
        activation_scale: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        args = (input, weight, weight_scale_inv, block_size)
        reason = float8.why_not(*args, activation_scale)
        if reason:
            traced = torch.compiler.is_compiling()
            (report.count_traced_declined if traced else report.count_declined)(_FP8_LINEAR, reason)
            return others(*args, bias, activation_scale, **options)
        # Scales of UE8M0 are powers of two; parameters of transformers' layers require gradients.
        scale = weight_scale_inv.detach().float().t()
        own_bias = None if bias is None else bias.detach()
        out = float8.linear(input, weight.detach(), scale, own_bias, "block")
        _count(_FP8_LINEAR, input, weight, out)
        return out

    setattr(fp8_linear, _OTHERS, others)
    return fp8_linear


def experts(
    self: torch.nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The experts of a layer (`experts_implementation="cubin"`): torch_cubin.moe with the layer's
    own gate, weights and biases."""
    from torch_cubin._ops import experts as mixtures

    layer: Any = self
    first, gate = (
        ("gate_up_proj", layer._apply_gate) if _has_gate(layer) else ("up_proj", layer.act_fn)
    )
    up, down = getattr(layer, first), layer.down_proj
    if not layer.is_transposed:
        up, down = up.mT, down.mT
    biases = (getattr(layer, f"{first}_bias"), layer.down_proj_bias) if layer.has_bias else ()
    activation = gate_activation(layer)
    if activation is not None:
        return mixtures.moe(
            hidden_states, top_k_index, top_k_weights, up.mT, down.mT, activation=activation
        )
    return mixtures.experts(hidden_states, top_k_index, top_k_weights, up, down, gate, *biases)


def float8_experts(
    self: torch.nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The same for layers of 8-bit floats (FP8Experts), for inference.

    Raises InputError [input] for those whose weights or gates torch_cubin.moe does not take.
    """
    from torch_cubin._ops import experts as mixtures

    layer: Any = self
    reason = _why_not_float8(layer)
    if reason:
        raise errors.fault(
            "input", 'experts "cubin"', f"of 8-bit floats do not take {reason}",
            expected="float8_e4m3fn in blocks of 128 x 128, with silu(gate) * up",
            got=type(layer).__name__,
            advice='Call model.set_experts_implementation("grouped_mm").',
        )  # fmt: skip
    weights = layer.gate_up_proj.detach(), layer.down_proj.detach()
    # Checkpoints may have scales of float8_e8m0fnu.
    first, second = (
        scale.detach().float()
        for scale in (layer.gate_up_proj_scale_inv, layer.down_proj_scale_inv)
    )
    return mixtures.moe(
        *(hidden_states, top_k_index, top_k_weights, *weights), w13_scale=first, w2_scale=second
    )


def _why_not_float8(layer: Any) -> str | None:
    from transformers.integrations.finegrained_fp8 import FP8Experts

    if not layer.has_gate or type(layer)._apply_gate is not FP8Experts._apply_gate:
        return "a gate of the model's own"
    if layer.gate_up_proj.dtype != torch.float8_e4m3fn:
        return f"weights of {layer.gate_up_proj.dtype}"
    if tuple(layer.block_size or ()) != (128, 128):
        return f"blocks of {layer.block_size}"
    if layer.activation_scheme != "dynamic":
        return "fixed scales of activations"
    if layer.swiglu_alpha is not None or layer.limit is not None:
        return "gates with a limit"
    return None if activation_name(layer.act_fn) == "silu" else f"{type(layer.act_fn).__name__}"


def _has_gate(layer: Any) -> bool:
    return getattr(layer, "has_gate", True)  # up to transformers 5.3 all have one


def gate_activation(layer: Any) -> str | None:
    """The name by which moe() knows the activation of the layer's gate; None for other layers."""
    if not _has_gate(layer) or layer.has_bias or not getattr(layer, "is_concatenated", True):
        return None
    if "_apply_gate" in vars(layer) or not _has_default_gate(type(layer)):
        return None
    return activation_name(layer.act_fn)


@assume_constant_result
def _has_default_gate(kind: Any) -> bool:
    from transformers.integrations import moe

    return kind._apply_gate is getattr(moe, "_default_apply_gate", None)


# By the names that classes have had in transformers.
_ACTIVATIONS = {
    "silu": ("SiLUActivation",),
    "gelu": ("GELUActivation",),
    "gelu_tanh": ("GELUTanh", "PytorchGELUTanh"),
}


def activation_name(function: Any) -> str | None:
    """The name by which our ops know a layer's activation; None for others, and where a hook would
    see its calls."""
    kind = type(function)
    if not isinstance(function, torch.nn.Module) or not is_plain(function):
        return None
    if kind is torch.nn.SiLU:
        return "silu"
    if kind is torch.nn.ReLU:
        return "relu"
    for name in _ACTIVATIONS:
        if _is_activation(kind, name):
            return name
    return None


# NOTE: a bool, because a string returned by such a function cannot be tested in a trace.
@assume_constant_result
def _is_activation(kind: type, name: str) -> bool:
    from transformers import activations

    return any(kind is getattr(activations, each, None) for each in _ACTIVATIONS[name])


@cache
def _mask_function(make: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """Wraps transformers' mask function of "sdpa"; refuses models with their own attention."""

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
        if _needs_mask(type(config)):
            kwargs["allow_is_causal_skip"] = False
        return make(*args, config=config, **kwargs)

    return mask


@assume_constant_result
def _own_attention(config_class: type) -> str:
    return _find_own_attention(config_class)


@cache
def _find_own_attention(config_class: type) -> str:
    """An attention layer of a model whose layers all bypass transformers' interface; "" for none.

    Such a layer adds its mask to its scores, but "sdpa" makes no mask if is_causal suffices: the
    model would not be causal. The two kinds of models are distinguished by the code of the layers.
    Models with several parts (audio and text) have layers of both kinds, and use the interface
    where it matters.
    """
    for module_classes in _classes_beside(config_class):
        layers = [cls for cls in module_classes if "Attention" in cls.__name__]
        if any(_asks(layer) for layer in layers):
            return ""
        own = [x.__name__ for x in layers if _names_in(x) & {"softmax", "Softmax"}]
        if own:
            return own[0]
    return ""


@assume_constant_result
def _needs_mask(config_class: type) -> bool:
    return _find_needs_mask(config_class)


@cache
def _find_needs_mask(config_class: type) -> bool:
    """Whether a model was not written for "sdpa": its layers do not set `is_causal`
    (BigBird-Pegasus, ALIGN), or set it for layers that see everything (BridgeTower). Then every
    causal call gets a mask, and no mask means that nothing is hidden, as under "eager"."""
    return any(
        any(getattr(cls, "_supports_sdpa", None) is False for cls in classes)
        and any(_asks(x) for x in classes)
        for classes in _classes_beside(config_class)
    )


def _classes_beside(config_class: type) -> Iterator[list[type]]:
    """The torch.nn.Modules in the modules modeling_* of a config's package, and of the packages of
    its base classes."""
    for cls in config_class.__mro__:
        package = cls.__module__.rpartition(".")[0]
        found: list[type] = []
        for name, module in list(sys.modules.items()):
            parent, _, leaf = name.rpartition(".")
            if parent == package and leaf.startswith("modeling_") and module is not None:
                found += [
                    value
                    for value in list(vars(module).values())
                    if isinstance(value, type)
                    and issubclass(value, torch.nn.Module)
                    and value.__module__ == name
                ]
        yield found


def _asks(layer: type) -> bool:
    return bool(_names_in(layer) & {"ALL_ATTENTION_FUNCTIONS", "AttentionInterface"})


def _names_in(layer: type) -> set[str]:
    """Global names and attributes that the methods of a class and its bases use, except methods
    that it overrides."""
    names: set[str] = set()
    classes = layer.__mro__[: layer.__mro__.index(torch.nn.Module)]
    for method in {name for cls in classes for name in vars(cls)}:
        function = inspect.getattr_static(layer, method)
        function = inspect.unwrap(function) if callable(function) else function
        if isinstance(function, types.FunctionType):
            names.update(function.__code__.co_names)
    return names


def _check_call(module: torch.nn.Module, block_indices: Tensor | None, others: Any) -> None:
    """Warns or raises for what a layer asks for and does not get."""
    if others.get("output_attentions"):
        warnings.warn(
            'attention "cubin" gives no attention weights: use "eager" where they are wanted',
            stacklevel=3,
        )
        if not torch.compiler.is_compiling():
            report.count_declined(f"{_REPORTED} weights", "output_attentions")
    if others.get("head_mask") is not None:  # up to transformers 4
        raise errors.fault(
            "input", 'attention "cubin"', "is given a head_mask, which scales attention weights",
            expected="none", got=type(module).__name__,
            advice='Use attn_implementation="eager" where heads are masked.',
        )  # fmt: skip
    if block_indices is not None:
        raise errors.fault(
            "input", 'attention "cubin"', "is given blocks of keys that each query is to see",
            expected="a model without block_indices", got=type(module).__name__,
            advice='Give this model attn_implementation="sdpa".',
        )  # fmt: skip


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
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls for a layer.

    Args:
        module: the layer; `module.is_causal` (default: True) applies if there is no mask, except
            for models that were not written for "sdpa", where no mask means nothing is hidden.
        query: (batch, heads, rows, head_dim).
        key: (batch, heads that divide those of query, columns, head_dim).
        value: like key; head_dim may differ.
        attention_mask: bool (False hides) or added to the scores; broadcasts to
            (batch, heads, rows, columns).
        position_bias: added to the scores as well (T5).
        softcap: scores become softcap * tanh(scores / softcap).
        s_aux: (heads,): an extra logit in each row's softmax, without a value.
        indices: (batch, rows, any number): the columns that each row sees, among those that the
            mask allows (DeepSeek V3.2).
        block_indices: the same by blocks (MiniMax M3), of an unknown size: refused.
        sliding_window: the number of columns that a row of packed sequences sees, including
            itself, to the left, and without is_causal to the right, too; other calls have a mask
            for it.
        cu_seq_lens_q, cu_seq_lens_k: the offsets of packed sequences in rows and in columns, for a
            batch of one: sequences do not see each other.
        max_length_q, max_length_k: the longest sequence's rows and columns.

    Returns:
        (batch, rows, heads, head_dim of value), contiguous, and None for the weights.
    """
    _check_call(module, block_indices, kwargs)
    if is_causal is None:
        config_class = type(getattr(module, "config", None))
        is_causal = not _needs_mask(config_class) and getattr(module, "is_causal", True)
    offsets = None
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        offsets = (cu_seq_lens_q, cu_seq_lens_k)
    is_plain = attention_mask is None and position_bias is None and indices is None
    if offsets is not None and is_plain:
        longest = _longest(max_length_q, offsets[0]), _longest(max_length_k, offsets[1])
        rest: dict[str, Any] = {"scale": scaling, "softcap": softcap or 0.0, "dropout_p": dropout}
        rest["sinks"] = None if s_aux is None else s_aux.float()
        given = (query, key, value, offsets, longest, is_causal, sliding_window)
        return _packed(*given, **rest), None
    if offsets is not None:
        attention_mask = _seen_in_packed(
            offsets, query, key, attention_mask, is_causal, sliding_window
        )
        is_causal = False
    # NOTE: this order, because under torch.compile with dynamic sizes the first is symbolic.
    is_causal = query.shape[2] > 1 and attention_mask is None and is_causal
    if position_bias is not None:
        from transformers.integrations.sdpa_attention import create_position_bias_mask

        attention_mask = create_position_bias_mask(
            position_bias, attention_mask, is_causal, query, key
        )
        is_causal = False
    if indices is not None:
        attention_mask = _selected(indices, attention_mask, is_causal, key)
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
    _count(_REPORTED, query, key, out)
    # Usually a view: the output has the strides of query, in which models put the heads last.
    return out.transpose(1, 2).contiguous(), None


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    cache: Any = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | dict[str, Tensor] | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | dict[str, int] | None = None,
    block_table: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Called by transformers for a layer in continuous batching, as "paged|cubin" (up to 5.22).

    The rows of all requests are concatenated, (1, heads, rows, head_dim), and `cache` provides the
    keys and values that each sees, old and new.
    """
    if cache is None or block_table is not None:
        raise errors.fault(
            "input", 'attention "paged|cubin"', "is called outside of continuous batching",
            expected="transformers' paged cache, without block tables",
            got="no cache" if cache is None else "block tables",
            advice='Use attn_implementation="cubin" for other calls.',
        )  # fmt: skip
    window = getattr(module, "sliding_window", None) or None
    kind = "sliding_attention" if window else "full_attention"
    if isinstance(cu_seq_lens_k, dict):
        cu_seq_lens_k = cu_seq_lens_k[kind]
    if isinstance(max_seqlen_k, dict):
        max_seqlen_k = max_seqlen_k[kind]
    indices = {name: kwargs.pop(name) for name in ("read_index", "write_index")}
    key, value = cache.update(
        key_states=key, value_states=value, layer_idx=module.layer_idx, **indices
    )
    kwargs["sliding_window"] = window
    return attention(
        module,
        query,
        key.transpose(0, 1).unsqueeze(0),
        value.transpose(0, 1).unsqueeze(0),
        attention_mask,
        cu_seq_lens_q=cu_seq_lens_q,
        cu_seq_lens_k=cu_seq_lens_k,
        max_length_q=max_seqlen_q,
        max_length_k=max_seqlen_k,
        **kwargs,
    )


def _count(what: str, first: Tensor, second: Tensor, out: Tensor) -> None:
    if torch.compiler.is_compiling():
        report.count_traced_served(what, out.dtype, out.device.type)
    else:
        report.count_served(what, (first, second), out)


def _longest(given: int | Tensor | None, offsets: Tensor) -> int:
    return int(offsets.diff().max() if given is None else given)


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    is_causal: bool,
    sliding_window: int | None,
    **options: Any,
) -> Tensor:
    """Concatenated sequences in a batch of one; returns (1, rows, heads, head_dim of value)."""
    if query.shape[0] != 1:
        raise errors.fault(
            "input", 'attention "cubin"', "is given cu_seq_lens_q for several rows of a batch",
            expected="a batch of 1, which holds all sequences", got=f"a batch of {query.shape[0]}",
            advice="Put the sequences one after another, or give an attention_mask instead.",
        )  # fmt: skip
    window = sliding_window - 1 if sliding_window else -1
    out = torch.ops.cubin.flash_attention(
        *(x.squeeze(0).transpose(0, 1) for x in (query, key, value)),
        is_causal=is_causal,
        window_left=window,
        window_right=-1 if is_causal else window,
        cu_seqlens_q=offsets[0].int(),
        cu_seqlens_k=offsets[1].int(),
        max_seqlen_q=longest[0],
        max_seqlen_k=longest[1],
        **options,
    )
    _count(_REPORTED, query, key, out)
    unpacked: Tensor = out.unsqueeze(0)
    return unpacked


def _seen_in_packed(
    offsets: tuple[Tensor, Tensor],
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    sliding_window: int | None,
) -> Tensor:
    """The mask (None: that of is_causal and sliding_window, which end with each sequence) where a
    row and a column belong to one sequence; other columns are hidden."""
    of_row, before_row = _places(offsets[0], query.shape[2])
    of_column, before_column = _places(offsets[1], key.shape[2])
    seen = of_row[:, None] == of_column
    if mask is not None:
        return _narrowed(mask, seen, is_causal)
    back = before_row[:, None] - before_column  # how far back of the row's own column
    if is_causal:
        seen = seen & (back >= 0)
    return seen & (back.abs() < sliding_window) if sliding_window else seen


def _narrowed(mask: Tensor | None, seen: Tensor, is_causal: bool) -> Tensor:
    """The mask (None: that of is_causal) where `seen` is True; hidden elsewhere."""
    if mask is None:
        return seen & ~seen.new_ones(seen.shape[-2:]).triu(1) if is_causal else seen
    if mask.dtype == torch.bool:
        return mask & seen
    return mask.masked_fill(~seen, torch.finfo(mask.dtype).min)


def _places(offsets: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Of each row or column: its sequence's number, and its place counted from that one's end."""
    numbers = torch.arange(count, device=offsets.device)
    ends = offsets[1:]
    sequences = torch.bucketize(numbers, ends, right=True)
    return sequences, numbers - torch.nn.functional.pad(ends, (0, 1))[sequences]


def _selected(indices: Tensor, mask: Tensor | None, is_causal: bool, key: Tensor) -> Tensor:
    """The mask without the columns that are not in `indices`.

    Models with sparse attention build this mask themselves only for "eager" and "sdpa", and pass
    the indices to every other implementation.
    """
    hidden = torch.ones(*indices.shape[:-1], key.shape[2], dtype=torch.bool, device=key.device)
    hidden = hidden.scatter(-1, indices.long(), False).unsqueeze(1)
    return _narrowed(mask, ~hidden, is_causal)
