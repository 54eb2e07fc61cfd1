"""The scenarios of attention that run in a process of their own: see child.py.

    python tests/gpu/attention_child.py NAME ARGUMENT...

Those that a sanitizer watches are in attention_sanitized.py.
"""

from __future__ import annotations

import functools
import gc
import random
import sys
from contextlib import nullcontext

import torch

LIMITS = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 2e-5, torch.float64: 1e-12}


def _near(ours: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> bool:
    """Up to rounding in `dtype`; infinities in the same places, NaN nowhere."""
    ours, want = ours.cpu().double(), want.cpu().double()
    finite = want[want.isfinite()]
    most = max(float(finite.abs().max()) if finite.numel() else 0.0, 1.0)
    return torch.allclose(ours, want, rtol=LIMITS[dtype], atol=LIMITS[dtype] * most)


def _both(args, grad, options, between=lambda *outputs: outputs) -> list[torch.Tensor]:
    with torch.no_grad():
        out, logsumexp = between(*torch.ops.cubin.attention_forward(*args, **options))
        grads = torch.ops.cubin.attention_backward(grad, *args, out, logsumexp, **options)
    return [out, logsumexp, *grads]


def attention_capture_first_call(mode: str) -> dict:
    """The very first calls of the process happen inside a CUDA graph capture, both directions."""
    import torch_cubin  # noqa: F401

    shapes = [(1, 8, 2, 1, 4096, 128), (2, 4, 4, 100, 100, 64), (1, 2, 1, 70, 130, 256)]
    dtypes = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
    cases = []
    for dtype in dtypes:
        for batch, heads, kv_heads, rows, columns, head_dim in shapes:
            q = torch.randn(batch, heads, rows, head_dim).to(dtype)
            k, v = (torch.randn(batch, kv_heads, columns, head_dim).to(dtype) for _ in range(2))
            grad = torch.randn(batch, heads, rows, head_dim).to(dtype)
            cases.append((dtype, [x.cuda() for x in (q, k, v)], grad.cuda()))
    options = {"enable_gqa": True}
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        results = [_both(args, grad, options) for _, args, grad in cases]

    def compare() -> list[bool]:
        right = []
        for (dtype, args, grad), outputs in zip(cases, results, strict=True):
            want = _both([x.cpu() for x in args], grad.cpu(), options)
            right += [_near(x, y, dtype) for x, y in zip(outputs, want, strict=True)]
        return right

    right = []
    for _ in range(2):
        for _, args, _ in cases:
            for tensor in args:
                tensor.copy_(torch.randn(tensor.shape))
        for outputs in results:
            for tensor in outputs:
                tensor.fill_(torch.nan)
        graph.replay()
        right += compare()
    # Replays go on being right after other work has used the library and the allocator.
    _both(cases[1][1], cases[1][2], options)
    gc.collect()
    for _ in range(200):
        graph.replay()
    return {"right": right + compare()}


def _bare(value: torch.Tensor, order: tuple[int, ...], pad: int) -> torch.Tensor:
    """On the GPU with its dims in this order, its allocation ending with its last element."""
    strides, stride = [0] * value.dim(), 1
    for position, dim in enumerate(reversed(order)):
        strides[dim] = stride
        stride = stride * value.shape[dim] + (pad if position == 0 else 0)
    extent = 1 + sum((n - 1) * s for n, s in zip(value.shape, strides, strict=True))
    buffer = torch.zeros(extent, dtype=value.dtype, device=value.device)
    buffer.as_strided(value.shape, strides).copy_(value)
    return buffer.cuda().as_strided(value.shape, strides)


def _on_gpu(options: dict) -> dict:
    return {
        name: value.cuda() if isinstance(value, torch.Tensor) else value
        for name, value in options.items()
    }


# batch, heads, heads of key, rows, columns, order of the dims in memory, pad, factor, options.
# factor: what query and key are multiplied by; negative: scores that are all far below zero.
TILE_CALLS = [
    (1, 2, 2, 128, 128, 0, 0, 1, {}),
    (2, 4, 4, 257, 300, 1, 8, 1, {}),
    (1, 1, 1, 1, 1, 0, 0, 1, {}),
    (3, 2, 1, 64, 7, 0, 8, 1, {}),
    (2, 6, 3, 1000, 1000, 1, 0, 1, {"is_causal": True}),
    (1, 3, 1, 1000, 77, 0, 0, 1, {"is_causal": True}),
    (2, 2, 1, 77, 1000, 1, 0, 1, {"is_causal": True, "bottom_right": True}),
    (1, 2, 2, 900, 500, 0, 0, 1, {"is_causal": True, "bottom_right": True}),
    (2, 2, 2, 1500, 1500, 0, 0, 1, {"window_left": 200, "window_right": 100}),
    (1, 2, 2, 700, 700, 0, 16, 1, {"window_left": 30}),
    # Edges within a warpgroup's rows, pairs of blocks with one fully masked, fully masked rows.
    (2, 4, 2, 777, 777, 1, 0, 1, {"window_left": 190, "is_causal": True}),
    (2, 6, 3, 1500, 1200, 0, 0, 1, {"window_left": 64, "is_causal": True, "bottom_right": True}),
    (2, 8, 8, 1111, 1500, 1, 0, 1, {"window_left": 1023, "window_right": 1}),
    (8, 16, 4, 1500, 1500, 1, 0, 1, {"window_left": 127, "is_causal": True}),
    # Some tiles a block, scheduled by queries.
    (1, 8, 8, 4500, 4500, 1, 0, 1, {"window_left": 300, "is_causal": True}),
    (40, 8, 2, 200, 333, 1, 0, 1, {"is_causal": True}),
    (60, 8, 2, 650, 333, 1, 0, 1, {"is_causal": True}),
    (1, 16, 16, 4500, 4500, 1, 0, 1, {"is_causal": True}),
    (1, 2, 1, 300, 1111, 1, 0, 1, {"scale": 0.01}),
    (1, 2, 1, 300, 1111, 0, 0, 5, {}),
    (1, 2, 1, 300, 1111, 0, 8, 20, {}),
    (2, 2, 2, 900, 900, 0, 0, 20, {"is_causal": True}),
    (2, 2, 2, 900, 900, 0, 0, 1000, {"is_causal": True}),
    (1, 2, 1, 600, 600, 0, 0, -3, {"is_causal": True}),
    # Scores far beyond 2^32 in bfloat16: what rounding leaves of them is more than exponents hold.
    (1, 2, 2, 300, 700, 0, 0, 1e6, {}),
    (2, 2, 1, 500, 500, 1, 0, 1e6, {"is_causal": True}),
]


def _tile_operands(call: tuple, head_dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    batch, heads, kv_heads, rows, columns, order, pad, factor, _ = call
    orders = [(0, 1, 2, 3), (0, 2, 1, 3)]
    q = torch.randn(batch, heads, rows, head_dim, device="cuda")
    k, v = (torch.randn(batch, kv_heads, columns, head_dim, device="cuda") for _ in range(2))
    if factor < 0:
        q, k = q.abs() * -factor, k.abs() * factor
    else:
        factor = min(factor, 1e4) if dtype == torch.float16 else factor  # of what it can hold
        q, k = q * factor, k * factor
    return [_bare(x.to(dtype), orders[order], pad) for x in (q, k, v)]


def attention_tile(step: str, tile: str) -> dict:
    """Every kernel of one tile: lengths, bands, grouped heads, strides, huge scores, logsumexp,
    against float64; and the same bits again and again while another stream keeps the GPU busy."""
    from gpu import attention_reference as ar
    from gpu.repeats import count_different

    import torch_cubin
    from torch_cubin._native import library

    rows, _, width = map(int, tile.split("x")[-3:])
    # Tiles of few rows serve batch_invariant() alone.
    switch = torch_cubin.batch_invariant if step == "sm90 forward" and rows < 64 else nullcontext
    kernels = library.catalog()["kernels"]
    general = not any("plain" in kernel["takes"] for kernel in kernels)
    wrong, calls = [], 0
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16):
        limit = 4e-3 if dtype == torch.bfloat16 else 6e-4
        for call in TILE_CALLS:
            factor, options = call[7], {"enable_gqa": True, **call[8]}
            if general:  # these take no call that needs no more than a band
                options["alibi_slopes"] = torch.full((call[1],), 0.01, device="cuda")
            for head_dim in (width, width - 24):
                label = f"{dtype} head_dim {head_dim} {call}"
                q, k, v = _tile_operands(call, head_dim, dtype)
                with torch.no_grad(), switch():
                    out, logsumexp = torch.ops.cubin.attention_forward(q, k, v, **options)
                answer = ar.reference(q, k, v, **options)
                want, want_logsumexp = answer.out, answer.logsumexp
                calls += 1
                error = (out.double() - want).norm() / want.norm()
                # One weight is nearly all there is of such scores, and a rounding decides which.
                if not error < (0.05 if factor >= 1000 else limit):
                    wrong.append(f"{label}: error {float(error):.2e}")
                seen = want_logsumexp != -torch.inf
                difference = (logsumexp.double() - want_logsumexp)[seen].abs()
                # A score near 0 keeps the rounding of its terms, of the size of factor squared.
                scale = want_logsumexp[seen].abs().clamp(min=max(1.0, factor**2 / 16))
                if not bool((difference < 2e-5 * scale).all()):
                    wrong.append(f"{label}: logsumexp")
                if not bool((logsumexp[~seen] == -torch.inf).all() and (out[~seen] == 0).all()):
                    wrong.append(f"{label}: fully masked rows")
        q, k, v = _tile_operands(TILE_CALLS[4], width, dtype)
        options = {"is_causal": True, "enable_gqa": True}
        if general:
            options["alibi_slopes"] = torch.full((q.shape[1],), 0.01, device="cuda")
        call = functools.partial(torch.ops.cubin.attention_forward, q, k, v, **options)
        with torch.no_grad(), switch():
            if count_different(call, call(), replays=15) > 0:
                wrong.append(f"{dtype}: other bits in another run")
    loaded = {entry["name"] for entry in library.catalog()["loaded"]}
    unused = [x["name"] for x in kernels if x["name"] not in loaded]
    return {"wrong": wrong, "calls": calls, "kernels": len(kernels), "unused": unused}


def attention_alone(name: str) -> dict:
    """The backward's blocks of wide heads, and of float8_e4m3fn, which work alone in this catalog:
    gradients against float64, and the same bits again, without masks and with them, and with
    options."""
    from gpu import attention_cases as ac
    from gpu import attention_e4m3_sanitized, cases
    from gpu import attention_reference as ar
    from gpu.test_cuda_attention_sm90_backward import CALLS
    from gpu.test_cuda_attention_sm90_options import tile_masks

    import torch_cubin  # noqa: F401
    from torch_cubin._native import library

    dtype, g, wrong = ac.DTYPES[name], ac.generator(f"alone {name}"), []
    masked = [
        (2, 4, 2, 1300, 1500, {"attn_mask": mask}) for mask in tile_masks(1300, 1500).values()
    ]
    for mask in tile_masks(1300, 1500).values():
        numbers = torch.randn(mask.shape, generator=g, device="cuda").masked_fill(~mask, -torch.inf)
        for kind in (dtype, torch.float32):
            masked.append((2, 4, 2, 1300, 1500, {"attn_mask": numbers.to(kind)}))
    seen = tile_masks(700, 900)["documents"]
    numbers = torch.randn(seen.shape, generator=g, device="cuda").masked_fill(~seen, -torch.inf)
    with_options = [
        (2, 4, 2, 700, 900, {**given, **ac.score_options(kind, 2, 4, g)})
        for kind in ac.SCORE_KINDS
        for given in ({"is_causal": True}, {"attn_mask": seen}, {"attn_mask": numbers})
    ]
    for batch, heads, kv_heads, rows, columns, given in [*CALLS, *masked, *with_options]:
        options = {"enable_gqa": True, **given}
        layout = cases.Layout()
        q = ac.draw((batch, heads, rows, 256), dtype, g, layout)
        k, v = (ac.draw((batch, kv_heads, columns, 256), dtype, g, layout) for _ in range(2))
        grad = ac.draw((batch, heads, rows, 256), dtype, g, layout)
        ours, _ = ar.both(q, k, v, grad, **options)
        rest, kept = ar.without_dropout(options, (batch, heads, rows, columns))
        what = {**given, "attn_mask": "of tiles"} if "attn_mask" in given else given
        label = f"{name} {(batch, heads, kv_heads, rows, columns)} {what}"
        try:
            ar.check(name, label, ours, ar.reference(q, k, v, grad, kept=kept, **rest))
        except AssertionError as error:
            wrong.append(f"{label}: {error}")
        again, _ = ar.both(q, k, v, grad, **options)
        if not all(torch.equal(x, y) for x, y in zip(ours, again, strict=True)):
            wrong.append(f"{label}: other bits in another run")
    if name == "bfloat16":
        torch.manual_seed(0)
        wrong += attention_e4m3_sanitized.compare(1, 2, 1, 100, 2500, 128, {"is_causal": True})
    loaded = sorted(entry["name"] for entry in library.catalog()["loaded"])
    return {"wrong": wrong, "loaded": loaded}


LENGTHS = [300, 0, 129, 640, 31]  # of packed sequences


def wrong_offsets() -> dict[str, list[int]]:
    """Lists that are not offsets of as many rows as LENGTHS have."""
    right = [sum(LENGTHS[:i]) for i in range(len(LENGTHS) + 1)]
    far, least = 2**31 - 1, -(2**31)
    return {
        "last past the end": [*right[:-1], right[-1] + 1],
        "far past the end": [*right[:-2], 10**7, 2 * 10**7],
        "all past the end": [x + 10**8 for x in right],
        "below 0": [-128, *right[1:]],
        "far below 0": [-(10**8), *right[1:]],
        "falling": right[::-1],
        "once falling": [0, 640, 129, 640, 429, 1100],
        "tiles of two": [0, 400, 10, 410, 20, 420],
        "extreme": [0, far, least, far, least, 5],
        "extreme, reversed": [least, far, -1, far, least, far],
    }


def attention_wrong_offsets(dtype: str, head_dim: str, option: str) -> dict:
    """Offsets that are none, of queries, of keys, and of both: every call comes to its end, faults
    nowhere, and leaves calls behind it what they were."""
    import torch_cubin  # noqa: F401

    g = torch.Generator("cuda").manual_seed(5)
    rows, at = sum(LENGTHS), torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).int()
    e4m3 = dtype == "float8_e4m3fn"
    rule = {"softcap": 20.0} if option == "softcap" else {"is_causal": option == "causal"}
    rule |= {} if e4m3 else {"enable_gqa": True}
    forward = torch.ops.cubin.attention_forward_e4m3 if e4m3 else torch.ops.cubin.attention_forward
    q, k, v, grad = (
        torch.randn(rows, heads, int(head_dim), device="cuda", generator=g).to(
            getattr(torch, dtype)
        )
        for heads in (4, 2, 2, 4)
    )

    def run(q_at: torch.Tensor, k_at: torch.Tensor) -> list[torch.Tensor]:
        named = {"cu_seqlens_q": q_at, "cu_seqlens_k": k_at, **rule}
        out, logsumexp = forward(q, k, v, **named)
        if e4m3:
            return [out, logsumexp]
        grads = torch.ops.cubin.attention_backward(grad, q, k, v, out, logsumexp, **named)
        return [out, logsumexp, *grads]

    def same(ours: list[torch.Tensor]) -> bool:
        return all(torch.equal(x, y) for x, y in zip(ours, right, strict=True))

    right, not_nan, changed = run(at, at), [], []
    for name, offsets in wrong_offsets().items():
        wrong = torch.tensor(offsets, device="cuda").int()
        for q_at, k_at in ((wrong, at), (at, wrong), (wrong, wrong)):
            results = run(q_at, k_at)
            torch.cuda.synchronize()
            if not all(bool(x.isnan().all()) for x in results):
                not_nan.append(name)
        if not same(run(at, at)):
            changed.append(name)
    return {"not_nan": not_nan, "changed": changed, "sane": bool(right[0].isfinite().all())}


