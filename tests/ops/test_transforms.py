"""torch.func: every transform and mixture gives what it gives for torch.matmul and F.linear."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from ops.samples import assert_near, linear, make, make_all, matmul, reference_linear
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

# Each takes a scalar function of one tensor and returns a function of that tensor.
TRANSFORMS = {
    "grad": grad,
    "jacrev": jacrev,
    "jacfwd": jacfwd,
    "vjp": lambda f: lambda x: vjp(f, x)[1](torch.ones_like(f(x)))[0],
    "jvp": lambda f: lambda x: jvp(f, (x,), (x.cos(),))[1],
    "hessian": hessian,
    "jacfwd of jacrev": lambda f: jacfwd(jacrev(f)),
    "jacrev of jacfwd": lambda f: jacrev(jacfwd(f)),
    "jacrev of jacrev": lambda f: jacrev(jacrev(f)),
    "jacfwd of jacfwd": lambda f: jacfwd(jacfwd(f)),
    "grad of grad": lambda f: grad(lambda x: grad(f)(x).sin().sum()),
    "jvp of jvp": lambda f: (
        lambda x: jvp(lambda y: jvp(f, (y,), (y.cos(),))[1], (x,), (x.sin(),))[1]
    ),
    "grad of jvp": lambda f: grad(lambda x: jvp(f, (x,), (x.cos(),))[1]),
    "jvp of grad": lambda f: lambda x: jvp(grad(f), (x,), (x.cos(),))[1],
    "third order": lambda f: grad(lambda x: grad(lambda y: grad(f)(y).sin().sum())(x).cos().sum()),
    "linearize": lambda f: lambda x: linearize(f, x)[1](x.cos()),
    "vmap of grad": lambda f: lambda x: vmap(grad(f))(torch.stack([x, 2 * x, 3 * x])),
    "grad of vmap": lambda f: grad(lambda x: vmap(f)(torch.stack([x, 2 * x])).sum()),
    "vmap of jvp": lambda f: (
        lambda x: vmap(lambda y: jvp(f, (y,), (y.cos(),))[1])(torch.stack([x, 2 * x]))
    ),
    "jvp of vmap": lambda f: (
        lambda x: jvp(lambda y: vmap(f)(torch.stack([y, 2 * y])), (x,), (x.cos(),))[1]
    ),
    "vmap of hessian": lambda f: lambda x: vmap(hessian(f))(torch.stack([x, 2 * x])),
    "hessian of vmap": lambda f: hessian(lambda x: vmap(f)(torch.stack([x, 2 * x])).sum()),
}

MATMUL_CASES = [
    ((2, 3), (3, 4)),
    ((3,), (3, 4)),
    ((2, 3), (3,)),
    ((3,), (3,)),
    ((2, 2, 3), (3, 2)),
    ((2, 3), (2, 3, 2)),
]


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("shapes", MATMUL_CASES, ids=str)
def test_matmul_under(name, shapes, device):
    a, b = make_all(shapes, device)
    for argument, f in (
        (a, lambda op: lambda x: op(x, b).sin().sum()),
        (b, lambda op: lambda x: op(a, x).sin().sum()),
    ):
        expected = TRANSFORMS[name](f(torch.matmul))(argument)
        assert_near(TRANSFORMS[name](f(matmul))(argument), expected)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_matmul_of_a_tensor_with_itself_under(name, device):
    x = make((3, 3), device)

    def f(op):
        return lambda x: op(x, op(x, x).sin()).sum()

    assert_near(TRANSFORMS[name](f(matmul))(x), TRANSFORMS[name](f(torch.matmul))(x))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_linear_under(name, device):
    args = make_all(((2, 3), (4, 3), (4,)), device)
    for i in range(3):

        def f(op, i=i):
            return lambda x: op(*args[:i], x, *args[i + 1 :]).sin().sum()

        ours = TRANSFORMS[name](f(linear))(args[i])
        assert_near(ours, TRANSFORMS[name](f(reference_linear))(args[i]))


@pytest.mark.parametrize("name", ["grad", "jvp", "hessian", "vmap of grad", "jvp of jvp"])
def test_transforms_under_no_grad(name, device):
    """A transform enables its own mode, whatever the mode around it."""
    a, b = make_all(((2, 3), (3, 4)), device)

    def f(op):
        return lambda x: op(x, b).sin().sum()

    expected = TRANSFORMS[name](f(torch.matmul))(a)
    with torch.no_grad():
        assert_near(TRANSFORMS[name](f(matmul))(a), expected)


def test_no_grad_inside_a_transform(device):
    """no_grad stops reverse mode, not forward mode."""
    a, b = make_all(((2, 3), (3, 4)), device)

    def f(op):
        def inner(x):
            with torch.no_grad():
                y = op(x, b)
            return y.sin().sum() + (x * x).sum()

        return inner

    assert_near(grad(f(matmul))(a), grad(f(torch.matmul))(a))
    assert_near(jvp(f(matmul), (a,), (a,))[1], jvp(f(torch.matmul), (a,), (a,))[1])


OPS = {
    "linear": (
        lambda x, w: linear(x, w, activation="gelu"),
        lambda x, w: F.gelu(reference_linear(x, w)),
    ),
    "gates": (
        lambda x, w: torch.ops.cubin._linear_glu(x, w, w, "relu"),
        lambda x, w: reference_linear(x, w).relu() * reference_linear(x, w),
    ),
    "matmul": (lambda x, w: matmul(x, w.mT), lambda x, w: torch.matmul(x, w.mT)),
    "rms_norm": (
        lambda x, w: torch.ops.cubin.rms_norm(x, (3,), w[0], 1e-3),
        lambda x, w: F.rms_norm(x, (3,), w[0], 1e-3),
    ),
    "softmax": (lambda x, w: torch.ops.cubin.softmax(x, -1), lambda x, w: x.softmax(-1)),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["grad of grad", "grad of jvp", "jvp of grad", "jvp of jvp"])
@pytest.mark.parametrize("op", OPS)
def test_modes_inside_nested_transforms(op, name, mode, device):
    """The block records a graph for no level, as with PyTorch's own ops; inference mode stops
    forward mode, too."""
    a, b = make_all(((2, 3), (4, 3)), device)

    def f(function):
        def inner(x):
            with mode():
                y = function(x, b)
            return y.square().sum() * x.sin().sum() + function(x, b).sin().sum()

        return inner

    ours, theirs = (TRANSFORMS[name](f(function))(a) for function in OPS[op])
    assert_near(ours, theirs)


def test_no_grad_around_a_tangent(device):
    a, b = make_all(((2, 3), (3, 4)), device, requires_grad=True)
    with torch.no_grad():
        results = jvp(lambda x: matmul(x, b), (a,), (a.detach(),))
    assert not any(result.requires_grad for result in results)


def test_transform_over_tensors_that_require_grad(device):
    a, b = make_all(((2, 3), (3, 4)), device, requires_grad=True)
    results = []
    for op in (matmul, torch.matmul):
        inner = grad(lambda x, op=op: op(x, b).sin().sum())(a)
        results.append(torch.autograd.grad(inner.pow(2).sum(), (a, b)))
    assert_near(*results)


def test_per_sample_gradients_of_a_module(device):
    class Layer(torch.nn.Linear):
        op = staticmethod(reference_linear)

        def forward(self, x):
            return self.op(x, self.weight, self.bias)

    layer = Layer(3, 4, device=device, dtype=torch.float64)
    params = {name: p.detach() for name, p in layer.named_parameters()}
    x = make((5, 3), device)

    def loss(params, sample):
        return functional_call(layer, params, (sample,)).pow(2).sum()

    expected = vmap(grad(loss), (None, 0))(params, x)
    layer.op = linear
    result = vmap(grad(loss), (None, 0))(params, x)
    for name in params:
        assert_near(result[name], expected[name])


def test_functionalize(device):
    a, b = make_all(((2, 3), (3, 4)), device)

    def f(a, b):
        out = matmul(a, b)
        out.add_(1)
        return out.t().sin_()

    assert_near(torch.func.functionalize(f)(a, b), (torch.matmul(a, b) + 1).t().sin())
    assert_near(
        grad(lambda a: torch.func.functionalize(f)(a, b).sum())(a),
        grad(lambda a: (torch.matmul(a, b) + 1).sin().sum())(a),
    )


def test_jacobian_vectorised_and_in_chunks(device):
    a, b = make_all(((2, 3), (3, 4)), device)
    expected = torch.autograd.functional.jacobian(lambda x: torch.matmul(x, b), a)
    assert_near(jacrev(lambda x: matmul(x, b), chunk_size=3)(a), expected)
    for strategy in ("reverse-mode", "forward-mode"):
        result = torch.autograd.functional.jacobian(
            lambda x: matmul(x, b), a, vectorize=True, strategy=strategy
        )
        assert_near(result, expected)
