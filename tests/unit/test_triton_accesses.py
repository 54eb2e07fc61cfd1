"""What a Triton kernel's IR says of its memory, compared with what a definition says of it."""

from __future__ import annotations

import dataclasses
import re
import shutil
import types
from pathlib import Path
from typing import Any

import pytest

import torch_cubin
import torch_cubin.producers.triton as tct
from torch_cubin import errors
from torch_cubin._triton import live
from torch_cubin._triton.accesses import accesses, numbers, program_steps

DATA = Path(__file__).resolve().parents[1] / "data" / "triton"
_count = iter(range(1_000_000))
P = "!tt.ptr<f32>"
LOOP = f"%r:2 = scf.for %i = %l to %u step %s iter_args(%a = %p0, %b = %p1) -> ({P}, {P})  : i32"


def module(body: str, parameters: int = 3, more: str = "") -> str:
    names = ", ".join(f'%p{i}: {P} loc("p{i}")' for i in range(parameters))
    return (
        f"module {{\n  tt.func public @k({names}, %n: i32 loc(#loc)) attributes"
        f" {{noinline = false}} {{\n{body}\n    tt.return loc(#loc)\n  }} loc(#loc)\n{more}}} loc(#loc)\n"  # noqa: E501
    )


LOAD = f"%v = tt.load %p0 : {P} loc(#loc)\n"
# The body, and of p0, p1, p2 the letters of: reads, writes, updates, reads first, ? not followed.
BODIES = {
    "load and store": (LOAD + f"tt.store %p1, %v : {P} loc(#loc)", "rf w -"),
    "atomic": (
        LOAD + f"%o = tt.atomic_rmw fadd, acq_rel, gpu, %p1, %v, %t : ({P}, f32, i1) -> f32",
        "rf wuf -",
    ),
    "compare and swap": (
        LOAD + f"%o = tt.atomic_cas acq_rel, gpu, %p2, %v, %v : ({P}, f32, f32) -> f32",
        "rf - wuf",
    ),
    "an atomic after a store": (
        f"tt.store %p1, %v : {P}\n"
        f"%o = tt.atomic_rmw fadd, acq_rel, gpu, %p1, %v, %t : ({P}, f32, i1) -> f32",
        "- wuf -",
    ),
    "its own results": (
        LOAD + f"tt.store %p1, %v : {P}\n%w = tt.load %p1 : {P}\ntt.store %p2, %w : {P}",
        "rf rw w",
    ),
    "a branch that writes": (
        f"scf.if %t {{\n  tt.store %p1, %x : {P}\n}}\n%v = tt.load %p1 : {P}\n"
        f"tt.store %p1, %v : {P}",
        "- rwf -",
    ),
    "both branches write": (
        f"scf.if %t {{\n  tt.store %p1, %x : {P}\n}} else {{\n  tt.store %p1, %y : {P}\n}}\n"
        f"%v = tt.load %p1 : {P}\ntt.store %p2, %v : {P}",
        "- rw w",
    ),
    "one of two branches writes": (
        f"%a = scf.if %t -> ({P}) {{\n  tt.store %p1, %x : {P}\n  scf.yield %p1 : {P}\n}} else {{\n"
        f"  scf.yield %p1 : {P}\n}}\n%v = tt.load %a : {P}\ntt.store %p2, %v : {P}",
        "- rwf w",
    ),
    "a branch reads what it wrote": (
        f"scf.if %t {{\n  tt.store %p1, %x : {P}\n  %v = tt.load %p1 : {P}\n"
        f"  tt.store %p2, %v : {P}\n}}",
        "- rw w",
    ),
    "a loop writes, the next one reads": (
        f"scf.for %i = %l to %u step %s  : i32 {{\n  tt.store %p1, %x : {P}\n}}\n"
        f"scf.for %i = %l to %u step %s  : i32 {{\n  %v = tt.load %p1 : {P}\n"
        f"  tt.store %p2, %v : {P}\n}}",
        "- rw w",
    ),
    "a loop reads before it writes": (
        f"scf.for %i = %l to %u step %s  : i32 {{\n  %v = tt.load %p1 : {P}\n"
        f"  tt.store %p1, %v : {P}\n}}",
        "- rwf -",
    ),
    "one of two pointers is written": (
        f"%a = arith.select %t, %p1, %p2 : {P}\ntt.store %a, %x : {P}\n%v = tt.load %p1 : {P}",
        "- rwf w",
    ),
    "blocks that join": (
        f"cf.cond_br %t, ^bb1, ^bb2\n^bb1:  // pred: ^bb0\ntt.store %p1, %x : {P}\ncf.br ^bb2\n"
        f"^bb2:  // 2 preds: ^bb0, ^bb1\n%v = tt.load %p1 : {P}\ntt.store %p2, %v : {P}",
        "- rwf w",
    ),
    "blocks that all write": (
        f"cf.cond_br %t, ^bb1, ^bb2\n^bb1:  // pred: ^bb0\ntt.store %p1, %x : {P}\n"
        f"cf.br ^bb3(%p1 : {P})\n^bb2:  // pred: ^bb0\ntt.store %p1, %y : {P}\n"
        f"cf.br ^bb3(%p1 : {P})\n"
        f"^bb3(%a: {P}):\n%v = tt.load %a : {P}\ntt.store %p2, %v : {P}",
        "- rw w",
    ),
    "blocks that loop": (
        f"tt.store %p1, %x : {P}\ncf.br ^bb1\n^bb1:  // 2 preds: ^bb0, ^bb1\n"
        f"%v = tt.load %p1 : {P}\n%w = tt.load %p2 : {P}\ntt.store %p2, %w : {P}\n"
        "cf.cond_br %t, ^bb1, ^bb2\n^bb2:",
        "- rw rwf",
    ),
    "addresses": (
        LOAD + f"%a = tt.splat %p1 : {P} -> tensor<8x{P}>\n"
        f"%b = tt.addptr %a, %r : tensor<8x{P}>, tensor<8xi32>\n"
        f"%c = tt.bitcast %b : tensor<8x{P}> -> tensor<8x!tt.ptr<i32>>\n"
        "%d = tt.broadcast %c : tensor<8x!tt.ptr<i32>> -> tensor<8x!tt.ptr<i32>>\n"
        "tt.store %d, %v : tensor<8x!tt.ptr<i32>>",
        "rf w -",
    ),
    "select": (
        LOAD + f"%a = arith.select %t, %p1, %p2 : {P}\ntt.store %a, %v : {P}",
        "rf w w",
    ),
    "if": (
        LOAD + f"%a = scf.if %t -> ({P}) {{\n  scf.yield %p1 : {P}\n}} else {{\n"
        f"  scf.yield %p2 : {P}\n}}\ntt.store %a, %v : {P}",
        "rf w w",
    ),
    "a loop keeps its pointers apart": (
        f"{LOOP} {{\n"
        f"  %v = tt.load %a : {P}\n  tt.store %b, %v : {P}\n"
        f"  %c = tt.addptr %a, %n : {P}, i32\n  %d = tt.addptr %b, %n : {P}, i32\n"
        f"  scf.yield %c, %d : {P}, {P}\n}} {{tt.num_stages = 2 : i32}}\n"
        f"tt.store %r#1, %x : {P}",
        "rf w -",
    ),
    "a loop that swaps its pointers": (
        f"{LOOP} {{\n"
        f"  %v = tt.load %a : {P}\n  tt.store %b, %v : {P}\n  scf.yield %b, %a : {P}, {P}\n}}",
        "rwf rwf -",
    ),
    "while": (
        f"%r:2 = scf.while (%a = %p0, %b = %p1) : ({P}, {P}) -> ({P}, {P}) {{\n"
        f"  scf.condition(%t) %a, %b : {P}, {P}\n}} do {{\n^bb0(%c: {P}, %d: {P}):\n"
        f"  %v = tt.load %c : {P}\n  tt.store %d, %v : {P}\n  scf.yield %c, %d : {P}, {P}\n}}",
        "rf w -",
    ),
    "branches": (
        f"cf.cond_br %t, ^bb1(%p0 : {P}), ^bb2(%p1 : {P})\n^bb1(%a: {P}):  // pred: ^bb0\n"
        f"%v = tt.load %a : {P}\ncf.br ^bb2(%p2 : {P})\n^bb2(%b: {P}):\ntt.store %b, %x : {P}",
        "rf w w",
    ),
    "descriptors": (
        "%d = tt.make_tensor_descriptor %p0, [%n, %n], [%s, %s] : <f32>, <tensor<8x8xf32>>\n"
        "%e = tt.make_tensor_descriptor %p1, [%n, %n], [%s, %s] : !tt.ptr<f32>,"
        " !tt.tensordesc<8x8xf32>\n"
        "%v = tt.descriptor_load %d[%n, %n] : !tt.tensordesc<8x8xf32> -> tensor<8x8xf32>\n"
        "tt.descriptor_store %e[%n, %n], %v : !tt.tensordesc<8x8xf32>, tensor<8x8xf32>\n"
        "%f = tt.make_tensor_descriptor %p2, [%n], [%s] : !tt.ptr<f32>, !tt.tensordesc<8xf32>\n"
        "tt.descriptor_reduce add, %f[%n], %v : !tt.tensordesc<8xf32>, tensor<8xf32>",
        "rf w wuf",
    ),
    "a reduction's region": (
        LOAD + '%s = "tt.reduce"(%v) <{axis = 0 : i32}> ({\n^bb0(%a: f32, %b: f32):\n'
        "  %m = arith.maxnumf %a, %b : f32\n  tt.reduce.return %m : f32\n}) : (tensor<8xf32>) -> f32\n"  # noqa: E501
        f"tt.store %p1, %s : {P}",
        "rf w -",
    ),
    "inline assembly": (
        '%o = tt.elementwise_inline_asm "st.global.f32 [$1], %r2; // {" {constraints = "=r,l"} %p1'
        f" : {P} -> i32",
        "- ? -",
    ),
    "an address from memory": (
        f"%a = tt.load %p0 : !tt.ptr<i64>\n%b = tt.int_to_ptr %a : i64 -> {P}\ntt.store %b, %x : {P}",  # noqa: E501
        "rf? ? ?",
    ),
    "an address that is stored": (
        f"%a = tt.ptr_to_int %p1 : {P} -> i64\ntt.store %p0, %a : !tt.ptr<i64>", "w ? -",
    ),
}  # fmt: skip


