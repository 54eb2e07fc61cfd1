"""drop_in() and attention: what it serves, what it leaves to PyTorch, and that both are right."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch
import torch.nn.functional as F
from drop_in_cases import run
from ops.attention_samples import make_qkv, random_case, random_qkv
from ops.samples import DTYPES
from ops.test_attention_semantics import near
from torch._dynamo.testing import CompileCounterWithBackend

import torch_cubin

NAME = "torch.nn.functional.scaled_dot_product_attention"
sdpa = F.scaled_dot_product_attention
CROSS = ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6))


def mask(*shape: int, device: str) -> torch.Tensor:
    return torch.rand(shape, device=device) > 0.3


# A call of query, key and value, which are CROSS.
SERVED = {
    "plain": lambda q, k, v: sdpa(q, k, v),
    "by name": lambda q, k, v: sdpa(query=q, key=k, value=v, is_causal=True, scale=0.5),
    "by position": lambda q, k, v: sdpa(q, k, v, None, 0.0, True),
    "private name": lambda q, k, v: torch._C._nn.scaled_dot_product_attention(q, k, v),
    "mask": lambda q, k, v: sdpa(q, k, v, mask(5, 7, device=q.device)),
    "mask of heads": lambda q, k, v: sdpa(q, k, v, mask(4, 1, 7, device=q.device)),
    "float mask": lambda q, k, v: sdpa(q, k, v, mask(2, 1, 5, 7, device=q.device).float()),
    "own mask": lambda q, k, v: sdpa(q, k, v, mask(5, 7, device=q.device).to(q.dtype)),
    "groups": lambda q, k, v: sdpa(q, k[:, :2], v[:, :2], enable_gqa=True),
    "groups of two sizes": lambda q, k, v: sdpa(q, k[:, :2], v[:, :1], enable_gqa=True),
    "matrices": lambda q, k, v: sdpa(q[0, 0], k[0, 0], v[0, 0]),
    "broadcast": lambda q, k, v: sdpa(q, k[:, :1], v[0]),
    "no dropout": lambda q, k, v: sdpa(q, k, v, dropout_p=0.0),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", SERVED)
def test_served(case, dtype, grad, device):
    args = make_qkv(CROSS, device, dtype, requires_grad=grad)
    torch.manual_seed(4)  # of the mask
    expected = SERVED[case](*(arg.double() for arg in args))
    torch.manual_seed(4)
    result, ops, report = run(lambda: SERVED[case](*args))
    near(result.detach(), expected.detach())
    assert result.dtype == dtype
    assert ops.cubin() == 1
    assert not any("aten::_scaled_dot_product" in name for name in ops.names)
    assert [(row.function, row.calls) for row in report.served] == [(NAME, 1)]
    assert report.declined == ()


def test_random_calls_are_served(device):
    for seed in range(200):
        rng = random.Random(seed)
        shapes, options = random_case(rng)
        args = random_qkv(rng, shapes, torch.float32, device)
        if any(0 in shape for shape in shapes):  # where torch's own shapes depend on the kernel
            continue
        expected = sdpa(*(arg.double().contiguous() for arg in args), **options)
        result, _, report = run(lambda: sdpa(*args, **options))  # noqa: B023
        near(result, expected)
        assert [row.calls for row in report.served] == [1], f"seed {seed}: {report}"


def test_dropout_is_served(device):
    args = make_qkv(CROSS, device)
    torch.manual_seed(0)
    first, _, report = run(lambda: sdpa(*args, dropout_p=0.5))
    assert [row.calls for row in report.served] == [1]
    torch.manual_seed(0)
    again, _, _ = run(lambda: sdpa(*args, dropout_p=0.5))
    assert torch.equal(first, again)


class Mine(torch.Tensor):
    """A subclass that keeps torch's default __torch_function__."""


def refused(call):
    """The result, or the type of the error: calls that PyTorch refuses must raise the same type."""
    try:
        return call()
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        return type(error).__name__


def _sparse_mask(query: torch.Tensor) -> torch.Tensor:
    return query.new_ones(5, 7).to_sparse()


def _elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu() if tensor.is_cuda else tensor.to("meta")


DECLINED = [
    ("dtype int64", lambda q, k, v: refused(lambda: sdpa(q.long(), k.long(), v.long()))),
    ("different dtypes", lambda q, k, v: refused(lambda: sdpa(q, k.double(), v))),
    ("different dtypes", lambda q, k, v: refused(lambda: sdpa(q, k, v.double()))),
    ("different dtypes", lambda q, k, v: refused(lambda: sdpa(q, k, v, q.new_ones(5, 7).long()))),
    ("tensor subclass Mine", lambda q, k, v: sdpa(q.as_subclass(Mine), k, v)),
    ("tensor subclass Mine", lambda q, k, v: sdpa(q, k, v, q.new_ones(5, 7).as_subclass(Mine))),
    ("layout sparse_coo", lambda q, k, v: refused(lambda: sdpa(q, k, v, _sparse_mask(q)))),
    (
        "tensors on different devices",
        lambda q, k, v: refused(lambda: sdpa(q, k, v, _elsewhere(q.new_ones(5, 7))).shape),
    ),
    ("device meta", lambda q, k, v: sdpa(*(x.to("meta") for x in (q, k, v))).shape),
    ("dropout_p out of range", lambda q, k, v: refused(lambda: sdpa(q, k, v, dropout_p=1.5))),
    ("shapes that it does not take", lambda q, k, v: refused(lambda: sdpa(q[0, 0, 0], k, v))),
    ("shapes that it does not take", lambda q, k, v: refused(lambda: sdpa(q[..., :4], k, v))),
    ("shapes that it does not take", lambda q, k, v: refused(lambda: sdpa(q[:, :3], k, v))),
    (
        "shapes that it does not take",
        lambda q, k, v: refused(lambda: sdpa(q, k[:, :3], v[:, :3], enable_gqa=True)),
    ),
    (
        "shapes that it does not take",
        lambda q, k, v: refused(lambda: sdpa(q, k, v, q.new_ones(3, 7))),
    ),
]


