"""torch.export: the graph keeps the public ops, for one size and for a range of them."""

from __future__ import annotations

import io

import pytest
import torch
from ops.samples import assert_near, linear, make, matmul, reference_linear

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


def ops_of(program) -> list[str]:
    return [
        str(node.target)
        for node in program.graph.nodes
        if node.op == "call_function" and "cubin" in str(node.target)
    ]


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
