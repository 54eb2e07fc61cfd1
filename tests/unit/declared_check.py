"""Builds and drives tests/unit/declared_check.cpp: expressions and schemas of csrc/declared."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cubin_check
from programs import output_of

DECLARED = cubin_check.CSRC / "declared"


@functools.cache
def program() -> Path:
    sources = [*sorted(DECLARED.glob("expression*.cpp")), DECLARED / "schema.cpp"]
    sources += [DECLARED / "schema_parser.cpp", cubin_check.CSRC / "package" / "fields.cpp"]
    return cubin_check.build(Path(__file__).with_suffix(".cpp"), more=sources)


def run(kind: str, inputs: Sequence[Any]) -> list[dict[str, Any]]:
    """The program's answer to each input. `kind`: "expressions" or "schemas"."""
    text = "".join(json.dumps(value) + "\n" for value in inputs)
    return [json.loads(line) for line in output_of([program(), kind], input=text).splitlines()]
