"""DeepGEMM's speed, which the benchmarks of 8-bit floats and of groups do not measure themselves.

Its kernels, with the tiles that it chooses, were compiled and launched once on an H200 beside
PyTorch's (FILE; benchmarks/NOTES.md says how). A benchmark takes PyTorch's time of its own run,
divided by the ratio that both had there, case by case.
"""

from __future__ import annotations

import functools
import json

import common

FILE = common.ROOT / "benchmarks" / "results" / "2026-11-28_h200_deep_gemm.json"
WHO = "DeepGEMM, by its ratio"


@functools.cache
def _ratios() -> dict[str, dict[str, float]]:
    """Of each case, the time of each of PyTorch's products over DeepGEMM's."""
    times = {each["case"]: each["us"] for each in json.loads(FILE.read_text())["results"]}
    return {
        case: {who: time / us["DeepGEMM"] for who, time in us.items()} for case, us in times.items()
    }


def estimate(case: str, who: str, time: float) -> dict[str, float]:
    """DeepGEMM's time, by that of `who` in this run; nothing where it was not run."""
    ratio = _ratios().get(case, {}).get(who)
    return {} if ratio is None else {WHO: time / ratio}