def shown(text: str) -> list[str]:
    found = accesses(text)
    assert found is not None
    letters = [
        "r" * a.reads
        + "w" * a.writes
        + "u" * a.updates
        + "f" * a.reads_first
        + "?" * (not a.followed)
        for a in found
    ]
    return [one or "-" for one in letters]


@pytest.mark.parametrize("name", BODIES)
def test_pointers_are_followed(name: str) -> None:
    body, wanted = BODIES[name]
    assert shown(module(body)) == wanted.split()


def test_calls_keep_their_arguments_apart() -> None:
    more = (
        f'  tt.func private @"h__(1)"(%a: {P}, %b: {P}) -> {P} attributes {{noinline = true}} {{\n'
        f"    %v = tt.load %a : {P}\n    tt.store %b, %v : {P}\n    tt.return %b : {P}\n  }}\n"
    )
    body = (
        f'%a = tt.call @"h__(1)"(%p0, %p1) : ({P}, {P}) -> {P}\n'
        f'%b = tt.call @"h__(1)"(%a, %p2) : ({P}, {P}) -> {P}'
    )
    assert shown(module(body, more=more)) == ["rf", "rw", "w"]


def test_a_call_that_writes_on_one_path_is_no_write_before_a_load() -> None:
    more = (
        f'  tt.func private @"h__(1)"(%a: {P}, %t: i1) attributes {{noinline = true}} {{\n'
        f"    cf.cond_br %t, ^bb1, ^bb2\n  ^bb1:\n    tt.return\n  ^bb2:\n"
        f"    tt.store %a, %v : {P}\n    tt.return\n  }}\n"
        f'  tt.func private @"g__(1)"(%a: {P}) attributes {{noinline = true}} {{\n'
        f"    tt.store %a, %v : {P}\n    tt.return\n  }}\n"
    )
    body = (
        f'tt.call @"h__(1)"(%p0, %t) : ({P}, i1) -> ()\n%v = tt.load %p0 : {P}\n'
        f'tt.call @"g__(1)"(%p1) : ({P}) -> ()\n%w = tt.load %p1 : {P}'
    )
    assert shown(module(body, more=more)) == ["rwf", "rw", "-"]


