"""Expressions: functions of an op's arguments, traced once into trees that C++ evaluates.

A declared op defines its grid, its kernel's scalars and its outputs' sizes by Python functions.
`trace` calls such a function with stand-ins that record the operations. The result is a tree of
plain data: it is stored in a package's manifest, C++ evaluates it on every call
(csrc/declared/expression_evaluate.cpp), and evaluate.py does so for symbolic sizes, so the fake
implementation follows from the same definition.

Over 500 lines, so that an operation's stand-in and its tree can be read side by side.

A tree is a number, a bool, or a list [operation, operand, ...]:

    ["number", name]                   a number of the op, or a size that a pattern has bound;
                                       "len(xs)" of a list, "n?" for "the number n is given"
    ["size", tensor, i]  ["stride", tensor, i]  ["numel", tensor]  ["dim", tensor]
    ["itemsize", tensor]               bytes
    ["defined", tensor]  ["contiguous", tensor]  ["is_dtype", tensor, "float32"]
    ["is", name, text]                 a str or ScalarType argument is that text, or dtype
    ["sm"]  ["multiprocessors"]        of the device
    add sub mul min max neg abs        of numbers; for integers they raise on overflow of 64 bits
    floordiv mod                       of integers, rounded as Python does
    next_power_of_2                    of an integer; 0 for 0 and below
    truediv sqrt float                 of numbers, in float64
    lt le eq ne                        of numbers
    and or not  select(bool, a, b)     short-circuiting

A tensor in a list is named "xs[2]".
"""

from __future__ import annotations

import dis
import functools
import linecache
import math
import os
import sys
from collections.abc import Callable, Collection, Mapping
from types import CodeType, FrameType
from typing import Any, NoReturn

import torch

from torch_cubin import errors

Tree = Any  # int, float, bool or list
MIN, MAX = -(2**63), 2**63 - 1
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")  # all of torch_cubin/


def _operator(operation: str, *, swapped: bool = False) -> Callable[..., Traced]:
    """A method of Traced for an operation: `self + other` or, if `swapped`, `other + self`."""

    def method(self: Traced, *other: object) -> Traced:
        return _node(operation, *((*other, self) if swapped else (self, *other)))

    return method


class Traced:
    """A number that is unknown while tracing. Arithmetic and comparisons give further ones."""

    def __init__(self, tree: Tree, type_: type) -> None:
        self.tree, self.type = tree, type_

    __add__, __radd__ = _operator("add"), _operator("add", swapped=True)
    __sub__, __rsub__ = _operator("sub"), _operator("sub", swapped=True)
    __mul__, __rmul__ = _operator("mul"), _operator("mul", swapped=True)
    __floordiv__, __rfloordiv__ = _operator("floordiv"), _operator("floordiv", swapped=True)
    __mod__, __rmod__ = _operator("mod"), _operator("mod", swapped=True)
    __truediv__, __rtruediv__ = _operator("truediv"), _operator("truediv", swapped=True)
    __neg__, __abs__ = _operator("neg"), _operator("abs")
    __lt__, __gt__ = _operator("lt"), _operator("lt", swapped=True)
    __le__, __ge__ = _operator("le"), _operator("le", swapped=True)
    __eq__, __ne__ = _operator("eq"), _operator("ne")  # type: ignore[assignment]
    __and__, __rand__ = _operator("and"), _operator("and", swapped=True)
    __or__, __ror__ = _operator("or"), _operator("or", swapped=True)
    __invert__ = _operator("not")

    def __pos__(self) -> Traced:
        return self

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> NoReturn:
        untraceable(
            "branches on a value that each call decides ('if', 'and', 'or', 'not', min(), max())",
            "Use torch_cubin.select(condition, a, b), minimum, maximum, & | ~ between conditions,"
            " or give the op several kernels with `when`.",
        )

    def __index__(self) -> NoReturn:
        untraceable(
            "needs a number now (range(), an index, int()) that each call decides",
            "Write it with + - * // % and torch_cubin.cdiv.",
        )

    __int__ = __index__
    __round__ = __trunc__ = __floor__ = __ceil__ = __index__

    def __float__(self) -> NoReturn:
        untraceable(
            "needs a float now that each call decides", "Use torch_cubin.sqrt, or multiply by 1.0."
        )


