"""torch_cubin.choices: the kernels of a library of cubins, and what is known of them."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

import torch_cubin
from torch_cubin import errors
from torch_cubin._declared import kernel_table
from torch_cubin._native import library

DATA = Path(__file__).resolve().parents[1] / "data"
names = itertools.count()
TABLE = """
#define IGNORED {1, 2}
enum Data_type { DATA_TYPE_FP16, DATA_TYPE_BF16 };
extern unsigned char cubin_a[]; // struct Fake { int x; } t[] = {{1}};
static const struct Meta
{
    Data_type mDataType;
    unsigned int mS, mD = 4;
    bool mTiled{false};
    const unsigned char* mCubin;
    const char* mFuncName;
    float mScale[2];
} kMetas[] = {
{ DATA_TYPE_FP16, 0, 64u, true, cubin_a, "vec_" "add", {1.5f, -2}},
#if 1
{ ns::DATA_TYPE_BF16, 0x10, (1 << 4), false, nullptr, "fill", {}},
#endif
{ .mDataType = DATA_TYPE_BF16, .mFuncName = "scale" },
};
Meta const more[1] = {{DATA_TYPE_FP16, 7}};
int other[] = {1, 2};
"""


def write_library(folder: Path) -> Path:
    """Two architectures of vec_add, one as an array in C++."""
    data = (DATA / "vec_add.sm_80.cuda118.cubin").read_bytes()
    array = f"unsigned char vec_add_cubin[] = {{{','.join(map(hex, data))}}};\n"
    (folder / "vec_add_sm80.cubin.cpp").write_text(array)
    (folder / "vec_add_sm90.cubin").write_bytes(
        (DATA / "vec_add.sm_90a.cuda124.cubin").read_bytes()
    )
    return folder


def test_files_names_and_rows(tmp_path: Path) -> None:
    found = torch_cubin.choices(str(write_library(tmp_path) / "*cubin*"))
    rows = [choice.produced["constants"]["row"] for choice in found]
    assert [(row.kernel, row.arch, row.sm) for row in rows] == [
        ("vec_add", "sm_90a", 90), ("vec_add", "sm_80", 80),
    ]  # fmt: skip
    found = torch_cubin.choices(DATA / "several.sm_90a.cuda130.cubin", name="(?P<what>[a-z]+)_add")
    (row,) = [choice.produced["constants"]["row"] for choice in found]
    assert (row.what, row.kernel) == ("vec", "vec_add")
    with pytest.raises(errors.InputError, match="has no field 'whta'"):
        _ = row.whta
    table = [{"symbol": "vec_add", "d": 64}, {"symbol": "vec_add", "d": 128}]
    two = torch_cubin.choices([DATA / "vec_add.sm_80.cuda118.cubin"] * 2, table=table,
                              name="vec_(?P<kind>.*)")  # fmt: skip
    rows = [choice.produced["constants"]["row"] for choice in two]
    assert [(row.d, row.kind) for row in rows] == [(64, "add"), (128, "add")]
    one = torch_cubin.choices(DATA / "vec_add.sm_80.cuda118.cubin", table=table,
                              where=lambda row: row.d > 64)  # fmt: skip
    assert len(one) == 1


def test_an_op_of_them(tmp_path: Path) -> None:
    op = torch_cubin.define_op(
        f"test_choices::op{next(names)}(Tensor x, Tensor y, int d) -> Tensor",
        kernels=torch_cubin.choices(
            [f"{write_library(tmp_path)}/*.cubin", f"{tmp_path}/*.cpp"],
            table=[{"symbol": "vec_add", "d": 64, "threads": 96}],
            when=lambda d, row: d == row.d, block=lambda row: row.threads,
        ),
        tensors={"x": "float32[n]", "y": "float32[n]", "out": "float32[n]"},
        args=lambda x, y, out, n, row: (x, y, out, n * row.d),
        grid=lambda n, row: torch_cubin.cdiv(n, row.threads),
    )  # fmt: skip
    first, second = op.contract["kernels"]
    assert first["when"] == ["eq", ["number", "d"], 64]
    assert first["block"] == second["block"] == [96, 1, 1]
    assert first["args"][3] == ["number", ["mul", ["number", "n"], 64]]
    folder = torch_cubin.save_package(tmp_path / "package", [op])
    files = [path for path in folder.iterdir() if path.name != "manifest.json"]
    assert {library.inspect(path.read_bytes(), path.name)["kind"] for path in files} == {"cubin"}
    assert len(files) == 2


def test_what_finds_nothing_says_so(tmp_path: Path) -> None:
    cubin = DATA / "vec_add.sm_80.cuda118.cubin"
    with pytest.raises(errors.FileError, match="matches no file"):
        torch_cubin.choices(f"{tmp_path}/*.cubin")
    for more, says in (
        ({"name": "fmha_.*"}, "names match 'fmha_.*', got 1 kernel .vec_add."),
        ({"name": "("}, "no regular expression"),
        ({"table": [{"symbol": "vec_ad"}]}, "stand in the table: vec_ad"),
        ({"where": lambda row: False}, "`where` is true"),
        ({"table": 5}, "is no table"),
        ({"table": [5]}, "is no table"),
        ({"table": "\n"}, "has no array of structs"),
        ({"table": "{\n"}, "is no JSON"),
    ):
        with pytest.raises(errors.InputError, match=says):
            torch_cubin.choices(cubin, **more)
    with pytest.raises(errors.FileError):
        torch_cubin.choices(cubin, table=tmp_path / "none.h")
    with pytest.raises(errors.InputError, match="has a name of choices"):
        torch_cubin.define_op(
            f"test_choices::op{next(names)}(Tensor row, Tensor y) -> Tensor",
            kernels=torch_cubin.choices(cubin), block=32, grid=1, args=("row", "y", "out", 1),
            tensors={"row": "float32[n]", "y": "float32[n]", "out": "float32[n]"},
        )  # fmt: skip


def test_tables_of_c_and_json(tmp_path: Path) -> None:
    rows = kernel_table.read(TABLE)
    assert rows["vec_add"] == [{
        "mDataType": "DATA_TYPE_FP16", "mS": 0, "mD": 64, "mTiled": True, "mCubin": "cubin_a",
        "mFuncName": "vec_add", "mScale": [1.5, -2],
    }]  # fmt: skip
    (fill,) = rows["fill"]
    assert (fill["mDataType"], fill["mS"], fill["mD"]) == ("DATA_TYPE_BF16", 16, "( 1 < < 4 )")
    assert fill["mCubin"] is None
    assert rows["scale"] == [{"mDataType": "DATA_TYPE_BF16", "mFuncName": "scale"}]
    assert len(rows["DATA_TYPE_FP16"]) == 2  # the row of `more`, too
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"vec_add": {"d": 1}}))
    assert kernel_table.read(path) == {"vec_add": [{"symbol": "vec_add", "d": 1}]}
    assert kernel_table.read(str(path)) == kernel_table.read([{"symbol": "vec_add", "d": 1}])


@pytest.mark.parametrize("seed", range(20))
def test_damaged_tables_are_refused_or_read(seed: int) -> None:
    random_ = random.Random(seed)
    for _ in range(40):
        text: list[Any] = list(TABLE)
        for _ in range(random_.randrange(1, 8)):
            at = random_.randrange(len(text))
            change = random_.choice(["", "{", "}", "[", ",", "=", '"', ";", "struct", "\x00"])
            text[at] = change
        with contextlib.suppress(errors.InputError):
            kernel_table.read("".join(text) + "\n")
