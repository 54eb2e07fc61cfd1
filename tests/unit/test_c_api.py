"""The C API: Python declares its functions as they are, and null is an error of the caller's, not
the end of the process."""

from __future__ import annotations

import ctypes
import json
import re
from pathlib import Path

import pytest

from torch_cubin._native import library
from torch_cubin._native.functions import FUNCTIONS

CSRC = Path(__file__).resolve().parents[2] / "csrc"

C_FUNCTION = re.compile(
    r"^TORCH_CUBIN_API (?:__attribute__\(\(hot\)\) )?(\w+\*?)\s+torch_cubin_(?!v1_)(\w+)\(\s*"
    r"((?:[^(){]|\([^()]*\))*)\)\s*\{",
    re.MULTILINE,
)
NUMBERS = {"int": 4, "int64_t": 8, "uint64_t": 8, "size_t": 8, "bool": 1}
# Called by the extension module alone (csrc/python_calls.h).
NOT_OF_PYTHON = {"read_tensor"}


def kind_of_c(declaration: str) -> str:
    """What ctypes must know of a C type: a pointer, or the bytes of a number."""
    if "*" in declaration:
        return "pointer"
    return str(NUMBERS.get(declaration.split()[0], declaration))


def kind_of_ctypes(of: type | None) -> str:
    if of is None:
        return "void"
    code = getattr(of, "_type_", None)
    return "pointer" if code in ("P", "z") or not isinstance(code, str) else str(ctypes.sizeof(of))


def test_functions_are_declared_as_they_are() -> None:
    found = {}
    for source in CSRC.glob("c_api*.cpp"):
        for result, name, arguments in C_FUNCTION.findall(source.read_text()):
            parts = re.split(r",(?![^(]*\))", arguments) if arguments.strip() else []
            if name not in NOT_OF_PYTHON:
                # Function pointers whose types have names (set_error_names) are pointers, too.
                kinds = [kind_of_c(re.sub(r"Find\w+", "*", part.strip())) for part in parts]
                found[name] = (kind_of_c(result), kinds)
    declared = {
        name: (kind_of_ctypes(result), [kind_of_ctypes(each) for each in arguments])
        for name, (result, arguments) in FUNCTIONS.items()
    }
    assert declared == found


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
    "capture_of": (0, None),
    "encode_tensor_map": (None, None),
    "define_ops": (None, None, None, None, 0),
    "check_schema": (None, False),
    "load_package": (None, None),
    "preload_op": (None, 0),
    "check_call": (None,),
    "check_described": (None, None),
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
