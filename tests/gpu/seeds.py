"""The seeds of randomised tests: a few, or those that the environment asks for.

TORCH_CUBIN_TEST_SEED=7 repeats one; TORCH_CUBIN_TEST_SEED=1000-1099 runs a hundred others.
"""

from __future__ import annotations

import os


def seeds(count: int) -> list[int]:
    """0 to count - 1, if the environment asks for none."""
    asked = os.environ.get("TORCH_CUBIN_TEST_SEED")
    if asked is None:
        return list(range(count))
    first, _, last = asked.partition("-")
    return list(range(int(first), int(last or first) + 1))
