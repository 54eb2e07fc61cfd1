"""install(batch_invariant=True) on a GPU: rows have the same bits alone, in batches, in chunks."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import row_bits
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_cubin
from torch_cubin._drop_in import audit
from torch_cubin._ops import row_parallel

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

import same_bits

ops = torch.ops.cubin
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SIZES = [(5, 1), (300, 7), (64, 64), (33, 1001), (257, 1024), (130, 4096), (31, 5120), (4, 50257),
         (3, 131072), (2000, 24)]  # fmt: skip


@pytest.fixture
def installed():
    with torch_cubin.install(batch_invariant=True) as handle:
        yield handle


def draw(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sums_of_rows(size, dtype, nan_memory) -> None:
    x = draw(*size, dtype=dtype) + 0.5
    wide, columns = x.double(), size[1]
    deviations = (wide - wide.mean(-1, keepdim=True)).square().sum(-1)
    exact = (wide.sum(-1), wide.square().sum(-1), deviations)
    # The terms' magnitudes bound what sums of 256 threads, of some elements each, may lose.
    size_of = (wide.abs().sum(-1), exact[1], exact[1])
    for kind, (wanted, bound) in enumerate(zip(exact, size_of, strict=True)):
        out = ops._row_sums(x, kind, 2.0, torch.float32)
        limit = bound * 2e-6 + 1e-30
        assert not ((out.double() * 2 - wanted).abs() > limit).any(), (kind, columns)
        assert torch.equal(ops._row_sums(x, kind, 2.0, dtype), out.to(dtype))
    twice = torch.cat((x, x), 1)[:, :columns]
    assert torch.equal(ops._row_sums(twice, 2, 2.0, torch.float32), out)
    integers = torch.randint(-8, 8, size, device="cuda")
    sums = ops._row_sums(integers.to(dtype), 0, 1.0, torch.float32)
    assert torch.equal(sums.long(), integers.sum(-1))


ROWS = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "mean": lambda x: x.float().pow(2).mean(-1, keepdim=True),
    "sum": lambda x: x.sum(-1),
    "sum of two dims": lambda x: x.unflatten(1, (4, -1)).sum((1, 2)),
    "mean of a middle dim": lambda x: x.unflatten(1, (4, -1)).mean(1),
    "var": lambda x: x.var(-1),
    "std": lambda x: x.std(-1, correction=0),
    "var_mean": lambda x: torch.stack(torch.var_mean(x, -1), 1),
    "std_mean": lambda x: torch.stack(torch.std_mean(x, -1), 1),
    "norm": lambda x: x.norm(dim=-1),
    "cross_entropy": lambda x: F.cross_entropy(x, x[:, :9].argmax(1), reduction="none"),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:], torch.ones_like(x[0])),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("classes", [2, 7, 30_000])
def test_gradients_of_embeddings(classes, dtype, installed) -> None:
    """Of many tokens of few classes PyTorch adds them by atomics."""
    ids, grad = torch.randint(classes, (20_000,), device="cuda"), draw(20_000, 512, dtype=dtype)
    weight = torch.zeros(classes, 512, device="cuda", dtype=dtype, requires_grad=True)
    wanted = torch.zeros(classes, 512, device="cuda", dtype=torch.float64)
    wanted.index_add_(0, ids, grad.double())
    results = []
    with torch_cubin.audit() as found:
        for _ in range(30):
            results += torch.autograd.grad(F.embedding(ids, weight), weight, grad)
    torch.testing.assert_close(results[0].double(), wanted, rtol=1e-2, atol=1e-3)
    assert all(torch.equal(result, results[0]) for result in results)
    assert found.deterministic


@pytest.mark.parametrize("name", ROWS)
def test_rows_alone_and_in_a_batch(name, installed) -> None:
    for rows, columns in ((700, 64), (64, 4096), (37, 1000), (5, 32000)):
        for dtype in DTYPES:
            x = draw(rows, columns, dtype=dtype).requires_grad_()
            whole = ROWS[name](x)
            grad = torch.randn_like(whole)
            whole.backward(grad)
            for first, count in ((0, 1), (3, 2), (rows - 1, 1)):
                own = x.detach()[first : first + count].clone().requires_grad_()
                part = ROWS[name](own)
                assert torch.equal(part, whole[first : first + count]), (rows, columns, dtype)
                part.backward(grad[first : first + count])
                assert torch.equal(own.grad, x.grad[first : first + count])
    declined = {row.function for row in torch_cubin.report().declined}
    assert not declined, torch_cubin.report()


# A product with its own matrix for each of four batches of rows, or with that of the first.
PRODUCTS = {
    "mm": lambda x, w, b: torch.mm(x.flatten(0, 1), w[0]).view(*x.shape[:2], -1),
    "addmm": lambda x, w, b: torch.addmm(b, x.flatten(0, 1), w[0], beta=0.5, alpha=2).view(
        *x.shape[:2], -1
    ),
    "linear": lambda x, w, b: F.linear(x, w[0].t(), b),
    "bmm": lambda x, w, b: torch.bmm(x, w),
    "baddbmm": lambda x, w, b: torch.baddbmm(b, x, w, beta=0.5, alpha=2),
    "mv": lambda x, w, b: torch.mv(x.flatten(0, 1), w[0, :, 3]).view(x.shape[:2]),
    "addmv": lambda x, w, b: torch.addmv(b[:1], x.flatten(0, 1), w[0, :, 3]).view(x.shape[:2]),
    "matmul": lambda x, w, b: x @ w[0],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_rows_alone_and_among_others(name, dtype, installed) -> None:
    """The rows of each batch, and of their gradients; gradients of weights are the same again."""
    w, b = draw(4, 520, 520, dtype=dtype), draw(520, dtype=dtype)
    x = draw(4, 200, 520, dtype=dtype)

    def run(own: Tensor) -> list[Tensor]:
        leaves = [each.clone().requires_grad_() for each in (own, w)]
        out = PRODUCTS[name](*leaves, b)
        rising = torch.linspace(-1, 1, out.numel() // (4 * own.shape[1]), device="cuda")
        rising = rising.to(dtype).view(1, 1, *out.shape[2:]).view_as(out[:1, :1])
        return [out.detach(), *torch.autograd.grad(out, leaves, rising.expand_as(out))]

    whole = run(x)
    for own, again in zip(whole, run(x), strict=True):
        assert torch.equal(own, again)
    for first, last in ((0, 1), (7, 23), (64, 192), (199, 200)):
        for own, wanted in zip(run(x[:, first:last])[:2], whole, strict=False):
            assert torch.equal(own, wanted[:, first:last]), (first, last)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal, with the last query at the last key; (batch, rows, heads, head_dim)."""
    return ops.flash_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("growth", [0.0, 6.0, 60.0], ids=["plain", "growing", "far"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_attention_of_chunks_and_single_tokens(dtype, head_dim, growth, installed) -> None:
    """Some queries' scores grow from key to key, in the order of the kernel, more than others': the
    rows beside them must not follow."""
    length, heads, kv_heads = 333, 4, 2
    q = draw(2, length, heads, head_dim, dtype=dtype)
    k, v = (draw(2, length, kv_heads, head_dim, dtype=dtype) for _ in range(2))
    if growth:
        ramp = torch.linspace(growth, 0, length, device="cuda")[None, :, None, None]
        direction = draw(1, 1, 1, head_dim).sign()
        k = (k.float() + ramp * direction).to(dtype)
        picked = (torch.arange(length, device="cuda") % 7 == 0)[None, :, None, None]
        q = torch.where(picked, q.float() + direction, q.float() * 0.1).to(dtype)
    whole = attend(q, k, v)
    assert whole.isfinite().all()
    for batch in ([0], [1], [1, 0, 1]):
        assert torch.equal(attend(q[batch], k[batch], v[batch]), whole[batch])
    for first, last in ((0, 1), (130, 131), (332, 333), (5, 13), (100, 117), (60, 257), (320, 333)):
        part = attend(q[:, first:last], k[:, :last], v[:, :last])
        differs = (part != whole[:, first:last]).sum().item()
        assert differs == 0, (first, last, differs)
    for head in range(heads):
        own = attend(q[:, :, head : head + 1], *(x[:, :, [head // 2]] for x in (k, v)))
        assert torch.equal(own, whole[:, :, head : head + 1])


def test_attention_behind_a_mask(installed) -> None:
    """Padded keys that a boolean mask hides change no bit, if they come after the sequence's own.
    F.scaled_dot_product_attention would make the mask additive."""
    attend = ops.scaled_dot_product_attention
    q, k, v = (draw(3, 4, 200, 64, dtype=torch.bfloat16) for _ in range(3))
    lengths = torch.tensor([200, 77, 130], device="cuda")
    seen = torch.arange(200, device="cuda") < lengths[:, None, None, None]
    both = seen & torch.ones(200, 200, dtype=torch.bool, device="cuda").tril()
    whole = attend(q, k, v, attn_mask=both)
    for i, length in enumerate(lengths.tolist()):
        own = [x[i : i + 1, :, :length] for x in (q, k, v)]
        alone = attend(*own, is_causal=True)
        assert torch.equal(alone[0], whole[i, :, :length]), i


BACKENDS = [
    SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION
]  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_a_sequence_of_pytorchs_attention_alone_and_among_others(backend, installed) -> None:
    def run(batch: list[int]) -> list[Tensor]:
        own = [x[batch].clone().requires_grad_() for x in (q, k, v)]
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(*own, is_causal=True)
        return [out.detach(), *torch.autograd.grad(out, own, grad[batch])]

    q, k, v, grad = (draw(5, 4, 300, 64, dtype=torch.bfloat16) for _ in range(4))
    whole = run(list(range(5)))
    for batch in ([2], [4, 0]):
        for own, wanted in zip(run(batch), whole, strict=True):
            assert torch.equal(own, wanted[batch]), batch
    assert not torch_cubin.report().declined


def test_gradients_of_a_sequence(installed) -> None:
    def gradients(batch: list[int]) -> list[Tensor]:
        own = [x[batch].clone().requires_grad_() for x in (q, k, v)]
        return list(torch.autograd.grad(attend(*own), own, grad[batch]))

    q, grad = (draw(6, 500, 4, 128, dtype=torch.bfloat16) for _ in range(2))
    k, v = (draw(6, 500, 2, 128, dtype=torch.bfloat16) for _ in range(2))
    whole = gradients(list(range(6)))
    for batch in ([2], [5, 0], [1, 2, 3]):
        for own, wanted in zip(gradients(batch), whole, strict=True):
            assert torch.equal(own, wanted[batch]), batch


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_gradients_with_rows_behind_a_sequence(head_dim, installed) -> None:
    """Padding that no loss reads, with a causal or a boolean mask, and packed sequences: lengths at
    which the backward would take other kernels, or share its tiles out otherwise."""

    def gradients(*own: Tensor, grad: Tensor, **mask) -> list[Tensor]:
        own = tuple(x.clone().requires_grad_() for x in own)
        out = ops.scaled_dot_product_attention(*own, **(mask or {"is_causal": True}),
                                               enable_gqa=True)  # fmt: skip
        return list(torch.autograd.grad(out, own, grad))

    behind = 40
    for length in (20, 79, 120, 186, 380):
        every = length + behind
        q, grad = (draw(3, 6, every, head_dim, dtype=torch.bfloat16) for _ in range(2))
        k, v = (draw(3, 2, every, head_dim, dtype=torch.bfloat16) for _ in range(2))
        grad[:, :, length:] = 0
        seen = torch.ones(every, every, dtype=torch.bool, device="cuda").tril()
        seen[:, length:] = False
        wanted = gradients(*(x[1:2, :, :length] for x in (q, k, v)), grad=grad[1:2, :, :length])
        masks = [{}, {"attn_mask": seen}] if not 128 < head_dim <= 192 else [{}]
        for mask in masks:
            for own, whole in zip(wanted, gradients(q, k, v, grad=grad, **mask), strict=True):
                assert torch.equal(own[0], whole[1, :, :length]), (length, mask)
                assert not whole[1, :, length:].any() or not mask
        ends = torch.tensor([0, 5, 5 + length], dtype=torch.int32, device="cuda")
        own = [x[1:2].transpose(1, 2).clone().requires_grad_() for x in (q, k, v)]
        packed = [torch.cat((x[0, :5], x[0, :length])) for x in own]
        lengths = {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
        out = ops.flash_attention(*packed, **lengths, is_causal=True)
        found = torch.autograd.grad(out[5:], own, grad[1, :, :length].transpose(0, 1))
        for gradient, each in zip(wanted, found, strict=True):
            assert torch.equal(gradient[0], each[0, :length].transpose(0, 1)), length


def test_the_switch_of_a_thread_reaches_the_threads_of_its_backward() -> None:
    def served() -> set[str]:
        x.softmax(-1).square().mean(-1).sum().backward()
        return {row.function for row in torch_cubin.report(reset=True).served}

    x = draw(64, 128).requires_grad_()
    with torch_cubin.install():
        assert "aten::_softmax_backward_data" not in served()
        with torch_cubin.batch_invariant():
            assert {"aten::_softmax", "aten::_softmax_backward_data"} <= served()
        assert "aten::_softmax_backward_data" not in served()


def test_compiled_code_rounds_where_eager_code_does(installed) -> None:
    """Else the bits would depend on what Inductor fuses, which sizes and ranks decide."""

    def chain(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return ((a + b).relu() * c + a) * b - c

    args = [draw(333, 64, dtype=torch.bfloat16) for _ in range(3)]
    assert torch.equal(torch.compile(chain)(*args), chain(*args))


def test_compiled_results_do_not_depend_on_gradients(installed) -> None:
    """Layers that a graph joins: gate and up of two products and of one, a GELU with a bias."""

    def layers(x: Tensor, gate: Tensor, up: Tensor, both: Tensor, wide: Tensor, bias: Tensor):
        first, second = F.linear(x, both).chunk(2, -1)
        return (
            F.silu(F.linear(x, gate)) * F.linear(x, up),
            F.silu(first) * second,
            F.gelu(F.linear(x, wide, bias)),
        )

    shapes = ((1024, 256), (1024, 256), (2048, 256), (1024, 256), (1024,))
    weights = [draw(*shape, dtype=torch.bfloat16, scale=256**-0.5) for shape in shapes]
    leaves = [weight.requires_grad_() for weight in weights]
    compiled = torch.compile(layers, dynamic=False)
    for rows in (2000, 40):
        x = draw(rows, 256, dtype=torch.bfloat16)
        with torch.no_grad():
            alone = compiled(x, *leaves)
        for i, (kept, want) in enumerate(zip(compiled(x, *leaves), alone, strict=True)):
            assert kept.requires_grad
            assert torch.equal(kept, want), (rows, i)


def test_products_with_a_float32_result(installed) -> None:
    a, b = draw(300, 512, dtype=torch.bfloat16), draw(512, 640, dtype=torch.bfloat16)
    whole = torch.mm(a, b, out_dtype=torch.float32)
    torch.testing.assert_close(whole, a.float() @ b.float(), rtol=1e-4, atol=1e-3)
    for first, last in ((0, 1), (5, 69), (299, 300)):
        assert torch.equal(torch.mm(a[first:last], b, out_dtype=torch.float32), whole[first:last])
    batch = torch.bmm(a.view(3, 100, 512), b.expand(3, -1, -1), out_dtype=torch.float32)
    assert torch.equal(batch.flatten(0, 1), whole)


def test_a_thousand_draws(installed) -> None:
    """Models of one layer, prompts, batches and cuts."""
    draws = random.Random(5)
    torch.manual_seed(5)
    for head_dim, heads, kv_heads in ((64, 4, 2), (128, 2, 1), (64, 3, 3), (256, 2, 2)):
        sizes = {"vocab": 160, "width": head_dim * heads, "hidden": 200, "layers": 1}
        with torch.device("cuda"), torch.no_grad():
            model = same_bits.Llama(**sizes, heads=heads, kv_heads=kv_heads).to(torch.bfloat16)
        others = torch.randint(160, (16, 420), device="cuda")
        for _ in range(5):
            length = draws.randint(2, 400)
            prompt = torch.randint(160, (1, length), device="cuda")
            with torch.no_grad():
                wanted = model(prompt)
            for _ in range(50):
                batch, longer = draws.randint(1, 16), draws.choice((0, 0, draws.randint(1, 20)))
                place = draws.randrange(batch)
                ids = others[:batch, : length + longer].clone()
                ids[place, :length] = prompt[0]
                cuts = sorted(draws.sample(range(1, length), min(draws.randint(0, 3), length - 1)))
                if draws.random() < 0.5:
                    cuts += range(max([*cuts, 0, length - 3]) + 1, length)  # decoded at last
                ends = [*cuts, length + longer]
                parts = [end - start for start, end in zip([0, *cuts], ends, strict=True)]
                with torch.no_grad():
                    logits = same_bits.in_chunks(model, ids, parts)
                same = torch.equal(logits[place, :length], wanted[0])
                assert same, (head_dim, heads, kv_heads, length, longer, batch, place, parts)


def test_sampler_and_trainer(installed) -> None:
    model = same_bits.make()
    assert same_bits.reinforce(model) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("page_size", "dtype"),
    [(0, torch.bfloat16), (16, torch.float16), (256, torch.bfloat16)],
    ids=str,
)
def test_a_cache_gives_the_bits_of_a_prefill(page_size, dtype, installed) -> None:
    """Rows behind a sequence's length hold NaN."""
    capacity, lengths = 512, (333, 20, 512)
    q = draw(3, capacity, 8, 128, dtype=dtype)
    k, v = (draw(3, capacity, 2, 128, dtype=dtype) for _ in range(2))
    whole = [attend(*(x[b : b + 1, :n] for x in (q, k, v))) for b, n in enumerate(lengths)]
    caches = {"k_cache": k.clone(), "v_cache": v.clone()}
    for cache in caches.values():
        for b, length in enumerate(lengths):
            cache[b, length:] = float("nan")
    options = {"cache_seqlens": torch.tensor(lengths, dtype=torch.int32, device="cuda")}
    if page_size:
        pages = 3 * capacity // page_size
        order = torch.randperm(pages, device="cuda")
        for name, cache in caches.items():
            caches[name] = torch.empty_like(cache.view(pages, page_size, 2, 128))
            caches[name][order] = cache.view(pages, page_size, 2, 128)
        options["block_table"] = order.view(3, -1).int()
    for rows in (1, 5, 20):
        last = torch.stack([q[b, n - rows : n] for b, n in enumerate(lengths)])
        out = ops.flash_attention_with_kvcache(last, **caches, **options, causal=True)
        for b, wanted in enumerate(whole):
            assert torch.equal(out[b], wanted[0, -rows:]), (rows, b)


def test_pointwise_operators_as_audit_says(installed) -> None:
    """Without those that NVRTC would compile."""
    wrong = []
    for op in row_bits.POINTWISE:
        if not op.name().startswith("aten::special_"):
            for args in row_bits.arguments_of(op, "cuda"):
                claimed = audit.classify(op, args, {}, False)[0] == audit.INVARIANT
                if claimed and row_bits.differs(lambda *rows, op=op: op(*rows), args):
                    wrong.append(op.name())
    assert not wrong
    for name, call in row_bits.MOVING.items():
        for x in row_bits.rows_of("cuda"):
            assert not row_bits.differs(call, [x]), name


@pytest.mark.parametrize("cut", [1024, 2048, 3072])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weight_gradients_however_a_batch_is_cut(dtype, cut) -> None:
    grad, x = draw(4000, 520, dtype=dtype), draw(4000, 264, dtype=dtype)
    whole, parts = (torch.ones(520, 264, device="cuda") for _ in range(2))
    add = torch_cubin.accumulate_weight_gradient
    add(whole, grad, x, tokens=1024, last=True)
    add(parts, grad[:cut].clone(), x[:cut].clone(), tokens=1024)
    add(parts, grad[cut:].clone(), x[cut:].clone(), tokens=1024, last=True)
    assert torch.equal(parts, whole)
    torch.testing.assert_close(whole, 1 + grad.float().t() @ x.float(), rtol=1e-2, atol=0.1)


@pytest.mark.parametrize("sizes", [(100, 512, 96), (7, 1000, 33)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_of_a_row_parallel_layer(dtype, sizes) -> None:
    """The parts of one, two and four ranks, on one GPU: cut from a whole, and tensors of their
    own."""
    m, k, n = sizes
    x, weight = draw(m, k, dtype=dtype), draw(n, k, dtype=dtype)
    with torch_cubin.batch_invariant():
        whole = row_parallel.tree(row_parallel.summed_parts(x, weight.t(), 4))
        for ranks in (2, 4):
            own = zip(x.chunk(ranks, 1), weight.chunk(ranks, 1), strict=True)
            sums = [row_parallel.summed_parts(a.clone(), b.clone().t(), 4 // ranks) for a, b in own]
            assert torch.equal(row_parallel.tree(torch.cat(sums)), whole), ranks
    torch.testing.assert_close(whole, x.float() @ weight.float().t(), rtol=1e-2, atol=0.5)
