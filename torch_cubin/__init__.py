"""torch_cubin: PyTorch operators served by kernels from CUBIN files.

Importing registers ``torch.ops.cubin.matmul``, ``linear``, ``scaled_dot_product_attention`` and its
kin (docs/attention.md); it never touches the CUDA driver. What else is public is in ``__all__``.
"""

from importlib import import_module as _import_module

from torch_cubin._native import process as _process

_process.require_main_interpreter()  # before anything imports torch

from torch_cubin._native import library as _library  # noqa: E402

_library.load()  # first: the other modules refer to the ops that the library defines

from torch_cubin import huggingface  # noqa: E402
from torch_cubin._drop_in import flash_implementation as _flash_implementation  # noqa: E402
from torch_cubin._drop_in.report import Report  # noqa: E402
from torch_cubin._ops import register as _register  # noqa: E402
from torch_cubin._ops.batch_invariant import batch_invariant  # noqa: E402
from torch_cubin.drop_in import drop_in, report  # noqa: E402
from torch_cubin.errors import Error  # noqa: E402

# What serves kernels of one's own is imported at its first use: it would double the import's time.
_LATER = {
    "cpp": ("include_path", "library_path"),
    "_kernels.arguments": ("strided",),
    "_ops.checkpointing": ("checkpoint_ops",),
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


def __getattr__(name: str) -> object:
    if name in ("cpp", "embed"):
        return _import_module(f"torch_cubin.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'torch_cubin' has no attribute '{name}'")
    value = getattr(_import_module(f"torch_cubin.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_register.register()
_flash_implementation.register()
try:
    _library.packages_error()  # of TORCH_CUBIN_PACKAGES, which the library has loaded with itself
except Error:
    if not _process.is_command_line():
        raise
if _library.defined_ops():
    _import_module("torch_cubin._declared.op").adopt_all()

__version__ = "0.1.0"
__all__ = [
    "Error",
    "Kernel",
    "KernelChoice",
    "Module",
    "Op",
    "Report",
    "TensorMap",
    "Tuning",
    "__version__",
    "batch_invariant",
    "bfloat16",
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
    "float16",
    "float32",
    "float64",
    "huggingface",
    "include_path",
    "inspect",
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
    "next_power_of_2",
    "preload",
    "report",
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
