"""Builds small cubins byte by byte, right ones and wrong ones, for the parser's tests.

Follows the System V ABI (ELF-64) and the layout of what ptxas writes: string tables, symbols,
sections, then the section headers and, last in the file, the program headers.
"""

from __future__ import annotations

import dataclasses
import struct

PROGBITS, SYMTAB, STRTAB, NOTE, NOBITS = 1, 2, 3, 7, 8
NV_INFO, NV_COMPAT = 0x70000000, 0x70000086
ENTRY = 0x10  # st_other of a kernel


@dataclasses.dataclass
class Section:
    name: str | bytes
    type: int
    data: bytes = b""
    link: int = 0
    info: int = 0
    flags: int = 0
    size: int | None = None  # of NOBITS


@dataclasses.dataclass
class Symbol:
    name: str | bytes
    section: int
    size: int
    info: int = 0x12  # GLOBAL FUNC
    other: int = ENTRY
    value: int = 0


def attribute(id: int, payload: bytes) -> bytes:
    return struct.pack("<BBH", 4, id, len(payload)) + payload


def value(id: int, number: int) -> bytes:
    return struct.pack("<BBH", 3, id, number)


def param(index: int, offset: int, size: int, space: int = 0) -> bytes:
    return attribute(
        0x17, struct.pack("<IHHI", 0, index, offset, size << 18 | 0x1F << 12 | space << 8)
    )


def param_v2(index: int, offset: int, size: int, space: int = 0) -> bytes:
    return attribute(0x45, struct.pack("<IHHHBB", 0, index, offset, size, 0, space))


@dataclasses.dataclass
class Kernel:
    name: str | bytes = "k"
    info: bytes = param(0, 0, 8) + value(0x19, 8)
    shared: int | None = None
    code: bytes = b"\0" * 16
    binding: int = 1  # 0 of a static kernel, 2 of a weak one


@dataclasses.dataclass
class Cubin:
    """`build()` gives the bytes. Index 0 is the null section, then .shstrtab, .strtab, .symtab."""

    kernels: list[Kernel] = dataclasses.field(default_factory=lambda: [Kernel()])
    os_abi: int = 0x41
    abi_version: int = 8
    type: int = 2
    machine: int = 190
    version: int = 1
    flags: int = 0x06005A04  # sm_90
    module_info: bytes = b""  # .nv.info
    sections: list[Section] = dataclasses.field(default_factory=list)  # after the kernels'
    symbols: list[Symbol] = dataclasses.field(default_factory=list)
    symbol_section: bool = True

    def build(self) -> bytes:
        sections = [Section("", 0), Section(".shstrtab", STRTAB), Section(".strtab", STRTAB)]
        symbols = [Symbol("", 0, 0, info=0, other=0)]
        if self.symbol_section:
            sections.append(Section(".symtab", SYMTAB, link=2))
        if self.module_info:
            sections.append(Section(".nv.info", NV_INFO, self.module_info, link=3))
        for kernel in self.kernels:
            text = len(sections)
            name = _encode(kernel.name)
            symbols.append(Symbol(name, text, len(kernel.code), info=kernel.binding << 4 | 2))
            sections.append(Section(b".text." + name, PROGBITS, kernel.code, link=3))
            sections.append(Section(b".nv.info." + name, NV_INFO, kernel.info, link=3, info=text))
            if kernel.shared is not None:
                sections.append(
                    Section(b".nv.shared." + name, NOBITS, size=kernel.shared, info=text)
                )
        sections += self.sections
        symbols += self.symbols

        names = _Strings()
        sections[2].data, symbol_bytes = _symbols(symbols)
        if self.symbol_section:
            sections[3].data = symbol_bytes
        offsets = [names.add(section.name) for section in sections]
        sections[1].data = bytes(names.data)
        body = bytearray(b"\0" * 64)
        headers = bytearray()
        for section, name in zip(sections, offsets, strict=True):
            start = len(body)
            size = section.size if section.size is not None else len(section.data)
            if section.type not in (0, NOBITS):
                body += section.data
                body += b"\0" * (-len(body) % 8)
            headers += struct.pack(
                "<IIQQQQIIQQ",
                *(name, section.type, section.flags, 0, start if section.type else 0, size),
                *(section.link, section.info, 8, 0),
            )
        section_offset = len(body)
        body += headers
        program_offset = len(body)
        body += struct.pack("<IIQQQQQQ", 6, 4, program_offset, 0, 0, 56, 56, 8)
        body[:64] = struct.pack(
            "<4s5B7xHHIQQQIHHHHHH",
            *(b"\x7fELF", 2, 1, 1, self.os_abi, self.abi_version, self.type, self.machine),
            *(self.version, 0, program_offset, section_offset, self.flags),
            *(64, 56, 1, 64, len(sections), 1),
        )
        return bytes(body)


class _Strings:
    def __init__(self) -> None:
        self.data = bytearray(b"\0")

    def add(self, text: str | bytes) -> int:
        text = _encode(text)
        if not text:
            return 0
        self.data += text + b"\0"
        return len(self.data) - len(text) - 1


def _encode(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode()


def _symbols(symbols: list[Symbol]) -> tuple[bytes, bytes]:
    names = _Strings()
    table = b"".join(
        struct.pack("<IBBHQQ", names.add(s.name), s.info, s.other, s.section, s.value, s.size)
        for s in symbols
    )
    return bytes(names.data), table
