"""The C functions of csrc/c_api*.cpp that library.py calls: what they return and take.

tests/unit/test_c_api.py compares the table with the sources.
"""

from __future__ import annotations

import ctypes
from typing import Any

HANDLE = ADDRESS = ctypes.c_void_p
TEXT, SIZE, INT = ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int
ADDRESSES, TEXTS, SIZES = (ctypes.POINTER(each) for each in (ADDRESS, TEXT, SIZE))
# JSON that the library must free, hence returned as a plain address: library._answer() reads it.
JSON = ctypes.c_void_p

# The result and the arguments of each; their names begin with "torch_cubin_".
FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "catalog": (JSON, []),
    "catalog_cubin": (JSON, [TEXT, TEXT, ADDRESSES, SIZES]),
    "device": (JSON, [INT]),
    "free": (None, [ADDRESS]),
    "launches": (ctypes.c_int64, []),
    "op_calls": (JSON, [INT]),
    "keep_error": (None, [TEXT]),
    "batch_invariant": (INT, []),
    "set_batch_invariant": (INT, [INT]),
    "set_process_batch_invariant": (None, [INT]),
    "set_process_keeps_k_whole": (None, [INT]),
    "serves_invariant": (INT, []),
    "calls_served": (ctypes.c_int64, []),
    "set_error_names": (None, [ADDRESS, ADDRESS]),
    "pytorch_symbols": (JSON, []),
    "capture_of": (JSON, [INT, ADDRESS]),
    "attention_schemas": (JSON, []),
    "check_described": (JSON, [TEXT, TEXT]),
    "check_call": (JSON, [TEXT]),
    "cubin_at": (JSON, [TEXT]),
    "module_open": (JSON, [TEXTS, SIZES, TEXTS, TEXTS, SIZE, TEXT, INT]),
    "module_kernel": (JSON, [HANDLE, TEXT, SIZE]),
    "hidden_advice": (JSON, [HANDLE, SIZE]),
    "symbols_called": (JSON, [TEXT]),
    "module_global": (JSON, [HANDLE, INT, TEXT, SIZE]),
    "module_preload": (JSON, [HANDLE, INT]),
    "module_unload": (JSON, [HANDLE, INT]),
    "module_drop": (None, [HANDLE]),
    "kernel_preload": (JSON, [HANDLE, INT]),
    "kernel_launch": (JSON, [HANDLE, ADDRESS]),
    "encode_tensor_map": (JSON, [TEXT, TEXT]),
    "pointer_device": (JSON, [ctypes.c_uint64]),
    "define_ops": (JSON, [TEXT, TEXTS, SIZES, TEXTS, SIZE]),
    "check_schema": (JSON, [TEXT, ctypes.c_bool]),
    "load_package": (JSON, [TEXT]),
    "load_signed_package": (JSON, [TEXT, TEXT]),
    "ops": (JSON, []),
    "packages_error": (JSON, []),
    "preload_op": (JSON, [TEXT, INT]),
    "watch_plans": (JSON, [INT]),
    "watched_plans": (JSON, []),
    "planned": (JSON, [INT, TEXT, INT]),
    "force_config": (JSON, [TEXT]),
    "add_tuned_table": (JSON, [TEXT]),
    "watch_op": (JSON, [TEXT]),
    "watched_calls": (JSON, []),
    "force_kernel": (JSON, [INT]),
    "tuned_file": (JSON, [TEXT, INT]),
    "stand_over_aten": (JSON, [TEXT]),
    "stand_over_norms": (JSON, [TEXT]),
    "stand_over_flash": (JSON, [TEXT, INT, INT]),
    "stand_over_sums": (JSON, [TEXT]),
    "set_flash_implementation": (None, [INT]),
    "set_process_policy": (JSON, [INT]),
    "set_thread_policy": (INT, [INT]),
    "forget_thread_object": (None, [TEXT]),
    "thread_object_policy": (INT, []),
    "set_known_speed": (JSON, [TEXT]),
    "set_calibrate": (None, [ADDRESS]),
    "set_calibrated_speed": (JSON, [INT, TEXT]),
    "set_measuring": (None, [INT]),
    "declined_calls": (JSON, [INT]),
    "aten_sum": (INT, [INT, INT, ADDRESS, ADDRESS, ADDRESS, ADDRESS]),
    "release_tensor": (None, [ADDRESS]),
}
