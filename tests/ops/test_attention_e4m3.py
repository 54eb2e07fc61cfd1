"""flash_attention of float8_e4m3fn: what it gives, and what it refuses."""

from __future__ import annotations

import random

import numerics
import pytest
import torch
from ops import e4m3_cases
from ops.e4m3_cases import CASES, E4M3, expected, make, quantised
from ops.samples import fakes
from torch.utils.flop_counter import FlopCounterMode

flash_attention = torch.ops.cubin.flash_attention
forward = torch.ops.cubin.attention_forward_e4m3
RAW = torch.ops.cubin._attention_forward_e4m3.default
# The CPU's is float32 but for the output's rounding; the GPU rounds weights to 4 bits.
LIMITS = {"cpu": 4e-3, "cuda": 4.5e-2}


def with_logsumexp(args):
    """attention_forward_e4m3 of the arguments of flash_attention."""
    packed = "cu_seqlens_q" in args
    args = {"bottom_right": True} | args
    tensors = [args.pop(name) for name in ("query", "key", "value")]
    if not packed:
        tensors = [x.transpose(1, 2) for x in tensors]
    out, logsumexp = forward(*tensors, **args)
    return out if packed else out.transpose(1, 2), logsumexp


def check(args, device, label=""):
    wanted, wanted_sums = expected(**args)
    out = flash_attention(**args)
    assert out.shape == wanted.shape
    assert out.dtype == torch.bfloat16
    assert out.is_contiguous()
    error = (out.double() - wanted).square().mean().sqrt().item() if out.numel() else 0
    norm = wanted.square().mean().sqrt().item() if out.numel() else 1
    assert not numerics.exceeds(error, LIMITS[device] * norm), (label, error, norm)
    blind = wanted_sums == -torch.inf
    again, logsumexp = with_logsumexp(args)
    assert torch.equal(numerics.bits(again.contiguous()), numerics.bits(out))
    assert logsumexp.dtype == torch.float32
    assert torch.equal(logsumexp == -torch.inf, blind)
    off = (logsumexp.double() - wanted_sums)[~blind].abs()
    limit = 5e-3 * max(1.0, wanted_sums[~blind].abs().max().item() if off.numel() else 0)
    assert not numerics.exceeds(off.max().item() if off.numel() else 0, limit), (label, off.max())


@pytest.mark.parametrize("name", CASES)
def test_case(name, device):
    check(make(device, **CASES[name]), device, name)


@pytest.mark.parametrize("seed", range(20))
def test_random(seed, device):
    torch.manual_seed(seed)
    check(e4m3_cases.random_case(random.Random(seed), device), device, f"seed {seed}")


def test_schema() -> None:
    schema = str(forward.default._schema)
    assert schema == (
        "cubin::attention_forward_e4m3(Tensor query, Tensor key, Tensor value, *, "
        "bool is_causal=False, float? scale=None, int window_left=-1, int window_right=-1, "
        "bool bottom_right=False, Tensor? q_descale=None, Tensor? k_descale=None, "
        "Tensor? v_descale=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
        "int max_seqlen_q=0, int max_seqlen_k=0) -> (Tensor out, Tensor logsumexp)"
    )


def test_packed_tensors_give_the_same_as_separate_ones(device):
    qkv = quantised((2, 9, 3, 4, 32), device)
    apart = flash_attention(*qkv.unbind(2), is_causal=True)
    assert torch.equal(flash_attention(qkv, is_causal=True), apart)
    kv = qkv[:, :, 1:]
    assert torch.equal(flash_attention(qkv[:, :, 0], kv, is_causal=True), apart)


def test_one_number_as_a_factor(device):
    args = make(device, descale="")
    number = torch.tensor(0.5, device=device)
    wide = {f"{x}_descale": number.expand(2, 2) for x in "qkv"}
    wanted = flash_attention(**args, **{name: x.contiguous() for name, x in wide.items()})
    assert torch.equal(flash_attention(**args, **wide), wanted)
    assert torch.equal(flash_attention(**args, v_descale=wide["v_descale"]),
                       flash_attention(**args) * 0.5)  # fmt: skip


