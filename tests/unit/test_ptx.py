"""parse_ptx: declarations of every form, and text that is damaged."""

from __future__ import annotations

from pathlib import Path

import cubin_check
import pytest
import real_cubins
from containers import FOLDER

HEAD = ".version 8.4\n.target sm_90a\n.address_size 64\n"


def inspect(tmp_path: Path, text: str | bytes) -> dict:
    path = tmp_path / "text.ptx"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return cubin_check.inspect(path)


def params(kernel: dict) -> list[tuple]:
    return [(p["name"], p["type"], p["size"], p["alignment"], p["kind"]) for p in kernel["params"]]


def test_ptx_of_nvcc() -> None:
    facts = cubin_check.inspect(FOLDER / "vec_add.ptx")
    (kernel,) = facts.pop("kernels")
    assert facts == {
        "kind": "ptx",
        "version": "9.0",
        "arch": "sm_80",
        "sm": 80,
        "address_size": 64,
        "size": (FOLDER / "vec_add.ptx").stat().st_size,
        "uses_dynamic_shared": False,
        "variables": [],
        "imports": [],
    }
    assert (kernel["name"], kernel["cpp_name"]) == ("vec_add", "")
    assert params(kernel) == [
        *((f"vec_add_param_{i}", "u64", 8, 8, "unknown") for i in range(3)),
        ("vec_add_param_3", "u32", 4, 4, "value"),
    ]
    blank = ("max_registers", "required_block", "max_block", "cluster")
    assert [kernel[key] for key in blank] == [None] * 4


def test_pointers_spaces_and_structs() -> None:
    facts = cubin_check.inspect(real_cubins.DATA / "pointers.ptx")
    kernels = {kernel["name"]: kernel for kernel in facts["kernels"]}
    assert {p["kind"] for p in kernels["spaces"]["params"]} == {"pointer", "unknown", "value"}
    assert kernels["spaces"]["required_block"] == [128, 1, 1]
    assert kernels["large"]["max_block"] == [256, 2, 1]
    # As the cubin of the same text says.
    cubin = cubin_check.facts(real_cubins.DATA / "pointers.sm_90.cuda124.cubin")
    for kernel in cubin["kernels"]:
        ours = kernels[kernel["name"]]["params"]
        assert [(p["size"], p["kind"]) for p in ours] == [
            (p["size"], p["kind"]) for p in kernel["params"]
        ]


def test_declarations(tmp_path: Path) -> None:
    facts = inspect(
        tmp_path,
        "//\n// Generated\n/* .entry not_me() { */\n"
        + HEAD.replace("sm_90a", "sm_90a, debug")
        + """
.extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);
.visible .global .align 4 .b8 table[8] = {1, 2, 3, 4, 5, 6, 7, 8};
.extern .shared .align 16 .b8 smem[];
.weak .entry first(
  .param .u64 .ptr .global .align 16 first_0, // a comment, .entry
  .param .align 64 .b8 first_1[128],
  .param .f64 first_2, .param .u8 first_3, .param .b64 first_4,
  .param .b8 first_5[2][3], .param .texref first_6, .param .s16 first_7, .param .bf16 $x%1
) .reqntid 128, 2
.maxnreg 32 .minnctapersm 2 .pragma "nounroll; {"; .explicitcluster .reqnctapercluster 2, 1, 1
{ .reg .b32 r; { bra L; } L: ret; .section .debug { .b8 1 } }
.entry none .maxntid 64 { ret; }
.visible .entry empty() { ret; }
.entry declared(.param .u32 x);
.func helper(.param .u32 x) { ret; }
.file 1 "a.cu \\".entry\\"" """,
    )
    assert (facts["arch"], facts["uses_dynamic_shared"]) == ("sm_90a", True)
    first, none, empty = facts["kernels"]
    assert params(first) == [
        ("first_0", "u64", 8, 8, "pointer"),
        ("first_1", "b8[128]", 128, 64, "value"),
        ("first_2", "f64", 8, 8, "value"),
        ("first_3", "u8", 1, 1, "value"),
        ("first_4", "b64", 8, 8, "unknown"),
        ("first_5", "b8[2][3]", 6, 1, "value"),
        ("first_6", "texref", 0, 0, "value"),
        ("first_7", "s16", 2, 2, "value"),
        ("$x%1", "bf16", 2, 2, "value"),
    ]
    assert (first["required_block"], first["cluster"]) == ([128, 2, 1], [2, 1, 1])
    assert first["max_registers"] == 32
    assert (none["name"], none["params"], none["max_block"]) == ("none", [], [64, 1, 1])
    assert (empty["name"], empty["params"]) == ("empty", [])


