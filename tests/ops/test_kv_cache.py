"""flash_attention_with_kvcache: what it gives, what it writes, and what it refuses."""

from __future__ import annotations

import itertools
import random

import numerics
import pytest
import torch
from ops import kv_cache_cases
from ops.kv_cache_cases import CASES, E4M3, expected, make
from ops.samples import fakes

import torch_cubin

attend = torch.ops.cubin.flash_attention_with_kvcache


def check(args, label=""):
    """A call against the formula, and what it leaves in the caches."""
    wanted, k_cache, v_cache = expected(**args)
    out = attend(**args)
    assert out.shape == wanted.shape
    assert out.is_contiguous()
    assert out.dtype == args["q"].dtype
    error = (out.double() - wanted).abs().max().item() if out.numel() else 0
    limit = 2e-2 * max(1.0, wanted.abs().max().item() if wanted.numel() else 1.0)
    assert not numerics.exceeds(error, limit), (label, error)
    check_caches(args, k_cache, v_cache)


def check_caches(args, k_cache, v_cache):
    written = [args[name] for name in ("k_cache", "v_cache")]
    if written[0].dtype == E4M3:
        written = [x.float() for x in written]
    # A rotation is rounded once: an ulp, where float32 and float64 round apart.
    rtol, atol = (0.125, 2**-9) if args["k_cache"].dtype == E4M3 else (1e-2, 1e-3)
    if args.get("rotary_cos") is None:
        assert torch.equal(written[0], k_cache)
    torch.testing.assert_close(written[0], k_cache, rtol=rtol, atol=atol)
    assert torch.equal(written[1], v_cache)


@pytest.mark.parametrize("name", CASES)
def test_case(name, device):
    check(make(device, **CASES[name]), name)


@pytest.mark.parametrize("seed", range(20))
def test_random(seed, device):
    torch.manual_seed(seed)
    check(kv_cache_cases.random_case(random.Random(seed), device), f"seed {seed}")


def test_rows_of_other_sequences_stay(device):
    """Nothing is written but the new rows."""
    args = make(device, page_size=16, lengths=[3, 40, 90], new=2)
    before = args["k_cache"].clone()
    attend(**args)
    changed = (args["k_cache"] != before).any(-1).any(-1)
    assert int(changed.sum()) == 6


def test_indices_out_of_range_write_nothing_and_read_inside(device):
    args = make(device, page_size=16, lengths=[3, 40, 90], new=1)
    pages = args["k_cache"].shape[0]
    args["block_table"].fill_(pages)
    args["block_table"][1].fill_(-1)
    args["block_table"][2].fill_(2**31 - 1)
    before = args["k_cache"].clone()
    out = attend(**args)
    assert out.isfinite().all()
    assert torch.equal(args["k_cache"], before)
    args = make(device, cache_batch=5, lengths=[3, 40, 90], new=1)
    args["cache_batch_idx"].copy_(torch.tensor([-1, 5, 2**31 - 1]))
    before = args["k_cache"].clone()
    assert attend(**args).isfinite().all()
    assert torch.equal(args["k_cache"], before)


def test_indices_of_pages_that_no_length_reaches_are_not_read(device):
    args = make(device, page_size=16, lengths=[3, 17, 32])
    wanted = attend(**args)
    args["block_table"][0, 1:] = -1
    args["block_table"][1, 2:] = 10**6
    args["block_table"][2, 2:] = -7
    assert torch.equal(attend(**args), wanted)


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({"batch": 0}, (0, 1, 4, 64)),
        ({"rows": 0}, (3, 0, 4, 64)),
        ({"capacity": 0}, (3, 1, 4, 64)),
        ({"heads": 0, "shared": 1}, (3, 1, 0, 64)),
    ],
)
def test_empty(sizes, shape, device):
    out = attend(**make(device, **sizes))
    assert out.shape == shape
    assert not out.any()


