"""install(tensor_parallel=N) on a mesh of one rank: the products that it cuts, their order, and
those that it refuses. sharding_worker.py compares one, two and four ranks."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_cubin
from torch_cubin import errors
from torch_cubin._drop_in import aten_kernels, tensor_parallel

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="this PyTorch has no gloo"
)


@pytest.fixture(scope="module")
def mesh():
    from torch.distributed.device_mesh import init_device_mesh

    aten_kernels.register("CPU")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def installed(parts: int = 4) -> torch_cubin.Installation:
    return torch_cubin.install(batch_invariant=True, tensor_parallel=parts)


def shards(mesh, *given):
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    placements = {"R": Replicate(), "P": Partial(), 0: Shard(0), 1: Shard(1), 2: Shard(2)}
    return [
        x if where is None else distribute_tensor(x, mesh, [placements[where]])
        for x, where in given
    ]


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def in_order(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product as the reference adds it. PyTorch's own order depends on the processor."""
    total = a.new_zeros(())
    for k in range(a.shape[-1]):
        total = total + a[..., k, None] * b[..., k, None, :]
    return total


def by_tree(a: torch.Tensor, b: torch.Tensor, parts: int) -> torch.Tensor:
    """The sum as documented, of products in float64 that are rounded to float32."""
    cuts = zip(a.double().chunk(parts, -1), b.double().chunk(parts, -2), strict=True)
    sums = [in_order(x, y).to(torch.float64 if a.dtype == torch.float64 else torch.float32)
            for x, y in cuts]  # fmt: skip
    while len(sums) > 1:
        pairs = [x + y for x, y in zip(sums[::2], sums[1::2], strict=False)]
        sums = [*pairs, *sums[len(pairs) * 2 :]]
    return sums[0]


CALLS = [
    (torch.mm, [((5, 24), 1), ((24, 7), 0)]),
    (torch.mm, [((5, 24), "R"), ((24, 7), 0)]),  # one operand says what ranks share
    (torch.mm, [((5, 24), 1), ((24, 7), "R")]),
    (torch.bmm, [((2, 5, 24), 2), ((2, 24, 7), 1)]),
    (torch.mv, [((5, 24), 1), ((24,), 0)]),
    (torch.dot, [((24,), 0), ((24,), 0)]),
]


WHOLE = [  # functions that DTensor sees whole in inference mode
    (torch.nn.functional.linear, [((5, 24), 1), ((7, 24), 1)]),
    (torch.matmul, [((5, 24), 1), ((24, 7), 0)]),
    (torch.inner, [((5, 24), 1), ((7, 24), 1)]),
    (lambda a, b: torch.tensordot(a, b, 1), [((5, 24), 1), ((24, 7), 0)]),
    (lambda a, b: torch.einsum("mk,kn->mn", a, b), [((5, 24), 1), ((24, 7), 0)]),
    (lambda a, b: torch.linalg.multi_dot([a, b]), [((5, 24), 1), ((24, 7), 0)]),
]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_functions_of_products_are_cut_too(mesh, mode) -> None:
    for call, operands in WHOLE:
        plain = [draw(*shape) for shape, _ in operands]
        with mode(), installed(4):
            given = shards(mesh, *zip(plain, [where for _, where in operands], strict=True))
            out = call(*given)
        assert out.placements[0].is_replicate(), call
        b = plain[1] if plain[1].shape[0] == 24 else plain[1].t()
        assert torch.equal(out.to_local(), by_tree(plain[0], b, 4)), call
    with torch.inference_mode(), installed(4):
        a, b = shards(mesh, (draw(5, 24), 1), (draw(24, 7), 0))
        with pytest.raises(RuntimeError, match=r"\[input\].*cannot sum"):
            torch.ops.cubin.matmul(a, b)
        with pytest.raises(RuntimeError, match=r"\[input\].*cannot sum"):
            torch.ops.cubin.linear(a, b.t())
        torch.mm(a, b)


def test_outputs_that_are_given_get_the_placements(mesh) -> None:
    with installed(4):
        a, b, out = shards(mesh, (draw(8, 24), 0), (draw(24, 6), "R"), (draw(8, 6), 0))
        assert torch.mm(a, b, out=out) is out
        assert torch.equal(out.full_tensor(), draw(8, 24) @ draw(24, 6))
        torch.mm(*shards(mesh, (draw(8, 24), 1), (draw(24, 6), 0)))


