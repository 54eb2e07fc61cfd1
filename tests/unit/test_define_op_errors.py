"""The list of wrong definitions, each with the words that its message must hold."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
import torch
from declared import DATA, DECLARED, LAUNCH, VEC_ADD, schema

import torch_cubin
from torch_cubin import errors

WRONG_SCHEMAS = [
    (5, "a str"),
    ("", "a namespace"),
    ("mylib::f(Tensr x) -> Tensor", "'Tensr'"),
    ("f(Tensor x) -> Tensor", "namespace"),
    ("aten::f(Tensor x) -> Tensor", "a name of your own"),
    ("mylib::f() -> Tensor", "takes no tensor"),
    ("mylib::f(int n) -> Tensor", "takes no tensor"),
    ("mylib::f(Tensor x, Scalar n) -> Tensor", "'Scalar'"),
    ("mylib::f(Tensor x, Device n) -> Tensor", "'Device'"),
    ("mylib::f(Tensor x, int[] n) -> Tensor", "'int[]'"),
    ("mylib::f(Tensor?[] x) -> Tensor", "'Tensor?[]'"),
    ("mylib::f(Tensor(a) x) -> Tensor", "Tensor(a!)"),
    ("mylib::f(Tensor(a!)? x) -> ()", "Tensor(a!)"),
    ("mylib::f(Tensor(a!) x) -> Tensor(a!)", "outputs of the op's own"),
    ("mylib::f(Tensor x) -> int", "a tuple of Tensor"),
    ("mylib::f(Tensor x) -> Tensor[]", "a tuple of Tensor"),
    ("mylib::f(Tensor x) -> (Tensor, Tensor)", "does not name its outputs"),
    ("mylib::f(Tensor x) -> (Tensor x)", "of one name"),
    ("mylib::f(Tensor out) -> Tensor", "of one name"),
]


@pytest.mark.parametrize(("text", "says"), WRONG_SCHEMAS, ids=lambda x: str(x)[:60])
def test_wrong_schemas(text, says: str) -> None:
    with pytest.raises(errors.InputError, match=re.escape(says)):
        torch_cubin.define_op(text, **VEC_ADD)


class Pair(ctypes.Structure):
    _fields_ = (("a", ctypes.c_int32), ("b", ctypes.c_float))


def tensors(**changes: object) -> dict:
    wanted = {**VEC_ADD["tensors"], **changes}
    return {"tensors": {name: pattern for name, pattern in wanted.items() if pattern is not None}}


def args(function) -> dict:
    return {"args": function}


WRONG = {
    # What tensors= says.
    "no dtype": (tensors(x="[m]"), "is no pattern"),
    "not a dict": ({"tensors": ["float32[n]"]}, "a dict of patterns"),
    "an argument without a pattern": (tensors(y=None), "lacks an entry: expected 'y'"),
    "an output without a pattern": (tensors(out=None), "lacks an entry: expected 'out'"),
    "a pattern of nothing": (tensors(z="float32[*s]"), "that is no tensor of the op"),
    "no pattern": (tensors(x=torch.float32), "is no pattern"),
    "an unknown dtype": (tensors(x="float33[*s]"), "dtype is unknown"),
    "a misspelt dtype": (tensors(x="flaot32[*s]"), "is unknown: expected 'float32', "),
    "a dtype with torch's name": (tensors(x="torch.float32[*s]"), "got 'torch.' before it"),
    "a variable without dtypes": (tensors(x="T[*s]"), "dtype is unknown"),
    "an unknown option": (tensors(x="float32[*s] packed"), "has an unknown option"),
    "a wrong alignment": (tensors(x="float32[*s] align=12"), "a power of two"),
    "sizes that do not parse": (tensors(x="float32[m n]"), "do not parse"),
    "a size that is no arithmetic": (tensors(x="float32[m, m ** 2]"), "no arithmetic"),
    "a size by division": (tensors(x="float32[m, m / 2]"), "no arithmetic"),
    "a negative size": (tensors(x="float32[-3]"), "a size, 0 or more"),
    "two groups of dims": (tensors(x="float32[*s, *t]"), "one '*' in a shape"),
    "a size named as an argument": (tensors(x="float32[y]"), "a name of its own"),
    "a size and a group of one name": (tensors(x="float32[s, *s]"), "another name for a size"),
    "an unbound size": (tensors(out="float32[q]"), "got 'q'"),
    "an unbound group": (tensors(out="float32[*q]"), "got '*q'"),
    "an unbound size in arithmetic": (tensors(out="float32[2 * q]"), 'got ["number","q"]'),
    "an output of any shape": (tensors(out="float32"), "has no sizes"),
    "an output with gaps": (tensors(out="float32[*s] strided"), "contiguous for an output"),
    "an output like nothing": (tensors(out=torch_cubin.like("z")), "a Tensor argument of the op"),
    "an output like one with gaps": (
        tensors(x="float32[*s] strided", out=torch_cubin.like("x")),
        "names a tensor that may have gaps",
    ),
    "an output that is a number": (tensors(out=5), "is no pattern"),
    "an output by a wrong function": (tensors(out=lambda x: x), "is no pattern"),
    "an output of wrong sizes": (
        tensors(out=lambda x: torch_cubin.empty((x.shape[0] / 2,), x.dtype)),
        "expected an integer",
    ),
    "an output of a wrong dtype": (tensors(out=torch_cubin.empty((3,), 7)), "has a wrong dtype"),
    "an output of the device's size": (
        tensors(out=lambda multiprocessors: torch_cubin.empty(multiprocessors, "float32")),
        "'multiprocessors'",
    ),
    "a variable that is a dtype": ({"dtypes": {"float16": ["float32"]}}, "no dtype's"),
    "a variable over no dtypes": ({"dtypes": {"T": []}}, "a list of dtypes"),
    "a variable over a name that is no dtype": (
        {"dtypes": {"T": ["half"]}},
        "names of torch's dtypes",
    ),
    "scratch of any shape": ({"scratch": {"p": "float32"}}, "has no sizes"),
    "scratch named as an argument": ({"scratch": {"x": "float32[4]"}}, "that nothing else has"),
    "scratch of an unknown dtype": ({"scratch": {"p": "U[4]"}}, "dtype is unknown"),
    # What functions say.
    "an unknown argument": (args(lambda x, z: (x, z)), "'z'"),
    "a branch": (args(lambda x: (x, 1 if x.numel() > 5 else 2)), "torch_cubin.select"),
    "a question for None": (args(lambda x, y: x if y is None else y), "y.defined"),
    "an address": (args(lambda x: x.data_ptr()), "It knows"),
    "a string": (args(lambda x: (x, "hello")), "is nothing that a kernel takes"),
    "a real tensor": (args(lambda x: (x, torch.ones(3))), "is nothing that a kernel takes"),
    "a scalar of a wrong kind": (
        args(lambda x: torch_cubin.int32(x.numel() / 2)),
        "torch_cubin.int32",
    ),
    "a tensor map with a wrong box": (
        args(lambda x: (torch_cubin.TensorMap(x, box=(1.5,)), x, x, 1)),
        "box[0]",
    ),
    "a tensor map with a wrong swizzle": (
        args(lambda x: (torch_cubin.TensorMap(x, box=(8,), swizzle="3B"), x, x, 1)),
        "swizzle",
    ),
    "a struct without a field": (args(lambda x: torch_cubin.struct(Pair, a=1)), "field 'b'"),
    "a struct with another field": (
        args(lambda x: torch_cubin.struct(Pair, a=1, b=1.0, c=2)),
        "field 'c'",
    ),
    "a struct with a wrong value": (
        args(lambda x: torch_cubin.struct(Pair, a=1.5, b=1.0)),
        "field 'a'",
    ),
    "a struct of nothing": (args(lambda x: torch_cubin.struct(int, a=1)), "another type"),
    "an output that no argument leads to": (args(lambda x, y: (x, y, x, 1)), "the output 'out'"),
    "an output of which the kernel learns the size alone": (
        args(lambda x, y, out: (x, y, x, torch_cubin.int32(out.numel()))),
        "the output 'out'",
    ),
    "an output that none of two kernels takes": (
        {
            "kernel": None,
            "args": lambda x: (x, x, x, 1),
            "kernels": [
                torch_cubin.KernelChoice((LAUNCH, "vec_add"), when=lambda x: x.numel() < 9),
                torch_cubin.KernelChoice((LAUNCH, "vec_add")),
            ],
        },
        "the output 'out'",
    ),
    "a size in a sequence of names": (
        {"args": ("x", "y", "out", "n"), **tensors(x="float32[n]", y="float32[n]")},
        "or a function, which may name everything",
    ),
    "a grid of floats": ({"grid": lambda x: x.numel() / 256}, "kernels[0].grid[0] ("),
    "a grid of four": ({"grid": (1, 1, 1, 1)}, "three expressions"),
    "a negative grid": ({"grid": -1}, "1 to 2147483647 blocks"),
    "no grid": ({"grid": None}, "has no grid"),
    "no args": ({"args": None}, "has no args"),
    "no block": ({"block": None}, "has no block"),
    "a block that is a string": ({"block": "256"}, "calculates with a str"),
    "shared memory of floats": ({"shared_memory": 1.5}, "shared_memory"),
    "cooperative that is no bool": ({"cooperative": 1}, "cooperative"),
    "a priority that is no int": ({"priority": "high"}, "priority"),
    "a function of Python's": ({"grid": len}, "is not a Python function"),
    # Kernels, and the rest.
    "no kernel": ({"kernel": None}, "kernel= or kernels="),
    "two forms of kernels": ({"kernels": []}, "kernel= or kernels="),
    "an empty list of kernels": ({"kernel": None, "kernels": []}, "has no kernel"),
    "a choice of nothing": ({"kernel": None, "kernels": [5]}, "KernelChoice"),
    "a choice with a misspelt keyword": (
        {"kernel": None, "kernels": [{"kernel": (LAUNCH, "vec_add"), "whne": None}]},
        "expected 'when' (nearest of 10), got 'whne'",
    ),
    "a choice with a keyword like no other": (
        {"kernel": None, "kernels": [{"kernel": (LAUNCH, "vec_add"), "zzz": None}]},
        "expected 'kernel', 'when', 'args', ",
    ),
    "a kernel without a name": ({"kernel": str(LAUNCH)}, "names no kernel"),
    "a kernel of a number": ({"kernel": 5}, "names no kernel"),
    "kernels of two names": (
        {"kernel": [(LAUNCH, "vec_add"), (DECLARED, "cube")]},
        "names no kernel",
    ),
    "a condition that is a number": (
        {"kernel": None, "kernels": [{"kernel": (LAUNCH, "vec_add"), "when": lambda x: x.numel()}]},
        "a condition, or null",
    ),
    "cpu that is no function": ({"cpu": 5}, "cpu has a wrong type"),
    "backward that is a function": ({"backward": lambda ctx, g: g}, "register_autograd"),
    "backward without a namespace": ({"backward": "f"}, "'ns::op'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_definitions(case: str) -> None:
    changes, says = WRONG[case]
    with pytest.raises(errors.InputError) as caught:
        torch_cubin.define_op(schema("f(Tensor x, Tensor y) -> Tensor"), **{**VEC_ADD, **changes})
    text = str(caught.value)
    assert says in text, text
    assert text.startswith("torch_cubin [input]: "), text


def test_a_launch_in_brackets() -> None:
    kernel = torch_cubin.load(LAUNCH)["vec_add"]
    with pytest.raises(errors.InputError, match=r"grid=, block=\), got kernel\[4, 256\]"):
        kernel[4, 256](1, 2, 3)


def test_errors_of_functions_name_their_line() -> None:
    for changes in (
        {"grid": lambda x: x.numel() / 2},
        {"args": lambda x: [*x.shape]},
        {"args": lambda x: (x, "text")},
    ):
        with pytest.raises(errors.InputError) as caught:
            torch_cubin.define_op(
                schema("f(Tensor x, Tensor y) -> Tensor"), **{**VEC_ADD, **changes}
            )
        assert Path(__file__).name in str(caught.value)


BINARY = {
    "too few arguments": ({"args": lambda x: (x,)}, errors.ParamsError, "expected 4, got 1"),
    "an argument of a wrong size": (
        {"args": lambda x, y, out: (x, y, out, torch_cubin.int64(x.numel()))},
        errors.ParamsError,
        "4 bytes",
    ),
    "a kernel that the file lacks": (
        {"kernel": (LAUNCH, "vec_ad")},
        errors.NoKernelError,
        "vec_add",
    ),
    "a file that is not there": ({"kernel": "nowhere.cubin:f"}, errors.FileError, "nowhere"),
    "bytes that are no image": (
        {"kernel": (b"hello", "f")},
        errors.ImageError,
        "neither PTX nor C",
    ),
    "PTX without jit": ({"kernel": (DATA / "pointers.ptx", "f")}, errors.ImageError, "jit"),
}


@pytest.mark.parametrize("case", BINARY)
def test_definitions_that_do_not_fit_the_binary(case: str) -> None:
    changes, error, says = BINARY[case]
    with pytest.raises(error, match=re.escape(says)):
        torch_cubin.define_op(schema("f(Tensor x, Tensor y) -> Tensor"), **{**VEC_ADD, **changes})


def test_an_op_that_another_library_has() -> None:
    text = schema("f(Tensor x, Tensor y) -> Tensor")
    namespace = text.split("::")[0]
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define("f(Tensor x, Tensor y) -> Tensor")
    with pytest.raises(errors.InputError, match="f'"):
        torch_cubin.define_op(text, **VEC_ADD)
    library._destroy()
