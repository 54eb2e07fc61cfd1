"""Several processes share a GPU: each one's blocks are stopped anywhere, and go on much later than
others that they work with."""

from __future__ import annotations

import concurrent.futures

from gpu import hopper, run_child

pytestmark = hopper.for_kernels

PROCESSES = 5  # of six, each one met a wrong order of two instructions within 40,000 backwards


def test_backwards_of_pairs_end() -> None:
    """Blocks in pairs take work items together (sm90/backward_wide.cu). Packed short sequences have
    the most items for their time. A pair whose blocks disagree never ends."""

    def one(_: int) -> run_child.Result:
        return run_child.run("attention_repeats", "packed", "256", seconds=120)

    with concurrent.futures.ThreadPoolExecutor(PROCESSES) as pool:
        results = list(pool.map(one, range(PROCESSES)))
    for result in results:
        assert result.check()["different"] == 0
