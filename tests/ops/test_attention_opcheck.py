"""The schemas of attention, and torch's own check that each op is registered as it should be."""

from __future__ import annotations

import pytest
import torch
from ops.attention_samples import SHAPES, SHARED, make_qkv, ops
from ops.test_opcheck import CHECKS

ARGUMENTS = "Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0., "
ARGUMENTS += "bool is_causal=False"
SEED = ", Tensor? dropout_seed=None"
PLAIN = ", *, float? scale=None, bool enable_gqa=False"
OPTIONS = PLAIN + ", int window_left=-1, int window_right=-1, bool bottom_right=False, "
OPTIONS += "float softcap=0., Tensor? alibi_slopes=None, Tensor? sinks=None, "
OPTIONS += "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, int max_seqlen_q=0, "
OPTIONS += "int max_seqlen_k=0"
FORWARD = f"({ARGUMENTS}{SEED}{OPTIONS}) -> (Tensor out, Tensor logsumexp)"
SAVED = ARGUMENTS.replace("Tensor? attn_mask", "Tensor out, Tensor logsumexp, Tensor? attn_mask")
BACKWARD = f"(Tensor grad_out, {SAVED}{SEED}{OPTIONS}) -> (Tensor dq, Tensor dk, Tensor dv)"
SCHEMAS = {
    "scaled_dot_product_attention": f"({ARGUMENTS}{PLAIN}) -> Tensor",
    "_scaled_dot_product_attention": f"({ARGUMENTS}{SEED}{PLAIN}) -> Tensor",
    "attention_forward": FORWARD,
    "_attention_forward": FORWARD,
    "_attention_forward_autograd": FORWARD,
    "attention_backward": BACKWARD,
    "_attention_backward": BACKWARD,
    "_attention_backward_autograd": BACKWARD,
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas(name):
    op = getattr(ops, name)
    assert op.overloads() == ["default"]
    assert str(op.default._schema) == f"cubin::{name}{SCHEMAS[name]}"


def test_the_public_op_takes_what_torchs_takes():
    schema = torch.ops.aten.scaled_dot_product_attention.default._schema
    mine = ops.scaled_dot_product_attention.default._schema
    theirs = [(a.name, a.default_value, a.kwarg_only) for a in schema.arguments]
    assert [(a.name, a.default_value, a.kwarg_only) for a in mine.arguments] == theirs


CASES = {
    "plain": (SHAPES[1], {}),
    "matrices": (SHAPES[3], {}),
    "broadcast": (SHAPES[9], {"is_causal": True}),
    "no keys": (SHAPES[12], {}),
    "group": (SHARED[0], {"enable_gqa": True, "scale": 0.3}),
    "mask": (SHAPES[1], {"attn_mask": (4, 7)}),
    "learnt mask": (SHAPES[1], {"attn_mask": (4, 7)}),
}
MORE = {
    "window": (SHAPES[1], {"window_left": 1, "bottom_right": True, "softcap": 0.5}),
    "sinks": (SHAPES[1], {"sinks": (3,), "alibi_slopes": (2, 3)}),
    "dropout": (SHAPES[1], {"dropout_p": 0.5, "dropout_seed": 3}),
    "packed": (((6, 2, 8), (7, 2, 8), (7, 2, 8)), {"cu_seqlens_q": 6, "cu_seqlens_k": 7}),
}


def tensors(options: dict, device: str, requires_grad: bool) -> dict:
    made = {}
    for name, value in options.items():
        if isinstance(value, tuple):
            value = torch.rand(value, device=device, requires_grad=requires_grad)
        elif name.startswith("cu_seqlens"):
            value = torch.tensor([0, 2, value], dtype=torch.int32, device=device)
        elif name == "dropout_seed":
            value = torch.tensor([value], device=device)
        made[name] = value
    return made


# Tracing forward and backward takes seconds, so only where there is a backward to trace.
STATIC = [check for check in CHECKS if check != "test_aot_dispatch_dynamic"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("raw", [False, True], ids=["public", "raw"])
def test_attention(case, raw, device):
    shapes, options = CASES[case]
    args = tuple(make_qkv(shapes, device, requires_grad=not raw))
    options = tensors(options, device, case == "learnt mask" and not raw)
    op = ops._scaled_dot_product_attention if raw else ops.scaled_dot_product_attention
    checks = CHECKS if case in ("group", "learnt mask") and not raw else STATIC
    torch.library.opcheck(op.default, args, options, test_utils=checks)


@pytest.mark.parametrize("case", [*MORE, "plain", "mask"])
@pytest.mark.parametrize("prefix", ["", "_", "autograd"])
def test_forward(case, prefix, device):
    shapes, options = (MORE | CASES)[case]
    name = "_attention_forward_autograd" if prefix == "autograd" else f"{prefix}attention_forward"
    # The logsumexp of packed sequences has no gradient.
    args = tuple(make_qkv(shapes, device, requires_grad=prefix != "_" and case != "packed"))
    options = tensors(options, device, False)
    checks = CHECKS if prefix == "" and case in ("dropout", "packed") else STATIC
    torch.library.opcheck(getattr(ops, name).default, args, options, test_utils=checks)


@pytest.mark.parametrize("case", [*MORE, "plain", "group"])
@pytest.mark.parametrize("prefix", ["", "_", "autograd"])
def test_backward(case, prefix, device):
    shapes, options = (MORE | CASES)[case]
    name = "_attention_backward_autograd" if prefix == "autograd" else f"{prefix}attention_backward"
    args = make_qkv(shapes, device)
    options = tensors(options, device, False)
    saved = ops.attention_forward(*args, **options)
    if prefix == "_" or case == "packed":  # no second derivative
        given = (torch.randn_like(saved[0]), *args, *saved)
    else:
        given = tuple(x.requires_grad_() for x in (torch.randn_like(saved[0]), *args)) + saved
    checks = CHECKS if prefix == "" and case == "packed" else STATIC
    torch.library.opcheck(getattr(ops, name).default, given, options, test_utils=checks)