class TracedOptional(Traced):
    """A number that a call may omit (`int?`)."""

    @property
    def defined(self) -> Traced:
        """Whether the call gives it."""
        return _leaf("number", bool, f"{self.tree[1]}?")


class TracedText:
    """A `str` or `ScalarType` argument, or a tensor's dtype. It can be compared with a str or a
    torch.dtype."""

    def __init__(self, name: str, type_: type, operation: str = "is") -> None:
        self.name, self.type, self.operation = name, type_, operation

    def __eq__(self, other: object) -> Traced:  # type: ignore[override]
        if not isinstance(other, self.type):
            untraceable(
                f"compares '{self.name}' with a {type(other).__name__}",
                f"Compare it with a {'str' if self.type is str else 'torch.dtype'}.",
            )
        return _leaf(self.operation, bool, self.name, str(other).removeprefix("torch."))

    def __ne__(self, other: object) -> Traced:  # type: ignore[override]
        return ~(self == other)

    def __bool__(self) -> NoReturn:
        untraceable(
            f"branches on '{self.name}', which each call decides",
            "Compare it: torch_cubin.select(mode == 'fast', 1, 2), or `when`.",
        )

    __hash__ = None  # type: ignore[assignment]


class TracedDtype(TracedText):
    """A tensor's dtype; `name` is the tensor's."""

    def __init__(self, name: str) -> None:
        super().__init__(name, torch.dtype, "is_dtype")


class _TracedSizes:
    def __init__(self, operation: str, name: str) -> None:
        self.operation, self.name = operation, name

    def __getitem__(self, i: int) -> Traced:
        if not isinstance(i, int) or isinstance(i, bool):
            untraceable("indexes sizes with something else than an int", "Write x.shape[0].")
        return _leaf(self.operation, int, self.name, i)

    def __len__(self) -> NoReturn:
        untraceable("needs the number of dims now, which each call decides", "Use x.dim().")

    __iter__ = __len__


