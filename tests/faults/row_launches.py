"""What the tests of the kernels over rows on the stand-in driver share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fake_driver import tensors
from faults import launch_params
from faults.forked import forked


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return tensors.empty(*shape, dtype=dtype)


def launches_of(driver, call: Callable[[], object], type_: Any) -> list[tuple[Any, Any]]:
    """Each launch, and its parameter."""

    def run() -> list:
        call()
        return driver.launches()

    launches = [each for each in forked(run) if "_rows_" in each["kernel"]]
    return [(each, launch_params.read(each, type_)) for each in launches]
