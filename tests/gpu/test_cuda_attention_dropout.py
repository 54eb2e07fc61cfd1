"""Dropout of attention on the GPU: which weights it drops, the gradient, and the seed's source."""

from __future__ import annotations

import math

import pytest
import torch
from gpu import attention_cases as ac
from gpu import attention_reference as ar
from gpu import cases

SEED = 0x1234_5678_9ABC_DEF0 % 2**63


def _seed(number: int = SEED) -> torch.Tensor:
    return torch.tensor([number], device=ac.DEVICE)


def _kept_weights(
    name: str, shape: tuple[int, int, int, int], dropout_p: float, number: int
) -> torch.Tensor:
    """What the op multiplies the weights of that shape by: equal weights, and unit vectors."""
    batch, heads, rows, columns = shape
    dtype = ac.DTYPES[name]
    q = torch.zeros(batch, heads, rows, 8, dtype=dtype, device=ac.DEVICE)
    k = torch.zeros(batch, heads, columns, 8, dtype=dtype, device=ac.DEVICE)
    eye = torch.eye(columns, dtype=dtype, device=ac.DEVICE).expand(batch, heads, -1, -1)
    out, _ = torch.ops.cubin.attention_forward(q, k, eye, None, dropout_p, False, _seed(number))
    return out.double() * columns


@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("name", ac.DTYPES)
def test_exactly_the_weights_of_the_formula_are_kept(name: str, dropout_p: float) -> None:
    for number in (SEED, 0, 2**63 - 1):
        for shape in [(2, 3, 130, 200), (1, 2, 1, 96), (1, 1, 65, 33), (1, 1, 300, 256)]:
            kept = _kept_weights(name, shape, dropout_p, number)
            want = ar.dropout_kept(number, *shape, dropout_p)
            assert torch.equal(kept != 0, want != 0), f"{name} {shape} p {dropout_p} seed {number}"
            # 1 / columns and the product are each rounded to the dtype.
            torch.testing.assert_close(kept, want, rtol=2e-2, atol=0)


def test_the_kept_fraction(nan_memory) -> None:
    for dropout_p in (0.05, 0.3, 0.5, 0.95):
        kept = ar.dropout_kept(SEED, 4, 8, 512, 256, dropout_p) != 0
        fraction = float(kept.double().mean())
        spread = math.sqrt(dropout_p * (1 - dropout_p) / kept.numel())
        assert abs(fraction - (1 - dropout_p)) < 5 * spread + 2**-16
        found = _kept_weights("bfloat16", (4, 8, 512, 256), dropout_p, SEED) != 0
        assert abs(float(found.double().mean()) - fraction) == 0
        rows = kept.flatten(0, 2)
        assert len(torch.unique(rows, dim=0)) == len(rows), "two rows drop alike"


@pytest.mark.parametrize("name", ac.DTYPES)
def test_the_mask_is_that_of_the_cpu_reference(name: str) -> None:
    g = ac.generator(name)
    q, k, v = (ac.draw((2, 3, 70, 64), ac.DTYPES[name], g) for _ in range(3))
    out, _ = torch.ops.cubin.attention_forward(q, k, v, None, 0.4, True, _seed())
    other, _ = torch.ops.cubin.attention_forward(
        q.cpu(), k.cpu(), v.cpu(), None, 0.4, True, _seed().cpu()
    )
    limit = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 2e-5, "float64": 1e-12}[name]
    torch.testing.assert_close(out.cpu(), other, rtol=limit, atol=4 * limit)


SHAPES = [  # batch, heads, heads of key, rows, columns, head_dim
    (2, 4, 4, 100, 100, 64),
    (2, 4, 2, 130, 257, 128),
    (1, 8, 1, 1, 300, 64),
    (3, 2, 1, 65, 40, 40),
    (1, 2, 2, 200, 70, 256),
]
OPTIONS = [{}, {"is_causal": True}, {"softcap": 3.0, "window_left": 30}, {"attn_mask": True}]


