"""torch_cubin: PyTorch operators served by kernels from CUBIN files.

Importing registers ``torch.ops.cubin.matmul``, ``linear``, ``scaled_dot_product_attention`` and its
kin (README, "Attention"); it never touches the CUDA driver. What else is public is in ``__all__``.
"""

from torch_cubin import _lib

_lib.load()  # first: the other modules refer to the ops that the library defines

from torch_cubin import _package, _register, huggingface  # noqa: E402
from torch_cubin._arguments import strided  # noqa: E402
from torch_cubin._declared import Op  # noqa: E402
from torch_cubin._define import KernelChoice, define_op  # noqa: E402
from torch_cubin._expressions import (  # noqa: E402
    cdiv,
    length,
    maximum,
    minimum,
    select,
    sqrt,
)
from torch_cubin._kernel_arguments import struct  # noqa: E402
from torch_cubin._module import Kernel, Module, load, preload  # noqa: E402
from torch_cubin._package import load_package, save_package  # noqa: E402
from torch_cubin._patterns import empty, like  # noqa: E402
from torch_cubin._report import Report  # noqa: E402
from torch_cubin._scalars import (  # noqa: E402
    bfloat16,
    float16,
    float32,
    float64,
    int8,
    int16,
    int32,
    int64,
    uint8,
    uint16,
    uint32,
    uint64,
)
from torch_cubin._tensor_map import TensorMap  # noqa: E402
from torch_cubin.drop_in import drop_in, report  # noqa: E402
from torch_cubin.errors import Error  # noqa: E402
from torch_cubin.inspect import inspect  # noqa: E402

_register.register()
_package.adopt_environment()

__version__ = "0.1.0"
__all__ = [
    "Error",
    "Kernel",
    "KernelChoice",
    "Module",
    "Op",
    "Report",
    "TensorMap",
    "__version__",
    "bfloat16",
    "cdiv",
    "define_op",
    "drop_in",
    "empty",
    "float16",
    "float32",
    "float64",
    "huggingface",
    "inspect",
    "int8",
    "int16",
    "int32",
    "int64",
    "length",
    "like",
    "load",
    "load_package",
    "maximum",
    "minimum",
    "preload",
    "report",
    "save_package",
    "select",
    "sqrt",
    "strided",
    "struct",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
]