def test_calls_in_calls_are_visited_once() -> None:
    """Each of 30 functions calls the next twice: a billion paths."""
    functions = [
        f"  tt.func private @f{i}(%a: {P}) {{\n    tt.call @f{i + 1}(%a) : ({P}) -> ()\n"
        f"    tt.call @f{i + 1}(%a) : ({P}) -> ()\n    tt.return\n  }}\n"
        for i in range(30)
    ]
    functions.append(f"  tt.func private @f30(%a: {P}) {{\n    tt.store %a, %v : {P}\n  }}\n")
    assert shown(module(f"tt.call @f0(%p0) : ({P}) -> ()", more="".join(functions)))[0] == "w"


def test_text_that_is_not_ir_has_no_accesses() -> None:
    assert accesses("") is None
    assert (
        accesses("tt.func public @k(%a: !tt.ptr<f32>) {\n tt.call @none(%a) : () -> ()\n}") is None
    )
    body = f"tt.func public @k(%a: {P}) {{\n %r = scf.for %i = %l to %u step %s {{\n scf.yield %a, %a\n }}\n}}"  # noqa: E501
    assert accesses(body) is None


@pytest.mark.parametrize("version", ["3.4.0", "3.6.0", "3.9.0"])
def test_cache_folders_tell_their_accesses(version: str) -> None:
    kernels = {k.name: k for k in tct.read(DATA / f"cache_{version}_sm_90a")}
    read, write = frozenset({"read", "first"}), frozenset({"write"})
    assert [p.access for p in kernels["add"].parameters] == [read, read, write, None]
    assert [p.access for p in kernels["copy_tile"].parameters] == [read, write, None]
    assert kernels["add"].numbers == {0, 256}  # 16, of which the arguments are multiples, is none
    assert numbers("tensor<32x64xf16> %c77 : i8") == {32, 64}


