"""A randomised differential test against torch.matmul and F.linear: 2,500 calls.

Shapes, ranks, broadcast batches, zero sizes, strides, offsets, expanded and negated inputs are all
drawn. Half of the cases hold small integers and must come out bit-exact; the errors of the others
are pooled and held against PyTorch's (numerics.Judge). A failure prints the seed and the case:

    TORCH_CUBIN_TEST_SEED=SEED pytest tests/gpu/test_cuda_differential.py -k MODE
"""

from __future__ import annotations

import math
import random
from functools import partial

import numerics
import pytest
import torch
import torch.nn.functional as F
from gpu import cases
from gpu.seeds import seeds

CASES = 100  # a seed and mode
SEEDS = seeds(5)


def _inputs(case: cases.Case, dtype: torch.dtype, g: torch.Generator) -> list[torch.Tensor]:
    inputs = [
        cases.place(cases.draw(case.a_shape, dtype, case.integers, g), case.a_layout),
        cases.place(cases.draw(case.b_shape, dtype, case.integers, g), case.b_layout),
    ]
    if case.bias:
        bias = cases.draw(case.b_shape[:1], dtype, case.integers, g)
        inputs.append(cases.place(bias, case.bias_layout))
    return inputs


def _largest(x: torch.Tensor) -> torch.Tensor:
    return x.abs().amax()


@pytest.mark.fault_case(39)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", cases.MODES)
def test_random_calls_match_pytorch(mode: str, seed: int) -> None:
    rng = random.Random(f"{mode} {seed}")
    generator = torch.Generator("cuda").manual_seed(seed)
    differences: list[tuple[str, torch.Tensor]] = []
    repeated: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    with cases.math_mode(mode) as dtype, torch.no_grad():
        judge = numerics.Judge(dtype)
        for index in range(CASES):
            case = cases.random_case(rng)
            label = f"seed {seed}, {mode}, case {index}: {case}"
            inputs = _inputs(case, dtype, generator)
            linear = case.op == "linear"
            try:
                own = F.linear(*inputs) if linear else torch.matmul(*inputs)
                cases.poison(own.numel(), dtype)
                ours = torch.ops.cubin.linear if linear else torch.ops.cubin.matmul
                out = ours(*inputs)
            except Exception as error:
                raise AssertionError(f"{label} raised {error!r}") from error
            assert out.shape == own.shape, label
            assert (out.dtype, out.device) == (dtype, own.device), label
            assert out.is_contiguous(), label
            if case.integers:
                doubles = [tensor.double() for tensor in inputs]
                exact = F.linear(*doubles) if linear else torch.matmul(*doubles)
                differences.append((label, (out != exact.to(dtype)).sum()))
                continue
            product = numerics.reference_matmul
            if linear:
                bias = inputs[2] if case.bias else None
                product = partial(numerics.reference_linear, bias=bias)
            reference = product(*inputs[:2])
            own = cases.peer(mode, own, reference, product, *inputs[:2])
            k = case.a_shape[-1]
            if case.has_equal_terms() and reference.numel():
                # Roundings of equal terms do not average out, as those in the pool do.
                sums = torch.float64 if dtype == torch.float64 else torch.float32
                relative = k * torch.finfo(sums).eps / 4 + torch.finfo(dtype).eps
                limit = 2 * _largest(own - reference) + relative * _largest(reference)
                repeated.append((label, _largest(out - reference), limit))
                continue
            judge.add(label, out, own, reference, scale=math.sqrt(max(k, 1)))
        wrong = torch.stack([count for _, count in differences]).tolist()
        failures = [label for (label, _), count in zip(differences, wrong, strict=True) if count]
        assert not failures, "not exact:\n" + "\n".join(failures[:10])
        broken = [
            f"{label}: max error {error.item():.3e}, limit {limit.item():.3e}"
            for label, error, limit in repeated
            if not (error <= limit)
        ]
        assert not broken, "\n".join(broken)
        judge.finish()


def test_random_cases_cover_ranks_sizes_and_layouts() -> None:
    """The generator draws what it claims to: ranks, zero sizes and every kind of layout."""
    rng = random.Random(0)
    drawn = [cases.random_case(rng) for _ in range(CASES * len(cases.MODES) * 5)]
    assert len(drawn) >= 2000
    assert {len(case.a_shape) for case in drawn} >= {1, 2, 3, 4, 5, 6, 7}
    assert {len(case.b_shape) for case in drawn} >= {1, 2, 3, 4, 5, 6, 7}
    assert sum(0 in case.a_shape + case.b_shape for case in drawn) > 50
    assert sum(case.a_shape[-1] == 0 for case in drawn) > 20
    layouts = [layout for case in drawn for layout in (case.a_layout, case.b_layout)]
    for wanted in ("pad", "offset", "expand", "negate"):
        assert sum(bool(getattr(layout, wanted)) for layout in layouts) > 50, wanted
    assert sum(layout.step > 1 for layout in layouts) > 200
    assert sum(layout.order == (0, 2, 3, 1) for layout in layouts) > 20
    assert sum(case.bias for case in drawn) > 200
