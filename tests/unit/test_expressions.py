"""Expressions: C++ and Python evaluate the same trees identically, and tracing reports what it
cannot do."""

from __future__ import annotations

import json
import math
import operator
import random

import declared_check
import pytest
import torch

from torch_cubin import errors
from torch_cubin._declared import expressions as ex
from torch_cubin._declared.evaluate import evaluate

CASES = 8000  # each operation is evaluated a thousand times
DEVICE = {"sm": 90, "multiprocessors": 132}
INTERESTING = [0, 1, -1, 2, 3, 7, 255, 256, 2**31 - 1, -(2**31), 2**62, 2**63 - 1, -(2**63)]
FLOATS = [0.0, -0.0, 1.0, 0.5, -2.75, 1e300, -1e-300, 3.0]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]


def ask(lines: list[dict]) -> list[dict]:
    """What C++ makes of each {"tree", "tensors", "numbers"}."""
    return declared_check.run("expressions", lines)


def facts(tensor: torch.Tensor | None) -> dict | None:
    if tensor is None:
        return None
    return {
        "sizes": list(tensor.shape),
        "strides": list(tensor.stride()),
        "itemsize": tensor.element_size(),
        "dtype": str(tensor.dtype).removeprefix("torch."),
    }


def random_tensor(r: random.Random) -> torch.Tensor | None:
    if r.random() < 0.1:
        return None
    sizes = [r.choice((0, 1, 2, 3, 5, 8, 1024)) for _ in range(r.randrange(4))]
    tensor = torch.empty(sizes, dtype=r.choice(DTYPES), device="meta")
    if len(sizes) > 1 and r.random() < 0.4:
        tensor = tensor.transpose(0, 1)
    return tensor


def random_tree(r: random.Random, type_: type, depth: int) -> ex.Tree:
    """A well-typed tree, half of whose integers are ones that overflow easily."""
    if depth <= 0 or r.random() < 0.15:
        if type_ is bool:
            leaves = [
                True, False, ["number", "flag"], ["defined", "x"], ["contiguous", "y"],
                ["is_dtype", "x", "float32"], ["number", "k?"], ["is", "mode", "fast"],
                ["is", "dtype", "float16"], ["defined", "xs[1]"],
            ]  # fmt: skip
            return r.choice(leaves)
        if type_ is float:
            return r.choice([r.choice(FLOATS), ["number", "alpha"]])
        leaves = [
            r.choice(INTERESTING), r.randrange(-20, 20), ["number", "n"],
            ["size", "x", r.randrange(-3, 3)], ["stride", "y", r.randrange(-2, 2)],
            ["numel", "x"], ["dim", "y"], ["itemsize", "x"], ["sm"], ["multiprocessors"],
            ["number", "k"], ["number", "len(xs)"], ["size", "xs[1]", 0],
        ]  # fmt: skip
        return r.choice(leaves)

    def sub(wanted: type) -> ex.Tree:
        return random_tree(r, wanted, depth - 1)

    def number() -> type:
        return r.choice((int, float))

    if r.random() < 0.1:
        return ["select", sub(bool), sub(type_), sub(type_)]
    if type_ is bool:
        operation = r.choice(("lt", "le", "eq", "ne", "and", "or", "not"))
        if operation == "not":
            return ["not", sub(bool)]
        if operation in ("and", "or"):
            return [operation, sub(bool), sub(bool)]
        return [operation, sub(number()), sub(number())]
    if type_ is int:
        unary = ("neg", "abs", "next_power_of_2")
        operation = r.choice(("add", "sub", "mul", "floordiv", "mod", "min", "max", *unary))
        return [operation, *(sub(int) for _ in range(1 if operation in unary else 2))]
    operation = r.choice(("add", "sub", "mul", "min", "max", "truediv", "sqrt", "float", "neg"))
    if operation in ("sqrt", "float"):
        return [operation, sub(number())]
    if operation == "neg":
        return ["neg", sub(float)]
    if operation == "truediv":
        return ["truediv", sub(number()), sub(number())]
    first, second = sub(float), sub(number())
    return [operation, *((first, second) if r.random() < 0.5 else (second, first))]


def outcome(line: dict, tensors: dict, numbers: dict) -> tuple:
    try:
        value = evaluate(line["tree"], tensors, numbers, "a test", DEVICE)
    except errors.Error as error:
        return ("error", error.tag)
    return ("value", type(value).__name__, value)


