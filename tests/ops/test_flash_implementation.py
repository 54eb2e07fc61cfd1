"""The implementation "cubin" in PyTorch's registry of flash attention.

PyTorch has no flash attention of these operators on the CPU, so there the implementation is put
behind the CPU's dispatch key, where it serves the same calls by the reference; what it leaves to
PyTorch goes to a stand-in. On a GPU it is activated as a user does it.
Longer than files should be: every section needs the stand-in and the layouts at its top.
"""

from __future__ import annotations

import contextlib
import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from ops.test_attention_semantics import near
from torch.nn import attention

import torch_cubin
from torch_cubin._drop_in import flash_implementation
from torch_cubin._ops import batch_invariant

pytestmark = pytest.mark.skipif(
    not hasattr(attention, "register_flash_attention_impl"), reason="this PyTorch has no registry"
)
aten = torch.ops.aten
SDPA = "_scaled_dot_product_flash_attention"
VARLEN = "_flash_attention_forward"


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
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (scale or 1 / math.sqrt(q.shape[-1]))
    rows, columns = scores.shape[-2:]
    i = torch.arange(rows, device=q.device)[:, None] + columns - rows
    j = torch.arange(columns, device=q.device)
    right = 0 if is_causal else window[1]
    hidden = torch.zeros(rows, columns, dtype=torch.bool, device=q.device)
    if right >= 0:
        hidden |= j > i + right
    if window[0] >= 0:
        hidden |= j < i - window[0]
    scores = scores.masked_fill(hidden, -math.inf)
    sums = scores.logsumexp(-1)
    out = torch.nan_to_num(scores.softmax(-1)) @ v
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


LENGTHS = [(3, 3), (0, 2), (4, 6), (5, 0), (1, 1)]


def packed(device, heads=4, shared=2, dim=16, grad=False):
    """Query, key, value, and the offsets of LENGTHS."""
    rows, columns = (sum(pair[i] for pair in LENGTHS) for i in (0, 1))
    shapes = ((rows, heads, dim), *[(columns, shared, dim)] * 2)
    tensors = [
        torch.randn(s, device=device, dtype=torch.bfloat16, requires_grad=grad) for s in shapes
    ]
    offsets = [
        torch.tensor([0, *(pair[i] for pair in LENGTHS)], device=device).cumsum(0).int()
        for i in (0, 1)
    ]
    return tensors, offsets


def formula_of_packed(tensors, causal=False):
    outs, sums, row, column = [], [], 0, 0
    q, k, v = tensors
    for rows, columns in LENGTHS:
        own = (q[row : row + rows], k[column : column + columns], v[column : column + columns])
        out, logsumexp = formula(*(x.transpose(0, 1)[None] for x in own), causal)
        outs.append(out[0].transpose(0, 1))
        sums.append(logsumexp[0])
        row, column = row + rows, column + columns
    return torch.cat(outs), torch.cat(sums, 1)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_forward_and_backward(causal, active, device):
    tensors, offsets = packed(device, grad=True)
    results = aten._flash_attention_forward(*tensors, *offsets, 5, 6, 0.0, causal, False)
    leaves = [x.detach().double().requires_grad_() for x in tensors]
    out, sums = formula_of_packed(leaves, causal)
    near(results[0].detach(), out.detach())
    torch.testing.assert_close(results[1].double(), sums.detach(), rtol=1e-3, atol=1e-3)
    grad = torch.randn_like(results[0])
    got = torch.autograd.grad(results[0], tensors, grad)
    expected = torch.autograd.grad(out, leaves, grad.double())
    for mine, theirs in zip(got, expected, strict=True):
        near(mine, theirs)
    assert calls(active().served) == {VARLEN: 1, "_flash_attention_backward": 1}


def test_varlen_attn(active, device):
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    tensors, offsets = packed(device, heads=4, shared=4, grad=True)
    with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
        out = varlen.varlen_attn(*tensors, *offsets, 5, 6)
    leaves = [x.detach().double().requires_grad_() for x in tensors]
    expected = formula_of_packed(leaves)[0]
    near(out.detach(), expected.detach())
    grad = torch.randn_like(out)
    for mine, theirs in zip(
        torch.autograd.grad(out, tensors, grad),
        torch.autograd.grad(expected, leaves, grad.double()),
        strict=True,
    ):
        near(mine, theirs)
    assert calls(active().served)[VARLEN] == 1
    assert active().declined == ()


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