def add(folder: Any, **more: Any) -> torch_cubin.Op:
    tensors = more.pop("tensors", {})
    return tct.define_op(
        **{
            "schema": f"test_accesses_{next(_count)}::add(Tensor x, Tensor y) -> Tensor",
            "kernel": folder,
            "tensors": {"x": "float32[n]", "y": "float32[n]", "out": "float32[n]", **tensors},
            "args": ("x", "y", "out", lambda n: n),
            "grid": lambda n, B: torch_cubin.cdiv(n, B),
            "folded": {"B": 256},
            **more,
        }
    )


FOLDER = DATA / "cache_3.6.0_sm_90a" / "add.cubin"


def changed(folder: Path, pattern: str, by: str) -> Path:
    """A copy of the folder whose IR is another: what it says decides, not the binary."""
    for file in FOLDER.parent.glob("add.*"):
        shutil.copy(file, folder / file.name)
    ir = folder / "add.ttir"
    text, count = re.subn(pattern, by, ir.read_text())
    assert count == 1
    ir.write_text(text)
    return folder / "add.cubin"


ATOMIC = r"tt\.store (%\S+), (%\S+), (%\S+) :.*"
ADDED = r"%77 = tt.atomic_rmw fadd, acq_rel, gpu, \1, \2, \3 : (t) -> t loc(#loc)"


