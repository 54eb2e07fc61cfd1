"""The scenarios of attention that compute-sanitizer watches: see child.py.

    python tests/gpu/attention_sanitized.py NAME ARGUMENT...

Inputs are made on the CPU, and results compared there with the CPU's reference: few kernels but
ours run.
"""

from __future__ import annotations

import itertools
import random
import sys

import torch
from gpu.attention_child import _bare, _both, _near, _on_gpu


def _calls(r: random.Random, tool: str) -> list[tuple]:
    """(batch, heads, kv_heads, rows, columns, head_dim, head_dim_v), and options."""
    shapes = [
        (1, 2, 1, 65, 70, 64, 64),
        (2, 2, 2, 1, 200, 128, 128),
        (1, 2, 2, 130, 33, 40, 72),
        (1, 2, 1, 17, 129, 256, 256),
        (1, 1, 1, 5, 7, 20, 12),
        (1, 4, 1, 3, 300, 96, 96),
        # A mask of each head, in two chunks of keys that are read in vectors; in pairs of blocks.
        (1, 2, 1, 200, 528, 64, 64),
        (1, 2, 2, 300, 320, 256, 256),
        (1, 2, 1, 130, 100, 192, 184),
    ]
    options = [
        {}, {"is_causal": True}, {"attn_mask": "bool"}, {"attn_mask": "own"},
        {"attn_mask": "float32"}, {"dropout_p": 0.3, "is_causal": True},
        {"softcap": 2.0, "alibi_slopes": True, "sinks": True},
        {"window_left": 9, "window_right": 3, "bottom_right": True},
    ]  # fmt: skip
    if tool == "racecheck":  # some hundred times slower
        shapes = [
            (1, 2, 1, 65, 70, 64, 64),
            (1, 2, 1, 1, 200, 128, 128),
            (1, 2, 1, 130, 65, 128, 128),  # steps enough to use each stage again
            (1, 2, 1, 70, 65, 256, 256),
        ]
        masked = [(shapes[2], options[2]), (shapes[2], options[3]), (shapes[2], options[4])]
        options = [options[0], options[1], options[5], options[6]]
    calls = [(shape, option) for shape in shapes for option in options]
    if tool == "racecheck":
        calls += masked
    r.shuffle(calls)
    return calls


def _options(raw: dict, shape: tuple, dtype: torch.dtype) -> dict:
    batch, heads, _, rows, columns, *_ = shape
    made = {**raw, "enable_gqa": True}
    mask = torch.randn(batch, heads if rows * columns > 100_000 else 1, rows, columns)
    kind = raw.get("attn_mask")
    if kind:
        made["attn_mask"] = mask > -0.5 if kind == "bool" else mask.to(dtype)
        if kind == "float32":
            made["attn_mask"] = mask
    for name in ("alibi_slopes", "sinks"):
        if name in raw:
            made[name] = torch.rand(heads)
    if "dropout_p" in raw:
        made["dropout_seed"] = torch.tensor([12345])
    return made


def _packed(dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor, dict]:
    args = [torch.randn(n, h, 64).to(dtype) for n, h in ((90, 4), (100, 2), (100, 2))]
    options = {
        "cu_seqlens_q": torch.tensor([0, 1, 60, 60, 90], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 30, 33, 70, 100], dtype=torch.int32),
        "enable_gqa": True,
    }
    return args, torch.randn(90, 4, 64).to(dtype), options


# By products: of scores a warp takes a row, and a block.
COMPOSED = ((1, 1, 1, 9, 70, 264, 264), (1, 1, 1, 2, 4104, 264, 16))


def _over_host(*outputs: torch.Tensor) -> list[torch.Tensor]:
    """To initcheck what kernels wrote that it does not follow (gpu/sanitized.py) is uninitialised
    in those that read it; what a copy wrote is not."""
    return [output.cpu().cuda() for output in outputs]


class Comparison:
    """Calls in both directions beside the CPU's: how many, and what was wrong."""

    def __init__(self) -> None:
        self.calls = 0
        self.wrong: list[str] = []

    def __call__(self, label: str, dtype: torch.dtype, args, grad, bare, bare_grad, options):
        want = _both(args, grad, options)
        ours = _both(bare, bare_grad, _on_gpu(options), _over_host)
        self.calls += 2
        names = ("out", "logsumexp", "dq", "dk", "dv")
        for name, x, y in zip(names, ours, want, strict=True):
            if not _near(x, y, dtype):
                self.wrong.append(f"{name} of {label}")

    def made(self, shape: tuple, raw: dict, dtype: torch.dtype, r: random.Random) -> None:
        """The call of this shape (see _calls) with these options, in some layout."""
        orders = [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)]
        batch, heads, kv_heads, rows, columns, head_dim, head_dim_v = shape
        sizes = [
            (batch, heads, rows, head_dim),
            (batch, kv_heads, columns, head_dim),
            (batch, kv_heads, columns, head_dim_v),
        ]
        args = [torch.randn(size).to(dtype) for size in sizes]
        grad = torch.randn(batch, heads, rows, head_dim_v).to(dtype)
        bare = [_bare(x, r.choice(orders), r.choice((0, 0, 8, 3))) for x in args]
        bare_grad = _bare(grad, r.choice(orders), 0)
        options = _options(raw, shape, dtype)
        self(f"{dtype} {shape} {raw}", dtype, args, grad, bare, bare_grad, options)


