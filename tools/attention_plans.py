"""Compares the launches of 10,000 random attention calls before and after a change.

    git checkout main && make && python tools/attention_plans.py record /tmp/before.json
    git checkout mine && make && python tools/attention_plans.py compare /tmp/before.json

Forward, backward, caches and float8_e4m3fn, with every option, in several layouts, run on the
tests' stand-in driver, as on an H200 or (`--gpu h100`) an H100. The record has the kernels that a
call launches, in order, with their grids, shared memory, attributes and the bytes of their
parameters, or the error that it raises. Addresses are replaced by numbers in order of occurrence,
because they differ between processes. The exit status is 1 if a call differs.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import json
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import stand_in

# Parameter words in this range are assumed to be addresses of the process.
FIRST_ADDRESS, LAST_ADDRESS = 1 << 42, 1 << 47
ALIGNED = 512  # bytes: the alignment of the stand-in's allocations
MOST_ELEMENTS = 1 << 26  # of one tensor


def main() -> int:
    options = stand_in.comparison(__doc__, "calls", show=20)
    if not stand_in.is_there():
        return stand_in.run_again(options.gpu)
    driver, _ = stand_in.driver("attention")
    rng = random.Random(options.seed)
    calls = [random_call(rng) for _ in range(options.calls)]
    launches = [launches_of(driver, call) for call in calls]
    print_summary(launches)
    if options.action == "record":
        options.record.write_text(json.dumps(launches))
        return 0
    return compare(calls, json.loads(options.record.read_text()), launches, options.show)


def print_summary(launches: list[list[Any]]) -> None:
    used = {launch[0] for call in launches for launch in call if len(launch) > 1}
    errors = collections.Counter(call[-1][0][:60] for call in launches if is_error(call))
    refused = ", ".join(f"{count} x {text!r}" for text, count in errors.most_common(4))
    print(f"{len(launches)} calls, {len(used)} kernels; {errors.total()} errors: {refused}")


def is_error(call: list[Any]) -> bool:
    return bool(call) and len(call[-1]) == 1


def compare(calls: list[dict], before: list[Any], after: list[Any], show: int) -> int:
    changed = [number for number, pair in enumerate(zip(before, after, strict=True))
               if pair[0] != pair[1]]  # fmt: skip
    for number in changed[:show]:
        print(f"{calls[number]}\n  before: {before[number]}\n  after:  {after[number]}")
    print(f"{len(calls)} calls, {len(changed)} changed")
    return 1 if changed else 0


# Launching a call.


def launches_of(driver: Any, call: dict[str, Any]) -> list[list[Any]]:
    """[kernel, grid, block, shared memory, attributes, parameters' hash] of each launch, and the
    error of a call that raises one."""
    import torch

    import torch_cubin

    driver.reset()
    error = []
    context = torch_cubin.batch_invariant() if call["batch_invariant"] else contextlib.nullcontext()
    try:
        with torch.no_grad(), context:
            getattr(torch.ops.cubin, call["op"])(**arguments(call))
    except Exception as found:  # the record contains the error
        error = [[f"{type(found).__name__}: {found}".split("\n")[0]]]
    return [launch_of(launch) for launch in driver.launches()] + error


def launch_of(launch: dict[str, Any]) -> list[Any]:
    (params,) = launch["params"]
    return [
        *(launch[name] for name in ("kernel", "grid", "block", "shared", "attributes")),
        hashlib.sha256(without_addresses(bytes.fromhex(params))).hexdigest()[:16],
    ]


def without_addresses(params: bytes) -> bytes:
    """The parameters with addresses replaced by numbers in order of occurrence."""
    seen: dict[int, int] = {}
    out = bytearray(params)
    for at in range(0, len(params) - 7, 8):
        word = int.from_bytes(params[at : at + 8], "little")
        if FIRST_ADDRESS <= word < LAST_ADDRESS:
            place = seen.setdefault(word, len(seen) + 1)
            out[at : at + 8] = (place * ALIGNED + word % ALIGNED).to_bytes(8, "little")
    return bytes(out)


def arguments(call: dict[str, Any]) -> dict[str, Any]:
    """The call with tensors in place of their descriptions."""
    import torch
    from fake_driver import tensors

    def made(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        size, stride = tuple(value["size"]), tuple(value["stride"])
        return tensors.strided(size, stride, getattr(torch, value["dtype"]), 0, value["offset"])

    return {name: made(value) for name, value in call["arguments"].items()}


# Random calls.


def random_call(rng: random.Random) -> dict[str, Any]:
    make = rng.choices((dense, packed, cache, e4m3), (55, 20, 15, 10))[0]
    op, given = make(rng)
    return {"op": op, "arguments": given, "batch_invariant": rng.random() < 0.15}


def tensor(size: tuple[int, ...], dtype: str, order: tuple[int, ...] = (),
           offset: int = 0) -> dict[str, Any]:  # fmt: skip
    """`order`: the dims in memory order, outermost first."""
    stride, step = [0] * len(size), 1
    for dim in reversed(order or range(len(size))):
        stride[dim] = step
        step *= max(1, size[dim])
    return {"size": size, "stride": stride, "dtype": dtype, "offset": offset}


def random_order(rng: random.Random) -> tuple[int, ...]:
    return rng.choice(((0, 1, 2, 3), (0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3), (2, 0, 1, 3)))


def random_dtype(rng: random.Random) -> str:
    return rng.choice(("bfloat16", "bfloat16", "float16", "float16", "float32"))


def random_head_dim(rng: random.Random) -> int:
    return rng.choice((64, 64, 64, 128, 128, 128, 256, 96, 32, 40, 80, 112, 160, 192, 8, 264))


def random_heads(rng: random.Random) -> tuple[int, int]:
    kv_heads = rng.choice((1, 2, 4, 8, 8, 16))
    return kv_heads * rng.choice((1, 1, 1, 2, 4, 8)), kv_heads


def random_rows(rng: random.Random) -> int:
    if rng.random() < 0.2:
        return rng.choice((1, 1, 2, 3, 8, 16, 17, 64))
    return max(1, int(2 ** rng.uniform(3, 14)) // (step := rng.choice((1, 16, 128))) * step)


def scores(rng: random.Random, heads: int, batch: int) -> dict[str, Any]:
    """Options that every forward has."""
    options: dict[str, Any] = {}
    if rng.random() < 0.35:
        options["is_causal"] = True
    if rng.random() < 0.2:
        options["window_left"] = rng.choice((0, 16, 127, 1000))
    if rng.random() < 0.1:
        options["window_right"] = rng.choice((0, 5, 300))
    if rng.random() < 0.3:
        options["bottom_right"] = True
    if rng.random() < 0.25:
        options["scale"] = rng.choice((0.3, 1.0, 0.0, -0.5, 1e-38))
    if rng.random() < 0.15:
        options["softcap"] = rng.choice((30.0, 50.0, 200.0))
    if rng.random() < 0.12:
        size = rng.choice(((heads,), (batch, heads)))
        options["alibi_slopes"] = tensor(size, "float32")
    if rng.random() < 0.15:
        options["sinks"] = tensor((heads,), "float32")
    if rng.random() < 0.08:
        options["dropout_p"] = rng.choice((0.1, 0.5))
        options["dropout_seed"] = tensor((1,), "int64")
    return options


def mask(rng: random.Random, dtype: str, sizes: tuple[int, ...]) -> dict[str, Any]:
    size = tuple(n if rng.random() < 0.6 else 1 for n in sizes[:-1]) + sizes[-1:]
    size = size[rng.choice((0, 0, 1, 2)) :]
    offset = rng.choice((0, 0, 0, 1))
    return tensor(size, rng.choice(("bool", "bool", dtype, "float32")), (), offset)


def dense(rng: random.Random) -> tuple[str, dict[str, Any]]:
    dtype, order = random_dtype(rng), random_order(rng)
    batch, (heads, kv_heads) = rng.choice((1, 1, 2, 3, 8, 40)), random_heads(rng)
    head_dim = random_head_dim(rng)
    head_dim_v = head_dim if rng.random() < 0.9 else rng.choice((64, 128))
    rows = random_rows(rng)
    keys = rows if rng.random() < 0.6 else random_rows(rng)
    widest = max(heads, 1) * max(rows, keys) * max(head_dim, head_dim_v)
    batch = max(1, min(batch, MOST_ELEMENTS // widest))
    given = {
        "query": tensor((batch, heads, rows, head_dim), dtype, order),
        "key": tensor((batch, kv_heads, keys, head_dim), dtype, order),
        "value": tensor((batch, kv_heads, keys, head_dim_v), dtype, order),
    }
    options = scores(rng, heads, batch)
    if kv_heads != heads:
        options["enable_gqa"] = True
    small = batch * heads * rows * keys < MOST_ELEMENTS
    if rng.random() < 0.3 and small and "is_causal" not in options:
        options["attn_mask"] = mask(rng, dtype, (batch, heads, rows, keys))
    if rng.random() < 0.4:
        given |= saved(rng, (batch, heads, rows), head_dim_v, dtype, order)
        return "_attention_backward", given | options
    plain = ("attn_mask", "dropout_p", "is_causal", "dropout_seed", "scale", "enable_gqa")
    if rng.random() < 0.2:
        given |= {name: options[name] for name in plain if name in options}
        return "_scaled_dot_product_attention", given
    return "_attention_forward", given | options


def saved(rng: random.Random, rows: tuple[int, ...], head_dim_v: int, dtype: str,
          order: tuple[int, ...] = ()) -> dict[str, Any]:  # fmt: skip
    """The arguments of a backward in addition to its forward's tensors."""
    out = {name: tensor((*rows, head_dim_v), dtype, order) for name in ("grad_out", "out")}
    return {**out, "logsumexp": tensor(rows, "float32")}


def packed(rng: random.Random) -> tuple[str, dict[str, Any]]:
    dtype, head_dim = random_dtype(rng), random_head_dim(rng)
    (heads, kv_heads), sequences = random_heads(rng), rng.choice((0, 1, 2, 7, 64))
    rows, keys = (min(random_rows(rng), 1 << 13) for _ in range(2))
    given = {
        "query": tensor((rows, heads, head_dim), dtype),
        "key": tensor((keys, kv_heads, head_dim), dtype),
        "value": tensor((keys, kv_heads, head_dim), dtype),
    }
    options = scores(rng, heads, sequences) | bounds(rng, sequences, rows, keys)
    if kv_heads != heads:
        options["enable_gqa"] = True
    if rng.random() < 0.4:
        given |= saved(rng, (rows, heads), head_dim, dtype)
        given["logsumexp"] = tensor((heads, rows), "float32")
        return "_attention_backward", given | options
    return "_attention_forward", given | options


def bounds(rng: random.Random, sequences: int, rows: int, keys: int) -> dict[str, Any]:
    options = {f"cu_seqlens_{of}": tensor((sequences + 1,), "int32") for of in "qk"}
    if rng.random() < 0.7:
        options |= {"max_seqlen_q": rng.randint(1, rows), "max_seqlen_k": rng.randint(1, keys)}
    return options


def e4m3(rng: random.Random) -> tuple[str, dict[str, Any]]:
    dtype, head_dim = "float8_e4m3fn", rng.choice((64, 128, 256, 96, 32, 288))
    heads, kv_heads = random_heads(rng)
    rows, keys = random_rows(rng), random_rows(rng)
    kept = ("is_causal", "scale", "window_left", "window_right", "bottom_right")
    if rng.random() < 0.3:
        batch, rows, keys = rng.choice((1, 5)), min(rows, 1 << 12), min(keys, 1 << 12)
        sizes = [(rows, heads, head_dim)] + [(keys, kv_heads, head_dim)] * 2
        order: tuple[int, ...] = ()
        options = bounds(rng, batch, rows, keys)
    else:
        batch = max(1, min(rng.choice((1, 2, 9)), MOST_ELEMENTS // (max(rows, keys) * heads * 256)))
        sizes = [(batch, heads, rows, head_dim)] + [(batch, kv_heads, keys, head_dim)] * 2
        order, options = random_order(rng), {}
    options |= {k: v for k, v in scores(rng, heads, batch).items() if k in kept}
    for name in ("q_descale", "k_descale", "v_descale"):
        if rng.random() < 0.4:
            order_of = rng.choice(((0, 1), (1, 0)))
            options[name] = tensor((batch, kv_heads), "float32", order_of)
    names = ("query", "key", "value")
    given = {n: tensor(size, dtype, order) for n, size in zip(names, sizes, strict=True)}
    return "_attention_forward_e4m3", given | options


def cache(rng: random.Random) -> tuple[str, dict[str, Any]]:
    dtype = rng.choice(("bfloat16", "float16"))
    cached = rng.choice((dtype, dtype, "float8_e4m3fn"))
    (heads, kv_heads), batch = random_heads(rng), rng.choice((1, 1, 2, 8, 64))
    head_dim, rows = rng.choice((64, 128, 128, 256, 96, 264)), rng.choice((1, 1, 1, 2, 5, 33))
    capacity = rng.choice((64, 512, 4096, 5000))
    batch = max(1, min(batch, MOST_ELEMENTS // (capacity * kv_heads * head_dim)))
    given: dict[str, Any] = {"q": tensor((batch, rows, heads, head_dim), dtype)}
    if rng.random() < 0.4:
        size = rng.choice((16, 64, 256))
        pages = batch * -(-capacity // size)
        sizes = (pages, size, kv_heads, head_dim)
        given["block_table"] = tensor((batch, pages // batch), "int32")
    else:
        sizes = (batch + rng.choice((0, 3)), capacity, kv_heads, head_dim)
        if sizes[0] != batch or rng.random() < 0.2:
            given["cache_batch_idx"] = tensor((batch,), "int32")
    given |= {name: tensor(sizes, cached) for name in ("k_cache", "v_cache")}
    if rng.random() < 0.7:
        given["cache_seqlens"] = tensor((batch,), "int32")
        if rng.random() < 0.5:
            new = (batch, rng.choice((1, rows)), kv_heads, head_dim)
            given |= {name: tensor(new, dtype) for name in "kv"}
            if rng.random() < 0.5:
                given |= {f"rotary_{of}": tensor((8192, 16), dtype) for of in ("cos", "sin")}
                given["rotary_interleaved"] = rng.random() < 0.5
    if cached != dtype:
        for name in ("k_descale", "v_descale"):
            if rng.random() < 0.5:
                given[name] = tensor((batch, kv_heads), "float32")
    options = scores(rng, heads, batch)
    names = {"is_causal": "causal", "scale": "softmax_scale"}
    kept = ("window_left", "window_right", "softcap", "alibi_slopes", "sinks", *names)
    given |= {names.get(name, name): x for name, x in options.items() if name in kept}
    return "_flash_attention_with_kvcache", given


if __name__ == "__main__":
    sys.exit(main())
