"""The register of PyTorch's private names that this package uses, by the feature that needs them.

No other folder may use such names (tests/ops/test_internals.py reads the sources). Each name is
looked up once, when the module that needs it is imported. A missing name disables its feature, not
the import: `find` returns a stand-in, and `python -m torch_cubin doctor` lists the lost features.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch

from torch_cubin import errors

# Names that a test simulates as missing, separated by spaces. csrc/pytorch reads the variable too.
_TAKEN_AWAY = frozenset(os.environ.get("TORCH_CUBIN_TEST_MISSING", "").split())


class Feature:
    """A feature that needs private names of PyTorch.

    NOTE: no dataclass, whose methods take 0.5 ms of the import to compile.
    """

    def __init__(self, name: str, without: str) -> None:
        self.name = name
        self.without = without  # the behaviour if a name is missing
        self.names: dict[str, bool] = {}  # whether each was found
        FEATURES.append(self)

    def find(self, name: str, otherwise: Any) -> Any:
        """`torch.<name>`, or `otherwise` if this PyTorch lacks it."""
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
        """The error of a call that is impossible without the missing names."""
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
            # A submodule that has not been imported yet; else an ImportError.
            value = importlib.import_module(path)
    return value


__all__ = ["FEATURES", "Feature"]