def test_not_a_number(device):
    """A query's NaN makes its row NaN, a key's every row that sees it, a value's its column."""
    args = make(device, rows=40, keys=40, heads=2, is_causal=True)
    args["query"].view(torch.uint8)[0, 3, 0, 1] = 0x7F
    args["key"].view(torch.uint8)[1, 30, 1, 0] = 0xFF
    args["value"].view(torch.uint8)[0, 20, 1, 5] = 0x7F
    out = flash_attention(**args)
    wanted = torch.zeros_like(out, dtype=torch.bool)
    wanted[0, 3, 0] = True
    wanted[1, 30:, 1] = True
    wanted[0, :, 1, 5] = True  # hidden keys have weight 0
    assert torch.equal(out.isnan(), wanted)


@pytest.mark.parametrize("value", [0.0, -2.0, 1e4, 1e-4, torch.nan])
@pytest.mark.parametrize("name", ["q_descale", "k_descale", "v_descale"])
def test_factors_of_any_size(name, value, device):
    args = make(device, rows=20, keys=30, descale="qkv", is_causal=True)
    args[name][1, 1] = value
    wanted, wanted_sums = expected(**args)
    out, logsumexp = with_logsumexp(args)
    assert torch.equal(out.isnan(), wanted.isnan())
    assert torch.equal(logsumexp.isnan(), wanted_sums.isnan())
    wanted, out = wanted.nan_to_num(), out.double().nan_to_num()
    assert not numerics.exceeds((out - wanted).norm().item(), LIMITS[device] * wanted.norm().item())


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [({"batch": 0}, (0, 5, 4, 32)), ({"rows": 0}, (2, 0, 4, 32)), ({"keys": 0}, (2, 5, 4, 32))],
)
def test_empty(sizes, shape, device):
    args = make(device, **sizes)
    out, logsumexp = with_logsumexp(args)
    assert out.shape == shape
    assert not out.any()
    assert (logsumexp == -torch.inf).all()


@pytest.mark.parametrize("ends", [[0], [0, 0], [0, 2], [0, 1, 3]], ids=str)
def test_rows_outside_all_sequences(ends, device):
    tensors = [quantised((5, 2, 32), device) for _ in "qkv"]
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)
    out, logsumexp = forward(*tensors, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    assert not out[ends[-1] :].any()
    assert (logsumexp[:, ends[-1] :] == -torch.inf).all()
    assert out[: ends[-1]].any(-1).all()
    assert logsumexp[:, : ends[-1]].isfinite().all()


@pytest.mark.parametrize("name", ["query", "value", "k_descale"])
def test_derivatives_are_refused(name, device):
    args = make(device, descale="qkv")
    args[name].requires_grad_()
    with pytest.raises(RuntimeError, match=r"\[input\]: flash_attention has no rule for derivat"):
        flash_attention(**args)
    with torch.no_grad():
        assert not flash_attention(**args).requires_grad


def test_derivatives_in_forward_mode_are_refused(device):
    args = make(device, descale="v")
    tangent = torch.ones_like(args["v_descale"])
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(args["v_descale"], tangent)
        with pytest.raises(RuntimeError, match=r"\[input\]: .*derivatives"):
            flash_attention(**args | {"v_descale": dual})


def test_vmap_is_refused(device):
    args = make(device)
    with pytest.raises(RuntimeError, match=r"\[input\]: .*torch.vmap"):
        torch.vmap(lambda q: flash_attention(**args | {"query": q}))(args["query"][None])


def test_autocast_does_not_cast_e4m3(device):
    args = make(device, descale="qkv", is_causal=True)
    wanted = flash_attention(**args)
    with torch.autocast(device, dtype=torch.float16):
        assert torch.equal(flash_attention(**args), wanted)


@pytest.mark.parametrize("changed", ["query", "key", "value"])
def test_other_dtypes_beside_it_are_refused_under_autocast_too(changed, device):
    """A cast would drop the factors."""
    args = make(device)
    args[changed] = args[changed].to(torch.bfloat16)
    for enabled in (False, True):
        autocast = torch.autocast(device, dtype=torch.bfloat16, enabled=enabled)
        with autocast, pytest.raises(RuntimeError, match=r"\[input\]"):
            flash_attention(**args)


@pytest.mark.parametrize("name", ["query and key", "value"])
def test_no_columns_are_refused(name, device):
    args = make(device)
    for part in name.split(" and "):
        args[part] = args[part][..., :0]
    with pytest.raises(RuntimeError, match=r"\[input\]: .*has no columns"):
        flash_attention(**args)


@pytest.mark.parametrize("name", ["plain", "factors", "heads first", "packed, factors", "window"])
def test_opcheck(name, device):
    args = make(device, **CASES[name])
    tensors = [args.pop(name) for name in ("query", "key", "value")]
    if "cu_seqlens_q" not in args:
        tensors = [x.transpose(1, 2) for x in tensors]
    with torch.no_grad():
        # The others compute with copies, and there is no arithmetic of e4m3.
        torch.library.opcheck(RAW, tensors, args, test_utils=["test_faketensor"])


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend, grad, device, fresh_dynamo):
    def step(q, k, v, factor):
        return flash_attention(q, k, v, is_causal=True, k_descale=factor) + 1

    compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=True)
    with torch.set_grad_enabled(grad):
        for rows in (9, 17):
            args = make(device, rows=rows, keys=rows, descale="k")
            own = [args[name] for name in ("query", "key", "value", "k_descale")]
            assert torch.equal(compiled(*own), step(*own))


