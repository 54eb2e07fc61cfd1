"""define_op: what a definition becomes, without a GPU."""

from __future__ import annotations

import ctypes
import math
import struct
import warnings

import declared
import pytest
import torch
from declared import DATA, DECLARED, LAUNCH, blocks, schema, vec_add

import torch_cubin
from torch_cubin import errors
from torch_cubin import int32 as i32
from torch_cubin._declared import patterns
from torch_cubin._declared import signature as _signature

CDIV = ["neg", ["floordiv", ["neg", ["numel", "x"]], 256]]


def contiguous(dtype: str, *shape: object) -> dict:
    return {"dtype": dtype, "shape": list(shape), "layout": "contiguous", "align": 16}


def test_vec_add_becomes_its_contract() -> None:
    op = vec_add()
    assert op.contract == {
        "schema": op.schema,
        "dtypes": {},
        "tensors": {name: contiguous("float32", "*s") for name in ("x", "y", "out")},
        "outputs": ["out"],
        "scratch": [],
        "kernels": [
            {
                "when": None,
                "images": [0],
                "kernel": "vec_add",
                "args": [
                    ["pointer", "x"],
                    ["pointer", "y"],
                    ["pointer", "out"],
                    ["int32", ["numel", "x"]],
                ],
                "grid": [CDIV, 1, 1],
                "block": [256, 1, 1],
                "shared_memory": 0,
                "cluster": None,
                "cooperative": False,
                "programmatic_dependent_launch": False,
                "priority": None,
            }
        ],
    }


PATTERNS = [
    ("float32[*s]", ["*s"], "contiguous", 16),
    ("float32[]", [], "contiguous", 16),
    ("float32", None, "contiguous", 16),
    ("T[m, k] rows align=4", ["m", "k"], "rows", 4),
    ("bfloat16[b,*s , 3] dense", ["b", "*s", 3], "dense", 16),
    ("int8[m, 2 * k] strided align=1", ["m", ["mul", 2, ["number", "k"]]], "strided", 1),
    (
        "float32[cdiv(m, 8), -m + 9, m // 2 % 3, min(m, k), max(m, 4)]",
        [
            ["neg", ["floordiv", ["neg", ["number", "m"]], 8]],
            ["add", ["neg", ["number", "m"]], 9],
            ["mod", ["floordiv", ["number", "m"], 2], 3],
            ["min", ["number", "m"], ["number", "k"]],
            ["max", ["number", "m"], 4],
        ],
        "contiguous",
        16,
    ),
]


@pytest.mark.parametrize(("text", "shape", "layout", "align"), PATTERNS, ids=lambda x: str(x)[:40])
def test_patterns(text: str, shape: list, layout: str, align: int) -> None:
    assert patterns.parse(text, "a test") == {
        "dtype": text.split("[")[0],
        "shape": shape,
        "layout": layout,
        "align": align,
    }


def test_schemas_are_read() -> None:
    signature = _signature.parse(
        "mylib::f.two(Tensor x, Tensor(a!) y, Tensor? z, Tensor[] xs, SymInt n, int? k,"
        " float a=1.5, *, bool b=False, str mode='fast', ScalarType d=bfloat16)"
        " -> (Tensor out, Tensor lse)"
    )
    assert signature.name == "mylib::f.two"
    assert [(a.name, a.kind) for a in signature.arguments] == [
        ("x", "tensor"),
        ("y", "tensor"),
        ("z", "tensor?"),
        ("xs", "tensors"),
        ("n", "int"),
        ("k", "int?"),
        ("a", "float"),
        ("b", "bool"),
        ("mode", "str"),
        ("d", "dtype"),
    ]
    assert [a.name for a in signature.arguments if a.mutable] == ["y"]
    assert [a.name for a in signature.arguments if a.keyword_only] == ["b", "mode", "d"]
    assert signature.arguments[-1].default is torch.bfloat16
    assert signature.outputs == ("out", "lse")
    bound = signature.bind((1, 2), {"mode": "slow"})
    assert (bound["x"], bound["y"], bound["a"], bound["mode"]) == (1, 2, 1.5, "slow")


class Inner(ctypes.Structure):
    _fields_ = (("pointer", ctypes.c_void_p), ("flag", ctypes.c_bool))


class Outer(ctypes.Structure):
    _fields_ = (
        ("factor", ctypes.c_float),
        ("offset", ctypes.c_int32),
        ("inner", Inner),
        ("sizes", ctypes.c_int64 * 2),
    )


