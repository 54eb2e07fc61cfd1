"""Loading: quiet import, fork, and faulty kernel packages: an error with its tag, no crash."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.child("quiet_import")
def test_import_makes_no_driver_call(child) -> None:
    answer = child.check()
    assert answer["initialized"] is False
    assert answer["libcuda"] == []


@pytest.mark.fault_case(29)
@pytest.mark.child("fork_after_use")
def test_fork_after_use_is_an_error(child) -> None:
    """Ours ([fork]) or PyTorch's own, which also says how: never a crash, a hang or a result."""
    answer = child.check()
    for name in ("grad", "no_grad"):
        outcome = answer[name]
        assert outcome.get("status") == 0, outcome
        assert "result" not in outcome, outcome
        message = outcome["error"]
        assert "[fork]" in message or "forked subprocess" in message, message
        assert "spawn" in message, message
    assert answer["parent_still_right"]


@pytest.mark.fault_case(29)
@pytest.mark.child("fork_before_use")
def test_fork_before_use_works(child) -> None:
    assert child.check() == {"status": 0, "result": True}


def _check_catalog(child, tag: str) -> None:
    answer = child.check()
    for name in ("no_grad", "grad", "again"):
        assert f"torch_cubin [{tag}]: " in answer[name], answer[name]
    assert answer["torch"], "torch.matmul fails in that process"


@pytest.mark.fault_case(10)
@pytest.mark.child("catalog", "flipped")
def test_changed_cubin_is_a_hash_error(child) -> None:
    _check_catalog(child, "hash")


@pytest.mark.fault_case(3)
@pytest.mark.child("catalog", "truncated")
def test_truncated_cubin_with_a_matching_hash_is_an_image_error(child) -> None:
    _check_catalog(child, "image")


@pytest.mark.fault_case(13)
@pytest.mark.child("catalog", "other_arch")
def test_catalog_without_this_arch_is_an_arch_error(child) -> None:
    _check_catalog(child, "arch")
    major, minor = torch.cuda.get_device_capability()
    assert f"sm_{major}{minor}" in child.answer["grad"]


@pytest.mark.fault_case(18)
@pytest.mark.child("catalog", "wrong_parameters")
def test_manifest_that_contradicts_the_cubin_is_a_params_error(child) -> None:
    _check_catalog(child, "params")


@pytest.mark.child("catalog", "other_struct")
def test_kernels_of_another_struct_of_that_size_are_a_params_error(child) -> None:
    _check_catalog(child, "params")
    assert "params_digest" in child.answer["grad"]


@pytest.mark.fault_case(1)
@pytest.mark.child("catalog", "missing_image")
def test_missing_cubin_is_a_file_error(child) -> None:
    _check_catalog(child, "file")


@pytest.mark.fault_case(10)
@pytest.mark.child("catalog", "no_manifest")
def test_missing_manifest_is_a_file_error(child) -> None:
    _check_catalog(child, "file")


@pytest.mark.fault_case(10)
@pytest.mark.child("catalog", "bad_manifest")
def test_broken_manifest_is_a_file_error(child) -> None:
    _check_catalog(child, "file")


@pytest.mark.child("catalog", "no_folder")
def test_missing_package_is_a_file_error(child) -> None:
    _check_catalog(child, "file")
