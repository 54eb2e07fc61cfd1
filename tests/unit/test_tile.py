"""cuTile's kernels as ops: what their symbols say, and what each call is checked against."""

from __future__ import annotations

import importlib.util
import itertools
import random
from pathlib import Path
from typing import Any

import pytest

import torch_cubin
import torch_cubin.producers.tile as tile
from torch_cubin import errors
from torch_cubin._tile import symbol

DATA = Path(__file__).resolve().parents[1] / "data" / "tile"
names = itertools.count()
ADD = "add_Kt2_A1f32_1t1_p16_A1f32_1t1_p16_A1f32_1t1_p16_I1024"
VECTORS = {"x": "float32[n]", "y": "float32[n]", "out": "float32[n]"}
NUMEL = ["number", "n"]


def define(*files: str, **changes: Any) -> list[dict[str, Any]]:
    op = tile.define_op(
        f"test_tile::add{next(names)}(Tensor x, Tensor y) -> Tensor",
        [DATA / file for file in files],
        **{
            "tensors": VECTORS, "args": ("x", "y", "out", 1024),
            "grid": lambda n: torch_cubin.cdiv(n, 1024), **changes,
        },
    )  # fmt: skip
    return op.contract["kernels"]


def test_symbols() -> None:
    found = tile.parse(ADD)
    assert (found.function, found.convention, len(found.parameters)) == ("add", "t2", 4)
    array = found.parameters[0]
    assert array == symbol.Array("float32", (symbol.Dim(stride=1),), 16, False, 32)
    assert found.parameters[3] == symbol.Constant(1024)
    found = tile.parse("f_g_Kt1_A3bf16_1s4096i8_6t_2v4l0_p64g0iw_Sf16_B1_I_5_F3ff8000000000000")
    array, scalar, *constants = found.parameters
    assert found.function == "f_g"
    assert array.dims == (
        symbol.Dim(size=4096, size_multiple=8),
        *[symbol.Dim(stride=-2, stride_multiple=4, least_stride=0)] * 2,
    )
    assert (array.address_multiple, array.may_share, array.index_bits) == (64, True, 64)
    assert scalar == symbol.Scalar("float16")
    assert [constant.value for constant in constants] == [True, -5, 1.5]
    assert tile.parse("f_Kt2_T2I1Sf32").parameters == (
        (symbol.Constant(1), symbol.Scalar("float32")),
    )


@pytest.mark.parametrize(
    "wrong",
    [
        "add", "_K", "add_Kt3_I1", "add_Kt2_Q", "add_Kt2_Lg0A1f32", "add_Kt2_M", "add_Kt2_I",
        "add_Kt2_A1f31", "add_Kt2_A1f32_2t1", "add_Kt2_A1f32_0t1", "add_Kt2_A1f32_1t1_p3",
        "add_Kt2_A1f32_1i0", "add_Kt2_Cs_abc_z", "add_Kt2_F3f", "add_Kt2_B2", "add_Kt2_A9f32",
        "add_Kt2_A1f32_1t1_u", "add_Kt2 I1",
    ],
)  # fmt: skip
def test_symbols_that_are_not_known_are_refused(wrong: str) -> None:
    with pytest.raises(errors.InputError):
        tile.parse(wrong)


def test_damaged_symbols_are_refused_or_read() -> None:
    random_ = random.Random(3)
    for _ in range(5000):
        text = list(ADD)
        for _ in range(random_.randrange(1, 5)):
            text[random_.randrange(len(text))] = random_.choice("AST_KI0149fpst\x00g")
        try:
            tile.parse("".join(text))
        except errors.InputError as error:
            if error.tag != "input":
                raise


