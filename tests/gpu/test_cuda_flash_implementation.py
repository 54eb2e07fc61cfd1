"""The implementation "cubin" behind PyTorch's flash attention on the GPU, at sizes of real models.

What it means, case by case, is in tests/ops/test_flash_implementation.py.
"""

from __future__ import annotations

import inspect

import numerics
import pytest
import torch
import torch.nn.functional as F
from ops import attention_samples
from torch.nn import attention

import torch_cubin

if not hasattr(attention, "register_flash_attention_impl"):
    pytest.skip("this PyTorch has no registry of flash attention", allow_module_level=True)

FLASH = attention.SDPBackend.FLASH_ATTENTION
SDPA = "aten::_scaled_dot_product_flash_attention"


@pytest.fixture
def active():
    torch_cubin.report(reset=True)
    attention.activate_flash_attention_impl("cubin")
    yield
    attention.restore_flash_attention_impl()
    torch_cubin.report(reset=True)


def served() -> dict[str, int]:
    return {row.function: row.calls for row in torch_cubin.report().served}


def formula(q, k, v, is_causal):
    """float64; heads of keys are repeated."""
    return attention_samples.formula(q, k, v, is_causal=is_causal, enable_gqa=True)[0]


def near(mine: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    error = (mine.double() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
    assert not numerics.exceeds(float(error), 1e-2), (what, float(error))


def draw(batch, heads, shared, rows, dim):
    shapes = ((batch, heads, rows, dim), *[(batch, shared, rows, dim)] * 2)
    return [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for shape in shapes
    ]


def compare(call, tensors, is_causal) -> None:
    """Forward and backward of a call against float64."""
    leaves = [x.detach().double().requires_grad_() for x in tensors]
    wanted = formula(*leaves, is_causal)
    with attention.sdpa_kernel(FLASH):
        out = call(*tensors)
        grad = torch.randn_like(out)
        gradients = torch.autograd.grad(out, tensors, grad)
    near(out.detach(), wanted.detach(), "out")
    expected = torch.autograd.grad(wanted, leaves, grad.double())
    for name, mine, theirs in zip("qkv", gradients, expected, strict=True):
        near(mine, theirs, f"d{name}")


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dim", [60, 64, 128, 256])
@pytest.mark.parametrize("shared", [8, 2])
@pytest.mark.usefixtures("active")
def test_sdpa_forward_and_backward(shared, dim, is_causal) -> None:
    torch.manual_seed(0)
    tensors = draw(2, 8, shared, 333, dim)

    def call(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=shared != 8)

    compare(call, tensors, is_causal)
    assert served() == {SDPA: 1, f"{SDPA}_backward": 1}
    assert torch_cubin.report().declined == ()


@pytest.mark.usefixtures("active")
def test_compiled_forward_and_backward() -> None:
    torch.manual_seed(0)

    def call(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    compare(torch.compile(call, fullgraph=True), draw(2, 8, 8, 256, 64), True)
    assert served() == {SDPA: 1, f"{SDPA}_backward": 1}


@pytest.mark.parametrize("layout", ["rows first", "packed"])
@pytest.mark.usefixtures("active")
def test_autocast_casts_nothing(layout: str) -> None:
    """As in PyTorch's kernels of these operators, compiled or not; float16 would overflow here."""
    ends = torch.tensor([0, 4, 10], dtype=torch.int32, device="cuda")

    def call(q, k, v):
        if layout == "packed":
            return forward(q, k, v, ends, ends, 6, 6, 0.0, True, False)[0]
        return forward(q[None], k[None], v[None], None, None, 10, 10, 0.0, True, False)[0]

    forward = torch.ops.aten._flash_attention_forward
    options = {"device": "cuda", "dtype": torch.bfloat16}
    # Not of query and key: from scores of 2^31 on gradients may be infinite.
    tensors = [(torch.randn(10, 4, 16, **options) * x).requires_grad_() for x in (1, 1, 1e5)]
    results = []
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for enabled, attend in ((False, call), (True, call), (True, compiled)):
        with torch.autocast("cuda", dtype=torch.float16, enabled=enabled):
            out = attend(*tensors)
            gradients = torch.autograd.grad(out, tensors, torch.ones_like(out))
        results.append((out.detach(), *gradients))
    for without, eager, from_graph in zip(*results, strict=True):
        assert without.isfinite().all()
        for result in (eager, from_graph):
            assert result.dtype == torch.bfloat16
            assert torch.equal(result, without)


def test_dropout_matches_pytorch_bitwise() -> None:
    """Its seed and offset come from the same generator, and its backward draws the same again."""

    def step():
        torch.manual_seed(0)
        tensors = draw(2, 4, 4, 256, 64)
        with attention.sdpa_kernel(FLASH):
            out = F.scaled_dot_product_attention(*tensors, dropout_p=0.3)
            return [out, *torch.autograd.grad(out.float().sum(), tensors)]

    own = step()
    torch_cubin.report(reset=True)
    attention.activate_flash_attention_impl("cubin")
    try:
        through = step()
    finally:
        attention.restore_flash_attention_impl()
    report = torch_cubin.report(reset=True)
    assert report.served == ()
    declined = {row.function: (row.calls, row.reason[:7]) for row in report.declined}
    assert declined == {SDPA: (1, "dropout"), f"{SDPA}_backward": (1, "dropout")}
    assert torch.equal(own[0], through[0])
    # PyTorch's own backward adds dq in any order.
    torch.testing.assert_close(through[1:], own[1:], rtol=2e-2, atol=2e-2)


def test_forward_and_backward_can_mix_our_kernels_and_pytorchs() -> None:
    """What each saves, the other can use: an activation may lie between both."""
    for first in (False, True):
        torch.manual_seed(0)
        tensors = draw(2, 4, 4, 200, 64)
        leaves = [x.detach().double().requires_grad_() for x in tensors]
        wanted = formula(*leaves, True)
        if first:
            attention.activate_flash_attention_impl("cubin")
        try:
            with attention.sdpa_kernel(FLASH):
                out = F.scaled_dot_product_attention(*tensors, is_causal=True)
            if first:
                attention.restore_flash_attention_impl()
            else:
                attention.activate_flash_attention_impl("cubin")
            grad = torch.randn_like(out)
            gradients = torch.autograd.grad(out, tensors, grad)
        finally:
            if attention.current_flash_attention_impl() is not None:
                attention.restore_flash_attention_impl()
        expected = torch.autograd.grad(wanted, leaves, grad.double())
        for mine, theirs in zip(gradients, expected, strict=True):
            near(mine, theirs, f"ours first: {first}")
    torch_cubin.report(reset=True)


@pytest.mark.usefixtures("active")
def test_jagged_nested_tensors_forward_and_backward() -> None:
    torch.manual_seed(0)
    lengths = (5, 170, 1, 640)
    parts = [
        [torch.randn(n, 8, 64, device="cuda", dtype=torch.bfloat16) for n in lengths]
        for _ in range(3)
    ]
    nested = [torch.nested.nested_tensor(x, layout=torch.jagged, requires_grad=True) for x in parts]
    with attention.sdpa_kernel(FLASH):
        out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in nested))
    out.transpose(1, 2).values().float().square().sum().backward()
    gradients = [x.grad.unbind() for x in nested]
    for i, mine in enumerate(out.transpose(1, 2).unbind()):
        leaves = [x[i].double().transpose(0, 1)[None].requires_grad_() for x in parts]
        wanted = formula(*leaves, False)
        near(mine.detach(), wanted.detach()[0].transpose(0, 1), f"sequence {i}")
        expected = torch.autograd.grad(wanted.square().sum(), leaves)
        for own, theirs in zip(gradients, expected, strict=True):
            # With a single key, dq and dk are zero except for rounding.
            if lengths[i] > 1:
                near(own[i], theirs[0].transpose(0, 1), f"gradient of sequence {i}")
    assert served() == {"aten::_flash_attention_forward": 1, "aten::_flash_attention_backward": 1}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.usefixtures("active")
def test_a_packed_sequence_among_others_with_one_split(head_dim: int) -> None:
    """num_splits=1 is PyTorch's switch of batch invariance."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    if "num_splits" not in inspect.signature(varlen.varlen_attn).parameters:
        pytest.skip("this PyTorch has no num_splits")
    torch.manual_seed(0)
    lengths = [1, 700, 40, 2000, 9]
    at = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    options = {"device": "cuda", "dtype": torch.bfloat16}
    q = torch.randn(at[-1], 8, head_dim, **options)
    k, v = (torch.randn(at[-1], 2, head_dim, **options) for _ in "kv")

    def attend(rows: slice, offsets: list[int], longest: int) -> torch.Tensor:
        cu = torch.tensor(offsets, dtype=torch.int32, device="cuda")
        return varlen.varlen_attn(
            *(q[rows], k[rows], v[rows], cu, cu, longest, longest),
            window_size=(-1, 0),
            enable_gqa=True,
            num_splits=1,
        )

    full = attend(slice(0, at[-1]), at, max(lengths))
    for begin, length in zip(at, lengths, strict=False):
        rows = slice(begin, begin + length)
        numerics.check_bits(attend(rows, [0, length], length), full[rows])
    if torch.cuda.get_device_capability() == (9, 0):
        assert served() == {"aten::_flash_attention_forward": 6}
    else:  # several kernels, hence PyTorch's
        assert [row.reason[:12] for row in torch_cubin.report().declined] == ["num_splits=1"]
