"""PyTorch's own samples of its operators and modules give the same on a GPU with install() as
without."""

from __future__ import annotations

import importlib.util
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_cubin

# torch.testing._internal needs a base class of its tests from expecttest, of which none runs here.
if importlib.util.find_spec("expecttest") is None:
    sys.modules["expecttest"] = types.ModuleType("expecttest")
    sys.modules["expecttest"].TestCase = unittest.TestCase  # type: ignore[attr-defined]
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ops"))
from over_aten_install_modules import _run as run_module
from over_aten_install_opinfo import (
    MOST_SAMPLES,
    OPS,
    UNINITIALISED,
    _compare,
)
from over_aten_install_opinfo import _run as run_operator
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db

pytestmark = pytest.mark.filterwarnings("ignore")


class Comparison:
    """Collects the calls whose results differ, and the names of those with served parts."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.served: set[str] = set()

    def add(self, name: str, where: str, call: Callable[[], Any]) -> None:
        torch.cuda.manual_seed(0)
        wanted = call()
        torch.cuda.manual_seed(0)
        with torch_cubin.install(policy="all"):
            own = call()
            if torch_cubin.report().served:
                self.served.add(name)
        try:
            _compare(own, wanted, where)
        except AssertionError as error:
            self.wrong.append(f"{where}: {error}"[:400])


def _samples(op: Any, dtype: torch.dtype, most: int) -> Iterator[Any]:
    # Not op.sample_inputs(), which looks for the test's name in all frames for each sample.
    torch.manual_seed(0)
    gradients = op.supports_autograd and dtype.is_floating_point
    samples = op.sample_inputs_func(op, "cuda", dtype, gradients)
    for _, sample in zip(range(most), samples, strict=False):
        yield sample


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_products_and_decompositions(dtype) -> None:
    found = Comparison()
    for op in OPS:
        if dtype in op.supported_dtypes("cuda"):
            for number, sample in enumerate(_samples(op, dtype, MOST_SAMPLES[op.name])):
                where = f"{op.formatted_name} {dtype} sample {number}"
                found.add(op.name, where, lambda op=op, sample=sample: run_operator(op, sample))
    assert found.wrong == [], "\n".join(found.wrong)
    wanted = {"mm", "bmm", "mv", "addmm", "addmv", "baddbmm", "matmul", "nn.functional.linear"}
    assert wanted <= found.served, wanted - found.served


def test_modules() -> None:
    found = Comparison()
    for info in module_db:
        for training in (False, True):
            torch.manual_seed(0)
            samples = info.module_inputs_func(
                info, device="cuda", dtype=torch.float32, requires_grad=True, training=training
            )
            for number, sample in enumerate(samples[:2]):
                sample.constructor_input.kwargs["device"] = "cuda"
                found.add(
                    info.name,
                    f"{info.name} training={training} sample {number}",
                    lambda info=info, sample=sample, training=training: run_module(
                        info, sample, training
                    ),
                )
    assert found.wrong == [], "\n".join(found.wrong)
    assert len(found.served) > 5, found.served


def test_all_other_operators() -> None:
    found = Comparison()
    skipped = {id(op) for op in OPS}  # to compare two entries takes 50 us
    for op in op_db:
        dtypes = sorted(op.supported_dtypes("cuda"), key=lambda x: (x != torch.float32, str(x)))
        if id(op) in skipped or op.name in UNINITIALISED or not dtypes:
            continue
        for sample in _samples(op, dtypes[0], 1):
            where = f"{op.formatted_name} {dtypes[0]}"
            found.add(op.name, where, lambda op=op, sample=sample: run_operator(op, sample))
    assert found.wrong == [], "\n".join(found.wrong)
