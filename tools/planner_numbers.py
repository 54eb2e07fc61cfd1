"""Counts the numbers by which products' kernels are chosen.

    python tools/planner_numbers.py

Fitted numbers are the values of `Terms` (csrc/ops/matmul/cost.h) that no device reports, and any
other number in csrc/ops/matmul that has a decimal point or that a `double` starts with. So that
none hides as an integer, every integer there that is above 9, no power of two and no shift has to
be listed below, with its meaning. 0 and 1 are not counted. Counted apart are the correction table
of each GPU, and ratios that were measured for what a kernel does (`share(3, 4)`); costs of kernels
are data in their tables (csrc/kernels/README.md).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "csrc" / "ops" / "matmul"
DATA = FOLDER / "cost_corrections.h"
MOST_FITTED, MOST_RATIOS = 18, 15

NUMBER = re.compile(r"(?<![\w.])(\d[\d']*(?:\.\d*(?:[eE][-+]?\d+)?)?)[uUlLfF]*(?![\w.])")
STARTS_DOUBLE = re.compile(r"\b(?:double|float) [^;(){}]*= -?$")
INTEGERS = {
    ("backend.h", 10): "the least share of the memory's peak in a copying kernel's entry, inverted",
    ("backend.h", 96): "bytes of a plan's details",
    ("portable_configs.cpp", 12): "parts of K of float64, by their errors",
    ("problem.cpp", 30): "clusters of four blocks that run at a time",
    ("problem.cpp", 3712): "columns whose loads take longer than a chain of K",
    ("sm90_configs.h", 384): "threads of a block",
    ("sm90_skinny.cpp", 24): "rows of a tile, at least, of two parts of K",
    ("sm90_skinny.cpp", 31): "a hash",
    ("sm90_skinny.cpp", 40): "rows of a tile, at least",
    ("sm90_skinny.cpp", 113): "KiB of half a multiprocessor's shared memory",
    ("sm90_skinny.cpp", 192): "rows of a tile",
    ("sm90_stream.h", 10000): "polls of a counter",
}
RATIO = re.compile(r"\bshare\((\d+), (\d+)\)")
POWERS_OF_TWO = ("<< ", ">> ", "0x1p-")
SPLITS = re.compile(r"kSplits\[\] = \{[^}]*\}")  # the candidates for parts of K


def code(path: Path) -> str:
    text = re.sub(r"//[^\n]*|#include[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.S)
    return SPLITS.sub("", re.sub(r'"(?:\\.|[^"\\\n])*"', '""', text))


def numbers() -> Iterator[tuple[str, str, bool]]:
    """The file and text of each number, and whether it counts as fitted."""
    for path in sources():
        text = code(path)
        for match in NUMBER.finditer(text):
            number, before = match[1], text[: match.start()]
            value = float(number.replace("'", ""))
            starts_double = STARTS_DOUBLE.search(before) and text[match.end()] in ";,"
            if value not in (0, 1) and not before.endswith(POWERS_OF_TWO):
                yield path.name, number, bool("." in number or starts_double)


def fitted() -> list[str]:
    return [f"{file}: {number}" for file, number, is_fitted in numbers() if is_fitted]


def integers() -> set[tuple[str, int]]:
    whole = {(f, int(n.replace("'", ""))) for f, n, is_fitted in numbers() if not is_fitted}
    return {(file, value) for file, value in whole if value > 9 and value & (value - 1)}


def ratios() -> list[str]:
    found = [(path.name, match) for path in sources() for match in RATIO.finditer(code(path))]
    return [f"{file}: {match[1]}/{match[2]}" for file, match in found]


def sources() -> list[Path]:
    return [path for path in sorted(FOLDER.iterdir()) if path != DATA]


def main() -> int:
    numbers = fitted()
    print(f"{len(numbers)} fitted numbers, at most {MOST_FITTED}:", ", ".join(numbers))
    print(f"{len(ratios())} ratios, at most {MOST_RATIOS}:", ", ".join(ratios()))
    for where, number in sorted(integers()):
        print(f"  {where}: {number}, {INTEGERS.get((where, number), 'NOT LISTED')}")
    gpus = re.findall(r'^\{"([^"]+)"', DATA.read_text(), flags=re.M)
    for gpu in sorted(set(gpus)):
        print(f"  {gpu}: {gpus.count(gpu)} corrections")
    few = len(numbers) <= MOST_FITTED and len(ratios()) <= MOST_RATIOS
    return 0 if few and integers() == set(INTEGERS) else 1


if __name__ == "__main__":
    sys.exit(main())
