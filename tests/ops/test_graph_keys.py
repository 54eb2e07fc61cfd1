"""PyTorch's caches of compiled graphs: what was traced by other rules is not taken again."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from declared import cube, schema
from programs import output_of
from torch._inductor.utils import fresh_cache

from torch_cubin._inductor import keys


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _wrong(ctx, grad):
    return grad


def _right(ctx, grad):
    (x,) = ctx.saved_tensors
    return 3 * x**2 * grad


def test_a_mended_derivative_is_compiled_anew() -> None:
    """The graph on disk has the derivative of before, under the same op's name."""
    op = cube()

    def gradient() -> torch.Tensor:
        torch._dynamo.reset()
        x = torch.full((4,), 2.0, requires_grad=True)
        torch.compile(lambda x: op(x).sum())(x).backward()
        return x.grad

    with fresh_cache():
        op.register_autograd(_wrong, setup_context=_save)
        assert gradient().tolist() == [1] * 4
        op.register_autograd(_right, setup_context=_save)
        assert gradient().tolist() == [12] * 4


def test_the_key_follows_an_ops_definition() -> None:
    text = schema("cube(Tensor x) -> Tensor")
    op = cube(schema=text)
    first = keys.of_declared_ops()
    assert cube(schema=text) is op
    assert keys.of_declared_ops() == first
    with pytest.warns(UserWarning, match="defined again"):
        cube(schema=text, tensors={"x": "float32[*s]", "out": "float32[*s] zeroed"})
    assert keys.of_declared_ops() != first


@pytest.mark.parametrize("how", ["function", "partial", "object", "bound"])
def test_the_key_follows_the_file_of_a_derivative(how: str, tmp_path: Path) -> None:
    """Not its own code alone: it may call other functions there."""
    op, found = cube(), []
    source = tmp_path / "formula.py"
    for factor in (1, 3, 1):
        source.write_text(
            f"FACTOR = {factor}\nclass Of:\n  def __call__(self, ctx, grad): return FACTOR * grad\n"
            "def function(ctx, grad): return FACTOR * grad\n"
        )
        spec = importlib.util.spec_from_file_location("formula", source)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        backward = {
            "function": module.function,
            "partial": functools.partial(module.function),
            "object": module.Of(),
            "bound": module.Of().__call__,
        }[how]
        op.register_autograd(backward)
        found.append(keys.of_declared_ops())
    assert found[0] == found[2] != found[1]


class _Scaled:
    def __init__(self, factor: object) -> None:
        self.factor = factor

    def __call__(self, ctx, grad):
        return self.factor * grad


def _scaled(factor, ctx, grad):
    return factor * grad


def _closure(factor):
    return lambda ctx, grad: factor * grad


def _default(factor):
    return lambda ctx, grad, by=factor: by * grad


MAKERS = {
    "partial": lambda factor: functools.partial(_scaled, factor),
    "closure": _closure,
    "default": _default,
    "object": _Scaled,
    "bound": lambda factor: _Scaled(factor).__call__,
    "decorated": lambda factor: torch.no_grad()(_closure(factor)),
    "nested": lambda factor: functools.partial(_closure({"by": [_Scaled(factor)]})),
}


@pytest.mark.parametrize("how", MAKERS)
def test_the_key_follows_what_a_derivative_was_made_with(how: str) -> None:
    """The same code in the same file has other gradients."""
    op, found = cube(), []
    for factor in (1, 3, 1):
        op.register_autograd(MAKERS[how](factor))
        found.append(keys.of_declared_ops())
    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize("how", MAKERS)
def test_what_nothing_identifies_is_like_no_other(how: str) -> None:
    op, factor = cube(), torch.ones(())
    found = set()
    for _ in range(2):
        op.register_autograd(MAKERS[how](factor))
        found |= {keys.of_declared_ops(), keys.of_declared_ops()}
    assert len(found) == 2
    typed: dict = {}
    exec(compile("def backward(ctx, grad): return grad", "<typed>", "exec"), typed)
    for _ in range(2):
        op.register_autograd(typed["backward"])
        found.add(keys.of_declared_ops())
    assert len(found) == 4


def test_derivatives_that_call_ops_are_known() -> None:
    op, other, found = cube(), cube(), set()
    for _ in range(2):
        op.register_autograd(MAKERS["partial"]((other, torch.ops.aten.mm.default, torch.mm)))
        found.add(keys.of_declared_ops())
    other.register_autograd(_wrong, setup_context=_save)
    found.add(keys.of_declared_ops())
    assert len(found) == 2


def test_the_key_follows_the_packages_code(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    library, rule = tmp_path / "_C.so", tmp_path / "sub" / "rule.py"
    found = []
    for of_library, of_rule in ((b"1", b"x"), (b"2", b"x"), (b"1", b"y"), (b"1", b"x")):
        library.write_bytes(of_library)
        rule.write_bytes(of_rule)
        found.append(keys.digest_of_code(tmp_path))
    assert len({*found}) == 3
    assert found[0] == found[3]
    assert keys.of_package() == keys.digest_of_code(keys.library.PATH.parent)


@pytest.mark.parametrize("change", ["edited", "installed", "without sources", "none", "linked"])
def test_a_package_that_changes_while_the_process_runs(change: str, tmp_path: Path) -> None:
    """The process computes with what it imported: its graphs have a key that no other process has,
    as the file's has one that they do not follow."""
    copy = tmp_path / "torch_cubin"
    real = tmp_path / "elsewhere" if change == "linked" else copy
    shutil.copytree(
        keys.library.PATH.parent, real, ignore=shutil.ignore_patterns("*.pyc", "cubins")
    )
    if change == "linked":
        copy.symlink_to(real)
    code = f"""
import os, pathlib, shutil, time, torch
import torch_cubin
from torch_cubin._inductor import keys

folder = pathlib.Path(torch_cubin.__file__).parent
assert str(folder) == {str(copy)!r}
rule = folder / "_ops" / "vmap.py"
time.sleep(0.02)  # the kernel's clock for files ticks every 4 ms
if {change!r} == "edited":
    rule.write_text(rule.read_text() + "FACTOR = 2")
elif {change!r} == "installed":  # with the times that the archive says
    before = rule.stat()
    shutil.copy(rule, folder / "new")
    os.utime(folder / "new", ns=(before.st_atime_ns, before.st_mtime_ns))
    (folder / "new").rename(rule)
elif {change!r} == "without sources":
    for path in folder.rglob("*.py"):
        path.rename(path.with_suffix(".none"))
assert keys.of_package() == keys.of_package()
print(keys.of_package() == keys.digest_of_code(folder))
"""
    printed = output_of(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd="/",
        timeout=300,
    )
    assert printed.strip() == str(change in ("none", "linked"))
