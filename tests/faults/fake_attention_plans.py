"""tools/attention_plans.py: the same calls have the same record, and a difference is found."""

from __future__ import annotations

import random
import sys
from pathlib import Path

from faults import catalogs
from faults.forked import forked

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import attention_plans


def test_attention_plans_finds_nothing_where_nothing_changed(
    driver, tmp_path, monkeypatch, capsys
) -> None:
    catalogs.install(driver, tmp_path, monkeypatch, catalogs.kernels_of("attention"))

    def run() -> list[int]:
        rng = random.Random(5)
        calls = [attention_plans.random_call(rng) for _ in range(300)]
        first, second = (
            [attention_plans.launches_of(driver, call) for call in calls] for _ in range(2)
        )
        launched = sum(not attention_plans.is_error(call) for call in first)
        same = attention_plans.compare(calls, first, second, show=3)
        second[7] = [*second[7], ["another"]]
        return [launched, same, attention_plans.compare(calls, first, second, show=3)]

    launched, *statuses = forked(run)
    assert launched > 200
    assert statuses == [0, 1]
