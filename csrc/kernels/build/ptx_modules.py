"""Splits nvcc's PTX of several kernels into one module per kernel.

nvcc spends a third of a second on its own headers in every run. So the build compiles several
kernels at a time, each in its own namespace, and splits the result here. The PTX of a kernel
does not depend on the others: the function numbers in labels are set to 0, and declarations, by
whose order ptxas lays out shared memory, have the order in which the kernel first names them. nvcc
declares an array of a shared header within a kernel if no other kernel uses it; here never.
"""

from __future__ import annotations

import re

_ENTRY = re.compile(r"(?:\.visible |\.weak )*\.entry ([\w$]+)\(")
_LABEL = re.compile(r"\$L__BB\d+_")
_SHARED = re.compile(r"\t\.shared [^\n]*?([\w$]+)\[\d+\];\n")  # in a kernel
_NAME = re.compile(r"([\w$]+)(?:\[\w*\])*(?: = .*)?;$")  # of a declaration, at its end


def _statements(ptx: str) -> list[list[str]]:
    """The lines of each directive, declaration or function of a module, without comments."""
    found: list[list[str]] = []
    lines = [line for line in ptx.splitlines() if line.strip() and line.lstrip()[:2] != "//"]
    at = 0
    while at < len(lines):
        first = lines[at]
        if first.startswith((".version", ".target", ".address_size")):
            end = at + 1
        elif ".entry " in first or ".func " in first:
            end = next(i for i in range(at, len(lines)) if lines[i] in ("}", ";")) + 1
        else:
            end = next(i for i in range(at, len(lines)) if lines[i].endswith(";")) + 1
        found.append(lines[at:end])
        at = end
    return found


def split(ptx: str) -> dict[str, str]:
    """The module of each kernel: directives, the declarations that it needs, its code."""
    head: list[str] = []
    declared: list[tuple[str, str]] = []  # name and text
    kernels: dict[str, str] = {}
    for lines in _statements(ptx):
        text = "\n".join(lines) + "\n"
        entry = _ENTRY.match(lines[0])
        if entry:
            for array in _SHARED.finditer(text):
                if entry[1] not in array[1]:  # not the kernel's own
                    text = text.replace(array[0], "")
                    declared.append((array[1], array[0].lstrip()))
            kernels[entry[1]] = _LABEL.sub("$L__BB0_", text)
        elif lines[0].startswith((".version", ".target", ".address_size")):
            head.append(text)
        else:
            name = _NAME.search(lines[-1]) if ".func " not in lines[0] else None
            declared.append((name[1] if name else "", text))
    modules = {}
    for kernel, code in kernels.items():
        # Functions and unnamed declarations go to every kernel; unused ones do no harm.
        needed: list[tuple[int, str]] = []
        for name, text in declared:
            first_use = re.search(rf"{re.escape(name)}\b", code) if name else None
            if first_use or not name:
                needed.append((first_use.start() if first_use else -1, text))
        needed.sort(key=lambda found: found[0])
        modules[kernel] = "".join(head) + "".join(text for _, text in needed) + code
    return modules
