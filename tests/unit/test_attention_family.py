"""What attention is made of: the kinds of its kernels."""

from __future__ import annotations

import functools
from pathlib import Path

import layers  # finds the modules of csrc/kernels/build

ROOT = Path(__file__).resolve().parents[2]
# The steps of a call: those that attend, and those before and after them.
KINDS = {
    *("forward", "decode", "backward", "gradient"),
    *("order", "mask", "transpose", "delta", "convert", "combine", "append", "gather"),
}


@functools.cache
def attention_kernels() -> list:
    tables = layers.kernel_table.read_tables(ROOT / "csrc" / "kernels")
    return [kernel for kernel in tables if kernel.fields["family"] == "attention"]


def test_a_kind_is_a_step_of_a_call() -> None:
    assert {kernel.fields["kind"] for kernel in attention_kernels()} == KINDS
