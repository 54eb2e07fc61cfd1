"""The C API given null: an error of the caller's, not the end of the process."""

from __future__ import annotations

import ctypes
import json

import pytest

from torch_cubin._native import library

NULL = {
    "cubin_at": (None,),
    "hidden_advice": (None, 1),
    "module_open": (None, None, None, None, 1, None, 0),
    "module_kernel": (None, b"x", 1),
    "module_global": (None, 0, b"x", 1),
    "module_preload": (None, 0),
    "module_unload": (None, 0),
    "kernel_preload": (None, 0),
    "kernel_launch": (None, None),
    "encode_tensor_map": (None, None),
    "define_ops": (None, None, None, None, 0),
    "check_schema": (None, False),
    "load_package": (None, None),
    "preload_op": (None, 0),
    "check_call": (None,),
    "check_attention": (None,),
    "check_product": (None,),
    "add_tuned_table": (None,),
}


@pytest.mark.parametrize("name", NULL)
def test_null_is_refused(name: str) -> None:
    loaded = library.load()
    address = getattr(loaded, f"torch_cubin_{name}")(*NULL[name])
    answer = json.loads(ctypes.string_at(address))
    loaded.torch_cubin_free(address)
    assert answer["error"]["tag"] == "input"
    assert answer["error"]["message"].startswith("torch_cubin [input]: the C API was given a null ")


def test_null_can_be_dropped_and_is_not_a_tensor() -> None:
    loaded = library.load()
    loaded.torch_cubin_module_drop(None)
    loaded.torch_cubin_free(None)
    read = ctypes.CDLL(str(library.PATH)).torch_cubin_read_tensor
    device, address = ctypes.c_int32(), ctypes.c_uint64()
    assert read(None, ctypes.byref(device), ctypes.byref(address)) == 0


def test_null_bytes_of_a_file_are_refused() -> None:
    reader, text = library._reader(), ctypes.c_void_p()
    error = reader.torch_cubin_v1_inspect(None, 5, None, ctypes.byref(text))
    assert reader.torch_cubin_v1_error_part(error, 0) == b"input"
    assert b"given a null " in reader.torch_cubin_v1_error_part(error, 1)
    reader.torch_cubin_v1_error_free(error)
    assert text.value is None
    reader.torch_cubin_v1_text_free(text)