@pytest.mark.parametrize("case", DECLINED, ids=lambda case: case[0])
def test_declined(case, device):
    reason, call = case
    args = make_qkv(CROSS, device)
    expected = call(*args)
    result, ops, report = run(lambda: call(*args))
    assert ops.cubin() == 0
    assert [(row.function, row.reason) for row in report.declined] == [(NAME, reason)]
    assert report.served == ()
    if isinstance(expected, torch.Tensor):
        assert type(result) is type(expected)
        torch.testing.assert_close(result, expected)
    else:
        assert result == expected


def test_torch_refuses_a_mask_with_is_causal(device):
    args = make_qkv(CROSS, device)
    *_, report = run(lambda: refused(lambda: sdpa(*args, args[0].new_ones(5, 7), is_causal=True)))
    assert [row.reason for row in report.declined] == ["a mask and is_causal"]


def test_nested_tensors_go_to_torch(device):
    rows = [torch.randn(n, 2, 8, device=device) for n in (3, 5)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
    expected = refused(lambda: sdpa(nested, nested, nested))
    result, ops, report = run(lambda: refused(lambda: sdpa(nested, nested, nested)))
    assert ops.cubin() == 0
    assert report.served == ()
    assert type(result) is type(expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype, device):
    args = make_qkv(CROSS, device)
    for masked in (None, torch.randn(5, 7, device=device)):
        with torch.autocast(device, dtype=dtype):
            expected = sdpa(*args, masked)
            result, _, report = run(lambda: sdpa(*args, masked))  # noqa: B023
        assert result.dtype == dtype
        near(result, expected)
        assert [row.calls for row in report.served] == [1]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("inside", [False, True])
def test_compiled(inside, device):
    args = make_qkv(CROSS, device)
    allowed = mask(5, 7, device=device)
    graphs = []

    def backend(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    def model(q, k, v):
        return sdpa(q, k, v, allowed), sdpa(q, k[:, :2], v[:, :2], is_causal=True, enable_gqa=True)

    def entered(*args):
        with torch_cubin.drop_in():
            return f(*args)

    f = model if inside else torch.compile(model, backend=backend, fullgraph=True)
    run = torch.compile(entered, backend=backend, fullgraph=True) if inside else entered
    for one, other in zip(run(*args), model(*args), strict=True):
        near(one, other)
    assert len(graphs) == 1
    assert sum("cubin.scaled_dot_product_attention" in name for name in graphs[0]) == 2
    traced = {row.function: row.traced for row in torch_cubin.report().served}
    assert traced.keys() == {NAME}
    assert traced[NAME] >= 2  # torch.compile may restart its trace


@pytest.mark.usefixtures("fresh_dynamo")
def test_one_graph_for_many_lengths(device):
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(sdpa, fullgraph=True, dynamic=True, backend=counter)
    for rows, columns in ((5, 7), (6, 9), (17, 12)):
        shapes = ((2, 4, rows, 8), (2, 4, columns, 8), (2, 4, columns, 8))
        args = make_qkv(shapes, device)
        allowed = mask(rows, columns, device=device)
        with torch_cubin.drop_in():
            near(compiled(*args, allowed), sdpa(*args, allowed))
    assert counter.frame_count == 1


@pytest.mark.parametrize("training", [False, True])
def test_layers_of_torch(training, device):
    """MultiheadAttention and the transformer's layers, masks of all their kinds included."""
    layer = torch.nn.TransformerDecoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    layer = layer.to(device).train(training)
    x, memory = torch.randn(2, 5, 16, device=device), torch.randn(2, 7, 16, device=device)
    padding = torch.zeros(2, 7, dtype=torch.bool, device=device)
    padding[1, 4:] = True
    causal = torch.nn.Transformer.generate_square_subsequent_mask(5, device=device)
    options = {"memory_key_padding_mask": padding, "tgt_mask": causal, "tgt_is_causal": True}
    results = []
    for entered in (False, True):
        layer.zero_grad()
        with torch_cubin.drop_in() if entered else contextlib.nullcontext():
            out = layer(x, memory, **options)
        out.sin().sum().backward()
        results.append([out.detach(), *(p.grad.clone() for p in layer.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    calls = {row.function: row.calls for row in torch_cubin.report().served}
    assert calls[NAME] == 2
    assert torch_cubin.report().declined == ()
