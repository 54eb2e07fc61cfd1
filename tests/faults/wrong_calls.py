"""Shared by the lists of wrong calls (fake_wrong_*.py): how they are written, made and checked.

An entry is (call, class, message after "torch_cubin [tag]: "); "..." matches anything.
"""

from __future__ import annotations

import re

import pytest
import torch

from torch_cubin import errors

x = torch.zeros(64)


def call(*arguments, kernel="vec_add", **keywords):
    """A call of `kernel` with those arguments; grid and block are 1 where nothing is said."""
    keywords = {"grid": 1, "block": 1, **keywords}
    return kernel, arguments, {k: v for k, v in keywords.items() if v != "absent"}


def check(error: BaseException, kind: type, message: str) -> None:
    assert type(error) is kind
    pattern = re.escape(f"torch_cubin [{kind.tag}]: {message}").replace(r"\.\.\.", ".*")
    assert re.fullmatch(pattern, str(error), re.DOTALL), f"{error}\n--- expected\n{message}"


def expect(driver, module, entry):
    """The call is refused before the driver is asked to launch; the next right call succeeds."""
    (kernel, arguments, keywords), kind, message = entry
    with pytest.raises(errors.Error) as raised:
        module[kernel](*arguments, **keywords)
    check(raised.value, kind, message)
    assert driver.launches() == []
    module["vec_add"](x, x, x, 64, grid=1, block=1)
    assert len(driver.launches()) == 1
