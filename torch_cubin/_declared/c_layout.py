"""The fields of a struct in clang's layout, and the kind of value of each (for c_struct.py)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

from torch_cubin import errors
from torch_cubin._declared import c_builtin, c_device, c_front_end

_MOST_FIELDS, _MOST_SIZE = 4096, 1 << 20


@dataclasses.dataclass(frozen=True)
class Field:
    """`kind`: a contract's scalar type, "pointer", "tensor_map", "bytes", or a CStruct."""

    offset: int
    kind: Any
    count: int | None  # number of items of an array
    step: int  # bytes between items
    # The default value: a number, an array's numbers, or the reason why it is unknown.
    default: Any = 0
    bit: int = 0  # bit fields: the first bit in the byte at `offset`, and the number of bits
    bits: int | None = None

    @property
    def end(self) -> int:
        if self.bits is not None:
            return self.offset + (self.bit + self.bits + 7) // 8
        return self.offset + self.step * (1 if self.count is None else self.count)


@dataclasses.dataclass(frozen=True)
class CStruct:
    """A struct's layout, and a constructor of its values: the result of c_struct().

    PARAMS(q=..., k=...) is torch_cubin.struct(PARAMS, q=..., k=...).
    """

    name: str
    size: int
    align: int
    fields: dict[str, Field]

    def __call__(self, /, **members: Any) -> Any:
        from torch_cubin._declared.kernel_arguments import struct

        return struct(self, **members)

    def __repr__(self) -> str:
        return f"<torch_cubin.CStruct '{self.name}' of {self.size} bytes: {', '.join(self.fields)}>"


# clang-c/Index.h: CXTypeKind. The Python of libclang 18 does not list all of them.
_KINDS = {
    3: "bool", 4: "uint8", 5: "uint8", 6: "uint16", 7: "uint32", 8: "uint16", 9: "uint32",
    10: "uint64", 11: "uint64", 13: "int8", 14: "int8", 15: "int32", 16: "int16", 17: "int32",
    18: "int64", 19: "int64", 21: "float32", 22: "float64", 31: "float16", 32: "float16",
    39: "bfloat16", 101: "pointer",
}  # fmt: skip
_POINTER, _REFERENCE, _RVALUE_REFERENCE, _RECORD, _ENUM = 101, 103, 104, 105, 106
_COMPLEX, _ARRAY, _VECTOR, _FLEXIBLE, _EXT_VECTOR = 100, 112, 113, 114, 176
# CUDA's records that are passed as numbers. Others of 1, 2, 4 or 8 bytes are passed as bits.
_NUMBERS = {"__half": "float16", "__nv_bfloat16": "bfloat16"}
_VENDORS = re.compile(r"__half\w*|__nv_(?:bfloat|fp)\w*")
_VECTORS = re.compile(r"dim3|(?:u?(?:char|short|int|long|longlong)|float|double)[1-4](?:_\d+a)?")
_MAPS = ("CUtensorMap_st", "CUtensorMap")


_VALUE = "inline auto* torch_cubin_value = new torch_cubin_wanted{};"


class _Hidden(Exception):
    """The reason why libclang does not list the fields of a struct whose size clang knows."""