def arguments_of(function, **more) -> list:
    """The entries of `args`; the kernel's parameters are not asked."""
    from torch_cubin._declared import contract as _contract

    signature = _signature.parse(
        "mylib::f(Tensor x, Tensor? bias, Tensor[] xs, int n, float alpha, bool flag, int? k, str"
        " mode, ScalarType dtype) -> Tensor"
    )
    tensors = {
        "x": "T[m, c]",
        "bias": "T[c]",
        "xs": "T[*t]",
        "out": "T[m, c]",
    }
    choice = _contract.Choice([0], "k", function, 1, 1, **more)
    contract, _ = _contract.build(
        signature,
        tensors=tensors,
        dtypes={"T": [torch.float16, "float32"]},
        scratch={"partial": "float32[m, 4]"},
        choices=[choice],
        backward=None,
        jit=False,
    )
    return contract["kernels"][0]["args"]


ARGUMENTS = [
    (lambda x, out, partial: (x, out, partial), [["pointer", n] for n in ("x", "out", "partial")]),
    (lambda bias, xs: (bias, xs[2]), [["pointer", "bias"], ["pointer", "xs", 2]]),
    (lambda n: n, [["number", ["number", "n"]]]),
    (lambda n, flag, alpha: (n + 1, flag, alpha), [
        ["number", ["add", ["number", "n"], 1]],
        ["number", ["number", "flag"]],
        ["number", ["number", "alpha"]],
    ]),
    (lambda m, c: (i32(m * c), torch_cubin.float32(c)), [
        ["int32", ["mul", ["number", "m"], ["number", "c"]]],
        ["float32", ["number", "c"]],
    ]),
    (lambda k: torch_cubin.select(k.defined, k, -1), [
        ["number", ["select", ["number", "k?"], ["number", "k"], -1]],
    ]),
    (lambda mode, dtype: torch_cubin.select((mode == "fast") & (dtype != torch.float16), 1, 2), [
        ["number", ["select", ["and", ["is", "mode", "fast"],
                               ["not", ["is", "dtype", "float16"]]], 1, 2]],
    ]),
    (lambda xs: torch_cubin.length(xs) + xs[0].shape[1], [
        ["number", ["add", ["number", "len(xs)"], ["size", "xs[0]", 1]]],
    ]),
    (lambda bias: torch_cubin.select(bias.defined, 1, 0), [
        ["number", ["select", ["defined", "bias"], 1, 0]],
    ]),
    (lambda sm, multiprocessors: (sm, multiprocessors), [
        ["number", ["sm"]], ["number", ["multiprocessors"]],
    ]),
    (lambda: (None, 5, 2.5, True), [
        ["uint64", 0], ["number", 5], ["number", 2.5], ["number", True],
    ]),
    (lambda: (i32(-5), torch_cubin.uint64(2**63), torch_cubin.float32(math.inf)), [
        ["int32", -5], ["bytes", "0000000000000080"], ["bytes", struct.pack("<f", math.inf).hex()],
    ]),
    (lambda: (b"\x01\xff", Inner(0, True)), [
        ["bytes", "01ff"], ["bytes", bytes(Inner(0, True)).hex()],
    ]),
    (lambda x, n, alpha: torch_cubin.struct(
        Outer, factor=alpha, offset=n,
        inner=torch_cubin.struct(Inner, pointer=x, flag=n > 3), sizes=(1, n)), [
        ["struct", 40, [
            [0, ["float32", ["number", "alpha"]]],
            [4, ["int32", ["number", "n"]]],
            [8, ["struct", 16, [
                [0, ["pointer", "x"]],
                [8, ["bool", ["lt", 3, ["number", "n"]]]],
            ]]],
            [24, ["int64", 1]],
            [32, ["int64", ["number", "n"]]],
        ]],
    ]),
    (lambda x, n: torch_cubin.TensorMap(x, box=(8, n), swizzle="128B"), [
        ["tensor_map", {
            "tensor": "x", "box": [8, ["number", "n"]], "swizzle": "128B", "interleave": None,
            "l2_promotion": "128B", "oob_fill": "zeros", "element_strides": None,
        }],
    ]),
    (("x", "out", 7), [["pointer", "x"], ["pointer", "out"], ["number", 7]]),
]  # fmt: skip


@pytest.mark.parametrize(("function", "entries"), ARGUMENTS, ids=range(len(ARGUMENTS)))
def test_arguments(function, entries: list) -> None:
    assert arguments_of(function) == entries


def test_numpy_structs() -> None:
    numpy = pytest.importorskip("numpy")
    dtype = numpy.dtype([("a", "<f4"), ("b", "<i8", (2,)), ("c", [("d", "u1")])], align=True)
    (entry,) = arguments_of(
        lambda n: torch_cubin.struct(
            dtype, a=1.0, b=(n, 2), c=torch_cubin.struct(dtype["c"], d=torch_cubin.uint8(7))
        )
    )
    assert entry[:2] == ["struct", dtype.itemsize]
    assert [offset for offset, _ in entry[2]] == [0, 8, 16, 24]


