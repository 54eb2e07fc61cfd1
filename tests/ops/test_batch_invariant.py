"""torch_cubin.batch_invariant(): the switch, and the CPU reference, whose rows obey it."""

from __future__ import annotations

import threading

import pytest
import torch
from in_threads import in_threads

import torch_cubin
from torch_cubin._ops.batch_invariant import is_batch_invariant

matmul, linear = torch.ops.cubin.matmul, torch.ops.cubin.linear


def operands(dtype: torch.dtype, m: int = 96, n: int = 65, k: int = 257):
    generator = torch.Generator().manual_seed(0)
    sizes = ((m, k), (n, k), (n,))
    return [torch.randn(size, generator=generator, dtype=dtype) for size in sizes]


def depends_on_other_rows(x, weight, bias) -> bool:
    full = linear(x, weight, bias)
    parts = ((0, 1), (5, 1), (7, 3), (64, 32))
    return not all(
        torch.equal(linear(x[i : i + n], weight, bias), full[i : i + n]) for i, n in parts
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_reference_is_batch_invariant(dtype: torch.dtype) -> None:
    x, weight, bias = operands(dtype)
    assert depends_on_other_rows(x, weight, bias), "the switch has nothing to show here"
    with torch_cubin.batch_invariant():
        assert not depends_on_other_rows(x, weight, bias)
        full = matmul(x, weight.t())
        for i in (0, 50, 95):
            assert torch.equal(matmul(x[i], weight.t()), full[i])
        batches = x.view(4, 24, 257)
        for i in range(4):
            assert torch.equal(matmul(batches, weight.t())[i], matmul(batches[i], weight.t()))
    torch.testing.assert_close(full, x @ weight.t(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_activations_are_batch_invariant(dtype: torch.dtype, activation: str) -> None:
    """Widths are not multiples of a vector: the last elements of a tensor are special."""
    for n in (1, 13, 41):
        x, weight, bias = operands(dtype, m=50, n=n, k=9)
        with torch_cubin.batch_invariant():
            full = linear(x, weight, bias, activation=activation)
            for i in range(50):
                row = linear(x[i], weight, bias, activation=activation)
                assert torch.equal(row, full[i]), (n, i)
        plain = linear(x, weight, bias, activation=activation)
        assert full.shape == plain.shape
        torch.testing.assert_close(full, plain)


SHAPES = [
    ((3, 4), (4, 5)), ((4,), (4, 5)), ((3, 4), (4,)), ((4,), (4,)), ((2, 3, 4), (4, 5)),
    ((2, 3, 4), (2, 4, 5)), ((2, 1, 3, 4), (6, 4, 5)), ((4,), (2, 4, 5)), ((2, 3, 4), (4,)),
    ((0, 4), (4, 5)), ((3, 0), (0, 5)), ((2, 0, 3), (3, 4)),
]  # fmt: skip


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_shapes_are_those_of_matmul(shapes) -> None:
    a, b = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    with torch_cubin.batch_invariant():
        out = matmul(a, b)
    torch.testing.assert_close(out, torch.matmul(a, b))
    assert out.is_contiguous()


@pytest.mark.parametrize("shape", [(3, 4), (4,), (2, 3, 4), (0, 4)], ids=str)
@pytest.mark.parametrize("weight", [(5, 4), (4,)], ids=str)
def test_shapes_are_those_of_linear(shape, weight) -> None:
    x, w = torch.randn(shape, dtype=torch.float64), torch.randn(weight, dtype=torch.float64)
    with torch_cubin.batch_invariant():
        out = linear(x, w)
        biased = linear(x, w, torch.ones((), dtype=torch.float64))
    torch.testing.assert_close(out, torch.nn.functional.linear(x, w))
    torch.testing.assert_close(biased, out + 1)


def test_the_mode_nests_and_is_restored_after_an_error() -> None:
    assert not is_batch_invariant()
    with torch_cubin.batch_invariant():
        with torch_cubin.batch_invariant(False):
            assert not is_batch_invariant()
        assert is_batch_invariant()
        again = torch_cubin.batch_invariant()
        with again, again:
            pass
        assert is_batch_invariant()
    with pytest.raises(ZeroDivisionError), torch_cubin.batch_invariant():
        raise ZeroDivisionError
    assert not is_batch_invariant()


def test_the_decorator_supports_several_threads() -> None:
    barrier = threading.Barrier(2)

    @torch_cubin.batch_invariant()
    def inside() -> bool:
        barrier.wait()
        return is_batch_invariant()

    seen: list[bool] = []

    def work() -> None:
        seen.extend((is_batch_invariant(), inside(), is_batch_invariant()))

    in_threads(work, [()] * 2)
    assert sorted(seen) == [False] * 4 + [True] * 2


def test_backward_is_as_the_forward_was() -> None:
    """Called outside, and in another thread, as autograd does for GPUs."""
    x, weight, _ = operands(torch.float32)
    grads = []
    for rows in (96, 1):
        part = x[:rows].clone().requires_grad_()
        with torch_cubin.batch_invariant():
            out = linear(part, weight).sum() + matmul(part, weight.t()).sum()
        thread = threading.Thread(target=out.backward)
        thread.start()
        thread.join()
        grads.append(part.grad)
    assert torch.equal(grads[1], grads[0][:1])


@pytest.mark.parametrize("first_inside", [False, True])
def test_compiled_code_follows_the_mode_of_its_call(first_inside: bool) -> None:
    torch._dynamo.reset()
    x, weight, bias = operands(torch.float32)
    with torch_cubin.batch_invariant():
        inside = linear(x, weight, bias)
    outside = linear(x, weight, bias)
    assert not torch.equal(inside, outside), "the switch has nothing to show here"
    compiled = torch.compile(lambda x, w, b: linear(x, w, b), backend="aot_eager", fullgraph=True)
    for is_inside in (first_inside, not first_inside, first_inside):
        with torch_cubin.batch_invariant(is_inside):
            assert torch.equal(compiled(x, weight, bias), inside if is_inside else outside)


@pytest.mark.filterwarnings("error")
def test_the_mode_applies_inside_a_compiled_function() -> None:
    torch._dynamo.reset()
    x, weight, bias = operands(torch.float32)
    with torch_cubin.batch_invariant():
        inside = linear(x, weight, bias) + 1
    outside = linear(x, weight, bias) + 1

    @torch.compile(backend="aot_eager")
    def both(x, w, b):
        with torch_cubin.batch_invariant():
            first = linear(x, w, b) + 1
        return first, linear(x, w, b) + 1

    for _ in range(2):
        first, second = both(x, weight, bias)
        assert torch.equal(first, inside)
        assert torch.equal(second, outside)


def test_drop_in_is_batch_invariant() -> None:
    x, weight, bias = operands(torch.float32)
    with torch_cubin.batch_invariant():
        inside = linear(x, weight, bias)
        with torch_cubin.drop_in():
            assert torch.equal(torch.nn.functional.linear(x, weight, bias), inside)
    with torch_cubin.drop_in(), torch_cubin.batch_invariant():
        assert torch.equal(torch.nn.functional.linear(x, weight, bias), inside)
