"""The devices that every test of the ops runs on: the CPU, and CUDA where torch finds it."""

from __future__ import annotations

import pytest
import torch

import torch_cubin  # noqa: F401  (registers the ops)

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def _repeatable() -> None:
    torch.manual_seed(0)


@pytest.fixture
def fresh_dynamo():
    """No graphs of another test: what is compiled and how often is counted."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