OUTPUTS = [
    ("float32[m, 2 * c]", contiguous("float32", "m", ["mul", 2, ["number", "c"]])),
    (torch_cubin.empty((3, 4), torch.int64), contiguous("int64", 3, 4)),
    (lambda x: torch_cubin.empty(x.shape[0], x.dtype), contiguous("T", ["size", "x", 0])),
    (lambda n, m: torch_cubin.empty([n, m], "T"), contiguous(
        "T", ["number", "n"], ["number", "m"])),
    (torch_cubin.like("x"), {**contiguous("T"), "shape": None, "like": "x"}),
    (lambda x: torch_cubin.like(x, torch.bool), {**contiguous("bool"), "shape": None, "like": "x"}),
]  # fmt: skip


@pytest.mark.parametrize(("pattern", "entry"), OUTPUTS, ids=range(len(OUTPUTS)))
def test_outputs(pattern, entry: dict) -> None:
    from torch_cubin._declared import contract as _contract

    builder = _contract.Builder(
        _signature.parse("mylib::f(Tensor x, int n) -> Tensor"), {"T": ["float16", "float32"]}
    )
    builder.tensors({"x": "T[m, c]", "out": pattern})
    assert builder.entries["out"] == entry


@pytest.mark.parametrize("form", ["text", "path", "bytes", "archs", "list", "kernel"])
def test_forms_of_naming_a_kernel(form: str) -> None:
    archs = [DATA / "vec_add.sm_90a.cuda124.cubin", DATA / "vec_add.sm_80.cuda118.cubin"]
    module = torch_cubin.load(archs)
    kernel = {
        "text": f"{archs[0]}:vec_add",
        "path": (archs[0], "vec_add"),
        "bytes": (archs[0].read_bytes(), "vec_add"),
        "archs": (archs, "vec_add"),
        "list": [f"{path}:vec_add" for path in archs],
        "kernel": module["vec_add"],
    }[form]
    op = vec_add(kernel=kernel)
    images = 2 if form in ("archs", "list", "kernel") else 1
    assert op.contract["kernels"][0]["images"] == list(range(images))
    assert torch.equal(op(torch.ones(3), torch.ones(3)), torch.full((3,), 2.0))


def test_several_kernels() -> None:
    choice = torch_cubin.KernelChoice
    args = lambda x, out, m: (x, out, torch_cubin.int64(m))  # noqa: E731
    op = torch_cubin.define_op(
        schema("copy(Tensor x) -> Tensor"),
        kernels=[
            choice((DECLARED, "copy_32"), when=lambda x: x.dtype == torch.float32, block=128),
            {
                "kernel": (DECLARED, "copy_16"),
                "when": lambda x: (x.numel() % 8 == 0) & (x.dim() == 1),
            },
        ],
        dtypes={"T": ["float16", "float32"]},
        tensors={"x": "T[m]", "out": "T[m]"},
        args=args,
        grid=blocks,
        block=256,
    )
    first, second = op.contract["kernels"]
    assert first["when"] == ["is_dtype", "x", "float32"]
    assert (first["block"], second["block"]) == ([128, 1, 1], [256, 1, 1])
    assert (first["images"], second["images"]) == ([0], [0])  # one file


PARTS = ("args", "grid", "block", "shared_memory", "cluster", "when", "output", "scratch")


def part_of(part: str, function) -> dict:
    """The contract of an op one part of which is that function, where patterns bind m and d."""
    from torch_cubin._declared import contract as _contract

    launch = {"args": ("x", "out"), "grid": 1, "block": 32}
    tensors = {"x": "float32[m, d]", "out": "float32[m, d]"}
    scratch = {}
    if part == "output":
        tensors["out"] = function
    elif part == "scratch":
        scratch["partial"] = function
    else:
        launch[part] = function
    contract, _ = _contract.build(
        _signature.parse("mylib::f(Tensor x, int n=1) -> Tensor"),
        tensors=tensors,
        dtypes=None,
        scratch=scratch,
        choices=[_contract.Choice([0], "k", **launch)],
        backward=None,
        jit=False,
    )
    return contract


def function_of(part: str, **default: int):
    """What a loop's body would write for the part; its value is the parameter with the default."""
    ((name, value),) = default.items()
    calculate = {
        "when": lambda x, value: x.size(1) == value,
        "output": lambda x, value: torch_cubin.empty((x.size(1), value), torch.float32),
        "scratch": lambda x, value: torch_cubin.empty((x.size(1), value), torch.float32),
    }.get(part, lambda x, value: x.size(1) + value)
    scope: dict = {"calculate": calculate, "value": value}
    exec(f"part = lambda x, {name}=value: calculate(x, {name})", scope)
    return scope["part"]


