"""Tables of kernels: rows of fields by symbol, from Python, JSON, or C text (c_table.py)."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch_cubin import errors
from torch_cubin._declared.c_table import CTables
from torch_cubin._declared.c_text import refuse

_MOST_TEXT = 64 << 20


@dataclasses.dataclass
class Table:
    rows: list[dict[str, Any]]
    label: str  # for errors
    symbol: str | None = None  # the field with the kernels' symbols, if the table states it
    # Indices of rows under an #if that the text does not decide.
    conditional: frozenset[int] = frozenset()

    def texts(self) -> list[str]:
        """All strings in it, in order."""
        return [v for row in self.rows for v in row.values() if isinstance(v, str)]

    def by_symbol(self, symbols: Collection[str]) -> dict[str, list[dict[str, Any]]]:
        """The rows of each kernel. The field with the most symbols assigns them.

        Other fields may hold symbols too (a fallback kernel, for example) and assign nothing.
        """
        known = frozenset(symbols)
        found: dict[str, dict[int, str]] = {}  # by field: the symbols by row index
        for place, row in enumerate(self.rows):
            for field, value in row.items():
                if isinstance(value, str) and value in known:
                    found.setdefault(field, {})[place] = value
        if self.symbol is not None:
            best = self.symbol
        else:
            counts = {field: len(set(places.values())) for field, places in found.items()}
            most = [field for field in counts if counts[field] == max(counts.values())]
            if any(found[field] != found[most[0]] for field in most):
                names = ", ".join(repr(field) for field in most)
                raise refuse(self.label, "holds symbols in several fields",
                              "one that holds more than others", names,
                              "Give a dict of rows by symbol.")  # fmt: skip
            best = most[0] if most else ""
        by_symbol: dict[str, list[dict[str, Any]]] = {}
        for place, symbol in found.get(best, {}).items():
            by_symbol.setdefault(symbol, []).append(self.rows[place])
        return by_symbol

    @functools.cached_property
    def _conditional_rows(self) -> frozenset[int]:
        return frozenset(id(self.rows[place]) for place in self.conditional)

    def check_conditions(self, symbol: str, rows: list[dict[str, Any]]) -> None:
        """Refuses several rows of one kernel if an undecided #if compiles only some of them."""
        if len(rows) > 1 and any(id(row) in self._conditional_rows for row in rows):
            raise refuse(self.label, f"has rows of kernel '{symbol}' under an #if",
                          "one row, or the text as the preprocessor leaves it",
                          errors.counted(len(rows), "row"),
                          "Say `where`, a function of a row, which is true for one.")  # fmt: skip


def read(table: Any) -> Table:
    """Reads the `table` argument of choices()."""
    label = "torch_cubin.choices argument 'table'"
    if isinstance(table, os.PathLike) or (isinstance(table, str) and "\n" not in table):
        path = Path(table)
        label = f"file '{path}'"
        try:
            if path.stat().st_size > _MOST_TEXT:
                raise refuse(label, "is too large", f"at most {_MOST_TEXT} bytes", "more")
            table = path.read_text(errors="replace")
        except OSError as error:
            raise errors.fault("file", label, f"cannot be read ({error.strerror})") from error
    if isinstance(table, str):
        if len(table) > _MOST_TEXT:
            raise refuse(label, "is too large", f"at most {_MOST_TEXT} characters", "more")
        if table.lstrip()[:1] not in ("{", "["):
            rows, conditional = CTables(table, label).read()
            return Table(rows, label, conditional=conditional)
        table = _of_json(table, label)
    expected = "a list of rows {field: value}, or a dict of these by symbol"
    if isinstance(table, Mapping):
        rows = []
        for symbol, row in table.items():
            if not isinstance(row, Mapping):
                raise refuse(label, "has a row that is no dict", expected, repr(row))
            if row.get("symbol", symbol) != symbol:
                raise refuse(label, f"has a row of '{symbol}' with another symbol", f"'{symbol}'",
                              repr(row["symbol"]))  # fmt: skip
            rows.append({"symbol": symbol, **row})
        return Table(rows, label, "symbol")
    if not isinstance(table, (list, tuple)) or not all(isinstance(row, Mapping) for row in table):
        raise refuse(label, "is no table", expected, repr(table))
    return Table([dict(row) for row in table], label)


def _of_json(text: str, label: str) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise refuse(label, "has a key twice", "each once", repr(twice))
        return found

    try:
        return json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        if isinstance(error, errors.Error):
            raise
        raise refuse(label, f"is no JSON ({str(error)[:60]})", "a list of rows", text) from None
