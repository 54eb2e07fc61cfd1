"""Every set of features that a call of attention can have has a kernel: the rows of the kernel
tables, without a build. `pytest -s` prints the matrix.
"""

from __future__ import annotations

import functools
import itertools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "csrc" / "kernels"
BACKEND = ROOT / "csrc" / "ops" / "attention" / "plan" / "plan.h"
# Kinds of each direction that attend. For float32, two kernels of a kind serve a backward together.
FORWARD, BACKWARD = {"forward"}, {"backward", "gradient"}
MASKS = ("", "bool", "own", "float32")


def features(mask: str, rule: bool, sinks: bool, large_softcap: bool, dtype: str) -> frozenset[str]:
    """As features_of() in csrc/ops/attention/plan/plan.cpp."""
    more = {"rule": rule, "sinks": sinks, "large_softcap": large_softcap}
    found = {name for name, has in more.items() if has}
    if mask == "":
        return frozenset(found | {"unmasked"} if found else {"plain"})
    if mask == "float32" and dtype != "float32":
        return frozenset(found | {"float_mask"})
    added = "added_mask" if rule else "added_alone"
    return frozenset(found | {"bool_mask" if mask == "bool" else added})


def all_sets(dtype: str) -> list[frozenset[str]]:
    """A large softcap is a rule."""
    flags = itertools.product((False, True), repeat=3)
    options = [(rule, sinks, large) for rule, sinks, large in flags if rule or not large]
    found = {features(mask, *option, dtype): None for mask in MASKS for option in options}
    return list(found)


@functools.cache
def attention_kernels() -> list:
    import layers  # finds the modules of csrc/kernels/build

    tables = layers.kernel_table.read_tables(KERNELS)
    return [kernel for kernel in tables if kernel.fields["family"] == "attention"]


def serving(kinds: set[str], dtype: str, needs: frozenset[str], head_dim: int, arch: str):
    """The folders that have a kernel for such a call on an architecture."""
    return {
        kernel.source.parent.name
        for kernel in attention_kernels()
        if kernel.fields["kind"] in kinds
        and kernel.fields["math"] == dtype
        and kernel.fields["dtype"] == dtype
        and kernel.fields["tile"][2] >= head_dim
        and needs <= set(kernel.fields["takes"])
        and (kernel.archs is None or arch in kernel.archs)
    }


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a", "sm_100a", "sm_120a"])
def test_every_set_of_features_has_a_kernel(arch: str, dtype: str) -> None:
    for needs in all_sets(dtype):
        for head_dim in (64, 128, 256):
            found = [serving(kinds, dtype, needs, head_dim, arch) for kinds in (FORWARD, BACKWARD)]
            print(arch, dtype, head_dim, "+".join(sorted(needs)), *map(sorted, found))
            hopper = arch == "sm_90a" and dtype != "float32" and "large_softcap" not in needs
            expected = {"portable", "sm90"} if hopper else {"portable"}
            assert found == [expected, expected], (needs, head_dim)


def test_the_tables_name_the_features_of_the_library() -> None:
    (listed,) = re.findall(r"kAttentionFeatures\[\] = \{(.*?)\};", BACKEND.read_text(), re.S)
    known = re.findall(r'"(\w+)"', listed)
    used = {name for kernel in attention_kernels() for name in kernel.fields.get("takes", ())}
    assert used == set(known)
    assert used == set().union(*all_sets("bfloat16"))


def test_every_mask_has_a_kernel_that_lays_it_out() -> None:
    masks = [kernel for kernel in attention_kernels() if kernel.fields["kind"] == "mask"]
    for backward in (False, True):
        own = [k for k in masks if k.source.stem.startswith("backward_") == backward]
        assert sorted(sorted(k.fields["takes"]) for k in own) == [
            ["added_alone", "added_mask", "float_mask"],
            ["bool_mask"],
        ]
