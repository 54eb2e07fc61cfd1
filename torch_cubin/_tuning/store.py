"""Tuned tables on disk: one format and one way of writing, for products and ops.

A file appears at once: any number of processes may read and write it side by side. What tune()
keeps of a declared op is merged with what is there, under a lock. C++ names that file and reads it
(csrc/declared/tuned_calls.h).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
from pathlib import Path
from typing import Any

from torch_cubin import errors
from torch_cubin._declared.package import write_file


def write(table: dict[str, Any], path: Path) -> None:
    """One line a product or call, so that versions can be compared."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, _text(table).encode())


def read(path: Path) -> dict[str, Any]:
    """Raises FileError [file] where there is none, or no JSON."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise errors.fault("file", f"tuned table '{path}'", f"cannot be read ({error})") from None


def keep(table: dict[str, Any], path: Path) -> None:
    """Adds the calls of an op's table to those in its file. A folder that cannot be written is no
    error: then this process alone uses them."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            write(_merged(table, path), path)


def _merged(table: dict[str, Any], path: Path) -> dict[str, Any]:
    """The file's calls, each by the newest of its entries. A damaged file counts as absent."""
    (op,) = table["ops"]
    try:
        old = read(path)
        same = all(old[name] == table[name] for name in ("version", "gpu", "driver"))
        found = [o["calls"] for o in old["ops"] if same and o["hash"] == op["hash"]]
        calls = {_key(call): call for call in [*(found[0] if found else []), *op["calls"]]}
    except (errors.Error, KeyError, TypeError):
        return table
    return {**table, "ops": [{**op, "calls": list(calls.values())}]}


def _key(call: dict[str, Any]) -> str:
    return json.dumps(call["key"], sort_keys=True)


def _text(table: dict[str, Any]) -> str:
    fields = {name: json.dumps(value) for name, value in table.items()}
    if "products" in table:
        fields["products"] = _rows(table["products"], "  ")
    if "ops" in table:
        ops = [
            f'  {{"op": {json.dumps(op["op"])}, "hash": {json.dumps(op["hash"])}, "calls": '
            f"{_rows(op['calls'], '   ')}}}"
            for op in table["ops"]
        ]
        fields["ops"] = "[\n" + ",\n".join(ops) + "\n ]"
    return "{\n" + ",\n".join(f" {json.dumps(k)}: {v}" for k, v in fields.items()) + "\n}\n"


def _rows(rows: list[Any], indent: str) -> str:
    return "[\n" + ",\n".join(indent + json.dumps(row) for row in rows) + f"\n{indent[1:]}]"
