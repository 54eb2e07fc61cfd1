"""The examples, and the tutorial's steps, as a user runs them: each compares with PyTorch itself;
an example exits with 0 if right."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path

import c_layouts
import pytest
import serving_page
import torch
from programs import output_of

import torch_cubin

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

# What each must have said, apart from "right".
SAYS = {
    "vec_add": ["1000003 elements", "expected 4, got 3"],
    "vec_add_ptx": ["[image]", "100,003 floats"],
    "vec_add_op": ["torch.compile", "gradient", "another dtype", "another shape", "strides"],
    "rms_norm": ["torch.bfloat16 512x4096 grad_weight", "TB/s"],
    "struct_argument": ["launched directly", "as an op"],
    "tensor_map": ["launched directly", "as an op", "of a slice"],
    "cooperative": ["10000019 floats", "is cooperative and does not fit"],
    "cluster": ["40 rows of 250000", "torch.softmax"],
    "fmha_library": [
        "fmha::packed: 24 kernels",
        "fmha::packed_fp8: 6 kernels",
        "contiguous KV by TMA, float8_e4m3fn head_size 128 sliding",
        "paged KV, float16 head_size 128 sliding",
        "the nearest of 24 kernels, got ",
    ],
    "same_bits": ["log-probabilities differ by 0.0\n", "sha256 of the logits", "batch-invariant"],
    "embedded/run": ["built mine-1.0-py3-none-linux", "mine.vec_add on"],
}


@pytest.mark.parametrize("name", SAYS)
def test_example(name: str, monkeypatch, capfd) -> None:
    if torch.cuda.get_device_capability() < (9, 0) and name in ("tensor_map", "cluster"):
        pytest.skip("needs compute capability 9.0")
    path = EXAMPLES / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(path)])
    monkeypatch.setattr(sys, "path", [str(path.parent), *sys.path])
    if importlib.util.find_spec("clang") is None:
        monkeypatch.setattr(torch_cubin, "c_struct", lambda header, name: c_layouts.layout(
            str(Path(header).relative_to(c_layouts.ROOT)), name))  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    torch.cuda.synchronize()
    said = capfd.readouterr().out
    assert ended.value.code == 0, said
    assert "WRONG" not in said
    assert "right" in said
    for words in SAYS[name]:
        assert words in said, said


@pytest.mark.child("your_own_kernel")
def test_every_step_of_the_tutorial_runs(child) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the page compiles for compute capability 9.0")
    assert child.check()["python gpu"] == 4
    assert "expected float32" in child.output  # the refused call of step 3


def test_no_example_is_forgotten() -> None:
    """Those that train or need a model's files are run by hand; aoti_runner has its own test."""
    found = {path.stem for path in EXAMPLES.glob("*.py")} | {"embedded/run"}
    by_hand = {"generate", "sentence_encoder", "train_transformer", "support"}
    by_hand |= {"tensor_parallel"}  # by torchrun: tests/ops/test_sharding.py
    by_hand |= {"triton_kernels"}  # test_cuda_producers.py, in a process of its own
    assert found - by_hand == set(SAYS)


def test_program_of_the_page_of_entry_points() -> None:
    """In a process of its own: install() and transformers' registrations stay."""
    pytest.importorskip("transformers")
    program = [sys.executable, "-c", serving_page.program()]
    printed = output_of(program, cwd=EXAMPLES.parent)
    print(printed)
    of_install, of_drop_in = printed.split("served by cubin ops")[1:]
    assert "aten::_scaled_dot_product" in of_install
    for report in (of_install, of_drop_in):
        assert "aten::addmm" in report
        assert "aten::mm" in report
