"""What attention is made of: the kinds of its kernels, and how many files an option or a tile
touches. `pytest -s` prints the files.
"""

from __future__ import annotations

import functools
import io
import re
import tokenize
from pathlib import Path

import layers  # finds the modules of csrc/kernels/build
import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (".h", ".cpp", ".cu", ".cuh", ".py")
# The steps of a call: those that attend, and those before and after them.
KINDS = {
    *("forward", "decode", "backward", "gradient"),
    *("order", "mask", "transpose", "delta", "convert", "combine", "append", "gather"),
}
# These pass options on by the names that another library has for them.
DOORS = (
    *("torch_cubin/huggingface.py", "torch_cubin/_hub_attention.py", "csrc/pytorch/aten_kernels.h"),
    "csrc/ops/attention/api/aten_flash_attention",
)


@functools.cache
def attention_kernels() -> list:
    tables = layers.kernel_table.read_tables(ROOT / "csrc" / "kernels")
    return [kernel for kernel in tables if kernel.fields["family"] == "attention"]


def test_a_kind_is_a_step_of_a_call() -> None:
    assert {kernel.fields["kind"] for kernel in attention_kernels()} == KINDS


def code_of(path: Path) -> str:
    """A source without comments, docstrings and kernel tables."""
    text = path.read_text()
    if path.suffix != ".py":
        text = layers.kernel_table.TABLE.sub("", text)
        return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return " ".join(
        token.string
        for token in tokens
        if token.type != tokenize.COMMENT and not token.string.startswith('"""')
    )


@functools.cache
def all_code() -> dict[str, str]:
    found = (path for top in ("csrc", "torch_cubin") for path in sorted((ROOT / top).rglob("*")))
    paths = [path for path in found if path.suffix in SOURCES and path.is_file()]
    return {str(path.relative_to(ROOT)): code_of(path) for path in paths}


def naming(word: str) -> set[str]:
    """The sources whose code names it, as the member of a class too (`softcap_`)."""
    pattern = re.compile(rf"\b{word}_?\b")
    return {
        name
        for name, code in all_code().items()
        if pattern.search(code) and not name.startswith(DOORS)
    }


# A number that changes scores, and a tensor that kernels read.
@pytest.mark.parametrize(("option", "most"), [("softcap", 10), ("alibi_slopes", 6)])
def test_the_documented_files_are_those_that_an_option_touches(option: str, most: int) -> None:
    """A new option is work in the files that docs/architecture.md lists, and in no others."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    (walk,) = re.findall(r"\n\*\*An option of attention\*\*(.*?)\n\*\*An op\*\*", page, re.S)
    (number,) = re.findall(rf"`{option}` (?:is named )?by (\d+)\b", walk)
    files = naming(option)
    print(option, len(files), *sorted(files), sep="\n  ")
    assert files - set(re.findall(r"`([\w/.]+)`", walk)) == set()
    assert len(files) == int(number) <= most


def test_options_per_head_are_the_same_in_cpp_and_python() -> None:
    code = all_code()
    (listed,) = re.findall(
        r"#define TC_PER_HEAD_OPTIONS\(X\) (.*)", code["csrc/ops/attention/problem/arguments.h"]
    )
    module = (ROOT / "torch_cubin" / "_ops" / "attention_checks.py").read_text()
    (names,) = re.findall(r"^PER_HEAD_OPTIONS = \((.*)\)", module, re.M)
    assert re.findall(r"X\((\w+)", listed) == re.findall(r'"(\w+)"', names) != []


def test_no_source_names_a_tile() -> None:
    """So a new one is a row of the table at the end of its source."""
    tiles = [kernel.fields["tile"] for kernel in attention_kernels()]
    names = {"x".join(map(str, tile)) for tile in tiles if tile[2] > 1}
    assert len(names) > 30
    code = all_code()
    del code["csrc/ops/matmul/cost_corrections.h"]  # factors of products' tiles, some as large
    assert not [name for name, text in code.items() if any(x in text for x in names)]


def units_of_host_code() -> dict[str, set[str]]:
    """What each unit of csrc/ops/attention, a header with its source, includes of the others."""
    root = ROOT / "csrc" / "ops" / "attention"
    found: dict[str, set[str]] = {}
    for path in sorted(root.rglob("*.[hc]*")):
        own = path.relative_to(root).with_suffix("").as_posix()
        includes = re.findall(r'^#include "ops/attention/(.*?)\.h"', path.read_text(), re.M)
        found.setdefault(own, set()).update(name for name in includes if name != own)
    return found


def test_the_host_code_has_few_units_on_few_levels() -> None:
    """The level of a unit is the length of the longest chain of includes below it. More of either
    is no error, but wants a reason: raise the numbers then."""
    units = units_of_host_code()

    @functools.cache
    def level(unit: str) -> int:
        return 1 + max(map(level, units[unit]), default=0)

    levels = [sorted(unit for unit in units if level(unit) == i) for i in range(1, 13)]
    print(*levels, sep="\n")
    assert len(units) <= 22
    assert max(map(level, units)) <= 5
