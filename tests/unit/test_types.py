"""What type checkers and editors see of the package is what a process has."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import torch

import torch_cubin

ROOT = Path(__file__).resolve().parents[2]
INIT = Path(torch_cubin.__file__)
sys.path.append(str(ROOT / "tools"))

import op_stubs  # noqa: E402


def test_type_checkers_see_late_imports() -> None:
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
    assert seen == late | {
        ("torch_cubin", name, name) for name in ("cpp", "embed", "huggingface", "ops")
    }


def test_stubs_are_the_schemas() -> None:
    """`python tools/op_stubs.py` writes them."""
    assert ast.dump(ast.parse(op_stubs.STUBS.read_text())) == ast.dump(ast.parse(op_stubs.text()))


def test_every_public_op_has_its_name() -> None:
    assert torch_cubin.ops.__all__ == op_stubs.public_ops()
    for name in op_stubs.public_ops():
        assert getattr(torch_cubin.ops, name) is getattr(torch.ops.cubin, name)


def test_a_wheel_says_that_it_is_typed() -> None:
    """setup.py lists the files that are not Python."""
    setup = (ROOT / "setup.py").read_text()
    assert (ROOT / "torch_cubin" / "py.typed").is_file()
    assert '*("py.typed", "*.pyi")' in setup
