"""What the results of attention are held against: float64, PyTorch's own, and dropout's formula.

The reference is the definition, written out in float64 with its gradients, so that what
F.scaled_dot_product_attention lacks (windows, softcap, ALiBi, sinks, a given dropout) has one too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numerics
import torch
import torch.nn.functional as F
from gpu import attention_cases
from ops.attention_samples import logits
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# The definition.


@dataclass
class Reference:
    """float64 results. `sizes` says how large each would be if its terms had random signs."""

    out: Tensor
    logsumexp: Tensor
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    squares: dict[str, Tensor] = field(default_factory=dict)

    def sizes(self) -> dict[str, float]:
        """By name. Errors are measured in these: an element may be small by cancellation."""
        names = list(self.squares)
        means = torch.stack([self.squares[name].mean() for name in names]).sqrt().tolist()
        return {
            name: mean if math.isfinite(mean) and mean > 0 else 1.0
            for name, mean in zip(names, means, strict=True)
        }


# At a time, if batches and heads can be split: many processes share a GPU's memory.
MOST_SCORES = 1 << 23


def _parts(query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor | None, gqa: bool):
    """Where a call is too large at once: the dim that it is cut along, its size and a part's."""
    scores = math.prod(query.shape[:3]) * key.shape[-2]
    if query.dim() != 4 or scores <= MOST_SCORES:
        return None
    batch, heads = key.shape[:2]

    def cut(dim: int, size: int) -> tuple[int, int, int]:
        return dim, size, max(1, size * MOST_SCORES // scores)

    same = [x for x in (key, value, grad_out) if x is not None]
    if batch > 1 and all(x.dim() == 4 and x.shape[0] == batch for x in (query, *same)):
        return cut(0, batch)
    shares = query.shape[1] == heads or (gqa and query.shape[1] % heads == 0)
    if heads > 1 and shares and all(x.dim() == 4 and x.shape[1] == heads for x in (key, value)):
        return cut(1, heads)
    return None


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_out: Tensor | None = None,
    attn_mask: Tensor | None = None,
    kept: Tensor | None = None,
    *,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    **options,
) -> Reference:
    """out, logsumexp and, given grad_out, the gradients. `kept`: what dropout multiplies by.

    `options` are those of `_reference`, which computes it, and of logits().
    """
    given = (query, key, value, grad_out, attn_mask, kept)
    parts_of = _parts(query, key, value, grad_out, options.get("enable_gqa", False))
    if parts_of is None:
        return _reference(*given, alibi_slopes=alibi_slopes, sinks=sinks, **options)
    dim, count, together = parts_of

    def part(x: Tensor | None, first: int, before: int = 0) -> Tensor | None:
        """Of a tensor that lacks the first `before` of four dims."""
        own = dim - before
        if x is None or own < 0 or x.dim() + before != 4 or x.shape[own] == 1:
            return x
        each = x.shape[own] // count
        return x.narrow(own, first * each, min(together, count - first) * each)

    parts = []
    for i in range(0, count, together):
        slopes = alibi_slopes
        if slopes is not None:  # (heads,) or (batch, heads)
            slopes = part(slopes[..., None, None], i, 2 - slopes.dim())[..., 0, 0]
        sink = None if sinks is None else part(sinks[:, None, None], i, 1)[:, 0, 0]
        operands = [part(x, i, 4 - x.dim() if x is not None else 0) for x in given]
        parts.append(reference(*operands, alibi_slopes=slopes, sinks=sink, **options))

    def joined(name: str) -> Tensor | None:
        values = [getattr(one, name) for one in parts]
        return None if values[0] is None else torch.cat(values, dim)

    names = ("out", "logsumexp", "dq", "dk", "dv")
    squares = {name: torch.cat([p.squares[name] for p in parts], dim) for name in parts[0].squares}
    return Reference(*map(joined, names), squares)


