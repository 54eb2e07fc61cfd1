"""The comparators themselves: what they must refuse, NaN first of all."""

from __future__ import annotations

import math
from fractions import Fraction

import numerics
import pytest
import torch

NAN, INF = math.nan, math.inf


@pytest.mark.fault_case(43)
@pytest.mark.parametrize(
    ("error", "limit", "broken"),
    [(0, 0, False), (1, 1, False), (1.1, 1, True), (NAN, 1, True), (0, NAN, True), (INF, 1, True)],
)
def test_exceeds_fails_on_nan(error: float, limit: float, broken: bool) -> None:
    assert numerics.exceeds(error, limit) is broken


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("magnitude", [1.0, 1.5, 2.0, 1000.0, 0.01])
def test_ulp_is_the_distance_to_the_next_number(dtype: torch.dtype, magnitude: float) -> None:
    here = torch.tensor(magnitude, dtype=dtype)
    after = torch.nextafter(here, torch.tensor(INF, dtype=dtype))
    assert numerics.ulp(dtype, float(here)) == float(after.double() - here.double())


def test_ulp_of_nan_is_nan() -> None:
    assert math.isnan(numerics.ulp(torch.float32, NAN))
    assert math.isnan(numerics.ulp(torch.float32, INF))


def _case() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(40, 30, generator=generator)
    b = torch.randn(30, 50, generator=generator)
    own = a @ b
    return own.clone(), own, numerics.reference_matmul(a, b)


def test_check_close_accepts_pytorchs_own_result() -> None:
    numerics.check_close(*_case())


@pytest.mark.parametrize("bad", [NAN, INF, -INF, 1e30])
@pytest.mark.parametrize("where", [(0, 0), (39, 49), (20, 7)])
def test_check_close_fails_on_one_bad_element(bad: float, where: tuple[int, int]) -> None:
    out, own, reference = _case()
    out[where] = bad
    with pytest.raises(AssertionError):
        numerics.check_close(out, own, reference)


def test_check_close_fails_when_pytorch_or_the_reference_is_nan() -> None:
    out, own, reference = _case()
    broken = own.clone()
    broken[3, 3] = NAN
    with pytest.raises(AssertionError):
        numerics.check_close(out, broken, reference)
    reference[3, 3] = NAN
    with pytest.raises(AssertionError):
        numerics.check_close(out, own, reference)


def test_check_close_fails_on_a_uniformly_larger_error() -> None:
    out, own, reference = _case()
    error = own.double() - reference
    peak = float(error.abs().max())
    # Inside the maximum's limit everywhere, far outside the RMS limit.
    out = (reference + 1.9 * peak).float()
    with pytest.raises(AssertionError, match="RMS"):
        numerics.check_close(out, own, reference)


def test_check_close_fails_on_shape_and_dtype() -> None:
    out, own, reference = _case()
    with pytest.raises(AssertionError, match="shape"):
        numerics.check_close(out[:, :-1], own, reference)
    judge = numerics.Judge(torch.float16)
    with pytest.raises(AssertionError, match="dtype"):
        judge.add("case", out, own, reference)


def test_judge_keeps_a_nan_of_any_case() -> None:
    for position in range(3):
        judge = numerics.Judge(torch.float32)
        for index in range(3):
            out, own, reference = _case()
            if index == position:
                out[1, 1] = NAN
            judge.add(f"case {index}", out, own, reference)
        with pytest.raises(AssertionError, match=f"case {position}"):
            judge.finish()


def test_judge_ignores_empty_results_and_scales() -> None:
    judge = numerics.Judge(torch.float32)
    empty = torch.empty(0, 4)
    judge.add("empty", empty, empty, empty.double())
    judge.finish()
    for scale in (1.0, 1e6):
        out, own, reference = _case()
        judge.add(f"scale {scale}", out * scale, own * scale, reference * scale, scale)
    judge.finish()


def test_judge_by_spread_takes_units_of_the_case() -> None:
    """The second case's largest error may be 4.5 of its RMS errors, as the first's is."""
    reference = torch.zeros(100)
    own = torch.full((100,), 0.1)
    own[0] = 0.5
    typical = torch.full((100,), 10.0)
    for factor, allowed in ((7.0, True), (11.0, False)):
        out = typical.clone()
        out[3] *= factor
        judges = [numerics.Judge(torch.float32, by_spread=spread) for spread in (False, True)]
        for judge, passes in zip(judges, (False, allowed), strict=True):
            judge.add("first", own, own, reference)
            judge.add("second", out, typical, reference)
            if passes:
                judge.finish()
                continue
            with pytest.raises(AssertionError, match="second: max error"):
                judge.finish()