@pytest.mark.parametrize("name", ac.DTYPES)
def test_results_and_gradients_under_a_fixed_seed(name: str, nan_memory) -> None:
    g = ac.generator(name)
    dtype = ac.DTYPES[name]
    for batch, heads, kv_heads, rows, columns, head_dim in SHAPES:
        q = ac.draw((batch, heads, rows, head_dim), dtype, g, cases.Layout(order=(0, 2, 1, 3)))
        k, v = (ac.draw((batch, kv_heads, columns, head_dim), dtype, g) for _ in range(2))
        grad = ac.gradient(q, g)
        for raw in OPTIONS:
            options = {**raw, "enable_gqa": True}
            if "attn_mask" in raw:
                mask = torch.rand(batch, 1, rows, columns, generator=g, device=ac.DEVICE) > 0.2
                options["attn_mask"] = mask
            kept = ar.dropout_kept(SEED, batch, heads, rows, columns, 0.3)
            want = ar.reference(q, k, v, grad, kept=kept, **options)
            ours, logsumexp = ar.both(q, k, v, grad, dropout_p=0.3, dropout_seed=_seed(), **options)
            label = f"{name} {tuple(q.shape)} {tuple(k.shape)} {raw}"
            ar.check(name, label, ours, want, logsumexp)


@pytest.mark.parametrize("name", ac.DTYPES)
def test_autograd_drops_the_same_in_both_directions(name: str) -> None:
    """With unit vectors as value and gradient, out and dv show the weights that were kept."""
    dtype = ac.DTYPES[name]
    columns = 128
    q, k = (torch.zeros(2, 3, columns, 8, dtype=dtype, device=ac.DEVICE) for _ in range(2))
    eye = torch.eye(columns, dtype=dtype, device=ac.DEVICE).expand(2, 3, -1, -1).contiguous()
    value = eye.clone().requires_grad_()
    out = torch.ops.cubin.scaled_dot_product_attention(q, k, value, dropout_p=0.4)
    (dv,) = torch.autograd.grad(out, value, eye)
    assert torch.equal(out != 0, dv.mT != 0)
    assert 0.5 < float((out != 0).double().mean()) < 0.7


@pytest.mark.parametrize("name", ac.FUSED)
def test_batch_dims_that_do_not_merge_drop_as_those_that_do(name: str) -> None:
    g = ac.generator(name)
    dtype = ac.DTYPES[name]
    layout = cases.Layout(order=(1, 0, 2, 3, 4))
    q, k, v = (ac.draw((2, 3, 2, 60, 64), dtype, g, layout) for _ in range(3))
    grad = ac.gradient(q, g)
    mask = ac.draw((2, 1, 1, 60, 60), dtype, g)
    kept = ar.dropout_kept(SEED, 6, 2, 60, 60, 0.3).view(2, 3, 2, 60, 60)
    for options in ({}, {"attn_mask": mask}):
        want = ar.reference(q, k, v, grad, kept=kept, **options)
        ours, _ = ar.both(q, k, v, grad, dropout_p=0.3, dropout_seed=_seed(), **options)
        ar.check(name, f"{name} {list(options)}", ours, want)


@pytest.mark.parametrize("name", ac.FUSED)
def test_packed_sequences_count_rows_within_their_own(name: str) -> None:
    g = ac.generator(name)
    dtype = ac.DTYPES[name]
    q_at, k_at = [0, 50, 51, 180], [0, 70, 100, 140]
    q = ac.draw((180, 4, 64), dtype, g)
    k, v = (ac.draw((140, 4, 64), dtype, g) for _ in range(2))
    grad = ac.gradient(q, g)
    named = {
        f"cu_seqlens_{x}": torch.tensor(at, dtype=torch.int32, device=ac.DEVICE)
        for x, at in (("q", q_at), ("k", k_at))
    }
    ours, logsumexp = ar.both(q, k, v, grad, dropout_p=0.3, dropout_seed=_seed(), **named)
    for index in range(3):
        rows = slice(q_at[index], q_at[index + 1])
        columns = slice(k_at[index], k_at[index + 1])
        one = [x.transpose(0, 1) for x in (q[rows], k[columns], v[columns])]
        shape = (one[0].shape[1], one[1].shape[1])
        kept = ar.dropout_kept(SEED, 3, 4, *shape, 0.3)[index]
        want = ar.reference(*one, grad[rows].transpose(0, 1), kept=kept)
        mine = zip(ours, (rows, rows, columns, columns), strict=True)
        label = f"{name}, sequence {index}"
        ar.check(
            name, label, [x[place].transpose(0, 1) for x, place in mine], want, logsumexp[:, rows]
        )


