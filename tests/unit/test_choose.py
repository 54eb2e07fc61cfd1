"""choose_entry: the rule by which one of several images serves a device."""

from __future__ import annotations

import itertools
import json

import cubin_check
import pytest


def choose(device: int, entries: list[str], jit: bool = False) -> str | dict:
    """The chosen entry's description, or the error."""
    (line,) = cubin_check.run(("choose", device, int(jit), *entries))
    answer = json.loads(line)
    return answer["error"] if isinstance(answer, dict) else entries[answer]


def cubins(*archs: str) -> list[str]:
    return [f"cubin:{arch}" for arch in archs]


CASES = [
    # Exact 'a', then the family, then the same major with the highest minor at or below.
    (90, ("80", "90", "90a"), "90a"),
    (90, ("80", "90"), "90"),
    (100, ("100", "100f", "100a"), "100a"),
    (100, ("100", "100f", "103a"), "100f"),
    (103, ("100", "103", "100f"), "100f"),
    (103, ("100f", "103f"), "103f"),
    (103, ("100a", "100", "103"), "103"),
    (103, ("100a", "100"), "100"),
    (121, ("120f", "120", "121"), "120f"),
    (121, ("120a", "120"), "120"),
    (86, ("75", "80", "86", "89"), "86"),
    (89, ("80", "86"), "86"),
    (87, ("80", "86"), "86"),
    (80, ("80", "86"), "80"),
]


@pytest.mark.parametrize(("device", "archs", "wanted"), CASES)
def test_choice(device: int, archs: tuple[str, ...], wanted: str) -> None:
    for order in itertools.permutations(archs):
        assert choose(device, cubins(*order)) == f"cubin:{wanted}", order


REFUSED = [
    (90, ("80", "100", "120a")),
    (80, ("86",)),
    (100, ("90a", "101f", "103a", "103f")),
    (103, ("100a",)),
    (120, ("121a", "121")),
    (75, ()),
]


@pytest.mark.parametrize(("device", "archs"), REFUSED)
def test_none_that_runs_is_an_arch_error(device: int, archs: tuple[str, ...]) -> None:
    error = choose(device, cubins(*archs), jit=True)
    assert error["tag"] == "arch"
    assert f"expected one for sm_{device}, got" in error["message"]
    for arch in archs:
        assert f"sm_{arch}" in error["message"]
    assert f"nvcc -cubin -arch=sm_{device}" in error["message"]


def test_ptx_only_by_name_and_only_without_a_cubin() -> None:
    both = ["ptx:80", "cubin:80", "ptx:90"]
    assert choose(86, both, jit=True) == "cubin:80"
    assert choose(90, both, jit=True) == "ptx:90"
    assert choose(100, both, jit=True) == "ptx:90"  # PTX of a plain arch goes for any later one
    error = choose(100, both)
    assert error["tag"] == "arch"
    assert "jit=True" in error["message"]
    assert "got PTX for sm_80, sm_80, PTX for sm_90" in error["message"]
    assert choose(80, ["ptx:90"], jit=True)["tag"] == "arch"
    # PTX for an 'a' or 'f' arch is bound to the same devices as the cubin.
    assert choose(100, ["ptx:90a"], jit=True)["tag"] == "arch"
    assert choose(103, ["ptx:80", "ptx:100f"], jit=True) == "ptx:100f"
    assert choose(120, ["ptx:80", "ptx:100f"], jit=True) == "ptx:80"


def test_what_cannot_be_loaded_is_never_chosen() -> None:
    error = choose(90, ["relocatable_cubin:90", "lto_ir:90"], jit=True)
    assert "sm_90 (relocatable), sm_90 (LTO-IR)" in error["message"]
    assert choose(90, ["relocatable_cubin:90a", "cubin:90"]) == "cubin:90"


def test_of_equals_the_first() -> None:
    (line,) = cubin_check.run(("choose", 90, 0, "cubin:80", "cubin:90", "cubin:90"))
    assert line == "1"


def test_long_lists_are_cut() -> None:
    error = choose(75, cubins(*(str(sm) for sm in range(80, 130))))
    assert len(error["message"]) < 500
    assert "..." in error["message"]
