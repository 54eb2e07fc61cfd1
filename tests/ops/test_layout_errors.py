"""Tensors that are not dense: a tagged error on every device, in every grad mode and when faked."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
from declared import vec_add
from torch._subclasses import FakeTensorMode

from torch_cubin import errors
from torch_cubin._ops import layouts

matmul = torch.ops.cubin.matmul
linear = torch.ops.cubin.linear


def nested(x: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor([x, x])


def jagged(x: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor([x, x], layout=torch.jagged)


def quantized(x: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_tensor(x, 1.0, 0, torch.qint8)


def per_channel(x: torch.Tensor) -> torch.Tensor:
    scales, zeros = torch.ones(2, device=x.device), torch.zeros(2, device=x.device)
    return torch.quantize_per_channel(x, scales, zeros, 0, torch.qint8)


# What makes it of a dense tensor, and how the error calls it.
KINDS = {
    "coo": (torch.Tensor.to_sparse, "torch.sparse_coo"),
    "csr": (torch.Tensor.to_sparse_csr, "torch.sparse_csr"),
    "csc": (torch.Tensor.to_sparse_csc, "torch.sparse_csc"),
    "bsr": (lambda x: x.to_sparse_bsr((1, 1)), "torch.sparse_bsr"),
    "mkldnn": (torch.Tensor.to_mkldnn, "torch._mkldnn"),
    "quantized": (quantized, "a quantized tensor"),
    "per_channel": (per_channel, "a quantized tensor"),
    "nested": (nested, "a nested tensor"),
    "jagged": (jagged, "a nested tensor"),
}
MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


@pytest.fixture(autouse=True)
def quiet():
    """PyTorch warns that these tensors are prototypes, or deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def make(kind: str, device: str) -> torch.Tensor:
    if kind == "mkldnn" and device != "cpu":
        pytest.skip("MKL-DNN tensors live on the CPU")
    return KINDS[kind][0](torch.ones(2, 2, device=device))


def refused(op, name: str, got: str, *args: torch.Tensor) -> None:
    with pytest.raises(RuntimeError) as caught:
        op(*args)
    text = str(caught.value)
    argument = f"{op._qualified_op_name.removeprefix('cubin::')} argument '{name}'"
    assert text.startswith(f"torch_cubin [input]: {argument} has an unsupported layout: "), text
    assert f"got {got}. " in text


@pytest.mark.fault_case(40)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_only_dense_tensors_are_taken(kind, mode, device) -> None:
    if (kind, mode) == ("jagged", "inference"):
        pytest.skip("a subclass that then answers for itself, before any kernel of ours")
    strange, dense = make(kind, device), torch.ones(2, 2, device=device)
    got = KINDS[kind][1]
    with MODES[mode]():
        refused(matmul, "self", got, strange, dense)
        refused(matmul, "other", got, dense, strange)
        refused(linear, "input", got, strange, dense)
        refused(linear, "weight", got, dense, strange)
        refused(linear, "bias", got, dense, dense, strange)


def test_a_sparse_tensor_with_a_gradient_is_refused(device) -> None:
    x = torch.ones(2, 2, device=device, requires_grad=True)
    refused(matmul, "self", "torch.sparse_coo", x.to_sparse(), x)


@pytest.mark.parametrize("autocast", [False, True])
def test_autocast_changes_nothing(autocast, device) -> None:
    x = torch.ones(2, 2, device=device)
    with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
        refused(matmul, "other", "torch.sparse_coo", x, x.to_sparse())


@pytest.mark.parametrize("mode", MODES)
def test_the_fake_refuses_alike(mode, device) -> None:
    sparse, dense = make("coo", device), torch.ones(2, 2, device=device)
    with FakeTensorMode() as fake, MODES[mode]():
        sparse, dense = fake.from_tensor(sparse), fake.from_tensor(dense)
        refused(matmul, "self", "torch.sparse_coo", sparse, dense)
        refused(linear, "bias", "torch.sparse_coo", dense, dense, sparse)


@pytest.mark.fault_case(40)
def test_a_sparse_meta_tensor_is_refused() -> None:
    dense = torch.ones(2, 2, device="meta")
    with contextlib.suppress(NotImplementedError):  # a torch that cannot make one
        sparse = torch.sparse_coo_tensor(size=(2, 2), device="meta")
        refused(matmul, "self", "torch.sparse_coo", sparse, dense)


def test_other_devices_have_no_kernel() -> None:
    """What a tensor of such a device reaches, which no PyTorch for CUDA can make."""
    dense, op = torch.ones(2, 2), torch.ops.cubin._matmul.default
    with pytest.raises(errors.InputError, match="matmul has no kernel for these tensors"):
        layouts._refusal("matmul", lambda: op)(dense, dense)
    assert torch._C._dispatch_has_computed_kernel_for_dispatch_key(op.name(), "XPU")


def test_compile_refuses_alike(device) -> None:
    torch._dynamo.reset()
    product = torch.compile(lambda a, b: matmul(a, b), backend="eager")
    dense = torch.ones(2, 2, device=device)
    with pytest.raises(RuntimeError, match=r"torch_cubin \[input\]: .*sparse_coo"):
        product(make("coo", device), dense)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_declared_ops_take_only_dense_tensors(kind, mode) -> None:
    if (kind, mode) == ("jagged", "inference"):
        pytest.skip("a subclass that then answers for itself, before any kernel of ours")
    op, strange, dense = vec_add(), make(kind, "cpu"), torch.ones(2, 2)
    for name, args in (("x", (strange, dense)), ("y", (dense, strange))):
        expected = rf"\[input\]: op '{op.name}' argument '{name}' has an unsupported layout: .*"
        with MODES[mode](), pytest.raises(errors.InputError, match=expected) as caught:
            op(*args)
        assert f"got {KINDS[kind][1]}. " in str(caught.value)
        with MODES[mode](), pytest.raises(RuntimeError, match=expected):
            op.overload(*args)
