"""Tables in C text: everything that docs/producers.md says is read, and that is refused."""

from __future__ import annotations

import re

import pytest

from torch_cubin import errors
from torch_cubin._declared import kernel_table

FIELDS = "const char* name; int a = 1; int b = 2;"


def table(row: str, fields: str = FIELDS, before: str = "", after: str = "") -> str:
    return f"\n{before}\nstruct K {{ {fields} }};\nstatic const K t[] = {{ {row} }}{after};\n"


READ = {
    "by position": (table('{"k", 3, 4}'), {"name": "k", "a": 3, "b": 4}),
    "by name": (table('{.name = "k", .b = 4}'), {"name": "k", "b": 4}),
    "numbers": (table('{"k", 0x1F, -012}'), {"name": "k", "a": 31, "b": -10}),
    "an enumerator": (table('{"k", E::kTwo, 4}'), {"name": "k", "a": "kTwo", "b": 4}),
    "an expression": (table('{"k", 1 << 4, f(2, 3)}'), {"name": "k", "a": "1 < < 4",
                                                       "b": "f ( 2 , 3 )"}),
    "a whole row of unknown names": (table("{kName, A, B}"), {"name": "kName", "a": "A", "b": "B"}),
    "a short row of literals": (table('{"k", 3}'), {"name": "k", "a": 3}),
    "a short row of enumerators": (
        table('{"k", kTwo}', before="enum E { kOne, kTwo = 2 };"), {"name": "k", "a": "kTwo"},
    ),
    "a short row of constants": (
        table("{name, N}", before='extern const char name[];\nconstexpr int N = 4;'),
        {"name": "name", "a": "N"},
    ),
    "a short row of plain macros": (
        table('{"k", M}', before="#define N 4\n#define M (N + 1)"), {"name": "k", "a": "M"},
    ),
    "a comment that goes on": (
        table('{"k", // 7, \\\n 8,\n 3, 4}'), {"name": "k", "a": 3, "b": 4},
    ),
    "a second table of a declaration": (
        table('{"j", 1, 2}', after=', u[] = {{"k", 3, 4}}'), {"name": "k", "a": 3, "b": 4},
    ),
    "an include of declarations": (
        table('{"k", 3, 4}', before="#include <stdint.h>\n"), {"name": "k", "a": 3, "b": 4},
    ),
    "types of several words": (
        table('{"k", 3, 4}', "const char* __restrict__ name; unsigned long long a; const ns::T b;"),
        {"name": "k", "a": 3, "b": 4},
    ),
    "#elifdef": (
        table('{"k", 3, 4}\n', before="#if 0\n#elifdef X\n#else\n#endif"),
        {"name": "k", "a": 3, "b": 4},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_is_read(name: str) -> None:
    text, row = READ[name]
    assert kernel_table.read(text).rows[-1] == row


ROW = '{"k", 3}'
# The compiler's view is noted where it is not obvious.
REFUSED = {
    "a base": (table(ROW, FIELDS).replace("struct K {", "struct K : B {"), "with a base"),
    "a method": (table(ROW, f"int f(); {FIELDS}"), "no plain field"),
    "a pointer to a function": (table(ROW, f"int (*f)(int); {FIELDS}"), "no plain field"),
    "a template's field": (table(ROW, f"std::array<int, 2> x; {FIELDS}"), "no plain field"),
    "a bit field": (table(ROW, f"int x : 3; {FIELDS}"), "no plain field"),
    "an unnamed struct": (table(ROW, f"struct {{ int x, y; }}; {FIELDS}"), "no plain field"),
    "a field twice": (table(ROW, f"int a; {FIELDS}"), "with a field twice"),
    "a field under an #if": (table(ROW, f"\n#ifdef X\nint x;\n#endif\n{FIELDS}"), "no plain field"),
    "an include of fields": (table(ROW, f'\n#include "fields.inc"\n{FIELDS}'), "no plain field"),
    "a macro of fields": (
        table(ROW, f"MORE {FIELDS}", before="#define MORE int x;"), "no plain field",
    ),
    "a macro of fields from elsewhere": (table(ROW, "MORE int a = 0; int b;"), "no plain field"),
    "a macro of fields beside a type": (table(ROW, "MORE T a = 0; int b = 1;"), "no plain field"),
    "a macro that is a field's name": (
        table(ROW, before="#define a x, y"), "no plain field",
    ),
    "a template": (
        "template <int N> struct K { const char* name; int a = 1; };\n"
        'template <> struct K<2> { int z; const char* name; };\nK<2> t[] = {{1, "k"}};\n',
        "of the template",
    ),
    "a struct with a macro's name": (table(ROW, before="#define K L"), "name is a macro"),
    "two structs": (table(ROW, before="struct K { int z; };"), "two structs"),
    "arrays of arrays": (table(ROW).replace("t[]", "t[][2]"), "array of arrays"),
    "an array without braces": (table('{"k", 1, 2, 3}', f"{FIELDS} int c[2];"), "not in braces"),
    "a vector without braces": (table('{"k", 1, 2, 3}', f"{FIELDS} dim3 c;"), "not in braces"),
    "a struct without braces": (
        table('{"k", 1, 2, 3}', f"{FIELDS} S c;", before="struct S { int a; };"), "not in braces",
    ),
    "too many values": (table('{"k", 1, 2, 3}'), "does not fit"),
    "too few values": (table('{"k"}', "const char* name; int a;"), "does not fit"),
    "a field that is none": (table('{.name = "k", .z = 1}'), "does not fit"),
    # MODE may be `1, 2`: then 3 is b.
    "a short row with a name from elsewhere": (table('{"k", MODE}'), "may be a macro"),
    "a short row with a call": (table('{"k", PAIR(1)}'), "may be a macro"),
    "a short row with a macro of a macro": (
        table('{"k", M}', before="#define M N"), "may be a macro",
    ),
    "a macro with a comma": (table('{"k", M, 4}', before="#define M 1, 2"), "cannot be read"),
    "a macro with a comma on its next line": (
        table('{"k", M, 4}', before="#define M \\\n 1, 2"), "cannot be read",
    ),
    "a condition in a row": (table('{"k",\n#ifdef X\n1,\n#endif\n 2, 3}'), "cannot be read"),
    "an include in a row": (table('{"k",\n#include "row.inc"\n 3}'), "cannot be read"),
    "an include of rows": (table('\n#include "rows.inc"\n{"k", 3, 4}'), "cannot be read"),
    "a less-than": (table('{"k", f<1, 2>(3)}'), "cannot be read"),
    "a designated place": (table('[0] = {"k", 3, 4}'), "cannot be read"),
    "a field of a field": (table('{.name.x = "k"}'), "cannot be read"),
    "a field by the old notation": (table('{name: "k", 3, 4}'), "cannot be read"),
    "positions beside names": (table('{"k", .a = 3}'), "some of its fields"),
    "a name twice": (table('{.name = "k", .name = "l"}'), "one twice"),
    "a row that is a macro": (table('ROW("k", 3, 4)'), "does not fit|cannot be read"),
    "rows without a comma": (table('{"k", 3, 4} {"l", 3, 4}'), "without a comma"),
    "a raw string": (table('{R"x(k", "l)x", 3}'), "raw string"),
    "a raw wide string": (table('{LR"(k)", 3, 4}'), "raw string"),
    "a brace that does not end": (table('{"k", 3, 4'), "not closed|do not end|comma"),
    "a string that does not end": (table('{"k, 3, 4}'), "no C|comma|not closed|do not end"),
    "an #if that does not end": (table(ROW, before="#if X"), "#if"),
    "an #else alone": (table(ROW, before="#else"), "#else"),
    "no C": (table(ROW, before="int x = @;"), "no C"),
    "no table": ("\nstruct K { int a; };\n", "no array of structs"),
    "a table of pointers": (table(ROW).replace("K t[]", "K* t[]"), "no array of structs"),
    "a table of a struct from elsewhere": ("\nK t[] = {{1}};\n", "no array of structs"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused(name: str) -> None:
    text, problem = REFUSED[name]
    with pytest.raises(errors.InputError) as caught:
        kernel_table.read(text)
    assert re.search(problem, str(caught.value)), caught.value