def attention_sanitize(tool: str, *dtypes: str) -> dict:
    """A reduced set of shapes, dtypes (default: all), layouts and options; compute-sanitizer
    watches."""
    from gpu import attention_e4m3_sanitized

    import torch_cubin  # noqa: F401

    torch.manual_seed(1)
    r = random.Random(repr((7, *dtypes)))
    compare = Comparison()
    for name in dtypes or ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn"):
        dtype = getattr(torch, name)
        if dtype == torch.float8_e4m3fn:
            made, found = attention_e4m3_sanitized.sanitize(tool)
            compare.calls += made
            compare.wrong += found
            continue
        chosen = _calls(r, tool)
        if dtype != torch.bfloat16 and tool == "memcheck":
            chosen = chosen[: len(chosen) // 4]
        for index, (shape, raw) in enumerate(chosen):
            # With fresh memory filled by torch, and unfilled; initcheck tracks what was written.
            torch.use_deterministic_algorithms(index % 2 == 1 and tool != "initcheck")
            compare.made(shape, raw, dtype, r)
        for columns in (70, 4104) if dtype in (torch.float32, torch.float64) else ():
            weights, seed = torch.rand(1, 2, 3, columns, dtype=dtype), torch.tensor([12345])
            drop = torch.ops.cubin._attention_dropout
            dropped, wanted = drop(weights.cuda(), seed.cuda(), 0.3).cpu(), drop(weights, seed, 0.3)
            compare.wrong += [] if _near(dropped, wanted, dtype) else [f"dropout {columns}"]
        for shape, raw in itertools.product(COMPOSED, ({}, {"dropout_p": 0.3})):
            compare.made(shape, raw, dtype, r)
        if tool == "racecheck" and dtype == torch.float32:  # in parts, which one kernel joins
            compare.made((1, 1, 1, 1, 600, 64, 64), {}, dtype, r)
        if dtype != torch.float64:
            args, grad, options = _packed(dtype)
            bare = [_bare(x, (0, 1, 2), 0) for x in args]
            compare(f"{dtype} packed", dtype, args, grad, bare, grad.cuda(), options)
    torch.cuda.synchronize()
    return {"wrong": compare.wrong, "calls": compare.calls}


_OF_TURNS: list[dict] = [
    {}, {"attn_mask": "bool"}, {"attn_mask": "own"}, {"attn_mask": "float32"},
    {"softcap": 2.0, "is_causal": True}, {"softcap": 2.0, "attn_mask": "own"},
    {"sinks": True}, {"dropout_p": 0.3},
]  # fmt: skip


def attention_turns_sanitize(tool: str, name: str, turn: str) -> dict:
    """Every width of heads with every kind of options by the kernels that have the turn (see
    run_child.turned_catalog), where these and rows allow it: some serve batch_invariant() alone.

    For racecheck keys end before a slot of shared memory is used again. A warp's lanes read a slot,
    meet, and one of them arrives at the mbarrier on which the next copy waits: it orders that
    lane's reads alone (words and masks of a step were reported).
    """
    from gpu import attention_e4m3_sanitized

    import torch_cubin

    torch.manual_seed(int(turn))
    r, compare, dtype = random.Random(turn), Comparison(), getattr(torch, name)
    short = tool == "racecheck"
    if dtype == torch.float8_e4m3fn:
        calls = [(130, 200, {"is_causal": True})] + ([] if short else [(65, 2100, {})])
        for width, (rows, columns, options) in itertools.product((64, 128, 256), calls):
            compare.calls += 2
            call = 1, 2, 1, rows, columns, width, options
            compare.wrong += attention_e4m3_sanitized.compare(*call)
    else:
        columns = 120 if short else 140
        for width in (32, 64, 96, 128, 160, 192, 256):
            for raw in _OF_TURNS:
                compare.made((1, 2, 1, 70, columns, width, width), raw, dtype, r)
            with torch_cubin.batch_invariant():
                compare.made((1, 2, 1, 5, columns, width, width), {}, dtype, r)
    torch.cuda.synchronize()
    return {"wrong": compare.wrong, "calls": compare.calls}


def attention_caches_sanitize(tool: str, name: str) -> dict:
    """Steps over caches: of keys and values of either dtype, whole and in pages, long enough for
    several parts, with new rows; packed under batch_invariant(); of a large batch."""
    from ops import kv_cache_cases

    import torch_cubin

    torch.manual_seed(3)
    wrong, calls = [], 0
    long = {"batch": 2, "heads": 8, "shared": 2, "capacity": 1600, "lengths": [1500, 70]}
    cases: list[dict] = [
        {**long, "dim": dim, "page_size": page_size, "rows": rows}
        for dim in (64, 128, 256)
        for page_size, rows in ((0, 1), (16, 1), (0, 16))
    ]
    for batch, capacity in ((70, 208), (16, 832)):
        lengths = [i % capacity for i in range(0, 50 * batch, 50)]
        cases.append({"batch": batch, "heads": 16, "shared": 4, "capacity": capacity, "dim": 128,
                      "lengths": lengths})  # fmt: skip
    for case, e4m3 in itertools.product(cases, (False, True)):
        case = {"rows": 1, **case, "dtype": getattr(torch, name), "e4m3": e4m3, "causal": True}
        args = kv_cache_cases.make("cpu", **case, new=case["rows"])
        wanted, *_ = kv_cache_cases.expected(**args)
        for invariant in (False, True):
            with torch_cubin.batch_invariant(invariant):
                out = torch.ops.cubin.flash_attention_with_kvcache(**_on_gpu(args))
            calls += 1
            if not (out.cpu().double() - wanted).norm() <= 2e-2 * wanted.norm():
                wrong.append(f"cache {case} {invariant}")
    torch.cuda.synchronize()
    return {"wrong": wrong, "calls": calls}


if __name__ == "__main__":
    from gpu import answers, fresh_memory

    fresh_memory.fill_if_wanted()
    answers.give(answers.in_time(globals()[sys.argv[1]], *sys.argv[2:]))
