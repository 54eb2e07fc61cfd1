"""install() below PyTorch's attention of packed sequences: results and gradients are those of each
sequence alone.

A CPU build has no kernel of it, so calls that are not served raise there.
"""

from __future__ import annotations

import functools

import pytest
import torch
from installed import installed
from ops.attention_samples import packed_formula

import torch_cubin
from torch_cubin._pytorch.aten_kernels import has_cuda

aten = torch.ops.aten
FORWARD, BACKWARD = "aten::_flash_attention_forward", "aten::_flash_attention_backward"
ROWS, COLUMNS = (3, 5, 0, 1, 2), (4, 2, 3, 6, 0)
NOT_ON_THE_CPU = None if has_cuda() else "only PyTorch could serve"


def offsets(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


ENDS = offsets(ROWS), offsets(COLUMNS)
LONGEST = max(ROWS), max(COLUMNS)


def packed(dtype: torch.dtype = torch.bfloat16, shared: int = 2) -> list[torch.Tensor]:
    """Query, key and value of (rows of all sequences, heads, head_dim)."""
    torch.manual_seed(0)
    shapes = ((sum(ROWS), 4, 16), *[(sum(COLUMNS), shared, 16)] * 2)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def sequences(query, key, value, causal=False, window=(-1, -1), scale=None):
    """By the definition of attention, in float64, with the logsumexp."""
    options = {"window_left": window[0], "window_right": window[1], "scale": scale}
    return packed_formula(query, key, value, ROWS, COLUMNS, is_causal=causal, **options)


def near(own: torch.Tensor, wanted: torch.Tensor) -> None:
    tolerance = {torch.bfloat16: 3e-2, torch.float16: 5e-3}[own.dtype]
    torch.testing.assert_close(own.double(), wanted, rtol=tolerance, atol=tolerance)


def served() -> dict[str, int]:
    return {row.function: row.calls for row in torch_cubin.report().served}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("causal", "window"), [(False, (-1, -1)), (True, (-1, -1)), (False, (2, 1)), (True, (1, 0))]
)
def test_forward_and_backward(causal, window, dtype) -> None:
    tensors = packed(dtype)
    leaves = [x.detach().double().requires_grad_() for x in tensors]
    out, sums = sequences(*leaves, causal=causal, window=window, scale=0.3)
    with installed():
        results = aten._flash_attention_forward(
            *tensors, *ENDS, *LONGEST, 0.0, causal, False, scale=0.3,
            window_size_left=window[0], window_size_right=window[1],
        )  # fmt: skip
        grad = torch.randn_like(results[0])
        got = torch.autograd.grad(results[0], tensors, grad)
        assert served() == {FORWARD: 1, BACKWARD: 1}
    near(results[0].detach(), out.detach())
    assert results[0].stride() == torch.empty_like(tensors[0]).stride()
    empty = torch.isinf(sums)
    assert torch.equal(torch.isposinf(results[1]), empty)
    torch.testing.assert_close(
        results[1][~empty].double(), sums[~empty].detach(), rtol=1e-3, atol=1e-3
    )
    wanted = torch.autograd.grad(out, leaves, grad.double())
    for mine, theirs, leaf in zip(got, wanted, tensors, strict=True):
        near(mine, theirs)
        assert mine.stride() == leaf.stride()


def test_varlen_attn() -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    tensors = packed(shared=4)
    leaves = [x.detach().double().requires_grad_() for x in tensors]
    with installed():
        out = varlen.varlen_attn(*tensors, *ENDS, *LONGEST)
        grad = torch.randn_like(out)
        got = torch.autograd.grad(out, tensors, grad)
        assert served() == {FORWARD: 1, BACKWARD: 1}
    wanted = sequences(*leaves)[0]
    near(out.detach(), wanted.detach())
    for mine, theirs in zip(got, torch.autograd.grad(wanted, leaves, grad.double()), strict=True):
        near(mine, theirs)


