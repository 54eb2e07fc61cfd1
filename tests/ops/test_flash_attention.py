"""flash_attention: the layouts of the FlashAttention package, every extra, no copies."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch._inductor.config as inductor_config
from ops.attention_samples import formula
from ops.samples import ATEN_IS_CALLED, DTYPES, make
from recorded_ops import RecordedOps
from torch._dynamo.testing import CompileCounterWithBackend

flash_attention = torch.ops.cubin.flash_attention
SCHEMA = (
    "cubin::flash_attention(Tensor query, Tensor? key=None, Tensor? value=None, *, "
    "bool is_causal=False, float? scale=None, int window_left=-1, int window_right=-1, "
    "bool bottom_right=True, float softcap=0., Tensor? alibi_slopes=None, Tensor? sinks=None, "
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, int max_seqlen_q=0, "
    "int max_seqlen_k=0, float dropout_p=0., Tensor? q_descale=None, Tensor? k_descale=None, "
    "Tensor? v_descale=None) -> Tensor"
)
# Relative to the largest element, as in test_attention_semantics.py.
LIMITS = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 2e-5, torch.float64: 1e-12}


def near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    limit = LIMITS[actual.dtype]
    scale = max(float(expected.detach().abs().max()), 1.0) if expected.numel() else 1.0
    torch.testing.assert_close(actual.double(), expected.double(), rtol=limit, atol=limit * scale)


def expected_of(query, key, value, **options) -> torch.Tensor:
    """By the definition, for (batch, rows, heads, head_dim)."""
    options = {"bottom_right": True, **options}
    args = (x.transpose(1, 2) for x in (query, key, value))
    return formula(*args, enable_gqa=True, **options)[0].transpose(1, 2)


def packed(device: str, dtype: torch.dtype = torch.float32, parts: int = 3, **options):
    return make((2, 5, parts, 4, 8), device, dtype, **options)


def cu_seqlens(device: str, *offsets: int) -> torch.Tensor:
    return torch.tensor(offsets, dtype=torch.int32, device=device)


def test_schema() -> None:
    assert str(flash_attention.default._schema) == SCHEMA


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_separate_tensors_equal_scaled_dot_product_attention(dtype, kv_heads, grad, device):
    query = make((2, 5, 4, 8), device, dtype, requires_grad=grad)
    key = make((2, 7, kv_heads, 8), device, dtype, requires_grad=grad)
    value = make((2, 7, kv_heads, 6), device, dtype, requires_grad=grad)
    for options in ({}, {"scale": 0.3}, {"is_causal": True}):
        out = flash_attention(query, key, value, **options)
        assert out.shape == (2, 5, 4, 6)
        assert out.is_contiguous()
        assert out.dtype == dtype
        near(out.detach(), expected_of(query, key, value, **options).detach())


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_tensors_equal_separate_ones(dtype, grad, device):
    qkv = packed(device, dtype, requires_grad=grad)
    query, key, value = (x.detach().requires_grad_(grad) for x in qkv.unbind(2))
    apart = flash_attention(query, key, value, is_causal=True)
    together = flash_attention(qkv, is_causal=True)
    assert together.shape == (2, 5, 4, 8)
    assert together.is_contiguous()
    assert torch.equal(together, apart)
    near(together.detach(), expected_of(query, key, value, is_causal=True).detach())
    if grad:
        apart.sin().sum().backward()
        together.sin().sum().backward()
        assert torch.equal(qkv.grad, torch.stack([query.grad, key.grad, value.grad], 2))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_keys_and_values(dtype, grad, device):
    query = make((2, 3, 8, 8), device, dtype, requires_grad=grad)
    kv = packed(device, dtype, parts=2, requires_grad=grad)
    key, value = (x.detach().requires_grad_(grad) for x in kv.unbind(2))
    apart = flash_attention(query, key, value)
    together = flash_attention(query, kv)
    assert together.is_contiguous()
    assert torch.equal(together, apart)
    near(together.detach(), expected_of(query, key, value).detach())
    if grad:
        expected = torch.autograd.grad(apart.sin().sum(), (query, key, value))
        dq, dkv = torch.autograd.grad(together.sin().sum(), (query, kv))
        assert torch.equal(dq, expected[0])
        assert torch.equal(dkv, torch.stack(expected[1:], 2))


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_nothing_packed_is_copied(grad, varlen, device):
    query = make((5, 4, 8) if varlen else (2, 5, 4, 8), device, torch.float32, requires_grad=grad)
    qkv, kv = (packed(device, parts=parts, requires_grad=grad) for parts in (3, 2))
    options = {}
    if varlen:
        qkv, kv = (x.detach()[0].requires_grad_(grad) for x in (qkv, kv))
        offsets = cu_seqlens(device, 0, 2, 5)
        options = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    with RecordedOps() as ops:
        flash_attention(qkv, **options)
        flash_attention(query, kv, **options)

    def place(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage().data_ptr()

    of_qkv, of_kv = [args[:3] for op, args in ops.calls if "_attention_forward" in op.name()]
    assert [place(x) for x in of_qkv] == [place(qkv)] * 3
    assert [place(x) for x in of_kv] == [place(query), place(kv), place(kv)]


OPTIONS = [
    {"is_causal": True},
    {"window_left": 2},
    {"window_right": 1},
    {"window_left": 1, "window_right": 1},
    {"window_left": 1, "is_causal": True},
    {"softcap": 0.7},
    {"alibi_slopes": (4,)},
    {"alibi_slopes": (2, 4)},
    {"sinks": (4,)},
    {"scale": 0.1, "softcap": 2.0, "window_left": 3, "alibi_slopes": (4,), "sinks": (4,)},
]


@pytest.mark.parametrize("bottom_right", [None, False])
@pytest.mark.parametrize("lengths", [(5, 5), (3, 7), (7, 3)], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids="-".join)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)  # fused; composed
def test_options(dtype, options, lengths, bottom_right, device):
    options = {
        name: torch.rand(value, device=device) if isinstance(value, tuple) else value
        for name, value in options.items()
    }
    if bottom_right is not None:
        options["bottom_right"] = bottom_right
    rows, columns = lengths
    args = [
        make((2, length, heads, 8), device, dtype, requires_grad=True)
        for length, heads in ((rows, 4), (columns, 2), (columns, 2))
    ]
    expected = expected_of(*args, **options)
    grads = torch.autograd.grad(expected.sin().sum(), args)
    with torch.no_grad():
        near(flash_attention(*args, **options), expected)
    out = flash_attention(*args, **options)
    near(out, expected)
    for actual, wanted in zip(torch.autograd.grad(out.sin().sum(), args), grads, strict=True):
        near(actual, wanted)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window_left": 1}], ids=str)
@pytest.mark.parametrize("form", ["apart", "kv", "qkv"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_varlen(dtype, form, options, device):
    """Sequences of 3, 0 and 5 rows; those of keys are longer where they are not packed."""
    q_at = (0, 3, 3, 8)
    k_at = q_at if form == "qkv" else (0, 4, 6, 11)
    leaves = {
        "apart": lambda: [make((n, h, 8), device, dtype) for n, h in ((8, 4), (11, 2), (11, 2))],
        "kv": lambda: [make((8, 4, 8), device, dtype), make((11, 2, 2, 8), device, dtype)],
        "qkv": lambda: [make((8, 3, 4, 8), device, dtype)],
    }[form]()
    leaves = [x.requires_grad_() for x in leaves]
    *whole, last = leaves
    query, key, value = leaves if form == "apart" else [*whole, *last.unbind(1)]
    parts = []
    for i in range(3):
        own = (query[q_at[i] : q_at[i + 1]], *(x[k_at[i] : k_at[i + 1]] for x in (key, value)))
        parts.append(expected_of(*(x[None] for x in own), **options)[0])
    expected = torch.cat(parts)
    named = {"cu_seqlens_q": cu_seqlens(device, *q_at), "max_seqlen_q": 5}
    if form != "qkv":
        named |= {"cu_seqlens_k": cu_seqlens(device, *k_at), "max_seqlen_k": 5}
    with torch.no_grad():
        near(flash_attention(*leaves, **named, **options), expected)
    for bounds in (5, 0):  # not given: as many as there are rows
        out = flash_attention(*leaves, **named | {"max_seqlen_q": bounds}, **options)
        assert out.shape == (8, 4, 8)
        assert out.is_contiguous()
        near(out.detach(), expected.detach())
    wanted = torch.autograd.grad(expected.sin().sum(), leaves)
    for actual, grad in zip(torch.autograd.grad(out.sin().sum(), leaves), wanted, strict=True):
        near(actual, grad)


def test_the_dropout_is_that_of_the_plain_op(device):
    qkv = packed(device)
    plain = torch.ops.cubin.scaled_dot_product_attention
    for grad in (False, True):
        qkv = qkv.detach().requires_grad_(grad)
        torch.manual_seed(3)
        first, second = (flash_attention(qkv, dropout_p=0.5) for _ in range(2))
        assert not torch.equal(first, second)
        torch.manual_seed(3)
        expected = plain(*qkv.transpose(1, 3).unbind(2), dropout_p=0.5).transpose(1, 2)
        assert torch.equal(first, expected)
    torch.manual_seed(5)
    expected = torch.rand(1, device=device)
    torch.manual_seed(5)
    flash_attention(qkv)  # draws no number
    assert torch.equal(torch.rand(1, device=device), expected)


def test_gradcheck(device):
    qkv = make((1, 3, 3, 2, 4), device, torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: flash_attention(x, is_causal=True), (qkv,))
    assert torch.autograd.gradgradcheck(lambda x: flash_attention(x, softcap=2.0), (qkv,))


# Wrong arguments, and the text that the message must contain.
MISTAKES = {
    "value alone": (((2, 5, 4, 8), None, (2, 5, 4, 8)), {}, "'value'"),
    "rank of query": (((5, 4, 8), (2, 5, 4, 8), (2, 5, 4, 8)), {}, "'query'"),
    "rank of key": (((2, 5, 4, 8), (5, 4, 8), (2, 5, 4, 8)), {}, "'key'"),
    "rank of value": (((2, 5, 4, 8), (2, 5, 4, 8), (5, 4, 8)), {}, "'value'"),
    "rank of packed query": (((2, 5, 4, 8),), {}, "'query'"),
    "rank of packed key": (((2, 5, 4, 8), (2, 5, 4, 8)), {}, "'key'"),
    "two packed": (((2, 5, 2, 4, 8),), {}, "expected 3 at dimension 2, got 2"),
    "three packed": (((2, 5, 4, 8), (2, 5, 3, 4, 8)), {}, "expected 2 at dimension 2, got 3"),
    "heads": (((2, 5, 4, 8), (2, 5, 3, 8), (2, 5, 3, 8)), {}, "query 4, key 3"),
    "head_dim": (((2, 5, 4, 8), (2, 5, 4, 6), (2, 5, 4, 6)), {}, "head_dim"),
    "window": (((2, 5, 3, 4, 8),), {"window_left": -2}, "-2 left"),
    "softcap": (((2, 5, 3, 4, 8),), {"softcap": -1.0}, "softcap"),
    "dropout": (((2, 5, 3, 4, 8),), {"dropout_p": 1.5}, "dropout_p"),
    "varlen rank": (((2, 5, 4, 8), (8, 4, 8), (8, 4, 8)), {"cu_seqlens_q": 2}, "'query'"),
    "one cu_seqlens": (((8, 4, 8), (8, 4, 8), (8, 4, 8)), {"cu_seqlens_q": 2}, "cu_seqlens_k"),
}


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake, mode, device):
    shapes, options, shown = MISTAKES[mistake]
    options = {
        name: cu_seqlens(device, *range(value)) if name.startswith("cu") else value
        for name, value in options.items()
    }
    args = [None if shape is None else torch.ones(shape, device=device) for shape in shapes]
    with mode(), pytest.raises(RuntimeError) as caught:
        flash_attention(*args, **options)
    text = str(caught.value)
    assert text.startswith("torch_cubin [input]: flash_attention ")
    assert shown in text


@pytest.mark.parametrize("form", ["apart", "kv", "qkv", "varlen"])
def test_opcheck(form, device):
    offsets = cu_seqlens(device, 0, 3, 8)
    args, options = {
        "apart": ([(2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 6)], {"softcap": 1.0}),
        "kv": ([(2, 5, 4, 8), (2, 7, 2, 2, 8)], {"is_causal": True}),
        "qkv": ([(2, 5, 3, 4, 8)], {"window_left": 2}),
        "varlen": ([(8, 3, 4, 8)], {"cu_seqlens_q": offsets, "max_seqlen_q": 5}),
    }[form]
    args = tuple(make(shape, device, torch.float32, requires_grad=True) for shape in args)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    tests += () if form == "varlen" else ("test_aot_dispatch_dynamic",)
    torch.library.opcheck(flash_attention.default, args, options, test_utils=tests)


@pytest.mark.parametrize(
    ("backend", "grad"), [("aot_eager", False), ("aot_eager", True), ("inductor", True)]
)
@pytest.mark.usefixtures("fresh_dynamo")
@inductor_config.patch(ATEN_IS_CALLED)
def test_compile(backend, grad, device):
    counter = CompileCounterWithBackend(backend)

    def f(qkv: torch.Tensor) -> torch.Tensor:
        return flash_attention(qkv.sin(), is_causal=True, window_left=3).cos()

    compiled = torch.compile(f, fullgraph=True, dynamic=True, backend=counter)
    for batch, rows in ((2, 5), (3, 9), (4, 6)):
        qkv = make((batch, rows, 3, 4, 8), device, torch.float32, requires_grad=grad)
        expected, actual = f(qkv), compiled(qkv)
        assert actual.stride() == expected.stride()
        near(actual.detach(), expected.detach())
        if grad:
            expected, actual = (torch.autograd.grad(x.sum(), qkv)[0] for x in (expected, actual))
            near(actual, expected)
    assert counter.frame_count == 1


@pytest.mark.usefixtures("fresh_dynamo")
def test_two_calls_of_one_graph_drop_differently(device):
    compiled = torch.compile(
        lambda x: (flash_attention(x, dropout_p=0.5), flash_attention(x, dropout_p=0.5)),
        fullgraph=True,
        backend="aot_eager",
    )
    for grad in (False, True):
        first, second = compiled(packed(device, requires_grad=grad))
        assert not torch.equal(first, second)


@pytest.mark.usefixtures("fresh_dynamo")
def test_export(device):
    class Model(torch.nn.Module):
        def forward(self, qkv: torch.Tensor) -> torch.Tensor:
            return flash_attention(qkv, is_causal=True)

    sizes = {"qkv": {0: torch.export.Dim("batch"), 1: torch.export.Dim("rows")}}
    program = torch.export.export(Model(), (packed(device),), dynamic_shapes=sizes)
    other = make((3, 9, 3, 4, 8), device, torch.float32)
    assert torch.equal(program.module()(other), flash_attention(other, is_causal=True))


def test_vmap(device):
    qkv = make((3, 2, 5, 3, 4, 8), device, torch.float32)
    for dim in (0, 2):
        out = torch.vmap(flash_attention, in_dims=dim)(qkv.movedim(0, dim))
        near(out, torch.stack([flash_attention(x) for x in qkv]))


@pytest.mark.parametrize("batched", [False, True])
def test_vmap_follows_its_randomness_argument(batched, device):
    qkv = packed(device)
    calls = qkv.expand(3, *qkv.shape) if batched else torch.zeros(3, device=device)

    def call(x: torch.Tensor) -> torch.Tensor:
        return flash_attention(x if batched else qkv, dropout_p=0.5) + (0 if batched else x)

    same = torch.vmap(call, randomness="same")(calls)
    assert torch.equal(same[0], same[1])
    different = torch.vmap(call, randomness="different")(calls)
    assert not torch.equal(different[0], different[1])
    # Below 2.13 PyTorch's C API loses the text of vmap's error: ours names what failed.
    has_text = torch.__version__ >= torch.torch_version.TorchVersion("2.13")
    with pytest.raises(RuntimeError, match="randomness" if has_text else "aten::randint"):
        torch.vmap(call)(calls)


def test_autocast(device):
    qkv = packed(device, requires_grad=True)
    with torch.autocast(device, torch.bfloat16):
        out = flash_attention(qkv)
    assert out.dtype == torch.bfloat16
    near(out.detach(), flash_attention(qkv).detach())
    out.float().sin().sum().backward()
    assert qkv.grad.dtype == torch.float32


def test_flops(device):
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        flash_attention(packed(device))
    assert counter.get_total_flops() == 2 * 2 * (2 * 4 * 5 * 5) * 8
