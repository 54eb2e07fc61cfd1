"""Definitions that are refused or replaced: nothing stays half registered, in Python or in C++."""

from __future__ import annotations

import re
import threading
import warnings

import declared
import pytest
import torch
from declared import DECLARED, VEC_ADD, blocks, schema, vec_add
from in_threads import in_threads

import torch_cubin
from torch_cubin import errors
from torch_cubin._declared import op as _op
from torch_cubin._native import library


def in_cpp(name: str) -> dict | None:
    return next((op for op in library.defined_ops() if op["name"] == name), None)


CHANGING = {
    "kernel": (DECLARED, "axpy"),
    "tensors": {"x": "float32[*s]", "y": "float32[*s]"},
    "args": lambda x, y: (1.0, x, y, torch_cubin.int32(x.numel())),
    "grid": blocks,
    "block": 256,
}
REFUSED = [
    ("f(Tensor x, Tensor(a!) y) -> ()", {**CHANGING, "backward": "a::b"}, "can have no derivative"),
    ("f(Tensor x, *, Tensor y) -> Tensor", {**VEC_ADD, "backward": "a::b"}, "keyword-only tensor"),
    ("f(Tensor x, Tensor y) -> Tensor", {**VEC_ADD, "backward": "a::b!"}, "the name of an op"),
    ("f(Tensor x, Tensor y) -> ()", CHANGING, "changes nothing"),
    ("f(Tensor x, Tensor(a!)? y) -> ()", CHANGING, "no single tensor"),
    (
        "f(Tensor x, Tensor grad_out) -> Tensor",
        {
            **VEC_ADD,
            "tensors": dict.fromkeys(("x", "grad_out", "out"), "float32[*s]"),
            "args": lambda x, grad_out, out: (x, grad_out, out, torch_cubin.int32(x.numel())),
            "backward": "a::b",
        },
        "'grad_out'",
    ),
]


@pytest.mark.parametrize(("text", "definition", "says"), REFUSED, ids=[c[2] for c in REFUSED])
def test_a_refused_definition_leaves_nothing_behind(text: str, definition: dict, says: str) -> None:
    text = schema(text)
    name = text.partition("(")[0]
    for _ in range(2):  # the second time as the first
        with pytest.raises(errors.InputError, match=re.escape(says)):
            torch_cubin.define_op(text, **definition)
        assert in_cpp(name) is None
        assert _op.find(name) is None


def test_a_definition_that_fails_halfway_can_be_repeated(monkeypatch) -> None:
    text = schema("vec_add(Tensor x, Tensor y) -> Tensor")
    name = text.partition("(")[0]

    def fail(*args: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("error")
        patched.setattr(_op.autograd, "transform_kernel", fail)
        for _ in range(2):
            with pytest.raises(MemoryError):
                vec_add(schema=text)
            assert _op.find(name) is None
        patched.undo()
        op = vec_add(schema=text)
    assert torch.equal(op(torch.ones(2), torch.ones(2)), torch.full((2,), 2.0))


def test_a_redefinition_takes_effect_where_warnings_are_errors() -> None:
    text = schema("vec_add(Tensor x, Tensor y) -> Tensor")
    op = vec_add(schema=text)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="defined again"):
            vec_add(schema=text, block=128, cpu=lambda x, y: x - y)
    assert op.contract["kernels"][0]["block"] == [128, 1, 1]
    assert torch.equal(op(torch.ones(2), torch.ones(2)), torch.zeros(2))


def test_threads_that_redefine_one_op_agree_with_cpp(monkeypatch) -> None:
    text = schema("vec_add(Tensor x, Tensor y) -> Tensor")
    op = vec_add(schema=text)
    real, inside, failures = library.define_ops, threading.Semaphore(1), []

    def define_ops(*args):
        if not inside.acquire(blocking=False):
            failures.append("two at once")
            return real(*args)
        try:
            return real(*args)
        finally:
            threading.Event().wait(0.001)
            inside.release()

    monkeypatch.setattr(library, "define_ops", define_ops)

    def work(seed: int) -> None:
        for i in range(5):
            vec_add(schema=text, block=32 * (1 + (seed + i) % 8))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        in_threads(work, [(seed,) for seed in range(8)])
    assert not failures
    assert in_cpp(op.name)["contract"]["kernels"] == op.contract["kernels"]


def test_an_overload_that_comes_later_is_seen() -> None:
    first = vec_add()
    x = torch.ones(3)
    namespace = first.name.partition("::")[0]
    packet = getattr(torch.ops, namespace).vec_add
    assert torch.equal(packet(x, x), 2 * x)
    declared.cube(schema=f"{first.name}.one(Tensor x) -> Tensor")
    assert packet.overloads() == ["default", "one"]
    assert torch.equal(packet(2 * x), 8 * x)
