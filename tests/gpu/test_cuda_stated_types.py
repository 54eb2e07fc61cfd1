"""Types, names and clusters that a file states, on a GPU: PTX, which needs no compiler here."""

from __future__ import annotations

import pytest
import torch

import torch_cubin
from torch_cubin import errors

# _Z5scaleIfEvPT_S0_i: void scale<float>(float*, float, int), x[0] *= by; then adds ns::cfg.
SCALE = """
.version 8.0
.target sm_80
.address_size 64
.visible .global .align 4 .f32 _ZN2ns3cfgE = 0f40000000;
.visible .entry _Z5scaleIfEvPT_S0_i(.param .u64 x, .param .f32 by, .param .u32 n)
{
  .reg .b64 %rd<3>;
  .reg .f32 %f<6>;
  ld.param.u64 %rd1, [x];
  ld.param.f32 %f1, [by];
  cvta.to.global.u64 %rd2, %rd1;
  ld.global.f32 %f2, [%rd2];
  ld.global.f32 %f3, [_ZN2ns3cfgE];
  fma.rn.f32 %f4, %f1, %f2, %f3;
  st.global.f32 [%rd2], %f4;
  ret;
}
"""
COUNT = """
.version 9.0
.target sm_90
.address_size 64
.visible .entry count(.param .u64 p) .blocksareclusters .reqntid 32, 1, 1
.reqnctapercluster 2, 1, 1
{
  .reg .pred %p;
  .reg .b32 %r<3>;
  .reg .b64 %rd<3>;
  mov.u32 %r1, %tid.x;
  setp.ne.u32 %p, %r1, 0;
  @%p ret;
  ld.param.u64 %rd1, [p];
  cvta.to.global.u64 %rd2, %rd1;
  mov.u32 %r2, 1;
  red.global.add.u32 [%rd2], %r2;
  ret;
}
"""


@pytest.fixture(scope="module")
def scale() -> torch_cubin.Module:
    return torch_cubin.load(SCALE.encode(), jit=True)


def test_an_int_becomes_the_float_that_is_stated(scale) -> None:
    x = torch.tensor([3.0], device="cuda")
    scale["scale<float>"](x, 2, 1, grid=1, block=1)
    assert x.item() == 3 * 2 + 2
    assert scale.global_tensor("ns::cfg", torch.float32).item() == 2
    for wrong in ((x.half(), 2, 1), (x, torch_cubin.int32(2), 1), (x, 2, 1.0)):
        with pytest.raises(errors.ParamsError):
            scale["scale"](*wrong, grid=1, block=1)
    assert x.item() == 8


def test_a_declared_op_converts_and_compares(scale) -> None:
    op = torch_cubin.define_op(
        "stated_types::scale(Tensor(a!) x) -> ()", kernel=scale["scale"],
        tensors={"x": "float32[n]"}, args=lambda x: (x, x.shape[0], 1), grid=1, block=1,
    )  # fmt: skip
    x = torch.tensor([3.0, 0, 0, 0], device="cuda")
    op(x)
    assert x[0].item() == 3 * 4 + 2


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="clusters need compute capability 9.0",
)
def test_a_grid_that_counts_clusters() -> None:
    count = torch_cubin.load(COUNT.encode(), jit=True)["count"]
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    for _ in range(2):  # the second takes the short path
        count(out, grid=3)
    assert out.item() == 2 * 3 * 2
