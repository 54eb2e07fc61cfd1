"""Calls that drop_in() serves, shared by its tests.

Operands are small integers whose products and sums are exact in every dtype, bfloat16 included, so
results of all kernels are compared bit by bit.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from recorded_ops import RecordedOps

import torch_cubin

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def integers(*shape: int, dtype=torch.float32, device="cpu", seed: int = 0) -> torch.Tensor:
    """Integers in -2..2. The seed and the shape say which."""
    generator = torch.Generator().manual_seed(seed * 1009 + sum(shape) + len(shape))
    values = torch.randint(-2, 3, shape, generator=generator)
    return values.to(device=device, dtype=dtype)


class Ops(RecordedOps):
    def cubin(self) -> int:
        return sum(name.startswith("cubin::") for name in self.names)

    def aten_products(self) -> list[str]:
        products = {"mm", "bmm", "mv", "dot", "vdot", "addmm", "addmv", "addbmm", "baddbmm"}
        products |= {"linear", "matmul", "einsum", "inner"}
        return [name for name in self.names if name.removeprefix("aten::") in products]


def run(call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Ops, torch_cubin.Report]:
    """What the call gives inside drop_in(), which operators ran, and the report."""
    with torch_cubin.drop_in(), Ops() as ops:
        result = call()
    return result, ops, torch_cubin.report()


@contextlib.contextmanager
def another_thread_inside() -> Iterator[None]:
    """Another thread is inside drop_in() meanwhile."""
    inside, done = threading.Event(), threading.Event()

    def hold() -> None:
        with torch_cubin.drop_in():
            inside.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert inside.wait(60)
        yield
    finally:
        done.set()
        thread.join()


def same(result: torch.Tensor, expected: torch.Tensor) -> None:
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


# How report() names the function, the shapes of the operands, and the call.
SERVED: list[tuple[str, tuple[tuple[int, ...], ...], Callable[..., torch.Tensor]]] = [
    ("Tensor.matmul (@)", ((5, 7), (7, 3)), lambda a, b: a @ b),
    ("Tensor.matmul (@)", ((7,), (7,)), lambda a, b: a @ b),
    ("Tensor.matmul (@)", ((7,), (2, 7, 3)), lambda a, b: a @ b),
    ("Tensor.matmul (@)", ((2, 1, 5, 7), (4, 7, 3)), lambda a, b: a.matmul(b)),
    ("Tensor.matmul (@)", ((0, 7), (7, 3)), lambda a, b: a @ b),
    ("Tensor.matmul (@)", ((5, 0), (0, 3)), lambda a, b: a @ b),
    ("Tensor.matmul (@)", ((5, 7), (7, 3)), lambda a, b: operator.matmul(a, b)),
    ("Tensor.matmul (@)", ((5, 7), (7, 3)), lambda a, b: operator.imatmul(a, b)),
    ("Tensor.__rmatmul__", ((7, 3), (5, 7)), lambda a, b: a.__rmatmul__(b)),
    ("torch.matmul", ((5, 7), (7, 3)), torch.matmul),
    ("torch.matmul", ((5, 7), (7, 3)), lambda a, b: torch.matmul(input=a, other=b)),
    ("torch.matmul", ((5, 7), (7, 3)), lambda a, b: torch.matmul(a, b, out=None)),
    ("torch.linalg.matmul", ((5, 7), (7,)), torch.linalg.matmul),
    ("torch.mm", ((5, 7), (7, 3)), torch.mm),
    ("torch.mm", ((5, 7), (7, 3)), lambda a, b: torch.mm(a, mat2=b)),
    ("Tensor.mm", ((5, 7), (7, 3)), lambda a, b: a.mm(b)),
    ("torch.bmm", ((2, 5, 7), (2, 7, 3)), torch.bmm),
    ("Tensor.bmm", ((2, 5, 7), (2, 7, 3)), lambda a, b: a.bmm(b)),
    ("torch.mv", ((5, 7), (7,)), torch.mv),
    ("Tensor.mv", ((5, 7), (7,)), lambda a, b: a.mv(vec=b)),
    ("torch.dot", ((7,), (7,)), torch.dot),
    ("Tensor.dot", ((7,), (7,)), lambda a, b: a.dot(b)),
    ("torch.vdot", ((7,), (7,)), torch.vdot),
    ("torch.inner", ((5, 7), (3, 7)), torch.inner),
    ("torch.inner", ((7,), (7,)), torch.inner),
    ("torch.inner", ((2, 5, 7), (4, 3, 7)), torch.inner),
    ("torch.inner", ((5, 0), (2, 3, 0)), torch.inner),
    ("torch.inner", ((5, 0), (0, 3, 0)), torch.inner),
    ("Tensor.inner", ((5, 7), (7,)), lambda a, b: a.inner(b)),
    ("torch.addmm", ((3,), (5, 7), (7, 3)), torch.addmm),
    ("Tensor.addmm", ((5, 3), (5, 7), (7, 3)), lambda i, a, b: i.addmm(a, b, beta=0)),
    ("torch.addmv", ((5,), (5, 7), (7,)), lambda i, a, b: torch.addmv(i, a, b, beta=0)),
    ("torch.addbmm", ((3,), (2, 5, 7), (2, 7, 3)), torch.addbmm),
    ("Tensor.addbmm", ((3,), (2, 5, 7), (2, 7, 3)), lambda i, a, b: i.addbmm(a, b, beta=0)),
    ("Tensor.baddbmm", ((3,), (2, 5, 7), (2, 7, 3)), lambda i, a, b: i.baddbmm(a, b, beta=0)),
    ("torch.einsum", ((5, 7), (7, 3)), lambda a, b: torch.einsum("ij,jk->ki", a, b)),
    ("torch.einsum", ((5, 7), (7, 3)), lambda a, b: torch.einsum("ij,jk", [a, b])),
    ("torch.einsum", ((5, 7), (7, 3)), lambda a, b: torch.einsum(a, [0, 1], b, [1, 2], [0, 2])),
    ("torch.nn.functional.linear", ((5, 7), (3, 7)), F.linear),
    ("torch.nn.functional.linear", ((2, 5, 7), (3, 7), (3,)), F.linear),
    ("torch.nn.functional.linear", ((7,), (3, 7)), lambda a, w: F.linear(a, weight=w)),
    # A product that was rounded before the factor or the sum would give other numbers.
    ("torch.addmm", ((5, 3), (5, 7), (7, 3)), lambda i, a, b: torch.addmm(i, a, b, beta=2)),
    ("torch.addmm", ((1, 3), (5, 7), (7, 3)), lambda i, a, b: torch.addmm(i, a, b, alpha=0.5)),
    ("torch.addmm", ((), (5, 7), (7, 3)), lambda i, a, b: torch.addmm(i, mat1=a, mat2=b)),
    ("Tensor.addmm", ((5, 1), (5, 7), (7, 3)), lambda i, a, b: i.addmm(a, b, beta=-1, alpha=3)),
    ("torch.addmv", ((5,), (5, 7), (7,)), torch.addmv),
    ("Tensor.addmv", ((1,), (5, 7), (7,)), lambda i, a, b: i.addmv(a, b, alpha=2, beta=3)),
    ("torch.addbmm", ((5, 3), (2, 5, 7), (2, 7, 3)), torch.addbmm),
    ("torch.baddbmm", ((2, 5, 3), (2, 5, 7), (2, 7, 3)), torch.baddbmm),
    ("Tensor.baddbmm", ((3,), (2, 5, 7), (2, 7, 3)), lambda i, a, b: i.baddbmm(a, b, alpha=2)),
]


def name_of(case: tuple) -> str:
    return f"{case[0]}-{'-'.join('x'.join(map(str, shape)) for shape in case[1])}"


def result_or_error(call):
    """The result, or the type of the error: calls that PyTorch refuses must raise the same type."""
    try:
        return call()
    except (TypeError, ValueError, RuntimeError) as error:
        return type(error).__name__
