"""The options of grouped_matmul on the CPU: bias, scale, rows, out_rows, activation."""

from __future__ import annotations

import itertools
import random

import grouped_options
import pytest
import torch
from torch import Tensor

import torch_cubin  # noqa: F401  (registers the ops)

op = torch.ops.cubin.grouped_matmul
raw = torch.ops.cubin._grouped_matmul
SIZES = (3, 0, 4, 1)
EVERY = grouped_options.OPTIONS


def call(options: tuple[str, ...], **changes) -> tuple:
    args = {"sizes": SIZES, "k": 6, "n": 4, "dtype": torch.float64} | changes
    return grouped_options.draw(random.Random(str(options)), options=options, **args)


def subsets() -> list[tuple[str, ...]]:
    return [
        own for count in range(1, len(EVERY) + 1) for own in itertools.combinations(EVERY, count)
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_every_set_of_options(dtype: torch.dtype) -> None:
    for options in subsets():
        (a, b), given = call(options, dtype=dtype, rest=2)
        out = op(a, b, **given)
        wide = {name: x.double() if torch.is_tensor(x) and x.is_floating_point() else x
                for name, x in given.items()}  # fmt: skip
        want, stored = grouped_options.expected(a.double(), b.double(), wide)
        limits = {"rtol": 0.02, "atol": 0.02} if dtype == torch.bfloat16 else {}
        torch.testing.assert_close(out[stored], want[stored].to(dtype), **limits, msg=str(options))
        assert out.is_contiguous()


def tensors_of(given: dict) -> list[str]:
    return [name for name, x in given.items() if torch.is_tensor(x) and x.is_floating_point()]


def test_derivatives_of_every_order() -> None:
    (a, b), given = call(EVERY, rest=1)
    given["activation"] = "silu"
    names = tensors_of(given)
    inputs = [x.double().detach().requires_grad_() for x in (a, b, *(given[n] for n in names))]

    def function(a: Tensor, b: Tensor, *own: Tensor) -> Tensor:
        options = dict(zip(names, own, strict=True))
        if "scale" in options:
            options["scale"] = options["scale"].float()
        return op(a, b, **(given | options))

    def reference(a: Tensor, b: Tensor, *own: Tensor) -> Tensor:
        return grouped_options.expected(a, b, given | dict(zip(names, own, strict=True)))[0]

    weight = torch.linspace(-1, 1, function(*inputs).numel(), dtype=torch.float64)

    def gradients(call) -> tuple[Tensor, ...]:
        loss = (call(*inputs).flatten().sin() * weight).sum()
        first = torch.autograd.grad(loss, inputs, create_graph=True)
        second = torch.autograd.grad(sum(x.square().sum() for x in first), inputs)
        return *first, *second

    torch.testing.assert_close(gradients(function), gradients(reference), rtol=1e-4, atol=1e-5)
    tangents = tuple(torch.randn_like(x) for x in inputs)
    got, want = (torch.func.jvp(f, tuple(inputs), tangents)[1] for f in (function, reference))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_rows_past_the_last_end_have_no_gradient() -> None:
    (a, b), given = call(("bias",), rest=3)
    inputs = [x.requires_grad_() for x in (a, b, given["bias"])]
    out = op(a, b, **given)
    grads = torch.autograd.grad(out, inputs, torch.ones_like(out))
    assert grads[0][sum(SIZES) :].eq(0).all()
    torch.testing.assert_close(grads[2][:, 0], torch.tensor(SIZES).double())


@pytest.mark.parametrize("grad", [False, True])
def test_opcheck(grad: bool) -> None:
    (a, b), given = call(EVERY)
    if grad:
        a.requires_grad_()
        given["bias"].requires_grad_()
    torch.library.opcheck(op, (a, b), given)
    options = [given[name] for name in EVERY]
    raw_op = torch.ops.cubin._grouped_matmul_autograd if grad else raw
    torch.library.opcheck(raw_op, (a, b, given["offs"], False, *options))


def test_vmap() -> None:
    (a, b), given = call(("bias", "rows", "activation"))
    batch = torch.stack([given["bias"], -given["bias"]], 1)
    rest = {name: x for name, x in given.items() if name != "bias"}

    def own(a: Tensor, bias: Tensor) -> Tensor:
        return op(a, b, bias=bias, **rest)

    out = torch.vmap(own, in_dims=(None, 1))(a, batch)
    for i in range(2):
        torch.testing.assert_close(out[i], own(a, batch[:, i]))


def test_compile_makes_one_graph_of_all_sizes() -> None:
    torch._dynamo.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(op, backend=backend, fullgraph=True, dynamic=True)
    for sizes in ((6, 5), (20, 3), (9, 8)):
        options = "bias", "scale", "rows", "out_rows"
        (a, b), given = call(options, sizes=sizes, k=19, n=13)
        torch.testing.assert_close(compiled(a, b, **given), op(a, b, **given))
    assert len(graphs) == 1


def test_autocast_keeps_scales() -> None:
    (a, b), given = call(("bias", "scale"), dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = op(a, b, **given)
    cast = given | {"bias": given["bias"].bfloat16()}
    torch.testing.assert_close(out, op(a.bfloat16(), b.bfloat16(), **cast))


def test_wrong_ends_store_nan() -> None:
    (a, b), given = call(("bias", "out_rows"))
    given["offs"] = torch.tensor([3, 2, 7, 8], dtype=torch.int32)
    out = op(a, b, **given)
    places = given["out_rows"]
    known = (places >= 0) & (places < len(out))
    assert out[places[3:][known[3:]].long()].isnan().all()
    assert not out[places[:3][known[:3]].long()].isnan().any()


@pytest.mark.parametrize("wrong", [-1, 2, 1000])
def test_rows_before_a_wrong_end_have_their_own_bias(wrong: int, device: str) -> None:
    sizes = (1, 3, 2, 3, 1, 2)
    (a, b), given = grouped_options.draw(
        random.Random(0), sizes, 5, 4, ("bias",), torch.float32, device
    )
    want = op(a, b, **given)
    for group in range(1, len(sizes)):
        ends = given["offs"].clone()
        before = int(ends[group - 1])
        ends[group] = wrong if wrong != 2 else before - 1
        out = op(a, b, **{**given, "offs": ends})
        torch.testing.assert_close(out[:before], want[:before])
        assert out[before:].isnan().all()
