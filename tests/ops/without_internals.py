"""A child of test_internals.py: removes each private name of torch, and shows the lost feature.

    python without_internals.py          prints "<name>: ok", or what went wrong, a line a name

torch is imported once; each name has a fork of its own, which imports torch_cubin without it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import pkgutil
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.autograd.forward_ad as forward_ad
import torch.utils.checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

A, B = torch.randn(3, 4), torch.randn(4, 5)


def message(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def refused(call: Callable[[], object], name: str) -> None:
    text = message(call)
    assert "torch_cubin [internal]" in text, text
    assert name in text, text


def derivatives(name: str) -> None:
    ops = torch.ops.cubin
    leaf = A.clone().requires_grad_()
    query = torch.randn(1, 2, 4, 8)
    refused(lambda: ops.matmul(leaf, B), name)
    refused(lambda: ops.linear(leaf, B.T), name)
    refused(lambda: ops.scaled_dot_product_attention(query.requires_grad_(), query, query), name)
    torch.testing.assert_close(ops.matmul(leaf.detach(), B), A @ B)
    with torch.no_grad():
        torch.testing.assert_close(ops.matmul(leaf, B), A @ B)
    if not name.endswith("_current_level"):  # the counter, which unpack_dual itself needs
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(A, A)
            refused(lambda: ops.matmul(dual, B), name)
    assert message(lambda: torch.func.grad(lambda a: ops.matmul(a, B).sum())(A)) != "no error"


def checkpointing(name: str) -> None:
    def region(x: torch.Tensor) -> torch.Tensor:
        # Nothing after the product saves, so recomputation stops inside it.
        return torch.ops.cubin.matmul(x, B).sum()

    leaf = A.clone().requires_grad_()
    out = torch.utils.checkpoint.checkpoint(region, leaf, use_reentrant=False)
    assert "RuntimeError" in message(out.backward)


def selective_checkpointing(name: str) -> None:
    import torch_cubin

    ends = torch.tensor([1, 3], dtype=torch.int32)
    bias = torch.randn(2, 6, requires_grad=True)

    def region(bias: torch.Tensor) -> torch.Tensor:
        mats = A, torch.randn(2, 4, 6)
        return torch.ops.cubin.grouped_matmul(*mats, offs=ends, bias=bias, activation="silu")

    saved = torch_cubin.checkpoint_ops(torch.ops.cubin.grouped_matmul)
    contexts = functools.partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, saved)
    out = torch.utils.checkpoint.checkpoint(region, bias, use_reentrant=False, context_fn=contexts)
    assert "RuntimeError" in message(out.sum().backward)


def vmap_of_attention(name: str) -> None:
    sdpa = torch.ops.cubin.scaled_dot_product_attention
    query = torch.randn(3, 2, 4, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own, of a batching rule that is missing
        got = torch.vmap(sdpa)(query, query, query)
    torch.testing.assert_close(got, torch.stack([sdpa(q, q, q) for q in query]))


def gradient_copies(name: str) -> None:
    import declared

    op = declared.cube(backward=declared.cube_backward().name)
    leaf = torch.randn(6, 4).requires_grad_()
    op(leaf).backward(torch.ones(6, 4))  # as ever
    torch.testing.assert_close(leaf.grad, 3 * leaf.detach() ** 2)
    from torch_cubin._declared.backward_op import ALIGN, _without_gaps

    odd = torch.ones(ALIGN)[1:]  # not at a multiple of 16 bytes
    assert _without_gaps(odd).data_ptr() % ALIGN != 0


def backward_of_declared_ops(name: str) -> None:
    import declared

    other = declared.cube_backward().name
    refused(lambda: declared.cube(backward=other), name)
    torch.testing.assert_close(declared.cube()(A), A**3)


def autocast(name: str) -> None:
    for key in ("AutocastCPU", "AutocastCUDA"):
        assert not torch._C._dispatch_has_kernel_for_dispatch_key("cubin::matmul", key)
    leaf = torch.randn(1, 2, 4, 8, requires_grad=True)
    torch.ops.cubin.scaled_dot_product_attention(leaf, leaf, leaf).sum().backward()
    assert leaf.grad is not None


def schemas(name: str) -> None:
    import declared

    refused(declared.cube, name)


def late_overloads(name: str) -> None:
    import declared

    declared.cube(schema="late::cube(Tensor x) -> Tensor")
    assert torch.ops.late.cube is not None
    declared.cube(schema="late::cube.again(Tensor x) -> Tensor")
    assert "again" not in torch.ops.late.cube.overloads()
    torch.testing.assert_close(torch.ops.late.cube.again(A), A**3)


def late_derivatives(name: str) -> None:
    import declared

    op = declared.cube_with_formula()  # eager calls know it all the same
    leaf = A.clone().requires_grad_()
    op(leaf).sum().backward()
    torch.testing.assert_close(leaf.grad, 3 * A**2)


def failed_definitions(name: str) -> None:
    import declared

    from torch_cubin._declared import op

    def fails(*args: object) -> None:
        raise ZeroDivisionError

    op.Op._redefine = fails
    assert message(declared.cube).startswith("ZeroDivisionError")


def symbolic_checks(name: str) -> None:
    from torch_cubin import errors
    from torch_cubin._pytorch import operators

    error = errors.make("input", "differ")
    operators.check(torch.tensor(True), error)
    assert message(lambda: operators.check(torch.tensor(False), error)) == "InputError: differ"


def declined(call: Callable[[], object]) -> list[tuple[str, str, int]]:
    import torch_cubin

    with torch_cubin.drop_in():
        call()
        return [(row.function, row.reason, row.calls) for row in torch_cubin.report().declined]


def tracing(name: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

    if name.endswith(".FakeTensor"):
        with FakeTensorMode() as mode:
            a, b = mode.from_tensor(A), mode.from_tensor(B)
            assert declined(lambda: a @ b)[0][1] == "tensor subclass FakeTensor"
    else:
        with FunctionalTensorMode():
            a, b = FunctionalTensor.to_functional(A), FunctionalTensor.to_functional(B)
            assert declined(lambda: a @ b)[0][1] == "tensor subclass FunctionalTensor"


def skipped_frames(name: str) -> None:
    assert declined(lambda: A @ B) == []


def checkpoints(name: str) -> None:
    import torch_cubin

    leaf = A.clone().requires_grad_()
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch_cubin.drop_in():
        out = leaf @ B  # no hooks here, and yet a tensor more
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            leaf @ B
    out.sum().backward()
    torch.testing.assert_close(leaf.grad, torch.ones(3, 5) @ B.T)
    assert any(tensor.numel() == 0 for tensor in saved)


def nested(name: str) -> None:
    import torch_cubin

    def inner() -> None:
        with torch_cubin.drop_in():
            torch.tensordot(A, B, 1)

    assert [row[2] for row in declined(inner)] == [2]


def fast_paths(name: str) -> None:
    import torch_cubin

    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(2, 3, 8)
    with torch.no_grad(), torch_cubin.drop_in():
        inside = layer(x)
    with torch.no_grad():
        torch.testing.assert_close(inside, layer(x))


def quick_fakes(name: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        a, b = mode.from_tensor(A), mode.from_tensor(B)
        assert torch.ops.cubin._matmul(a, b).shape == (3, 5)


def schema_objects(name: str) -> None:
    import declared

    op = declared.cube(backward=declared.cube_backward().name)
    refused(lambda: op(A.clone().requires_grad_()).sum().backward(), name)
    text = message(lambda: torch.ops.cubin.matmul(A.to_sparse(), B))
    assert "torch_cubin [input]" in text, text
    assert "argument '0'" in text, text


def fused_layers(name: str) -> None:
    from torch_cubin._drop_in.served import SERVED

    assert name not in {shown for shown, _ in SERVED.values()}


def layout(name: str) -> None:
    from torch_cubin._native import launcher
    from torch_cubin._pytorch import tensors

    assert tensors.tensor_offset() is None
    assert tensors.exchange_function() is not None
    assert launcher.Launcher is not launcher.PlainLauncher


def recorded(name: str) -> None:
    from torch_cubin._pytorch import recording

    assert recording.recorder() == ""


def fast_recording(name: str) -> None:
    from torch_cubin._native.launcher import Launcher, PlainLauncher
    from torch_cubin._pytorch import recording

    assert recording.is_included() is None
    assert Launcher is PlainLauncher


def tensor_types(name: str) -> None:
    emptied = A.clone()
    emptied.untyped_storage().resize_(0)
    text = message(lambda: torch.ops.cubin.matmul(emptied, B))
    assert "[input]: matmul argument 1 has elements but no memory" in text, text
    assert "got a tensor." in text, text


def sums(name: str) -> None:
    import torch_cubin
    from torch_cubin._drop_in import aten_kernels

    expected = torch.addmm(B[0], A, B)
    aten_kernels.register("CPU")
    assert not aten_kernels.serves_sums()
    with torch_cubin.install(policy="all"):
        torch.testing.assert_close(torch.addmm(B[0], A, B), expected)
        torch.mm(A, B)
        assert [row.function for row in torch_cubin.report().served] == ["aten::mm"]


def overrides(name: str) -> None:
    from torch_cubin._pytorch import aten_kernels

    assert aten_kernels.registered_at("mm", "CPU") == ""


def thread_objects(name: str) -> None:
    from torch_cubin._pytorch import thread_objects

    thread_objects.leave("key")  # nothing


def sharded(name: str) -> None:
    from torch_cubin._pytorch import sharding

    assert name in sharding.SHARDING.missing
    torch.testing.assert_close(torch.ops.cubin.matmul(A, B), A @ B)


def compiled(name: str) -> None:
    from torch_cubin._pytorch import inductor

    assert name in inductor.INDUCTOR.missing
    assert torch.compile(torch.ops.cubin.matmul)(A, B).shape == (3, 5)


def audit(name: str) -> None:
    import torch_cubin

    refused(torch_cubin.audit, name)


def graphs_of_sums(name: str) -> None:
    import torch_cubin

    with torch_cubin.install(batch_invariant=True) as handle:
        assert handle.batch_invariant


def muon(name: str) -> None:
    import torch_cubin

    weight = torch.nn.Parameter(torch.zeros(16, 16))
    weight.grad = torch.randn(16, 16)
    optimizer = torch.optim.Muon([weight])
    with torch_cubin.drop_in():
        optimizer.step()
        ran = [row.op for row in torch_cubin.report().ran]
    assert torch.isfinite(weight).all()
    assert weight.abs().sum() > 0
    assert not any("symm_square" in op for op in ran), ran


def written_layers(name: str) -> None:
    from torch_cubin._pytorch.modules import is_product

    assert not is_product(torch.nn.Linear(4, 4, bias=False))


COST: dict[str, Callable[[str], None]] = {
    "derivatives of the built-in ops": derivatives,
    "activation checkpointing that stops its recomputation early": checkpointing,
    "selective checkpointing of regions that end with a composed op": selective_checkpointing,
    "vmap of attention in one call": vmap_of_attention,
    'copies of incoming gradients for backward="ns::op"': gradient_copies,
    "define_op(backward=...) and register_autograd()": backward_of_declared_ops,
    "torch.autocast of the built-in ops": autocast,
    "define_op() and packages": schemas,
    "overloads of an op that was looked up before they were defined": late_overloads,
    "a derivative that is given to an op after torch.compile has traced it": late_derivatives,
    "taking back what a failed define_op() has registered": failed_definitions,
    "sizes compared at run time in exported graphs": symbolic_checks,
    "registration of fakes without looking up source lines": quick_fakes,
    "drop_in() under torch.export and torch.compile": tracing,
    "drop_in() around a graph break of torch.compile": skipped_frames,
    "drop_in() beside activation checkpointing": checkpoints,
    "report() of a drop_in() inside another": nested,
    "report() of layers that PyTorch fuses": fused_layers,
    "PyTorch's fused attention layers inside drop_in()": fast_paths,
    'define_op(backward="ns::op"), and names of arguments in errors': schema_objects,
    "tensors read in place by kernel calls": layout,
    "launches of kernels inside traces": recorded,
    "kernel calls through the extension module": fast_recording,
    "types of tensors without memory in the library's errors": tensor_types,
    "install() of addmm, baddbmm and addmv (nn.Linear with a bias)": sums,
    "doctor's check of kernels that stand over ours": overrides,
    "drop_in() around backward() on a GPU": thread_objects,
    "audit()": audit,
    "install(batch_invariant=True) for the sums that torch.compile generates": graphs_of_sums,
    "our ops of DTensors": sharded,
    "lowerings and the fold pass of torch.compile": compiled,
    "layers that models write out": written_layers,
    "torch.optim.Muon's symmetric products at half the work": muon,
}


def features() -> list:
    from torch_cubin import _pytorch
    from torch_cubin._pytorch.internals import FEATURES

    for module in pkgutil.iter_modules(_pytorch.__path__):
        importlib.import_module(f"torch_cubin._pytorch.{module.name}")
    return FEATURES


def in_a_fork(work: Callable[[], str]) -> str:
    """What `work` returns in a fork of this process, or its traceback."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = work()
        except BaseException:
            answer = traceback.format_exc()
        with contextlib.suppress(BrokenPipeError):
            os.write(write, answer.encode()[:60000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answers:
        answer = answers.read()
    os.waitpid(child, 0)
    return answer


def without(name: str) -> str:
    os.environ["TORCH_CUBIN_TEST_MISSING"] = name
    import torch_cubin

    with torch.no_grad():  # whatever is missing, this is not
        torch.testing.assert_close(torch.ops.cubin.matmul(A, B), A @ B)
    assert torch_cubin.Error is not None
    lost = [feature for feature in features() if not feature.available]
    assert lost, "nothing lost"
    for feature in lost:
        assert feature.missing == [name], feature
        COST[feature.name](name)
    return "ok"


def symbols() -> dict[str, bool | None]:
    """The symbols of PyTorch's libraries that the library looks up, and whether they were found."""
    from torch_cubin._native import library

    return {symbol["name"]: symbol["found"] for symbol in library.pytorch_symbols()}


def without_symbol(name: str, absent: list[str]) -> str:
    """`absent`: those that this PyTorch does not have anyway."""
    os.environ["TORCH_CUBIN_TEST_MISSING"] = name
    import torch_cubin

    torch.testing.assert_close(torch.ops.cubin.matmul(A, B), A @ B)
    assert torch_cubin.Error is not None
    lost = [other for other, found in symbols().items() if found is False]
    assert sorted(lost) == sorted([name, *absent])
    return "ok"


def main() -> None:
    torch.set_num_threads(1)  # threads do not live on in a fork
    torch.testing.assert_close(A, A)  # its first use imports for seconds: once for all forks
    gc.freeze()  # the forks' collections would visit all that was made so far
    names = in_a_fork(
        lambda: "\n".join({name: None for feature in features() for name in feature.names})
    )
    found, absent = (
        in_a_fork(
            lambda state=state: "\n".join(name for name, x in symbols().items() if x is state)
        ).split()
        for state in (True, False)
    )
    for name in found:
        print(f"{name}: {in_a_fork(lambda name=name: without_symbol(name, absent))}", flush=True)
    for name in names.split("\n"):
        print(f"{name}: {in_a_fork(lambda name=name: without(name))}", flush=True)


if __name__ == "__main__":
    main()
