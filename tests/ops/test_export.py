"""torch.export: the graph keeps the public ops, for one size and for a range of them."""

from __future__ import annotations

import io

import pytest
import torch
from ops.samples import assert_near, linear, make, matmul, ops_of, reference_linear

import torch_cubin

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Model(torch.nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(make((4, 3), device))
        self.bias = torch.nn.Parameter(make((4,), device))

    def forward(self, x):
        return matmul(linear(x, self.weight, self.bias).relu(), self.weight)

    def expected(self, x):
        return torch.matmul(reference_linear(x, self.weight, self.bias).relu(), self.weight)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_export_keeps_the_public_ops(strict, grad, device):
    model = Model(device)
    x = make((5, 3), device)
    rows = torch.export.Dim("rows", min=2, max=64)
    with torch.set_grad_enabled(grad):
        program = torch.export.export(model, (x,), dynamic_shapes=({0: rows},), strict=strict)
    assert ops_of(program) == ["cubin.linear.default", "cubin.matmul.default"]
    for rows in (2, 5, 33):
        x = make((rows, 3), device)
        assert_near(program.module()(x).detach(), model.expected(x).detach())


def test_exported_program_through_a_file(device):
    model = Model(device)
    x = make((5, 3), device)
    program = torch.export.export(model, (x,))
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    again = torch.export.load(buffer)
    assert ops_of(again) == ops_of(program)
    assert_near(again.module()(x).detach(), model.expected(x).detach())


def test_decompositions_of_an_exported_program(device):
    model = Model(device)
    x = make((5, 3), device)
    program = torch.export.export(model, (x,)).run_decompositions()
    assert len(ops_of(program)) == 2
    assert_near(program.module()(x).detach(), model.expected(x).detach())


def test_make_fx_at_each_level(device):
    from torch.fx.experimental.proxy_tensor import make_fx

    a, b = make((5, 3), device), make((3, 4), device)
    for options in ({}, {"tracing_mode": "symbolic"}, {"pre_dispatch": True}):
        graph = make_fx(lambda a, b: matmul(a, b), **options)(a, b)
        assert len(ops_of(graph)) == 1
        assert_near(graph(a, b), torch.matmul(a, b))


class Experts(torch.nn.Module):
    """A product of 8-bit floats, one of their groups, and layers of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.weight_scale = torch.ops.cubin.quantize(torch.randn(24, 16), 5)
        self.group, self.group_scale = self.quantized(torch.randn(2, 16, 24))
        self.w13, self.w2 = torch.randn(2, 16, 16), torch.randn(2, 16, 8)
        self.w13_8, self.w13_scale = self.quantized(self.w13)
        self.w2_8, self.w2_scale = self.quantized(self.w2)

    @staticmethod
    def quantized(weights):
        parts = [torch.ops.cubin.quantize(weight, 5) for weight in weights]
        return (torch.stack(part) for part in zip(*parts, strict=True))

    def forward(self, x, ids, weights, offs):
        ops, rows, blocks = torch.ops.cubin, 4, 5
        a, scale = ops.quantize(x, rows)
        y = ops.scaled_matmul(a, self.weight.t(), scale, rows, self.weight_scale, blocks)
        a, scale = ops.quantize(y, rows)
        given = (a, self.group.mT, scale, rows, self.group_scale, blocks)
        z = ops.scaled_grouped_matmul(*given, offs=offs).float()
        z = torch_cubin.moe(z, ids, weights, self.w13, self.w2)
        scales = {"w13_scale": self.w13_scale, "w2_scale": self.w2_scale}
        return torch_cubin.moe(z, ids, weights, self.w13_8, self.w2_8, **scales)


@pytest.mark.parametrize("strict", [False, True])
def test_8_bit_floats_and_experts_of_any_number_of_rows(strict):
    def arguments(rows: int):
        ids = torch.arange(2 * rows).view(rows, 2) % 2
        ends = torch.tensor([rows // 2, rows])
        return torch.randn(rows, 16), ids, torch.full((rows, 2), 0.5), ends

    model, rows = Experts(), torch.export.Dim("rows", min=2, max=64)
    sizes = ({0: rows}, {0: rows}, {0: rows}, None)
    with torch.no_grad():
        program = torch.export.export(model, arguments(6), dynamic_shapes=sizes, strict=strict)
        assert len(ops_of(program)) == 6
        for rows in (2, 6, 33):
            given = arguments(rows)
            assert torch.equal(program.module()(*given), model(*given))
