"""The implementation "cubin" in PyTorch's registry of flash attention.

PyTorch has no flash attention of these operators on the CPU, so there the implementation is put
behind the CPU's dispatch key, where it serves the same calls by the reference, and calls that it
leaves to PyTorch raise. On a GPU it is activated as a user does it.
"""

from __future__ import annotations

import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from ops import attention_samples
from ops.test_attention_semantics import near
from torch.nn import attention

import torch_cubin
from torch_cubin._drop_in import aten_kernels, flash_implementation
from torch_cubin._pytorch.aten_kernels import has_cuda

pytestmark = pytest.mark.skipif(
    not hasattr(attention, "register_flash_attention_impl"), reason="this PyTorch has no registry"
)
aten = torch.ops.aten
SDPA = "aten::_scaled_dot_product_flash_attention"
VARLEN, VARLEN_BACKWARD = "aten::_flash_attention_forward", "aten::_flash_attention_backward"


@pytest.fixture
def active(device):
    """With the implementation behind the operators; yields the report, which begins empty."""
    torch_cubin.report(reset=True)
    if device == "cuda":
        attention.activate_flash_attention_impl("cubin")
        yield torch_cubin.report
        attention.restore_flash_attention_impl()
    else:
        implementation = flash_implementation.Implementation("CPU")
        yield torch_cubin.report
        implementation.remove()
    torch_cubin.report(reset=True)


def heads_first(device, heads=4, shared=4, rows=5, columns=5, dim=16, batch=2, grad=False):
    """Query, key and value as F.scaled_dot_product_attention takes them."""
    shapes = ((batch, heads, rows, dim), *[(batch, shared, columns, dim)] * 2)
    options = {"device": device, "dtype": torch.bfloat16, "requires_grad": grad}
    return [torch.randn(shape, **options) for shape in shapes]


def formula(q, k, v, is_causal=False, scale=None, window=(-1, -1)):
    """Output and logsumexp in float64, with PyTorch's inf where a row sees no key."""
    window = {"window_left": window[0], "window_right": window[1]}
    options = {"scale": scale, "enable_gqa": True, "bottom_right": True, **window}
    out, sums = attention_samples.formula(q, k, v, is_causal=is_causal, **options)
    return out, torch.where(sums == -math.inf, math.inf, sums)


def calls(rows) -> dict[str, int]:
    return {row.function: row.calls for row in rows}


def test_importing_registers_and_activates_nothing():
    assert "cubin" in attention.list_flash_attention_impls()
    assert attention.current_flash_attention_impl() is None


def test_the_registry_activates_and_restores():
    attention.activate_flash_attention_impl("cubin")
    try:
        assert attention.current_flash_attention_impl() == "cubin"
    finally:
        attention.restore_flash_attention_impl()
    assert attention.current_flash_attention_impl() is None


def test_removing_gives_the_operators_back():
    q, k, v = heads_first("cpu")
    implementation = flash_implementation.Implementation("CPU")
    aten._scaled_dot_product_flash_attention(q, k, v)
    implementation.remove()
    implementation.remove()
    with pytest.raises(RuntimeError):  # NotImplementedError, but on a CUDA build of PyTorch
        aten._scaled_dot_product_flash_attention(q, k, v)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "shared"), [(4, 4), (4, 2)])