def test_no_heads() -> None:
    """PyTorch's kernel divides by the heads of keys."""
    tensors = [x[:, :0].detach().requires_grad_() for x in packed(torch.bfloat16)]
    with installed():
        out = aten._flash_attention_forward(*tensors, *ENDS, *LONGEST, 0.0, False, False)[0]
        gradients = torch.autograd.grad(out, tensors, torch.empty_like(out))
        assert served() == {FORWARD: 1, BACKWARD: 1}
    assert [x.shape for x in (out, *gradients)] == [x.shape for x in (tensors[0], *tensors)]


DECLINED = {
    "dropout": ({"dropout_p": 0.5}, "dropout, whose numbers PyTorch's backward draws again"),
    "float32": ({"dtype": torch.float32}, "a dtype that is not float16 or bfloat16"),
    "int64": ({"ends": [x.long() for x in ENDS]}, "offsets that are not int32"),
    "sequences": ({"ends": [ENDS[0], ENDS[1][:3]]}, "offsets of other shapes or devices"),
    "seqused_k": ({"seqused_k": ENDS[1]}, "seqused_k, alibi_slopes or block_table"),
}


@pytest.mark.parametrize("case", DECLINED)
def test_declined_calls_have_a_reason(case) -> None:
    given, reason = DECLINED[case]
    given = {"dtype": torch.bfloat16, "ends": ENDS, "dropout_p": 0.0, **given}
    tensors, ends = packed(given.pop("dtype")), given.pop("ends")
    dropout_p = given.pop("dropout_p")
    with installed():
        with torch.no_grad(), pytest.raises(RuntimeError, match=NOT_ON_THE_CPU):
            aten._flash_attention_forward(
                *tensors, *ends, *LONGEST, dropout_p, False, False, **given
            )
        assert [row.reason for row in torch_cubin.report().declined] == [reason]


@pytest.mark.parametrize("keys", [8191, 8192])
def test_few_keys_are_pytorchs_under_fastest(keys) -> None:
    """In all sequences: here two of them."""
    query, key = torch.randn(2, 1, 16).bfloat16(), torch.randn(keys, 1, 16).bfloat16()
    ends = offsets((1, 1)), offsets((4096, keys - 4096))
    with installed("fastest"):
        call = functools.partial(
            aten._flash_attention_forward, query, key, key, *ends, 1, 4096, 0.0, False, False
        )
        if keys == 8192:
            call()
            assert served() == {FORWARD: 1}
            return
        with pytest.raises(RuntimeError, match=NOT_ON_THE_CPU):
            call()
        (declined,) = torch_cubin.report().declined
        assert declined.reason == "fewer than 8192 keys, which is not known to be quicker"


@pytest.mark.parametrize("policy", ["fastest", "all"])
def test_one_split_is_pytorchs_under_fastest(policy) -> None:
    if "num_splits" not in str(aten._flash_attention_forward.default._schema):
        pytest.skip("this PyTorch has no num_splits")
    query, key = torch.randn(2, 1, 16).bfloat16(), torch.randn(8192, 1, 16).bfloat16()
    ends = offsets((1, 1)), offsets((4096, 4096))
    with installed(policy):
        call = functools.partial(
            aten._flash_attention_forward, query, key, key, *ends, 1, 4096, 0.0, False, False
        )
        if policy == "all":
            call(num_splits=1)
            assert served() == {FORWARD: 1}
            return
        with pytest.raises(RuntimeError, match=NOT_ON_THE_CPU):
            call(num_splits=1)
        assert [row.reason for row in torch_cubin.report().declined] == ["num_splits=1"]


def test_calls_without_offsets_are_pytorchs_and_are_not_counted() -> None:
    """PyTorch's own SDPA by flash attention makes them, and is counted."""
    query = torch.randn(2, 5, 4, 16).bfloat16()
    with installed():
        with pytest.raises(RuntimeError, match=NOT_ON_THE_CPU):
            aten._flash_attention_forward(query, query, query, None, None, 5, 5, 0.0, False, False)
        assert torch_cubin.report().declined == ()