def test_cpp_and_python_agree_on_random_trees() -> None:
    r = random.Random(5)
    lines, wanted = [], []
    pool = [random_tensor(r) for _ in range(3000)]  # more layouts than random_tensor can tell apart
    described = [facts(tensor) for tensor in pool]
    for _ in range(CASES):
        chosen = {name: r.randrange(len(pool)) for name in ("x", "y", "xs[1]")}
        tensors = {name: pool[i] for name, i in chosen.items()}
        k = r.choice((None, 0, 5, 2**62))
        texts = {"mode": r.choice(("fast", "slow")), "dtype": r.choice(("float16", "int8"))}
        numbers = {
            "k": k,
            "k?": k is not None,
            "len(xs)": r.randrange(3),
            "n": r.choice((*INTERESTING, r.randrange(100))),
            "alpha": r.choice(FLOATS),
            "flag": r.random() < 0.5,
        }
        tree = random_tree(r, r.choice((bool, int, int, float)), r.randrange(6))
        shown = {name: described[i] for name, i in chosen.items()}
        lines.append({"tree": tree, "tensors": shown, "numbers": numbers, "texts": texts})
        wanted.append(outcome(lines[-1], tensors, {**numbers, **texts}))
    kinds = {"error": 0, "bool": 0, "int": 0, "float": 0}
    for line, want, got in zip(lines, wanted, ask(lines), strict=True):
        where = (line, got, want)
        if want[0] == "error":
            kinds["error"] += 1
            assert got.get("tag") == want[1], where
            continue
        kinds[want[1]] += 1
        assert "value" in got, where
        value = got["value"]
        if want[1] == "float":  # JSON has neither infinities nor NaN: null
            if value is None:
                assert not math.isfinite(want[2]), where
                continue
            assert math.copysign(1, value) == math.copysign(1, want[2]), where
        assert type(value).__name__ == want[1], where
        assert value == want[2], where
    assert min(kinds.values()) > CASES // 50, kinds


MALFORMED = [
    None, {}, "n", [], [1], ["nothing", 1, 2], ["add", 1], ["add", 1, 2, 3], ["add", True, 1],
    ["floordiv", 1.0, 2], ["not", 1], ["and", True, 1], ["select", 1, 2, 3],
    ["select", True, True, 1], ["size", "x"], ["size", "x", 1.0], ["size", "z", 0], ["numel", 3],
    ["number", "m"], ["is_dtype", "x"], ["is", "x", "float32"], ["is", "n", "fast"], ["is", "mode"],
    ["is", "mode", 1], ["is", "", "fast"], ["number", "mode"], ["number", ""], ["numel", ""],
    ["sm", 1], ["lt", True, False], 2**64 - 1,
]  # fmt: skip


@pytest.mark.parametrize("tree", MALFORMED, ids=json.dumps)
def test_malformed_trees_are_refused(tree) -> None:
    tensors = {"x": facts(torch.empty(2, 3, device="meta"))}
    line = {"tree": tree, "tensors": tensors, "numbers": {"n": 1}, "texts": {"mode": "fast"}}
    (got,) = ask([line])
    assert got.get("tag") == "input", got


def test_deep_and_wide_trees_are_refused() -> None:
    deep: ex.Tree = 1
    for _ in range(100):
        deep = ["neg", deep]
    wide: ex.Tree = 1
    for _ in range(12):
        wide = ["add", wide, wide]
    for tree in (deep, wide):
        (got,) = ask([{"tree": tree, "tensors": {}, "numbers": {}, "texts": {}}])
        assert got.get("tag") == "input", got


def test_errors_show_the_expression() -> None:
    tree = ["floordiv", ["numel", "x"], ["sub", ["number", "n"], 1]]
    tensors = {"x": facts(torch.empty(2, 3, device="meta"))}
    line = {"tree": tree, "tensors": tensors, "numbers": {"n": 1}, "texts": {}}
    (got,) = ask([line])
    assert "(x.numel // (n - 1))" in got["message"]
    assert "a test" in got["message"]


def test_products_of_sizes_do_not_overflow() -> None:
    def numel(*sizes: int) -> dict:
        facts = {"sizes": sizes, "strides": [0] * len(sizes), "itemsize": 4, "dtype": "float32"}
        line = {"tree": ["numel", "x"], "tensors": {"x": facts}, "numbers": {}, "texts": {}}
        return ask([line])[0]

    assert "overflows" in numel(2**32 + 1, 2**32)["message"]
    assert "overflows" in numel(2**40, 2**40, 3)["message"]
    assert numel(2**40, 2**40, 0)["value"] == numel(0, 2**40, 2**40)["value"] == 0
    assert numel(2**31, 2**31)["value"] == 2**62


BETWEEN = [0, 1, -1, 3, 2**53, 2**53 + 1, -(2**53) - 1, 2**62 + 1, 2**63 - 1, -(2**63)]


