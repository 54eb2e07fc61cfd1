"""Attention of float8_e4m3fn for compute-sanitizer: a scenario of attention_child.py."""

from __future__ import annotations

import torch
from gpu import attention_child

# batch, heads, heads of key, rows, columns, options. The last call uses each stage again.
CALLS = [
    (1, 2, 1, 65, 70, {}),
    (2, 2, 2, 1, 200, {"is_causal": True, "bottom_right": True}),
    (1, 2, 2, 130, 33, {"is_causal": True}),
    (1, 4, 2, 100, 130, {"window_left": 20, "window_right": 3}),
    (1, 2, 1, 700, 900, {}),
    (1, 2, 1, 65, 2100, {}),  # blocks in pairs
]
LIMITS = {"out": 5e-2, "dq": 1e-1, "dk": 1e-1, "dv": 1e-2}  # of a result's norm


def both(args, grad, options) -> list[torch.Tensor]:
    """The output, and the gradients to 128 columns: no kernel has wider ones."""
    with torch.no_grad():
        out, logsumexp = torch.ops.cubin.attention_forward_e4m3(*args, **options)
        if args[0].shape[-1] > 128:
            return [out]
        grads = torch.ops.cubin.attention_backward_e4m3(grad, *args, out, logsumexp, **options)
    return [out, *grads]


def compare(batch, heads, kv_heads, rows, columns, dim, options) -> list[str]:
    """The wrong results of a call in both directions."""
    sizes = ((heads, rows), (kv_heads, columns), (kv_heads, columns))
    args = [torch.randn(batch, *size, dim).to(torch.float8_e4m3fn) for size in sizes]
    factors = {f"{x}_descale": torch.rand(batch, kv_heads) + 0.5 for x in "qkv"}
    options = options | factors
    grad = torch.randn(batch, heads, rows, dim).bfloat16()
    wanted = both(args, grad, options)
    bare = [attention_child._bare(x, (0, 2, 1, 3), 16) for x in args]
    bare_grad = attention_child._bare(grad, (0, 1, 2, 3), 0)
    found = both(bare, bare_grad, attention_child._on_gpu(options))
    wrong = []
    for name, x, y in zip(LIMITS, found, wanted, strict=False):
        x, y = x.cpu().double(), y.double()
        error = float((x - y).norm() / y.norm())
        if not error <= LIMITS[name]:
            wrong.append(f"{name} of {rows} x {columns} x {dim}: error {error:.1e}")
    return wrong


def sanitize(tool: str) -> tuple[int, list[str]]:
    """The number of calls in both directions, and the wrong results."""
    wrong, calls = [], 0
    for dim in (64, 128, 256):
        for batch, heads, kv_heads, rows, columns, options in CALLS:
            if tool == "racecheck" and (rows > 130 or columns > 2000):
                continue
            calls += 2 if dim <= 128 else 1
            wrong += compare(batch, heads, kv_heads, rows, columns, dim, options)
    return calls, wrong
