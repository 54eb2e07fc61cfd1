"""The examples where there is no GPU: they define their ops, say so, and end well."""

from __future__ import annotations

import runpy
import sys

import pytest
import real_cubins
import torch

EXAMPLES = real_cubins.ROOT / "examples"
NAMES = (
    *("vec_add", "vec_add_ptx", "vec_add_op", "rms_norm", "struct_argument", "tensor_map"),
    *("cooperative", "cluster", "aoti_runner/run"),
)

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a GPU is here: tests/gpu/test_cuda_examples.py runs them"
)


@pytest.mark.parametrize("name", NAMES)
def test_example_without_a_gpu(name: str, monkeypatch, capsys) -> None:
    path = EXAMPLES / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(path)])
    monkeypatch.setattr(sys, "path", [str(path.parent), *sys.path])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    said = capsys.readouterr().out
    assert ended.value.code == 0, said
    assert said.endswith("No GPU here: nothing was launched.\n")
