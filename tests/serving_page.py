"""The program of docs/serving_a_model.md; shared by tests/unit (no GPU) and tests/gpu."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "serving_a_model.md"


def program() -> str:
    """The block of Python under "An example of each"."""
    section = PAGE.read_text().partition("\n## An example of each\n")[2]
    found = re.search(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]
