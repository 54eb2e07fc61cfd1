"""PyTorch's own samples of its operators and modules give the same on a GPU with install() as
without."""

from __future__ import annotations

import functools
import importlib
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

pytestmark = pytest.mark.filterwarnings("ignore")

# They return the state of a random generator that nothing has set.
UNSET = ("torch.ops.aten._flash_attention_forward", "torch.ops.aten._efficient_attention_forward")


@functools.cache
def cpu_tests(what: str) -> Any:
    """The module of the same tests on the CPU. It takes seconds to import: not when collected."""
    # torch.testing._internal needs a base class of its tests from expecttest; none of them runs.
    if "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None:
        sys.modules["expecttest"] = types.ModuleType("expecttest")
        sys.modules["expecttest"].TestCase = unittest.TestCase  # type: ignore[attr-defined]
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ops"))
    return importlib.import_module(f"over_aten_install_{what}")


def _result(call: Callable[[], Any]) -> Any:
    """The result, or the type and the text of an error."""
    torch.cuda.manual_seed(0)
    try:
        return call()
    except Exception as error:  # what PyTorch raises without install(), for example cuDNN's RNNs
        return type(error).__name__, str(error)


class Comparison:
    """Collects the calls whose results differ, and the names of those with served parts."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.served: set[str] = set()

    def add(self, name: str, where: str, call: Callable[[], Any]) -> None:
        wanted = _result(call)
        with torch_cubin.install(policy="all"):
            own = _result(call)
            if torch_cubin.report().served:
                self.served.add(name)
        try:
            cpu_tests("opinfo")._compare(own, wanted, where)
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
    found, cpu = Comparison(), cpu_tests("opinfo")
    for op in cpu.OPS:
        if dtype in op.supported_dtypes("cuda"):
            for number, sample in enumerate(_samples(op, dtype, cpu.MOST_SAMPLES[op.name])):
                where = f"{op.formatted_name} {dtype} sample {number}"
                found.add(op.name, where, functools.partial(cpu._run, op, sample))
    assert found.wrong == [], "\n".join(found.wrong)
    wanted = {"mm", "bmm", "mv", "addmm", "addmv", "baddbmm", "matmul", "nn.functional.linear"}
    assert wanted <= found.served, wanted - found.served


def test_modules() -> None:
    found, cpu = Comparison(), cpu_tests("modules")
    for info in cpu.module_db:
        for training in (False, True):
            torch.manual_seed(0)
            samples = info.module_inputs_func(
                info, device="cuda", dtype=torch.float32, requires_grad=True, training=training
            )
            for number, sample in enumerate(samples[:2]):
                sample.constructor_input.kwargs["device"] = "cuda"
                where = f"{info.name} training={training} sample {number}"
                call = functools.partial(cpu._run, info, sample, training)
                found.add(info.name, where, call)
    assert found.wrong == [], "\n".join(found.wrong)
    assert len(found.served) > 5, found.served


def test_older_samples_of_modules_and_losses() -> None:
    found, cpu = Comparison(), cpu_tests("modules")
    for case in (*cpu._older_cases(), *cpu._older_losses()):
        found.add(case.get_name(), case.get_name(), functools.partial(cpu._run_older, case, "cuda"))
    assert found.wrong == [], "\n".join(found.wrong)
    assert len(found.served) > 5, found.served


def test_all_other_operators() -> None:
    found, cpu = Comparison(), cpu_tests("opinfo")
    skipped = {id(op) for op in cpu.OPS}  # to compare two entries takes 50 us
    unset = cpu.UNINITIALISED + cpu.OVERFLOWING + UNSET
    for op in cpu.op_db:
        dtypes = sorted(op.supported_dtypes("cuda"), key=lambda x: (x != torch.float32, str(x)))
        if id(op) in skipped or op.name in unset or not dtypes:
            continue
        for sample in _samples(op, dtypes[0], 1):
            where = f"{op.formatted_name} {dtypes[0]}"
            found.add(op.name, where, functools.partial(cpu._run, op, sample))
    assert found.wrong == [], "\n".join(found.wrong)
