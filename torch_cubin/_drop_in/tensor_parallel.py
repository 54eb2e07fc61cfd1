# Sums of products over ranks, in one order for every number of ranks. It decides by the placements
# of DTensors which products are such sums; the parts and the tree are those of row_parallel.py.
"""``install(tensor_parallel=N)``: products of DTensors whose K the ranks share."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from torch_cubin import errors
from torch_cubin._drop_in import report
from torch_cubin._ops import raw_ops, row_parallel
from torch_cubin._pytorch import compiler, dispatch_modes, sharding
from torch_cubin._pytorch.imports import when_imported

# Labels of the operands, which follow an addend in the last three.
_PRODUCTS = {
    "mm": ("mk", "kn"),
    "bmm": ("bmk", "bkn"),
    "mv": ("mk", "k"),
    "dot": ("k", "k"),
    "addmm": ("mk", "kn"),
    "baddbmm": ("bmk", "bkn"),
    "addmv": ("mk", "k"),
}
_SUMS = ("addmm", "baddbmm", "addmv")
# Products that are refused where K is divided.
_OTHERS = {"_scaled_mm": ("mk", "kn"), "vdot": ("k", "k")}
_OURS = (*raw_ops.PRODUCTS, *raw_ops.SYMMETRIC, raw_ops.ADDMM_INTO, *raw_ops.FUSED, raw_ops.GROUPED)
# Functions that call products. DTensor gets them whole in inference mode, and would sum over ranks.
_COMPOSITES = (
    *("linear", "matmul", "inner", "tensordot", "einsum", "bilinear", "chain_matmul"),
    *("linalg_matmul", "linalg_multi_dot", "linalg_vecdot", "vecdot"),
)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_parts: int | None = None
_served = 0  # products


def check(parts: object) -> None:
    if parts is not None and (isinstance(parts, bool) or not isinstance(parts, int)):
        what = "torch_cubin.install argument 'tensor_parallel'"
        raise errors.wrong_type(what, "an int or None", parts)
    if parts is not None and parts < 1:
        raise errors.fault(
            "input", "torch_cubin.install argument 'tensor_parallel'", "is too small",
            expected="a number of parts, at least 1", got=str(parts),
        )  # fmt: skip
    if parts is not None:
        sharding.require_handlers()  # not once a later import of DTensor asks for them


def set_parts(parts: int | None) -> None:
    """Cuts the K that ranks share into so many parts; None for PyTorch's sums."""
    global _parts
    if parts == _parts:
        return
    _parts = parts
    if parts is not None:
        _watch()
    _update()
    compiler.forget_compiled()  # their graphs have the sums of before


def parts_of_graphs() -> int | None:
    """For the keys of compiled graphs."""
    return _parts


def products_served() -> int:
    """In this process."""
    return _served


@functools.cache
def _watch() -> None:
    when_imported("torch.distributed.tensor", _loaded)


_is_loaded = False


def _loaded(module: ModuleType) -> None:
    global _is_loaded
    _is_loaded = True
    _update()


def _update() -> None:
    if _is_loaded and _parts is not None:
        sharding.set_handlers(dict(_handlers()))
    elif _is_loaded:
        sharding.remove_handlers()


def _handlers() -> Iterator[tuple[Any, sharding.Handler]]:
    from torch_cubin._ops.sharding import RULES  # imported with DTensor: most processes have none

    for name, labels in {**_PRODUCTS, **_OTHERS}.items():
        packet = getattr(torch.ops.aten, name)
        written = getattr(torch.ops.aten, f"{name}_", None)
        for each in (packet, written):
            for overload in each.overloads() if each is not None else ():
                op = getattr(each, overload)
                is_served = (
                    name in _PRODUCTS and each is packet and overload in ("default", "dtype")
                )
                yield op, functools.partial(_serve if is_served else _refuse, labels)
    yield torch.ops.aten.sum.dim_IntList, _serve_sum
    yield torch.ops.aten._grouped_mm.default, _refuse_groups
    for name in _OURS:
        describe: Any = RULES[name]
        for raw in raw_ops.raw_names(name):
            yield raw_ops.overload(raw), functools.partial(_refuse_ours, describe)
    packets = [(torch.ops.aten, name) for name in _COMPOSITES]
    for namespace, name in (*packets, *((torch.ops.cubin, name) for name in _OURS)):
        for overload in ("default", "out"):
            op = getattr(getattr(namespace, name, None), overload, None)
            if op is not None and dispatch_modes.is_composite(op):
                yield op, _decompose