def _reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_out: Tensor | None = None,
    attn_mask: Tensor | None = None,
    kept: Tensor | None = None,
    *,
    enable_gqa: bool = False,
    sinks: Tensor | None = None,
    **options,
) -> Reference:
    product = numerics.reference_matmul if query.dtype == torch.float64 else torch.matmul
    q, k, v = query.double(), key.double(), value.double()
    group = q.shape[-3] // k.shape[-3] if enable_gqa and k.shape[-3] else 1
    if group > 1:
        k, v = k.repeat_interleave(group, -3), v.repeat_interleave(group, -3)
    columns, scale, softcap = k.shape[-2], options.get("scale"), options.get("softcap")
    factor = 1 / math.sqrt(max(q.shape[-1], 1)) if scale is None else scale
    scores = logits(q, k, attn_mask, product=product, **options)
    slope = None
    if softcap:
        slope = 1 - torch.tanh(product(q, k.mT) * factor / softcap).square()
    joined = scores
    if sinks is not None:
        sink = sinks.double()[:, None, None].expand(*scores.shape[:-1], 1)
        joined = torch.cat([scores, sink], -1)
    if joined.shape[-1] == 0:
        logsumexp = torch.full(scores.shape[:-1], -math.inf, dtype=torch.double, device=q.device)
    else:
        logsumexp = torch.logsumexp(joined, -1)
    weights = torch.softmax(joined, -1)[..., :columns]
    weights = torch.where((logsumexp == -math.inf)[..., None], 0.0, weights)
    dropped = weights if kept is None else weights * kept
    result = Reference(product(dropped, v), logsumexp)
    squared = dropped.square()
    result.squares["out"] = squared @ v.square()
    if grad_out is None:
        return result

    def gather(full: Tensor, operand: Tensor) -> Tensor:
        """The sum over everything that shared or broadcast an operand."""
        if group > 1 and operand is not query:
            *leading, heads, n, width = full.shape
            full = full.reshape(*leading, heads // group, group, n, width).sum(-3)
        return full.sum_to_size(operand.shape)

    grad = grad_out.double()
    along = product(grad, v.mT)
    if kept is not None:
        along = along * kept
    delta = (weights * along).sum(-1, keepdim=True)
    inner = weights * (along - delta)
    inner_squared = squared * (grad.square() @ v.square().mT)
    if slope is not None:
        inner, inner_squared = inner * slope, inner_squared * slope.square()
    result.dq = gather(product(inner, k) * factor, query)
    result.dk = gather(product(inner.mT, q) * factor, key)
    result.dv = gather(product(dropped.mT, grad), value)
    result.squares["dq"] = gather(inner_squared @ k.square() * factor**2, query)
    result.squares["dk"] = gather(inner_squared.mT @ q.square() * factor**2, key)
    result.squares["dv"] = gather(squared.mT @ grad.square(), value)
    return result


def packed_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    q_at: list[int],
    k_at: list[int],
    options: dict,
    kept: list[Tensor] | None = None,
) -> Reference:
    """Each packed sequence by itself; zeros, and -inf, for rows outside all sequences.

    `kept` and `alibi_slopes` of two dims have an entry a sequence.
    """
    total = {
        name: torch.zeros_like(x, dtype=torch.double)
        for name, x in zip(NAMES, (grad, q, k, v), strict=True)
    }
    squares = {name: torch.zeros_like(x) for name, x in total.items()}
    logsumexp = torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=torch.double, device=q.device)
    for index in range(len(q_at) - 1):
        rows = slice(q_at[index], q_at[index + 1])
        columns = slice(k_at[index], k_at[index + 1])
        if rows.start == rows.stop:
            continue
        one_q, one_k, one_v, one_grad = (
            x.transpose(0, 1) for x in (q[rows], k[columns], v[columns], grad[rows])
        )
        own = dict(options)
        slopes = own.get("alibi_slopes")
        if slopes is not None and slopes.dim() == 2:
            own["alibi_slopes"] = slopes[index]
        weights = None if kept is None else kept[index]
        one = reference(one_q, one_k, one_v, one_grad, kept=weights, enable_gqa=True, **own)
        logsumexp[:, rows] = one.logsumexp
        for name, place in zip(NAMES, (rows, rows, columns, columns), strict=True):
            total[name][place] = getattr(one, name).transpose(0, 1)
            squares[name][place] = one.squares[name].transpose(0, 1)
    return Reference(total["out"], logsumexp, total["dq"], total["dk"], total["dv"], squares)


# PyTorch's own results, the yardstick.