def test_flops(device):
    args = make(device)
    with FlopCounterMode(display=False) as counter:
        flash_attention(**args)
    assert counter.get_total_flops() == 2 * 5 * 4 * 7 * 2 * (32 + 32)


def bfloat16(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)


def e4m3(*shape):
    return bfloat16(*shape).to(E4M3)


WRONG = {
    "a key of 16 bits": ({"key": bfloat16(2, 7, 2, 32)}, "'key' has a wrong dtype"),
    "e5m2": ({"value": bfloat16(2, 7, 2, 32).to(torch.float8_e5m2)}, "'value' has a wrong dtype"),
    "heads": ({"query": e4m3(2, 5, 3, 32)}, "heads"),
    "heads of values": ({"value": e4m3(2, 7, 4, 32)}, "broadcasting"),
    "batch": ({"key": e4m3(1, 7, 2, 32), "value": e4m3(1, 7, 2, 32)}, "broadcasting"),
    "length": ({"value": e4m3(2, 8, 2, 32)}, "sequence length"),
    "columns": ({"key": e4m3(2, 7, 2, 16)}, "head_dim"),
    "rank": ({"query": e4m3(5, 4, 32)}, "rank"),
    "factor's dtype": ({"q_descale": bfloat16(2, 2)}, "q_descale' has a wrong dtype"),
    "factor's shape": (
        {"v_descale": torch.ones(2, 4)},
        r"v_descale' has a wrong shape: expected \(batch, heads of key\) = \(2, 2\)",
    ),
    "a number": ({"k_descale": torch.ones(())}, "k_descale' has a wrong shape"),
    "softcap": ({"softcap": 30.0}, "does not take"),
    "slopes": ({"alibi_slopes": torch.ones(4)}, "does not take"),
    "sinks": ({"sinks": torch.ones(4)}, "does not take"),
    "dropout": ({"dropout_p": 0.1}, "does not take"),
    "window": ({"window_left": -2}, "window"),
    "factors without e4m3": (
        {name: bfloat16(2, 7, 2, 32) for name in ("query", "key", "value")}
        | {"q_descale": torch.ones(2, 2)},
        "without a query of float8_e4m3fn",
    ),
}


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
@pytest.mark.parametrize("case", WRONG)
def test_refused(case, fake):
    changed, text = WRONG[case]
    args = {"query": e4m3(2, 5, 4, 32), "key": e4m3(2, 7, 2, 32), "value": e4m3(2, 7, 2, 32)}
    args |= changed
    args = fakes(args) if fake else args
    with torch.no_grad(), pytest.raises(RuntimeError, match=rf"\[input\]: flash_attention.*{text}"):
        flash_attention(**args)
