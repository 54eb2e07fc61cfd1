"""The op as a citizen of PyTorch on the GPU: autograd, autocast, compile, export, checkpoint."""

from __future__ import annotations

import collections
import weakref

import numerics
import pytest
import torch
import torch.nn.functional as F
from gpu import cases
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

matmul_shapes = [((5, 4), (4, 3)), ((4,), (4,)), ((2, 5, 4), (4, 3)), ((2, 1, 5, 4), (3, 4, 2))]


def _leaves(shapes, dtype=torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(11)
    return [
        torch.randn(s, dtype=dtype, device="cuda", generator=generator).requires_grad_()
        for s in shapes
    ]


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.ops.cubin.matmul(a, b)


def linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
    return torch.ops.cubin.linear(x, w, b)


@pytest.mark.parametrize("shapes", matmul_shapes, ids=str)
def test_matmul_gradients(shapes) -> None:
    leaves = _leaves(shapes)
    assert torch.autograd.gradcheck(matmul, leaves, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(matmul, leaves)


@pytest.mark.parametrize("shapes", [((5, 4), (3, 4), (3,)), ((2, 5, 4), (3, 4))], ids=str)
def test_linear_gradients(shapes) -> None:
    leaves = _leaves(shapes)
    assert torch.autograd.gradcheck(linear, leaves, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(linear, leaves)


@pytest.mark.parametrize("mode", cases.MODES)
def test_gradients_obey_the_numerical_rule(mode: str, generator: torch.Generator) -> None:
    with cases.math_mode(mode) as dtype:
        values = [cases.draw(s, dtype, False, generator) for s in ((300, 257), (129, 257), (129,))]
        grad = cases.draw((300, 129), dtype, False, generator)
        results = []
        for function in (linear, F.linear):
            leaves = [value.clone().requires_grad_() for value in values]
            function(*leaves).backward(grad)
            results.append([leaf.grad for leaf in leaves])
        x, w, _ = values
        references = [
            numerics.reference_matmul(grad, w),
            numerics.reference_matmul(grad.t(), x),
            grad.double().sum(0),
        ]
        for name, ours, own, reference in zip("xwb", *results, references, strict=True):
            numerics.check_close(ours, own, reference, f"{mode} grad of {name}")


def test_functional_transforms() -> None:
    a, b = (leaf.detach() for leaf in _leaves([(5, 4), (4, 3)]))

    def loss(function):
        return lambda x, y: function(x, y).sin().sum()

    for transform in (
        torch.func.grad,
        torch.func.jacrev,
        torch.func.jacfwd,
        torch.func.hessian,
        lambda f: torch.func.grad(lambda x, y: torch.func.grad(f)(x, y).square().sum()),
    ):
        ours, own = transform(loss(matmul))(a, b), transform(loss(torch.matmul))(a, b)
        torch.testing.assert_close(ours, own)
    many = torch.randn(6, 5, 4, dtype=torch.float64, device="cuda")
    ours, own = (torch.func.vmap(f, in_dims=(0, None))(many, b) for f in (matmul, torch.matmul))
    torch.testing.assert_close(ours, own)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(dtype: torch.dtype) -> None:
    x, weight, bias = _leaves([(40, 64), (24, 64), (24,)], torch.float32)
    with torch.autocast("cuda", dtype=dtype):
        out = linear(x, weight, bias)
        product = matmul(x, weight.t())
    assert out.dtype == product.dtype == dtype
    halves = [leaf.detach().to(dtype) for leaf in (x, weight, bias)]
    numerics.check_bits(out.detach(), linear(*halves))
    numerics.check_bits(product.detach(), matmul(halves[0], halves[1].t()))
    out.float().sum().backward()
    assert x.grad.dtype == weight.grad.dtype == bias.grad.dtype == torch.float32


class _Casts(TorchDispatchMode):
    """How often tensors of each shape are cast."""

    def __init__(self) -> None:
        super().__init__()
        self.of = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default:
            self.of[tuple(args[0].shape)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("cached", [True, False])
def test_autocast_casts_a_weight_once_a_region(cached: bool, grad: bool) -> None:
    leaves = _leaves([(40, 64), (64, 64), (64,), (2, 64, 64)], torch.float32)
    results = []
    for of_linear, of_matmul in ((linear, matmul), (F.linear, torch.matmul)):
        x, weight, bias, many = (leaf.detach().clone().requires_grad_() for leaf in leaves)
        with (
            torch.set_grad_enabled(grad),
            torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=cached),
            _Casts() as casts,
        ):
            out = of_linear(of_linear(x, weight, bias), weight, bias)
            with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=cached):
                out = of_matmul(of_matmul(of_linear(out, weight, bias), many), many)
        if grad:
            out.float().sum().backward()
        results.append((casts.of, out, x.grad, weight.grad, bias.grad, many.grad))
    assert results[0][0] == results[1][0]
    assert set(results[0][0].values()) <= ({1} if cached else {1, 2, 3})
    for ours, own in zip(results[0][1:], results[1][1:], strict=True):
        if own is not None:
            limit = 0.05 * float(own.abs().max())
            torch.testing.assert_close(ours, own, rtol=0.05, atol=limit)
        else:
            assert ours is None


def test_autocast_caches_no_weight_between_regions() -> None:
    x, weight = _leaves([(40, 64), (64, 64)], torch.float32)
    for factor in (1, 2, 3):
        with torch.no_grad():
            weight.fill_(factor)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            outs = [linear(x, weight) for _ in range(3)]
        own = F.linear(x.bfloat16(), weight.bfloat16())
        for out in outs:
            torch.testing.assert_close(out, own)
    del outs, out, own
    gone = weakref.ref(weight)
    del weight
    assert gone() is None


@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode])
def test_autocast_of_a_weight_that_was_first_used_without_a_gradient(first) -> None:
    x, weight = _leaves([(40, 64), (64, 64)], torch.float32)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        with first():
            linear(x, weight)
        linear(x, weight).float().sum().backward()
    torch.testing.assert_close(
        weight.grad, x.detach().bfloat16().float().sum(0).expand(64, 64), rtol=0.02, atol=0.05
    )