@pytest.mark.parametrize("none", [{"rows": 0}, {"heads": 0, "shared": 2}], ids=["rows", "heads"])
@pytest.mark.parametrize("rotary_dim", [0, 64])
def test_rows_that_are_written_without_a_query(none, rotary_dim, device):
    args = make(device, lengths=[3, 40, 90], new=1, rotary_dim=rotary_dim, **none)
    _, k_cache, v_cache = expected(**args)
    assert not torch.equal(args["k_cache"], k_cache)
    assert not attend(**args).numel()
    check_caches(args, k_cache, v_cache)


def test_a_cache_of_any_strides(device):
    args = make(device, capacity=64, lengths=[3, 40, 60], new=2, rows=2)
    for name in ("k_cache", "v_cache"):
        own = args[name].permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3)
        args[name] = own
    both = torch.randn(3, 64, 2, 2, 64, device=device, dtype=torch.bfloat16)
    check(args)
    args["k_cache"], args["v_cache"] = both.unbind(2)
    check(args)


def test_a_write_increments_the_versions_of_the_caches(device):
    args = make(device, lengths=[3, 40, 60], new=1)
    attend(**args)
    assert (args["k_cache"]._version, args["v_cache"]._version) == (1, 1)
    del args["k"], args["v"]
    attend(**args)
    assert args["k_cache"]._version == 1


def check_alone(lengths, **args):
    """A sequence, in pages of 16, has the bits that it has alone, in a cache of any capacity."""
    with torch_cubin.batch_invariant():
        together = attend(**args)
        for b, length in enumerate(lengths):
            pages = -(-length // 16)
            alone = args | {
                "q": args["q"][b : b + 1],
                "block_table": args["block_table"][b : b + 1, :pages].contiguous(),
                "cache_seqlens": args["cache_seqlens"][b : b + 1],
            }
            assert torch.equal(attend(**alone), together[b : b + 1]), length


def test_batch_invariance(device):
    lengths = [2000, 300, 1, 777]
    args = make(device, batch=4, capacity=2048, lengths=lengths, sinks=True, page_size=16)
    check_alone(lengths, **args)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32], ids=str)
def test_autocast_casts_to_the_dtype_of_the_caches(given, dtype, device):
    """Whatever its own dtype is, because they are written to."""
    args = make(device, lengths=[3, 40, 60], new=1, rotary_dim=64)
    wide = args | {
        name: args[name].to(given) for name in ("q", "k", "v", "rotary_cos", "rotary_sin")
    }
    wanted = attend(**args | {"k_cache": args["k_cache"].clone()})
    with torch.autocast(device, dtype=dtype):
        out = attend(**wide)
        by_position = [wide.pop(name) for name in ("q", "k_cache", "v_cache")]
        assert torch.equal(attend(*by_position, **wide), wanted)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("name", ["q", "k", "k_cache"])
def test_derivatives_are_refused(name, device):
    args = make(device, lengths=[3, 40, 60], new=1)
    args[name].requires_grad_()
    with pytest.raises(RuntimeError, match=r"\[input\]: flash_attention_with_kvcache .*derivat"):
        attend(**args)
    with torch.no_grad():
        assert not attend(**args).requires_grad


def test_vmap_is_refused(device):
    args = make(device)
    with pytest.raises(RuntimeError, match=r"\[input\]: flash_attention_with_kvcache .*vmap"):
        torch.vmap(lambda q: attend(q, args["k_cache"], args["v_cache"]))(args["q"][None])


