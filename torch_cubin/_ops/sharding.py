"""Sharding rules of products, experts and attention for DTensor, hence for tensor parallelism; and
the registration of all ops' rules.

Each op is described by labels (sharding_labels.py).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from torch_cubin._ops import raw_ops, sharding_rows
from torch_cubin._ops.attention_checks import PER_HEAD_OPTIONS
from torch_cubin._ops.sharding_labels import HEADS, Description, Labels, of_rows, whole
from torch_cubin._pytorch import sharding

# --- products ---


def _batch(tensor: Any, used: int, dims: Sequence[int]) -> list[str | None]:
    """Labels of batch dims, counted from the last; those that are broadcast have none."""
    own = list(tensor.shape)[: len(tensor.shape) - used]
    found: list[str | None] = []
    for i, size in enumerate(own):
        from_end = len(own) - i
        found.append(None if size == 1 and dims[-from_end] != 1 else f"batch{from_end}")
    return found


def _matmul_labels(self: Any, other: Any) -> tuple[Labels, Labels, list[str | None]]:
    a_used, b_used = min(2, len(self.shape)), min(2, len(other.shape))
    batches = [list(self.shape)[: -a_used or None], list(other.shape)[: -b_used or None]]
    if a_used == len(self.shape):
        batches[0] = []
    if b_used == len(other.shape):
        batches[1] = []
    dims = list(torch.broadcast_shapes(*batches))
    a = [*_batch(self, a_used, dims), *(["m"] if a_used == 2 else []), "k"]
    b = [*_batch(other, b_used, dims), "k", *(["n"] if b_used == 2 else [])]
    out: list[str | None] = [f"batch{len(dims) - i}" for i in range(len(dims))]
    out += [*(["m"] if a_used == 2 else []), *(["n"] if b_used == 2 else [])]
    return a, b, out


def _matmul(self: Any, other: Any) -> Description:
    a, b, out = _matmul_labels(self, other)
    return Description([a, b], [out], summed=["k"])


def _grouped(mat_a: Any, mat_b: Any, offs: Any, zero_rest: bool, *options: Any) -> Description:
    """Of what the groups do not divide; with options of nothing."""
    tensors = [x for x in options if x is not None and not isinstance(x, str)]
    if tensors or (options and options[-1] != "none"):
        given = (mat_a, mat_b, offs, *tensors)
        return Description([[None] * len(x.shape) for x in given], [[None, None]])
    if len(mat_b.shape) == 2:
        return Description([["m", None], [None, "n"], [None]], [[None, "m", "n"]])
    return Description([[None, "k"], [None, "k", "n"], [None]], [[None, "n"]], summed=["k"])


def _moe(x: Any, topk_ids: Any, topk_weights: Any, w13: Any, w2: Any, *gating: Any) -> Description:
    """Of the tokens."""
    tokens: Labels = ["token", None]
    return Description([tokens, tokens, tokens, [None] * 3, [None] * 3], [tokens])


def _expert_rows(x: Any, tokens: Any, order: Any, places: Any) -> Description:
    index: list[Labels] = [[None], [None], [None, None]]
    return Description([[None, "column"], *index], [[None, "column"]])


def _expert_sum(
    rows: Any, tokens: Any, order: Any, places: Any, topk_weights: Any = None
) -> Description:
    index: list[Labels] = [[None], [None], *[[None, None]] * (1 if topk_weights is None else 2)]
    return Description([[None, "column"], *index], [[None, "column"]])


def _linear(
    input: Any, weight: Any, bias: Any = None, activation: str = "none", results: int = 1
) -> Description:
    columns = ["n"] if len(weight.shape) == 2 else []
    arguments: list[Labels] = [of_rows(input, "k"), [*columns, "k"]]
    if bias is not None:
        is_row = len(bias.shape) == 1 and bias.shape[0] == weight.shape[0] and columns
        arguments.append(["n"] if is_row else [None] * len(bias.shape))
    out = [*of_rows(input, "k")[:-1], *columns]
    return Description(
        arguments,
        [out] * results,
        summed=["k"] if activation == "none" else [],
        addends=[2],
    )


def _linear_activation_aux(input: Any, weight: Any, bias: Any, activation: str) -> Description:
    return _linear(input, weight, bias, activation, results=2)


def _linear_glu(input: Any, gate: Any, up: Any, activation: str, results: int = 1) -> Description:
    rows = of_rows(input, "k")
    return Description([rows, ["n", "k"], ["n", "k"]], [[*rows[:-1], "n"]] * results)


def _linear_glu_aux(input: Any, gate: Any, up: Any, activation: str) -> Description:
    return _linear_glu(input, gate, up, activation, results=3)


def _linears(input: Any, weights: Sequence[Any], biases: Sequence[Any]) -> Description:
    given = [bias for bias in biases if bias is not None]
    rows = of_rows(input, "k")
    first = 1 + len(weights)
    return Description(
        [rows, *(["n", "k"] for _ in weights), *(["n"] for _ in given)],
        [[*rows[:-1], "n"] for _ in weights],
        summed=["k"],
        addends=range(first, first + len(given)),
        is_list=True,
    )


def _linear_activation_backward(grad: Any, weight: Any, aux: Any, activation: str) -> Description:
    rows = of_rows(grad, "n")
    k = [*rows[:-1], "k"]
    return Description([rows, ["n", "k"], k], [k], summed=["n"])


def _weight_and_bias_gradient(grad: Any, input: Any) -> Description:
    return Description([["m", "n"], ["m", "k"]], [["n", "k"], ["n"]], summed=["m"])


def _addmm(input: Any, mat1: Any, mat2: Any, *rest: Any, **factors: float) -> Description:
    a, b, out = _matmul_labels(mat1, mat2)
    labels = _added(input, out, _sizes(out, (a, mat1), (b, mat2)))
    return Description([labels, a, b], [out], summed=["k"], addends=[0])


def _added(addend: Any, out: Labels, shape: Sequence[int]) -> Labels:
    """Labels of what broadcasts to a product of that shape."""
    sizes = list(addend.shape)
    last = len(out) - len(sizes)
    return [
        None if size == 1 and whole != 1 else label
        for size, whole, label in zip(sizes, shape[last:], out[last:], strict=True)
    ]


def _syrk(x: Any, c: Any = None, **options: Any) -> Description:
    return _symmetric(x, c, "k")


def _symm_square(a: Any, c: Any = None, **options: Any) -> Description:
    return _symmetric(a, c, None)


def _symmetric(operand: Any, c: Any, k: str | None) -> Description:
    """Rows of the operand are rows and columns of the result: neither is sharded."""
    shape = list(operand.shape)
    batch = _batch(operand, 2, shape[:-2])
    out = [*batch, None, None]
    arguments: list[Labels] = [[*batch, None, k]]
    if c is not None:
        arguments.append(_added(c, out, [*shape[:-1], shape[-2]]))
    return Description(arguments, [out], summed=[k] if k else [], addends=[1])


def _sizes(labels: Labels, *tensors: tuple[Labels, Any]) -> list[int]:
    known: dict[str | None, int] = {}
    for own, tensor in tensors:
        for label, size in zip(own, tensor.shape, strict=True):
            known[label] = max(size, known.get(label, 0))
    return [known[label] for label in labels]


def _addmm_into(out: Any, mat1: Any, mat2: Any, **factors: float) -> Description:
    a, b, labels = _matmul_labels(mat1, mat2)
    return Description([labels, a, b], [], summed=["k"], addends=[0], fixed=[0])


# --- attention ---
#
# Sharded along batch dims and heads, the key's heads with the query's. Not where weights are
# dropped: which ones depends on the numbers of batch and head.


class _Layout:
    """Labels of the operands of one call."""

    def __init__(self, query: Any, key: Any, value: Any, packed: bool) -> None:
        self._packed = packed
        if packed:  # (rows of all sequences, heads, head_dim)
            self._dims: list[int] = []
            return
        leading = [list(tensor.shape)[:-2] for tensor in (query, key, value)]
        # Grouped heads do not broadcast: all but one are marked by the larger number.
        heads = max((each[-1] for each in leading if each), default=1)
        self._dims = list(torch.broadcast_shapes(*(each[:-1] for each in leading)))
        if any(leading):
            self._dims.append(heads)

    def whole(self, last: int) -> Labels:
        """Of a result of all heads and batches, and of so many more dims."""
        if self._packed:
            return [None, HEADS, None] if last == 2 else [HEADS, None]
        return [*map(self._name, range(len(self._dims), 0, -1)), *[None] * last]

    def of(self, tensor: Any, last: int = 2) -> Labels:
        if self._packed:
            return self.whole(last)
        own = list(tensor.shape)[: len(tensor.shape) - last]
        names = [
            None if size == 1 and self._dims[i - len(own)] != 1 else self._name(len(own) - i)
            for i, size in enumerate(own)
        ]
        return [*names, *[None] * last]

    def heads(self, tensor: Any) -> Labels:
        """Of slopes, (heads,) or (batch, heads), or one number."""
        dims = len(tensor.shape)
        return ["batch2", HEADS] if dims == 2 else [HEADS] * dims

    @staticmethod
    def _name(from_end: int) -> str:
        return HEADS if from_end == 1 else f"batch{from_end}"


def _attention(
    operands: Sequence[Any],
    results: Sequence[int | Any],
    options: dict[str, Any],
    key: int,
) -> Description:
    """`key`: where query, key and value begin. A result is an operand's number, or "out", "lse"."""
    packed = any(options.get(f"cu_seqlens_{which}") is not None for which in "qk")
    query, keys, values = operands[key : key + 3]
    layout = _Layout(query, keys, values, packed)
    labels = [layout.of(operand, 2) for operand in operands[: key + 3]]
    labels += [layout.whole(2), layout.whole(1)][: len(operands) - key - 3]
    if key:
        labels[0] = layout.whole(2)
    whole = {"out": layout.whole(2), "lse": layout.whole(1)}
    outs = [whole[each] if isinstance(each, str) else labels[each] for each in results]
    # In the schema's order: the positional ones, then those by name, which DTensor does not move.
    fixed = []
    for name, value in options.items():
        if not hasattr(value, "shape"):
            continue
        if name in PER_HEAD_OPTIONS:
            found = layout.heads(value)
        elif name == "attn_mask":
            found = layout.of(value)
        else:
            found = [None] * len(value.shape)
        if name not in ("attn_mask", "dropout_seed"):
            fixed.append(len(labels))
        labels.append(found)
    if options.get("dropout_p"):
        labels, outs = _unlabelled(labels), _unlabelled(outs)
    shared = {label for each in labels for label in each if label is not None}
    # A gradient of what was broadcast is summed.
    summed = [label for label in shared if any(label not in each for each in outs)]
    return Description(labels, outs, summed=summed, fixed=fixed)