def test_one_split_of_packed_sequences_is_batch_invariant(active, device, monkeypatch):
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    if "num_splits" not in inspect.signature(varlen.varlen_attn).parameters:
        pytest.skip("this PyTorch has no num_splits")
    if not flash_implementation._has_one_packed_kernel(torch.device(device)):
        pytest.skip("PyTorch's kernel serves this here")
    tensors, offsets = packed(device, shared=4)
    state = []
    forward = flash_implementation._forward

    def spy(*args, **kwargs):
        state.append(batch_invariant.is_batch_invariant())
        return forward(*args, **kwargs)

    monkeypatch.setattr(flash_implementation, "_forward", spy)
    for splits in (None, 1, 2):
        # From torch 2.15 on it asks which backends are allowed.
        with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
            out = varlen.varlen_attn(*tensors, *offsets, 5, 6, num_splits=splits)
        near(out, formula_of_packed(tensors)[0])
    assert state == [False, True, False]
    assert active().declined == ()


def test_one_split_of_packed_sequences_is_pytorchs_if_kernels_differ(monkeypatch):
    if "num_splits" not in str(aten._flash_attention_forward.default._schema):
        pytest.skip("this PyTorch has no num_splits")
    torch_cubin.report(reset=True)
    monkeypatch.setattr(flash_implementation, "_has_one_packed_kernel", lambda device: False)
    tensors, offsets = packed("cpu")
    q, k, v = (x.transpose(1, 2) for x in heads_first("cpu"))
    with stand_in(VARLEN) as seen:
        implementation = flash_implementation.Implementation("CPU")
        try:
            aten._flash_attention_forward(*tensors, *offsets, 5, 6, 0.0, False, False, num_splits=1)
            aten._flash_attention_forward(*tensors, *offsets, 5, 6, 0.0, False, False)
            aten._flash_attention_forward(
                *(q, k, v, None, None, 5, 5, 0.0, False, False), num_splits=1
            )
        finally:
            implementation.remove()
    (call,) = seen
    assert call[2]["num_splits"] == 1
    report = torch_cubin.report(reset=True)
    assert calls(report.served) == {VARLEN: 2}
    (row,) = report.declined
    assert (row.function, row.calls) == (VARLEN, 1)
    assert row.reason.startswith("num_splits=1")


AUTOCAST_CALLS = {
    "sdpa": lambda q, k, v, cu: aten._scaled_dot_product_flash_attention(
        *(x[None].transpose(1, 2) for x in (q, k, v)), 0.0, True
    )[0],
    "rows first": lambda q, k, v, cu: aten._flash_attention_forward(
        *(x[None] for x in (q, k, v)), None, None, 10, 10, 0.0, True, False
    )[0],
    "packed": lambda q, k, v, cu: aten._flash_attention_forward(
        q, k, v, cu, cu, 6, 6, 0.0, True, False
    )[0],
}


@pytest.mark.parametrize("name", AUTOCAST_CALLS)
@pytest.mark.usefixtures("active")
def test_autocast_casts_nothing(name, device):
    """As in PyTorch's kernels of these operators, compiled or not; float16 would overflow here."""
    if (name, device) == ("sdpa", "cuda"):
        pytest.skip("there PyTorch itself casts what it is called with, and would overflow, too")
    call = AUTOCAST_CALLS[name]
    options = {"device": device, "dtype": torch.bfloat16}
    # Not of query and key: from scores of 2^31 on gradients may be infinite.
    tensors = [(torch.randn(10, 4, 16, **options) * x).requires_grad_() for x in (1, 1, 1e5)]
    offsets = torch.tensor([0, 4, 10], dtype=torch.int32, device=device)
    results = []
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for enabled, attend in ((False, call), (True, call), (True, compiled)):
        with torch.autocast(device, dtype=torch.float16, enabled=enabled):
            out = attend(*tensors, offsets)
            gradients = torch.autograd.grad(out, tensors, torch.ones_like(out))
        results.append((out.detach(), *gradients))
    for without, eager, from_graph in zip(*results, strict=True):
        assert without.isfinite().all()
        for result in (eager, from_graph):
            assert result.dtype == torch.bfloat16
            assert torch.equal(result, without)


