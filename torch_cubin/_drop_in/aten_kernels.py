# Registers our kernels for aten's own operators, below autograd. They are registered once, then
# switched (install.py for the process, scope.py for a thread). C++ decides which calls they serve
# (csrc/ops/matmul/aten_products.cpp).
"""Registers the kernels that install() and drop_in() switch on."""

from __future__ import annotations

import ctypes
import functools
import importlib
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from torch_cubin import errors
from torch_cubin._native import library
from torch_cubin._native.locks import fork_safe_lock
from torch_cubin._pytorch import aten_kernels, operators, thread_objects

# The numbers of csrc/ops/common/serving.h.
POLICIES = {"off": 0, "fastest": 1, "all": 2}
_NAMES_OF_POLICIES = [*POLICIES]
# Numbered as in csrc/ops/matmul/aten_products.h: operators, and the destination of the result.
_SUMS = ("addmm", "baddbmm", "addmv")
_FORMS = ("{}", "{}.out", "{}_")

# Of PyTorch's flash attention; _flash_attention_forward_no_dropout_inplace, too, where it exists.
FLASH = (
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"),
    *("_flash_attention_forward", "_flash_attention_backward"),
)

# The operators that install() serves. The others are registered in csrc/c_api_install.cpp.
OPERATORS = (
    *("mm", "mm.out", "bmm", "bmm.out", "mv", "_grouped_mm", "_scaled_mm", "_scaled_mm_v2"),
    *("_scaled_grouped_mm", "_scaled_grouped_mm_v2"),
    "sum.dim_IntList",
    *("native_layer_norm", "native_layer_norm_backward"),
    *("_fused_rms_norm", "_fused_rms_norm_backward"),
    *(form.format(name) for name in _SUMS for form in _FORMS),
    *(
        f"_scaled_dot_product_{kind}_attention{direction}"
        for kind in ("efficient", "cudnn")
        for direction in ("", "_backward")
    ),
    *FLASH,
)

_lock = fork_safe_lock()
_registered: dict[str, torch.library.Library] = {}  # by dispatch key; guarded by _lock
_with_flash: set[str] = set()  # dispatch keys; guarded by _lock
_with_rows: set[tuple[str, str]] = set()  # kinds of _OVER_ROWS, and keys; guarded by _lock


def number_of(policy: str) -> int:
    if policy not in ("fastest", "all"):
        raise errors.fault(
            "input", "argument 'policy'", "is not known", expected="'fastest' or 'all'",
            got=repr(policy),
        )  # fmt: skip
    return POLICIES[policy]


def register(key: str = "CUDA") -> None:
    """Registers our kernels for this dispatch key, once, if this PyTorch has kernels for it.

    NOTE: the registrations are never removed. Removing them would race with other threads' calls
    inside PyTorch's dispatcher: a call could combine the old kernel's boxed function with the new
    one's state. Adding one is safe, because PyTorch's kernels are called unboxed and have no state.
    """
    with _lock:
        if key in _registered or (key == "CUDA" and not aten_kernels.has_cuda()):
            return
        if not _has_shims(key):
            raise errors.fault(
                "internal", "PyTorch", "lacks C functions that install() needs",
                expected=f"aoti_torch_{key.lower()}_mm_out and its kin", got="none",
                advice="Use a version of torch that torch_cubin was tested with.",
            )  # fmt: skip
        _send_known_speed()
        aten_kernels.warn_of_override_now()
        owner = operators.registry("aten", "IMPL")
        extension = _extension()
        if extension is not None:
            for op, name in enumerate(_SUMS):
                for form, pattern in enumerate(_FORMS):
                    _register_sum(owner, extension, key, pattern.format(name), (op, form))
        for name in _IN_PYTHON:
            pytorchs = aten_kernels.own_kernel(name, key)
            if pytorchs is not None:
                owner.impl(name, _kernel_over(name, pytorchs), key, allow_override=True)
        library.stand_over_aten(key)
        _registered[key] = owner
    register_flash(key)
    for kind in _OVER_ROWS:
        if any(kind in row["kinds"] for row in shipped_rows()):
            register_over_rows(kind)
    if library.load().torch_cubin_batch_invariant():
        register_rows()


def register_flash(key: str = "CUDA") -> None:
    """Registers our kernels of PyTorch's flash attention alone, as register() does."""
    with _lock:
        if key in _with_flash or (key == "CUDA" and not aten_kernels.has_cuda()):
            return
        _send_known_speed()  # before a call reads it, once for each GPU
        aten_kernels.warn_of_override_now()
        library.stand_over_flash(
            key,
            _argument_count("_flash_attention_forward"),
            _argument_count("_flash_attention_forward_no_dropout_inplace"),
        )
        _with_flash.add(key)


