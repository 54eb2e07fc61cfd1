"""Schemas: PyTorch's own parser accepts what csrc/declared accepts, and reads it identically."""

from __future__ import annotations

import random

import declared_check
import pytest
import torch

CASES = 2000


def parse(*texts: str) -> list[dict]:
    return declared_check.run("schemas", texts)


DEFAULTS = {
    "Tensor?": ["None"],
    "int": ["0", "-7", "123456789012"],
    "SymInt": ["3"],
    "int?": ["None", "2"],
    "SymInt?": ["None", "5"],
    "float": ["1.5", "-2", "1e-5", ".5", "3."],
    "float?": ["None", "0.25"],
    "bool": ["True", "False"],
    "bool?": ["None", "True"],
    "str": ["'relu'", '"none"', "''"],
    "ScalarType": ["float32", "bfloat16", "long", "float8_e4m3fn"],
}
TYPES = ["Tensor", "Tensor(a!)", "Tensor[]", *DEFAULTS]


def random_schema(r: random.Random) -> str:
    def space() -> str:
        return r.choice(["", "", " ", "  "])

    arguments, have_default, star = [], False, False
    letters = iter("abcdefgh")
    for index in range(r.randrange(6)):
        if not star and r.random() < 0.15:
            arguments.append("*")
            star = True
        type_ = r.choice(TYPES)
        choices = DEFAULTS.get(type_)
        if have_default and not star and choices is None:
            continue
        text = f"{type_.replace('(a!)', f'({next(letters)}!)')} {r.choice(['x', 'n', '_y'])}{index}"
        if choices and (r.random() < 0.4 or (have_default and not star)):
            text += f"{space()}={space()}{r.choice(choices)}"
            have_default = have_default or not star
        arguments.append(text)
    joined = f"{space()},{space()}".join(arguments)
    count = r.randrange(4)
    names = [r.choice(["Tensor"] * (count < 2) + [f"Tensor out{i}"]) for i in range(count)]
    returns = names[0] if count == 1 and r.random() < 0.5 else "(" + ", ".join(names) + ")"
    overload = r.choice(["", "", ".float", ".out2"])
    return f"my_lib::op_1{overload}{space()}({joined}){space()}->{space()}{returns}"


def test_random_schemas_mean_what_pytorch_says() -> None:
    r = random.Random(11)
    texts = [random_schema(r) for _ in range(CASES)]
    for text, got in zip(texts, parse(*texts), strict=True):
        want = torch._C.parse_schema(text)
        where = f"{text!r}: {got}"
        assert "text" in got, where
        # PyTorch prints both alike.
        assert str(torch._C.parse_schema(got["text"])) == str(want), where
        arguments = got.get("arguments") or []
        assert [a["name"] for a in arguments] == [a.name for a in want.arguments], where
        assert [a["keyword_only"] for a in arguments] == [a.kwarg_only for a in want.arguments]
        assert [bool(a["default"]) for a in arguments] == [
            a.has_default_value() for a in want.arguments
        ], where
        assert [a["mutated"] for a in arguments] == [
            a.alias_info is not None and a.alias_info.is_write for a in want.arguments
        ], where
        assert [name or None for name in got["returns"]] == [a.name or None for a in want.returns]


def test_equal_schemas_have_one_text() -> None:
    one, other = parse(
        "a::b(Tensor x,int n = 3,*,float? s=None) -> (Tensor)",
        "a::b ( Tensor  x , int n=3, * , float? s = None )\n->Tensor",
    )
    assert one["text"] == other["text"] == "a::b(Tensor x, int n=3, *, float? s=None) -> Tensor"


# A wrong schema, the character that the error points at (from 1), and a word of the expectation.
BAD = [
    ("", 1, "namespace"),
    ("mul(Tensor x) -> Tensor", 4, "'::'"),
    ("a::(Tensor x) -> Tensor", 4, "name"),
    ("a::b Tensor x) -> Tensor", 6, "'('"),
    ("a::b(Tensor) -> Tensor", 12, "name"),
    ("a::b(Tensor x", 14, "')'"),
    ("a::b(Tensor x) Tensor", 16, "'->'"),
    ("a::b(Tensor x) -> ", 19, "returns"),
    ("a::b(Tensor x) -> Tensor!", 25, "the end"),
    ("a::b(Tensr x) -> Tensor", 6, "Tensor[]"),
    ("a::b(Scalar x) -> Tensor", 6, "ScalarType"),
    ("a::b(int[] x) -> Tensor", 6, "Tensor[]"),
    ("a::b(Tensor?[] x) -> Tensor", 6, "Tensor[]"),
    ("a::b(str? x) -> Tensor", 6, "str"),
    ("a::b(Tensor x, Tensor x) -> Tensor", 16, "differ"),
    ("a::b(Tensor(a) x) -> Tensor", 13, "Tensor(a!)"),
    ("a::b(Tensor(a!)[] x) -> Tensor", 6, "Tensor(a!)"),
    ("a::b(Tensor(a!)? x) -> Tensor", 6, "Tensor(a!)"),
    ("a::b(Tensor x) -> (Tensor, Tensor)", 20, "Tensor lse"),
    ("a::b(Tensor x) -> (Tensor out, Tensor)", 20, "Tensor lse"),
    ("a::b(int(a!) x) -> Tensor", 6, "Tensor(a!)"),
    ("a::b(Tensor(a!) x, Tensor(a!) y) -> ()", 20, "another letter"),
    ("a::b(Tensor(a!) x) -> Tensor(a!)", 23, "Tensor"),
    ("a::b(Tensor x) -> int", 19, "Tensor"),
    ("a::b(Tensor x) -> Tensor?", 19, "Tensor"),
    ("a::b(Tensor x) -> Tensor[]", 19, "Tensor"),
    ("a::b(Tensor x) -> (Tensor, )", 28, "Tensor"),
    ("a::b(Tensor x) -> (Tensor y, Tensor y)", 30, ""),
    ("a::b(*, *, int x) -> ()", 9, "one"),
    ("a::b(int x=1.5) -> ()", 12, "of type int"),
    ("a::b(int x=None) -> ()", 12, "of type int"),
    ("a::b(int x=) -> ()", 12, "a default"),
    ("a::b(int x=9999999999999999999) -> ()", 12, "of type int"),
    ("a::b(float x=one) -> ()", 14, "of type float"),
    ("a::b(bool x=1) -> ()", 13, "of type bool"),
    ("a::b(str x=relu) -> ()", 12, "of type str"),
    ("a::b(str x='a) -> ()", 12, "quote"),
    ("a::b(Tensor x=None) -> ()", 15, "of type Tensor"),
    ("a::b(Tensor[] x=[]) -> ()", 17, "of type Tensor[]"),
    ("a::b(ScalarType x=3) -> ()", 19, "of type ScalarType"),
    ("a::b(Tensor? x=0) -> ()", 16, "of type Tensor?"),
    ("a::b(int x, ) -> ()", 13, "type"),
]


@pytest.mark.parametrize(("text", "at", "expected"), BAD, ids=[text for text, _, _ in BAD])
def test_errors_point_at_the_place(text: str, at: int, expected: str) -> None:
    (got,) = parse(text)
    assert got.get("tag") == "input", got
    assert f"(at character {at}: " in got["message"]
    assert expected in got["message"]


def test_long_schemas_are_refused() -> None:
    many = ", ".join(f"int a{i}" for i in range(65))
    for text in (f"a::b({many}) -> ()", "a::" + "b" * 70_000):
        (got,) = parse(text)
        assert got.get("tag") == "input", got
