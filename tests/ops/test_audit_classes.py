"""audit() against experiments on the CPU: no class claims more than rows alone and in a batch show.

tests/gpu/test_cuda_same_bits.py runs the same on a GPU.
"""

from __future__ import annotations

import pytest
import torch
from row_bits import MOVING, POINTWISE, arguments_of, differs, rows_of
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_cubin
from torch_cubin._drop_in.audit import DETERMINISTIC, INVARIANT, NEITHER, classify


def test_pointwise_operators() -> None:
    """Every overload that PyTorch tags so and whose arguments a schema says."""
    refuted, tried = set(), 0
    for op in POINTWISE:
        for args in arguments_of(op, "cpu"):
            tried += 1
            if differs(lambda *rows, op=op: op(*rows), args):
                refuted.add(op.name())
                assert classify(op, args, {}, False)[0] != INVARIANT, op
    assert tried > 500
    assert "aten::silu" in refuted, "the experiment has nothing to show here"


@pytest.mark.parametrize("name", MOVING)
def test_operators_that_move_and_compare(name) -> None:
    for x in rows_of("cpu"):
        with torch_cubin.audit(strict=True) as found:
            MOVING[name](x)
        assert not differs(MOVING[name], [x])
    assert f"aten::{name}" in {row.op for row in found.rows}


def test_fake_tensors() -> None:
    """Whose device PyTorch asks for by an operator that its dispatcher does not have."""
    with torch_cubin.audit() as found, FakeTensorMode():
        x = torch.empty(3, 4)
        (x @ x.t()).softmax(-1).to(x.device)
    assert {"aten::mm", "aten::_softmax"} <= {row.op for row in found.rows}


def test_gradients_of_embeddings() -> None:
    """PyTorch may add them by atomics on CUDA."""
    op = torch.ops.aten.embedding_dense_backward.default
    with FakeTensorMode():
        kinds = [
            classify(op, (torch.empty(4, 5, device=device),), {}, False)[0]
            for device in ("cpu", "cuda")
        ]
        torch.use_deterministic_algorithms(True)
        try:
            kinds.append(classify(op, (torch.empty(4, 5, device="cuda"),), {}, False)[0])
        finally:
            torch.use_deterministic_algorithms(False)
    assert kinds == [DETERMINISTIC, NEITHER, DETERMINISTIC]


def test_index_put() -> None:
    x, places, values = torch.zeros(4), [torch.tensor([1, 1])], torch.ones(2)
    with torch_cubin.audit() as found:
        x.index_put(places, values)
        x.index_put(places, values, accumulate=True)
        mask = torch.ones(2, dtype=torch.bool)
        torch.ops.aten._unsafe_masked_index_put_accumulate(x, mask, places, values)
    kinds = {row.kind for row in found.rows if "index_put" in row.op}
    assert kinds == {INVARIANT, DETERMINISTIC}


@pytest.mark.parametrize("name", ["cumsum", "cumprod", "logcumsumexp"])
def test_scans(name: str) -> None:
    """Of one vector, blocks of PyTorch's kernels for CUDA add earlier sums as these come."""
    op = getattr(torch.ops.aten, name).default

    def kind(*shape: int, device: str = "cuda", dtype: torch.dtype = torch.float32) -> str:
        return classify(op, (torch.empty(*shape, device=device, dtype=dtype), -1), {}, False)[0]

    with FakeTensorMode():
        assert kind(7) == kind(1, 7) == NEITHER
        assert kind(4, 7) == kind(7, device="cpu") == DETERMINISTIC
        assert kind(7, dtype=torch.int64) == INVARIANT


def test_convolutions_and_gradients_of_attention() -> None:
    """PyTorch's own for CUDA had other bits in each run on an H200."""
    aten = torch.ops.aten
    with FakeTensorMode():
        cpu, cuda = (torch.empty(2, 3, 8, 8, device=device) for device in ("cpu", "cuda"))
        for op in (aten.convolution.default, aten.convolution_backward.default):
            kinds = [classify(op, (x,), {}, False)[0] for x in (cpu, cuda)]
            with torch.backends.cudnn.flags(deterministic=True):
                kinds.append(classify(op, (cuda,), {}, False)[0])
            assert kinds == [DETERMINISTIC, NEITHER, DETERMINISTIC]
        backward = aten._scaled_dot_product_cudnn_attention_backward.default
        assert classify(backward, (cuda,), {}, False)[0] == NEITHER
