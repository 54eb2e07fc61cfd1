"""What type checkers and editors see of the package is what a process has."""

from __future__ import annotations

import ast
from pathlib import Path

import torch_cubin

INIT = Path(torch_cubin.__file__)


def test_type_checkers_see_what_is_imported_late() -> None:
    """The imports under TYPE_CHECKING are those of _LATER."""
    (block,) = (
        node
        for node in ast.parse(INIT.read_text()).body
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    )
    seen = {
        (node.module, alias.name, alias.asname)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    late = {
        (f"torch_cubin.{module}", name, name)
        for module, names in torch_cubin._LATER.items()
        for name in names
    }
    assert seen == late | {("torch_cubin", name, name) for name in ("cpp", "embed")}