def test_an_unchanged_kernel_is_accepted() -> None:
    add(FOLDER)


def test_a_fresh_output_that_is_updated_is_refused_unless_it_is_zeroed(tmp_path: Path) -> None:
    folder = changed(tmp_path, ATOMIC, ADDED)
    with pytest.raises(errors.InputError, match="adds to it atomically before") as caught:
        add(folder)
    assert "zeroed" in str(caught.value)
    zeroed = (
        "float32[n] zeroed",
        lambda n: torch_cubin.empty((n,), "float32", zeroed=True),
        torch_cubin.like("x", zeroed=True),
    )
    for pattern in zeroed:
        op = add(folder, tensors={"out": pattern})
        assert op.contract["tensors"]["out"]["zeroed"] is True
    with pytest.raises(errors.InputError, match="tensors.'out'.*has a wrong zeroed"):
        add(folder, tensors={"out": torch_cubin.like("x", zeroed="yes")})
    with pytest.raises(errors.InputError, match="adds to it atomically before"):
        add(folder, tensors={"out": torch_cubin.like("x")})


@pytest.mark.parametrize("field", ["reset_to_zero", "restore_value"])
def test_memory_prepared_by_an_autotuner_counts_as_read_first(field: str) -> None:
    """The IR has a plain store to `out` alone: that it covers `out` nobody can tell."""
    (kernel,) = tct.read(FOLDER)
    names = {p.name: p for p in kernel.parameters}
    autotuner = types.SimpleNamespace(
        **{"reset_to_zero": [], "restore_value": [], field: ["out_ptr"]},
        fn=types.SimpleNamespace(params=[]),
    )
    for known in (names["out_ptr"].access, None):  # followed, and not
        parameters = [
            dataclasses.replace(p, access=known) if p.name == "out_ptr" else p
            for p in kernel.parameters
        ]
        made = dataclasses.replace(kernel, parameters=tuple(parameters))
        (made,) = live.with_decorators([made], autotuner)
        with pytest.raises(errors.InputError, match=f"'out'.*fresh memory.*as {field}"):
            add(made)
        op = add(made, tensors={"out": "float32[n] zeroed"})
        assert op.contract["tensors"]["out"]["zeroed"] is True
        schema = f"test_accesses_{next(_count)}::add(Tensor(a!) x, Tensor y, Tensor out) -> ()"
        with pytest.raises(errors.InputError, match=f"'out'.*is written by the kernel, as {field}"):
            add(made, schema=schema)
        add(
            made,
            schema=schema.replace("(a!) x, Tensor y, Tensor out", " x, Tensor y, Tensor(a!) out"),
        )


def test_a_folder_with_its_source_names_the_constants_that_the_kernel_uses(tmp_path: Path) -> None:
    folder = changed(tmp_path, r"arith\.constant 256", "arith.constant 256")
    source = folder.with_suffix(".ttir").read_text()
    # A constant that folds into others in the IR, and one of the IR's that follows from it.
    folder.with_suffix(".source").write_text(source.replace("256", "64"))
    add(folder, folded={"B": 64})
    with pytest.raises(errors.InputError, match="folded 'B'.*compiled with"):
        add(folder, folded={"B": 256})


def test_a_fresh_output_that_is_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.InputError, match="'out'.*reads it before it writes"):
        add(FOLDER, args=("out", "y", "out", lambda n: n))


def test_an_unchanged_argument_that_is_written_is_refused() -> None:
    with pytest.raises(errors.InputError, match=r"'y'.*is written by the kernel"):
        add(FOLDER, args=("x", "x", "y", lambda n: n))


def test_an_argument_that_is_never_written_warns_and_an_output_is_refused(tmp_path: Path) -> None:
    schema = f"test_accesses_{next(_count)}::add(Tensor x, Tensor(a!) y) -> Tensor"
    with pytest.warns(UserWarning, match="changes 'y', and the kernel never writes"):
        add(FOLDER, schema=schema)
    folder = changed(tmp_path, r"tt\.store.*", "")
    with pytest.raises(errors.InputError, match="output 'out'.*is never written"):
        add(folder)