def test_ints_and_floats_are_compared_exactly() -> None:
    floats = [x for n in BETWEEN for x in (float(n), n + 0.5, n - 0.25)]
    floats += [-0.0, 1e300, -1e300, 2.0**63, -(2.0**63)]
    operations = {"lt": operator.lt, "le": operator.le, "eq": operator.eq, "ne": operator.ne}
    cases = [(name, n, x) for name in operations for n in BETWEEN for x in floats]
    lines, wanted = [], []
    for name, n, x in cases:
        for a, b in ((["number", "n"], ["number", "x"]), (["number", "x"], ["number", "n"])):
            numbers = {"n": n, "x": x}
            lines.append({"tree": [name, a, b], "tensors": {}, "numbers": numbers, "texts": {}})
            wanted.append(operations[name](numbers[a[1]], numbers[b[1]]))
    for line, want, got in zip(lines, wanted, ask(lines), strict=True):
        assert got.get("value") is want, line
    # What JSON cannot say.
    infinite = ["mul", 1e300, 1e300]
    nan = ["sub", infinite, infinite]
    for tree, want in (
        (["lt", 2**63 - 1, infinite], True),
        (["lt", -(2**63), ["neg", infinite]], False),
        (["eq", 1, nan], False),
        (["ne", nan, 1], True),
        (["le", nan, 1], False),
        (["lt", 1, nan], False),
    ):
        (got,) = ask([{"tree": tree, "tensors": {}, "numbers": {}, "texts": {}}])
        assert got.get("value") is want, tree


# Tracing.

X, Y = ex.TracedTensor("x"), ex.TracedTensor("y")
N = ex.Traced(["number", "n"], int)


def trace(function):
    arguments = {"x": X, "y": Y, "n": N, "alpha": ex.Traced(["number", "alpha"], float)}
    return ex.trace(function, arguments, "a test")


def test_traced_functions_compute_the_same_as_in_python() -> None:
    functions = [
        lambda x, y: ex.cdiv(x.numel(), 256),
        lambda x, y: x.shape[0] * y.shape[-1] + 3,
        lambda x: 100 - x.size(1) % 7,
        lambda x, n: ex.minimum(x.stride(0), n) + ex.maximum(4, n),
        lambda x: ex.select(x.dtype == torch.float32, 8, 16),
        lambda x: ex.select((x.dtype != torch.float16) & (x.dim() == 2), 1.5, 2),
        lambda x, alpha: alpha / ex.sqrt(x.shape[1]),
        lambda x: -x.shape[0] // 3 + abs(2 - x.element_size()),
        lambda x, y: ex.select(~(x.numel() > y.numel()) | x.is_contiguous(), 1, 0),
        lambda n: 7 // n - 7 % n,
        lambda alpha: 2 * alpha - 1,
    ]
    x, y = torch.empty(300, 17), torch.empty(5, 9)
    for function in functions:
        traced = trace(function)
        code = function.__code__
        values = {"x": x, "y": y, "n": 11, "alpha": 0.25}
        want = function(*(values[name] for name in code.co_varnames[: code.co_argcount]))
        got = evaluate(traced.tree, {"x": x, "y": y}, {"n": 11, "alpha": 0.25})
        assert got == want
        assert type(got) is traced.type


BRANCH = "torch_cubin.select"
UNTRACEABLE = [
    (lambda x: 1 if x.numel() > 5 else 2, BRANCH),
    (lambda x: max(x.numel(), 5), BRANCH),
    (lambda x, y: x.numel() > 5 and y.numel() > 5, BRANCH),
    (lambda x: not x.is_contiguous(), BRANCH),
    (lambda x: list(range(x.shape[0])), "cdiv"),
    (lambda x: int(x.shape[0]), "cdiv"),
    (lambda x: math.ceil(x.shape[0] / 2), "cdiv"),
    (lambda x: math.sqrt(x.shape[0]), "torch_cubin.sqrt"),
    (lambda x: x.data_ptr(), "It knows"),
    (lambda x: len(x.shape), "x.dim()"),
    (lambda x: [*x.shape], "x.dim()"),
    (lambda x: x.shape[N], "x.shape[0]"),
    (lambda x: x.dtype == "float32", "torch.dtype"),
    (lambda x: x.numel() + "1", "ints, floats"),
    (lambda x: (x.numel() > 1) + 1, "select"),
    (lambda x: x.numel() & 1, "Compare"),
    (lambda x: x.numel() // 2.0, "integer division"),
    (lambda x: x.numel() + 2**64, "64 bits"),
]


@pytest.mark.parametrize(("function", "says"), UNTRACEABLE, ids=range(len(UNTRACEABLE)))
def test_untraceable_expressions_name_the_line_and_an_alternative(function, says) -> None:
    with pytest.raises(errors.InputError) as caught:
        trace(function)
    text = str(caught.value)
    assert f"{__file__}:{function.__code__.co_firstlineno}" in text
    assert says in text


def test_arguments_that_the_op_does_not_have() -> None:
    with pytest.raises(errors.InputError, match="'z'"):
        trace(lambda x, z: 1)
    with pytest.raises(errors.InputError, match="is not a Python function"):
        trace(len)


def test_symbolic_sizes_give_symbols() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    real = torch.empty(300, 17)
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        x = mode.from_tensor(
            real,
            symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC]),
        )
        tree = trace(lambda x: ex.cdiv(x.numel(), 256) + ex.maximum(x.shape[0], 4)).tree
        found = evaluate(tree, {"x": x}, {})
        assert not isinstance(found, int)
        assert int(found) == 20 + 300
