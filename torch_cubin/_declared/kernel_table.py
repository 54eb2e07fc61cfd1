"""Tables of kernels: rows of fields by symbol, from Python, JSON, or C text.

Libraries of cubins describe their kernels in an array of structs; it is read, not compiled.
Numbers, strings, booleans and names of enumerators are values, what is more than that is its text.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch_cubin import errors

_MOST_TEXT, _MOST_ROWS, _MOST_FIELDS, _MOST_DEPTH = 64 << 20, 1 << 16, 512, 16


def read(table: Any) -> dict[str, list[dict[str, Any]]]:
    """The rows by each string in them, so that a kernel's are found by its symbol."""
    label = "torch_cubin.choices argument 'table'"
    if isinstance(table, os.PathLike) or (isinstance(table, str) and "\n" not in table):
        path = Path(table)
        label = f"file '{path}'"
        try:
            if path.stat().st_size > _MOST_TEXT:
                raise _refuse(label, "is too large", f"at most {_MOST_TEXT} bytes", "more")
            table = path.read_text(errors="replace")
        except OSError as error:
            raise errors.fault("file", label, f"cannot be read ({error.strerror})") from error
    if isinstance(table, str):
        table = _of_text(table, label)
    by_symbol: dict[str, list[dict[str, Any]]] = {}
    for row in _rows(table, label):
        for text in {value for value in row.values() if isinstance(value, str)}:
            by_symbol.setdefault(text, []).append(row)
    return by_symbol


def _rows(table: Any, label: str) -> list[dict[str, Any]]:
    expected = "a list of rows {field: value}, or a dict of these by symbol"
    if isinstance(table, Mapping):
        rows = []
        for symbol, row in table.items():
            if not isinstance(row, Mapping):
                raise _refuse(label, "has a row that is no dict", expected, repr(row))
            rows.append({"symbol": symbol, **row})
        return rows
    if not isinstance(table, (list, tuple)) or not all(isinstance(row, Mapping) for row in table):
        raise _refuse(label, "is no table", expected, repr(table))
    return [dict(row) for row in table]


def _refuse(label: str, problem: str, expected: str, got: str) -> errors.Error:
    return errors.fault("input", label, problem, expected=expected, got=got[:80])


def _of_text(text: str, label: str) -> Any:
    if text.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _refuse(
                label, f"is no JSON ({str(error)[:60]})", "a list of rows", text
            ) from None
    return _of_c(text, label)


_TOKEN = re.compile(
    r"""\s*(?:("(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)')"""
    r"""|((?:0[xX][0-9a-fA-F]+|\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+)[uUlLfF]*)"""
    r"""|([A-Za-z_]\w*(?:\s*::\s*[A-Za-z_]\w*)*)|([\[\]{}();,=.:*&<>+\-/|~!?%^]))"""
)
_STRUCT = re.compile(r"\b(?:struct|class)\b")


