"""``torch_cubin.aot_options()``: for graphs that are compiled to C++."""

from __future__ import annotations

from typing import Any

from torch_cubin._inductor import lowerings
from torch_cubin._native import library
from torch_cubin._pytorch import inductor


def aot_options() -> dict[str, Any]:
    """Options for Inductor with which compiled C++ calls our ops through their C functions.

    Without them it calls the ops through PyTorch's dispatcher, with the same results::

        torch._inductor.aoti_compile_and_package(exported, inductor_configs=aot_options())
        torch.compile(model, options={"cpp_wrapper": True, **aot_options()})

    The compiled file needs ``_C.so`` of this package: a C++ program links it
    (:func:`torch_cubin.library_path`), Python imports torch_cubin first. Inductor does not cache
    graphs that are compiled with these options.
    """
    library.make_global()
    return {inductor.SHIMS_OPTION: {**inductor.declared_shims(), **lowerings.declarations()}}


__all__ = ["aot_options"]
