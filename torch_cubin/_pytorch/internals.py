"""The register of what this package uses of PyTorch's private names, by the feature that needs it.

No other folder may name them (tests/ops/test_internals.py reads the sources). Each name is looked
up once, when the module that needs it is imported. One that is missing costs its feature and never
the import: `find` gives a stand-in, and `python -m torch_cubin doctor` says what is lost.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from typing import Any

import torch

from torch_cubin import errors

# Tests name here what is to look as if this PyTorch lacked it, separated by spaces; csrc/pytorch
# reads it too.
_TAKEN_AWAY = frozenset(os.environ.get("TORCH_CUBIN_TEST_MISSING", "").split())


@dataclasses.dataclass
class Feature:
    """Something that is done with private names of PyTorch."""

    name: str
    without: str  # what happens where a name is missing
    names: dict[str, bool] = dataclasses.field(default_factory=dict)  # each name: was it found?

    def __post_init__(self) -> None:
        FEATURES.append(self)

    def find(self, name: str, otherwise: Any) -> Any:
        """`torch.<name>`, or the stand-in where this PyTorch has none."""
        full = f"torch.{name}"
        try:
            if full in _TAKEN_AWAY:
                raise AttributeError(full)
            value = _look_up(name)
        except (AttributeError, ImportError):
            self.names[full] = False
            return otherwise
        self.names[full] = True
        return value

    @property
    def missing(self) -> list[str]:
        return [name for name, found in self.names.items() if not found]

    @property
    def available(self) -> bool:
        return not self.missing

    def error(self, object: str) -> errors.Error:
        """For what cannot be done at all without the missing names."""
        return errors.fault(
            "internal",
            object,
            f"needs names that torch {torch.__version__} lacks",
            expected=", ".join(self.missing),
            got="nothing",
            advice="Use a version of torch that torch_cubin was tested with.",
        )


FEATURES: list[Feature] = []


def _look_up(name: str) -> Any:
    value: Any = torch
    path = "torch"
    for part in name.split("."):
        path += f".{part}"
        try:
            value = getattr(value, part)
        except AttributeError:
            # A submodule that nothing has imported yet; an ImportError where it is none.
            value = importlib.import_module(path)
    return value


__all__ = ["FEATURES", "Feature"]