def test_values_written_to_an_e4m3_cache(device):
    """Rounded once to nearest even, saturated; NaN stays NaN."""
    numbers = [0.0, -0.0, 2**-9, 2**-10, 3 * 2**-10, 447.0, 448.0, 464.0, 465.0, 1e30, torch.inf]
    numbers += [torch.nan, 17.0, 19.0, 1.0625, 1.1875, -0.3, -240.0, -torch.inf]
    args = make(device, batch=1, shared=1, dim=64, lengths=[5], new=1, e4m3=True)
    for name in "kv":
        args[name].zero_()
        args[name][0, 0, 0, : len(numbers)] = torch.tensor(numbers, device=device)
    for descale in (1.0, 0.37):
        for name in "kv":
            args[f"{name}_descale"] = torch.full((1, 1), descale, device=device)
        attend(**args)
        wanted = (args["k"][0, 0, 0].float() / descale).clamp(-448, 448).to(E4M3).float()
        for name in "kv":
            got = args[f"{name}_cache"][0, 5, 0].float()
            assert torch.equal(got.nan_to_num(1e3), wanted.nan_to_num(1e3)), (name, descale)


@pytest.mark.parametrize("magnitude", [1e-38, 1e-30, 1.0, 1e30])
def test_queries_of_any_magnitude_beside_e4m3(magnitude, device):
    """A bfloat16 query need not fit into float16, which e4m3 is computed in on the GPU."""
    torch.manual_seed(0)
    args = make(device, lengths=[9, 40, 96], e4m3=True, rows=2, softmax_scale=1 / 8 / magnitude)
    args["q"] *= magnitude
    args["q"][..., ::7] *= 1e-5
    args["q"][0, 1] = 0
    check(args)


def test_not_a_number_in_e4m3(device):
    """A key's NaN makes all of its rows NaN, a value's its column of them."""
    args = make(device, lengths=[9, 40, 96], e4m3=True)
    args["v_cache"].view(torch.uint8)[1, 39, 0, 5] = 0x7F
    args["k_cache"].view(torch.uint8)[2, 17, 1, 0] = 0xFF
    out = attend(**args)
    wanted = torch.zeros_like(out, dtype=torch.bool)
    wanted[1, :, :2, 5] = True
    wanted[2, :, 2:] = True
    assert torch.equal(out.isnan(), wanted)


@pytest.mark.parametrize("name", ["lengths", "new", "pages of 16", "rotary", "e4m3 in pages"])
def test_opcheck(name, device):
    args = make(device, **CASES[name])
    named = ("softmax_scale", "causal", "window_left", "rotary_interleaved", "sinks", "k_descale")
    kwargs = {key: args.pop(key) for key in named if key in args}
    tests = ["test_faketensor", "test_aot_dispatch_dynamic", "test_schema"]
    if args["k_cache"].dtype == E4M3:
        del tests[1:]  # they compare with torch.allclose, which has no e4m3
    with torch.no_grad():
        torch.library.opcheck(
            torch.ops.cubin._flash_attention_with_kvcache.default,
            (),
            args | kwargs,
            test_utils=tests,
        )


@pytest.mark.parametrize(
    ("backend", "grad", "e4m3"),
    [
        *itertools.product(["aot_eager", "inductor"], [False, True], [False]),
        ("inductor", True, True),
    ],
)
def test_compiled(backend, grad, e4m3, device):
    args = make(device, lengths=[3, 40, 60], new=1, causal=True, page_size=16, e4m3=e4m3)
    descale = torch.full((3, 2), 0.5, device=device) if e4m3 else None

    def step(q, k_cache, v_cache, k, v, lengths, table):
        named = {"cache_seqlens": lengths, "block_table": table, "v_descale": descale}
        out = attend(q * 2, k_cache, v_cache, k, v, causal=True, **named)
        return out + 1, k_cache.float().sum()

    def operands():
        names = ("q", "k_cache", "v_cache", "k", "v", "cache_seqlens", "block_table")
        return [args[name].clone() for name in names]

    own, compiled = operands(), operands()
    with torch.set_grad_enabled(grad):
        wanted = step(*own)
        got = torch.compile(step, backend=backend, fullgraph=True)(*compiled)
    torch.testing.assert_close(got[0], wanted[0])
    torch.testing.assert_close(got[1], wanted[1], rtol=2e-2, atol=2e-1)
    for i in (1, 2):
        assert torch.equal(compiled[i].float(), own[i].float())


