"""Tables of kernels in C text: the rows of arrays of structs.

Libraries of cubins describe their kernels in an array of structs, which is parsed, not compiled.
Numbers, strings, booleans and enumerators are values; other expressions are kept as text. A value
assigned to a wrong field would be a wrong launch: therefore fields that are not plain, and rows
whose values cannot be counted, are refused (docs/producers.md lists all that is). A compiler's
front end cannot do this: such tables name constants of headers that are not at hand, and have rows
of several configurations under #if, of which clang keeps one.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from torch_cubin import errors
from torch_cubin._declared import c_text
from torch_cubin._declared.c_text import refuse

_MOST_ROWS, _MOST_FIELDS, _MOST_DEPTH = 1 << 16, 512, 16
_TOKEN = re.compile(
    r"""\s*(?:("(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)')"""
    r"""|((?:0[xX][0-9a-fA-F]+|\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+)[uUlLfF]*)"""
    r"""|([A-Za-z_]\w*(?:\s*::\s*[A-Za-z_]\w*)*)|(\#(?:if|endif|include))"""
    r"""|([\[\]{}();,=.:*&<>+\-/|~!?%^]))"""
)
_KINDS = ("enum", "struct", "class", "union")
_OPEN, _CLOSE = {"(": ")", "{": "}", "[": "]"}, {")", "}", "]"}
# Words of a type besides one name, and the built-in types, which have no name.
_BUILT_IN = {"bool", "char", "short", "int", "long", "float", "double", "signed", "unsigned",
             "void", "wchar_t", "char8_t", "char16_t", "char32_t", "type"}  # fmt: skip
_QUALIFIERS = {"const", "volatile", "constexpr", "inline", "mutable", "typename", "__restrict__",
               "__restrict", *_KINDS}  # fmt: skip
# Types of several values, whose braces C++ allows a row to omit.
_VECTOR = re.compile(r"dim3|u?(?:char|short|int|long|longlong)[1-4]|(?:float|double|half)[1-4]")


@dataclasses.dataclass
class _Field:
    name: str
    is_optional: bool  # it has an initialiser
    is_array: bool = False
    is_text: bool = False  # an array of char, which a string may fill
    is_several: bool = False  # a struct, or a vector


class CTables:
    """The rows of every array of structs whose fields are in the text."""

    def __init__(self, text: str, label: str) -> None:
        self.label = label
        self.tokens: list[str] = []
        text = c_text.without_comments(text, label)
        macros, self.several = c_text.macros(text)
        self.macros = set(macros)
        self.one_value = c_text.one_value(text, macros) - self.several
        text = c_text.without_directives(text, label)
        at = 0
        while (match := _TOKEN.match(text, at)) is not None:
            self.tokens.append(match[0].strip())
            at = match.end()
        if text[at:].strip():
            raise refuse(
                label, "is no C that can be read", "an array of structs", text[at:].strip()
            )
        self.at = 0
        self.conditions = 0  # number of open #ifs
        self.is_sure = True  # that each value of the row being read is one
        # A struct that is not plain is refused when a table uses it.
        self.structs: dict[str, list[_Field] | errors.Error] = {}

    def refuse(self, problem: str, expected: str, got: str) -> errors.Error:
        return refuse(self.label, problem, expected, got)

    def peek(self, ahead: int = 0) -> str:
        place = self.at + ahead
        return self.tokens[place] if 0 <= place < len(self.tokens) else ""

    def read(self) -> tuple[list[dict[str, Any]], frozenset[int]]:
        """The rows, and the indices of those under an #if that the text does not decide."""
        rows: list[dict[str, Any]] = []
        conditional: set[int] = set()
        fields: list[_Field] | errors.Error | None = None  # of the type that was named last
        tables = 0
        while self.at < len(self.tokens):
            token = self.peek()
            is_array = self.peek(-1) == "]" and fields is not None
            if token in ("struct", "class") and self._body() is not None:
                fields = self._struct()
            elif token == "enum" and self._body() is not None:
                self._skip_to(self._end(self.at + (self._body() or 0)) + 1)
            elif token in self.structs:
                fields = self.structs[token]
                if self.peek(1) == "<":
                    fields = self.refuse(f"has a table of the template '{token}'", "a struct", "<")
                self.at += 1
            elif is_array and (token == "{" or (token == "=" and self.peek(1) == "{")):
                self.at += token == "="
                if isinstance(fields, errors.Error):
                    raise fields
                self._check_one_dimension()
                for value, is_conditional, is_sure in self._table():
                    row = self._row(value, fields or [], is_sure)
                    if row:
                        if is_conditional:
                            conditional.add(len(rows))
                        rows.append(row)
                tables += 1
                if self.peek() != ",":  # another table of the type may follow
                    fields = None
            elif token in (";", "*", "(", "{", "}"):
                fields = None
                self.at += 1
            else:
                self._count_condition(token)
                self.at += 1
        if not tables:
            expected = "struct NAME { FIELDS; } TABLE[] = {{...}, ...};"
            raise self.refuse("has no array of structs", expected, "none")
        return rows, frozenset(conditional)

    def _count_condition(self, token: str) -> bool:
        self.conditions += (token == "#if") - (token == "#endif")
        return token in ("#if", "#endif")

    def _skip_to(self, end: int) -> None:
        while self.at < end:
            self._count_condition(self.peek())
            self.at += 1

    def _check_one_dimension(self) -> None:
        place = self.at - 1
        while place > 0 and self.tokens[place] != "]":
            place -= 1
        while place > 0 and self.tokens[place] != "[":
            place -= 1
        if self.tokens[place - 1] == "]":
            raise self.refuse("has an array of arrays", "TABLE[] = {{...}, ...};", "more dims")

    def _body(self) -> int | None:
        """The number of tokens before the body; None without a body."""
        for ahead in range(1, 12):
            token = self.peek(ahead)
            if token == "{":
                return ahead
            if token in ("", ";", "=", "*", ")", ",", ">", "[", "#if", "#endif"):
                return None
        return None

    def _end(self, at: int) -> int:
        """The place of the bracket that closes the one at `at`."""
        wanted: list[str] = []
        for place in range(at, len(self.tokens)):
            token = self.tokens[place]
            if token in _OPEN:
                wanted.append(_OPEN[token])
            elif token in _CLOSE:
                if wanted.pop() != token:
                    break
                if not wanted:
                    return place
        raise self.refuse("has a brace that is not closed", f"'{_OPEN[self.tokens[at]]}'",
                          "the end")  # fmt: skip

    def _struct(self) -> list[_Field] | errors.Error:
        start = self.at + (self._body() or 1)
        head = [token for token in self.tokens[self.at + 1 : start] if token != "final"]
        has_base = ":" in head
        head = head[: head.index(":")] if has_base else head
        name = head[-1] if head else ""
        end = self._end(start)
        fields: list[_Field] | errors.Error
        try:
            if name in self.macros:
                raise self.refuse(f"has a struct '{name}' whose name is a macro", "a name", name)
            if has_base:
                raise self.refuse(f"has a struct '{name}' with a base", "all fields in it", "':'")
            fields = self._fields(start + 1, end, name)
        except errors.InputError as error:
            fields = error
        self._skip_to(end + 1)
        if name:
            if name in self.structs and self.structs[name] != fields:
                fields = self.refuse(f"has two structs '{name}'", "one", "another")
            self.structs[name] = fields
        return fields

    def _fields(self, at: int, end: int, struct: str) -> list[_Field]:
        fields: list[_Field] = []
        while at < end:
            token = self.tokens[at]
            if token == ";":
                at += 1
                continue
            if token in ("public", "private", "protected") and self.tokens[at + 1] == ":":
                at += 2
                continue
            declaration: list[str] = []  # with placeholders for braces and brackets
            while at < end and self.tokens[at] != ";":
                token = self.tokens[at]
                if token in _OPEN:
                    close = self._end(at)
                    is_type = token == "{" and _begins_type(declaration)
                    declaration.append("{type}" if is_type else token + _OPEN[token])
                    at = close + 1
                else:
                    declaration.append(token)
                    at += 1
            at += 1
            fields += self._declared(declaration, struct)
            if len(fields) > _MOST_FIELDS:
                raise self.refuse(f"has a struct '{struct}' of too many fields",
                                  f"at most {_MOST_FIELDS}", "more")  # fmt: skip
        if len({field.name for field in fields}) != len(fields):
            raise self.refuse(f"has a struct '{struct}' with a field twice", "each once", "more")
        return fields

    def _declared(self, words: list[str], struct: str) -> list[_Field]:
        """The fields of one declaration, in which "[]" stands for a bracket and its contents."""

        def refuse() -> errors.Error:
            return self.refuse(
                f"has a struct '{struct}' with a member that is no plain field",
                "TYPE NAME [= VALUE];",
                " ".join(words),
            )  # fmt: skip

        if words[0] in ("using", "typedef", "friend"):
            return []
        while words[:1] == ["[]"]:  # [[attribute]]
            words = words[1:]
        if words[:2] in (["alignas", "()"], ["__align__", "()"]):
            words = words[2:]
        before = words[: words.index("=")] if "=" in words else words
        if "()" in before or {"#if", "#endif", "#include", "operator"} & {*words} or not words:
            raise refuse()
        if not self.macros.isdisjoint(before):  # it may hold more fields
            raise refuse()
        if "static" in before:  # a constant, without a value in the rows
            return []
        is_several = "struct" in before or "class" in before or "union" in before
        if "{type}" in words:
            kind = next(word for word in words if word in _KINDS)
            after = words[words.index("{type}") + 1 :]
            is_named = words.index("{type}") - words.index(kind) > 1
            if not after:
                if kind != "enum" and not is_named:  # its fields are the struct's
                    raise refuse()
                return []
            is_several = kind != "enum"
            words = ["type", *after]
        fields: list[_Field] = []
        type_: list[str] | None = None
        for declarator in _split(words):
            value_at = min(
                (declarator.index(mark) for mark in ("=", "{}") if mark in declarator),
                default=len(declarator),
            )
            declared, value = declarator[:value_at], declarator[value_at:]
            if value[:1] == ["{}"] and len(value) > 1:
                raise refuse()
            is_array = declared[-1:] == ["[]"]
            while declared[-1:] == ["[]"]:
                declared = declared[:-1]
            if not all(word == "*" or _is_name(word) for word in declared):
                raise refuse()
            if type_ is None:  # the first has the type
                type_ = declared[:-1]
                named = [word for word in type_ if _is_name(word) and word not in _QUALIFIERS]
                # Another name next to the type is a macro, which may expand to more fields.
                if not named or (len(named) > 1 and not _BUILT_IN.issuperset(named)):
                    raise refuse()
            if not declared or not _is_name(declared[-1]) or "::" in declared[-1]:
                raise refuse()
            is_pointer = "*" in declared or ("*" in type_ and not fields)
            base = [word.rpartition("::")[2].strip() for word in type_ if _is_name(word)]
            fields.append(_Field(
                declared[-1], bool(value), is_array,
                is_text=is_array and not is_pointer and "char" in base,
                is_several=not is_pointer and (
                    is_several or any(_VECTOR.fullmatch(b) or b in self.structs for b in base)
                ),
            ))  # fmt: skip
        return fields

    def _table(self) -> list[tuple[Any, bool, bool]]:
        """The values of a table's braces, which begin here. Of each, whether it is under an #if,
        and whether each of its own values surely is one."""
        self.at += 1
        values: list[tuple[Any, bool, bool]] = []
        while self._skip_conditions() != "}":
            if len(values) > _MOST_ROWS or not self.peek():
                raise self.refuse("has braces that do not end", "'}'", self.peek())
            self.is_sure = True
            value = self._value(0)
            values.append((value, self.conditions > 0, self.is_sure))
            if self._skip_conditions() == ",":
                self.at += 1
            elif self.peek() != "}":
                raise self.refuse("has rows without a comma between them", "','", self.peek())
        self.at += 1
        return values

    def _skip_conditions(self) -> str:
        while self._count_condition(self.peek()):
            self.at += 1
        return self.peek()

    def _braces(self, depth: int) -> Any:
        """The values in braces, which begin here: a list, or a dict if they are designated."""
        self.at += 1
        values: list[Any] = []
        while self.peek() != "}":
            if depth > _MOST_DEPTH or len(values) > _MOST_ROWS or not self.peek():
                raise self.refuse("has braces that do not end", "'}'", self.peek())
            values.append(self._value(depth))
            if self.peek() == ",":
                self.at += 1
            elif self.peek() != "}":
                raise self.refuse("has values without a comma between them", "','", self.peek())
        self.at += 1
        named = [value for value in values if isinstance(value, tuple)]
        if not named:
            return values
        if len(named) != len(values) or len(dict(named)) != len(named):
            raise self.refuse("has a row that names some of its fields, or one twice",
                              "all named, or none", repr(values))  # fmt: skip
        return dict(named)

    def _value(self, depth: int) -> Any:
        name = None
        if self.peek() == "." and self.peek(2) in ("=", "{"):  # .field = value
            name = self.peek(1)
            self.at += 3 if self.peek(2) == "=" else 2
        if self.peek() == "{":
            value: Any = self._braces(depth + 1)
        else:
            words: list[str] = []
            level = 0
            while self.peek() and (level or self.peek() not in (",", "}")):
                level += (self.peek() in _OPEN) - (self.peek() in _CLOSE)
                words.append(self.peek())
                self.at += 1
            self._check_words(words)
            if depth == 1:
                names = {word for word in words if _is_name(word)}
                self.is_sure &= names <= self.one_value
            value = _constant(words)
        return value if name is None else (name, value)

    def _check_words(self, words: list[str]) -> None:
        """Refuses words after which a comma may not separate values."""
        text = " ".join(word for word in words if word[0] not in "\"'")
        plain = re.sub(r"< <|> >|- >|< =|> =", "", text)
        is_wrong = not words or not self.several.isdisjoint(words) or "<" in plain or ">" in plain
        is_wrong = is_wrong or not {"#if", "#endif", "#include"}.isdisjoint(words)
        if is_wrong or words[0] in (".", "[") or (":" in words and "?" not in words):
            raise self.refuse("has a value that cannot be read", "a number, a string or a name",
                              text or "none")  # fmt: skip

    def _row(self, values: Any, fields: list[_Field], is_sure: bool) -> dict[str, Any]:
        """A row's values by field; {} for the row of zeros that ends some tables. Where it is not
        sure that each of them is one value, none may be missing: then a compiler would refuse more.
        """
        if isinstance(values, dict):
            row = values
        elif isinstance(values, list) and len(values) <= len(fields):
            row = {field.name: value for field, value in zip(fields, values, strict=False)}
        else:
            row = None
        if values in ([], [0], [None]):
            return {}
        known = {field.name: field for field in fields}
        missing = [] if row is None or row is values else [
            field.name for field in fields if field.name not in row and not field.is_optional
        ]  # fmt: skip
        if row is None or missing or not row.keys() <= known.keys():
            count = errors.counted(len(fields), "value")
            expected = f"{count} ({', '.join(known)})" if len(fields) < 8 else count
            raise self.refuse("has a row that does not fit its struct", expected, repr(values))
        if row is not values and len(row) < len(fields) and not is_sure:
            raise self.refuse(
                "has a short row with a name that may be a macro of several values",
                "names that the text declares, or all values", repr(values),
            )  # fmt: skip
        for name, value in row.items():
            field = known[name]
            is_list = isinstance(value, (list, dict)) or (field.is_text and isinstance(value, str))
            if (field.is_array or field.is_several) and not is_list:
                raise self.refuse(f"has a row whose field '{name}' is not in braces", "{...}",
                                  repr(value))  # fmt: skip
        return row


def _begins_type(words: list[str]) -> bool:
    """Whether a brace after these words of a declaration is a type's body, not a value."""
    kinds = [word for word in words if word in _KINDS]
    if not kinds or "=" in words:
        return False
    after = words[words.index(kinds[0]) + 1 :]
    after = after[: after.index(":")] if ":" in after else after
    names = [word for word in after if _is_name(word)]
    return len([word for word in names if word not in (*_KINDS, "final", "alignas")]) <= 1


def _is_name(word: str) -> bool:
    return word[0].isalpha() or word[0] == "_"


def _split(words: list[str]) -> list[list[str]]:
    """Splits a declaration at its commas."""
    parts: list[list[str]] = [[]]
    for word in words:
        if word == ",":
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def _constant(words: list[str]) -> Any:
    """A number, a bool, a string, None, an enumerator's name without its scope, or the text."""
    if len(words) == 2 and words[0] in ("-", "+"):
        value = _constant(words[1:])
        if type(value) in (int, float):
            return -value if words[0] == "-" else value
        return f"{words[0]}{value}"
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