@pytest.mark.parametrize(("rows", "columns"), [(5, 5), (3, 7), (7, 3), (1, 6)])
def test_dense(causal, heads, shared, rows, columns, active, device):
    q, k, v = heads_first(device, heads, shared, rows, columns)
    results = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=0.3)
    out, sums = formula(q, k, v, causal, 0.3)
    near(results[0], out)
    torch.testing.assert_close(results[1].double(), sums, rtol=1e-3, atol=1e-3)
    assert results[2:6] == (None, None, rows, columns)
    assert results[6].dtype == results[7].dtype == torch.uint64
    assert results[6].shape == (2,)
    assert results[7].shape == ()
    assert results[8].numel() == 0
    assert calls(active().served) == {SDPA: 1}
    assert active().declined == ()


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (0, 1, 3, 2)])
def test_results_have_the_strides_of_the_fake_ones(order, active, device):
    inverse = sorted(range(4), key=order.__getitem__)
    q, k, v = (x.permute(order).contiguous().permute(inverse) for x in heads_first(device))
    grad = torch.randn_like(q)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(x) for x in (q, k, v)]
        wanted = aten._scaled_dot_product_flash_attention(*fake)
    got = aten._scaled_dot_product_flash_attention(q, k, v)
    for real, meta in zip(got, wanted, strict=True):
        if isinstance(real, torch.Tensor):
            assert (real.shape, real.stride(), real.dtype) == (
                meta.shape,
                meta.stride(),
                meta.dtype,
            )
    gradients = aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, *got[:6], 0.0, False, *got[6:8]
    )
    for gradient, of in zip(gradients, (q, k, v), strict=True):
        assert gradient.stride() == torch.empty_like(of).stride()


@pytest.mark.parametrize("causal", [False, True])
def test_backward_by_autograd(causal, active, device):
    q, k, v = heads_first(device, heads=4, shared=2, rows=6, columns=6, grad=True)
    out = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[0]
    assert out.requires_grad
    grad = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v), grad)
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(formula(*leaves, causal)[0], leaves, grad.double())
    for mine, theirs in zip(got, expected, strict=True):
        near(mine, theirs)
    assert calls(active().served) == {SDPA: 1, f"{SDPA}_backward": 1}


def test_a_logsumexp_of_pytorch_in_our_backward(active, device):
    """Fully masked rows have inf there: a forward may have run before the activation."""
    q, k, v = heads_first(device, rows=7, columns=3)
    out, sums = (x.float() for x in formula(q, k, v, True))
    assert sums.isinf().any()
    state = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
    gradients = aten._scaled_dot_product_flash_attention_backward(
        *(torch.ones_like(q), q, k, v, out.to(q.dtype), sums, None, None, 7, 3, 0.0, True),
        *state[6:8],
    )
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 1), (1, -1)])
def test_rows_first_with_a_window(window, active, device):
    q, k, v = (x.transpose(1, 2) for x in heads_first(device, rows=5, columns=8))
    left, right = window
    results = aten._flash_attention_forward(
        *(q, k, v, None, None, 5, 8, 0.0, window == (-1, 0), False),
        window_size_left=left,
        window_size_right=right,
    )
    out, sums = formula(*(x.transpose(1, 2) for x in (q, k, v)), window=window)
    near(results[0], out.transpose(1, 2))
    torch.testing.assert_close(results[1].double(), sums, rtol=1e-3, atol=1e-3)


ROWS, COLUMNS = (3, 0, 4, 5, 1), (3, 2, 6, 0, 1)


def packed(device, heads=4, shared=2, dim=16, grad=False):
    """Query, key and value of ROWS and COLUMNS, and the offsets."""
    shapes = ((sum(ROWS), heads, dim), *[(sum(COLUMNS), shared, dim)] * 2)
    tensors = [
        torch.randn(s, device=device, dtype=torch.bfloat16, requires_grad=grad) for s in shapes
    ]
    return tensors, [torch.tensor([0, *n], device=device).cumsum(0).int() for n in (ROWS, COLUMNS)]


def formula_of_packed(tensors, causal=False):
    out, sums = attention_samples.packed_formula(*tensors, ROWS, COLUMNS, is_causal=causal)
    return out, torch.where(sums == -math.inf, math.inf, sums)


