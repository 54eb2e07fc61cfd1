"""The package of examples/triton_ahead_of_time on the stand-in driver, without Triton."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from contract_calls import integer, pointer, refused
from fake_driver import tensors

import torch_cubin

PACKAGE = Path(__file__).resolve().parents[2] / "examples" / "triton_ahead_of_time" / "package"


@pytest.fixture(scope="module")
def ops(driver):
    assert "triton" not in sys.modules
    sys.modules["triton"] = None  # importing it raises
    try:
        found = torch_cubin.load_package(PACKAGE)
        for cubin in sorted(PACKAGE.glob("*.sm_90a.cubin")):
            driver.declare(torch_cubin.load(cubin))
        yield found
        assert sys.modules["triton"] is None
    finally:
        del sys.modules["triton"]


def test_the_matmul(driver, ops) -> None:
    """It takes its first configuration until torch_cubin.tune was asked."""
    a = tensors.empty(300, 128, dtype=torch.float16)
    b = tensors.empty(128, 512, dtype=torch.float16)
    out = ops["triton_example::matmul"](a, b)
    assert out.shape == (300, 512)
    (launch,) = driver.launches()
    assert launch["kernel"] == "matmul"
    assert launch["grid"] == [3 * 4, 1, 1]
    assert launch["block"] == [256, 1, 1]
    assert launch["shared"] > 48 << 10
    assert [pointer(launch, i) for i in range(3)] == [t.data_ptr() for t in (a, b, out)]
    assert [integer(launch, i) for i in range(3, 6)] == [300, 512, 128]
    assert [pointer(launch, i) for i in range(6, len(launch["params"]))] == [0, 0]  # no scratch
    matmul = ops["triton_example::matmul"]
    narrow = tensors.empty(128, 500, dtype=torch.float16)
    refused(matmul.overload, a, narrow, match="argument 'N' a multiple of 16")
    refused(matmul.overload, a, tensors.empty(64, 512, dtype=torch.float16), match="argument 'b'")
    refused(matmul.overload, a, tensors.empty(128, 512), match="float16")


def test_every_configuration_of_the_matmul_can_be_forced(driver, ops) -> None:
    from torch_cubin._native import library

    op = ops["triton_example::matmul"]
    a = tensors.empty(256, 256, dtype=torch.float16)
    op(a, a)
    shared = {driver.launches()[-1]["shared"]}
    library.watch_op(op.name)
    try:
        op(a, a)
        call = library.watched_calls()[-1]
        assert call["same"] == call["fits"]
        assert len(call["fits"]) == 5  # those for sm_80 do not run here
        grids = set()
        for kernel in call["fits"]:
            library.force_kernel(kernel)
            op(a, a)
            grids.add(driver.launches()[-1]["grid"][0])
            shared.add(driver.launches()[-1]["shared"])
    finally:
        library.watch_op(None)
    assert grids == {4, 16, 8, 2, 32}
    assert len(shared) > 3


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("d", "warps"), [(64, 4), (128, 8)])
def test_the_attention(driver, ops, causal: bool, d: int, warps: int) -> None:
    q = tensors.empty(2, 6, 300, d, dtype=torch.bfloat16)
    k, v = (tensors.empty(2, 3, 400, d, dtype=torch.bfloat16) for _ in range(2))
    out = ops["triton_example::attention"](q, k, v, causal, 0.25)
    assert out.shape == q.shape
    (launch,) = driver.launches()
    assert (launch["grid"], launch["block"]) == ([3, 12, 1], [32 * warps, 1, 1])
    assert [pointer(launch, i) for i in range(4)] == [t.data_ptr() for t in (q, k, v, out)]
    assert bytes.fromhex(launch["params"][4]) == b"\0\0\x80\x3e"  # 0.25
    assert [integer(launch, i) for i in range(5, 9)] == [6, 3, 300, 400]
    aligned = tensors.empty(2, 6, 304, d, dtype=torch.bfloat16)
    ops["triton_example::attention"](aligned, aligned, aligned, causal, 0.25)
    assert [integer(driver.launches()[-1], i) for i in range(5, 9)] == [6, 6, 304, 304]


@pytest.mark.parametrize(("heads", "heads_kv"), [(6, 4), (2, 4), (2, 0)])
def test_the_attention_has_whole_groups_of_heads(driver, ops, heads: int, heads_kv: int) -> None:
    """The kernel divides them: it would read past k and v."""
    q = tensors.empty(2, heads, 64, 64, dtype=torch.bfloat16)
    k = tensors.empty(2, heads_kv, 64, 64, dtype=torch.bfloat16)
    refused(ops["triton_example::attention"].overload, q, k, k, False, 0.25, match="k.size(1)")
    assert not driver.launches()


def test_the_attention_has_no_other_head_size(driver, ops) -> None:
    q = tensors.empty(2, 6, 300, 96, dtype=torch.bfloat16)
    refused(
        ops["triton_example::attention"].overload, q, q, q, False, 0.25,
        match="has no kernel for these arguments",
    )  # fmt: skip
