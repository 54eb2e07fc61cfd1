"""torch_cubin.choices: the kernels of a library of cubins, and their facts."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from contracts import SEVERAL, new_name

import torch_cubin
from torch_cubin import errors
from torch_cubin._declared import expressions, kernel_table
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
Meta const more[1] = {{DATA_TYPE_FP16, 7, 1, false, cubin_a, "last", {}}, {}};
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


def test_an_op_of_choices(tmp_path: Path) -> None:
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


def test_choices_without_a_match_are_refused(tmp_path: Path) -> None:
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
    rows = kernel_table.read(TABLE).by_symbol(["vec_add", "fill", "scale", "last", "cubin_a"])
    assert rows["vec_add"] == [{
        "mDataType": "DATA_TYPE_FP16", "mS": 0, "mD": 64, "mTiled": True, "mCubin": "cubin_a",
        "mFuncName": "vec_add", "mScale": [1.5, -2],
    }]  # fmt: skip
    (fill,) = rows["fill"]
    assert (fill["mDataType"], fill["mS"], fill["mD"]) == ("DATA_TYPE_BF16", 16, "( 1 < < 4 )")
    assert fill["mCubin"] is None
    assert rows["scale"] == [{"mDataType": "DATA_TYPE_BF16", "mFuncName": "scale"}]
    assert (rows["last"][0]["mS"], rows["last"][0]["mScale"]) == (7, [])
    assert "cubin_a" not in rows  # another field has more of the symbols
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"vec_add": {"d": 1}}))
    found = kernel_table.read(path).by_symbol(["vec_add"])
    assert found == {"vec_add": [{"symbol": "vec_add", "d": 1}]}
    assert kernel_table.read(str(path)).rows == [{"symbol": "vec_add", "d": 1}]
    for twice in ('{"vec_add": {"d": 1}, "vec_add": {"d": 2}}\n', '[{"d": 1, "d": 2}]\n'):
        with pytest.raises(errors.InputError, match="has a key twice"):
            kernel_table.read(twice)


PLAIN = "int tile; const char* name; int more = 0;"


@pytest.mark.parametrize(
    ("fields", "row"),
    [
        (f"std::array<int, 3> b; {PLAIN}", '{1, 2, 3}, 64, "k"'),
        (f"int area(int) const; {PLAIN}", '64, "k"'),
        (f"bool operator=(const K&) = default; {PLAIN}", '64, "k"'),
        (f"void (*run)(int, int); {PLAIN}", 'f, 64, "k"'),
        (f"\n#ifdef X\nint extra;\n#endif\n{PLAIN}", '64, "k"'),
        (f"int flag : 3; {PLAIN}", '1, 64, "k"'),
        (f"struct {{ int a, b; }}; {PLAIN}", '1, 2, 64, "k"'),
        (f"{PLAIN} int name;", '64, "k"'),
        (f"int a; {PLAIN}", '.a = 8, 64, "k"'),  # positions after a name
        (PLAIN, ".name.x = 5"),
        ("int a; int tile; const char* name;", '64, "k"'),  # a short row
        (f"int b[2]; {PLAIN}", '1, 2, 64, "k"'),  # C++ takes an array without its braces
        (f"dim3 block; {PLAIN}", '1, 2, 64, "k"'),
        (f"struct Two {{ int a, b; }} two; {PLAIN}", '1, 2, 64, "k"'),
        (f"int a; {PLAIN}", 'size<1, 2>, "k"'),
        (f"int a; {PLAIN}", 'TWO, "k"'),  # a macro
        (f"int a; {PLAIN}", '\n#ifdef X\n1,\n#endif\n64, "k"'),
    ],
)
def test_a_table_whose_values_cannot_be_counted_is_refused(fields: str, row: str) -> None:
    """A row may be shorter than its struct: then nothing else would tell that fields have moved."""
    before = "\n#define TWO 1, 64\n"
    for text in (
        f"struct K {{ {fields} }} t[] = {{ {{ {row} }} }};\n",
        f"struct K {{ {fields} }};\nstatic const K t[] {{ {{ {row} }}, }};\n",
    ):
        with pytest.raises(errors.InputError, match=r"no plain field|a row|a value|twice"):
            kernel_table.read(before + text)


def test_a_struct_without_a_table_may_have_any_members() -> None:
    text = """