def _small(g: torch.Generator, requires_grad: bool = False) -> list[torch.Tensor]:
    return [
        ac.draw((2, 3, 64, 64), torch.bfloat16, g).requires_grad_(requires_grad) for _ in range(3)
    ]


@pytest.mark.parametrize("grad", [False, True])
def test_manual_seed_decides_and_two_calls_differ(grad: bool) -> None:
    args = _small(ac.generator("seed"), grad)

    def run() -> torch.Tensor:
        return torch.ops.cubin.scaled_dot_product_attention(*args, dropout_p=0.5).detach()

    torch.manual_seed(7)
    first, second = run(), run()
    assert not torch.equal(first, second)
    torch.manual_seed(7)
    assert torch.equal(run(), first)
    assert torch.equal(run(), second)
    torch.manual_seed(8)
    assert not torch.equal(run(), first)


def test_dropout_with_p_one_and_p_zero(nan_memory) -> None:
    args = _small(ac.generator("all"))
    op = torch.ops.cubin.scaled_dot_product_attention
    assert bool((op(*args, dropout_p=1.0) == 0).all())
    assert torch.equal(op(*args, dropout_p=0.0), op(*args))
    torch.manual_seed(5)
    expected = torch.rand(1, device=ac.DEVICE)
    torch.manual_seed(5)
    op(*args)
    assert torch.equal(torch.rand(1, device=ac.DEVICE), expected), "a number was drawn for nothing"


def test_replays_of_a_graph_draw_anew() -> None:
    """aten::randint advances the generator that the graph registers, once a replay."""
    args = _small(ac.generator("graph"))
    with torch.no_grad():
        torch.ops.cubin.scaled_dot_product_attention(*args, dropout_p=0.5)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        torch.manual_seed(11)
        with torch.cuda.graph(graph):
            both = [
                torch.ops.cubin.scaled_dot_product_attention(*args, dropout_p=0.5) for _ in range(2)
            ]
        seen = []
        for _ in range(4):
            graph.replay()
            seen += [out.clone() for out in both]
        torch.manual_seed(11)
        graph.replay()
        again = [out.clone() for out in both]
    for index, one in enumerate(seen):
        assert not any(torch.equal(one, other) for other in seen[index + 1 :])
    torch.manual_seed(11)
    graph.replay()
    assert all(torch.equal(out, other) for out, other in zip(both, again, strict=True))


def test_a_graph_of_forward_and_backward_agrees_with_itself() -> None:
    """Within one replay both directions use one seed, and the next replay another."""
    columns = 64
    dtype = torch.bfloat16
    q, k = (torch.zeros(2, 3, columns, 8, dtype=dtype, device=ac.DEVICE) for _ in range(2))
    eye = torch.eye(columns, dtype=dtype, device=ac.DEVICE).expand(2, 3, -1, -1).contiguous()
    value = eye.clone().requires_grad_()

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.ops.cubin.scaled_dot_product_attention(q, k, value, dropout_p=0.4)
        return out.detach(), torch.autograd.grad(out, value, eye)[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, dv = step()
    seen = []
    for _ in range(3):
        graph.replay()
        assert torch.equal(out != 0, dv.mT != 0)
        seen.append(out.clone())
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])