def _unlabelled(tensors: list[Labels]) -> list[Labels]:
    return [[None] * len(labels) for labels in tensors]


def _options(mask: Any, dropout_p: float, seed: Any, options: dict[str, Any]) -> dict[str, Any]:
    return {"attn_mask": mask, "dropout_p": dropout_p, "dropout_seed": seed, **options}


def _attention_forward(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    dropout_seed: Any = None,
    **options: Any,
) -> Description:
    every = _options(attn_mask, dropout_p, dropout_seed, options)
    return _attention((query, key, value), ("out", "lse"), every, 0)


def _scaled_dot_product_attention(*args: Any, **options: Any) -> Description:
    found = _attention_forward(*args, **options)
    found.results = found.results[:1]
    return found


def _attention_e4m3(query: Any, key: Any, value: Any, **options: Any) -> Description:
    return _attention((query, key, value), ("out", "lse"), options, 0)


def _attention_backward(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logsumexp: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    dropout_seed: Any = None,
    **options: Any,
) -> Description:
    every = _options(attn_mask, dropout_p, dropout_seed, options)
    operands = (grad_out, query, key, value, out, logsumexp)
    return _attention(operands, (1, 2, 3), every, 1)


def _attention_backward_e4m3(*operands: Any, **options: Any) -> Description:
    return _attention(operands, (1, 2, 3), options, 1)


