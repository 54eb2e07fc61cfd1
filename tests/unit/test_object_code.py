"""cuda.core's compiled code is accepted unchanged: its code, and symbols by the requested names."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
import real_cubins

import torch_cubin
from torch_cubin import errors

PATH = real_cubins.DATA / "vec_add.sm_90a.cuda124.cubin"


@dataclasses.dataclass
class ObjectCode:
    """As cuda.core's: `code` is bytes, or the path of a file."""

    code: Any
    symbol_mapping: dict[Any, Any]


@pytest.mark.parametrize("code", [PATH.read_bytes(), str(PATH)], ids=["bytes", "path"])
def test_kernels_are_known_by_the_names_asked_for(code: Any) -> None:
    module = torch_cubin.load(ObjectCode(code, {"add< float , 4 >": b"vec_add"}))
    assert module["add<float,4>"].name == "vec_add"
    assert "vec_add" in module
    assert pickle.loads(pickle.dumps(module))["add<float, 4>"].name == "vec_add"
    both = torch_cubin.load([ObjectCode(code, {"a": "vec_add"}), real_cubins.DATA / PATH.name])
    assert both["a"].name == "vec_add"


def test_an_op_of_object_code() -> None:
    module = torch_cubin.load(ObjectCode(PATH.read_bytes(), {"add<float>": b"vec_add"}))
    op = torch_cubin.define_op(
        "object_code::vec_add(Tensor x, Tensor y) -> Tensor",
        kernel=module["add<float>"],
        tensors={"x": "float32[n]", "y": "float32[n]", "out": "float32[n]"},
        args=lambda x, y, out, n: (x, y, out, n),
        grid=lambda n: torch_cubin.cdiv(n, 256),
        block=256,
    )
    assert op.contract["kernels"][0]["kernel"] == "vec_add"


def test_other_objects_are_refused() -> None:
    class Other:
        code = 5
        symbol_mapping = None

    with pytest.raises(errors.InputError, match="has a wrong type: expected str, os.PathLike"):
        torch_cubin.load(Other())
    with pytest.raises(errors.NoKernelError):
        torch_cubin.load(ObjectCode(PATH.read_bytes(), {"a": "missing"}))["a"]


def test_load_takes_object_code_of_cuda_core(tmp_path: Path) -> None:
    core = pytest.importorskip("cuda.core", reason="cuda.core is not installed")
    source = "template <class T> __global__ void scale(T* x, T a) { x[threadIdx.x] *= a; }"
    options = core.ProgramOptions(arch="sm_90a")
    try:
        program = core.Program(source, code_type="c++", options=options)
        code = program.compile("cubin", name_expressions=("scale<float>",))
    except Exception as error:
        pytest.skip(f"cuda.core compiles nothing here ({str(error)[:200]})")
    module = torch_cubin.load(code)
    assert [param.size for param in module["scale<float>"].info.params] == [8, 4]
