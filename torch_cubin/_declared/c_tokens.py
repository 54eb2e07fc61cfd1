"""The words of a C text, with their lines and with what `#pragma pack` says where each stands."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from torch_cubin import errors

NO_LIMIT = 1 << 30
UNKNOWN = 0  # below every alignment, so that whoever compares with it refuses

_TOKEN = re.compile(
    r"\s*(?:([A-Za-z_]\w*(?:::[A-Za-z_]\w*)*)"
    r"|(0[xX][0-9a-fA-F]+|\d+\.?\d*(?:[eE][-+]?\d+)?)[uUlLfF]*|(\S))"
)
_DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*(\w*)(?:[^\n\\]|\\\n|\\.)*", re.M)
# Packing whose extent cannot be read from the text: it stands in the macro, not where that is used.
_IN_MACROS = re.compile(
    r'_Pragma\s*\(\s*\w*"[^"\n]*\bpack\b|\b__pragma\s*\(\s*pack\b'
    r"|^[ \t]*#[ \t]*define\b(?:[^\n\\]|\\\n|\\.)*?\b(?:__)?packed(?:__)?\b",
    re.M,
)
_WORDS = re.compile(r"\s*#\s*(\w*)\s*(.*)", re.S)
_PACK = re.compile(r"pack\s*\(([^()]*)\)\s*")
_MOST_PUSHES = 64
_SIZES = {"": NO_LIMIT, "0": NO_LIMIT, "1": 1, "2": 2, "4": 4, "8": 8, "16": 16}


def integer(token: str) -> int | None:
    """The value of C's decimal, octal (010 is 8) or hexadecimal literal; None of another token."""
    if re.fullmatch(r"0[xX][0-9a-fA-F]+", token):
        return int(token, 16)
    if re.fullmatch(r"0[0-7]*", token):
        return int(token, 8)
    return int(token) if re.fullmatch(r"[1-9][0-9]*", token) else None


def defined_integers(text: str) -> dict[str, int]:
    """The macros of a text without comments that are an integer each."""
    defines = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)[ \t]+\(?(\d+)\)?[ \t]*$", re.M)
    read = {name: integer(digits) for name, digits in defines.findall(text)}
    return {name: value for name, value in read.items() if value is not None}


@dataclasses.dataclass
class _Conditional:
    """From an #if to its #endif: the limits where each branch starts, and where they end."""

    start: tuple[int, ...]
    ends: set[tuple[int, ...]] = dataclasses.field(default_factory=set)
    has_else: bool = False


class _Packing:
    """Goes along the directives of a text, in order.

    The branches of a conditional part start alike. Where they do not end alike, which of them was
    compiled decides, and the limit is unknown from there on.
    """

    def __init__(self) -> None:
        self._limits: tuple[int, ...] = (NO_LIMIT,)  # what was pushed; the last holds
        self._unknown = False
        self._open: list[_Conditional] = []

    @property
    def limit(self) -> int:
        return UNKNOWN if self._unknown else self._limits[-1]

    def directive(self, text: str) -> None:
        match = _WORDS.match(text.replace("\\\n", " "))
        word, rest = (match[1], match[2]) if match is not None else ("", "")
        if word == "pragma":
            pack = _PACK.fullmatch(rest)
            if pack is not None:
                self._pack([part.strip() for part in pack[1].split(",")])
            elif rest.startswith("pack"):
                self._unknown = True
        elif word in ("if", "ifdef", "ifndef"):
            self._open.append(_Conditional(self._limits))
        elif word.startswith("el") and self._open:
            part = self._open[-1]
            part.ends.add(self._limits)
            part.has_else |= word == "else"
            self._limits = part.start
        elif word == "endif" and self._open:
            part = self._open.pop()
            ends = part.ends if part.has_else else {*part.ends, part.start}
            self._unknown |= bool(ends - {self._limits})

    def _pack(self, parts: list[str]) -> None:
        size = _SIZES.get(parts[-1])
        if len(parts) == 1 and size is not None:
            self._limits = (*self._limits[:-1], size)
        elif parts == ["push"] or (len(parts) == 2 and parts[0] == "push" and size is not None):
            self._unknown |= len(self._limits) > _MOST_PUSHES
            self._limits = (*self._limits[-_MOST_PUSHES:], size or self._limits[-1])
        elif parts == ["pop"]:
            self._limits = self._limits[:-1] or self._limits
        elif parts != ["show"]:
            self._unknown = True  # names of pushes, macros for numbers


def without_comments(text: str) -> str:
    def blank(match: re.Match[str]) -> str:
        return "\n" * match[0].count("\n") + " "

    return re.sub(r"//[^\n]*|/\*.*?\*/", blank, text, flags=re.S)


def tokens(text: str, what: str) -> Iterator[tuple[str, int, int]]:
    """Each token, its line, and the bytes that fields are aligned to there at most.

    Of the directives, conditional ones leave a token, which no struct may hold: nothing tells which
    of its fields the kernel was compiled with. `what` is for the error of macros that pack.
    """
    macro = _IN_MACROS.search(text)
    if macro is not None:
        raise errors.fault(
            "input",
            f"{what} line {text.count(chr(10), 0, macro.start()) + 1}",
            "packs structs in a macro",
            expected="plain alignment, or the text as the preprocessor leaves it",
            got=f"{macro[0]:.80}",
        )
    packing = _Packing()
    at, line = 0, 1
    for directive in (*_DIRECTIVE.finditer(text), None):
        end = len(text) if directive is None else directive.start()
        while (match := _TOKEN.match(text, at, end)) is not None:
            line += text.count("\n", at, match.end())
            at = match.end()
            yield (match[1] or match[2] or match[3]).removeprefix("std::"), line, packing.limit
        if directive is None:
            return
        line += text.count("\n", at, directive.end())
        at = directive.end()
        packing.directive(directive[0])
        if directive[1].startswith(("if", "el", "endif")):
            yield "#", line, packing.limit
