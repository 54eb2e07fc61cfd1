"""examples/fmha_library.py on the stand-in driver: what its kernels are given. Needs nvcc."""

from __future__ import annotations

import shutil
import struct
import sys
from pathlib import Path

import pytest
import torch
from contract_calls import refused
from fake_driver import tensors

import torch_cubin

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def library(driver, tmp_path_factory: pytest.TempPathFactory):
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    sys.path.append(str(EXAMPLES))
    import fmha_library

    fmha_library.LIBRARY = tmp_path_factory.mktemp("fmha")
    fmha_library.make_library(("fp16", "e4m3"), (64,), ("sm_90a",))
    for dtype in ("fp16", "e4m3"):
        file = fmha_library.LIBRARY / f"fmha_{dtype}_d64_sm90.cubin.cpp"
        driver.declare(torch_cubin.load(file))
    return fmha_library.PARAMS, fmha_library.define_ops(), fmha_library.define_ops(fmha_library.FP8)


def fields(layout, launch: dict) -> dict[str, int]:
    """The struct's fields, those of 4 and 8 bytes, as unsigned numbers."""
    (data,) = (bytes.fromhex(param) for param in launch["params"])
    assert len(data) == layout.size
    return {
        name: int.from_bytes(data[field.offset : field.offset + field.step], "little")
        for name, field in layout.fields.items()
    }


def kernel_of(launch: dict) -> str:
    return launch["kernel"]


def test_packed(driver, library):
    layout, (packed, _, _), _ = library
    qkv = tensors.empty(10, 3, 4, 64, dtype=torch.float16)
    starts = tensors.empty(3, dtype=torch.int32)
    out = packed(qkv, starts, "causal", 0.125)
    assert out.shape == (10, 4, 64)
    (launch,) = driver.launches()
    assert kernel_of(launch) == "fmha_fp16_qkv_d64_causal_sm90"
    assert launch["block"] == [128, 1, 1]
    found = fields(layout, launch)
    assert found["q"] == qkv.data_ptr()
    assert found["k"] == qkv.data_ptr() + 2 * 4 * 64
    assert found["v"] == qkv.data_ptr() + 4 * 4 * 64
    assert (found["total_q"], found["heads"], found["q_stride"]) == (10, 4, 768)
    assert found["scale_bits"] == struct.unpack("<I", struct.pack("<f", 0.125))[0]
    assert found["window"] == 1
    assert found["counter"]
    assert found["seqlens_kv"] == found["kv_map"] == 0
    packed(qkv, starts, "sliding", 0.125, 24)
    (_, launch) = driver.launches()
    assert kernel_of(launch) == "fmha_fp16_qkv_d64_sliding_sm90"
    assert fields(layout, launch)["window"] == 24
    refused(packed, tensors.empty(10, 3, 4, 96, dtype=torch.float16), starts, "causal", 1.0,
            match="(qkv.size(3) == 64)")  # fmt: skip
    refused(packed, qkv, starts, "full", 1.0, match="has no kernel for these arguments")


def test_contiguous_and_paged(driver, library):
    layout, (_, contiguous, paged), _ = library
    q, kv = (tensors.empty(*shape, dtype=torch.float16) for shape in
             ((7, 4, 64), (2, 50, 2, 2, 64)))  # fmt: skip
    starts, lengths = (tensors.empty(n, dtype=torch.int32) for n in (3, 2))
    contiguous(q, kv, starts, lengths, "padding", 1.0)
    (launch,) = driver.launches()
    assert kernel_of(launch) == "fmha_fp16_kv_d64_padding_sm90"
    assert launch["shared"] == 4 * (2 * 32 * 64 * 2 + 8)
    assert fields(layout, launch)["heads_kv"] == 2
    assert any(bytes.fromhex(launch["params"][0])[:128])  # the map
    driver.reset()
    pool = tensors.empty(9, 2, 2, 16, 64, dtype=torch.float16)
    paged(q, pool, tensors.empty(2, 4, dtype=torch.int32), starts, lengths, "causal", 1.0)
    (launch,) = driver.launches()
    found = fields(layout, launch)
    assert kernel_of(launch) == "fmha_fp16_paged_d64_causal_sm90"
    assert found["v"] - found["k"] == 2 * 2 * 16 * 64
    assert (found["page_size"], found["pages_per_sequence"], found["kv_stride"]) == (16, 4, 4096)
    refused(paged, q, pool, tensors.empty(3, 4, dtype=torch.int32), starts, lengths, "causal", 1.0,
            match="has a wrong size in dim 0: expected 3 (b)")  # fmt: skip


def test_e4m3(driver, library):
    """Half the shared memory, and outputs of bfloat16."""
    layout, _, (packed, contiguous, paged) = library
    e4m3 = torch.float8_e4m3fn
    starts, lengths = (tensors.empty(n, dtype=torch.int32) for n in (3, 2))
    q, kv = tensors.empty(7, 4, 64, dtype=e4m3), tensors.empty(2, 50, 2, 2, 64, dtype=e4m3)
    out = contiguous(q, kv, starts, lengths, "causal", 1.0)
    assert (out.dtype, out.shape) == (torch.bfloat16, (7, 4, 64))
    (launch,) = driver.launches()
    assert kernel_of(launch) == "fmha_e4m3_kv_d64_causal_sm90"
    assert launch["shared"] == 4 * (2 * 32 * 64 + 8)
    assert any(bytes.fromhex(launch["params"][0])[:128])  # the map
    qkv = tensors.empty(10, 3, 4, 64, dtype=e4m3)
    packed(qkv, starts, "sliding", 0.125, 24)
    found = fields(layout, driver.launches()[-1])
    assert kernel_of(driver.launches()[-1]) == "fmha_e4m3_qkv_d64_sliding_sm90"
    assert (found["k"] - found["q"], found["v"] - found["q"]) == (4 * 64, 2 * 4 * 64)
    pool = tensors.empty(9, 2, 2, 16, 64, dtype=e4m3)
    paged(q, pool, tensors.empty(2, 4, dtype=torch.int32), starts, lengths, "padding", 1.0)
    assert kernel_of(driver.launches()[-1]) == "fmha_e4m3_paged_d64_padding_sm90"
    refused(packed, tensors.empty(10, 3, 4, 64, dtype=torch.float16), starts, "causal", 1.0,
            match="expected float8_e4m3fn")  # fmt: skip
