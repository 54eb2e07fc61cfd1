"""Checks that on every path a kernel waits for its predecessor before it touches memory.

The host launches kernels for sm_90 and newer before the previous kernel in the stream has ended
(programmatic dependent launch). Code before `griddepcontrol.wait` must therefore not read or write
memory that other kernels use: it would sometimes read stale data, without an error. `first_touch`
follows a kernel's branches in PTX and finds such an instruction.

It lists harmless instructions: an unknown instruction counts as a touch. Harmless are shared, local
and constant memory, parameters, barriers of the block and the cluster, and the prefetch of a tensor
map that is a parameter. So is a prefetch to L2: all accesses of the GPU go through that cache, so
later writes of the previous kernel are seen. The address to prefetch may itself be in memory:
`read_early` (ptx.cuh) reads it with a unique instruction that leaves no stale copy in L1.
"""

from __future__ import annotations

import dataclasses
import re

# Mnemonics (up to the first dot) of arithmetic, control flow and cluster synchronisation.
HARMLESS = re.compile(
    r"abs|activemask|add|addc|and|bar|barrier|bfe|bfi|bfind|bmsk|bra|brev|brx|clz|cnot"
    r"|copysign|cos|createpolicy|cvt|cvta|div|dp2a|dp4a|elect|ex2|fence|fma|fns|getctarank"
    r"|isspacep|ldmatrix|lg2|lop3|mad|mad24|madc|mapa|match|max|mbarrier|membar|min|mma|mov"
    r"|movmatrix|mul|mul24|nanosleep|neg|not|or|pmevent|popc|prmt|rcp|redux|rem|rsqrt|sad|selp"
    r"|set|setmaxnreg|setp|shf|shfl|shl|shr|sin|slct|sqrt|stmatrix|sub|subc|szext|tanh|testp"
    r"|trap|vote|wgmma|xor"
)
# Harmless only with one of these state spaces.
IN_A_SPACE = frozenset(("ld", "st", "atom", "red", "cp"))
OWN_SPACES = frozenset(("shared", "param", "local", "const"))
# Commit and wait instructions of asynchronous copies.
HARMLESS_FORMS = re.compile(
    r"griddepcontrol\.launch_dependents$|cp\.async\.(bulk\.)?(commit_group|wait_group|wait_all)\b"
    r"|(cp\.async\.bulk\.prefetch\.(tensor\.\dd\.)?|prefetch\.global\.)L2\b"
    r"|ld\.relaxed\.gpu\.global\.L1::no_allocate\.b32$"  # read_early
    r"|cp\.async\.mbarrier\.arrive\b|tcgen05\.(alloc|relinquish_alloc_permit)\b"
)
WAIT = "griddepcontrol.wait"