def test_written_kernels_keep_their_accesses(tmp_path: Path) -> None:
    (kernel,) = tct.read(FOLDER)
    tct.write(tmp_path / "kept", [kernel])
    (again,) = tct.read(tmp_path / "kept")
    assert [p.access for p in again.parameters] == [p.access for p in kernel.parameters]


@pytest.mark.parametrize("block", [4096, 1024, 512, 128, 16])
def test_a_constant_of_another_kernel_is_refused(block: int) -> None:
    with pytest.raises(errors.InputError, match="folded 'B'.*compiled with"):
        add(FOLDER, folded={"B": block})


def test_a_grid_of_another_constant_is_refused(tmp_path: Path) -> None:
    """4096 stands in the IR, too, and a program computes 256 elements: the rest of 4096 would be
    what memory held."""
    folder = changed(tmp_path, r"(%1 = arith\.muli)", r"%c = arith.constant 4096 : i32\n\1")
    with pytest.raises(errors.InputError, match="folded 'B'.*at most 256, got 4096"):
        add(folder, folded={"B": 4096})
    with pytest.raises(errors.InputError, match="folded 'B'.*at most 256, got 4096"):
        add(folder, folded={"B": 4096}, grid=(lambda n, B: n // B, 1))
    add(folder, folded={"B": 256})
    add(folder, folded={"B": 4096}, grid=lambda n: torch_cubin.cdiv(n, 256))


@pytest.mark.parametrize(
    ("body", "steps"),
    [
        ("%p = tt.get_program_id x : i32\n%q = arith.muli %p, %c64 : i32", [64, None, None]),
        ("%p = tt.get_program_id y : i32\n%q = arith.muli %c64, %p : i32", [None, 64, None]),
        (
            "%p = tt.get_program_id x : i32\n%w = arith.extsi %p : i32 to i64\n"
            "%q = arith.muli %w, %c8 : i64\n%r = arith.muli %p, %c64 : i32",
            [64, None, None],
        ),
        ("%p = tt.get_program_id x : i32\n%q = arith.muli %p, %n : i32", [None] * 3),
        ("%p = tt.get_program_id x : i32\n%q = arith.divsi %p, %c64 : i32", [None] * 3),
        (
            "%p = tt.get_program_id x : i32\n%q = arith.muli %p, %c64 : i32\n"
            "%m = tt.get_num_programs x : i32",
            [None] * 3,
        ),
    ],
)
def test_how_many_elements_a_program_computes(body: str, steps: list[int | None]) -> None:
    before = "%c64 = arith.constant 64 : i32 loc(#loc)\n%c8 = arith.constant 8 : i64\n"
    assert program_steps(module(before + body)) == steps


def test_the_error_names_a_missing_constant() -> None:
    with pytest.raises(errors.InputError, match=r"folded=dict\(B=VALUE\)") as caught:
        add(FOLDER, folded={})
    assert "none of the op's" not in str(caught.value)


def test_the_stride_of_an_output_is_known_by_its_pattern() -> None:
    op = add(
        FOLDER,
        tensors={"x": "float32[m, n]", "y": "float32[m, n]", "out": "float32[m, n]"},
        args=("x", "y", "out", lambda out: out.stride(0)),
    )
    (kernel,) = op.contract["kernels"]
    assert {"argument": "n", "value": ["max", ["number", "n"], 1], "multiple_of": 16} in kernel[
        "requires"
    ]
    with pytest.raises(errors.InputError, match="its pattern does not tell"):
        add(
            FOLDER,
            tensors={"x": "float32[*s]", "y": "float32[*s]", "out": "float32[*s]"},
            args=("x", "y", "out", lambda out: out.stride(0)), grid=1, folded={},
        )  # fmt: skip
