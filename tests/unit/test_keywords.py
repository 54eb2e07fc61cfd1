"""Unknown keywords of public functions, and whose line a warning names."""

from __future__ import annotations

import ctypes
import importlib
import inspect
import pickle

import pytest
import torch
from declared import VEC_ADD, schema

import torch_cubin
from torch_cubin import cpp, errors

# By function: positional arguments, a wrong keyword, and the nearest one.
WRONG = {
    "define_op": (["ns::f() -> ()"], "kernal", "'kernel', 'kernels'"),
    "compile": (["source"], "arch", "'archs'"),
    "load_package": (["folder"], "trust", "'trusted'"),
    "save_package": (["folder", []], "overwrites", "'overwrite'"),
    "tune": ([[]], "input", "'inputs'"),
    "load_tuned": ([], "paths", "'path'"),
    "load": (["file"], "jits", "'jit'"),
    "inspect": (["file"], "json", "'source'"),
    "preload": ([], "devices", "'device'"),
    "c_struct": (["text", "name"], "prefixes", "'prefix'"),
    "choices": (["*.cubin"], "tables", "'table'"),
    "choices ": (["*.cubin"], "blocks", "'block'"),
    "KernelChoice": (["kernel"], "grids", "'grid'"),
    "TensorMap": ([torch.zeros(4, 4), [4, 4]], "swizzles", "'swizzle'"),
    "empty": ([], "dtypes", "'dtype'"),
    "like": ([], "tensors", "'tensor'"),
    "report": ([], "resets", "'reset'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_error_for_an_unknown_keyword_names_the_nearest(name: str, monkeypatch) -> None:
    from torch_cubin._kernels import tensor_map

    monkeypatch.setattr(tensor_map, "DEVICE_TYPES", ("cpu",))
    args, keyword, near = WRONG[name]
    function = getattr(torch_cubin, name.strip())
    with pytest.raises(errors.InputError) as caught:
        function(*args, **{keyword: 3})
    text = str(caught.value)
    assert text.startswith(f"torch_cubin [input]: torch_cubin.{name.strip()} has an unknown arg")
    assert f"got '{keyword}'" in text
    assert near in text
    assert isinstance(caught.value, TypeError)


PRODUCERS = {
    "triton.define_op": ((["ns::f() -> ()"], "signatures", "'signature'")),
    "triton.write": ((["folder", []], "overwrites", "'overwrite'")),
    "triton.read": (([], "paths", "'path'")),
    "triton.descriptor": ((["x"], "pad", "'padding' (nearest of 2)")),
    "tile.define_op": ((["ns::f() -> ()", "file"], "signature", "'signatures'")),
    "tile.compile": (([None, None], "arch", "'archs'")),
    "tile.parse": (([], "symbols", "'symbol'")),
}


@pytest.mark.parametrize("name", PRODUCERS)
def test_wrong_keywords_of_producers(name: str) -> None:
    args, keyword, near = PRODUCERS[name]
    module, function = name.split(".")
    found = importlib.import_module(f"torch_cubin.producers.{module}")
    with pytest.raises(errors.InputError) as caught:
        getattr(found, function)(*args, **{keyword: 3})
    text = str(caught.value)
    start = f"torch_cubin [input]: torch_cubin.producers.{name} has an unknown argument"
    assert text.startswith(start), text
    assert near in text
    assert f"got '{keyword}'" in text


def test_wrong_keywords_of_load_inline() -> None:
    with pytest.raises(errors.InputError, match=r"'embed'.*got 'embeds'"):
        cpp.load_inline("name", "", embeds=3)


def test_signatures_and_pickles_are_those_of_the_functions() -> None:
    for function in (torch_cubin.define_op, torch_cubin.compile, torch_cubin.load):
        assert inspect.getfullargspec(inspect.unwrap(function)).varkw is None
        assert str(inspect.signature(function)).startswith("(s")
        assert pickle.loads(pickle.dumps(function)) is function


def test_a_field_of_a_struct_may_be_called_type() -> None:
    class Pair(ctypes.Structure):
        _fields_ = [("type", ctypes.c_int), ("self", ctypes.c_int)]

    assert len(torch_cubin.struct(Pair, type=1, self=2).members) == 2


def test_warnings_name_the_user_s_line() -> None:
    text = schema("named(Tensor x, Tensor y) -> Tensor")
    torch_cubin.define_op(text, **VEC_ADD)
    with pytest.warns(UserWarning, match="is defined again") as caught:
        torch_cubin.define_op(text, **{**VEC_ADD, "block": 64})
    assert [warning.filename for warning in caught] == [__file__]