#ifndef GUARD_H
#define GUARD_H
enum Kind { A };
template <class T> struct Helper : Base<T> { int area(int) const { return 1; } };
struct B { int q; };
struct D : B { int z; };
struct K {
    enum Kind kind; static constexpr int M = 1; constexpr static int N{2}; alignas(16) int *p, n[2];
    [[maybe_unused]] struct Pair { int a, b; } pair; char text[8]; const char* name; int more = {1};
};
K rows[] = {{A, nullptr, {1, 2}, {.a = 3, .b = 4}, "x//y", "k"}, {0}};
#endif
"""
    assert kernel_table.read(text).rows == [{
        "kind": "A", "p": None, "n": [1, 2], "pair": {"a": 3, "b": 4}, "text": "x//y", "name": "k",
    }]  # fmt: skip
    for struct in ("D", "B"):
        made = text.replace("#endif", f'{struct} t[] = {{{{1, 2, "k"}}}};\n#endif')
        with pytest.raises(errors.InputError, match="with a base|does not fit"):
            kernel_table.read(made)
    again = text.replace(
        "K rows", "#ifdef X\nstruct K { int a; const char* name; };\n#endif\nK rows"
    )
    with pytest.raises(errors.InputError, match="has two structs 'K'"):
        kernel_table.read(again)


def test_rows_under_an_if() -> None:
    def rows(text: str) -> list[tuple[str, int]]:
        table = f"struct K {{ const char* name; int d; }} t[] = {{\n{text}\n}};\n"
        read = kernel_table.read(table)
        found = read.by_symbol(["a", "b"])
        for symbol in found:
            read.check_conditions(symbol, found[symbol])
        return [(symbol, row["d"]) for symbol in sorted(found) for row in found[symbol]]

    one, two, other = '{"a", 1},', '{"a", 2},', '{"b", 3},'
    assert rows(f"#if 0\n{one}\n#else\n{two}\n#endif") == [("a", 2)]
    assert rows(f"#if 1\n{one}\n#elif X\n{two}\n#endif") == [("a", 1)]
    assert rows(f"#if 0\n#ifdef X\n{one}\n#endif\n#elif 1\n{two}\n#endif") == [("a", 2)]
    assert rows(f"#ifndef NO_80\n{one}\n#endif\n{other}") == [("a", 1), ("b", 3)]
    assert rows(f"#if SM > 80\n{one}\n#else\n{other}\n#endif") == [("a", 1), ("b", 3)]
    for text in (f"#ifdef X\n{one}\n#else\n{two}\n#endif", f"#ifdef X\n{one}\n#endif\n{two}"):
        with pytest.raises(errors.InputError, match="rows of kernel 'a' under an #if"):
            rows(text)
    for text in (f"#if X\n{one}", f"{one}\n#endif", f"#else\n{one}"):
        with pytest.raises(errors.InputError, match="#if"):
            rows(text)


def test_where_selects_among_rows_under_an_if(tmp_path: Path) -> None:
    struct = "struct K { const char* name; int d; const char* layout; }"
    table = f"""
    #ifdef PACKED
    static const {struct} t[] = {{{{"vec_add", 1, "QKV"}}, {{"small", 5, "QKV"}}}};
    #else
    static const {struct} t[] = {{{{"vec_add", 2, "KV"}}, {{"small", 6, "KV"}}}};
    #endif
    """
    rows_alone = f"""
    {struct} t[] = {{
    #if defined(PACKED) && VERSION > 3
    {{"vec_add", 1, "QKV"}},
    #elif OTHER
    {{"vec_add", 2, "KV"}},
    #endif
    {{"small", 5, "QKV"}}, }};
    """
    cubin = DATA / "several.sm_90a.cuda130.cubin"
    for text in (table, rows_alone):
        for d in (1, 2):
            (choice,) = torch_cubin.choices(cubin, table=text, name="vec_add",
                                            where=lambda row, d=d: row.d == d)  # fmt: skip
            assert choice.produced["constants"]["row"].d == d
        for where in (None, lambda row: row.d < 5):
            with pytest.raises(errors.InputError, match="rows of kernel '.*' under an #if"):
                torch_cubin.choices(cubin, table=text, where=where)
    # Rows of a kernel that `where` skips entirely are not checked.
    assert len(torch_cubin.choices(cubin, table=rows_alone, where=lambda row: row.d == 5)) == 1


def test_a_row_has_the_size_of_the_parameters() -> None:
    cubin = DATA / "several.sm_90a.cuda130.cubin"
    facts = {k.name: k for k in torch_cubin.inspect(cubin).kernels}
    rows = [c.produced["constants"]["row"] for c in torch_cubin.choices(cubin)]
    assert {row.kernel: row.param_bytes for row in rows} == {
        name: max((p.offset + p.size for p in kernel.params), default=0)
        for name, kernel in facts.items()
    }
    assert next(row.param_bytes for row in rows if row.kernel == "vec_add") == 28
    old = torch_cubin.choices(cubin, where=lambda row: row.param_bytes <= 28)
    assert 0 < len(old) < len(rows)
    with pytest.raises(errors.InputError, match="'param_bytes' with another value"):
        torch_cubin.choices(cubin, table=[{"name": "vec_add", "param_bytes": 1}])


def test_one_field_says_which_kernel_a_row_is_of() -> None:
    """Another field may name a kernel, too: one to reduce with, or to fall back on."""
    table = [{"name": "vec_add", "d": 64, "reduce": "small"}, {"name": "small", "d": 1}]
    cubin = DATA / "several.sm_90a.cuda130.cubin"
    for given in (table, {row["name"]: row for row in table}):
        rows = [c.produced["constants"]["row"] for c in torch_cubin.choices(cubin, table=given)]
        assert sorted((row.kernel, row.d) for row in rows) == [("small", 1), ("vec_add", 64)]
    with pytest.raises(errors.InputError, match="symbols in several fields.*'name', 'reduce'"):
        torch_cubin.choices(cubin, table=table[:1])
    same = [{"array": "vec_add", "name": "vec_add", "d": 1}]
    assert len(torch_cubin.choices(cubin, table=same)) == 1


@pytest.mark.parametrize(
    "row", [{"sm": 100}, {"arch": 90}, {"kernel": "other"}, {"what": "vector"}]
)
def test_a_field_has_one_value(row: dict[str, Any]) -> None:
    cubin = DATA / "several.sm_90a.cuda130.cubin"
    (field,) = row
    with pytest.raises(errors.InputError, match=f"has a field '{field}' with another value"):
        torch_cubin.choices(cubin, name="(?P<what>vec)_add", table=[{"name": "vec_add", **row}])
    same = {"sm": 90, "arch": "sm_90a", "kernel": "vec_add", "what": "vec"}
    assert len(torch_cubin.choices(cubin, name="(?P<what>vec)_add", table=[same])) == 1
    with pytest.raises(errors.InputError, match="with another symbol"):
        torch_cubin.choices(cubin, table={"vec_add": {"symbol": "small"}})


@pytest.mark.parametrize("seed", range(20))
def test_damaged_tables_are_refused_or_read(seed: int) -> None:
    random_ = random.Random(seed)
    for _ in range(40):
        text: list[Any] = list(TABLE)
        for _ in range(random_.randrange(1, 8)):
            at = random_.randrange(len(text))
            change = random_.choice(
                ["", "{", "}", "[", ",", "=", '"', ";", "struct", "\x00", "#", "<"]
            )
            text[at] = change
        with contextlib.suppress(errors.InputError):
            kernel_table.read("".join(text) + "\n").by_symbol(["vec_add"])


def test_a_function_of_many_choices_is_read_once(tmp_path: Path, monkeypatch) -> None:
    """Read for each choice, the bytecode of `when` and `args` took half of define_op's time."""
    read = []
    real = expressions.dis.get_instructions
    monkeypatch.setattr(expressions.dis, "get_instructions", lambda c: read.append(c) or real(c))

    def args(x, y, out):
        return x, y, out, torch_cubin.int32(x.numel())

    def when(x):
        return x.shape[0] == 3

    listed = [torch_cubin.KernelChoice(f"{SEVERAL}:vec_add", when=when) for _ in range(20)]
    tensors = dict.fromkeys(("x", "y", "out"), "float32[n]")
    torch_cubin.define_op(
        f"{new_name()}(Tensor x, Tensor y) -> Tensor",
        kernels=listed, tensors=tensors, args=args, grid=1, block=32,
    )  # fmt: skip
    assert (read.count(args.__code__), read.count(when.__code__)) == (1, 1)