def _argument_count(name: str) -> int:
    """Of an operator of aten; 0 if this PyTorch lacks it."""
    packet = getattr(torch.ops.aten, name, None)
    return 0 if packet is None else len(operators.schema_of(packet.default).arguments)


def register_for(policy: str) -> None:
    """Registers what this policy can serve on CUDA."""
    register()
    if policy == "all":
        for kind in _OVER_ROWS:
            register_over_rows(kind)


# Kinds of calls over rows, and what registers our kernels of them for a dispatch key.
_OVER_ROWS = {"sum": library.stand_over_sums, "norm": library.stand_over_norms}


def register_over_rows(kind: str) -> None:
    """Registers our kernels of a kind, for the keys that have ours.

    Called before a policy can serve it: registered, they cost the host some microseconds more for
    every sum or norm of a program that they leave to PyTorch.
    """
    with _lock:
        for key in _registered.keys() - {key for each, key in _with_rows if each == kind}:
            _OVER_ROWS[kind](key)
            _with_rows.add((kind, key))


def register_rows() -> None:
    """Registers the kernels of row_kernels.py, which run under the switch of batch invariance, for
    the keys that have ours."""
    if _registered:
        for kind in _OVER_ROWS:  # first: theirs call them for what they do not take
            register_over_rows(kind)
        from torch_cubin._drop_in import row_kernels  # imported late: few processes need it

        for key in list(_registered):
            row_kernels.register(key)


@functools.cache
def _has_shims(key: str) -> bool:
    """Whether PyTorch's own products can be called below its dispatcher."""
    start = f"aoti_torch_{key.lower()}_"
    symbols = [each for each in library.pytorch_symbols() if each["name"].startswith(start)]
    others = ("_scaled_", "_flash_attention_")  # served only where they are found
    return all(
        each["found"] for each in symbols if not any(part in each["name"] for part in others)
    )


def _register_sum(
    owner: torch.library.Library, extension: Any, key: str, name: str, number: tuple[int, int]
) -> None:
    pytorchs = aten_kernels.own_kernel(name, key)
    owner.impl(
        name,
        extension.sum_kernel(*number, pytorchs or functools.partial(_no_kernel, name)),
        key,
        allow_override=True,
    )


# Operators whose schemas C++ of the stable ABI or PyTorch's C functions cannot take. Each has an op
# of ours, `_aten` and its name, with the same arguments: it returns the product, or nothing if the
# call is left to PyTorch.
_IN_PYTHON = ("_grouped_mm", "_scaled_mm_v2", "_scaled_grouped_mm", "_scaled_grouped_mm_v2")


