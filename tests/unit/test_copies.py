"""Copies and pickles of modules, kernels and ops: shared, never freed twice."""

from __future__ import annotations

import copy
import gc
import pickle
from pathlib import Path

import declared
import pytest
import torch

import torch_cubin

CUBIN = Path(__file__).resolve().parents[1] / "data" / "vec_add.sm_90a.cuda124.cubin"


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_outlives_its_original(copied) -> None:
    """The kernel of a copy once used a handle that was freed with the original."""
    module = torch_cubin.load(CUBIN)
    copied_object = copied(module)
    kernel = copied(module["vec_add"])
    del module
    gc.collect()
    assert list(copied_object) == ["vec_add"]
    assert copied_object["vec_add"] is kernel
    assert kernel.module is copied_object
    copied_object.unload()
    with pytest.raises(torch_cubin.Error, match=r"\[closed\]"):
        copied_object["vec_add"]


def test_in_a_model() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))
            self.kernel = torch_cubin.load(CUBIN)["vec_add"]

    model = Model()
    copied_object = copy.deepcopy(model)
    assert copied_object.weight is not model.weight
    assert copied_object.kernel is model.kernel


def test_modules_of_paths_and_of_bytes_can_be_pickled(tmp_path: Path) -> None:
    for source in (CUBIN, str(CUBIN), CUBIN.read_bytes(), [CUBIN, CUBIN.read_bytes()]):
        module = torch_cubin.load(source)
        again = pickle.loads(pickle.dumps(module))
        assert again is not module
        assert list(again) == list(module)
        kernel = pickle.loads(pickle.dumps(module["vec_add"]))
        assert (kernel.name, kernel.info) == ("vec_add", module["vec_add"].info)
    module.unload()
    with pytest.raises(torch_cubin.Error, match=r"\[closed\]"):
        pickle.dumps(module)


def test_a_file_that_has_changed_since(tmp_path: Path) -> None:
    path = tmp_path / "kernels.cubin"
    path.write_bytes(CUBIN.read_bytes())
    pickled = pickle.dumps(torch_cubin.load(path))
    path.write_bytes(CUBIN.with_name("vec_add.sm_80.cuda118.cubin").read_bytes())
    with pytest.raises(torch_cubin.Error, match=r"\[hash\].*Pickle it again"):
        pickle.loads(pickled)


def test_ops_are_found_by_name() -> None:
    op = torch_cubin.define_op(
        declared.schema("copied(Tensor x) -> Tensor"),
        kernel=(declared.DECLARED, "affine"),
        tensors={"x": "float32[m]", "out": "float32[m]"},
        args=lambda x, out, m: (x, None, out, 2.0, 1, False, 0, m),
        grid=declared.blocks,
        block=256,
    )
    assert copy.copy(op) is copy.deepcopy(op) is op
    text = pickle.dumps(op)
    assert pickle.loads(text) is op
    unknown = text.replace(b"copied", b"copier")
    with pytest.raises(torch_cubin.Error, match=r"\[input\].*is not defined in this process"):
        pickle.loads(unknown)
