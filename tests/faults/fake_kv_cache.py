"""flash_attention_with_kvcache on the stand-in driver: what a refused call leaves behind."""

from __future__ import annotations

import pytest
import torch
from attention_steps import step_of
from fake_driver import tensors
from faults import catalogs

from torch_cubin import errors

attend = torch.ops.cubin.flash_attention_with_kvcache


def call(head_dim: int = 64, dtype=torch.bfloat16, new: int = 1) -> dict[str, torch.Tensor]:
    """Arguments for two sequences of a cache of 64 columns."""
    args = {"q": tensors.empty(2, 1, 4, head_dim, dtype=torch.bfloat16)}
    for name in ("k_cache", "v_cache"):
        args[name] = tensors.empty(2, 64, 2, head_dim, dtype=dtype)
    for name in ("k", "v"):
        args[name] = tensors.empty(2, new, 2, head_dim, dtype=torch.bfloat16)
    args["cache_seqlens"] = tensors.empty(2, dtype=torch.int32)
    return args


def versions(args: dict[str, torch.Tensor]) -> tuple[int, int]:
    return args["k_cache"]._version, args["v_cache"]._version


def install(driver, tmp_path, monkeypatch, *steps: str) -> None:
    kernels = catalogs.kernels_of("attention", lambda kernel: step_of(kernel) in steps)
    catalogs.install(driver, tmp_path, monkeypatch, kernels)


def test_versions_change_only_if_a_kernel_is_launched(driver, tmp_path, monkeypatch) -> None:
    install(driver, tmp_path, monkeypatch, "decode", "combine", "append")
    args = call()
    attend(**args)
    assert versions(args) == (1, 1)
    attend(**{**args, "k": None, "v": None})
    assert versions(args) == (1, 1)
    wrote = len(driver.launches())
    empty = call(new=0)
    attend(**empty)
    assert versions(empty) == (0, 0)
    with pytest.raises(RuntimeError, match=r"\[input\]"):
        attend(**{**args, "softmax_scale": 1.0, "cache_seqlens": tensors.empty(3)})
    refused = call(dtype=torch.float8_e4m3fn)  # no kernels of these here
    with pytest.raises(RuntimeError, match=r"\[no_kernel\]"):
        attend(**refused)
    assert (versions(args), versions(refused)) == ((1, 1), (0, 0))
    assert len(driver.launches()) == wrote + 1  # that of new=0, which appends nothing


def test_a_cache_of_inference_mode_is_not_written_outside_of_it(driver, tmp_path, monkeypatch):
    install(driver, tmp_path, monkeypatch, "decode", "combine", "append")
    with torch.inference_mode():
        args = call()
        attend(**args)
    launched = len(driver.launches())
    with torch.no_grad(), pytest.raises(RuntimeError, match="inference tensor") as caught:
        attend(**args)
    assert not isinstance(caught.value, errors.InternalError)
    assert len(driver.launches()) == launched
