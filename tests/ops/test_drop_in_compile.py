"""drop_in() and torch.compile: entered around the compiled function, and inside it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from drop_in_cases import SERVED, integers, name_of, same
from torch.backends import mha

import torch_cubin


class Graphs:
    """A backend that keeps the targets of each graph's calls and runs the graph as it is."""

    def __init__(self) -> None:
        self.targets: list[list[str]] = []

    def __call__(self, module: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        calls = [node for node in module.graph.nodes if node.op.startswith("call_")]
        assert getattr not in [node.target for node in calls]  # queries of tensors are folded
        self.targets.append([str(node.target) for node in calls])
        return module.forward

    def cubin(self) -> list[int]:
        """For each graph, the calls of ours."""
        return [sum(name.startswith("cubin.") for name in graph) for graph in self.targets]


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    assert mha.get_fastpath_enabled()


def _entered_inside(function):
    def entered(*args):
        with torch_cubin.drop_in():
            return function(*args)

    return entered


def _entered_outside(compiled):
    def entered(*args):
        with torch_cubin.drop_in():
            return compiled(*args)

    return entered


def _compile(function, where: str, backend, **options):
    if where == "inside":
        return torch.compile(_entered_inside(function), backend=backend, **options)
    return _entered_outside(torch.compile(function, backend=backend, **options))


where = pytest.mark.parametrize("where", ["inside", "outside"])


# Entered outside, where nothing depends on the operands, one call of each function.
OUTSIDE = list({case[0]: case for case in SERVED}.values())


@pytest.mark.parametrize(
    ("case", "where"),
    [*((case, "inside") for case in SERVED), *((case, "outside") for case in OUTSIDE)],
    ids=lambda value: value if isinstance(value, str) else name_of(value),
)
def test_served_call_is_one_graph(case, where, device) -> None:
    name, shapes, call = case
    operands = [integers(*shape, device=device, seed=i) for i, shape in enumerate(shapes)]
    expected = call(*operands)
    graphs = Graphs()
    compiled = _compile(call, where, graphs, fullgraph=True)
    for _ in range(2):
        same(compiled(*operands), expected)
    assert graphs.cubin() == [1]
    if where == "outside":
        return  # the second time the counts began anew, and nothing was traced
    assert name in {row.function for row in torch_cubin.report().served if row.traced == 1}


@where
def test_declined_calls_are_traced_as_they_are(where, device) -> None:
    def function(a):
        return torch.mm(a.long(), a.long()), torch.einsum("ij,ij->ij", a, a), a @ a

    if device == "cuda":
        pytest.skip("PyTorch has no integer product on CUDA")
    a = integers(4, 4, device=device)
    graphs = Graphs()
    compiled = _compile(function, where, graphs, fullgraph=True)
    for got, wanted in zip(compiled(a), function(a), strict=True):
        same(got, wanted)
    assert graphs.cubin() == [1]
    reasons = {row.function: row.reason for row in torch_cubin.report().declined if row.traced}
    assert reasons == {
        "torch.mm": "dtype int64",
        "torch.einsum": "no index is summed over in both operands",
    }
    assert "when torch.compile traced" in str(torch_cubin.report())


@where
def test_one_graph_for_four_sizes(where, device) -> None:
    weight = integers(7, 3, device=device)

    def function(a):
        rows = F.linear(a, weight.t()) + torch.addmm(weight[:1], a, weight, beta=2)
        return rows + torch.einsum("ij,jk->ik", a, weight)

    graphs = Graphs()
    compiled = _compile(function, where, graphs, fullgraph=True, dynamic=True)
    for size in (4, 5, 9, 16):
        a = integers(size, 7, device=device)
        same(compiled(a), function(a))
    assert graphs.cubin() == [3]


@pytest.mark.parametrize(
    ("training", "grad", "where"),
    [(True, True, "inside"), (True, False, "outside"), (False, True, "outside"),
     (False, False, "inside"), (False, False, "outside")],
)  # fmt: skip
@pytest.mark.parametrize("layer", ["attention", "weights", "encoder"])
def test_layers_written_in_python_are_entered(layer, training, grad, where, device) -> None:
    if layer == "encoder":
        model = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        products = 5
    else:
        attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        products = 4 if layer == "weights" else 3

        def model(x):
            return attention(x, x, x, need_weights=layer == "weights")[0]

    module = model if layer == "encoder" else attention
    module.to(device).train(training)
    x = torch.randn(2, 5, 8, device=device)
    graphs = Graphs()
    with torch.set_grad_enabled(grad):
        expected = model(x)
        compiled = _compile(model, where, graphs, fullgraph=True)
        for _ in range(2):
            torch.testing.assert_close(compiled(x), expected, rtol=1e-4, atol=1e-5)
    assert graphs.cubin() == [products]
    assert not any("transformer_encoder_layer" in name for name in graphs.targets[0])


@where
def test_graph_break_inside(where, device) -> None:
    linear = torch.nn.Linear(4, 4, device=device)

    def function(a):
        b = linear(a)
        torch._dynamo.graph_break()
        return b @ a

    a = integers(4, 4, device=device)
    compiled = _compile(function, where, Graphs())
    with torch.no_grad():
        torch.testing.assert_close(compiled(a), linear(a) @ a, rtol=1e-4, atol=1e-5)
        served = {row.function for row in torch_cubin.report().served}
        assert served == {"torch.nn.functional.linear", "Tensor.matmul (@)"}
        torch.testing.assert_close(compiled(a), linear(a) @ a, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("made", ["inside", "outside"])
def test_an_instance_can_be_entered_twice(made, device) -> None:
    outside = torch_cubin.drop_in()

    def function(a):
        mode = torch_cubin.drop_in() if made == "inside" else outside
        with mode:
            with mode:
                b = a @ a
            return b @ a

    a = integers(4, 4, device=device)
    graphs = Graphs()
    compiled = torch.compile(function, backend=graphs, fullgraph=True)
    for _ in range(2):
        same(compiled(a), a @ a @ a)
        assert mha.get_fastpath_enabled()
    assert graphs.cubin() == [2]


def test_leaving_the_mode_recompiles_the_function(device) -> None:
    a = integers(4, 4, device=device)
    graphs = Graphs()
    compiled = torch.compile(lambda x: x @ x, backend=graphs, fullgraph=True)
    with torch_cubin.drop_in():
        same(compiled(a), a @ a)
    same(compiled(a), a @ a)
    with torch_cubin.drop_in():  # another drop_in(), the first one's graph
        same(compiled(a), a @ a)
    assert graphs.cubin() == [1, 0]


@where
def test_gradients_through_a_compiled_model(where, device) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
    model.to(device)
    x = torch.randn(5, 8, device=device)

    def gradients(function) -> list[torch.Tensor]:
        model.zero_grad()
        function(x).square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = gradients(model)
    compiled = _compile(model, where, "aot_eager", fullgraph=True)
    for got, wanted in zip(gradients(compiled), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@where
def test_autocast(where, device) -> None:
    a = integers(4, 4, device=device)

    def function(x):
        with torch.autocast(device, dtype=torch.bfloat16):
            served = x @ x, F.linear(x, x.bfloat16(), x[0]), torch.addmm(x[0], x, x)
            return *served, torch.addmm(x[0], x, x, beta=2)

    graphs = Graphs()
    compiled = _compile(function, where, graphs, fullgraph=True)
    for got, wanted in zip(compiled(a), function(a), strict=True):
        same(got, wanted)
    assert graphs.cubin() == [4]


@pytest.mark.slow
@where
def test_inductor(where, device) -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    layer.to(device).eval()
    x = torch.randn(2, 5, 8, device=device)
    with torch.no_grad():
        compiled = _compile(layer, where, "inductor", fullgraph=True)
        torch.testing.assert_close(compiled(x), layer(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "non-strict"])
def test_export(strict, device) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x):
            with torch_cubin.drop_in():
                return self.linear(x) @ x

    model = Model().to(device)
    x = integers(4, 4, device=device)
    program = torch.export.export(model, (x,), strict=strict)
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert targets == ["cubin.linear.default", "cubin.matmul.default"]
    torch.testing.assert_close(program.module()(x), model(x), rtol=1e-4, atol=1e-5)


def test_a_batch_of_data_dependent_size(device) -> None:
    """Sizes are compared with each other first: whether one is 1, a graph for all cannot ask."""

    def some(x, keep):
        heads = x[keep].unflatten(-1, (2, 2, 4))
        return F.scaled_dot_product_attention(heads, heads, heads)

    x = torch.randn(5, 16, device=device)
    graphs = Graphs()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), torch_cubin.drop_in():
        compiled = torch.compile(some, fullgraph=True, backend=graphs)
        for count in (4, 1, 0, 5):
            keep = torch.arange(5, device=device) < count
            torch.testing.assert_close(compiled(x, keep), some(x, keep))
    assert graphs.cubin() == [1]
