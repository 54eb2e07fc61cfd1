"""torch.nn.attention.bias.CausalBias as the mask of an attention op.

Its elements are uninitialised memory, and its attributes define the mask; PyTorch reads them only
for its own attention. An op would add the uninitialised memory to its scores.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from torch_cubin._ops import checks

_MASKED = ("cubin::scaled_dot_product_attention", "cubin::attention_forward")


def _serve(module: ModuleType, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call of one of our ops that has a CausalBias among its arguments."""
    if name in _MASKED:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "dropout_seed")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if isinstance(given.get("attn_mask"), module.CausalBias):
            return _attend(module, name, given)
    checks.fail(
        f"{name.removeprefix('cubin::')}",
        "is given a tensor subclass without data",
        "tensors whose memory holds their elements",
        "torch.nn.attention.bias.CausalBias",
        "Give it as attn_mask of scaled_dot_product_attention or attention_forward, or use "
        "is_causal.",
    )


_OP_TYPES = (type(torch.ops.aten.mm), type(torch.ops.aten.mm.default))


def _name_of(func: Any) -> str:
    """The name of an op or of its overload, e.g. cubin::matmul; "" for other functions."""
    if not isinstance(func, _OP_TYPES):
        return ""
    return "::".join(str(func).split(".")[:2])  # of "cubin.matmul.default"


def _is_ours(name: str) -> bool:
    if name.startswith("cubin::") or not name:
        return bool(name)
    from torch_cubin._declared import op

    return op.find(name) is not None


def _attend(module: ModuleType, name: str, given: dict[str, Any]) -> Any:
    op = name.removeprefix("cubin::")
    bias, query, key = given.pop("attn_mask"), given["query"], given["key"]
    sizes = (bias.seq_len_q, bias.seq_len_kv)
    if given.pop("is_causal", False) or sizes != (query.shape[-2], key.shape[-2]):
        checks.fail(
            f"{op} argument 'attn_mask'",
            "is a CausalBias that does not go with the call",
            f"one of {(query.shape[-2], key.shape[-2])}, without is_causal",
            f"one of {sizes}",
        )
    if bias.variant == module.CausalVariant.UPPER_LEFT or sizes[0] == sizes[1]:
        return getattr(torch.ops.cubin, op)(**given, is_causal=True)
    if op == "scaled_dot_product_attention" and given.get("dropout_p", 0.0) > 0:
        given["dropout_seed"] = torch.randint(2**63 - 1, (1,), device=query.device)
    given["bottom_right"] = True
    result = torch.ops.cubin.attention_forward(**given, is_causal=True)
    return result[0] if op == "scaled_dot_product_attention" else result


def patch(module: ModuleType) -> None:
    """Replaces __torch_function__ of the class, which PyTorch calls for ops with its instances;
    `module` is torch.nn.attention.bias."""
    original = module.CausalBias.__torch_function__.__func__

    def torch_function(
        cls: type,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = _name_of(func)
        if not _is_ours(name):
            return original(cls, func, types, args, kwargs)
        return _serve(module, name, args, kwargs or {})

    module.CausalBias.__torch_function__ = classmethod(torch_function)