class TracedTensor:
    """Stands for a tensor argument. It has facts (dtype, sizes, strides), no data."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def shape(self) -> _TracedSizes:
        return _TracedSizes("size", self._name)

    @property
    def dtype(self) -> TracedDtype:
        return TracedDtype(self._name)

    def size(self, i: int) -> Traced:
        return self.shape[i]

    def stride(self, i: int) -> Traced:
        return _TracedSizes("stride", self._name)[i]

    def numel(self) -> Traced:
        return _leaf("numel", int, self._name)

    def dim(self) -> Traced:
        return _leaf("dim", int, self._name)

    ndim = property(dim)

    def element_size(self) -> Traced:
        return _leaf("itemsize", int, self._name)

    itemsize = property(element_size)

    def is_contiguous(self) -> Traced:
        return _leaf("contiguous", bool, self._name)

    @property
    def defined(self) -> Traced:
        """Whether the call gives the optional tensor."""
        return _leaf("defined", bool, self._name)

    def select(self, dim: int, index: Any) -> TracedView:
        """The part at that index of a dim, without the dim. As a kernel argument: its first
        element's address.

        `dim` is counted from the front, `index` from 0; each call checks that the index is in
        range. The part is only aligned to its element's size, whatever the whole tensor's pattern
        says.
        """
        self._check_view("select", dim, index)
        return TracedView(self, dim, index, None)

    def narrow(self, dim: int, start: Any, length: Any) -> TracedView:
        """The part of the dim with `length` indices from `start` on; otherwise like select()."""
        self._check_view("narrow", dim, start, length)
        return TracedView(self, dim, start, length)

    def _check_view(self, what: str, dim: Any, *places: Any) -> None:
        if type(dim) is not int or dim < 0:
            untraceable(
                f"asks for {what}() of a value that is no dim", "Count dims from the front: 0, 1."
            )
        for place in places:
            found = place.type if isinstance(place, Traced) else type(place)
            if found is not int or (type(place) is int and place < 0):
                untraceable(
                    f"asks for {what}() at a value that is no index", "Write ints, 0 or more."
                )

    def _no_arithmetic(self, *_: object) -> NoReturn:
        untraceable(
            f"calculates with the address or the elements of the tensor '{self._name}'",
            f"Write {self._name}.shape[i] or {self._name}.numel() for a size, "
            f"{self._name}.select(dim, i) or {self._name}.narrow(dim, start, length) for a place "
            "in it.",
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __getitem__ = _no_arithmetic
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _no_arithmetic
    __neg__ = __lt__ = __le__ = __gt__ = __ge__ = __iter__ = __len__ = _no_arithmetic

    def __bool__(self) -> NoReturn:
        untraceable(
            f"branches on the tensor '{self._name}'",
            f"Ask {self._name}.defined, in torch_cubin.select or `when`.",
        )

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        untraceable(
            f"asks the tensor '{self._name}' for '{name}'",
            "It knows shape, size, stride, numel, dim, dtype, itemsize, is_contiguous, defined.",
        )


class TracedView(TracedTensor):
    """A part of a tensor at an offset: the result of select() or narrow().

    As a kernel argument it is the address of its first element; its sizes and strides are the
    view's.
    """

    def __init__(self, base: TracedTensor, dim: int, place: Any, length: Any) -> None:
        super().__init__(base._name)
        self._base, self._dim, self._length = base, dim, length
        step = place * base.stride(dim)
        before: Any = base._element if isinstance(base, TracedView) else 0
        self._element: Any = before + step
        # Range checks of each call, in the contract's form: first index, number of indices, size.
        steps = base._parts if isinstance(base, TracedView) else []
        taken = (place, 1 if length is None else length, base.shape[dim])
        self._parts: list[list[Tree]] = [*steps, [*map(tree_of, taken)]]

    def _of_base(self, i: int) -> int:
        if type(i) is not int or i < 0:
            untraceable(
                "asks a part of a tensor for a value that is no dim", "Count dims from the front."
            )
        return i + 1 if self._length is None and i >= self._dim else i

    @property
    def shape(self) -> Any:
        return _ViewSizes(self)

    def stride(self, i: int) -> Traced:
        return self._base.stride(self._of_base(i))

    def dim(self) -> Any:
        return self._base.dim() - (1 if self._length is None else 0)

    ndim = property(dim)

    def numel(self) -> NoReturn:
        untraceable("asks a part of a tensor for numel()", "Multiply its sizes.")

    def is_contiguous(self) -> NoReturn:
        untraceable("asks a part of a tensor for is_contiguous()", "Compare its strides.")


class _ViewSizes(_TracedSizes):
    def __init__(self, view: TracedView) -> None:
        super().__init__("size", view._name)
        self.view = view

    def __getitem__(self, i: int) -> Any:
        view = self.view
        if view._length is not None and i == view._dim:
            return view._length
        return view._base.shape[view._of_base(i)]


class TracedList:
    """Stands for a list of tensors: its items by index, and length(xs)."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getitem__(self, i: int) -> TracedTensor:
        if not isinstance(i, int) or isinstance(i, bool) or i < 0:
            untraceable(
                f"asks the list '{self._name}' for a value that is no index",
                f"Write {self._name}[0].",
            )
        return TracedTensor(f"{self._name}[{i}]")

    def __len__(self) -> NoReturn:
        untraceable(
            f"needs the length of '{self._name}' now, which each call decides",
            f"Write torch_cubin.length({self._name}), or items by number: {self._name}[0].",
        )

    __iter__ = __bool__ = __len__