def _kv_cache(q: Any, k_cache: Any, v_cache: Any, *rest: Any, **options: Any) -> Description:
    """(batch, rows, heads, head_dim), of heads alone: a cache may hold others' batches."""
    names = ("k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx")
    given = {**dict(zip((*names, "block_table"), rest, strict=False)), **options}
    of_heads: Labels = [None, None, HEADS, None]
    labels = [of_heads] * 3
    fixed = [1, 2]
    for name, value in given.items():
        if hasattr(value, "shape"):
            if name in options:
                fixed.append(len(labels))
            shape = value.shape
            last = HEADS if name in PER_HEAD_OPTIONS else None
            others = [*[None] * (len(shape) - 1), last][: len(shape)]
            labels.append(of_heads if name in ("k", "v") else others)
    return Description(labels, [of_heads], fixed=fixed)


RULES = {
    "matmul": _matmul,
    "linear": _linear,
    "linear_activation": _linear,
    "addmm": _addmm,
    "addmm_dtype": _addmm,
    "addmm_into": _addmm_into,
    "grouped_matmul": _grouped,
    "moe": _moe,
    "expert_rows": _expert_rows,
    "expert_sum": _expert_sum,
    "syrk": _syrk,
    "symm_square": _symm_square,
    "linear_glu": _linear_glu,
    "linear_glu_aux": _linear_glu_aux,
    "linears": _linears,
    "linear_activation_aux": _linear_activation_aux,
    "linear_activation_backward": _linear_activation_backward,
    "scaled_dot_product_attention": _scaled_dot_product_attention,
    "attention_forward": _attention_forward,
    "attention_backward": _attention_backward,
    "attention_forward_e4m3": _attention_e4m3,
    "attention_backward_e4m3": _attention_backward_e4m3,
    "flash_attention_with_kvcache": _kv_cache,
}


# Ops without an autograd variant.
PARTS = {
    "_weight_and_bias_gradient": _weight_and_bias_gradient,
    "_moe_forward": functools.partial(whole, 3),
    "_moe_backward": functools.partial(whole, 4),
    "_float8_copies": functools.partial(whole, 4),
}


def register() -> None:
    """Called once somebody has imported DTensor."""
    for name, describe in {**RULES, **sharding_rows.RULES}.items():
        ops = [raw_ops.overload(raw) for raw in raw_ops.raw_names(name)]
        sharding.register(ops, _rules_of(describe))
    for name, describe in {**PARTS, **sharding_rows.PARTS}.items():
        sharding.register([raw_ops.overload(name)], _rules_of(describe))


def _rules_of(describe: Any) -> Any:
    return lambda *args, **kwargs: describe(*args, **kwargs).rules()
