"""rank_cubin and rank_ptx: the rule by which one of several images serves a device."""

from __future__ import annotations

import itertools

import cubin_check
import pytest


def best(device: int, entries: list[str]) -> str | None:
    """The entry of the highest rank, of equals the first; None where none runs on the device."""
    ranks = list(map(int, cubin_check.run(("rank", device, *entries)))) if entries else [0]
    return entries[ranks.index(max(ranks))] if max(ranks) > 0 else None


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
        assert best(device, cubins(*order)) == f"cubin:{wanted}", order


REFUSED = [
    (90, ("80", "100", "120a")),
    (80, ("86",)),
    (100, ("90a", "101f", "103a", "103f")),
    (103, ("100a",)),
    (120, ("121a", "121")),
    (75, ()),
]


@pytest.mark.parametrize(("device", "archs"), REFUSED)
def test_best_is_none_if_no_image_runs(device: int, archs: tuple[str, ...]) -> None:
    assert best(device, cubins(*archs)) is None


def test_ptx() -> None:
    assert best(90, ["ptx:80", "ptx:90"]) == "ptx:90"
    assert best(100, ["ptx:80", "ptx:90"]) == "ptx:90"  # of a plain arch: for any later one
    assert best(80, ["ptx:90"]) is None
    # PTX for an 'a' or 'f' arch is bound to the same devices as the cubin.
    assert best(100, ["ptx:90a"]) is None
    assert best(103, ["ptx:80", "ptx:100f"]) == "ptx:100f"
    assert best(120, ["ptx:80", "ptx:100f"]) == "ptx:80"