def cdiv(a: Any, b: Any) -> Any:
    """ceil(a / b) of integers, of known or traced sizes."""
    return -(-a // b)


def length(values: Any) -> Any:
    """len() of a list of tensors, known or traced."""
    if isinstance(values, TracedList):
        return _leaf("number", int, f"len({values._name})")
    return len(values)


def minimum(a: Any, b: Any) -> Any:
    """The smaller of two numbers, known or traced."""
    return _node("min", a, b) if _traced(a, b) else min(a, b)


def maximum(a: Any, b: Any) -> Any:
    """The larger of two numbers, known or traced."""
    return _node("max", a, b) if _traced(a, b) else max(a, b)


def next_power_of_2(a: Any) -> Any:
    """The smallest power of two that is at least an int, known or traced; 0 for 0 and below."""
    if _traced(a):
        return _node("next_power_of_2", a)
    return 1 << (a - 1).bit_length() if a > 0 else 0


def sqrt(a: Any) -> Any:
    """The square root, a float, of a number known or traced."""
    return _node("sqrt", a) if _traced(a) else math.sqrt(a)


def select(condition: Any, a: Any, b: Any) -> Any:
    """`a` if the condition holds, else `b`; only the selected one is evaluated."""
    if not isinstance(condition, Traced):
        return a if condition else b
    return _node("select", condition, a, b)


def _traced(*values: object) -> bool:
    return any(isinstance(value, Traced) for value in values)


def type_of(value: object) -> type:
    """bool, int or float."""
    if isinstance(value, Traced):
        return value.type
    if isinstance(value, bool | int | float):
        return type(value)
    untraceable(
        f"calculates with a {type(value).__name__}", "Use ints, floats, bools and the arguments."
    )


def tree_of(value: object) -> Tree:
    if isinstance(value, Traced):
        return value.tree
    type_of(value)
    if isinstance(value, int) and not MIN <= value <= MAX:
        untraceable(f"holds {value}", "Integers have 64 bits.")
    if isinstance(value, float) and not math.isfinite(value):
        untraceable(f"holds {value}", "Pass it alone: torch_cubin.float32(float('inf')).")
    return value


def _leaf(operation: str, type_: type, *read: Any) -> Traced:
    return Traced([operation, *read], type_)


# The operand and result types of operations. csrc/declared/expression.cpp enforces the same rules
# on manifests; here errors can name the user's line.
_COMPARISONS, _CONDITIONS = ("lt", "le", "eq", "ne"), ("and", "or", "not")


def _node(operation: str, *operands: Any) -> Traced:
    types = [type_of(operand) for operand in operands]
    if operation == "select" and types[0] is bool:
        types = types[1:]
    if operation in _CONDITIONS:
        if {*types} != {bool}:
            untraceable(
                f"joins a value that is no condition ({operation})",
                "Compare first: (n > 0) & (m > 0).",
            )
    elif operation == "select":
        if len(types) == 3 or (bool in types and {*types} != {bool}):
            untraceable(
                "selects by a value that is no condition, or between a bool and a number",
                "Write torch_cubin.select(n > 0, a, b).",
            )
    elif operation in ("eq", "ne") and {*types} == {bool}:
        return _compared_bools(operands, equal=operation == "eq")
    elif bool in types:
        untraceable(f"uses a bool as a number ({operation})", "Use torch_cubin.select(b, 1, 0).")
    elif operation in ("floordiv", "mod", "next_power_of_2") and float in types:
        what = "next_power_of_2" if len(types) == 1 else f"an integer division ({operation})"
        untraceable(f"uses a value that is no integer in {what}", "")
    result = float if float in types or operation in ("truediv", "sqrt") else types[0]
    if operation in _COMPARISONS:
        result = bool
    return Traced([operation, *map(tree_of, operands)], result)


def _compared_bools(operands: tuple[Any, ...], *, equal: bool) -> Traced:
    """`flag == True` and `flag != other`, by the logical operations of trees."""
    a, b = operands if isinstance(operands[0], Traced) else operands[::-1]
    if isinstance(b, Traced):
        return _node("select", a, b, ~b) if equal else _node("select", a, ~b, b)
    return a if b == equal else ~a


def _users_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return frame


def place(path: str, line: int) -> str:
    """A source line's name in errors."""
    source = linecache.getline(path, line).strip()
    return f"{path}:{line}" + (f" ('{source[:120]}')" if source else "")


def untraceable(problem: str, advice: str) -> NoReturn:
    """An error that names the user's line."""
    frame = _users_frame()
    where = "an expression"
    if frame is not None:
        where = place(frame.f_code.co_filename, frame.f_lineno)
    raise errors.fault("input", where, problem, advice=advice)


# Cached, because a library of kernels shares one lambda and reading its bytecode takes 1 ms.
@functools.lru_cache(1024)
def _refuse_identity_tests(code: CodeType, names: tuple[str, ...]) -> None:
    """Refuses `x is None` and `flag is True`. They would silently be False, since identity tests
    cannot be traced; the bytecode shows them."""
    line = code.co_firstlineno
    earlier: list[dis.Instruction] = []
    for step in dis.get_instructions(code):
        positions = getattr(step, "positions", None)  # Python 3.11 and later
        line = (positions.lineno if positions else step.starts_line) or line
        found: list[str] = []
        other = "another value"
        if step.opname.startswith("POP_JUMP") and step.opname.endswith("NONE"):
            found, other = _operand(earlier)[0], "None"
        elif step.opname == "IS_OP":
            second, rest = _operand(earlier)
            found = second if len(second) > 1 else [*second, *_operand(rest)[0]]
            constants = [s.argval for s in earlier[-2:] if s.opname == "LOAD_CONST"]
            other = str(constants[-1]) if constants else other
        for name in found:
            if name in names:
                advice = f"Ask {name}.defined, in torch_cubin.select or `when`."
                if other != "None":
                    advice = "Compare values with == or !=."
                raise errors.fault(
                    "input",
                    place(code.co_filename, line),
                    f"asks whether '{name}' is {other}, which each call decides",
                    advice=advice,
                )
        earlier.append(step)


def _operand(steps: list[dis.Instruction]) -> tuple[list[str], list[dis.Instruction]]:
    """The local names that the last operand is read from (`x` of `x.dtype`; two if one instruction
    loads both operands), and the steps before it."""
    end = len(steps)
    while end and not steps[end - 1].opname.startswith(("LOAD_FAST", "LOAD_CONST", "LOAD_GLOBAL")):
        if steps[end - 1].opname not in ("LOAD_ATTR", "CACHE", "PUSH_NULL", "NOP"):
            return [], []
        end -= 1
    if not end or not steps[end - 1].opname.startswith("LOAD_FAST"):
        return [], steps[: max(end - 1, 0)]
    value = steps[end - 1].argval
    return list(value) if isinstance(value, tuple) else [value], steps[: end - 1]


def trace(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    label: str,
    sizes: Collection[str] = (),
    advice: str = "",
) -> Any:
    """Calls the function with stand-ins for its parameters and returns its result.

    `arguments` maps a name to its stand-in: TracedTensor(name), or Traced(["number", name], type).
    `sizes` are the names that patterns bind: a parameter of such a name that has a default keeps
    the default (`lambda x, d=d: ...` binds a loop's value); other parameters may have none.
    `advice`: the error's advice for an unknown name. Results are Traced, plain numbers, or
    containers and objects that the function makes.
    """
    code = getattr(function, "__code__", None)
    if code is None:
        raise errors.fault("input", label, "is not a Python function", got=type(function).__name__)
    count = code.co_argcount + code.co_kwonlyargcount
    names = code.co_varnames[:count]
    plain = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    own = dict(zip(plain[len(plain) - len(defaults) :], defaults, strict=True))
    own.update(function.__kwdefaults__ or {})
    unknown = [name for name in names if name not in arguments and name not in own]
    if unknown:
        raise errors.fault(
            "input",
            label,
            f"names an argument '{unknown[0]}' that is none of the op's"
            if not advice
            else f"names '{unknown[0]}', which is no argument of the op's and no constant it knows",
            expected=", ".join(arguments) or "no arguments",
            got=", ".join(names),
            advice=advice.format(unknown[0]),
        )
    for name in own:
        if name in arguments and name not in sizes:
            raise errors.fault(
                "input",
                f"{label} at {place(code.co_filename, code.co_firstlineno)}",
                f"gives '{name}' a default, which is a name of the op's",
                expected="another name for a value of its own, or no default",
                got=f"{name}={own[name]!r:.80}",
            )
    stand_ins = {name: arguments[name] for name in names if name in arguments and name not in own}
    _refuse_identity_tests(code, tuple(stand_ins))
    values = {**own, **stand_ins}
    keywords = {name: values[name] for name in names[code.co_argcount :]}
    return function(*(values[name] for name in plain), **keywords)