def _of_c(text: str, label: str) -> list[dict[str, Any]]:
    """The rows of every array of structs whose fields are in the text."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text[:_MOST_TEXT], flags=re.S)
    text = re.sub(r"^[ \t]*#(?:[^\n\\]|\\\n|\\.)*", " ", text, flags=re.M)
    return _Reader(text, label).read()


class _Reader:
    def __init__(self, text: str, label: str) -> None:
        self.label = label
        self.tokens: list[str] = []
        at = 0
        while (match := _TOKEN.match(text, at)) is not None:
            self.tokens.append(match[0].strip())
            at = match.end()
        if text[at:].strip():
            raise _refuse(
                label, "is no C that can be read", "an array of structs", text[at:].strip()
            )
        self.at = 0
        self.structs: dict[str, list[str]] = {}

    def peek(self, ahead: int = 0) -> str:
        place = self.at + ahead
        return self.tokens[place] if place < len(self.tokens) else ""

    def read(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        fields: list[str] | None = None  # of the type that was named last
        while self.at < len(self.tokens):
            token = self.peek()
            if token in ("struct", "class") and self._body() is not None:
                fields = self._struct()
            elif token in self.structs:
                fields = self.structs[token]
                self.at += 1
            elif token == "=" and self.peek(1) == "{" and fields and self.peek(-1) == "]":
                self.at += 1
                rows += [self._row(value, fields) for value in self._braces(0)]
                fields = None
            elif token == ";":
                fields = None
                self.at += 1
            else:
                self.at += 1
        if not rows:
            expected = "struct NAME { FIELDS; } TABLE[] = {{...}, ...};"
            raise _refuse(self.label, "has no array of structs", expected, "none")
        return rows

    def _body(self) -> int | None:
        """How many tokens ahead a struct's body begins; None where it has none."""
        for ahead in range(1, 8):
            if self.peek(ahead) == "{":
                return ahead
            if self.peek(ahead) in ("", ";", "=", "*", ")", ","):
                return None
        return None

    def _struct(self) -> list[str]:
        ahead = self._body() or 1
        name = self.peek(1) if ahead > 1 else ""
        self.at += ahead + 1
        fields: list[str] = []
        words: list[str] = []  # of one declaration
        while (token := self.peek()) != "}":
            if not token or len(fields) > _MOST_FIELDS:
                raise _refuse(self.label, "has a struct that does not end", "'}'", name)
            self.at += 1
            if token in ("{", "("):
                self._skip(token)
            elif token in (",", ";"):
                declared = words[: words.index("=")] if "=" in words else words
                if "[" in declared:
                    declared = declared[: declared.index("[")]
                names = [word for word in declared if word[0].isalpha() or word[0] == "_"]
                if names and words[:1] not in (["using"], ["typedef"], ["static"], ["enum"]):
                    fields.append(names[-1])
                words = [] if token == ";" else words[:1]
            else:
                words.append(token)
        self.at += 1
        if name:
            self.structs[name] = fields
        return fields

    def _skip(self, opened: str) -> None:
        close = {"{": "}", "(": ")"}[opened]
        depth = 1
        while depth:
            token = self.peek()
            if not token:
                raise _refuse(self.label, "has a brace that is not closed", f"'{close}'", "the end")
            depth += (token == opened) - (token == close)
            self.at += 1

    def _braces(self, depth: int) -> list[Any]:
        """The values in braces, which begin here."""
        self.at += 1
        values: list[Any] = []
        while self.peek() != "}":
            if depth > _MOST_DEPTH or len(values) > _MOST_ROWS or not self.peek():
                raise _refuse(self.label, "has braces that do not end", "'}'", self.peek())
            values.append(self._value(depth))
            if self.peek() == ",":
                self.at += 1
        self.at += 1
        return values

    def _value(self, depth: int) -> Any:
        name = None
        if self.peek() == "." and self.peek(2) == "=":  # .field = value
            name = self.peek(1)
            self.at += 3
        if self.peek() == "{":
            value: Any = self._braces(depth + 1)
        else:
            words: list[str] = []
            level = 0
            while self.peek() and (level or self.peek() not in (",", "}")):
                level += (self.peek() in "([") - (self.peek() in ")]")
                words.append(self.peek())
                self.at += 1
            value = _constant(words)
        return value if name is None else (name, value)

    def _row(self, values: Any, fields: list[str]) -> dict[str, Any]:
        if not isinstance(values, list) or len(values) > len(fields):
            raise _refuse(self.label, "has a row that does not fit its struct",
                          errors.counted(len(fields), "value"), repr(values))  # fmt: skip
        row = {}
        for field, value in zip(fields, values, strict=False):
            if isinstance(value, tuple):  # designated
                field, value = value
            row[field] = value
        return row


def _constant(words: list[str]) -> Any:
    """A number, a bool, a string, None, an enumerator's name without its scope, or the text."""
    if len(words) == 2 and words[0] == "-":
        value = _constant(words[1:])
        return -value if type(value) in (int, float) else f"-{value}"
    if words and all(word.startswith('"') for word in words):
        return "".join(word[1:-1] for word in words)
    if len(words) != 1:
        return " ".join(words)
    (word,) = words
    known = {"true": True, "false": False, "nullptr": None, "NULL": None}
    if word in known:
        return known[word]
    if re.match(r"0[xX]", word):
        return int(word.rstrip("uUlL"), 16)
    if re.fullmatch(r"\d+[uUlL]*", word):
        digits = word.rstrip("uUlL")
        return int(digits, 8 if digits.startswith("0") and digits.isdecimal() and
                   set(digits) <= set("01234567") else 10)  # fmt: skip
    if word[0].isdigit() or word[0] == ".":
        return float(word.rstrip("fFlL"))
    return re.sub(r".*::\s*", "", word)


__all__ = ["read"]