def test_a_sparse_cache_is_refused():
    args = make("cpu")
    with pytest.raises(RuntimeError, match=r"\[input\]: flash_attention_with_kvcache .*k_cache.*"):
        attend(args["q"], args["k_cache"].to_sparse(), args["v_cache"])


def bfloat16(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)


def int32(*shape):
    return torch.zeros(shape, dtype=torch.int32)


def both_caches(cache):
    return {"k_cache": cache, "v_cache": cache}


WRONG = {
    "dtype": ({"q": torch.zeros(2, 1, 4, 64)}, "unsupported dtype"),
    "dtype of a cache": ({"k_cache": torch.zeros(2, 32, 2, 64)}, "wrong dtype"),
    "rank": ({"q": bfloat16(2, 4, 64)}, "wrong shape"),
    "batch": ({"k_cache": bfloat16(3, 32, 2, 64), "v_cache": bfloat16(3, 32, 2, 64)}, "batch of"),
    "values": ({"v_cache": bfloat16(2, 31, 2, 64)}, "v_cache"),
    "head_dim": ({"k_cache": bfloat16(2, 32, 2, 32)}, "another head_dim"),
    "heads": ({"q": bfloat16(2, 1, 3, 64)}, "does not divide"),
    "odd head_dim": (
        {name: bfloat16(2, 32, 2, 60) for name in ("q", "k_cache", "v_cache")},
        "multiple of 8",
    ),
    "columns": ({"k_cache": bfloat16(2, 32, 64, 2).mT}, "vectors"),
    "lengths": ({"cache_seqlens": int32(3)}, r"\(batch,\) = \(2,\)"),
    "dtype of lengths": ({"cache_seqlens": torch.zeros(2, dtype=torch.int64)}, "wrong dtype"),
    "k alone": ({"k": bfloat16(2, 1, 2, 64), "cache_seqlens": int32(2)}, "'k' and 'v' alone"),
    "no lengths": ({"k": bfloat16(2, 1, 2, 64), "v": bfloat16(2, 1, 2, 64)}, "cache_seqlens"),
    "table": ({"block_table": int32(3, 2)}, "block_table"),
    "table and indices": (
        {"block_table": int32(2, 2), "cache_batch_idx": int32(2)},
        "cannot go with a block table",
    ),
    "rotary without keys": (
        {"rotary_cos": bfloat16(9, 16), "rotary_sin": bfloat16(9, 16)},
        "without new keys",
    ),
    "window": ({"window_left": -2}, "window"),
    "softcap": ({"softcap": -1.0}, "softcap"),
    "sinks": ({"sinks": torch.zeros(3)}, "sinks"),
    "descale of 16 bits": ({"k_descale": torch.ones(2, 2)}, "without caches of float8_e4m3fn"),
    "one cache of e4m3": (
        {"k_cache": bfloat16(2, 32, 2, 64).to(E4M3)},
        "'v_cache' has a wrong dty",
    ),
    "e5m2": ({"k_cache": bfloat16(2, 32, 2, 64).to(torch.float8_e5m2)}, "or float8_e4m3fn"),
    "e4m3 head_dim": (
        {"q": bfloat16(2, 1, 4, 40)} | both_caches(bfloat16(2, 32, 2, 40).to(E4M3)),
        "multiple of 16",
    ),
    "e4m3 strides": (
        both_caches(bfloat16(2, 32, 2, 72).to(E4M3)[..., :64]),
        "vectors",
    ),
    "descale's shape": (
        both_caches(bfloat16(2, 32, 2, 64).to(E4M3)) | {"v_descale": torch.ones(2, 4)},
        r"v_descale' has a wrong shape: expected \(batch, heads_k\) = \(2, 2\)",
    ),
    "descale's dtype": (
        both_caches(bfloat16(2, 32, 2, 64).to(E4M3)) | {"k_descale": bfloat16(2, 2)},
        "k_descale' has a wrong dtype",
    ),
    "an expanded cache": (
        {
            "k_cache": bfloat16(1, 32, 2, 64).expand(2, -1, -1, -1),
            "k": bfloat16(2, 1, 2, 64),
            "v": bfloat16(2, 1, 2, 64),
            "cache_seqlens": int32(2),
        },
        "shares memory",
    ),
    # Views that read one row again and again: their product is 2^64.
    "rows of pages": (
        both_caches(bfloat16(1, 1, 2, 64).expand(1, 1 << 32, -1, -1))
        | {"block_table": int32(2, 1).expand(2, 1 << 32)},
        "too large",
    ),
    "length of pages": (
        both_caches(bfloat16(1, 1, 2, 64).expand(1, 1 << 30, -1, -1))
        | {"block_table": int32(2, 1).expand(2, 1 << 34)},
        "too large",
    ),
    "pages": (
        both_caches(bfloat16(1, 4, 2, 64).expand(1 << 31, -1, -1, -1))
        | {"block_table": int32(2, 2)},
        "k_cache' has a dimension that is too large",
    ),
    "sequences": (
        both_caches(bfloat16(1, 4, 2, 64).expand(1 << 31, -1, -1, -1))
        | {"cache_batch_idx": int32(2)},
        "k_cache' has a dimension that is too large",
    ),
    "new rows": (
        dict.fromkeys("kv", bfloat16(2, 1, 2, 64).expand(2, 1 << 31, -1, -1))
        | {"cache_seqlens": int32(2)},
        "'k' has a dimension that is too large",
    ),
}


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
@pytest.mark.parametrize("case", WRONG)
def test_refused(case, fake):
    changed, text = WRONG[case]
    right = {
        "q": bfloat16(2, 1, 4, 64),
        "k_cache": bfloat16(2, 32, 2, 64),
        "v_cache": bfloat16(2, 32, 2, 64),
    }
    args = right | changed
    args = fakes(args) if fake else args
    with torch.no_grad(), pytest.raises(RuntimeError, match=rf"\[input\]: .*{text}"):
        attend(**args)