def _kernel_over(name: str, pytorchs: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Our kernel of one of these operators, over PyTorch's."""
    serve = getattr(torch.ops.cubin, f"_aten{name}").default
    arguments = operators.schema_of(getattr(torch.ops.aten, name).default).arguments
    defaults = [argument.default_value for argument in arguments]

    def kernel(*given: Any) -> torch.Tensor:
        args = (*given, *defaults[len(given) :])  # the dispatcher omits trailing defaults
        made: list[torch.Tensor] = serve(*args)
        return made[0] if made else pytorchs(*args)

    return kernel


def _no_kernel(name: str, *args: object, **kwargs: object) -> None:
    raise errors.fault(
        "no_kernel", f"aten::{name}", "is called with arguments that only PyTorch could serve",
        expected="a PyTorch with a kernel of its own", got="none for this device",
    )  # fmt: skip


@functools.cache
def _extension() -> Any:
    """The extension module if it has the functions for addmm and the other sums, else None."""
    try:
        extension: Any = importlib.import_module("torch_cubin._launch")
    except ImportError:
        return None
    base, wrap = aten_kernels.tensor_base(), aten_kernels.wrap_function()
    if base is None or wrap is None or not aten_kernels.SUMS.available:
        return None
    loaded = library.load()
    compute, release = (
        ctypes.cast(function, ctypes.c_void_p).value
        for function in (loaded.torch_cubin_aten_sum, loaded.torch_cubin_release_tensor)
    )
    extension.configure_products(compute, wrap, release, torch.OutOfMemoryError, *base)
    return extension


@functools.cache
def _known_speed() -> str:
    return Path(__file__).with_name("known_speed.json").read_text(encoding="utf-8")


@functools.cache
def _send_known_speed() -> None:
    library.set_known_speed(_known_speed())
    library.set_calibrate(_calibrate)


def _calibrate(index: int) -> int:
    from torch_cubin._drop_in import calibrate  # imported late: most GPUs are in the table

    return calibrate.calibrate(index)


def _calibrated(index: int) -> list[dict[str, list[str]]]:
    """The rows that were measured in this process."""
    module: Any = sys.modules.get("torch_cubin._drop_in.calibrate")
    return [] if module is None else module.known_rows(index)


_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def serves(value: torch.Tensor, policy: str, kind: str = "product") -> bool:
    """Whether the policy serves calls of this tensor's device and dtype, which may be a fake.

    As csrc/ops/common/serving.cpp decides, but never float32 under "fastest": that depends on a
    setting that may change while a graph lives.
    """
    return serves_type(value.device, value.dtype, policy, kind)


def serves_type(device: torch.device, dtype: torch.dtype, policy: str, kind: str) -> bool:
    """The same for tensors of this device and dtype."""
    if dtype not in _FLOATS or device.type.upper() not in _registered:
        return False
    if policy != "fastest":
        return policy == "all"
    if device.type != "cuda":
        return False
    index, name = device.index or 0, str(dtype).removeprefix("torch.")
    rows = _rows_of(index)
    if not rows and not torch.are_deterministic_algorithms_enabled():
        rows = _calibrated(index)
    return any(name in row["dtypes"] and kind in row["kinds"] for row in rows)


# As csrc/ops/attention/api/aten_attention.cpp decides.
_ATTENTION_FLOATS = _FLOATS[:3]
_WIDEST_HEAD = 256

# From so many queries on, attention is quicker with a boolean mask than with the numbers that
# PyTorch makes of one (benchmarks/NOTES.md, "attention with the boolean mask").
QUERIES_OF_BOOLEAN_MASKS = 64


def serves_attention(query: torch.Tensor, mask: torch.Tensor | None, policy: str) -> bool:
    """Whether the policy serves attention by PyTorch's kernels that take a mask, of these tensors,
    which may be fakes."""
    width = query.shape[-1]
    fits = query.dtype in _ATTENTION_FLOATS and isinstance(width, int) and width <= _WIDEST_HEAD
    if mask is not None:
        fits = fits and mask.dtype in (query.dtype, torch.bool)
    return fits and serves(query, policy, "attention")


@functools.cache
def _every_row() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(_known_speed())["rows"]
    return rows


def shipped_rows(gpu: str | None = None) -> list[dict[str, Any]]:
    """The rows of known_speed.json, for a GPU by the driver's name."""
    return [row for row in _every_row() if gpu is None or row["gpu"] in gpu]


@functools.cache
def _rows_of(index: int) -> list[dict[str, Any]]:
    return shipped_rows(torch.cuda.get_device_name(index))


# --- drop_in(): the switch of a thread ---

_entered = threading.local()  # .scopes: (scope, its number) of this thread, the innermost last


def below_autograd() -> bool:
    """Whether drop_in() serves eager code with these kernels: not on a CPU build of PyTorch."""
    return aten_kernels.has_cuda() and _has_shims("CUDA")


def enter_thread(scope: object, policy: str) -> bool:
    """Switches this thread to the policy. On a CPU build of PyTorch it does nothing and returns
    False."""
    if not below_autograd():
        return False
    register_for(policy)
    scopes = _entered.__dict__.setdefault("scopes", [])
    before = scopes[-1][1] if scopes else 0
    scopes.append((scope, POLICIES[policy]))
    _switch_thread(before, POLICIES[policy])
    return True


def leave_thread(scope: object) -> bool:
    """Undoes enter_thread(); False if this thread has not entered the scope.

    The scope need not be the innermost: the scopes of two generators can end in any order.
    """
    scopes = _entered.__dict__.get("scopes", [])
    last = next((i for i in reversed(range(len(scopes))) if scopes[i][0] is scope), None)
    if last is None:
        return False
    before = scopes[-1][1]
    del scopes[last]
    _switch_thread(before, scopes[-1][1] if scopes else 0)
    return True


def _switch_thread(before: int, after: int) -> None:
    if before == after:
        return
    library.set_thread_policy(after)
    # For the threads that compute the gradients of a backward() called in this thread.
    if before:
        library.forget_thread_object(thread_objects.KEYS[before])
    if after:
        thread_objects.leave(thread_objects.KEYS[after])


def serves_this_thread() -> bool:
    """Whether drop_in() serves this thread's eager code by these kernels."""
    scopes = _entered.__dict__.get("scopes", [])
    return bool(scopes) and scopes[-1][1] != POLICIES["off"]


def policy_of_thread() -> str | None:
    """The policy of this thread's drop_in(); None outside."""
    scopes = _entered.__dict__.get("scopes", [])
    return _NAMES_OF_POLICIES[scopes[-1][1]] if scopes else None


def serves_sums() -> bool:
    """Whether addmm and the other sums can be served in this process."""
    return _extension() is not None


def is_ours(op: str, key: str = "CUDA") -> bool:
    """Whether the dispatch key calls our kernel for an operator: another library may have replaced
    it."""
    where = aten_kernels.registered_at(op, key)
    return "c_api_install.cpp:" in where or operators.is_by_registry(where)


__all__ = ["OPERATORS", "is_ours", "number_of", "register", "register_for", "serves_sums"]
