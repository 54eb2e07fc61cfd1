"""c_struct(): a struct that a kernel takes by value, read from its C text.

Reads declarations alone: structs within structs, arrays, pointers, alignas, typedefs, enums, sizes
that are constants of the text. What it does not know it refuses: a field at a wrong place would be
a wrong number. The size is compared with the binary's parameter where an op is defined.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch_cubin import errors
from torch_cubin._declared import c_tokens

_MOST_TEXT, _MOST_FIELDS, _MOST_DEPTH = 1 << 20, 4096, 32


@dataclasses.dataclass(frozen=True)
class Field:
    """`kind`: as a contract has scalars, "pointer", "tensor_map", or a CStruct."""

    offset: int
    kind: Any
    count: int | None  # items of an array
    step: int  # bytes between them
    default: Any = 0


@dataclasses.dataclass(frozen=True)
class CStruct:
    """A struct's layout: what c_struct() gives, and torch_cubin.struct takes."""

    name: str
    size: int
    align: int
    fields: dict[str, Field]

    def __repr__(self) -> str:
        return f"<torch_cubin.CStruct '{self.name}' of {self.size} bytes: {', '.join(self.fields)}>"


# Of each type: bytes, alignment, kind, and items where it is a vector.
_SCALARS: dict[str, tuple[int, int, str, int | None]] = {
    "bool": (1, 1, "bool", None),
    "char": (1, 1, "int8", None), "signed char": (1, 1, "int8", None),
    "unsigned char": (1, 1, "uint8", None), "short": (2, 2, "int16", None),
    "unsigned short": (2, 2, "uint16", None), "int": (4, 4, "int32", None),
    "unsigned int": (4, 4, "uint32", None), "long": (8, 8, "int64", None),
    "unsigned long": (8, 8, "uint64", None), "long long": (8, 8, "int64", None),
    "unsigned long long": (8, 8, "uint64", None), "size_t": (8, 8, "uint64", None),
    "intptr_t": (8, 8, "int64", None), "uintptr_t": (8, 8, "uint64", None),
    "float": (4, 4, "float32", None), "double": (8, 8, "float64", None),
    "half": (2, 2, "float16", None), "__half": (2, 2, "float16", None),
    "__nv_bfloat16": (2, 2, "bfloat16", None), "nv_bfloat16": (2, 2, "bfloat16", None),
    # Types of CUDA's that are given as the bits that they hold.
    "half2": (4, 4, "uint32", None), "__half2": (4, 4, "uint32", None),
    "__nv_bfloat162": (4, 4, "uint32", None),
    "__nv_fp8_e4m3": (1, 1, "uint8", None), "__nv_fp8_e5m2": (1, 1, "uint8", None),
    "CUtensorMap": (128, 64, "tensor_map", None), "dim3": (12, 4, "uint32", 3),
    # Handles.
    **dict.fromkeys(
        ("cudaStream_t", "cudaEvent_t", "cudaLibrary_t", "cudaKernel_t", "CUstream", "CUevent",
         "CUmodule", "CUfunction", "CUlibrary", "CUkernel", "CUdeviceptr"),
        (8, 8, "uint64", None)),
    **{f"{sign}int{bits}_t": (bits // 8, bits // 8, f"{sign}int{bits}", None)
       for bits in (8, 16, 32, 64) for sign in ("", "u")},
    **{f"{name}{n}": (size * n, size * {1: 1, 2: 2, 3: 1, 4: 4}[n], kind, n)
       for name, size, kind in (("int", 4, "int32"), ("uint", 4, "uint32"),
                                ("float", 4, "float32")) for n in (1, 2, 3, 4)},
}  # fmt: skip
_WORDS = {"signed", "unsigned", "char", "short", "int", "long", "float", "double"}
_IGNORED = {
    *("const", "volatile", "struct", "class", "enum", "__restrict__", "__restrict", "typename"),
}


@errors.named_keywords
def c_struct(text: str, name: str, *, prefix: int | None = None) -> CStruct:
    """The layout of a struct, from C or C++ text that declares it: a header's, as a whole.

        Params = torch_cubin.c_struct(open("params.h").read(), "Params")
        args=lambda q, out: (torch_cubin.struct(Params, q_ptr=q, o_ptr=out, scale=0.5),)

    torch_cubin.struct takes its fields by name; those that are not named are zero, or what their
    initialiser says. A field may be a number, a pointer (a tensor), a tensor map (`CUtensorMap`),
    an array, a struct (its own struct() or a dict); `half2` and its kin are the bits, an int.
    `prefix`: the kernel takes the first so many bytes alone, as kernels older than the text do.

    Raises InputError [input] for a struct that is not there, and, with its line, for what is no
    plain declaration: bit fields, functions, templates, base classes, unknown types. A struct that
    `#pragma pack` or an attribute packs, and one that has such a struct, is refused; macros that
    pack refuse the whole text: give what the preprocessor makes of it.
    """
    if not isinstance(text, str) or not isinstance(name, str):
        got = f"{type(text).__name__}, {type(name).__name__}"
        raise errors.fault("input", "torch_cubin.c_struct", "has a wrong type", expected="str, str",
                           got=got)  # fmt: skip
    if len(text) > _MOST_TEXT:
        expected = f"at most {_MOST_TEXT} characters"
        raise errors.fault("input", "torch_cubin.c_struct", "is given too much text",
                           expected=expected, got=str(len(text)))  # fmt: skip
    reader = _Reader(text, name)
    found = reader.read()
    if prefix is None:
        return found
    if type(prefix) is not int or not 0 < prefix <= found.size:
        raise errors.fault("input", f"c_struct '{name}' argument 'prefix'", "is out of range",
                           expected=f"1 to {found.size} bytes", got=repr(prefix))  # fmt: skip
    kept = {n: f for n, f in found.fields.items() if _end(f) <= prefix}
    return CStruct(name, prefix, found.align, kept)


def _end(field: Field) -> int:
    return field.offset + field.step * (1 if field.count is None else field.count)


# Of the names that attributes have, those that leave a layout alone.
_HARMLESS = {
    *("deprecated", "device_builtin", "gnu", "may_alias", "maybe_unused", "nodiscard", "unused"),
    *("using", "visibility"),
}


class _Reader:
    def __init__(self, text: str, name: str) -> None:
        self.wanted = name
        # As _SCALARS, a CStruct, or the refusal of a packed one.
        self.types: dict[str, Any] = dict(_SCALARS)
        text = c_tokens.without_comments(text)
        self.constants = c_tokens.defined_integers(text)
        self.tokens = [*c_tokens.tokens(text, f"c_struct '{name}'")]
        self.attributes: list[tuple[int, errors.Error]] = []  # those refused, with their tokens
        self.at = self.depth = 0

    def refuse(self, problem: str, expected: str = "", got: str = "", at: int = -1) -> errors.Error:
        place = min(self.at if at < 0 else at, len(self.tokens) - 1)
        line = self.tokens[place][1] if self.tokens else 1
        where = f"c_struct '{self.wanted}' line {line}"
        return errors.fault("input", where, problem, expected=expected, got=f"{got:.80}")

    def peek(self, ahead: int = 0) -> str:
        place = self.at + ahead
        return self.tokens[place][0] if place < len(self.tokens) else ""

    def take(self, wanted: str = "") -> str:
        token = self.peek()
        if not token or (wanted and token != wanted):
            raise self.refuse(
                "does not parse", f"'{wanted}'" if wanted else "more", token or "the end"
            )
        self.at += 1
        return token

    def read(self) -> CStruct:
        """Walks the whole text: what is no declaration of a type or a constant is passed over."""
        while self.at < len(self.tokens):
            token = self.peek()
            if token in ("struct", "class", "union") and self._defines():
                self._definition()
            elif token == "enum":
                self._enum()
            elif token in ("typedef", "using"):
                self._alias()
            elif token in ("constexpr", "const", "static") and self._constant():
                continue
            else:
                self.at += 1
        found = self.types.get(self.wanted)
        if isinstance(found, errors.Error):
            raise found
        if not isinstance(found, CStruct):
            known = [n for n, t in self.types.items() if isinstance(t, CStruct)]
            raise errors.fault(
                "input", f"c_struct '{self.wanted}'", "is not in the text",
                expected=errors.nearest(self.wanted, known) if known else "struct NAME { ... };",
            )  # fmt: skip
        return found

    def _defines(self) -> bool:
        """Whether a body follows: not a mention of the struct, nor its declaration ahead."""
        ahead = 1
        depth = 0  # of the brackets of alignas(16) and of attributes
        while depth or self.peek(ahead) not in ("{", ";", "", ")", ">", "=", "*", ","):
            token = self.peek(ahead)
            if not token:
                return False
            depth += (token in ("(", "[")) - (token in (")", "]"))
            ahead += 1
        return self.peek(ahead) == "{"

    def _definition(self) -> Any:
        start = self.at
        if self.take() == "union":
            raise self.refuse("has a union", "a struct")
        align = self._alignment()
        name = "" if self.peek() in ("{", ":") else self.take()
        align = max(align, self._alignment())
        if self.peek() == "final":
            self.take()
        if self.peek() == ":":
            raise self.refuse("has a base class", "all fields in one struct", name)
        made = self._body(name, align)
        # Compilers differ in which token of a struct its #pragma pack is looked up at.
        limit = min(limit for _, _, limit in self.tokens[start : self.at])
        if self.attributes and self.attributes[-1][0] >= start:
            made = self.attributes[-1][1]
        elif isinstance(made, CStruct) and limit < made.align:
            got = f"#pragma pack({limit})" if limit else "an unclear or conditional #pragma pack"
            made = self.refuse("packs structs", "plain alignment", got, start)
        if name:
            self.types[name] = made
        return made

    def _alignment(self) -> int:
        most = self._attributes()
        while self.peek() in ("alignas", "__align__"):
            self.take()
            self.take("(")
            most = max(most, self._size(")"), self._attributes())
        return most

    def _attributes(self) -> int:
        """The most alignment that attributes ask for; what else they do to a layout is noted."""
        most = 1
        while self.peek() in ("__attribute__", "__attribute", "__packed") or (
            self.peek() == self.peek(1) == "["
        ):
            start, first = self.at, self.take()
            depth = int(first == "[")
            problem = "packs structs" if first == "__packed" else ""
            while depth or (first.startswith("__attribute") and self.at == start + 1):
                token = self.take()
                depth += (token in ("(", "[")) - (token in (")", "]"))
                word = token.split("::")[-1].strip("_")
                if depth != 2 or not word.isidentifier() or word in _HARMLESS:
                    continue
                if word == "aligned" and self.peek() == "(":
                    self.take()
                    most = max(most, self._size(")"))
                elif word == "packed":
                    problem = "packs structs"
                else:
                    problem = problem or "has an unknown attribute"
            if problem:
                got = "".join(token for token, *_ in self.tokens[start : self.at])
                refusal = self.refuse(problem, "plain alignment", got, start)
                self.attributes.append((start, refusal))
        return most

    def _body(self, name: str, align: int) -> CStruct | errors.Error:
        self.take("{")
        self.depth += 1
        if self.depth > _MOST_DEPTH:
            raise self.refuse("is nested too deeply", f"at most {_MOST_DEPTH} structs in one")
        fields: dict[str, Field] = {}
        offset = 0
        refusal: errors.Error | None = None  # of a field's struct
        while self.peek() != "}":
            if self.peek() in ("public", "private", "protected") and self.peek(1) == ":":
                self.at += 2
                continue
            if self.peek() == ";":
                self.take()
                continue
            if self.peek() == "#":
                expected = "plain fields: the text as the preprocessor leaves it"
                raise self.refuse("has a conditional part", expected)
            if self.peek() == "static" or self.peek() == "constexpr":
                if not self._constant():
                    raise self.refuse(
                        "has a member that is no field", "constexpr int NAME = NUMBER;"
                    )
                continue
            if self.peek() == "enum" and self._defines():
                self._enum()
                continue
            if self.peek() in ("using", "typedef"):
                self._alias()
                continue
            if self.peek() == "template" or self.peek() == "union":
                raise self.refuse(f"has a {self.peek()}", "plain fields")
            for field_name, size, field_align, kind, count, default in self._fields():
                if field_name in fields or len(fields) == _MOST_FIELDS:
                    raise self.refuse("has a field twice, or too many", "each once", field_name)
                offset = -(-offset // field_align) * field_align
                fields[field_name] = Field(offset, kind, count, size, default)
                offset += size * (1 if count is None else count)
                align = max(align, field_align)
                if isinstance(kind, errors.Error):
                    refusal = kind
        self.take("}")
        align = max(align, self._attributes())
        self.depth -= 1
        if not fields:
            raise self.refuse("is a struct without fields", "one or more", name)
        if refusal is not None:
            return refusal
        return CStruct(name, -(-offset // align) * align, align, fields)

    def _fields(self) -> list[tuple[str, int, int, Any, int | None, Any]]:
        """The declarators of one declaration, up to its semicolon."""
        align = self._alignment()
        is_definition = self.peek() == "struct" and self._defines()
        base = self._definition() if is_definition else self._type()
        align = max(align, self._alignment())
        out = []
        if self.peek() == ";":  # a struct that is declared within and not used
            self.take()
            return out
        while True:
            out.append(self._declarator(base, align))
            if self.take() == ";":
                return out
            if self.tokens[self.at - 1][0] != ",":
                self.at -= 1
                what = "a bit field" if self.peek() == ":" else "a function or more than a field"
                raise self.refuse(f"has {what}", "plain fields", self.peek())

    def _declarator(self, base: Any, align: int) -> tuple[str, int, int, Any, int | None, Any]:
        pointer = False
        while self.peek() in ("*", "const", "volatile", "__restrict__", "__restrict"):
            pointer |= self.take() == "*"
        if self.peek() == "(":
            raise self.refuse("has a pointer to a function or an array", "plain fields")
        name = self.take()
        if not name.isidentifier():
            raise self.refuse("does not parse", "a field's name", name)
        count: int | None = None
        while self.peek() == "[" != self.peek(1):
            self.take()
            count = (1 if count is None else count) * self._size("]")
        align = max(align, self._attributes())
        if pointer:
            size, natural, kind, items = 8, 8, "pointer", None
        elif isinstance(base, CStruct):
            size, natural, kind, items = base.size, base.align, base, None
        elif isinstance(base, errors.Error):
            size, natural, kind, items = 1, 1, base, None
        else:
            size, natural, kind, items = base
            if kind == "void":
                raise self.refuse("has a field of type void", "a type with a size", name)
        if items is not None:  # float4: an array of four
            size //= items
            count = items if count is None else count * items
        return name, size, max(natural, align), kind, count, self._initialiser(count, kind)

    def _initialiser(self, count: int | None, kind: Any) -> Any:
        if self.peek() == "=":
            self.take()
        elif self.peek() != "{":
            return 0
        braces = self.peek() == "{"
        if braces:
            self.take()
            if self.peek() == "}":
                self.take()
                return 0
        sign = 1
        if self.peek() == "-":
            self.take()
            sign = -1
        token = self.take()
        words = {"true": 1, "false": 0, "nullptr": 0, "NULL": 0, **self.constants}
        try:
            value = words.get(token, c_tokens.integer(token))
            if value is None:  # 08 is no number of C's
                value = float("none" if token.isdigit() else token)
        except ValueError:
            raise self.refuse("has an initialiser that is no number", "a number", token) from None
        if braces:
            if self.peek() == ",":
                raise self.refuse("has an initialiser of several values", "a number, or {}")
            self.take("}")
        if value and (count is not None or kind == "pointer" or not isinstance(kind, str)):
            raise self.refuse("has an initialiser of what is no number", "{} or none", token)
        return sign * value

    def _type(self) -> Any:
        while self.peek() in _IGNORED:
            self.take()
        name = self.take()
        words = [name]
        if name in _WORDS:
            while self.peek() in _WORDS or self.peek() in _IGNORED:
                word = self.take()
                if word not in _IGNORED:
                    words.append(word)
            name = _plain(words)
        while self.peek() in ("const", "volatile"):
            self.take()
        if self.peek() == "<":
            raise self.refuse("has a template's type", "plain types", name)
        if name == "void" or (name not in self.types and self.peek() == "*"):
            return (0, 1, "void", None)  # what it points to does not matter
        if name not in self.types:
            raise self.refuse(
                "has a type that is not known", "one of C's, CUDA's or the text's", name
            )
        return self.types[name]

    def _size(self, end: str) -> int:
        """A constant: a number or a name, and products and sums of them."""
        value, product, operator = 0, 0, "+"
        while True:
            token = self.take()
            number = self.constants.get(token, c_tokens.integer(token))
            if number is None:
                raise self.refuse("has a size that is no constant of the text", "a number", token)
            if operator == "*":
                product *= number
            else:
                value, product = value + product, number
            operator = self.take()
            if operator == end:
                break
            if operator not in ("+", "*"):
                raise self.refuse("has a size that is no constant", f"'{end}'", operator)
        value += product
        if not 0 < value <= 1 << 20:
            raise self.refuse("has a size out of range", "1 to 2^20", str(value))
        return value

    def _constant(self) -> bool:
        """static constexpr int NAME = NUMBER; False, having moved on by one, for another thing."""
        start = self.at
        words = []
        while self.peek() not in ("=", ";", "{", "(", "", "}"):
            words.append(self.take())
        value = c_tokens.integer(self.peek(1))
        if self.peek() == "=" and words and value is not None:
            self.constants[words[-1]] = value
            if self.peek(2) == ";":
                self.at += 3
                return True
        self.at = start + 1
        return False

    def _enum(self) -> Any:
        start = self.at
        self.take()
        while self.peek() in ("class", "struct"):
            self.take()
        align = self._attributes()
        name = "" if self.peek() in ("{", ":") else self.take()
        made = self.types["int"]
        if self.peek() == ":":
            self.take()
            made = self._type()
        if self.peek() == "{":
            while self.take() != "}":
                pass
        if max(align, self._attributes()) > 1:
            made = self.refuse("aligns an enum", "plain enums", name, start)
        if self.attributes and self.attributes[-1][0] >= start:
            made = self.attributes[-1][1]
        if name:
            self.types[name] = made
        return made

    def _alias(self) -> None:
        """typedef TYPE NAME; using NAME = TYPE; what is more than that is passed over."""
        start, word = self.at, self.take()
        try:
            if word == "using":
                name = self.take()
                self.take("=")
                self.types[name] = self._type()
                self.take(";")
                return
            if self.peek() in ("struct", "enum") and self._defines():
                made = self._enum() if self.peek() == "enum" else self._definition()
                self.types[self.take()] = made
                self.take(";")
                return
            base = self._type()
            pointer = self.peek() == "*"
            if pointer:
                self.take()
            self.types[self.take()] = (8, 8, "pointer", None) if pointer else base
            self.take(";")
        except errors.InputError:
            self.at = start
            if word == "typedef" and self.peek(1) == "struct":
                raise
            self.at = start + 1


def _plain(words: list[str]) -> str:
    """C's names of integers, in one spelling."""
    if words[0] in ("float", "double") or "double" in words:
        return words[-1]
    sign = "unsigned " if "unsigned" in words else "signed " if "signed" in words else ""
    longs = words.count("long")
    if "char" in words:
        return f"{sign}char"
    base = "short" if "short" in words else "long long" if longs > 1 else "long" if longs else "int"
    return base if sign != "unsigned " else f"unsigned {base}"
