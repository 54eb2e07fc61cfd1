"""Arguments for the tests of matmul and linear: shapes of every rank case, layouts, tolerances."""

from __future__ import annotations

import os
import random

import torch
import torch._inductor.config as inductor_config
from torch import Tensor

import torch_cubin  # noqa: F401  (registers the ops)

matmul = torch.ops.cubin.matmul
linear = torch.ops.cubin.linear

# Options of Inductor where only our ops matter. In .ci/run PyTorch's ops are called, where g++
# would take 0.7 s for each kernel that is generated of them; elsewhere they are generated, so that
# our ops run beside generated code. Torch 2.11 has no such option.
ATEN_IS_CALLED = (
    {"fallback_by_default": True}
    if "CI_BEGAN" in os.environ and hasattr(inductor_config, "fallback_by_default")
    else {}
)

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# Every rank case, broadcast batches and sizes of 0 and 1.
MATMUL_SHAPES = [
    ((3,), (3,)),
    ((1,), (1,)),
    ((2, 3), (3,)),
    ((3,), (3, 4)),
    ((2, 3), (3, 4)),
    ((1, 3), (3, 1)),
    ((2, 2, 3), (3, 4)),
    ((2, 1, 2, 3), (3, 4)),
    ((2, 2, 3), (3,)),
    ((2, 2, 2, 3), (3,)),
    ((3,), (2, 3, 4)),
    ((3,), (2, 2, 3, 4)),
    ((2, 3), (2, 3, 4)),
    ((2, 3), (2, 1, 3, 4)),
    ((2, 2, 3), (2, 3, 4)),
    ((1, 2, 3), (2, 3, 4)),
    ((2, 2, 3), (1, 3, 4)),
    ((2, 1, 2, 3), (3, 3, 4)),
    ((2, 1, 2, 3), (1, 2, 3, 4)),
    ((0, 3), (3, 4)),
    ((2, 3), (3, 0)),
    ((2, 0), (0, 4)),
    ((0,), (0,)),
    ((0,), (0, 4)),
    ((2, 0), (0,)),
    ((0, 2, 3), (3, 4)),
    ((0, 2, 3), (1, 3, 4)),
    ((2, 2, 0), (2, 0, 4)),
    ((2, 2, 0), (0, 4)),
]

# input, weight, bias.
LINEAR_SHAPES = [
    ((2, 3), (4, 3), (4,)),
    ((2, 3), (4, 3), None),
    ((3,), (4, 3), (4,)),
    ((3,), (4, 3), None),
    ((2, 2, 3), (4, 3), (4,)),
    ((2, 1, 2, 3), (4, 3), None),
    ((2, 3), (4, 3), (1,)),
    ((2, 3), (4, 3), ()),
    ((3,), (3,), None),
    ((2, 3), (3,), None),
    ((2, 2, 3), (3,), ()),
    ((0, 3), (4, 3), (4,)),
    ((2, 3), (0, 3), (0,)),
    ((2, 0), (4, 0), (4,)),
    ((2, 2, 0), (4, 0), None),
    ((0,), (4, 0), (4,)),
]


def ids(shapes: object) -> str:
    """A pytest id such as 2x3."""
    if shapes is None:
        return "none"
    return "x".join(map(str, shapes)) if shapes else "scalar"


def make(
    shape: tuple[int, ...] | None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float64,
    requires_grad: bool = False,
) -> Tensor | None:
    if shape is None:
        return None
    return torch.randn(shape, dtype=dtype, device=device, requires_grad=requires_grad)


def make_all(shapes: tuple, device: str, dtype: torch.dtype = torch.float64, **options) -> list:
    return [make(shape, device, dtype, **options) for shape in shapes]


def reference_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear, which refuses a bias beside a one-dimensional weight."""
    out = torch.nn.functional.linear(input, weight, None if weight.dim() == 1 else bias)
    return out + bias if bias is not None and weight.dim() == 1 else out


_TOLERANCES = {
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
    torch.float32: 1e-5,
    torch.float64: 1e-12,
}


def assert_near(actual: object, expected: object) -> None:
    """As torch's own result, up to rounding; the absolute tolerance follows the largest element."""
    if isinstance(expected, tuple | list):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_near(one, other)
        return
    scale = float(expected.detach().abs().max()) if expected.numel() else 0.0
    limit = _TOLERANCES[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=limit, atol=limit * max(scale, 1.0))


def random_layout(
    rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype, device: str
) -> Tensor:
    """A tensor of that shape whose strides are anything that views can make."""
    order = list(range(len(shape)))
    rng.shuffle(order)
    steps = [rng.choice((1, 1, 2)) for _ in shape]
    starts = [rng.choice((0, 0, 1)) for _ in shape]
    expanded = [rng.random() < 0.1 for _ in shape]
    sizes = [
        1 if wide else start + size * step
        for size, step, start, wide in zip(shape, steps, starts, expanded, strict=True)
    ]
    base = torch.randn([sizes[i] for i in order], dtype=dtype, device=device)
    tensor = base.permute([order.index(i) for i in range(len(shape))])
    for i, size in enumerate(shape):
        if expanded[i]:
            tensor = tensor.expand([size if j == i else -1 for j in range(len(shape))])
        else:
            tensor = tensor[(slice(None),) * i + (slice(starts[i], None, steps[i]),)]
            tensor = tensor.narrow(i, 0, size)
    return tensor


def random_matmul_shapes(rng: random.Random) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes that torch.matmul takes: any ranks, broadcast batches, now and then a size of 0."""

    def size() -> int:
        return rng.choice((0, 1, 1, 2, 3, 4, 5))

    m, n, k = size(), size(), rng.choice((0, 1, 2, 3, 5, 8))
    batch = [size() for _ in range(rng.randrange(4))]
    a_batch, b_batch = (
        [rng.choice((1, x, x)) for x in batch[rng.randrange(len(batch) + 1) :]] for _ in range(2)
    )
    a = (*a_batch, m, k) if rng.random() < 0.8 else (k,)
    b = (*b_batch, k, n) if rng.random() < 0.8 else (k,)
    return a, b


def random_linear_shapes(rng: random.Random) -> tuple:
    """Shapes that F.linear takes."""

    def size() -> int:
        return rng.choice((0, 1, 1, 2, 3, 4, 5))

    n, k = size(), rng.choice((0, 1, 2, 3, 5, 8))
    input = (*(size() for _ in range(rng.randrange(4))), k)
    if rng.random() < 0.15:
        return input, (k,), None
    return input, (n, k), rng.choice((None, (n,), (n,), (1,), ()))


def ops_of(program: torch.export.ExportedProgram) -> list[str]:
    """Ours that an exported program calls."""
    return [
        str(node.target)
        for node in program.graph.nodes
        if node.op == "call_function" and "cubin" in str(node.target)
    ]


def fakes(args: dict) -> dict:
    """Named arguments with fakes in place of their tensors."""
    mode = torch._subclasses.FakeTensorMode()
    tensors = {name: mode.from_tensor(x) for name, x in args.items() if isinstance(x, Tensor)}
    return args | tensors
