"""define_op of cuTile's kernels: their parameters, and the assumptions checked at each call."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch_cubin import errors
from torch_cubin._declared import define_op as _define
from torch_cubin._declared import op as _op
from torch_cubin._declared import signature as _signature
from torch_cubin._declared.choices import _images, _sm
from torch_cubin._declared.contract import Produced, Scope
from torch_cubin._declared.define_op import KernelChoice
from torch_cubin._declared.expressions import Traced, TracedTensor, TracedView, tree_of
from torch_cubin._declared.kernel_arguments import pointer
from torch_cubin._kernels.sources import Loaded
from torch_cubin._tile.symbol import Array, Constant, Scalar, TileSignature, parse

_ALLOCATOR_ALIGN = 256
_MOST = (1 << 63) - 1


@errors.named_keywords
def define_op(
    schema: str,
    kernel: Any,
    *,
    tensors: Mapping[str, Any],
    args: Any,
    grid: Any,
    signatures: Sequence[Any] | None = None,
    archs: Sequence[str] | str | None = None,
    name: str | None = None,
    dtypes: Mapping[str, Any] | None = None,
    scratch: Mapping[str, Any] | None = None,
    cpu: Callable[..., Any] | None = None,
    backward: str | None = None,
) -> _op.Op:
    """Makes a kernel that cuTile compiled a torch op, as torch_cubin.define_op does.

    The symbol states sizes and strides of arrays, constants, block and cluster, so they are not
    arguments here. Each call is checked against the compiler's assumptions about arrays: constant
    sizes and strides, divisibility, alignment.

    - `kernel`: cubins that cuTile exported under its own names (a path, which may contain `*`,
      bytes, or a list), or a @ct.kernel with `signatures` (KernelSignatures) and `archs`, compiled
      now. A call launches the first kernel whose assumptions its arguments and device satisfy.
    - `args`: one for each argument of the cuTile function: the name of an argument of the op, a
      function of such names, or a constant; or one function that returns all of them. Constants
      must equal those of the kernel.
    - `grid`: as in ct.launch: blocks of tiles, an int, up to three, or functions of the op's names.
    - `name`: the cuTile function, if a file contains several.
    - the rest: as in torch_cubin.define_op.

    Raises InputError [input] for arguments that do not match the kernel and for lists of arrays,
    which no package can hold; and the errors of torch_cubin.define_op.
    """
    label = f"op '{_signature.parse(schema).name}'"
    listed = _kernels(kernel, signatures, archs, name, label)
    choices = []
    for found, data, origin, facts in listed:
        cluster = tuple(facts.get("cluster") or (1, 1, 1))
        source = [Loaded(data, origin)], found.symbol
        choice = KernelChoice(source, args=TileArguments(found, args), grid=grid)
        choice.produced = {
            "grid_factors": cluster,
            "producer": {"name": "cutile", "function": found.function, "kernel": found.symbol,
                         "convention": found.convention},
        }  # fmt: skip
        choices.append(choice)
    return _define.define(
        schema, choices, {"block": None}, tensors=tensors, dtypes=dtypes, scratch=scratch, cpu=cpu,
        backward=backward,
    )  # fmt: skip


def _kernels(
    kernel: Any, signatures: Any, archs: Any, name: str | None, label: str
) -> list[tuple[TileSignature, bytes, str, dict[str, Any]]]:
    files = kernel
    if signatures is not None or archs is not None:
        if signatures is None or archs is None:
            raise errors.fault("input", f"{label}: kernel", "cannot be compiled",
                               expected="signatures= and archs=", got="one of them")  # fmt: skip
        files = compile(kernel, signatures, archs)
    found, seen = [], []
    for data, origin, image in _images(files):
        for facts in image["kernels"]:
            seen.append(facts["name"])
            signature = parse(facts["name"])
            if name is None or signature.function == name:
                found.append((-_sm(image["arch"]), signature, data, origin, facts))
    functions = {signature.function for _, signature, _, _, _ in found}
    if not found or len(functions) > 1:
        raise errors.fault(
            "input", f"{label}: kernel", "is not one function of cuTile's",
            expected="name= of one of them", got=", ".join(sorted(functions or seen))[:200],
        )  # fmt: skip
    # The newest architecture first; within one, the kernel with the most assumptions first.
    found.sort(key=lambda entry: (entry[0], -_assumptions(entry[1])))
    return [entry[1:] for entry in found]


def _assumptions(signature: TileSignature) -> int:
    count = 0
    for parameter in _flat(signature.parameters):
        if isinstance(parameter, Array):
            for dim in parameter.dims:
                count += 4 * (dim.size is not None) + 4 * (dim.stride is not None)
                count += (dim.size_multiple > 1) + (dim.stride_multiple > 1)
            count += parameter.address_multiple > 1
    return count


@errors.named_keywords
def compile(kernel: Any, signatures: Any, archs: Sequence[str] | str) -> list[bytes]:
    """Compiles a @ct.kernel to one cubin per arch. Needs cuTile but no GPU."""
    try:
        from cuda.tile import compilation
    except ImportError as error:
        raise errors.fault(
            "file", "cuTile", "is not here", expected='pip install "cuda-tile[tileiras]"'
        ) from error
    unnamed = [signature.with_symbol(None) for signature in signatures]
    out = []
    for arch in [archs] if isinstance(archs, str) else archs:
        made = io.BytesIO()
        # cuTile's names of architectures have no suffix; its cubins do.
        compilation.export_kernel(
            kernel, unnamed, made, gpu_code=arch.rstrip("af"), output_format="cubin"
        )
        out.append(made.getvalue())
    return out


def _flat(parameters: Sequence[Any]) -> list[Any]:
    out: list[Any] = []
    for parameter in parameters:
        out += _flat(parameter) if isinstance(parameter, tuple) else [parameter]
    return out


class TileArguments(Produced):
    """The arguments of one kernel. `given` is the `args` of define_op."""

    def __init__(self, signature: TileSignature, given: Any) -> None:
        self.signature, self.given = signature, given

    def resolve(self, scope: Scope) -> tuple[list[Any], list[dict[str, Any]]]:
        given = scope.trace(self.given, "args")
        if not isinstance(given, (list, tuple)):
            given = (given,)
        wanted = self.signature.parameters
        if len(given) != len(wanted):
            raise _refuse(scope, "args", "are another number than the function has",
                          str(len(wanted)), len(given))  # fmt: skip
        resolver = _Resolver(scope)
        for index, (parameter, value) in enumerate(zip(wanted, given, strict=True)):
            resolver.add(parameter, value, str(index))
        unique = {json.dumps(one, sort_keys=True): one for one in resolver.requires}
        return resolver.entries, list(unique.values())


def _refuse(scope: Scope, what: str, problem: str, expected: str, got: Any) -> errors.Error:
    return errors.fault(
        "input", f"{scope.label}: {what}", problem, expected=expected, got=f"{got!s:.120}"
    )


class _Resolver:
    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.entries: list[list[Any]] = []
        self.requires: list[dict[str, Any]] = []

    def add(self, parameter: Any, value: Any, place: str) -> None:
        what = f"kernel argument {place}"
        value = self.scope.trace(value, f"args {place}")
        if isinstance(value, str) and value in self.scope.names:
            value = self.scope.names[value]
        if isinstance(parameter, tuple):
            if not isinstance(value, (list, tuple)) or len(value) != len(parameter):
                raise _refuse(self.scope, what, "is a tuple",
                              errors.counted(len(parameter), "item"), _shown(value))  # fmt: skip
            for index, (inner, item) in enumerate(zip(parameter, value, strict=True)):
                self.add(inner, item, f"{place}.{index}")
        elif isinstance(parameter, Constant):
            self._constant(parameter, value, what)
        elif isinstance(parameter, Scalar):
            self.entries.append([parameter.dtype, self._number(parameter.dtype, value, what)])
        else:
            self._array(parameter, value, what)

    def _require(self, what: str, **condition: Any) -> None:
        self.requires.append({"argument": what.removeprefix("kernel argument "), **condition})

    def _constant(self, parameter: Constant, value: Any, what: str) -> None:
        constant = parameter.value
        if isinstance(value, Traced):
            fits = (value.type is bool) == (type(constant) is bool)
            if not fits or (value.type is int and constant != int(constant)):
                raise _refuse(self.scope, what, "is another kind of constant", repr(constant),
                              _shown(value))  # fmt: skip
            self._require(what, value=value.tree, equals=constant)
        elif type(value) is not type(constant) or value != constant:
            raise _refuse(self.scope, what, "is another constant than the kernel was compiled for",
                          repr(constant), _shown(value))  # fmt: skip

    def _number(self, dtype: str, value: Any, what: str) -> Any:
        found = value.type if isinstance(value, Traced) else type(value)
        fits: tuple[type, ...] = (int,)
        if dtype == "bool":
            fits = (bool,)
        elif "float" in dtype:
            fits = (int, float)
        if found not in fits or dtype.startswith("float8"):
            raise _refuse(self.scope, what, f"is a number of {dtype}",
                          " or ".join(t.__name__ for t in fits), _shown(value))  # fmt: skip
        return tree_of(value)

    def _array(self, array: Array, tensor: Any, what: str) -> None:
        if not isinstance(tensor, TracedTensor) or isinstance(tensor, TracedView):
            raise _refuse(self.scope, what, "is an array", "a tensor of the op's", _shown(tensor))
        name = tensor._name
        base = name.partition("[")[0]
        entry = self.scope.entries.get(base, {})
        if base in self.scope.optional:
            self._require(what, value=tensor.defined.tree, equals=True)
        self._check_dtype(array, name, entry, what)
        if entry.get("may_overlap") and not array.may_share:
            raise _refuse(self.scope, what, "was compiled as an array that shares no memory",
                          "alias_groups in its ArrayConstraint", "may_overlap")  # fmt: skip
        shape, ndim = entry.get("shape"), len(array.dims)
        is_open = shape is None or any(isinstance(s, str) and s[0] == "*" for s in shape)
        is_made = base not in self.scope.arguments
        if is_open:
            of = self._same_shape(entry, what) if is_made else name
            self._require(what, value=["dim", of], equals=ndim)
        elif shape is not None and len(shape) != ndim:
            raise _refuse(self.scope, what, f"is an array of {errors.counted(ndim, 'dim')}",
                          str(ndim), f"tensor '{name}' of {len(shape)}")  # fmt: skip
        promised = _ALLOCATOR_ALIGN if is_made else entry.get("align", 16)
        if array.address_multiple > promised:
            self._require(what, address_of=name, multiple_of=array.address_multiple)
        kind = f"int{array.index_bits}"
        self.entries.append(pointer(name))
        for i, dim in enumerate(array.dims):
            size = ["size", name, i]
            self._assume(what, name, size, dim.size, dim.size_multiple)
            self.entries.append([kind, size])
        for i, dim in enumerate(array.dims):
            stride = ["stride", name, i]
            self._assume(what, name, stride, dim.stride, dim.stride_multiple)
            if dim.least_stride is not None and dim.least_stride > 0:
                self._require(what, value=stride, at_least=dim.least_stride, at_most=_MOST)
            self.entries.append([kind, stride])

    def _assume(self, what: str, name: str, tree: Any, constant: int | None, multiple: int) -> None:
        if constant is None and multiple == 1:
            return
        if name.partition("[")[0] not in self.scope.arguments:
            tree = self._of_output(tree, name, what)
            if tree is None:
                return
        if constant is not None:
            if not isinstance(tree, int):
                self._require(what, value=tree, equals=constant)
            elif tree != constant:
                raise _refuse(self.scope, what, "is another constant", str(constant), tree)
        if multiple != 1 and not isinstance(tree, int):
            self._require(what, value=tree, multiple_of=multiple)
        elif multiple != 1 and tree % multiple:
            raise _refuse(self.scope, what, "is no multiple", str(multiple), tree)

    def _of_output(self, tree: list[Any], name: str, what: str) -> Any:
        """A size or stride of a contiguous output, expressed by the op's arguments: a kernel's
        requirements are checked before anything is allocated."""
        operation, _, place = tree
        entry = self.scope.entries.get(name, {})
        shape = entry.get("shape") or []
        if entry.get("like") or any(isinstance(s, str) and s[0] == "*" for s in shape):
            return [operation, self._same_shape(entry, what), place]
        sizes = [["number", size] if isinstance(size, str) else size for size in shape]
        if operation == "size":
            return sizes[place]
        product: Any = 1
        for size in sizes[place + 1 :]:
            if isinstance(product, int) and isinstance(size, int):
                product *= size
            else:
                product = size if product == 1 else ["mul", product, size]
        return product

    def _same_shape(self, entry: Mapping[str, Any], what: str) -> str:
        """A contiguous argument with the same sizes as the output."""
        if entry.get("like") is not None:
            return entry["like"]
        for name in sorted(self.scope.arguments - self.scope.optional):
            other = self.scope.entries.get(name, {})
            is_contiguous = other.get("layout", "contiguous") == "contiguous"
            if other.get("shape") == entry.get("shape") and is_contiguous:
                return name
        raise _refuse(self.scope, what, "is an output whose sizes cannot be checked",
                      "sizes by name, as float32[m, n]", str(entry.get("shape")))  # fmt: skip

    def _check_dtype(self, array: Array, name: str, entry: Mapping[str, Any], what: str) -> None:
        found = entry.get("dtype", "")
        variable = self.scope.dtypes.get(found)
        if array.dtype not in (variable if variable is not None else [found]):
            raise _refuse(self.scope, what, f"is an array of {array.dtype}, and tensor '{name}' is"
                          " another", array.dtype, found)  # fmt: skip
        if variable is None or len(set(variable)) == 1:
            return
        if name.partition("[")[0] not in self.scope.arguments:
            same = [n for n in self.scope.arguments if n not in self.scope.optional and
                    self.scope.entries.get(n, {}).get("dtype") == found]  # fmt: skip
            if not same:
                return
            name = sorted(same)[0]
        self._require(what, value=["is_dtype", name, array.dtype], equals=True)


def _shown(value: Any) -> str:
    if isinstance(value, Traced):
        return f"an expression of type {value.type.__name__}"
    if isinstance(value, TracedTensor):
        return f"the tensor '{value._name}'"
    return f"{type(value).__name__} {value!r:.60}"


__all__ = ["compile", "define_op"]
