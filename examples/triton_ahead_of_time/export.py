"""Compiles kernels.py for sm_80 and sm_90a and writes the package beside it. Needs Triton, no GPU.

python examples/triton_ahead_of_time/export.py [FOLDER]
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")  # saves a third of a cubin's bytes

import kernels

import torch_cubin
import torch_cubin.producers.triton as tct

ARCHS = ["sm_80", "sm_90a"]


def matmul() -> torch_cubin.Op:
    """All configs: torch_cubin.tune() finds the fastest one on the GPU that it runs on."""
    return tct.define_op(
        "triton_example::matmul(Tensor a, Tensor b) -> Tensor",
        kernel=kernels.matmul,
        tuned="all",
        signature={
            **dict.fromkeys(("a_ptr", "b_ptr", "c_ptr"), "*fp16:16"),
            "M": "i32",
            "N": "i32:16",
            "K": "i32:16",
            "GROUP": 8,
        },
        archs=ARCHS,
        tensors={"a": "float16[M, K]", "b": "float16[K, N]", "out": "float16[M, N]"},
        args={"a_ptr": "a", "b_ptr": "b", "c_ptr": "out"},
        grid=lambda M, N, BLOCK_M, BLOCK_N: torch_cubin.cdiv(M, BLOCK_M)
        * torch_cubin.cdiv(N, BLOCK_N),
    )


def attention() -> torch_cubin.Op:
    """A kernel for each head size and mask; the folded constants D and CAUSAL are checked.

    Each is compiled twice: for numbers of rows and keys that are multiples of 16, as Triton's own
    launcher does for such calls, and for all others. A call uses the first kernel that accepts it.
    """
    found: list[torch_cubin.KernelChoice] = []
    for (head_dim, stages), causal in itertools.product(((64, 3), (128, 2)), (True, False)):
        for size in ("i32:16", "i32"):
            compiled = tct.compile(
                kernels.attention,
                {
                    **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), "*bf16:16"),
                    **dict.fromkeys(("heads", "heads_kv"), "i32"),
                    **dict.fromkeys(("rows", "keys"), size),
                    "scale": "fp32",
                    "CAUSAL": causal,
                    "D": head_dim,
                    "BLOCK_M": 128,
                    "BLOCK_N": 64,
                },
                ARCHS,
                num_warps=4 if head_dim == 64 else 8,
                num_stages=stages,
            )
            # The kernel divides by heads_kv, and would read past k and v if this did not hold.
            found += [
                torch_cubin.KernelChoice(kernel, when=lambda q, k: q.shape[1] % k.shape[1] == 0)
                for kernel in compiled
            ]
    return tct.define_op(
        "triton_example::attention(Tensor q, Tensor k, Tensor v, bool causal, float scale)"
        " -> Tensor",
        kernel=found,
        tensors={
            "q": "bfloat16[batch, heads, rows, d]",
            "k": "bfloat16[batch, heads_kv, keys, d]",
            "v": "bfloat16[batch, heads_kv, keys, d]",
            "out": "bfloat16[batch, heads, rows, d]",
        },
        args={
            "q_ptr": "q",
            "k_ptr": "k",
            "v_ptr": "v",
            "out_ptr": "out",
            "CAUSAL": "causal",
            "D": lambda d: d,
        },
        grid=lambda rows, batch, heads, BLOCK_M: (torch_cubin.cdiv(rows, BLOCK_M), batch * heads),
    )


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "package"
    torch_cubin.save_package(folder, [matmul(), attention()], overwrite=True)
    print(f"{folder}: {sum(f.stat().st_size for f in folder.iterdir()) / 1e3:.0f} kB")
