"""How a kernel accesses the memory of each pointer argument, read from Triton's IR (TTIR).

Values are followed from the function's parameters through addresses, casts, selects, control flow
and calls to loads, stores and atomics. An unknown operation may do anything with the addresses that
it gets, so their parameters are marked as not followed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

_MOST = 1 << 26  # characters
_DEPTH = 32  # nested calls
_VALUE = r"%[\w.$-]+"
_OPERAND = re.compile(rf"{_VALUE}(?:#\d+)?")
_LINE = re.compile(rf'(?:({_VALUE})(?::(\d+))? = )?([\w.]+|"")(.*)', re.DOTALL)
_FUNCTION = re.compile(r"tt\.func (?:public |private )?@([\w.$-]+)\((.*)")
_PAIR = re.compile(rf"({_VALUE}) = ({_VALUE}(?:#\d+)?)")
_BRANCH = re.compile(r"\^(\w+)(?:\(([^:)]*)(?::[^)]*)?\))?")
_QUOTED_NAME = re.compile(r'@"([^"]*)"')
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_LOCATION = re.compile(r"\s*loc\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)")
_PARAMETERS_MULTIPLE = re.compile(r"(?<=[{ ])tt\.divisibility = \d+ : i\d+")
# Operations whose result is an address derived from their operands.
_ADDRESSES = {
    *("tt.addptr", "tt.splat", "tt.unsplat", "tt.broadcast", "tt.bitcast", "tt.expand_dims"),
    *("tt.int_to_ptr", "tt.ptr_to_int", "tt.make_tensor_ptr", "tt.advance", "tt.reshape"),
    *("tt.make_tensor_descriptor", "tt.reinterpret_tensor_descriptor", "tt.trans", "tt.join"),
    *("tt.split", "tt.cat", "tt.gather"),
}
_HARMLESS = {"tt.print", "tt.assert", "tt.get_program_id", "tt.get_num_programs"}
_ADDRESS_DIALECTS = ("arith.", "math.")
_READS = {"tt.load", "tt.descriptor_load", "tt.descriptor_gather",
          "tt.experimental_descriptor_load", "tt.experimental_descriptor_gather"}  # fmt: skip
_WRITES = {"tt.store", "tt.descriptor_store", "tt.descriptor_scatter",
           "tt.experimental_descriptor_store", "tt.experimental_descriptor_scatter"}  # fmt: skip
_UPDATES = {"tt.atomic_rmw", "tt.atomic_cas", "tt.descriptor_reduce"}
_YIELDS = {"scf.yield", "scf.condition", "tt.return", "cf.br", "cf.cond_br"}
Roots = frozenset[int]
_NONE: Roots = frozenset()


@dataclasses.dataclass
class Access:
    """Whether one parameter's memory is read, written or updated atomically. If not `followed`,
    other accesses are possible. `reads_first`: some path to a read or update has no write before
    it. Every loop is assumed to run at least once. Which elements are written is not compared with
    which are read."""

    reads: bool = False
    writes: bool = False
    updates: bool = False
    reads_first: bool = False
    followed: bool = True


@dataclasses.dataclass
class _Region:
    kind: str  # "if", "for", "while", "do", "other"
    results: list[str]
    arguments: list[str]  # of a loop's body
    before: list[str] = dataclasses.field(default_factory=list)  # the first region of a while


@dataclasses.dataclass
class _Step:
    """One operation, or the begin or end of a region or block. `flows` are (from, to) pairs of
    values; `kind` is its effect beyond them."""

    kind: str  # "flow", "read", "write", "update", "call", "unknown", "return", "open", "else",
    # "close", "branch", "label"
    operands: list[str]
    results: list[str]
    name: str = ""  # of a call, the kind of an opened region, a label


@dataclasses.dataclass
class _Function:
    parameters: list[str]
    addresses: frozenset[str] = frozenset()  # which parameters are pointers or descriptors
    steps: list[_Step] = dataclasses.field(default_factory=list)


class AccessError(Exception):
    """The IR has a form that this reader does not support."""


def accesses(ttir: str) -> list[Access] | None:
    """The accesses of each pointer and descriptor parameter of the public function, in order; None
    if the IR cannot be followed."""
    if len(ttir) > _MOST:
        return None
    try:
        functions, public = _functions(ttir)
        return _Run(functions).accesses(public) if public else None
    except (AccessError, RecursionError):
        return None


def numbers(ttir: str) -> frozenset[int]:
    """The integers in the IR: constants, ends of ranges, sizes of tensors. The known divisors of
    parameters are skipped: the compiler adds them."""
    text = _PARAMETERS_MULTIPLE.sub("", _LOCATION.sub("", ttir[:_MOST]))
    return frozenset(
        int(n) for n in re.findall(r"(?<![\w.%#@])\d{1,18}(?=x|\b)", text)
    ) | frozenset(int(n) for n in re.findall(r"(?<=x)\d{1,18}(?=x)", text))


def program_steps(ttir: str) -> list[int | None]:
    """For each axis of the grid: the largest constant that a program's index is multiplied by, if
    that is its only use; else None.

    Such a program computes that many elements, unless it also reads the number of programs.
    """
    text = _LOCATION.sub("", _QUOTED.sub('""', ttir[:_MOST]))
    indices: dict[str, int] = {}
    constants: dict[str, int] = {}
    factors: list[list[int] | None] = [[], [], []]
    if text.count("tt.func ") != 1 or "tt.get_num_programs" in text:
        return [None, None, None]
    for line in text.splitlines():
        match = _LINE.fullmatch(line.strip())
        if match is None:
            continue
        name, operation, rest = match[1], match[3], match[4]
        constant = re.match(r"\s*(\d{1,18}) : i\d+", rest)
        if operation == "tt.get_program_id":
            indices[name] = "xyz".find(rest.strip()[:1])
        elif operation == "arith.constant" and constant is not None:
            constants[name] = int(constant[1])
        operands = _OPERAND.findall(rest)
        for operand in operands:
            axis = indices.get(operand)
            found = None if axis is None else factors[axis]
            if axis is None or found is None:
                continue
            others = [constants.get(other) for other in operands if other != operand]
            if operation == "arith.extsi":
                indices[name] = axis
            elif operation == "arith.muli" and len(others) == 1 and others[0] is not None:
                found.append(others[0])
            else:
                factors[axis] = None
    return [max(found) if found else None for found in factors]


def _functions(ttir: str) -> tuple[dict[str, _Function], str]:
    text = _QUOTED_NAME.sub(lambda m: "@" + re.sub(r"[^\w.$-]", "_", m[1]), ttir)
    text = _LOCATION.sub("", _QUOTED.sub('""', text))
    functions: dict[str, _Function] = {}
    public, current, stack = "", _Function([]), list[_Region]()
    labels: dict[str, list[str]] = {}
    branches: list[tuple[str, list[str]]] = []
    for raw in text.splitlines():
        line = raw.partition(" //")[0].strip()
        if not line or line.startswith(("#", "module", "//")):
            continue
        found = _FUNCTION.match(line)
        if found is not None:
            parameters = _OPERAND.findall(found[2])
            addresses = frozenset(re.findall(rf"({_VALUE}): !tt\.", found[2]))
            current, stack = _Function(parameters, addresses), [_Region("other", [], [])]
            functions[found[1]] = current
            labels, branches = {}, []
            if "tt.func public" in line:
                public = found[1]
            continue
        if line.startswith("}"):
            region = stack.pop() if stack else None
            if stack:
                current.steps.append(_Step("else" if line.endswith("{") else "close", [], []))
            if not stack:
                for label, given in branches:
                    _join(current, given, labels.get(label, []))
                branches = []
            if region is not None and line.endswith("{"):
                is_do = region.kind == "while" and "do" in line
                stack.append(
                    _Region("do", region.results, [], region.arguments) if is_do else region
                )
            continue
        if line.startswith("^"):
            label, _, rest = line.partition("(")
            arguments = _OPERAND.findall(rest)
            label = label.partition(":")[0].strip("^ ")
            labels[label] = arguments
            if len(stack) == 1:
                current.steps.append(_Step("label", [], [], label))
            if stack and stack[-1].kind == "do" and not stack[-1].arguments:
                _join(current, stack[-1].results, arguments)
                stack[-1].arguments = arguments
            continue
        _read_line(line, current, stack, branches)
    return functions, public


def _join(function: _Function, given: Sequence[str], to: Sequence[str]) -> None:
    if len(given) != len(to):
        raise AccessError
    function.steps += [_Step("flow", [a], [b]) for a, b in zip(given, to, strict=True)]


def _read_line(
    line: str, function: _Function, stack: list[_Region], branches: list[tuple[str, list[str]]]
) -> None:
    match = _LINE.fullmatch(line)
    if match is None:
        raise AccessError
    name, count, operation, rest = match[1], match[2], match[3], match[4]
    results = [name] if name else []
    if count:
        results = [f"{name}#{i}" for i in range(int(count))]
    operands = _OPERAND.findall(rest)
    opens = line.endswith("{")
    if operation in ("scf.for", "scf.while"):
        pairs = _PAIR.findall(rest)
        if operation == "scf.for":  # the first pair is the induction variable and its start
            pairs = pairs[1:]
        arguments = [a for a, _ in pairs]
        _join(function, [b for _, b in pairs], arguments)
        if operation == "scf.for" and results:
            _join(function, [b for _, b in pairs], results)
        _open(function, stack, _Region(operation[4:], results, arguments))
        return
    if operation == "scf.if":
        _open(function, stack, _Region("if", results, []))
        return
    if opens:
        _open(function, stack, _Region("other", [], []))
    if operation in _YIELDS:
        _read_yield(operation, rest, operands, function, stack, branches)
    elif operation == "tt.call":
        called = re.match(r"\s*@([\w.$-]+)", rest)
        function.steps.append(_Step("call", operands, results, called[1] if called else ""))
    elif operation in _READS:
        function.steps.append(_Step("read", operands, results))
    elif operation in _WRITES:
        function.steps.append(_Step("write", operands, results))
    elif operation in _UPDATES:
        function.steps.append(_Step("update", operands, results))
    elif operation in _ADDRESSES or operation.startswith(_ADDRESS_DIALECTS):
        function.steps.append(_Step("flow", _flowing(operation, operands), results))
    elif operation not in _HARMLESS:
        function.steps.append(_Step("unknown", operands, results))


def _open(function: _Function, stack: list[_Region], region: _Region) -> None:
    function.steps.append(_Step("open", [], [], region.kind))
    stack.append(region)


def _flowing(operation: str, operands: list[str]) -> list[str]:
    """The operands that can carry an address: conditions, offsets, sizes and strides cannot."""
    if operation == "arith.select":
        return operands[1:]
    if operation in ("tt.make_tensor_descriptor", "tt.make_tensor_ptr", "tt.advance"):
        return operands[:1]
    return [] if operation == "arith.cmpi" else operands


def _read_yield(
    operation: str, rest: str, operands: list[str], function: _Function, stack: list[_Region],
    branches: list[tuple[str, list[str]]],
) -> None:  # fmt: skip
    if operation in ("cf.br", "cf.cond_br"):
        for label, given in _BRANCH.findall(rest):
            branches.append((label, _OPERAND.findall(given)))
            function.steps.append(_Step("branch", [], [], label))
        return
    if operation == "tt.return":
        function.steps.append(_Step("return", operands, []))
        return
    region = stack[-1] if stack else None
    if region is None or region.kind == "other":
        return
    if operation == "scf.condition":
        _join(function, operands[1:], region.results if region.results else operands[1:])
        region.results = region.results or operands[1:]
    elif region.kind == "for":
        _join(function, operands, region.arguments)
        if region.results:
            _join(function, operands, region.results)
    elif region.kind == "do":
        _join(function, operands, region.before)
    elif region.results:
        _join(function, operands, region.results)


Values = dict[str, Roots]


class _Run:
    """Follows values from the public function; each call is followed separately."""

    def __init__(self, functions: dict[str, _Function]) -> None:
        self.functions = functions
        self.found: dict[int, Access] = {}
        self.stray = False  # a write to an address that is derived from no parameter
        self.known: dict[tuple[str, tuple[Roots, ...]], tuple[Values, list[Roots]]] = {}
        self.visited: dict[tuple[str, tuple[Roots, ...], Roots], frozenset[int]] = {}

    def accesses(self, public: str) -> list[Access]:
        function = self.functions[public]
        parameters = function.parameters
        self.found = {i: Access() for i in range(len(parameters))}
        given = tuple(
            frozenset({i}) if name in function.addresses else _NONE
            for i, name in enumerate(parameters)
        )
        self._visit(public, given, 0, set())
        if self.stray:
            for access in self.found.values():
                access.followed = False
        return [self.found[i] for i, roots in enumerate(given) if roots]

    def _follow(
        self, name: str, given: tuple[Roots, ...], depth: int
    ) -> tuple[Values, list[Roots]]:
        """The roots of the function's values and of its results, given those of its arguments."""
        function = self.functions.get(name)
        if function is None or len(function.parameters) != len(given) or depth > _DEPTH:
            raise AccessError
        if (name, given) in self.known:
            return self.known[name, given]
        values: Values = dict(zip(function.parameters, given, strict=True))
        returned: list[Roots] = []
        while True:  # until the loops reach a fixed point
            before = (dict(values), list(returned))
            for step in function.steps:
                roots = [values.get(operand, _NONE) for operand in step.operands]
                if step.kind == "flow":
                    self._give(values, step.results, _NONE.union(*roots))
                elif step.kind == "return":
                    returned = [a | b for a, b in zip(returned or roots, roots, strict=True)]
                elif step.kind == "call":
                    _, results = self._follow(step.name, tuple(roots), depth + 1)
                    for result, found in zip(step.results, results, strict=True):
                        self._give(values, [result], found)
            if before == (values, returned):
                break
        self.known[name, given] = values, returned
        return values, returned

    def _visit(
        self, name: str, given: tuple[Roots, ...], depth: int, written: set[int]
    ) -> set[int]:
        """Records the function's accesses. `written` are the parameters written on every path to
        the call; returns those written on every path to its end."""
        key = (name, given, frozenset(written))
        if key in self.visited:
            return set(self.visited[key])
        values, _ = self._follow(name, given, depth)
        reaching: dict[str, set[int]] = {}  # by label: written on every path to it so far
        returning: set[int] | None = None
        while True:
            known = {label: set(found) for label, found in reaching.items()}
            returning = None
            now, stack = set(written), list[tuple[str, set[int], list[set[int]]]]()
            for step in self.functions[name].steps:
                roots = [values.get(operand, _NONE) for operand in step.operands]
                if step.kind == "open":
                    stack.append((step.name, set(now), []))
                elif step.kind == "else":
                    kind, before, ends = stack[-1]
                    ends.append(now)
                    now = set(before) if kind == "if" else now
                elif step.kind == "close":
                    kind, before, ends = stack.pop()
                    if kind == "if":
                        now = now.intersection(*ends) if ends else before
                    elif kind == "other":
                        now = before
                elif step.kind == "branch":
                    reaching[step.name] = reaching.get(step.name, now) & now
                elif step.kind == "label":
                    now = set(reaching.get(step.name, ()))
                elif step.kind == "return":
                    returning = set(now) if returning is None else returning & now
                elif step.kind == "call":
                    now = self._visit(step.name, tuple(roots), depth + 1, now)
                else:
                    self._record(step, roots, now)
            if known == reaching:  # no later jump to a label has written less
                self.visited[key] = frozenset(returning or ())
                return set(self.visited[key])

    @staticmethod
    def _give(values: dict[str, Roots], results: Sequence[str], roots: Roots) -> None:
        for result in results:
            values[result] = values.get(result, _NONE) | roots

    def _record(self, step: _Step, roots: list[Roots], written: set[int]) -> None:
        if step.kind == "unknown":
            for root in _NONE.union(*roots):
                self.found[root].followed = False
        if step.kind not in ("read", "write", "update"):
            return
        addressed = roots[0] if roots else _NONE
        if not addressed and step.kind != "read":
            self.stray = True
        for root in addressed:
            access = self.found[root]
            access.reads |= step.kind == "read"
            access.writes |= step.kind != "read"
            access.updates |= step.kind == "update"
            # Other blocks' updates come before and after this one's writes.
            is_first = step.kind == "update" or (step.kind == "read" and root not in written)
            access.reads_first |= is_first
        if step.kind == "write" and len(addressed) == 1:  # one of several is not certain
            written |= addressed
        for root in _NONE.union(*roots[1:]) if step.kind != "read" else _NONE:
            self.found[root].followed = False  # its address itself is stored


__all__ = ["Access", "accesses", "numbers", "program_steps"]