@pytest.mark.parametrize("part", PARTS)
def test_a_default_is_kept_where_a_pattern_binds_a_size_of_its_name(part: str) -> None:
    """`lambda x, d=d: x.size(1) == d` in a loop over d: the size would make it always true."""
    contract = part_of(part, function_of(part, d=64))
    (kernel,) = contract["kernels"]
    width = ["size", "x", 1]
    assert {
        "args": kernel["args"] == [["number", ["add", width, 64]]],
        "when": kernel["when"] == ["eq", width, 64],
        "shared_memory": kernel["shared_memory"] == ["add", width, 64],
        "output": contract["tensors"]["out"]["shape"] == [width, 64],
        "scratch": contract["scratch"] and contract["scratch"][0]["shape"] == [width, 64],
    }.get(part, kernel.get(part) == [["add", width, 64], 1, 1]), contract


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", ["n", "sm"])
def test_a_default_for_one_of_the_ops_own_names_is_refused(part: str, name: str) -> None:
    """It could mean the call's value or the definition's."""
    if name == "sm" and part in ("output", "scratch"):
        return  # they know no device, so that the name is free there
    with pytest.raises(errors.InputError, match=f"gives '{name}' a default") as caught:
        part_of(part, function_of(part, **{name: 64}))
    assert part.replace("output", "out").replace("scratch", "partial") in str(caught.value)


def test_a_block_that_the_binary_requires() -> None:
    op = torch_cubin.define_op(
        schema("fill(Tensor x) -> Tensor"),
        kernel=(DECLARED, "fill_64"),
        tensors={"x": "float32[n]", "out": "float32[n]"},
        args=lambda out, n: (out, i32(n)),
        grid=lambda n: torch_cubin.cdiv(n, 64),
    )
    assert op.contract["kernels"][0]["block"] == [64, 1, 1]


def test_redefining_an_op_identically_is_silent_and_a_change_warns() -> None:
    text = schema("vec_add(Tensor x, Tensor y) -> Tensor")
    x = torch.ones(4)
    first = vec_add(schema=text)
    first.register_autograd(lambda ctx, grad: (grad, grad))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = vec_add(schema=text)
    assert again is first
    leaf = x.clone().requires_grad_()
    again(leaf, x).sum().backward()  # the backward is still there
    with pytest.warns(UserWarning, match="defined again"):
        swapped = vec_add(schema=text, block=128, cpu=lambda x, y: x - y)
    assert swapped is first
    assert swapped.contract["kernels"][0]["block"] == [128, 1, 1]
    assert torch.equal(swapped(x, x), torch.zeros(4))
    with pytest.raises(errors.InputError, match="no derivative"):
        swapped(leaf, x)
    with pytest.raises(errors.InputError, match="another schema"):
        vec_add(
            schema=text.replace("Tensor y", "Tensor other"),
            tensors={"x": "float32[*s]", "other": "float32[*s]", "out": "float32[*s]"},
            args=lambda x, other, out: (x, other, out, i32(x.numel())),
        )


def test_name_repr_and_overload_of_an_op() -> None:
    op = declared.cube()
    assert op.name == op.schema.split("(")[0]
    assert repr(op) == f"<torch_cubin.Op '{op.schema}'>"
    assert op.overload is getattr(torch.ops, op.name.split("::")[0]).cube.default


def test_module_kernels_of_ptx_take_jit_along() -> None:
    ptx = DATA / "pointers.ptx"
    module = torch_cubin.load(ptx, jit=True)
    (name,) = list(module)[:1]
    params = module[name].info.params
    op = torch_cubin.define_op(
        schema("pointers(Tensor x) -> Tensor"),
        kernel=module[name],
        tensors={"x": "float32[*s]", "out": "float32[*s]"},
        args=lambda x, out: (x, out, *(bytes(p.size) for p in params[2:])),
        grid=1,
        block=128,
    )
    assert op.contract["jit"] is True


assert LAUNCH.is_file()


def test_scratch_that_is_zeroed() -> None:
    op = vec_add(scratch={"zeros": "float32[*s] zeroed", "more": "int32[4]"})
    assert op.contract["scratch"] == [
        {"name": "zeros", "dtype": "float32", "shape": ["*s"], "zeroed": True},
        {"name": "more", "dtype": "int32", "shape": [4]},
    ]
    with pytest.raises(errors.InputError, match="has an unknown option"):
        vec_add(tensors={"x": "float32[*s] zeroed", "y": "float32[*s]", "out": "float32[*s]"})
