"""Every fault case has a test that shows it (tools/fault_cases.py runs them)."""

from __future__ import annotations

import re
from pathlib import Path

from faults.cases import CASES

TESTS = Path(__file__).resolve().parents[1]


def test_every_case_is_shown_by_a_test() -> None:
    shown = {
        int(number)
        for path in TESTS.rglob("*.py")
        for match in re.findall(r"^@pytest\.mark\.fault_case\(([\d, ]+)\)$", path.read_text(), re.M)
        for number in match.split(",")
    }
    assert shown == set(CASES) == set(range(1, 46))
