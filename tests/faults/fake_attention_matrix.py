"""docs/attention.md's table of the kernels that serve each option on Hopper, as they are launched.

The test fails if the page differs from what the stand-in driver records; tools/attention_matrix.py
writes it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
from attention_steps import step_of
from fake_driver import tensors
from faults import catalogs
from faults.forked import forked

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "attention.md"
TABLE = re.compile(
    r"(?<=<!-- attention_matrix.py: begin -->\n).*?(?=<!-- attention_matrix.py: end -->)", re.S
)
BATCH, HEADS, ROWS = 2, 8, 1024
HEAD_DIMS = (64, 128, 256)


def made(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return tensors.empty(*size, dtype=dtype)


def slopes() -> torch.Tensor:
    return made(HEADS, dtype=torch.float32)


def mask(dtype: torch.dtype) -> torch.Tensor:
    return made(ROWS, ROWS, dtype=dtype)


# The options of a call by feature; functions, because tensors are made per call.
OPTIONS: dict[str, Any] = {
    "no option": dict,
    "`is_causal`, windows": lambda: {"is_causal": True, "window_left": 127},
    "`scale`, 0 or negative": lambda: {"scale": -1.0},
    "`softcap` to 128": lambda: {"softcap": 30.0},
    "`softcap` above": lambda: {"softcap": 300.0},
    "`alibi_slopes`": lambda: {"alibi_slopes": slopes()},
    "`sinks`": lambda: {"sinks": slopes()},
    "`dropout_p`": lambda: {"dropout_p": 0.1, "dropout_seed": made(1, dtype=torch.int64)},
    "boolean mask": lambda: {"attn_mask": mask(torch.bool)},
    "boolean mask and ALiBi": lambda: {"attn_mask": mask(torch.bool), "alibi_slopes": slopes()},
    "added mask of 16 bits": lambda: {"attn_mask": mask(torch.bfloat16)},
    "added mask of float32": lambda: {"attn_mask": mask(torch.float32)},
    "added mask and softcap": lambda: {"attn_mask": mask(torch.bfloat16), "softcap": 30.0},
}
PACKED = "`cu_seqlens_q`, `cu_seqlens_k`"
FEW_ROWS = "one query row, 8,192 keys"
GROUPED = "`enable_gqa`"
FLOAT32 = "float32"


def arguments(row: str, head_dim: int) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """query, key and value, and the options."""
    if row == PACKED:
        offsets = made(BATCH + 1, dtype=torch.int32)
        options = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
        options |= {"max_seqlen_q": ROWS, "max_seqlen_k": ROWS}
        return [made(BATCH * ROWS, HEADS, head_dim) for _ in range(3)], options
    if row == FEW_ROWS:
        key, value = (made(BATCH, HEADS, 8192, head_dim) for _ in range(2))
        return [made(BATCH, HEADS, 1, head_dim), key, value], {}
    if row == GROUPED:
        key, value = (made(BATCH, 2, ROWS, head_dim) for _ in range(2))
        return [made(BATCH, HEADS, ROWS, head_dim), key, value], {"enable_gqa": True}
    dtype = torch.float32 if row == FLOAT32 else torch.bfloat16
    options = {} if row == FLOAT32 else OPTIONS[row]()
    return [made(BATCH, HEADS, ROWS, head_dim, dtype=dtype) for _ in range(3)], options


def steps(driver, known: dict[str, str], row: str, head_dim: int, backward: bool) -> list[str]:
    """The steps (step_of()) of the kernels that a call launches, in their order."""

    def run() -> list[str]:
        qkv, options = arguments(row, head_dim)
        query = qkv[0]
        if not backward:
            torch.ops.cubin.attention_forward(*qkv, **options)
        else:
            sums = query.shape[:-1] if row != PACKED else (HEADS, BATCH * ROWS)
            out, grad = (made(*query.shape, dtype=query.dtype) for _ in range(2))
            logsumexp = made(*sums, dtype=torch.float32)
            torch.ops.cubin.attention_backward(grad, *qkv, out, logsumexp, **options)
        return [known[launch["kernel"]] for launch in driver.launches()]

    return forked(run)


def cell(driver, known: dict[str, str], row: str, backward: bool) -> str:
    """The steps by head_dim; one entry if they are the same for all."""
    found: dict[str, list[str]] = {}
    for head_dim in HEAD_DIMS:
        text = ", ".join(f"`{step}`" for step in steps(driver, known, row, head_dim, backward))
        found.setdefault(text or "none", []).append(str(head_dim))
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{', '.join(dims)}: {text}" for text, dims in found.items())


def table(driver, known: dict[str, str]) -> str:
    lines = ["| bfloat16, or as it says | forward | backward |\n", "|---|---|---|\n"]
    for row in (*OPTIONS, PACKED, GROUPED, FEW_ROWS, FLOAT32):
        cells = (cell(driver, known, row, backward) for backward in (False, True))
        lines.append(f"| {row} | {' | '.join(cells)} |\n")
    return "".join(lines)


def test_the_table_of_kernels_is_up_to_date(driver, tmp_path, monkeypatch) -> None:
    kernels = catalogs.kernels_of("attention")
    catalogs.install(driver, tmp_path, monkeypatch, kernels)
    page = DOCUMENT.read_text()
    made_now = table(driver, {kernel["name"]: step_of(kernel) for kernel in kernels})
    if os.environ.get("TORCH_CUBIN_TEST_WRITE") == "1":
        DOCUMENT.write_text(TABLE.sub(lambda _: made_now, page))
        return
    assert TABLE.search(page)[0] == made_now, "python tools/attention_matrix.py writes it"