def _copy(tensor: Tensor) -> Tensor:
    """Contiguous and aligned: PyTorch's flash kernel faults where 16-byte loads do not fit."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _stock(query, key, value, grad_out, mask, options, expanded: bool = False) -> list[Tensor]:
    leaves = [_copy(x).requires_grad_(grad_out is not None) for x in (query, key, value)]
    operands = leaves
    if expanded:
        own = 3 if options.get("enable_gqa") else 2  # dims that are not broadcast
        leading = torch.broadcast_shapes(*(x.shape[:-own] for x in leaves))
        operands = [x.expand(*leading, *x.shape[-own:]) for x in leaves]
    out = F.scaled_dot_product_attention(*operands, attn_mask=mask, **options)
    if grad_out is None:
        return [out]
    return [out.detach(), *torch.autograd.grad(out, leaves, _copy(grad_out))]


def pytorch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_out: Tensor | None = None,
    attn_mask: Tensor | None = None,
    **options,
) -> list[Tensor]:
    """out, or out, dq, dk, dv, of F.scaled_dot_product_attention with the backend it chooses.

    Not among its backends is cuDNN, which compiles for every new shape: seconds of many a test.

    NOTE: where that backend refuses what PyTorch documents, or gives NaN for it (rows that see
    nothing, scales that are not positive), PyTorch's composition ("math") is asked instead, with
    operands of equal leading dims: it takes no mask that is broader than query and key.
    """
    mask = attn_mask
    if mask is not None:
        # PyTorch's efficient kernel faults on a mask that is broadcast along the columns.
        mask = _copy(mask.expand(*mask.shape[:-2], query.shape[-2], key.shape[-2]))
    if mask is not None and mask.dtype not in (torch.bool, query.dtype):
        mask = mask.to(query.dtype)
    scale = options.get("scale")
    empty = any(x.numel() == 0 for x in (query, key, value))
    if not empty and (scale is None or scale > 0):
        try:
            with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
                results = _stock(query, key, value, grad_out, mask, options)
        except (RuntimeError, ValueError):
            results = []
        if results and all(bool(x.isfinite().all()) for x in results):
            return results
    with sdpa_kernel(SDPBackend.MATH):
        return _stock(query, key, value, grad_out, mask, options, expanded=True)


def cubin(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_out: Tensor | None = None,
    attn_mask: Tensor | None = None,
    **options,
) -> list[Tensor]:
    """The same of torch.ops.cubin.scaled_dot_product_attention."""
    op = torch.ops.cubin.scaled_dot_product_attention
    if grad_out is None:
        with torch.no_grad():
            return [op(query, key, value, attn_mask, **options)]
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    out = op(*leaves, attn_mask, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


class Judges:
    """One numerics.Judge for each result; cases of any magnitude share them.

    Gradients get the weights again from the logsumexp, as the fused kernels of everybody do; it is
    stored rounded, so that a weight near 1 may be off by an ulp of it. PyTorch's composition keeps
    the weights.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.judges = {name: numerics.Judge(dtype) for name in ("out", "dq", "dk", "dv")}

    def add(self, label: str, ours: list[Tensor], own: list[Tensor], want: Reference) -> None:
        sizes = want.sizes()
        stored = torch.double if self.dtype == torch.double else torch.float32
        finite = want.logsumexp[want.logsumexp.isfinite()].abs()
        rounding = numerics.ulp(stored, float(finite.max())) if finite.numel() else 0.0
        for name, mine, theirs in zip(self.judges, ours, own, strict=False):
            self.judges[name].add(
                f"{name} of {label}",
                mine,
                theirs,
                getattr(want, name),
                scale=sizes[name],
                relative=0.0 if name == "out" else rounding,
            )

    def compare(self, label: str, *args: Tensor, **options) -> tuple[list[Tensor], Reference]:
        """add() of a call, whose results by PyTorch and by the definition it returns."""
        own, want = pytorch(*args, **options), reference(*args, **options)
        self.add(label, cubin(*args, **options), own, want)
        return own, want

    def finish(self) -> None:
        for judge in self.judges.values():
            judge.finish()


# Dropout, as csrc/kernels/common/dropout.cuh says.

_LOW = 0xFFFFFFFF