@pytest.mark.skipif(
    not hasattr(aten, "_flash_attention_forward_no_dropout_inplace"), reason="not in this PyTorch"
)
def test_into_an_output(active, device):
    tensors, offsets = packed(device)
    out = torch.empty_like(tensors[0])
    sums = aten._flash_attention_forward_no_dropout_inplace(
        out, *tensors, *offsets, 5, 6, 0.0, False, False
    )
    expected = formula_of_packed(tensors)
    near(out, expected[0])
    torch.testing.assert_close(sums.double(), expected[1], rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(
    not hasattr(aten, "_flash_attention_forward_no_dropout_inplace"), reason="not in this PyTorch"
)
@pytest.mark.parametrize("kind", ["shape", "dtype", "strides"])
def test_into_an_output_that_pytorch_refuses(kind, active, device):
    tensors, offsets = packed(device)
    rows, heads, dim = tensors[0].shape
    like = {"device": device, "dtype": torch.bfloat16}
    out = {
        "shape": torch.zeros(2, rows, heads, dim, **like),
        "dtype": torch.zeros(rows, heads, dim, device=device),
        "strides": torch.zeros(rows, dim, heads, **like).transpose(1, 2),
    }[kind]
    with pytest.raises(RuntimeError):
        aten._flash_attention_forward_no_dropout_inplace(
            out, *tensors, *offsets, 5, 6, 0.0, False, False
        )
    assert not out.any()
    assert sum(calls(active().declined).values()) == 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_forward_and_backward(backend, active, device):
    def attend(q, k, v):
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0] * 2

    tensors = heads_first(device, rows=16, columns=16, grad=True)
    out = torch.compile(attend, backend=backend, fullgraph=True)(*tensors)
    leaves = [x.detach().double().requires_grad_() for x in tensors]
    expected = formula(*leaves, True)[0] * 2
    near(out.detach(), expected.detach())
    grad = torch.randn_like(out)
    for mine, theirs in zip(
        torch.autograd.grad(out, tensors, grad),
        torch.autograd.grad(expected, leaves, grad.double()),
        strict=True,
    ):
        near(mine, theirs)
    assert set(calls(active().served)) == {SDPA, f"{SDPA}_backward"}


def test_one_split_is_batch_invariant(active, device):
    q, k, v = (x.transpose(1, 2) for x in heads_first(device, rows=1, columns=300))
    if "num_splits" not in str(aten._flash_attention_forward.default._schema):
        pytest.skip("this PyTorch has no num_splits")

    def call(*tensors):
        return aten._flash_attention_forward(
            *tensors, None, None, 1, 300, 0.0, False, False, num_splits=1
        )[0]

    alone = call(*(x[1:].contiguous() for x in (q, k, v)))
    assert torch.equal(call(q, k, v)[1:], alone)


