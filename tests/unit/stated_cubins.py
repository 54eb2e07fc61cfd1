"""Cubins and PTX whose kernels have given names and parameters, for tests of what names state."""

from __future__ import annotations

from unit.elf_builder import Cubin, Kernel, Symbol, param, value

TMPL = "_Z4tmplIfLi4EEvPT_i"  # void tmpl<float, 4>(float*, int)


def info(*sizes: int, more: bytes = b"") -> bytes:
    """The parameter table of these sizes, each aligned to its own."""
    out, at = b"", 0
    for index, size in enumerate(sizes):
        step = min(size, 8)
        at = -(-at // step) * step
        out += param(index, at, size)
        at += size
    return out + value(0x19, at) + more


def cubin(kernels: dict[str, tuple[int, ...]], **fields) -> bytes:
    """Kernels by name, with the sizes of their parameters."""
    return Cubin(kernels=[Kernel(name, info(*sizes)) for name, sizes in kernels.items()], **fields
                 ).build()  # fmt: skip


def ptx(entries: str, head: str = "") -> bytes:
    return f".version 8.0\n.target sm_80\n.address_size 64\n{head}\n{entries}\n".encode()


def entry(name: str, params: str, body: str = "ret;", directives: str = "") -> str:
    """`params`: "u64, f32"."""
    listed = ", ".join(f".param .{kind} p{i}" for i, kind in enumerate(params.split(", ")))
    return f".visible .entry {name}({listed}) {directives} {{ {body} }}"


__all__ = ["TMPL", "Symbol", "cubin", "entry", "info", "ptx"]
