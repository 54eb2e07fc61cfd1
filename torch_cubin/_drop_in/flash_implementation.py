# The implementation "cubin" in PyTorch's registry of flash attention: a switch. Our kernels stand
# behind PyTorch's operators since its first activation, and decide which calls they serve
# (csrc/ops/attention/api/aten_flash_attention.cpp).
"""``torch.nn.attention.activate_flash_attention_impl("cubin")``.

Everything that uses PyTorch's flash attention then runs from cubins, unchanged:
F.scaled_dot_product_attention if PyTorch chooses that backend, torch.nn.attention.varlen, nested
tensors, context parallel, and the graphs of torch.compile, forward and backward.
``restore_flash_attention_impl()`` restores PyTorch's kernels. Importing torch_cubin registers the
implementation but does not activate it.
"""

from __future__ import annotations

from torch_cubin import errors
from torch_cubin._drop_in import aten_kernels
from torch_cubin._native import library
from torch_cubin._pytorch.aten_kernels import has_cuda


class Implementation:
    """Active from its construction on; PyTorch's registry owns it and calls remove()."""

    def __init__(self, dispatch_key: str = "CUDA") -> None:
        aten_kernels.register_flash(dispatch_key)
        served = dispatch_key != "CUDA" or has_cuda()  # a CPU build has no such operators
        lacking = [op for op in aten_kernels.FLASH if not aten_kernels.is_ours(op, dispatch_key)]
        if served and lacking:
            raise errors.fault(
                "internal", "PyTorch", "lacks C functions that the flash attention 'cubin' needs",
                expected="aoti_torch_cuda__flash_attention_forward and its kin",
                got=f"kernels of ours behind all but {', '.join(lacking)}",
                advice="Use a version of torch that torch_cubin was tested with.",
            )  # fmt: skip
        library.load().torch_cubin_set_flash_implementation(True)

    def remove(self) -> None:
        """Returns the calls to PyTorch's kernels. Our registrations stay, and forward them."""
        library.load().torch_cubin_set_flash_implementation(False)