@contextlib.contextmanager
def stand_in(*names: str):
    """PyTorch's own kernels on the CPU: they answer with what they were called with."""
    library = torch.library.Library("aten", "IMPL")
    seen = []

    def kernel(name):
        def run(*args, **kwargs):
            seen.append((name, args, kwargs))
            q = args[1] if "backward" in name else args[0]
            if "backward" in name:
                return tuple(torch.zeros_like(x) for x in args[1:4])
            if name == VARLEN:
                return (torch.zeros_like(q), q.new_zeros(1), *[q.new_zeros(1)] * 3)
            # Through the served operator, as PyTorch's kernel does.
            rows = [x.transpose(1, 2) for x in args[:3]]
            inner = aten._flash_attention_forward(
                *rows, None, None, 1, 1, *args[3:5], False, scale=kwargs.get("scale")
            )
            return (torch.ones_like(q), inner[1], None, None, 1, 1, *inner[2:])

        return run

    for name in names:
        library.impl(name, kernel(name), "CPU")
    try:
        yield seen
    finally:
        del library, kernel


def test_dropout_goes_to_pytorch_and_is_counted():
    torch_cubin.report(reset=True)
    with stand_in(SDPA, VARLEN) as seen:
        implementation = flash_implementation.Implementation("CPU")
        try:
            q, k, v = heads_first("cpu")
            results = aten._scaled_dot_product_flash_attention(q, k, v, 0.25, True, scale=0.5)
        finally:
            implementation.remove()
    assert results[0].eq(1).all()
    assert [name for name, _, _ in seen] == [SDPA, VARLEN]
    assert seen[0][1][3:] == (0.25, True)
    assert seen[0][2] == {"scale": 0.5}
    assert seen[1][1][7] == 0.25
    report = torch_cubin.report(reset=True)
    assert report.served == ()
    (row,) = report.declined
    assert (row.function, row.calls) == (SDPA, 1)
    assert row.reason.startswith("dropout")


REFUSED = {
    "float32": lambda q, k, v: aten._scaled_dot_product_flash_attention(
        *(x.float() for x in (q, k, v))
    ),
    "debug mask": lambda q, k, v: aten._scaled_dot_product_flash_attention(
        q, k, v, return_debug_mask=True
    ),
    "head_dim of values": lambda q, k, v: aten._scaled_dot_product_flash_attention(
        q, k, v[..., :8]
    ),
    "slopes": lambda q, k, v: aten._flash_attention_forward(
        *(q.mT.mT, k, v, None, None, 4, 4, 0.0, False, False),
        alibi_slopes=torch.ones(5),
    ),
    "lengths": lambda q, k, v: aten._flash_attention_forward(
        *(q, k, v, None, None, 4, 4, 0.0, False, False),
        seqused_k=torch.ones(2, dtype=torch.int32),
    ),
    "padded sums": lambda q, k, v: aten._scaled_dot_product_flash_attention_backward(
        *(q, q, k, v, q, torch.zeros(2, 5, 128), None, None, 5, 5, 0.0, False, q, q)
    ),
    "one offset": lambda q, k, v: aten._flash_attention_forward(
        *(q[0], k[0], v[0], torch.zeros(2, dtype=torch.int32), None, 4, 4, 0.0, False, False)
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_calls_left_to_pytorch_without_a_kernel_are_no_kernel_errors(case):
    implementation = flash_implementation.Implementation("CPU")
    try:
        # A torch_cubin.Error, but a RuntimeError of its text where it crosses C++ of a CUDA build.
        with pytest.raises(RuntimeError, match=r"torch_cubin \[no_kernel\]: aten::_"):
            REFUSED[case](*heads_first("cpu", heads=5, shared=5))
    finally:
        implementation.remove()


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
    assert calls(active().served) == {VARLEN: 1, "_flash_attention_backward": 1}
    assert active().declined == ()
