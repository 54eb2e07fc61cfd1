"""torch_cubin: PyTorch operators served by kernels from CUBIN files.

Importing registers ``torch.ops.cubin.matmul``, ``linear``, ``scaled_dot_product_attention`` and its
kin (README, "Attention"); it never touches the CUDA driver. What else is public is in ``__all__``.
"""

from torch_cubin import _lib

_lib.load()  # first: the other modules refer to the ops that the library defines

from torch_cubin import _register, huggingface  # noqa: E402
from torch_cubin._report import Report  # noqa: E402
from torch_cubin.drop_in import drop_in, report  # noqa: E402
from torch_cubin.errors import Error  # noqa: E402
from torch_cubin.inspect import inspect  # noqa: E402

_register.register()

__version__ = "0.1.0"
__all__ = ["Error", "Report", "__version__", "drop_in", "huggingface", "inspect", "report"]