def test_one_split_of_packed_sequences(active, device):
    """Its bits are compared on a GPU (tests/gpu/test_cuda_flash_implementation.py)."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    if "num_splits" not in inspect.signature(varlen.varlen_attn).parameters:
        pytest.skip("this PyTorch has no num_splits")
    if device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("PyTorch's kernel serves this here")
    tensors, offsets = packed(device, shared=4)
    for splits in (None, 1, 2):
        # From torch 2.15 on it asks which backends are allowed.
        with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
            out = varlen.varlen_attn(*tensors, *offsets, 5, 6, num_splits=splits)
        near(out, formula_of_packed(tensors)[0])
    assert calls(active().served) == {VARLEN: 3}
    assert active().declined == ()


def backward_of(q, k, v, sums):
    state = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    return aten._scaled_dot_product_flash_attention_backward(
        *(q, q, k, v, q, sums, None, None, 5, 5, 0.0, False, *state)
    )


def rows_first(q, k, v, cu_q=None, cu_k=None, **options):
    return aten._flash_attention_forward(q, k, v, cu_q, cu_k, 4, 4, 0.0, False, False, **options)


# Calls that are left to PyTorch's kernel, and the reason.
REFUSED = {
    "dropout": (
        lambda q, k, v: aten._scaled_dot_product_flash_attention(q, k, v, 0.25, True),
        "dropout, whose numbers PyTorch's backward draws again",
    ),
    "float32": (
        lambda q, k, v: aten._scaled_dot_product_flash_attention(*(x.float() for x in (q, k, v))),
        "a dtype that is not float16 or bfloat16",
    ),
    "debug mask": (
        lambda q, k, v: aten._scaled_dot_product_flash_attention(q, k, v, return_debug_mask=True),
        "return_debug_mask",
    ),
    "head_dim of values": (
        lambda q, k, v: aten._scaled_dot_product_flash_attention(q, k, v[..., :8]),
        "another head_dim for values",
    ),
    "slopes": (
        lambda q, k, v: rows_first(q.mT.mT, k, v, alibi_slopes=torch.ones(5)),
        "seqused_k, alibi_slopes or block_table",
    ),
    "lengths": (
        lambda q, k, v: rows_first(q, k, v, seqused_k=torch.ones(2, dtype=torch.int32)),
        "seqused_k, alibi_slopes or block_table",
    ),
    "padded sums": (
        lambda q, k, v: backward_of(q, k, v, torch.zeros(2, 5, 128)),
        "a logsumexp of another layout",
    ),
    "one offset": (
        lambda q, k, v: rows_first(q[0], k[0], v[0], torch.zeros(2, dtype=torch.int32)),
        "offsets of the queries or of the keys alone",
    ),
}


@pytest.mark.skipif(has_cuda(), reason="PyTorch's kernel gets tensors of the CPU")
@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("device", ["cpu"])
def test_calls_left_to_pytorch_are_counted_and_without_a_kernel_are_no_kernel_errors(case, active):
    call, reason = REFUSED[case]
    # A torch_cubin.Error, but a RuntimeError of its text where it crosses C++ of a CUDA build.
    with pytest.raises(RuntimeError, match=r"torch_cubin \[no_kernel\]: aten::_"):
        call(*heads_first("cpu", heads=5, shared=5))
    report = active()
    assert report.served == ()
    assert [(row.calls, row.reason) for row in report.declined] == [(1, reason)]


def test_sequences_without_rows(active, device):
    q, k, v = heads_first(device, rows=4, columns=0)
    out, sums = aten._scaled_dot_product_flash_attention(q, k, v)[:2]
    assert out.eq(0).all()
    assert torch.isposinf(sums).all()
    q, k, v = heads_first(device, rows=0)
    assert aten._scaled_dot_product_flash_attention(q, k, v)[0].shape == q.shape
    assert calls(active().served) == {SDPA: 2}


def test_a_pytorch_without_its_c_functions_is_an_error(monkeypatch):
    monkeypatch.setattr(aten_kernels, "is_ours", lambda op, key: op != aten_kernels.FLASH[2])
    with pytest.raises(torch_cubin.Error, match=r"\[internal\].*all but _flash_attention_forward"):
        flash_implementation.Implementation("CPU")


def test_sdpa_of_pytorch_with_its_flash_backend(active, device):
    if device != "cuda":
        pytest.skip("PyTorch chooses this backend on a GPU alone")
    q, k, v = heads_first(device, rows=64, columns=64, dim=60, grad=True)
    with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = formula(*leaves, True)[0]
    near(out.detach(), expected.detach())
    grad = torch.randn_like(out)
    for mine, theirs in zip(
        torch.autograd.grad(out, (q, k, v), grad),
        torch.autograd.grad(expected, leaves, grad.double()),
        strict=True,
    ):
        near(mine, theirs)
    assert calls(active().served) == {SDPA: 1, f"{SDPA}_backward": 1}


def test_jagged_nested_tensors(active, device):
    if device != "cuda":
        pytest.skip("nested tensors choose this backend on a GPU alone")
    lengths = (5, 17, 1, 64)
    parts = [
        [torch.randn(n, 4, 64, device=device, dtype=torch.bfloat16) for n in lengths]
        for _ in range(3)
    ]
    nested = [torch.nested.nested_tensor(x, layout=torch.jagged, requires_grad=True) for x in parts]
    with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in nested))
    for mine, *own in zip(out.transpose(1, 2).unbind(), *parts, strict=True):
        expected, _ = formula(*(x.transpose(0, 1)[None] for x in own))
        near(mine.detach(), expected[0].transpose(0, 1))
    out.values().sum().backward()
    assert all(x.grad is not None for x in nested)
    assert calls(active().served) == {VARLEN: 1, VARLEN_BACKWARD: 1}
    assert active().declined == ()
