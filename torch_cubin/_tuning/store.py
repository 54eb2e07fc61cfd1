"""Tuned tables on disk: the format and the writer, for products and ops.

Files are replaced atomically, so any number of processes may read and write them. tune() merges a
declared op's calls into the existing file, under a lock. C++ names and reads that file
(csrc/declared/tuning.h).
"""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

from torch_cubin import errors
from torch_cubin._native.files import write_file

# Below the limits of C++ (csrc/declared/tuning.cpp), which refuses a longer file.
_MOST_CALLS, _MOST_BYTES = 1 << 15, 8 << 20


def write(table: dict[str, Any], path: Path) -> None:
    """Writes one line per product or call, so that versions can be compared."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, _text(table).encode())


def read(path: Path) -> dict[str, Any]:
    """Reads a table. Raises FileError [file] if it is missing or not JSON."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise errors.fault("file", f"tuned table '{path}'", f"cannot be read ({error})") from None


def keep(table: dict[str, Any], path: Path) -> str:
    """Adds the calls of an op's table to its file. Returns "", or the reason of a failure: an
    unwritable folder is not an error, then only this process uses the table."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            write(_merged(table, path), path)
    except OSError as error:
        return str(error)
    return ""


def _merged(table: dict[str, Any], path: Path) -> dict[str, Any]:
    """The table merged with the file's calls: the newest entry of each call, up to the limit of a
    file. Damaged files and lines are ignored."""
    (op,) = table["ops"]
    calls: dict[str, Any] = {}
    for call in [*_calls_in(path, table), *op["calls"]]:
        try:
            key = _key(call)
        except (KeyError, TypeError):
            continue
        calls.pop(key, None)  # so that the newest entries come last
        calls[key] = call
    newest = list(calls.values())[-_MOST_CALLS:]
    while True:
        merged = {**table, "ops": [{**op, "calls": newest}]}
        if len(newest) < 2 or len(_text(merged)) <= _MOST_BYTES:
            return merged
        newest = newest[len(newest) // 2 :]


def _calls_in(path: Path, table: dict[str, Any]) -> list[Any]:
    """The calls in the file, if they were measured on the table's GPU, driver and kernels."""
    try:
        old = read(path)
        if any(old[name] != table[name] for name in ("version", "gpu", "driver")):
            return []
        (found,) = [o["calls"] for o in old["ops"] if o["hash"] == table["ops"][0]["hash"]]
    except (errors.Error, KeyError, TypeError, ValueError):
        return []
    return found if isinstance(found, list) else []


def _key(call: dict[str, Any]) -> str:
    return json.dumps([call["key"], call["instead_of"]], sort_keys=True)


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