def test_judge_allows_what_an_algorithm_loses_and_no_more() -> None:
    for error, relative, passes in ((1e-4, 2e-4, True), (1e-4, 5e-5, False), (1e-4, 0.0, False)):
        judge = numerics.Judge(torch.float32)
        _, own, reference = _case()
        out = own.clone()
        out[0, 0] += error * float(reference.abs().max())
        judge.add("case", out, own, reference, relative=relative)
        judge.rows[0][1] = 0  # the RMS of one element is another matter
        if passes:
            judge.finish()
        else:
            with pytest.raises(AssertionError, match="max error"):
                judge.finish()


def test_check_exact_names_the_first_difference() -> None:
    expected = torch.arange(6.0).reshape(2, 3)
    numerics.check_exact(expected.half(), expected)
    wrong = expected.half()
    wrong[1, 0] = NAN
    with pytest.raises(AssertionError, match=r"1 of 6 .*\(1, 0\)"):
        numerics.check_exact(wrong, expected)
    with pytest.raises(AssertionError, match="shape"):
        numerics.check_exact(expected[:1], expected)
    # NaN equals nothing here, itself included: an exact result has none.
    with pytest.raises(AssertionError):
        numerics.check_exact(torch.tensor([NAN]), torch.tensor([NAN]))


@pytest.mark.fault_case(43)
def test_check_bits_sees_signs_of_zero_and_nan() -> None:
    numerics.check_bits(torch.tensor([NAN, 0.0]), torch.tensor([NAN, 0.0]))
    with pytest.raises(AssertionError, match="bits"):
        numerics.check_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    with pytest.raises(AssertionError):
        numerics.check_bits(torch.zeros(2), torch.zeros(2, dtype=torch.float64))


def test_check_same_class() -> None:
    own = torch.tensor([NAN, INF, -INF, 1.0])
    numerics.check_same_class(own.clone(), own)
    for index in range(4):
        out = own.clone()
        out[index] = 2.0 if index < 3 else NAN
        with pytest.raises(AssertionError):
            numerics.check_same_class(out, own)


@pytest.mark.parametrize(("m", "n", "k"), [(3, 4, 1), (4, 3, 7), (2, 2, 1000)])
def test_reference_matmul_float64_is_right_to_the_last_bit_or_two(m: int, n: int, k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    a = torch.randn(m, k, generator=generator, dtype=torch.float64)
    b = torch.randn(k, n, generator=generator, dtype=torch.float64)
    if k > 1:
        a[0] *= torch.logspace(-8, 8, k, dtype=torch.float64)  # a row of very mixed magnitudes
    ours = numerics.reference_matmul(a, b)
    for i in range(m):
        for j in range(n):
            exact = sum(
                Fraction(x) * Fraction(y)
                for x, y in zip(a[i].tolist(), b[:, j].tolist(), strict=True)
            )
            scale = max(abs(float(exact)), float(a[i].abs().max() * b[:, j].abs().max()) * 1e-2)
            error = abs(Fraction(ours[i, j].item()) - exact)
            assert float(error) <= 4 * numerics.ulp(torch.float64, scale)


def test_reference_matmul_shapes() -> None:
    for dtype in (torch.float32, torch.float64):
        for left, right in [
            ((5,), (5,)),
            ((2, 5), (5,)),
            ((5,), (3, 5, 2)),
            ((4, 1, 2, 5), (3, 5, 6)),
        ]:
            a, b = torch.randn(left, dtype=dtype), torch.randn(right, dtype=dtype)
            torch.testing.assert_close(
                numerics.reference_matmul(a, b), torch.matmul(a.double(), b.double())
            )
    empty = numerics.reference_matmul(torch.zeros(2, 0).double(), torch.zeros(0, 3).double())
    assert empty.shape == (2, 3)
    assert not empty.any()


def test_reference_linear_adds_the_bias() -> None:
    x, weight, bias = torch.randn(4, 5), torch.randn(3, 5), torch.randn(3)
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(numerics.reference_linear(x, weight, bias), expected)
