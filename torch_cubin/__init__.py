"""torch_cubin: PyTorch operators served by kernels from CUBIN files.

Importing registers ``torch.ops.cubin.matmul``, ``linear``, ``scaled_dot_product_attention`` and the
other ops (docs/attention.md); it never touches the CUDA driver. ``__all__`` lists the public names.
"""

import typing as _typing
from importlib import import_module as _import_module

from torch_cubin._native import process as _process

_process.require_main_interpreter()  # before anything imports torch

# Without PyTorch, only inspect() and the helpers for building C++ programs are available.
if not _process.without_torch():
    with _process.without_collecting():
        from torch_cubin._native import library as _library

        _library.load()  # first: the other modules use the ops that the library defines

        from torch_cubin._drop_in import at_import as _drop_in_at_import
        from torch_cubin._inductor import register as _inductor
        from torch_cubin._ops import register as _register
        from torch_cubin._pytorch import imports as _imports

from torch_cubin.errors import Error  # noqa: E402

# Whatever registers nothing is imported at first use: it would triple the import time.
_LATER = {
    "cpp": ("include_path", "library_path"),
    "_drop_in.install": ("Installation", "install"),
    "_drop_in.report": ("Report", "report"),
    "_drop_in.scope": ("drop_in",),
    "_kernels.arguments": ("bits", "strided"),
    "_ops.batch_invariant": ("batch_invariant",),
    "_ops.checkpointing": ("checkpoint_ops",),
    "_ops.experts": ("moe",),
    "_ops.float8": ("Float8Linear", "float8"),
    "_ops.float8_attention": ("float8_attention",),
    "_ops.kept_weights": ("keep_float8_weights",),
    "_ops.newton_schulz": ("newton_schulz",),
    "_ops.row_parallel": ("row_parallel_linear",),
    "_ops.weight_gradient": ("accumulate_weight_gradient",),
    "_compile.compile": ("compile",),
    "_declared.c_struct": ("c_struct",),
    "_declared.choices": ("choices",),
    "_declared.op": ("Op",),
    "_declared.define_op": ("KernelChoice", "define_op"),
    "_declared.expressions": (
        "cdiv",
        "length",
        "maximum",
        "minimum",
        "next_power_of_2",
        "select",
        "sqrt",
    ),
    "_drop_in.audit": ("Audit", "audit"),
    "_inductor.options": ("aot_options",),
    "_inspection.inspect": ("inspect",),
    "_declared.kernel_arguments": ("struct",),
    "_kernels.module": ("Kernel", "Module", "load", "preload"),
    "_declared.package": ("load_package", "save_package"),
    "_declared.patterns": ("empty", "like"),
    "_kernels.scalars": (
        *("bfloat16", "float16", "float32", "float64"),
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    ),
    "_kernels.tensor_map": ("TensorMap",),
    "_tuning.tune": ("Tuning", "load_tuned", "tune"),
}
_MODULE_OF = {name: module for module, names in _LATER.items() for name in names}

