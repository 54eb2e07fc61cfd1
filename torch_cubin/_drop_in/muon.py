# torch.optim.Muon multiplies the Gram matrix of each gradient, which is symmetric, with itself.
# Only Muon knows that it is symmetric, so its Newton-Schulz iteration runs as a copy whose addmm
# calls cubin::symm_square.
"""Muon's products of a symmetric matrix with itself, by cubin::symm_square."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_cubin._drop_in import aten_kernels, fast_path, report
from torch_cubin._drop_in.python_functions import names_in
from torch_cubin._pytorch import muon as pytorchs

# Rows of a Gram matrix. With fewer, the iteration is as fast by torch.addmm, which takes the
# product in full: in a CUDA graph of 256 to 1,024 rows 0.79 to 1.04 of the time (1,024 x 1,024
# 0.90), since its kernels change less often, and run eagerly 0.79 to 0.97, since it costs the host
# less (H200).
_LEAST = 1152

_sources: set[str] = set()  # of "install" and "drop_in", those that are on
# Whether any is: what torch.compile reads, and guards on. A graph that is traced meanwhile runs the
# op wherever it is called.
_serving = False


def set_serving(source: str, on: bool) -> None:
    """Called whenever install() or drop_in() begins or ends, anywhere in the process."""
    global _serving
    if on:
        _wrap()
        _sources.add(source)
    else:
        _sources.discard(source)
    _serving = bool(_sources)


@functools.cache
def _wrap() -> None:
    """Once: the wrapper stays, and calls PyTorch's function where nothing is served."""
    pytorchs.wrap_zeropower(_wrapped)


def _wrapped(function: Any) -> Callable[..., Tensor]:
    symmetric = _with_symmetric_addmm(function)

    @functools.wraps(function)
    def zeropower(grad: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if _serving and (torch.compiler.is_compiling() or _serves(grad)):
            return symmetric(grad, *args, **kwargs)
        return function(grad, *args, **kwargs)

    return zeropower


def _serves(grad: Tensor) -> bool:
    """Whether this thread's eager products are served, on a GPU that has kernels for these."""
    if not aten_kernels.below_autograd():  # a CPU build of PyTorch, served by the references
        return fast_path.mode_serves()
    here = "install" in _sources or aten_kernels.serves_this_thread()
    return here and grad.is_cuda and torch.cuda.get_device_capability(grad.device) == (9, 0)


def _addmm(
    input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """torch.addmm inside the iteration, where one tensor thrice is a Gram matrix."""
    if input is not mat1 or mat1 is not mat2 or mat1.shape[-1] < _LEAST:
        return torch.addmm(input, mat1, mat2, beta=beta, alpha=alpha)
    out = torch.ops.cubin.symm_square(mat1, input, beta=beta, alpha=alpha)
    if torch.compiler.is_compiling():
        report.count_traced_served("torch.addmm", out.dtype, out.device.type)
    else:
        report.count_served("torch.addmm", (input, mat1, mat2), out)
    return out


def _with_symmetric_addmm(function: Any) -> Any:
    """A copy of the function, with the same code, that calls our addmm for torch's."""
    scope = function.__globals__
    names = names_in(function.__code__)
    own = {name: scope[name] for name in names if name in scope}
    used = {name: getattr(torch, name) for name in names if hasattr(torch, name)}
    used = {name: staticmethod(value) if callable(value) else value for name, value in used.items()}
    own["torch"] = type("torch", (), used | {"addmm": staticmethod(_addmm)})
    own["__builtins__"] = scope["__builtins__"]
    return types.FunctionType(
        function.__code__, own, function.__name__, function.__defaults__, function.__closure__
    )