def _decompose(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return op.decompose(*args, **kwargs)


def _serve(labels: Sequence[str], op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The product of DTensors whose K is divided; None for others."""
    global _served
    name = op.name().partition(".")[0]
    count = int(name.removeprefix("aten::") in _SUMS)
    addend, (a, b) = (args[0] if count else None), args[count : count + 2]
    if not _is_divided(labels, a, b) and not any(map(_is_partial, (addend, a, b))):
        return None
    if not (a.is_floating_point() or a.is_complex()):
        return None  # sums of integers are exact
    parts, mesh = _checked(name, labels, addend, a, b)
    from torch.distributed.tensor import DTensor, Replicate, Shard

    with torch.no_grad():
        own_a, own_b = (
            # Detached, or torch 2.11 calls detach_() on the result, for which DTensor has no rule.
            each.detach().redistribute(mesh, [Shard(label.index("k"))]).to_local()
            for each, label in zip((a, b), labels, strict=True)
        )
        own_a = own_a if own_a.dim() > 1 else own_a.unsqueeze(0)
        own_b = own_b if own_b.dim() > 1 else own_b.unsqueeze(1)
        partial = row_parallel.summed_parts(own_a, own_b, parts // mesh.size())
        # A gather: DTensor's placements move elements here, and add none.
        gathered = DTensor.from_local(partial, mesh, [Shard(0)], run_check=False).full_tensor()
        total = row_parallel.tree(gathered).reshape(_sizes(labels, a, b))
        total = _with_addend(total, addend, kwargs.get("beta", 1), kwargs.get("alpha", 1))
        out_dtype = args[count + 2] if len(args) > count + 2 else kwargs.get("out_dtype")
        out = total.to(out_dtype or a.dtype)
        result = DTensor.from_local(out, mesh, [Replicate()], run_check=False)
    _served += 1
    report.count_served(f"{name} over ranks", (a, b), result)
    return result


def _serve_sum(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Sums over the first dims, where ranks have parts of the others: gradients of biases.

    Their order would depend on the number of a rank's columns. As products with ones, or as sums of
    rows, it does not.
    """
    from torch.distributed.tensor import DTensor, Shard

    x, given = args[0], args[1] or ()
    dims = sorted({each % x.dim() for each in given if -x.dim() <= each < x.dim()})
    if len(dims) < len(given):
        return None  # PyTorch raises an error
    count, keepdim = len(dims), args[2] if len(args) > 2 else False
    placement = x.placements[0] if isinstance(x, DTensor) and x.device_mesh.ndim == 1 else None
    out_dtype = kwargs.get("dtype") or x.dtype
    if (
        type(placement) is not Shard or dims != list(range(count)) or not 0 < count < x.dim()
        or placement.dim % x.dim() < count or x.dtype not in _FLOATS
        or out_dtype not in (x.dtype, torch.float32)
    ):  # fmt: skip
        return None
    with torch.no_grad():
        rows = x.to_local().flatten(0, count - 1)
        sizes = [*[1] * (count if keepdim else 0), *rows.shape[1:]]
        rows = rows.reshape(len(rows), -1)
        if rows.dtype == torch.float32:  # a product may be of TF32, which holds for products alone
            total = torch.ops.cubin._row_sums(rows.t().contiguous(), 0, 1.0, torch.float32)
        else:
            total = row_parallel.summed_parts(rows.new_ones(1, len(rows)), rows, 1)
        dim = placement.dim % x.dim() - (0 if keepdim else count)
        whole = [*sizes[:dim], x.shape[placement.dim], *sizes[dim + 1 :]]
        return DTensor.from_local(
            total.reshape(sizes).to(out_dtype), x.device_mesh, [Shard(dim)], run_check=False,
            shape=torch.Size(whole), stride=_strides(whole),
        )  # fmt: skip


def _strides(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[i + 1 :]) for i in range(len(sizes)))


def _sizes(labels: Sequence[str], a: Tensor, b: Tensor) -> list[int]:
    pairs = zip("".join(labels), (*a.shape, *b.shape), strict=True)
    return list({label: size for label, size in pairs if label != "k"}.values())


def _with_addend(total: Tensor, addend: Any, beta: Any, alpha: Any) -> Tensor:
    from torch.distributed.tensor import DTensor, Replicate

    if alpha != 1:
        total = total * alpha
    if addend is None or beta == 0:
        return total
    if isinstance(addend, DTensor):
        sharded: Any = addend.detach()
        addend = sharded.redistribute(addend.device_mesh, [Replicate()]).to_local()
    wide = addend.to(total.dtype)
    return total + (wide if beta == 1 else wide * beta)


def _is_divided(labels: Sequence[str], *tensors: Any) -> bool:
    """Whether ranks have parts of the K of an operand."""
    return any(
        getattr(each, "dim", None) in (dim, dim - tensor.dim())
        for label, tensor in zip(labels, tensors, strict=True)
        for dim in (label.find("k"),)
        for each in getattr(tensor, "placements", ())
    )


def _is_partial(tensor: Any) -> bool:
    return any(each.is_partial() for each in getattr(tensor, "placements", ()))


def _checked(name: str, labels: Sequence[str], addend: Any, a: Any, b: Any) -> tuple[int, Any]:
    """The number of parts, and the mesh; raises for a call that cannot have the same bits on other
    numbers of ranks."""
    from torch.distributed.tensor import DTensor, Shard

    assert _parts is not None
    operands = [each for each in (addend, a, b) if each is not None]
    placements = ", ".join(str(getattr(each, "placements", "a tensor")) for each in operands)
    if not (isinstance(a, DTensor) and isinstance(b, DTensor)):
        raise _fault(name, "mixes DTensors and tensors", "DTensors", placements, _DISTRIBUTE)
    mesh = a.device_mesh
    if mesh.ndim != 1 or b.device_mesh != mesh:
        raise _fault(
            name, "has operands on other meshes than one of one dim", "a mesh of one dim",
            f"{mesh} and {b.device_mesh}", "Slice the mesh: mesh['tp'].",
        )  # fmt: skip
    strided = [each for x in operands for each in getattr(x, "placements", ())
               if hasattr(each, "dim") and type(each) is not Shard]  # fmt: skip
    if any(map(_is_partial, operands)) or strided:
        advice = "Redistribute the operand to Replicate() or Shard(dim) before the product."
        raise _fault(
            name, "has an operand that is a sum over ranks, or has strided shards",
            "whole or sharded operands", placements, advice,
        )  # fmt: skip
    if a.dtype not in _FLOATS or b.dtype != a.dtype:
        raise _fault(
            name, "cannot be cut into parts", "operands of one dtype of floating point",
            f"{a.dtype} and {b.dtype}", "",
        )  # fmt: skip
    k = a.shape[labels[0].index("k")]
    if _parts % mesh.size():
        advice = "Install with a multiple, the same on every number of ranks."
        expected = f"a multiple of the mesh's {mesh.size()} ranks"
        raise _fault(name, "has more ranks than parts", expected, f"{_parts} parts", advice)
    if k % _parts:
        advice = "Pad K, or run this product on whole tensors."
        expected = f"K a multiple of tensor_parallel={_parts}"
        raise _fault(name, "cannot be cut into equal parts", expected, f"K = {k}", advice)
    return _parts, mesh


_DISTRIBUTE = "Distribute all operands (torch.distributed.tensor.distribute_tensor)."


def _refuse(labels: Sequence[str], op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    name = op.name().partition(".")[0].removeprefix("aten::").removesuffix("_")
    first = int(name in _SUMS)
    if _is_divided(labels, *args[first : first + 2]):
        raise _not_served(op)


def _refuse_groups(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    a, b = args[:2]
    if _is_divided(("." * (a.dim() - 2) + "mk", "." * (b.dim() - 2) + "kn"), a, b):
        raise _not_served(op)


def _refuse_ours(
    describe: Callable[..., Any], op: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> None:
    from torch.distributed.tensor import DTensor

    found = describe(*args, **kwargs)
    values = [*args, *kwargs.values()]
    lists = [value if isinstance(value, (list, tuple)) else [value] for value in values]
    tensors = [each for own in lists for each in own if isinstance(each, Tensor)]
    for labels, tensor in zip(found.arguments, tensors, strict=False):
        for each in tensor.placements if isinstance(tensor, DTensor) else ():
            if hasattr(each, "dim") and labels[each.dim] in found.summed:
                raise _not_served(op)


def _not_served(op: Any) -> errors.Error:
    return _fault(
        op.name(), "has a K that ranks share, which it cannot sum in one order", "a whole K",
        "shards of it", "Call torch.nn.functional.linear, torch.mm or torch.bmm, which can.",
    )  # fmt: skip


def _fault(what: str, problem: str, expected: str, got: str, advice: str) -> errors.Error:
    object = f"{what} of DTensors under install(tensor_parallel=)"
    fault = errors.fault("input", object, problem, expected=expected, got=got, advice=advice)
    return errors.ModeError(str(fault))


__all__ = ["check", "parts_of_graphs", "products_served", "set_parts"]