def test_parameters_and_assumptions_of_the_compiler() -> None:
    kernels = define("add.sm_80.cubin", "add.sm_90.cubin")
    assert [kernel["block"] for kernel in kernels] == [[128, 1, 1]] * 2
    assert kernels[0]["args"][:3] == [
        ["pointer", "x"], ["int32", ["size", "x", 0]], ["int32", ["stride", "x", 0]]
    ]  # fmt: skip
    assert kernels[0]["producer"]["function"] == "add"
    # What takes most for granted is asked first.
    const, plain = define("add.sm_90.cubin", "add_const.sm_90.cubin")
    assert "s4096" in const["kernel"]
    assert {"argument": "0", "value": ["size", "x", 0], "equals": 4096} in const["requires"]
    assert {"argument": "2", "value": NUMEL, "equals": 4096} in const["requires"]
    assert plain["requires"] == [
        {"argument": str(i), "value": ["stride", name, 0], "equals": 1}
        for i, name in enumerate("xy")
    ]
    (two,) = define("add2.sm_90.cubin")
    assert two["grid"][0] == ["mul", ["neg", ["floordiv", ["neg", NUMEL], 1024]], 2]
    unaligned = {**VECTORS, "x": "float32[n] align=4"}
    (kernel,) = define("add.sm_90.cubin", tensors=unaligned)
    assert {"argument": "0", "address_of": "x", "multiple_of": 16} in kernel["requires"]
    with pytest.raises(errors.InputError, match="is another constant: expected 4096, got 4095"):
        define("add_const.sm_90.cubin", tensors={**VECTORS, "out": "float32[4095]"})
    open_ = {"x": "float32[*s]", "y": "float32[*s]", "out": "float32[*s]"}
    (kernel,) = define("add_const.sm_90.cubin", tensors=open_, grid=4)
    assert {"argument": "0", "value": ["dim", "x"], "equals": 1} in kernel["requires"]
    assert {"argument": "2", "value": ["size", "x", 0], "equals": 4096} in kernel["requires"]


WRONG = {
    "another constant": ({"args": ("x", "y", "out", 512)}, "expected 1024, got int 512"),
    "a bool for an int": ({"args": ("x", "y", "out", True)}, "another constant"),
    "too few": ({"args": ("x", "y", "out")}, "expected 4, got 3"),
    "a number for an array": ({"args": (1, "y", "out", 1024)}, "is an array"),
    "a part of a tensor": (
        {"args": lambda x, y, out: (x.narrow(0, 1, 2), y, out, 1024)}, "is an array"
    ),
    "another dtype": ({"tensors": {**VECTORS, "x": "float16[n]"}}, "is an array of float32"),
    "another rank": ({"tensors": {**VECTORS, "x": "float32[n, 1]"}}, "of 1 dim"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_definitions(case: str) -> None:
    changes, says = WRONG[case]
    with pytest.raises(errors.InputError) as caught:
        define("add.sm_90.cubin", **changes)
    assert says in str(caught.value)


def test_ambiguous_or_unknown_tile_kernels_are_refused() -> None:
    with pytest.raises(errors.InputError, match="name= of one of them"):
        define("add.sm_90.cubin", "add2.sm_90.cubin")
    assert len(define("add.sm_90.cubin", "add2.sm_90.cubin", name="add")) == 1
    with pytest.raises(errors.InputError, match="says nothing of its signature"):
        define("../vec_add.sm_80.cuda118.cubin")
    with pytest.raises(errors.InputError, match="signatures= and archs="):
        define("add.sm_90.cubin", archs=["sm_90a"])


@pytest.mark.skipif(importlib.util.find_spec("cuda") is None, reason="cuTile is not installed")
def test_compiling() -> None:
    pytest.importorskip("cuda.tile")
    import data.make_tile as made  # tests/ is on the path
    from cuda.tile.compilation import CallingConvention, KernelSignature

    kernel, parameters, _ = made.KERNELS["add"]
    signature = KernelSignature(parameters, CallingConvention.cutile_python_v2(), "another_name")
    op = tile.define_op(
        f"test_tile::add{next(names)}(Tensor x, Tensor y) -> Tensor", kernel,
        signatures=[signature], archs=["sm_90a"], tensors=VECTORS, args=("x", "y", "out", 1024),
        grid=lambda n: torch_cubin.cdiv(n, 1024),
    )  # fmt: skip
    assert op.contract["kernels"][0]["kernel"] == ADD