def test_an_install_inside_leaves_the_count(mesh, recwarn) -> None:
    with installed(4):
        torch.mm(*shards(mesh, (draw(5, 24), 1), (draw(24, 7), 0)))
        with torch_cubin.install():
            pass
    assert not [each for each in recwarn if "cut no product" in str(each.message)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_parts_are_summed_by_the_tree(mesh, dtype) -> None:
    for call, operands in CALLS:
        plain = [draw(*shape, dtype=dtype) for shape, _ in operands]
        given = shards(mesh, *zip(plain, [where for _, where in operands], strict=True))
        a, b = plain[0], plain[1] if plain[1].dim() > 1 else plain[1].unsqueeze(1)
        for parts in (1, 2, 3, 4, 6):
            with installed(parts):
                out = call(*given)
            assert out.placements[0].is_replicate()
            wanted = by_tree(a, b, parts).to(dtype).reshape(out.shape)
            assert torch.equal(out.to_local(), wanted), (call, parts, dtype)
    a, b, c = draw(5, 24, dtype=dtype), draw(24, 7, dtype=dtype), draw(7, dtype=dtype)
    with installed(4):
        out = torch.addmm(*shards(mesh, (c, "R"), (a, 1), (b, 0)), beta=0.5, alpha=2)
        nothing = torch.addmm(*shards(mesh, (c * torch.nan, "R"), (a, 1), (b, 0)), beta=0)
        empty = torch.mm(*shards(mesh, (a[:, :0], 1), (b[:0], 0)))
    total = by_tree(a, b, 4)
    assert torch.equal(out.to_local(), (total * 2 + c.to(total.dtype) * 0.5).to(dtype))
    assert torch.equal(nothing.to_local(), total.to(dtype))
    assert torch.equal(empty.to_local(), torch.zeros(5, 7, dtype=dtype))


def test_sums_of_columns_do_not_depend_on_their_number(mesh) -> None:
    """Gradients of biases; uneven shards, too."""
    x = draw(3, 50, 30)
    with installed(4) as handle:
        (columns,) = shards(mesh, (x.flatten(0, 1), 1))
        whole = columns.sum(0).to_local()
        torch.testing.assert_close(whole, x.sum((0, 1)))
        for first, last in ((0, 7), (7, 30), (29, 30)):
            (part,) = shards(mesh, (x[..., first:last].contiguous(), 2))
            for keepdim in (False, True):
                out = part.sum((0, 1), keepdim=keepdim)
                assert out.placements[0].is_shard(2 if keepdim else 0)
                assert out.shape == x[..., first:last].sum((0, 1), keepdim=keepdim).shape
                assert torch.equal(out.to_local().flatten(), whole[first:last])
        (rows,) = shards(mesh, (x, 0))
        assert rows.sum(0).placements[0].is_partial()  # PyTorch's
        with pytest.warns(RuntimeWarning, match="cut no product"):
            handle.remove()


def _scaled(a, b):
    from torch.distributed.tensor import DTensor, distribute_tensor

    own = [x.full_tensor().to(torch.float8_e4m3fn) for x in (a, b.t())]
    a, b = (DTensor.from_local(x, of.device_mesh, of.placements)
            for x, of in ((own[0], a), (own[1].t(), b)))  # fmt: skip
    scales = [distribute_tensor(torch.ones(()), a.device_mesh) for _ in range(2)]
    return torch._scaled_mm(a, b, *scales, out_dtype=torch.bfloat16)


def _of_one_group(a, b):
    from torch.distributed.tensor import distribute_tensor

    ends = torch.tensor([len(a)], dtype=torch.int32)
    return torch._grouped_mm(
        a.bfloat16(), b.bfloat16().unsqueeze(0), offs=distribute_tensor(ends, a.device_mesh)
    )


REFUSED = [
    ([(5, 22), (22, 7)], [1, 0], torch.mm, "equal parts"),
    ([(5, 3), (3, 7)], [1, 0], torch.mm, "equal parts"),  # fewer than parts
    ([(5, 24), (24, 7)], ["P", "R"], torch.mm, "sum over ranks"),
    ([(5, 24), (24, 7)], [1, 0], lambda a, b: torch.ops.cubin.matmul(a, b), "cannot sum"),
    ([(5, 24), (7, 24)], [1, 1], lambda a, b: torch.ops.cubin.linear(a, b), "cannot sum"),
    ([(24,), (24,)], [0, 0], torch.vdot, "cannot sum"),
    ([(16, 32), (32, 16)], [1, 0], _scaled, "cannot sum"),
    ([(8, 32), (32, 16)], [1, 0], _of_one_group, "cannot sum"),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[3])
def test_other_sums_over_ranks_are_refused(mesh, case) -> None:
    shapes, placements, call, said = case
    given = shards(mesh, *zip([draw(*shape) for shape in shapes], placements, strict=True))
    call(*given)  # PyTorch's, without it
    with warnings.catch_warnings(), installed(4):
        warnings.simplefilter("ignore", RuntimeWarning)
        with pytest.raises(RuntimeError, match=rf"\[input\].*{said}"):
            call(*given)
    call(*given)


def test_a_mesh_of_two_dims_and_mixed_operands_are_refused(mesh) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    two = init_device_mesh("cpu", (1, 1))
    a = distribute_tensor(draw(5, 24), two, [Replicate(), Shard(1)])
    b = distribute_tensor(draw(24, 7), two, [Replicate(), Shard(0)])
    with installed(4) as handle:
        with pytest.raises(errors.ModeError, match="a mesh of one dim"):
            a @ b
        with pytest.raises(errors.ModeError, match="mixes"):
            torch.mm(*shards(mesh, (draw(5, 24), 1)), draw(24, 7))
        columns = torch.mm(*shards(mesh, (draw(5, 24), "R"), (draw(24, 7), 1)))  # nothing shared
        assert columns.placements[0].is_shard(1)
        integers = torch.mm(*shards(mesh, (draw(5, 24).int(), 1), (draw(24, 7).int(), 0)))
        assert integers.placements[0].is_partial()  # exact in any order
        assert "tensor_parallel=4" in repr(handle)
        with pytest.warns(RuntimeWarning, match="cut no product"):
            handle.remove()
        handle.remove()


@pytest.mark.parametrize("parts", [0, -1, 2.0, True, "4"])
def test_wrong_settings(parts) -> None:
    with pytest.raises(errors.InputError, match="tensor_parallel"):
        torch_cubin.install(batch_invariant=True, tensor_parallel=parts)
    with pytest.raises(errors.InputError, match="batch_invariant=True"):
        torch_cubin.install(tensor_parallel=4)


def test_compiled_models_follow_the_setting(mesh) -> None:
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = parallelize_module(nn.Linear(32, 24), mesh, RowwiseParallel())
    compiled = torch.compile(layer, backend="aot_eager")
    x = draw(3, 32)
    with torch_cubin.install(batch_invariant=True):
        whole = compiled(x)
        with installed(4):  # compiled anew, though nothing that Dynamo guards has changed
            cut = compiled(x)
            assert torch.equal(cut, layer(x))
            assert tensor_parallel.parts_of_graphs() == 4
        assert torch.equal(layer(x), whole)
    assert not torch.equal(cut, whole)


def test_audit_sees_the_ops_of_a_dtensor(mesh) -> None:
    a, b = shards(mesh, (draw(5, 24), 1), (draw(24, 7), 0))
    with installed(4), torch_cubin.audit(strict=True) as found:
        torch.mm(a, b)
    assert "cubin::_matmul" in {row.op for row in found.rows}
    with torch_cubin.audit() as found:
        dist.all_reduce(draw(3))
        dist.all_reduce(draw(3), op=dist.ReduceOp.MAX)
        dist.broadcast(draw(3), 0)
    kinds = {row.op: row.kind for row in found.rows}
    assert kinds["c10d::broadcast_"] == "batch-invariant"
    assert kinds["c10d::allreduce_"] == "deterministic"
    assert not found.batch_invariant


def test_sums_over_wrong_dims_are_refused_by_pytorch(mesh) -> None:
    (x,) = shards(mesh, (draw(4, 6), 1))
    (scalar,) = shards(mesh, (draw(), "R"))
    with installed():
        for dims in (2, -3, (0, 0)):
            with pytest.raises((IndexError, RuntimeError)):
                x.sum(dims)
        assert scalar.sum(0).full_tensor() == scalar.full_tensor()
        assert x.sum(0).placements[0].is_shard(0)


def test_a_torch_without_the_handlers_refuses_it(mesh, monkeypatch) -> None:
    from torch_cubin._pytorch import sharding

    monkeypatch.setattr(sharding, "_NEEDED", ("a_name_that_is_gone",))
    monkeypatch.setattr(sharding.HANDLERS, "names", {})
    with pytest.raises(errors.Error, match=r"\[internal\].*tensor_parallel.*that_is_gone"):
        installed(4)
    assert tensor_parallel.parts_of_graphs() is None
    a, b = shards(mesh, (draw(5, 24), 1), (draw(24, 7), 0))
    assert torch.mm(a, b).placements[0].is_partial()  # PyTorch's