def test_shared_memory_of_functions_that_a_kernel_calls(tmp_path: Path) -> None:
    """A kernel has what its callees have, however deep: dynamic shared memory, which every launch
    must give, and arrays of a size, beside which the need cannot be known."""
    text = """
.extern .shared .align 16 .b8 dynamic[];
.shared .align 4 .b8 sized[64];
.func (.param .b32 r) deep (.param .b64 x);
.func .attribute(.unified(1, 2)) (.param .b32 r) own_array (.param .b64 x) {
  .shared .align 4 .b8 array[256]; ret; }
.func over_it (.param .b64 x) { { call (r), deep, (x); } ret; }
.func file_s_array () { mov.u32 %r1, sized; ret; }
.func (.param .b32 r) deep (.param .b64 x) { mov.u32 %r1, dynamic; call over_it, (x); ret; }
.func none () { ret; }
.entry calls_own_array() { mov.u32 %r1, dynamic; call (r), own_array, (x); ret; }
.entry calls_file_s_array() { mov.u32 %r1, dynamic; call file_s_array; ret; }
.entry dynamic_alone() { mov.u32 %r1, dynamic; call none; ret; }
.entry through_two() { call over_it, (x); ret; }
.entry by_address() { mov.u64 %rd1, deep; call (r), %rd1, (x), proto; ret; }
.entry uses_nothing() { call none; ret; }
"""
    kernels = {
        k["name"]: k["uses_dynamic_shared"] for k in inspect(tmp_path, HEAD + text)["kernels"]
    }
    assert kernels == {
        "calls_own_array": False,
        "calls_file_s_array": False,
        "dynamic_alone": True,
        "through_two": True,
        "by_address": True,
        "uses_nothing": False,
    }


def test_functions_that_call_each_other_are_looked_at_once(tmp_path: Path) -> None:
    count = 20_000
    parts = [HEAD, ".extern .shared .align 16 .b8 s[];\n"]
    parts += [f".func f{i}();\n" for i in range(count)]
    parts += [f".func f{i}() {{ call f{(i + 1) % count}; }}\n" for i in range(count - 1)]
    parts += [f".func f{count - 1}() {{ mov.u32 %r, s; call f0; }}\n"]
    parts += [f".entry e{i}() {{ call f{i}; }}\n" for i in range(0, count, 10)]
    begun = cubin_check.processor_seconds()
    kernels = inspect(tmp_path, "".join(parts))["kernels"]
    assert all(kernel["uses_dynamic_shared"] for kernel in kernels)
    assert 0 < cubin_check.processor_seconds() - begun < 20


@pytest.mark.parametrize(("target", "arch"), [("sm_75", "sm_75"), ("sm_100f", "sm_100f")])
def test_targets(target: str, arch: str, tmp_path: Path) -> None:
    text = HEAD.replace("sm_90a", target) + "\0\0\0"
    assert inspect(tmp_path, text)["arch"] == arch


DAMAGED = {
    "no version": (".version", "no version"),
    "no target": (".version 8.4\n.entry k() { }", "no target"),
    "target of another kind": (".version 8.4\n.target map_f64\n", "target"),
    "target with a suffix": (HEAD.replace("sm_90a", "sm_90x"), "target"),
    "cut in a body": (HEAD + ".entry k() { ret;", "ends within a function"),
    "cut in a declaration": (HEAD + ".entry k(.param .u32 x", "ends within"),
    "cut in directives": (HEAD + ".entry k() .maxntid 1", "ends within"),
    "cut in a comment": (HEAD + "/* ", "comment"),
    "cut in a string": (HEAD + '.file 1 "', "string"),
    "brace too many": (HEAD + "}", "no '{'"),
    "no name": (HEAD + ".entry (", "no name"),
    "no type": (HEAD + ".entry k(.param x) {}", "no type"),
    "unknown type": (HEAD + ".entry k(.param .u7 x) {}", "unknown type"),
    "no parameter": (HEAD + ".entry k(.u32 x) {}", ".param"),
    "endless parameter": (
        HEAD + ".entry k(.param .b64 x[9999999999][9999999999]) {}",
        "too large",
    ),
    "no number": (HEAD + ".entry k(.param .b8 x[y]) {}", "number"),
    "four numbers": (HEAD + ".entry k() .maxntid 1, 2, 3, 4 {}", "three"),
    "nul within": (HEAD + "\0.entry k() { }", "NUL"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_text_is_refused(case: str, tmp_path: Path) -> None:
    text, word = DAMAGED[case]
    error = inspect(tmp_path, text)["error"]
    assert error["tag"] == "image"
    assert word in error["message"], error


def test_ptx_is_no_cubin() -> None:
    refusal = cubin_check.facts(FOLDER / "vec_add.ptx")["error"]
    assert "ptxas" in refusal["message"]
