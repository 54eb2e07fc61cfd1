"""The Newton-Schulz iteration of torch.optim.Muon: a private function, which Muon finds by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_cubin._pytorch.internals import Feature

MUON = Feature(
    "torch.optim.Muon's symmetric products at half the work",
    "install() and drop_in() compute one of its two in full",
)
_zeropower = MUON.find("optim._muon._zeropower_via_newtonschulz", None)


def wrap_zeropower(wrapper: Callable[[Any], Any]) -> None:
    """Replaces the function by `wrapper(function)`, for Muon alone."""
    if _zeropower is not None:
        scope = _zeropower.__globals__
        scope[_zeropower.__name__] = wrapper(scope[_zeropower.__name__])