class Reader:
    """Reads one struct in one configuration."""

    def __init__(self, text: c_front_end.Text, name: str, options: Sequence[str]) -> None:
        self.text, self.wanted, self.options = text, name, options
        self.kinds = c_front_end.cindex().CursorKind
        self.library = c_front_end.cindex().conf.lib
        self.count = 0  # number of fields, including those of nested structs
        # Offsets of bases, which libclang does not give, by the probe that asks clang for one.
        self.probes: dict[str, int | None] = {}
        # Compiled as well: a value, which makes clang instantiate the initialisers of templates.
        self.value = ""

    def refuse(
        self, problem: str, expected: str, cursor: Any = None, got: str = "", advice: str = ""
    ) -> errors.Error:
        line = f" line {cursor.location.line}" if cursor is not None else ""
        return errors.fault("input", f"c_struct '{self.wanted}'{line}", problem, expected=expected,
                            got=f"{got:.80}", advice=advice)  # fmt: skip

    def read(self) -> tuple[CStruct, c_front_end.Parsed]:
        self.parsed = self.text.parse(options=self.options)
        name = self._name()
        # An alias or a template's instantiation is complete once its size is needed.
        use = f"typedef {name} torch_cubin_wanted; enum {{ torch_cubin_size = sizeof({name}) }};"
        while True:
            known = {*self.probes, self.value}
            asked = "".join(f"enum : unsigned long {{ torch_cubin_probe{i} = {probe} }};"
                            for i, probe in enumerate(self.probes))  # fmt: skip
            try:
                self.parsed = self.text.parse(f"\n{use}{asked}{self.value}", self.options)
            except errors.InputError as error:
                if self.value == _VALUE:  # for example because it has no default constructor
                    self.value = " "
                    continue
                raise self.refuse("cannot be laid out", "a complete struct, and fields of bases"
                                  " with a name each", got=str(error).split("got ")[-1],
                                  ) from None  # fmt: skip
            wanted = None
            for cursor in self.parsed.unit.cursor.get_children():
                if cursor.spelling == "torch_cubin_wanted":
                    wanted = cursor.underlying_typedef_type.get_canonical()
                elif cursor.kind == self.kinds.ENUM_DECL:
                    for item in cursor.get_children():
                        if item.spelling.startswith("torch_cubin_probe"):
                            probe = list(self.probes)[int(item.spelling[17:])]
                            self.probes[probe] = item.enum_value
            if wanted is None or wanted._kind_id != _RECORD:
                raise self.refuse("is no struct", "a struct, or a typedef of one", got=name)
            self.count = 0
            try:
                found = self._struct(wanted)
            except _Hidden as hidden:
                raise hidden.args[0] from None
            if known == {*self.probes, self.value}:
                break
        if not found.fields:
            raise self.refuse("is a struct without fields", "one or more", got=name)
        if found.size > _MOST_SIZE:
            raise self.refuse("has a size out of range", f"at most {_MOST_SIZE} bytes",
                              got=str(found.size))  # fmt: skip
        return dataclasses.replace(found, name=self.wanted), self.parsed

    def _name(self) -> str:
        """The struct's qualified name. The namespace may be omitted if the name is unique."""
        if "<" in self.wanted:
            if re.fullmatch(r"[\w:<>,\s*&()+-]+", self.wanted) is None:
                raise self.refuse("is no name of a struct", "ns::Params<128>", got=self.wanted)
            return self.wanted
        wanted = self.wanted.removeprefix("::")
        names: set[str] = set()  # of structs
        of_system: set[str] = set()  # of structs in headers of CUDA and g++
        templates: set[str] = set()
        self._declared(self.parsed.unit.cursor, "", names, of_system, templates)
        fits = sorted(n for n in names if n == wanted or n.endswith(f"::{wanted}"))
        fits = fits or [wanted] * (wanted in of_system)
        if wanted in fits:
            return f"::{wanted}"
        if len(fits) == 1:
            return f"::{fits[0]}"
        if fits:
            raise self.refuse("is the name of several structs", "one, with its namespace",
                              got=", ".join(fits))  # fmt: skip
        if any(t == wanted or t.endswith(f"::{wanted}") for t in templates):
            raise self.refuse("is a template", f"its arguments, as {wanted}<128>", got=wanted)
        known = errors.nearest(wanted, sorted(names)) if names else "struct NAME { ... };"
        raise self.refuse("is not in the text", known)

    def _declared(
        self, within: Any, scope: str, names: set[str], of_system: set[str], templates: set[str]
    ) -> None:
        kinds = self.kinds
        records = (kinds.STRUCT_DECL, kinds.CLASS_DECL, kinds.UNION_DECL)
        for cursor in within.get_children():
            kind, name = cursor.kind, cursor.spelling
            full = f"{scope}{name}" if name.isidentifier() else scope.removesuffix("::")
            if kind in (kinds.TYPEDEF_DECL, kinds.TYPE_ALIAS_DECL) or (
                kind in records and cursor.is_definition() and name.isidentifier()
            ):
                (of_system if cursor.location.is_in_system_header else names).add(full)
            elif kind == kinds.CLASS_TEMPLATE:
                templates.add(full)
            if kind in (kinds.NAMESPACE, kinds.LINKAGE_SPEC, kinds.UNEXPOSED_DECL, *records) and (
                kind not in records or name.isidentifier()
            ):
                inner = full if kind in (kinds.NAMESPACE, *records) else scope.removesuffix("::")
                self._declared(cursor, f"{inner}::" if inner else "", names, of_system, templates)

    def _struct(self, type_: Any) -> CStruct:
        declaration = type_.get_declaration()
        self._check_attributes(declaration)
        fields: dict[str, Field] = {}
        for cursor, place in self.fields(type_):
            self.count += 1
            if cursor.spelling in fields or self.count > _MOST_FIELDS:
                raise self.refuse("has a field twice, or too many", "each once, in bases too",
                                  cursor, cursor.spelling)  # fmt: skip
            fields[cursor.spelling] = self._field(cursor, place)
        name = declaration.spelling if declaration.spelling.isidentifier() else "(unnamed)"
        return CStruct(name, type_.get_size(), type_.get_align(), fields)

    def fields(self, type_: Any) -> Iterator[tuple[Any, int]]:
        """Each field and its first bit, including those of bases and of anonymous members."""
        declaration = type_.get_declaration()
        end = 0  # of the data so far
        for base in self.bases(declaration):
            c_device.check_base(self, declaration, base)
            for cursor, place in self._of_base(type_, base):
                end = max(end, place + 8 * cursor.type.get_size())
                yield cursor, place
        for cursor in type_.get_fields():
            place = cursor.get_field_offsetof()
            if place < 0:
                raise self.refuse("has a field that cannot be placed", "a complete type", cursor)
            c_device.check_alignment(self, cursor, type_)
            if not c_device.is_empty_without_address(self, cursor, end):
                end = max(end, place + 8 * cursor.type.get_size())
            inner = cursor.type.get_canonical()
            if self.library.clang_Cursor_isAnonymousRecordDecl(inner.get_declaration()):
                self._check_attributes(inner.get_declaration())
                for member, offset in self.fields(inner):
                    yield member, place + offset
            elif cursor.spelling:  # bit fields without a name are padding
                yield cursor, place

    def bases(self, declaration: Any) -> list[Any]:
        """The types of the base classes. Refuses structs with virtual functions."""
        is_instantiated = not any(True for _ in declaration.get_children())
        bases = []
        for member in self.members(declaration):
            if member.kind == self.kinds.CXX_BASE_SPECIFIER:
                if is_instantiated:
                    raise _Hidden(self.refuse(
                        "has a template with a base class", "the bytes of its field, or a template"
                        " without bases", member, member.spelling))  # fmt: skip
                if self.library.clang_isVirtualBase(member):
                    raise self.refuse("has a virtual base", "plain bases", member, member.spelling)
                bases.append(member.type.get_canonical())
            is_method = member.kind in (self.kinds.CXX_METHOD, self.kinds.DESTRUCTOR)
            if is_method and member.is_virtual_method():
                raise self.refuse("has a virtual function, whose table is the host's",
                                  "plain functions", member, member.spelling)  # fmt: skip
        return bases

    def members(self, declaration: Any) -> list[Any]:
        """A class's members; those of its template where libclang lists none of an instance."""
        members = list(declaration.get_children())
        template = self.library.clang_getSpecializedCursorTemplate(declaration)
        return members if members or template is None else list(template.get_children())

    def _of_base(self, type_: Any, base: Any) -> Iterator[tuple[Any, int]]:
        fields = list(self.fields(base))
        if not fields:
            return
        # The offset of one field gives that of the base; offsetof does not take bit fields.
        cursor, place = next(((c, p) for c, p in fields if not c.is_bitfield()), fields[0])
        spelling = type_.spelling.replace("(anonymous namespace)::", "")
        if "(" in spelling or cursor.is_bitfield():
            raise self.refuse("has a base that cannot be placed", "one with a plain field", cursor,
                              spelling)  # fmt: skip
        probe = f"__builtin_offsetof(::{spelling.removeprefix('const ')}, {cursor.spelling})"
        found = self.probes.setdefault(probe, None)
        start = 0 if found is None else 8 * found - place  # None: known in the next round
        for member, offset in fields:
            yield member, start + offset

    def _field(self, cursor: Any, place: int) -> Field:
        try:
            kind, count, step = self._value(cursor.type, cursor)
        except _Hidden as hidden:
            size = cursor.type.get_size()
            return Field(place // 8, "bytes", None, size, hidden.args[0])
        if cursor.is_bitfield():
            return Field(place // 8, kind, None, step, self._default(cursor, kind, None),
                         place % 8, cursor.get_bitfield_width())  # fmt: skip
        return Field(place // 8, kind, count, step, self._default(cursor, kind, count))

    def _value(self, type_: Any, cursor: Any) -> tuple[Any, int | None, int]:
        """The representation of a type: the kind, the items of an array, the bytes of each."""
        type_ = type_.get_canonical()
        id_, size = type_._kind_id, type_.get_size()
        if id_ == _FLEXIBLE or (id_ == _ARRAY and type_.element_count == 0):
            raise self.refuse("has an array without a size", "a constant size", cursor,
                              cursor.spelling)  # fmt: skip
        if id_ == _POINTER and type_.get_pointee().get_declaration().spelling in c_builtin.HANDLES:
            return "uint64", None, size
        if id_ in (_REFERENCE, _RVALUE_REFERENCE):
            return "pointer", None, 8
        if size < 0:
            raise self.refuse("has a type without a size", "a complete type", cursor,
                              type_.spelling)  # fmt: skip
        if id_ == _POINTER and size != 8:
            raise self.refuse("is not compiled for a 64-bit machine", "pointers of 8 bytes", cursor,
                              f"{size} bytes")  # fmt: skip
        if id_ == _ENUM:
            return self._value(type_.get_declaration().enum_type, cursor)
        if id_ in (_ARRAY, _VECTOR, _EXT_VECTOR, _COMPLEX):
            kind, items, step = self._value(type_.element_type, cursor)
            count = 2 if id_ == _COMPLEX else type_.element_count
            return kind, count * (1 if items is None else items), step
        if id_ == _RECORD:
            return self._record(type_, size)
        return _KINDS.get(id_, "bytes"), None, size

    def _record(self, type_: Any, size: int) -> tuple[Any, int | None, int]:
        declaration = type_.get_declaration()
        name = declaration.spelling
        if type_.spelling.removeprefix("const ") == name:  # outside all namespaces
            if name in _MAPS and size == 128:
                return "tensor_map", None, size
            if _VENDORS.fullmatch(name) and size in (1, 2, 4, 8):
                return _NUMBERS.get(name, f"uint{8 * size}"), None, size
            if _VECTORS.fullmatch(name):
                items = list(type_.get_fields())
                if [item.spelling for item in items] == list("xyzw"[: len(items)]):
                    kind, _, step = self._value(items[0].type, items[0])
                    return kind, len(items), step
        return self._struct(type_), None, size

    def _default(self, cursor: Any, kind: Any, count: int | None) -> Any:
        """The value of a field's initialiser; 0 without one."""
        match = self._initialiser(cursor)
        if match is None:
            template = self.library.clang_getSpecializedCursorTemplate(cursor.semantic_parent)
            for field in template.get_children() if template is not None else ():
                if field.spelling == cursor.spelling and self._initialiser(field) is not None:
                    self.value = self.value or _VALUE
                    return self.refuse("has an initialiser that is not instantiated", "a value for"
                                       f" '{cursor.spelling}' in each call", cursor)  # fmt: skip
            return 0
        said = (match[2] if match[1] == "=" else match[1] + match[2]).strip()
        type_ = cursor.type.get_canonical().get_declaration().spelling
        if said in ("{}", "nullptr", "{nullptr}", f"{type_}{{}}", f"{type_}()"):
            return 0
        if kind == "pointer" and said in ("0", "{0}"):
            return 0
        value: Any = None
        children = list(cursor.get_children())
        if cursor.is_bitfield():  # libclang shows the width of a bit field, not its initialiser
            number = re.fullmatch(r"\{?(-?\d+)[uUlL]*\}?", said)
            words = {"true": 1, "false": 0}
            value = int(number[1]) if number is not None else words.get(said.strip("{}"))
        elif kind in _NUMBERS.values() and count is None:  # constructed, not converted
            number = re.fullmatch(r"[({]*(-?\d*\.?\d*(?:[eE][+-]?\d+)?)[fFuUlL]*[)}]*", said)
            value = float(number[1]) if number is not None and number[1].strip("-.") else None
        elif isinstance(kind, str) and kind not in ("tensor_map", "bytes") and children:
            if count is None:
                value = c_front_end.evaluate(children[-1])
            elif children[-1].kind == self.kinds.INIT_LIST_EXPR and not set("[{.") & {*said[1:]}:
                items = [c_front_end.evaluate(item) for item in children[-1].get_children()]
                if len(items) <= count and None not in items:
                    value = [*items, *[0] * (count - len(items))]
            if kind == "pointer" and value:
                value = None
        if value is None:
            return self.refuse("has an initialiser that is no constant number", "a value for"
                               f" '{cursor.spelling}' in each call", cursor, said)  # fmt: skip
        return bool(value) if kind == "bool" and count is None else value

    def _initialiser(self, cursor: Any) -> re.Match[str] | None:
        """The initialiser in a field's declaration, beginning with `=` or `{`."""
        if cursor.kind != self.kinds.FIELD_DECL:
            return None
        name = rf"(?<![\w$]){re.escape(cursor.spelling)}(?![\w$])"
        return re.search(rf"{name}.*?((?<![=!<>])=(?!=)|{{)(.*)", c_front_end.pretty(cursor), re.S)

    def _check_attributes(self, declaration: Any) -> None:
        """Refuses a struct with an attribute that clang ignores, but that g++ may honour."""
        c_device.check_attributes(self, declaration)
        start, end = declaration.extent.start, declaration.extent.end
        file = start.file.name if start.file is not None else ""
        last = end.offset
        if file == c_front_end.MAIN:  # to the semicolon: attributes may follow the brace, too
            last = len(self.text.text.encode()[:last]) + max(
                0, self.text.text.encode()[last:].find(b";")
            )
        for where, offset, line, words in self.parsed.ignored:
            is_pack = "pack" in words and "#pragma" in words
            if is_pack or (where == file and start.offset <= offset <= last):
                raise errors.fault(
                    "input", f"c_struct '{self.wanted}' line {line}",
                    "has an attribute or pragma that clang does not know",
                    expected="what clang lays out as g++ does", got=f"{words:.80}",
                )  # fmt: skip