@pytest.mark.parametrize("offset", [1, 4, 8])
def test_queries_and_new_rows_at_any_address(offset, device):
    check(kv_cache_cases.at_odd_addresses(offset, device))


SHARED = {
    "one cache": lambda args: args.update(v_cache=args["k_cache"]),
    "columns of the other": lambda args: args.update(
        v_cache=args["k_cache"][..., :32], v=args["v"][..., :32]
    ),
    "rows of a cache as new keys": lambda args: args.update(k=args["k_cache"][:, 3:5]),
    "rows of a cache as new values": lambda args: args.update(v=args["v_cache"][:, 90:92]),
    "a query in a cache": lambda args: args.update(q=args["v_cache"][:, :1]),
}


@pytest.mark.parametrize("name", SHARED)
def test_memory_that_is_written_and_shared(name, device):
    """Blocks write in any order: keys would be values, or new rows what was just written."""
    args = make(device, lengths=[3, 40, 60], new=2)
    SHARED[name](args)
    before = args["k_cache"].clone(), args["v_cache"].clone()
    with pytest.raises(RuntimeError, match=r"\[input\].*_cache'.*shares memory with"):
        attend(**args)
    assert torch.equal(args["k_cache"], before[0])
    assert torch.equal(args["v_cache"], before[1])
    if name.startswith("one"):  # tensors that are only read may overlap
        for each in ("k", "v"):
            del args[each]
        check(args)


def test_caches_that_are_slices_of_one_tensor(device):
    for dim in (2, 4):
        args = make(device, lengths=[3, 40, 60], new=2)
        both = torch.stack([args["k_cache"], args["v_cache"]], dim)
        both = both if dim == 2 else both.transpose(3, 4).contiguous().transpose(3, 4)
        args["k_cache"], args["v_cache"] = both.unbind(dim)
        check(args)
