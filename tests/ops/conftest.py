"""The devices that every test of the ops runs on: the CPU, and CUDA where torch finds it; and which
of PyTorch's own attentions the results are held against."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from preloaded import PreloadedPython
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_cubin  # noqa: F401  (registers the ops)
from torch_cubin._drop_in import aten_kernels, report

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def _repeatable() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _report_of_this_test() -> None:
    """Without the graphs that other tests traced, which report() would list, too."""
    report.clear(graphs=True)


@pytest.fixture(autouse=True)
def _drop_in_as_on_a_cpu_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """drop_in() serves by its mode, whatever PyTorch runs the tests.

    over_aten_drop_in_thread.py has the other path.
    """
    monkeypatch.setattr(aten_kernels, "below_autograd", lambda: False)


@pytest.fixture(autouse=True)
def _pytorchs_attention_by_its_definition():
    """PyTorch's attention is its math backend in every test, in layers and models as well.

    What its fused kernels give depends on the processor: that of torch 2.13 for the CPU answers a
    query that is NaN with zeros on some (AVX2 or AVX-512 of a Xeon with AMX, less than 16 keys).
    """
    with sdpa_kernel(SDPBackend.MATH):
        yield


@pytest.fixture(scope="session")
def fresh_python() -> Iterator[PreloadedPython]:
    """Processes that have imported torch and torch._dynamo, and nothing of the package."""
    with PreloadedPython(["torch", "torch._dynamo"]) as python:
        yield python


@pytest.fixture
def fresh_dynamo():
    """Clears the graphs of other tests, because compilations are counted."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