def test_autocast_and_the_cache_under_compile_and_transforms() -> None:
    x, weight = _leaves([(40, 64), (64, 64)], torch.float32)

    def loss(weight: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return linear(linear(x.detach(), weight), weight).float().square().mean()

    (own,) = torch.autograd.grad(loss(weight), weight)
    for compute in (
        lambda: torch.autograd.grad(torch.compile(loss, fullgraph=True)(weight), weight)[0],
        lambda: torch.func.grad(loss)(weight),
        lambda: torch.func.grad(loss)(weight.detach()),
    ):
        torch.testing.assert_close(compute(), own, rtol=0.05, atol=0.02 * float(own.abs().max()))


def test_inference_mode_and_no_grad_give_the_same_bits() -> None:
    a, b = _leaves([(65, 300), (300, 40)], torch.float32)
    with torch.inference_mode():
        inference = matmul(a, b)
    with torch.no_grad():
        plain = matmul(a, b)
    assert inference.is_inference()
    assert not plain.requires_grad
    numerics.check_bits(plain, matmul(a, b).detach())
    with torch.inference_mode():
        numerics.check_bits(inference, plain)


def test_compile_makes_one_graph_for_four_sizes() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(
        lambda x, w, b: linear(x, w, b).relu() * 2,
        backend=counter,
        fullgraph=True,
        dynamic=True,
    )
    weight, bias = _leaves([(24, 64), (24,)], torch.bfloat16)
    for rows in (17, 40, 129, 300):
        (x,) = _leaves([(rows, 64)], torch.bfloat16)
        with torch.no_grad():
            numerics.check_bits(compiled(x, weight, bias), linear(x, weight, bias).relu() * 2)
    assert counter.frame_count == 1


def test_compile_with_backward_makes_one_graph_for_four_sizes() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(
        lambda a, b: matmul(a, b).sin(), backend=counter, fullgraph=True, dynamic=True
    )
    for rows in (17, 40, 129, 300):
        results = []
        for function in (compiled, lambda a, b: matmul(a, b).sin()):
            a, b = _leaves([(rows, 64), (64, 24)])
            out = function(a, b)
            out.sum().backward()
            results.append((out.detach(), a.grad, b.grad))
        for ours, eager in zip(*results, strict=True):
            torch.testing.assert_close(ours, eager)
    assert counter.frame_count == 1


def test_compile_reduce_overhead() -> None:
    """Inductor's own CUDA graphs."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda a, b: matmul(a, b) * 2, mode="reduce-overhead", fullgraph=True)
    with torch.no_grad():
        for _ in range(5):
            a, b = (leaf.detach() for leaf in _leaves([(64, 128), (128, 32)], torch.bfloat16))
            numerics.check_bits(compiled(a, b).clone(), matmul(a, b) * 2)


class _Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.weight = torch.nn.Parameter(torch.randn(24, 64, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight).relu()


def test_export() -> None:
    block = _Block().cuda()
    rows = torch.export.Dim("rows", min=2, max=4096)
    program = torch.export.export(
        block, (torch.randn(16, 64, device="cuda"),), dynamic_shapes=[{0: rows}]
    )
    targets = {str(node.target) for node in program.graph.nodes}
    assert "cubin.linear.default" in targets, targets
    for count in (2, 33, 300):
        x = torch.randn(count, 64, device="cuda")
        numerics.check_bits(program.module()(x).detach(), block(x).detach())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant: bool) -> None:
    block = _Block().cuda()
    grads = []
    for run in (block, lambda x: checkpoint(block, x, use_reentrant=reentrant)):
        x = torch.ones(8, 64, device="cuda", requires_grad=True)
        block.weight.grad = None
        run(x).sum().backward()
        grads.append((x.grad, block.weight.grad))
    for ours, expected in zip(*grads, strict=True):
        numerics.check_bits(ours, expected)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(requires_grad: bool) -> None:
    samples = [((5, 4), (4, 3)), ((4,), (4,)), ((3, 5, 4), (4, 2)), ((5, 0), (0, 3))]
    for dtype in (torch.float32, torch.bfloat16):
        for shapes in samples:
            args = [leaf.detach().requires_grad_(requires_grad) for leaf in _leaves(shapes, dtype)]
            for op in (torch.ops.cubin.matmul, torch.ops.cubin._matmul_autograd):
                torch.library.opcheck(op.default, tuple(args))
            plain = tuple(arg.detach() for arg in args)
            torch.library.opcheck(torch.ops.cubin._matmul.default, plain)
        args = [
            leaf.detach().requires_grad_(requires_grad)
            for leaf in _leaves([(5, 4), (3, 4), (3,)], dtype)
        ]
        for op in (torch.ops.cubin.linear, torch.ops.cubin._linear_autograd):
            torch.library.opcheck(op.default, tuple(args))
