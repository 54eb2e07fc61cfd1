"""Objects that PyTorch passes from a thread to the threads that compute its gradients."""

from __future__ import annotations

import ctypes

from torch_cubin._pytorch.internals import Feature

THREAD_OBJECTS = Feature(
    "drop_in() around backward() on a GPU", "PyTorch's kernels compute the gradients there"
)
_stash = THREAD_OBJECTS.find("_C._stash_obj_in_tls", lambda key, value: None)

# By the number of the policy (csrc/ops/common/serving.h); csrc/ops/common/serving.cpp reads them.
KEYS = {1: "torch_cubin.drop_in.fastest", 2: "torch_cubin.drop_in.all"}
BATCH_INVARIANT = "torch_cubin.batch_invariant"  # csrc/ops/common/batch_invariant.cpp reads it


def leave(key: str) -> None:
    """Stores an object in this thread, until library.forget_thread_object()."""
    # PyTorch takes ownership of a reference without incrementing the count, and releases it with
    # the object.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(key))
    _stash(key, key)


__all__ = ["BATCH_INVARIANT", "KEYS", "leave"]
