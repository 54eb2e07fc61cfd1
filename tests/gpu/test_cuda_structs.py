"""Structs by value in a direct launch and in an op, as the GPU reads them."""

from __future__ import annotations

import itertools

import c_layouts
import pytest
import torch

import torch_cubin
from torch_cubin import errors

HEADER = "tests/data/struct_params.h"
SOURCE = (
    (c_layouts.ROOT / HEADER).read_text().replace("#pragma once", "")
    + """
extern "C" __global__ void read(const __grid_constant__ Params p) {
  const float values[] = {float(p.base), float(p.tag), float(p.small), float(p.v[0]),
                          float(p.v[1]), float(p.n), float(p.mode), float(p.rest), p.f,
                          p.pairs[0].x[0] * p.pairs[0].scale, p.pairs[1].x[1] * p.pairs[1].scale};
  for (int i = 0; i < 11; ++i) p.out[i] = values[i];
}
"""
)
names = itertools.count()


@pytest.fixture(scope="module")
def module() -> torch_cubin.Module:
    major, minor = torch.cuda.get_device_capability()
    return torch_cubin.compile(SOURCE, archs=[f"sm_{major}{minor}"])


VALUES = {"base": -5, "tag": 3, "small": 4, "v": [11, 12], "mode": 5, "rest": 4097, "f": 0.25}
EXPECTED = [-5, 3, 4, 11, 12, 7, 5, 4097, 0.25]


def test_a_direct_launch(module: torch_cubin.Module) -> None:
    params = c_layouts.layout(HEADER, "Params")
    x, out = torch.tensor([2.0, 3.0], device="cuda"), torch.zeros(11, device="cuda")
    pairs = [{"x": x, "scale": 10}, {"x": x, "scale": -1}]
    module["read"](params(**VALUES, pairs=pairs, out=out), grid=1, block=1)
    assert out.tolist() == [*EXPECTED, 20, -3]
    small = torch_cubin.struct(params.fields["pairs"].kind, x=x)
    with pytest.raises(errors.ParamsError, match="expected 80 bytes"):
        module["read"](small, grid=1, block=1)
    with pytest.raises(errors.InputError, match="field 'out' of argument 0"):
        module["read"](params(out=torch.zeros(11)), grid=1, block=1)


def test_an_op(module: torch_cubin.Module) -> None:
    params = c_layouts.layout(HEADER, "Params")
    op = torch_cubin.define_op(
        f"cuda_structs::read{next(names)}(Tensor x, int scale) -> Tensor", kernel=module["read"],
        tensors={"x": "float32[2]", "out": "float32[11]"}, grid=1, block=1,
        args=lambda x, scale, out: params(
            **VALUES, pairs=[{"x": x, "scale": scale}, {"x": x, "scale": -scale}], out=out
        ),
    )  # fmt: skip
    assert op(torch.tensor([2.0, 3.0], device="cuda"), 10).tolist() == [*EXPECTED, 20, -30]
