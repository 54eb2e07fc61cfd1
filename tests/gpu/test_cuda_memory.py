"""Memory: everything comes from PyTorch's caching allocator and goes back to it."""

from __future__ import annotations

import gc
import math
import resource

import numerics
import pytest
import torch
from gpu import cases

GRAD_MODES = [torch.no_grad, torch.enable_grad, torch.inference_mode]


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _allocations() -> int:
    return torch.cuda.memory_stats()["allocation.all.allocated"]


@pytest.mark.parametrize("context", GRAD_MODES)
def test_outputs_come_from_the_caching_allocator(context) -> None:
    a = torch.ones(256, 64, device="cuda", dtype=torch.float16)
    b = torch.ones(64, 512, device="cuda", dtype=torch.float16)
    with context():
        torch.ops.cubin.matmul(a, b)
        gc.collect()
        used, calls = torch.cuda.memory_allocated(), _allocations()
        out = torch.ops.cubin.matmul(a, b)
        assert torch.cuda.memory_allocated() - used == 256 * 512 * 2
        assert _allocations() > calls
        del out
        assert torch.cuda.memory_allocated() == used


def test_split_k_workspace_is_returned() -> None:
    a = torch.ones(16, 16384, device="cuda", dtype=torch.bfloat16)
    b = torch.ones(16384, 512, device="cuda", dtype=torch.bfloat16)
    torch.ops.cubin.matmul(a, b)
    used = torch.cuda.memory_allocated()
    out = torch.ops.cubin.matmul(a, b)
    assert torch.cuda.memory_allocated() - used == out.numel() * 2


@pytest.mark.parametrize("context", GRAD_MODES)
def test_a_thousand_calls_leak_nothing(context) -> None:
    inputs = [
        (torch.ones(m, k, device="cuda", dtype=dtype), torch.ones(k, n, device="cuda", dtype=dtype))
        for m, n, k in [(64, 64, 64), (16, 512, 8192), (1, 300, 65)]
        for dtype in (torch.bfloat16, torch.float32)
    ]

    def calls(count: int) -> None:
        with context():
            for _ in range(count):
                for a, b in inputs:
                    torch.ops.cubin.matmul(a, b.mT.contiguous().mT)

    calls(5)
    torch.cuda.synchronize()
    used, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    resident = _resident_bytes()
    calls(170)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == used
    assert torch.cuda.memory_reserved() == reserved
    # A leaked module or handle shows on the host: 1,020 of them would not fit in 8 MB.
    assert _resident_bytes() - resident < 8 << 20


@pytest.mark.fault_case(34)
@pytest.mark.parametrize("context", GRAD_MODES)
def test_out_of_memory_reads_as_pytorchs_and_is_recoverable(context) -> None:
    a = torch.ones(120_000, 8, device="cuda", dtype=torch.bfloat16)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(
        (torch.cuda.memory_reserved() + 2e9) / total  # the result has 29 GB
    )
    try:
        with context(), pytest.raises(RuntimeError, match=r"^CUDA out of memory"):
            torch.ops.cubin.matmul(a, a.mT)
        small = torch.ops.cubin.matmul(a[:64], a[:64].mT)
        numerics.check_exact(small, torch.full((64, 64), 8.0, device="cuda"))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("mode", cases.MODES)
def test_inputs_are_never_written(mode: str, generator: torch.Generator) -> None:
    with cases.math_mode(mode) as dtype:
        for layout in cases.matrix_layouts(2).values():
            a = cases.place(cases.draw((65, 2050), dtype, False, generator), layout)
            b = cases.place(cases.draw((2050, 33), dtype, False, generator), layout)
            before = [tensor.clone() for tensor in (a, b)]
            versions = [tensor._version for tensor in (a, b)]
            torch.ops.cubin.matmul(a, b)
            for tensor, copy in zip((a, b), before, strict=True):
                numerics.check_bits(tensor, copy)
            assert [tensor._version for tensor in (a, b)] == versions


@pytest.mark.parametrize("offset", [0, 64])
def test_tensors_whose_storage_is_gone_are_refused(offset: int) -> None:
    """Resized to nothing, as FSDP does; a kernel that read there would break the context."""

    def gone(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        count = offset + math.prod(shape)
        tensor = torch.ones(count, device="cuda", dtype=dtype)[offset:].view(shape)
        tensor.untyped_storage().resize_(0)
        return tensor

    ops, a = torch.ops.cubin, torch.ones(64, 64, device="cuda", dtype=torch.bfloat16)
    q, ends = a.view(1, 1, 64, 64), torch.tensor([64], device="cuda", dtype=torch.int32)
    for call in (
        lambda: ops.matmul(gone(64, 64), a),
        lambda: ops.matmul(a, gone(64, 64)),
        lambda: ops.linear(a, a, gone(64)),
        lambda: ops.scaled_dot_product_attention(gone(1, 1, 64, 64), q, q),
        lambda: ops.scaled_dot_product_attention(q, q, gone(1, 1, 64, 64)),
        lambda: ops.scaled_dot_product_attention(q, q, q, gone(64, 64)),
        lambda: ops.cross_entropy(a, gone(64, dtype=torch.int64)),
        lambda: ops.rms_norm(a, [64], gone(64)),
        lambda: ops.softmax(gone(64, 64), -1),
        lambda: ops.quantize(gone(64, 64), 1),
        lambda: ops.grouped_matmul(a, a[None], offs=gone(1, dtype=torch.int32)),
        lambda: ops.grouped_matmul(a, gone(1, 64, 64), offs=ends),
    ):
        with pytest.raises(RuntimeError, match="has elements but no memory"):
            call()
    torch.cuda.synchronize()
    assert torch.equal(ops.matmul(a, a), a @ a)
