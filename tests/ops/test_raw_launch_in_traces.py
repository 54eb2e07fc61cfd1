"""A raw launch leaves no node in a graph: where calls are recorded it raises."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import torch_cubin
from torch_cubin import errors
from torch_cubin._pytorch import recording

CUBIN = Path(__file__).resolve().parents[1] / "data" / "several.sm_90a.cuda130.cubin"
x = torch.zeros(64)


@pytest.fixture
def launch() -> Callable[[Any], Any]:
    kernel = torch_cubin.load(CUBIN)["vec_add"]

    def launch(a: Any) -> Any:
        kernel(a, a, a, 64, grid=1, block=64)
        return a + 1

    return launch


def in_fake_mode(function: Any, a: torch.Tensor) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        function(a)


def functional(function: Any, a: torch.Tensor) -> None:
    make_fx(torch.func.functionalize(function))(a)


LAUNCHERS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "make_fx": lambda f, a: make_fx(f)(a),
    "make_fx, pre-dispatch": lambda f, a: make_fx(f, pre_dispatch=True)(a),
    "make_fx, fake": lambda f, a: make_fx(f, tracing_mode="fake")(a),
    "make_fx, symbolic": lambda f, a: make_fx(f, tracing_mode="symbolic")(a),
    "functionalize": functional,
    "jit.trace": lambda f, a: torch.jit.trace(f, a, check_trace=False),
    "FakeTensorMode": in_fake_mode,
    "symbolic_trace": lambda f, a: torch.fx.symbolic_trace(f),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_recorded_launches_are_refused(launcher: str, launch: Any) -> None:
    with pytest.raises(errors.InputError, match="would pass by .*define_op"):
        LAUNCHERS[launcher](launch, x)


def test_other_modes_and_plain_calls_are_not(launch: Any) -> None:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    assert recording.recorder() == ""
    with Mode():
        assert recording.recorder() == ""
    assert recording.is_included() is not None
