"""Structs that g++ and nvcc's device compiler lay out differently, which c_struct refuses.

Clang lays structs out as g++ does, and the kernel reads them as nvcc's device compiler does. Each
difference was found with nvcc 13.0 by compiling random structs with both;
tests/unit/test_c_struct_nvcc.py compares all structs that are accepted.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from torch_cubin._declared import c_front_end

if TYPE_CHECKING:
    from torch_cubin._declared.c_layout import Reader

_ARRAY, _RECORD = 112, 105  # CXTypeKind


def check_attributes(reader: Reader, declaration: Any) -> None:
    for child in declaration.get_children():
        if child.kind == reader.kinds.UNEXPOSED_ATTR and "ms_struct" in _names(child):
            raise reader.refuse("has an attribute that nvcc's device compiler ignores",
                                "what all compilers lay out alike", child, "ms_struct")  # fmt: skip


def check_base(reader: Reader, declaration: Any, base: Any) -> None:
    if _is_packed(reader, declaration) and base.get_align() > 1:  # the device packs the base, too
        raise reader.refuse("is packed and has a base", "a packed struct without bases",
                            declaration, base.spelling)  # fmt: skip
    if _only_copies(reader, base):
        _check_padding(reader, base)


def check_alignment(reader: Reader, cursor: Any, record: Any) -> None:
    """Refuses a typedef that lowers an alignment, a field whose own alignment `#pragma pack`
    lowers, and in a packed struct a field with an alignment of its own, or of no bits."""
    in_packed = _is_packed(reader, record.get_declaration())
    if in_packed:
        is_aligned = any(x.kind == reader.kinds.ALIGNED_ATTR for x in cursor.get_children())
        differs = is_aligned or (cursor.is_bitfield() and cursor.get_bitfield_width() == 0)
    else:
        is_lowered = cursor.type.get_align() < cursor.type.get_canonical().get_align()
        differs = is_lowered and not _is_packed(reader, cursor)
    place = cursor.get_field_offsetof()
    for number in re.findall(r"\b(?:alignas|aligned)\((\d+)\)", c_front_end.pretty(cursor)):
        wanted = max(1, int(number))
        differs = differs or wanted > record.get_align() or place % (8 * wanted) != 0
    if differs:
        raise reader.refuse(
            "has a field that g++ and nvcc's device compiler place differently",
            "an alignment that nothing lowers", cursor, cursor.spelling,
        )  # fmt: skip


def is_empty_without_address(reader: Reader, cursor: Any, end: int) -> bool:
    """Whether it is a [[no_unique_address]] field of an empty class. Refuses those behind `end`,
    the first bit behind the data before, since another empty field has that address; and those
    whose padding the next field may use."""
    class_ = cursor.type.get_canonical()
    attributes = (x for x in cursor.get_children() if x.kind == reader.kinds.UNEXPOSED_ATTR)
    if class_._kind_id != _RECORD or not any("no_unique_address" in _names(x) for x in attributes):
        return False
    if any(reader.fields(class_)):
        _check_padding(reader, class_)
        return False
    if cursor.get_field_offsetof() > end or class_.get_align() > 1:
        raise reader.refuse(
            "has an empty field that g++ and nvcc's device compiler place differently",
            "[[no_unique_address]] for fields of different types", cursor, cursor.spelling,
        )  # fmt: skip
    return True


def _check_padding(reader: Reader, class_: Any) -> None:
    """Refuses a class with padding at its end, which what follows may use."""
    ends = [place + (cursor.get_bitfield_width() if cursor.is_bitfield() else
                     8 * cursor.type.get_size())
            for cursor, place in reader.fields(class_)]  # fmt: skip
    if max(ends, default=0) < 8 * class_.get_size():
        raise reader.refuse(
            "has a class whose padding g++ and nvcc's device compiler use differently",
            "a class without padding at its end", class_.get_declaration(), class_.spelling,
        )  # fmt: skip


def _only_copies(reader: Reader, class_: Any) -> bool:
    """Whether all constructors that the class declares, or a class within it, are defaulted or
    deleted ones that copy or move: only one of the compilers takes it for plain data."""
    declaration = class_.get_declaration()
    declared = [x for x in reader.members(declaration) if x.kind == reader.kinds.CONSTRUCTOR]
    if declared and all(
        (x.is_copy_constructor() or x.is_move_constructor())
        and (x.is_default_method() or x.is_deleted_method())
        for x in declared
    ):
        return True
    within = [*reader.bases(declaration), *(_item(x.type) for x in class_.get_fields())]
    return any(_only_copies(reader, type_) for type_ in within if type_._kind_id == _RECORD)


def _item(type_: Any) -> Any:
    """The canonical type of an array's items; that of the type itself if it is no array."""
    type_ = type_.get_canonical()
    while type_._kind_id == _ARRAY:
        type_ = type_.element_type.get_canonical()
    return type_


def _is_packed(reader: Reader, cursor: Any) -> bool:
    return any(x.kind == reader.kinds.PACKED_ATTR for x in cursor.get_children())


def _names(attribute: Any) -> set[str]:
    return {token.spelling for token in attribute.get_tokens()}