def _multiply(a: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """The high and the low 32 bits of a * factor, both below 2^32, in int64."""
    low = (a & 0xFFFF) * factor
    high = (a >> 16) * factor + (low >> 16)
    return high >> 16, (high & 0xFFFF) << 16 | low & 0xFFFF


def dropout_kept(
    seed: int, batch: int, heads: int, rows: int, columns: int, dropout_p: float
) -> Tensor:
    """What dropout multiplies the weights [batch, heads, rows, columns] by: 0, or 1 / kept."""
    device = attention_cases.DEVICE
    n = torch.arange(batch * heads, device=device)[:, None, None]
    i = torch.arange(rows, device=device)[None, :, None]
    j = torch.arange(columns, device=device)[None, None, :]
    c0, c1, c2, c3 = torch.broadcast_tensors(i, j // 32 * 4 + j % 8 // 2, n, torch.zeros_like(n))
    k0, k1 = seed & _LOW, seed >> 32 & _LOW
    for _ in range(7):
        high0, low0 = _multiply(c0, 0xD2511F53)
        high1, low1 = _multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    word = torch.stack([c0, c1, c2, c3])
    word = word.gather(0, (j % 32 // 8).expand_as(c0)[None])[0]
    number = torch.where(j % 2 == 0, word & 0xFFFF, word >> 16)
    drop_below = math.floor(dropout_p * 65536 + 0.5)
    kept = (number >= drop_below).double()
    if drop_below < 65536:
        kept = kept * (65536 / (65536 - drop_below))
    return kept.view(batch, heads, rows, columns)


def without_dropout(options: dict, shape: tuple) -> tuple[dict, Tensor | None]:
    """The options but dropout's, and what that multiplies the weights of `shape` by: (batch, heads,
    rows, columns)."""
    rest = {name: x for name, x in options.items() if not name.startswith("dropout")}
    if "dropout_p" not in options:
        return rest, None
    return rest, dropout_kept(int(options["dropout_seed"]), *shape, options["dropout_p"])


# Where PyTorch has nothing to compare with.

# The largest error relative to the result's size (Reference.sizes): some roundings of the dtype.
LIMITS = {"float16": 2**-7, "bfloat16": 2**-4, "float32": 2**-16, "float64": 2**-43}
NAMES = ("out", "dq", "dk", "dv")


def both(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, attn_mask: Tensor | None = None, **options
) -> tuple[list[Tensor], Tensor]:
    """[out, dq, dk, dv] and logsumexp of the ops that users of the kernels call."""
    with torch.no_grad():
        out, logsumexp = torch.ops.cubin.attention_forward(q, k, v, attn_mask, **options)
        grads = torch.ops.cubin.attention_backward(
            grad, q, k, v, out, logsumexp, attn_mask, **options
        )
    return [out, *grads], logsumexp


def check(
    name: str, label: str, ours: list[Tensor], want: Reference, logsumexp: Tensor | None = None
) -> None:
    """Results, and the logsumexp (with dropout that of the weights before it) if it is given."""
    if logsumexp is not None:
        _check_logsumexp(name, label, logsumexp, want.logsumexp)
    sizes = want.sizes()
    for result, mine in zip(NAMES, ours, strict=False):
        expected = getattr(want, result)
        assert mine.shape == expected.shape, f"{label}: {result} {tuple(mine.shape)}"
        if mine.numel() == 0:
            continue
        # ALiBi and sinks can make all weights so small that float16 has few steps left: gradients
        # are sums of such weights.
        step = torch.finfo(mine.dtype).smallest_normal * torch.finfo(mine.dtype).eps
        if result != "out":
            step *= 4 * max(mine.shape)
        error = (float((mine.double() - expected).abs().max()) - step) / sizes[result]
        # Sizes vary: of keys that one row alone sees, a few have all the terms.
        peak = float(torch.maximum(expected.abs(), want.squares[result].sqrt()).max())
        peak /= sizes[result]
        limit = LIMITS[name] * max(1.0, peak / 4)
        assert not numerics.exceeds(error, limit), f"{label}: {result} is off by {error:.3e}"


def check_sinks(name: str, sinks: Tensor, mine: Tensor, want: Reference, grad: Tensor) -> None:
    """The gradient of sinks, (heads,): each row contributes -weight * sum(grad * out)."""
    grad, out = grad.double(), want.out
    if out.dim() == 3:  # packed: (rows, heads, head_dim)
        grad, out = grad.transpose(0, 1), out.transpose(0, 1)
    weights = torch.exp(sinks.double()[:, None] - want.logsumexp)
    weights = torch.where(want.logsumexp == -math.inf, 0.0, weights)
    rows = [d for d in range(weights.dim()) if d != weights.dim() - 2]
    expected = -(weights * (grad * out).sum(-1)).sum(rows)
    # Of a sum of terms with random signs, each as far off as a rounded output makes it.
    of_dtype = torch.finfo(attention_cases.DTYPES[name])
    step = of_dtype.smallest_normal * of_dtype.eps  # of the outputs
    squares = (LIMITS[name] / 4 * out).square() + step**2
    limit = (weights.square() * (grad.square() * squares).sum(-1)).sum(rows).sqrt() + 1e-30
    assert mine.shape == sinks.shape
    worst = float(((mine.double() - expected).abs() / limit).max())
    assert worst < 1, f"the sinks' gradient is off by {worst:.2e} of what it may be"


def _check_logsumexp(name: str, label: str, ours: Tensor, want: Tensor) -> None:
    assert ours.shape == want.shape, f"{label}: logsumexp {tuple(ours.shape)}"
    assert torch.equal(ours == -math.inf, want == -math.inf), f"{label}: fully masked rows"
    finite = want.isfinite()
    if not bool(finite.any()):
        return
    error = float((ours.double() - want)[finite].abs().max())
    limit = 1e-12 if name == "float64" else 1e-5
    limit *= max(1.0, float(want[finite].abs().max()))
    assert not numerics.exceeds(error, limit), f"{label}: logsumexp is off by {error:.3e}"


def check_call(
    name: str, label: str, q: Tensor, k: Tensor, v: Tensor, grad: Tensor,
    attn_mask: Tensor | None = None, **options,
) -> list[Tensor]:  # fmt: skip
    """Compares both() with reference(), and returns its [out, dq, dk, dv]."""
    ours, logsumexp = both(q, k, v, grad, attn_mask, **options)
    want = reference(q, k, v, grad, attn_mask, **options)
    check(name, label, ours, want, logsumexp)
    return ours
