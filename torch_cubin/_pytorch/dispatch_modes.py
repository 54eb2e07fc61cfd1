"""The base class of contexts that see every call of an operator."""

from __future__ import annotations

from typing import Any

from torch_cubin._pytorch.internals import Feature

DISPATCH_MODES = Feature("audit()", "it raises InternalError")
Mode: Any = DISPATCH_MODES.find("utils._python_dispatch.TorchDispatchMode", object)

__all__ = ["DISPATCH_MODES", "Mode"]
