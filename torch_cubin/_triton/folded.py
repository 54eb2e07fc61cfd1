"""Compares the values in `folded=` for a kernel from a cache folder with its IR: Triton records
neither the names nor the positions of the arguments that it folded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch_cubin._declared.expressions import Traced, Tree

if TYPE_CHECKING:
    from torch_cubin._triton.arguments import Resolver


def check(resolver: Resolver) -> None:
    """Raises InputError [input] if the IR contradicts a value."""
    _check_reach(resolver)
    _check_folded(resolver)
    _check_grid(resolver)


def _check_reach(resolver: Resolver) -> None:
    """Refuses a cache folder's kernel that does not take one of the op's arguments. The
    argument may have been folded into the kernel; then calls would silently use the value it
    was compiled with."""
    read = [resolver.entries, resolver.scope.when]
    read += [requirement.get("value") for requirement in resolver.requires]
    used = set(_names_read(read))
    used |= {r["address_of"] for r in resolver.requires if "address_of" in r}
    for name in resolver.scope.varying:
        if name not in used and f"{name}?" not in used:
            raise resolver.refuse(
                f"argument '{name}'", "reaches no argument of the kernel's",
                f"folded=dict({name}=VALUE), where it was folded, which each call is then"
                " checked against", "a cache folder, which does not tell what was folded",
                "Give the live kernel, or a KernelChoice whose `when` says what it may be.",
            )  # fmt: skip


def _check_folded(resolver: Resolver) -> None:
    """Refuses a constant that the kernel's IR does not contain, since it belongs to another
    kernel. A constant that was only used in sums and products is not in the IR and cannot be
    checked."""
    known = resolver.kernel.numbers
    for name, value in resolver.folded.items():
        if known is None or type(value) is not int or value < 2 or value in known:
            continue
        raise resolver.refuse(
            f"folded '{name}'", "is not what the kernel was compiled with",
            "an integer that the kernel's IR names", value,
            "Give the live kernel, or what write() or `python -m torch_cubin export triton`"
            " made of it, which tell their constants.",
        )  # fmt: skip


def _check_grid(resolver: Resolver) -> None:
    """Refuses a grid with a block for more elements than a program computes: a part of the
    output would not be written. Its folded constant is not the kernel's."""
    listed = resolver.grid if isinstance(resolver.grid, (list, tuple)) else [resolver.grid]
    values = [resolver.scope.trace(value, "grid") for value in listed]
    if len(values) == 1 and isinstance(values[0], (list, tuple)):
        values = list(values[0])
    for value, step in zip(values, resolver.kernel.steps, strict=False):
        divisor = _divisor(value.tree) if isinstance(value, Traced) else None
        names = [name for name, folded in resolver.folded.items() if folded == divisor]
        if step is not None and divisor is not None and divisor > step and names:
            raise resolver.refuse(
                f"folded '{names[0]}'", "makes a grid with a block for more elements than a"
                " program of this kernel computes", f"at most {step}", divisor,
                "Another constant is this one, or the folder is of another kernel.",
            )  # fmt: skip


def _divisor(tree: Tree) -> int | None:
    """The constant by which a traced n // c, or cdiv(n, c), divides."""
    if isinstance(tree, list) and tree[0] == "neg":
        tree = tree[1]
    is_division = isinstance(tree, list) and tree[0] == "floordiv" and type(tree[2]) is int
    return tree[2] if is_division else None


# The operations, in expressions and kernel arguments, that are followed by a name of the op.
_READS = {
    *("number", "is", "size", "stride", "numel", "dim", "itemsize", "defined", "contiguous"),
    *("is_dtype", "pointer"),
}


def _names_read(tree: Any) -> Iterator[str]:
    """The op's names that an expression or a kernel's arguments read. Operation names are skipped,
    since an argument may be called `stride` too."""
    if isinstance(tree, dict):  # a tensor map; a workspace names no tensor
        if "tensor" in tree:
            yield tree["tensor"]
    elif isinstance(tree, list):
        if len(tree) > 1 and isinstance(tree[1], str) and tree[0] in _READS:
            yield tree[1]
        else:
            for item in tree:
                yield from _names_read(item)
