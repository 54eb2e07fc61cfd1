"""C text as tables are read from it: without comments and directives, and what its macros may be.

Nothing is expanded and no header is read.
"""

from __future__ import annotations

import re

from torch_cubin import errors


def refuse(label: str, problem: str, expected: str, got: str, advice: str = "") -> errors.Error:
    return errors.fault("input", label, problem, expected=expected, got=got[:80], advice=advice)


# Strings come first: they may contain comment marks. A comment may lack its end.
_STRINGS_AND_COMMENTS = re.compile(
    r""""(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)'|//[^\n]*|/\*.*?(?:\*/|\Z)""", re.S
)
_DIRECTIVE = re.compile(r"[ \t]*#[ \t]*(\w*)((?:[^\n\\]|\\\n|\\.)*)")
_RAW = re.compile(r"(?:^|\W)(?:u8|[uUL])?R\Z")  # before the quote of a raw string
_MACRO = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)(\([^)\n]*\))?([^\n]*)", re.M)
_INCLUDES = ("include", "include_next", "import", "embed")
# Declarations of names that stand for one value each.
_ONE_VALUE = re.compile(
    r"\b(?:extern|constexpr|const)\b[^;={}()]*?\b(\w+)\s*(?:\[[^\]]*\]\s*)*[=;{]"
)


def without_comments(text: str, label: str) -> str:
    """The text without comments, a line of source in one line."""

    def kept(match: re.Match[str]) -> str:
        if match[0][0] == '"' and _RAW.search(
            match.string, max(match.start() - 4, 0), match.start()
        ):
            raise refuse(label, "has a raw string", "a string with escapes", match[0])
        return " " if match[0][0] == "/" else match[0]

    return _STRINGS_AND_COMMENTS.sub(kept, re.sub(r"\\\r?\n", "", text))


def one_value(text: str, macros: dict[str, str]) -> set[str]:
    """Names that stand for one value, by the text: enumerators, constants, arrays and macros."""
    known = {"true", "false", "nullptr", "NULL", *_ONE_VALUE.findall(text)}
    for body in re.findall(r"\benum\b[^;{}()]*\{([^{}]*)\}", text):
        known.update(re.findall(r"(?:^|,)\s*(\w+)", body))
    known -= macros.keys()
    while True:
        more = {
            name for name, body in macros.items()
            if body.strip() and "," not in body and {*re.findall(r"[A-Za-z_]\w*", body)} <= known
        } - known  # fmt: skip
        if not more:
            return known
        known |= more


def without_directives(text: str, label: str) -> str:
    """The text without directives and without the parts under #if 0. Conditional parts that the
    text does not decide are left between `#if` and `#endif`, and `#include` in its place."""
    out: list[str] = []
    # Of each open #if: whether the text around it is read, whether a branch was taken, whether
    # this one is, whether a `#if` was left in the text.
    frames: list[list[bool]] = []
    reads = True
    at = 0
    while at < len(text):
        match = _DIRECTIVE.match(text, at)
        if match is None:
            end = text.find("\n", at) + 1 or len(text)
            if reads:
                out.append(text[at:end])
            at = end
            continue
        word, rest = match[1], match[2].strip()
        if word in ("elifdef", "elifndef"):
            word, rest = "elif", f"{word} {rest}"
        at = match.end()
        if word in ("if", "ifdef", "ifndef"):
            frames.append([reads, False, False, False])
            guard = re.match(
                rf"\s*#[ \t]*define[ \t]+{re.escape(rest)}[ \t]*\n", text[at : at + 400]
            )
            if word == "ifndef" and guard is not None:
                word, rest = "if", "1"  # a header's guard
        elif word in ("elif", "else", "endif") and not frames:
            raise refuse(label, f"has an #{word} without an #if", "plain C", rest or "none")
        if word in ("if", "ifdef", "ifndef", "elif", "else"):
            around, taken, _, marked = frames[-1]
            is_sure = word == "else" or (word in ("if", "elif") and rest in ("0", "1"))
            now = around and not taken and rest != "0"
            if now and not is_sure and not marked:
                out.append(" #if ")
                marked = True
            # The branches after one that may be taken may be taken, too: they stay marked.
            frames[-1] = [around, taken or (now and is_sure), now, marked]
            reads = now
        elif word in _INCLUDES and reads:
            out.append(" #include ")
        elif word == "endif":
            around, _, _, marked = frames.pop()
            if marked:
                out.append(" #endif ")
            reads = around
    if frames:
        raise refuse(label, "has an #if that does not end", "#endif", "the end")
    return "".join(out)


def macros(text: str) -> tuple[dict[str, str], set[str]]:
    """The bodies of the text's macros, and those that may expand to several values."""
    found = _MACRO.findall(text)
    plain = {name: "" if arguments else body for name, arguments, body in found}
    return plain, {name for name, _, body in found if "," in body}