def attention_options(name: str, seed: str) -> dict:
    """Random calls with every option (test_cuda_attention_options.py), by the kernels for Hopper
    wherever they take a call: how quick they are does not count here."""
    from gpu import attention_cases as ac
    from gpu import fresh_memory
    from gpu import test_cuda_attention_options as options

    import torch_cubin  # noqa: F401
    from torch_cubin._native import library

    fresh_memory.fill()
    r, g = random.Random(f"Hopper's options {name} {seed}"), ac.generator(int(seed))
    wrong = []
    for index in range(2 * options.CASES):
        case = options.random_case(r)
        try:
            options.run(case, name, g, r.getrandbits(62))
        except Exception as error:
            wrong.append(f"seed {seed}, {name}, case {index}: {case}: {error}")
    loaded = sorted(entry["name"] for entry in library.catalog()["loaded"])
    return {"wrong": wrong, "loaded": loaded}


def attention_repeats(kind: str, head_dim: str) -> dict:
    """How many of 10,000 backwards beside products differ from the first."""
    from gpu.repeats import count_different
    from gpu.test_cuda_attention_repeats import make

    import torch_cubin  # noqa: F401

    args, grad, options = make(kind, int(head_dim), torch.bfloat16)
    with torch.no_grad():
        rest = (grad, *args, *torch.ops.cubin.attention_forward(*args, **options))

        def call() -> list[torch.Tensor]:
            return list(torch.ops.cubin.attention_backward(*rest, **options))

        first = [x.clone() for x in call()]
        return {"different": count_different(call, first)}


if __name__ == "__main__":
    from gpu import answers, fresh_memory

    fresh_memory.fill_if_wanted()
    scenario = globals()[sys.argv[1]]
    answers.give(scenario(*sys.argv[2:]))