# For type checkers and editors, which do not run __getattr__; a test compares it with _LATER.
if _typing.TYPE_CHECKING:
    from torch_cubin import cpp as cpp
    from torch_cubin import embed as embed
    from torch_cubin import huggingface as huggingface
    from torch_cubin import ops as ops
    from torch_cubin._compile.compile import compile as compile
    from torch_cubin._declared.c_struct import c_struct as c_struct
    from torch_cubin._declared.choices import choices as choices
    from torch_cubin._declared.define_op import KernelChoice as KernelChoice
    from torch_cubin._declared.define_op import define_op as define_op
    from torch_cubin._declared.expressions import cdiv as cdiv
    from torch_cubin._declared.expressions import length as length
    from torch_cubin._declared.expressions import maximum as maximum
    from torch_cubin._declared.expressions import minimum as minimum
    from torch_cubin._declared.expressions import next_power_of_2 as next_power_of_2
    from torch_cubin._declared.expressions import select as select
    from torch_cubin._declared.expressions import sqrt as sqrt
    from torch_cubin._declared.kernel_arguments import struct as struct
    from torch_cubin._declared.op import Op as Op
    from torch_cubin._declared.package import load_package as load_package
    from torch_cubin._declared.package import save_package as save_package
    from torch_cubin._declared.patterns import empty as empty
    from torch_cubin._declared.patterns import like as like
    from torch_cubin._drop_in.audit import Audit as Audit
    from torch_cubin._drop_in.audit import audit as audit
    from torch_cubin._drop_in.install import Installation as Installation
    from torch_cubin._drop_in.install import install as install
    from torch_cubin._drop_in.report import Report as Report
    from torch_cubin._drop_in.report import report as report
    from torch_cubin._drop_in.scope import drop_in as drop_in
    from torch_cubin._inductor.options import aot_options as aot_options
    from torch_cubin._inspection.inspect import inspect as inspect
    from torch_cubin._kernels.arguments import bits as bits
    from torch_cubin._kernels.arguments import strided as strided
    from torch_cubin._kernels.module import Kernel as Kernel
    from torch_cubin._kernels.module import Module as Module
    from torch_cubin._kernels.module import load as load
    from torch_cubin._kernels.module import preload as preload
    from torch_cubin._kernels.scalars import bfloat16 as bfloat16
    from torch_cubin._kernels.scalars import float16 as float16
    from torch_cubin._kernels.scalars import float32 as float32
    from torch_cubin._kernels.scalars import float64 as float64
    from torch_cubin._kernels.scalars import int8 as int8
    from torch_cubin._kernels.scalars import int16 as int16
    from torch_cubin._kernels.scalars import int32 as int32
    from torch_cubin._kernels.scalars import int64 as int64
    from torch_cubin._kernels.scalars import uint8 as uint8
    from torch_cubin._kernels.scalars import uint16 as uint16
    from torch_cubin._kernels.scalars import uint32 as uint32
    from torch_cubin._kernels.scalars import uint64 as uint64
    from torch_cubin._kernels.tensor_map import TensorMap as TensorMap
    from torch_cubin._ops.batch_invariant import batch_invariant as batch_invariant
    from torch_cubin._ops.checkpointing import checkpoint_ops as checkpoint_ops
    from torch_cubin._ops.experts import moe as moe
    from torch_cubin._ops.float8 import Float8Linear as Float8Linear
    from torch_cubin._ops.float8 import float8 as float8
    from torch_cubin._ops.float8_attention import float8_attention as float8_attention
    from torch_cubin._ops.kept_weights import keep_float8_weights as keep_float8_weights
    from torch_cubin._ops.newton_schulz import newton_schulz as newton_schulz
    from torch_cubin._ops.row_parallel import row_parallel_linear as row_parallel_linear
    from torch_cubin._ops.weight_gradient import (
        accumulate_weight_gradient as accumulate_weight_gradient,
    )
    from torch_cubin._tuning.tune import Tuning as Tuning
    from torch_cubin._tuning.tune import load_tuned as load_tuned
    from torch_cubin._tuning.tune import tune as tune
    from torch_cubin.cpp import include_path as include_path
    from torch_cubin.cpp import library_path as library_path
else:

    def __getattr__(name: str) -> object:
        try:
            if name in ("cpp", "embed", "huggingface", "ops"):
                return _import_module(f"torch_cubin.{name}")
            if name in _MODULE_OF:
                value = getattr(_import_module(f"torch_cubin.{_MODULE_OF[name]}"), name)
                globals()[name] = value
                return value
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
        if name in __all__ and _process.without_torch():
            raise ImportError(
                f"torch_cubin [file]: torch_cubin.{name} needs PyTorch: expected the package "
                "torch. Install it (torch 2.11 or newer)."
            )
        raise AttributeError(f"module 'torch_cubin' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if not _process.without_torch():
    with _process.without_collecting():
        _register.register()
        _inductor.register()
        _drop_in_at_import.register()
    try:
        _library.packages_error()  # of TORCH_CUBIN_PACKAGES, which the library has loaded
    except Error:
        if not _process.is_command_line():
            raise
    if _library.defined_ops():
        _import_module("torch_cubin._declared.op").adopt_all()
    _drop_in_at_import.install_by_environment()
    _imports.forks_wait_for(f"{__name__}.")  # of later imports

__version__ = "0.1.0"
__all__ = [
    "Audit",
    "Error",
    "Float8Linear",
    "Installation",
    "Kernel",
    "KernelChoice",
    "Module",
    "Op",
    "Report",
    "TensorMap",
    "Tuning",
    "__version__",
    "accumulate_weight_gradient",
    "aot_options",
    "audit",
    "batch_invariant",
    "bfloat16",
    "bits",
    "c_struct",
    "cdiv",
    "checkpoint_ops",
    "choices",
    "compile",
    "cpp",
    "define_op",
    "drop_in",
    "embed",
    "empty",
    "float8",
    "float8_attention",
    "float16",
    "float32",
    "float64",
    "huggingface",
    "include_path",
    "inspect",
    "install",
    "int8",
    "int16",
    "int32",
    "int64",
    "length",
    "library_path",
    "like",
    "load",
    "load_package",
    "load_tuned",
    "maximum",
    "minimum",
    "moe",
    "newton_schulz",
    "next_power_of_2",
    "ops",
    "preload",
    "report",
    "row_parallel_linear",
    "save_package",
    "select",
    "sqrt",
    "strided",
    "struct",
    "tune",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
]
