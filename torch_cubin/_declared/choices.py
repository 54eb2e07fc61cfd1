"""choices(): the kernels of a library of cubins, each with facts from a table or its name."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch_cubin import errors
from torch_cubin._declared import kernel_table
from torch_cubin._declared.define_op import LAUNCH_ARGUMENTS, KernelChoice
from torch_cubin._kernels.sources import Loaded, opened
from torch_cubin._native import library

_MOST_CHOICES = 4096  # kernels of one op; the same limit as in csrc/declared


class Row:
    """The facts of one kernel of a library. Functions of an op may have a parameter `row`.

    `row.kernel` is the symbol, `row.arch` ("sm_90a") and `row.sm` (90) the image's,
    `row.param_bytes` the bytes of its parameters; the rest are the named groups of `name=` and the
    fields of the table's row.
    """

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self._facts = dict(facts)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self._facts:
            raise errors.fault(
                "input", f"row of kernel '{self._facts['kernel']}'", f"has no field '{name}'",
                expected=errors.nearest(name, sorted(self._facts)),
            )  # fmt: skip
        return self._facts[name]

    def __repr__(self) -> str:
        return f"Row({', '.join(f'{key}={value!r}' for key, value in self._facts.items())})"


def choices(
    files: Any,
    *,
    name: str | None = None,
    table: Any = None,
    where: Callable[[Row], bool] | None = None,
    when: Callable[..., Any] | None = None,
    **launch: Any,
) -> list[KernelChoice]:
    """The kernels of a library of cubins, for `define_op(kernels=...)`: one op with hundreds of
    kernels.

        kernels=torch_cubin.choices("kernels/*.cubin", name=r"fmha_d(?P<d>\\d+)_(?P<mask>\\w+)",
                                    when=lambda q, mask, row: (q.shape[3] == row.d) &
                                    (mask == row.mask), block=lambda row: row.threads)

    - `files`: a path with `*`, a path, bytes, or a list of these, in every format of
      torch_cubin.load, C++ source with arrays too. Packages keep the cubins found there, not the
      text.
    - `name`: a regular expression that must match a whole symbol. Its named groups become fields of
      the row, as numbers if they are digits; kernels that do not match are skipped.
    - `table`: rows of fields, one or more for each kernel: a list of dicts, a dict by symbol, or a
      file (JSON of either, or C with an array of plain structs) or its text. The field that holds
      most of the files' symbols assigns rows to kernels. Kernels without a row are skipped.
    - `where`: a predicate of a row: whether its kernel is used. It also selects among rows of one
      kernel under an `#if` that the table does not decide.
    - `when`, and KernelChoice's other arguments: as there. Functions may have a parameter `row`,
      and so may those of define_op. Comparisons with constants, joined by &, cost the same for any
      number of kernels (docs/declared_ops.md).

    A device prefers the newest architecture that it can run. Raises FileError [file] if no file is
    found, InputError [input] if no kernel is.
    """
    known = ("files", "name", "table", "where", "when", *LAUNCH_ARGUMENTS)
    errors.check_keywords("choices", launch, known)
    pattern = _pattern(name)
    given = None if table is None else kernel_table.read(table)
    images = list(_images(files))
    rows: Mapping[str, list[dict[str, Any]]] | None = None
    if given is not None:
        rows = given.by_symbol({k["name"] for _, _, image in images for k in image["kernels"]})
    found: list[tuple[tuple[int, bool], KernelChoice]] = []
    seen: list[str] = []
    matched = 0
    for data, origin, image in images:
        for kernel in image["kernels"]:
            symbol = kernel["name"]
            seen.append(symbol)
            match = None if pattern is None else pattern.fullmatch(symbol)
            if pattern is not None and match is None:
                continue
            matched += 1
            facts = {
                **({} if match is None else _groups(match)),
                "kernel": symbol, "arch": image["arch"], "sm": _sm(image["arch"]),
                "param_bytes": max((p["offset"] + p["size"] for p in kernel["params"]), default=0),
            }  # fmt: skip
            entries = [{}] if rows is None else rows.get(symbol, [])
            taken = [(entry, _row(entry, facts)) for entry in entries]
            taken = [pair for pair in taken if where is None or where(pair[1])]
            if given is not None:
                given.check_conditions(symbol, [entry for entry, _ in taken])
            for _, row in taken:
                choice = KernelChoice(([Loaded(data, origin)], symbol), when=when, **launch)
                choice.produced = {"constants": {"row": row}}
                rank = (-facts["sm"], not image["arch"].endswith("a"))
                found.append((rank, choice))
    if not found:
        texts = None if given is None or rows else given.texts()
        raise _none_found(name, seen, matched, texts)
    if len(found) > _MOST_CHOICES:
        raise errors.fault(
            "input", "torch_cubin.choices", "finds too many kernels",
            expected=f"at most {_MOST_CHOICES}", got=str(len(found)),
            advice="Say `name` or `where`.",
        )  # fmt: skip
    return [choice for _, choice in sorted(found, key=lambda pair: pair[0])]


def _row(entry: Mapping[str, Any], facts: Mapping[str, Any]) -> Row:
    """The fields of the table and the image for a kernel; a field in both must have one value."""
    for field in sorted(entry.keys() & facts.keys()):
        if entry[field] != facts[field]:
            raise errors.fault(
                "input", f"row of kernel '{facts['kernel']}'",
                f"has a field '{field}' with another value than the kernel",
                expected=repr(facts[field])[:80], got=repr(entry[field])[:80],
                advice="Give it another name in the table, or in `name`.",
            )  # fmt: skip
    return Row({**entry, **facts})


def _none_found(
    name: str | None, seen: list[str], matched: int, texts: list[str] | None
) -> errors.Error:
    """`texts`: the strings of a table that has no row for any kernel."""
    shown = ", ".join(seen[:4]) + (", ..." if len(seen) > 4 else "")
    if not matched:
        expected = f"kernels whose names match '{name}'" if name else "kernels"
    elif texts is not None:
        expected = "symbols that stand in the table: " + ", ".join(dict.fromkeys(texts[:3]))
    else:
        expected = "kernels for which `where` is true"
    return errors.fault(
        "input", "torch_cubin.choices", "finds no kernel", expected=expected,
        got=f"{errors.counted(len(seen), 'kernel')} ({shown})" if seen else "no kernels",
    )  # fmt: skip


def _pattern(name: Any) -> re.Pattern[str] | None:
    if name is None:
        return None
    try:
        return re.compile(name)
    except (re.error, TypeError) as error:
        raise errors.fault(
            "input", "torch_cubin.choices argument 'name'", f"is no regular expression ({error})",
            got=repr(name)[:80],
        ) from None  # fmt: skip


def _groups(match: re.Match[str]) -> dict[str, Any]:
    return {
        key: int(value) if value is not None and value.isdecimal() else value
        for key, value in match.groupdict().items()
    }


def _sm(arch: str) -> int:
    return int("".join(c for c in arch if c.isdigit()))


def _images(files: Any) -> Iterator[tuple[bytes, str, dict[str, Any]]]:
    """The bytes, name for errors, and facts of every cubin in the files, without duplicates."""
    known: set[bytes] = set()
    for source in files if isinstance(files, (list, tuple)) else [files]:
        sources = [source]
        if isinstance(source, (str, os.PathLike)) and glob.has_magic(os.fspath(source)):
            sources = sorted(glob.glob(os.fspath(source), recursive=True))
            if not sources:
                raise errors.fault(
                    "file", f"'{source}'", "matches no file", expected="cubins, or files of them"
                )
        for one in sources:
            for _, (data, origin) in opened(one, "the buffer given"):
                for content, name, facts in library.images([(data, origin)], origin):
                    if content not in known:
                        known.add(content)
                        yield content, name, facts


__all__ = ["Row", "choices"]
