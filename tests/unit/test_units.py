"""A folder of csrc/, or a family of ops with its folders, is compiled as one file (write_units in
setup.py): a name local to one .cpp must not occur in another .cpp, nor in a header, which it would
silently hide from the next files.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import layers

CSRC = Path(__file__).resolve().parents[2] / "csrc"
# As clang-format writes them: what a namespace holds begins in the first column.
NAME = re.compile(
    r"^(?:template <[^>]*>\s+)?(?:\[\[\w+(?:::\w+)?\]\] )*"
    r"(?:(?:struct|class|enum class|enum|union) (?P<type>\w+)(?= [{=:]|;|$)"
    r"|(?!using|return|namespace|struct|class|enum|friend|typedef)[\w:][\w:<>,*& ]*?[ *&]"
    r"(?P<other>\w+)(?P<call>\()?(?:[\[{;]| =|(?<=\()))",
    re.MULTILINE,
)


def names(code: str) -> set[str]:
    return {match["type"] or match["other"] for match in NAME.finditer(code)}


def local_names(text: str) -> set[str]:
    """Of the unnamed namespaces."""
    parts = re.findall(r"^namespace \{$(.*?)^\}  // namespace$", text, re.M | re.S)
    return names(code_of("\n".join(parts)))


def code_of(text: str) -> str:
    return layers.without_strings(layers.without_comments(text))


def headers_of(paths: list[Path]) -> set[Path]:
    """The headers that files include, and those that these include."""
    found: set[Path] = set()
    left = list(paths)
    while left:
        included = re.findall(r'^#include "(.*?)"', left.pop().read_text(), re.M)
        new = {CSRC / name for name in included if (CSRC / name).is_file()} - found
        found |= new
        left += new
    return found


def test_headers_are_followed() -> None:
    found = headers_of([CSRC / "ops" / "matmul" / "sm90_configs.cpp"])
    names = {str(path.relative_to(CSRC)) for path in found}
    assert {"ops/matmul/cost.h", "driver/driver.h"} <= names
    assert "ops/rows/rows.h" not in names


def test_names_are_read() -> None:
    code = (
        "namespace {\nconstexpr int kA = 1;\nstruct B {\n  int no;\n};\n"
        "[[noreturn]] void c(int x) {}\n"
        "template <class T>\nstd::vector<T> d(T t);\n"
        "const char* e[] = {};\nenum F { kG };\n"
        "std::atomic<int> g;\n}  // namespace\nint not_local;\n"
    )
    assert local_names(code) == {"kA", "B", "c", "d", "e", "F", "g"}


def test_names_of_one_file_are_its_own() -> None:
    headers = defaultdict(list)
    for path in CSRC.rglob("*.h"):
        for name in names(code_of(path.read_text())):
            headers[name].append(path)
    found = []
    units = defaultdict(list)
    for path in sorted(CSRC.rglob("*.cpp")):
        units[path.relative_to(CSRC).parts[:-1][:2]].append(path)
    for paths in units.values():
        seen: dict[str, Path] = {}
        seen_headers = headers_of(paths)
        for path in paths:
            for name in sorted(local_names(path.read_text())):
                other = seen.setdefault(name, path)
                if other != path:
                    found.append(f"{path.name}: '{name}' is in {other.name}, too")
                for header in seen_headers.intersection(headers[name]) - {path.with_suffix(".h")}:
                    found.append(f"{path.name}: '{name}' hides that of {header.name}")
    assert found == []


def test_a_type_is_defined_in_one_header() -> None:
    """Two of one name in the library are one to the linker, whichever layers they belong to."""
    defined = re.compile(r"^(?:struct|class|enum class) (\w+)(?: final)?(?: :[^;{]*)? \{", re.M)
    places = defaultdict(set)
    for path in CSRC.rglob("*.h"):
        if CSRC / "kernels" not in path.parents:
            for name in defined.findall(code_of(path.read_text())):
                places[name].add(str(path.relative_to(CSRC)))
    assert len(places) > 50
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