# Comments, and the two directives that end with their line.
_NOISE = re.compile(r"//[^\n]*|/\*.*?\*/|^[ \t]*\.(?:loc|file)\b[^\n]*", re.DOTALL | re.MULTILINE)
_LABEL = re.compile(r"\s*([\w$]+)\s*:(?!:)")
_INSTRUCTION = re.compile(r"(@!?%?[\w$]+\s+)?([\w.:]+)\s*(.*)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Statement:
    guarded: bool  # runs under a predicate
    opcode: str  # "ld.global.u32"; of a directive: ".reg"
    operands: str
    scope: int

    def __str__(self) -> str:
        return f"{self.opcode} {self.operands}".strip()


class Body:
    """The statements of the first kernel in a PTX file, and the positions of its labels. Most are
    never asked for: they stay texts, which saves three quarters of the time."""

    def __init__(self, ptx: str) -> None:
        self.texts: list[tuple[str, int]] = []  # of each statement, and its scope
        self.labels: dict[tuple[int, str], int] = {}  # by scope: inlined code repeats names
        self.outer = {0: 0}  # the enclosing scope of each scope
        text = _NOISE.sub(" ", ptx)
        self._read(text, text.index("{", text.index(".entry")) + 1)

    def _read(self, text: str, start: int) -> None:
        scope, nested, begin = 0, 0, start
        for mark in re.finditer(r"[;{}]", text[start:]):
            at = start + mark.start()
            if nested == 0:
                while label := _LABEL.match(text, begin, at):
                    self.labels[scope, label[1]] = len(self.texts)
                    begin = label.end()
            statement = text[begin:at].strip()
            if mark[0] == ";" and nested == 0:
                if statement:
                    self.texts.append((statement, scope))
            elif mark[0] == "{" and (nested or statement):  # a vector among the operands
                nested += 1
                continue
            elif mark[0] == "{":
                self.outer[len(self.outer)] = scope
                scope = len(self.outer) - 1
            elif mark[0] == "}" and nested:
                nested -= 1
                continue
            elif mark[0] == "}":
                if scope == 0:
                    return
                scope = self.outer[scope]
            else:
                continue
            begin = at + 1

    def statement(self, place: int) -> Statement:
        text, scope = self.texts[place]
        found = _INSTRUCTION.fullmatch(text)
        if found is None:
            return Statement(False, text, "", scope)
        return Statement(bool(found[1]), found[2], " ".join(found[3].split()), scope)

    def writers(self, register: str) -> list[Statement]:
        """The instructions that write the register: it is, or is in, their first operand."""
        found = []
        for place, (text, _) in enumerate(self.texts):
            if register in text:
                statement = self.statement(place)
                first = re.match(r"\{[^}]*\}|[^,|]*", statement.operands)[0]
                if "[" not in first and register in re.findall(r"%\w+", first):
                    found.append(statement)
        return found

    def is_parameter(self, address: str, steps: int = 8) -> bool:
        """Whether an address is a parameter's: `k_param_0`, or a register that holds it."""
        if re.fullmatch(r"\w+_param_\d+(\s*\+\s*\d+)?", address):
            return True
        register = re.fullmatch(r"(%\w+)(\s*\+\s*-?\d+)?", address)
        given = self.writers(register[1]) if register else []
        if (
            steps == 0
            or len(given) != 1
            or not re.match(r"(mov|cvta\.param|add)\.", given[0].opcode)
        ):
            return False
        operands = [operand.strip() for operand in given[0].operands.split(",")]
        plain = len(operands) == 2 or re.fullmatch(r"-?\d+", operands[2])
        return bool(plain) and self.is_parameter(operands[1], steps - 1)

    def targets(self, statement: Statement) -> list[int] | None:
        """The targets of a branch; None if they cannot be determined."""
        name = re.search(r"[\w$]+$", statement.operands)
        place = self._place(name[0], statement.scope) if name else None
        if place is None:
            return None
        if not statement.opcode.startswith("brx"):
            return [place]
        table = self.statement(place)  # .branchtargets: the labels of a brx.idx
        places = [
            self._place(label, table.scope) for label in re.findall(r"[\w$]+", table.operands)
        ]
        known = table.opcode == ".branchtargets" and None not in places
        return places if known else None  # type: ignore[return-value]

    def _place(self, label: str, scope: int) -> int | None:
        while (scope, label) not in self.labels and scope != 0:
            scope = self.outer[scope]
        return self.labels.get((scope, label))

    def touches(self, statement: Statement) -> bool:
        """Whether it may read or write memory that other kernels can access, or end the kernel."""
        opcode, *modifiers = statement.opcode.split(".")
        if opcode == "" or HARMLESS.fullmatch(opcode) or HARMLESS_FORMS.match(statement.opcode):
            return False
        if statement.opcode in ("prefetch.tensormap", "prefetch.param.tensormap"):
            return not self.is_parameter(statement.operands.strip("[] "))
        spaces = {modifier.partition("::")[0] for modifier in modifiers}
        harmless = (
            opcode in IN_A_SPACE and spaces & OWN_SPACES and not spaces & {"global", "tensor"}
        )
        return not harmless


def first_touch(ptx: str) -> str | None:
    """The first instruction found that accesses memory, or ends the kernel, on a path without
    `griddepcontrol.wait` before it; None if there is none."""
    body = Body(ptx)
    waiting, seen = [0], set()
    while waiting:
        place = waiting.pop()
        if place in seen:
            continue
        seen.add(place)
        if place >= len(body.texts):
            return "the end of the kernel"
        statement = body.statement(place)
        if statement.opcode == WAIT and not statement.guarded:
            continue
        if statement.opcode != WAIT and body.touches(statement):
            return str(statement)
        if statement.opcode.startswith(("bra", "brx")):
            targets = body.targets(statement)
            if targets is None:
                return str(statement)
            waiting += targets
            if not statement.guarded:
                continue
        if statement.opcode == "trap" and not statement.guarded:
            continue
        waiting.append(place + 1)
    return None
