"""Which kernel decodes from a cache, and in how many parts, on the stand-in driver."""

from __future__ import annotations

import torch
from fake_driver import tensors
from faults import catalogs
from faults.forked import forked

import torch_cubin

WIDE, NARROW = (f"decode_attention_e4m3_{tile}" for tile in ("16x128x128", "16x64x128"))


def test_eight_warps_a_multiprocessor_read_float8_caches(driver, tmp_path, monkeypatch) -> None:
    """They are one block where blocks can be made to fill the GPU once, so that few parts are
    combined, and two where there are more, or few keys. batch_invariant() has one kernel for all
    batches."""
    catalogs.install(driver, tmp_path, monkeypatch, catalogs.kernels_of("attention"))

    def launched(batch: int, keys: int = 8192) -> tuple[str, int]:
        args = {"q": tensors.empty(batch, 1, 32, 128, dtype=torch.bfloat16)}
        for name in ("k_cache", "v_cache"):
            args[name] = tensors.empty(batch, keys, 8, 128, dtype=torch.float8_e4m3fn)
        driver.reset()
        torch.ops.cubin.flash_attention_with_kvcache(**args)
        decode = driver.launches()[0]
        return decode["kernel"], decode["grid"][1]

    def run() -> list[list]:
        found = [*(launched(batch) for batch in (1, 16, 64)), launched(4, 1024)]
        with torch_cubin.batch_invariant():
            return [found, [launched(batch)[0] for batch in (1, 16, 64)]]

    found, invariant = forked(run)
    assert [tuple(x) for x in found] == [(WIDE, 16), (WIDE, 1), (NARROW, 1), (NARROW, 8)]
    assert invariant == [NARROW] * 3
