"""The numerical rule of the whole suite, in one place.

A result passes when its error against a higher-precision reference, maximum and RMS, is at most
twice that of PyTorch's own kernel in the same dtype plus one ulp of the output. Every comparison
is written `not (error <= limit)`, so that a NaN on either side fails; small-integer inputs are
compared bit for bit. Used by tests/ and benchmarks/; knows nothing of torch_cubin.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def exceeds(error: float, limit: float) -> bool:
    """Whether `error` breaks `limit`. NaN on either side does."""
    return not (error <= limit)


def ulp(dtype: torch.dtype, magnitude: float) -> float:
    """The distance between neighbouring numbers of `dtype` at `magnitude` (NaN stays NaN)."""
    info = torch.finfo(dtype)
    magnitude = abs(magnitude)
    if math.isnan(magnitude) or math.isinf(magnitude):
        return math.nan
    exponent = math.floor(math.log2(max(magnitude, info.smallest_normal)))
    return info.eps * 2.0**exponent


def reference_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """torch.matmul(a, b) as float64, with an error far below that of any kernel in a's dtype.

    For float16, bfloat16 and float32 the float64 product is enough (the products are exact in
    float64). float64 itself needs more: both operands are cut into slices so short that every
    product of two slices sums without rounding in float64 (Ozaki, Ogita, Oishi, Rump: "Error-free
    transformations of matrix multiplication", 2012), and the exact parts are added, small first.
    """
    k = a.shape[-1]
    if a.dtype != torch.float64 or k == 0 or a.numel() == 0 or b.numel() == 0:
        return torch.matmul(a.double(), b.double())
    bits = (52 - math.ceil(math.log2(k))) // 2
    count = math.ceil(58 / (bits - 1))
    a_slices = _slices(a, -1, bits, count)
    b_slices = _slices(b, -2 if b.dim() > 1 else -1, bits, count)
    pairs = sorted(((i, j) for i in range(count) for j in range(count)), key=sum, reverse=True)
    total = None
    for i, j in pairs:
        product = torch.matmul(a_slices[i], b_slices[j])
        total = product if total is None else total + product
    return total


def _slices(x: torch.Tensor, dim: int, bits: int, count: int) -> list[torch.Tensor]:
    """Splits x = sum of `count` tensors with at most `bits` significant bits along `dim`."""
    parts = []
    for _ in range(count):
        peak = x.abs().amax(dim, keepdim=True)
        # Adding and subtracting 2^(e + 53 - bits) rounds to multiples of 2^(e + 1 - bits).
        shift = torch.exp2(torch.ceil(torch.log2(peak)) + (53 - bits))
        part = torch.where(peak > 0, (x + shift) - shift, torch.zeros_like(x))
        parts.append(part)
        x = x - part
    return parts


def reference_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """F.linear(x, weight, bias) as float64 (see reference_matmul)."""
    out = reference_matmul(x, weight.t() if weight.dim() == 2 else weight)
    return out if bias is None else out + bias.double()


def _summary(out: torch.Tensor, own: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Seven numbers that judge a case; stays on the device, so that many cases need one sync."""
    values = []
    for difference in (out.double() - reference, own.double() - reference, reference):
        values += [difference.abs().amax(), difference.square().sum()]
    values.append(torch.full_like(values[0], out.numel()))
    return torch.stack(values)


@dataclass
class Judge:
    """Pools the errors of cases of one dtype and applies the rule to the pool.

    A case with few outputs may meet an accidentally exact result of PyTorch; in a pool the limit
    is PyTorch's typical worst error. `scale` divides a case's numbers, so that cases of different
    magnitude can share a pool (sqrt(K) for normal inputs).

    With `by_spread` the limit of a case is at least the same in units of PyTorch's RMS error: of
    sums of few addends, the largest error is many times the RMS one, in a case of large numbers no
    less than in others.
    """

    dtype: torch.dtype
    by_spread: bool = False
    labels: list[str] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    rows: list[torch.Tensor] = field(default_factory=list)
    relatives: list[float] = field(default_factory=list)

    def add(
        self,
        label: str,
        out: torch.Tensor,
        own: torch.Tensor,
        reference: torch.Tensor,
        scale: float = 1.0,
        relative: float = 0.0,
    ) -> None:
        """Adds a case: our result, PyTorch's result in the same dtype, the float64 reference.

        `relative` allows that part of the case's largest element besides: what our algorithm loses
        where PyTorch takes another one.
        """
        for name, tensor in (("PyTorch", own), ("reference", reference)):
            if tuple(out.shape) != tuple(tensor.shape):
                raise AssertionError(
                    f"{label}: shape {tuple(out.shape)}, {name} has {tuple(tensor.shape)}"
                )
        if out.dtype != self.dtype:
            raise AssertionError(f"{label}: dtype {out.dtype}, expected {self.dtype}")
        if out.numel() == 0:
            return
        self.labels.append(label)
        self.scales.append(scale)
        self.relatives.append(relative)
        self.rows.append(_summary(out, own, reference))

    def finish(self) -> None:
        """Raises AssertionError if the rule is broken, and says where."""
        if not self.rows:
            return
        table = torch.stack(self.rows).cpu().tolist()
        ours, own, size, allowed, spreads = [], [], [], [], []
        our_squares = own_squares = size_squares = count = 0.0
        for row, scale, relative in zip(table, self.scales, self.relatives, strict=True):
            ours.append(row[0] / scale)
            own.append(row[2] / scale)
            size.append(row[4] / scale)
            allowed.append(relative * row[4] / scale)
            spreads.append(row[2] / _rms(row[3], row[6]) if row[3] > 0 else 0.0)
            our_squares += row[1] / scale**2
            own_squares += row[3] / scale**2
            size_squares += row[5] / scale**2
            count += row[6]
        limits = [2 * _worst(own) + ulp(self.dtype, _worst(size))] * len(table)
        if self.by_spread:
            worst = _worst(spreads)
            own_limits = [
                2 * worst * _rms(row[3], row[6]) / scale + ulp(self.dtype, row[4] / scale)
                for row, scale in zip(table, self.scales, strict=True)
            ]
            limits = [_worst([*both]) for both in zip(limits, own_limits, strict=True)]
        broken = [
            f"{label}: max error {error:.3e}, limit {limit + more:.3e}"
            for label, error, limit, more in zip(self.labels, ours, limits, allowed, strict=True)
            if exceeds(error, limit + more)
        ]
        rms = _rms(our_squares, count)
        rms_limit = 2 * _rms(own_squares, count) + ulp(self.dtype, _rms(size_squares, count))
        if exceeds(rms, rms_limit):
            broken.append(f"RMS error {rms:.3e}, limit {rms_limit:.3e} ({self.labels[0]}, ...)")
        if broken:
            more = f"\n... and {len(broken) - 20} more" if len(broken) > 20 else ""
            raise AssertionError("\n".join(broken[:20]) + more)


def _rms(squares: float, count: float) -> float:
    return math.sqrt(squares / count)


def _worst(values: list[float]) -> float:
    """max() that keeps a NaN wherever it stands (Python's depends on the order)."""
    return math.nan if any(math.isnan(v) for v in values) else max(values)


def check_close(
    out: torch.Tensor, own: torch.Tensor, reference: torch.Tensor, label: str = "result"
) -> None:
    """Applies the rule to one case."""
    judge = Judge(out.dtype)
    judge.add(label, out, own, reference)
    judge.finish()


def bits(x: torch.Tensor) -> torch.Tensor:
    """x's elements as integers: NaN equals NaN, and -0 differs from 0."""
    return x.contiguous().view(_BITS[x.element_size()])


def check_exact(out: torch.Tensor, expected: torch.Tensor, label: str = "result") -> None:
    """Every element equals `expected` rounded once to out's dtype (NaN equals nothing)."""
    if tuple(out.shape) != tuple(expected.shape):
        raise AssertionError(f"{label}: shape {tuple(out.shape)}, not {tuple(expected.shape)}")
    wanted = expected.to(out.dtype)
    if torch.equal(out, wanted):
        return
    wrong = ~(out == wanted)
    first = tuple(wrong.nonzero()[0].tolist())
    raise AssertionError(
        f"{label}: {int(wrong.sum())} of {out.numel()} elements differ, the first at {first}: "
        f"{out[first].item()} instead of {wanted[first].item()}"
    )


def check_bits(out: torch.Tensor, expected: torch.Tensor, label: str = "result") -> None:
    """Both have the same dtype, shape and bits."""
    if out.dtype != expected.dtype or tuple(out.shape) != tuple(expected.shape):
        raise AssertionError(
            f"{label}: {out.dtype} {tuple(out.shape)}, not {expected.dtype} {tuple(expected.shape)}"
        )
    wrong = int((bits(out) != bits(expected)).sum())
    if wrong:
        raise AssertionError(f"{label}: {wrong} of {out.numel()} elements have other bits")


def check_same_class(out: torch.Tensor, own: torch.Tensor, label: str = "result") -> None:
    """NaN, +inf and -inf are in the same positions in both."""
    for name, test in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        mine, theirs = test(out), test(own)
        if not torch.equal(mine, theirs):
            raise AssertionError(
                f"{label}: {name} at {int(mine.sum())} places, PyTorch has {int(theirs.sum())}, "
                f"{int((mine != theirs).sum())} of them different"
            )
