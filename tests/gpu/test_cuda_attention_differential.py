"""A randomised differential test against F.scaled_dot_product_attention: 2,400 calls, 600 backward.

Ranks, shapes, strides, offsets, expanded and negated inputs, masks, head ratios, causal and scale
are all drawn. Errors are pooled and held against PyTorch's (numerics.Judge). A failure prints the
seed and the case:

    TORCH_CUBIN_TEST_SEED=SEED pytest tests/gpu/test_cuda_attention_differential.py -k DTYPE
"""

from __future__ import annotations

import random

import pytest
import torch
from gpu import attention_cases as ac
from gpu import attention_reference as ar
from gpu.seeds import seeds

CASES = 300  # a seed and dtype; every fourth goes backward, too
SEEDS = seeds(2)


def _same_strides(tensor: torch.Tensor, like: torch.Tensor) -> bool:
    """Whether the tensor's dims lie in memory as the layout rule says (sizes of 1 do not count)."""
    from torch_cubin._ops.attention_checks import output_strides

    # The dispatcher resolves a negated input before the op sees it.
    wanted = output_strides(like.resolve_neg(), tensor.shape)
    return tensor.numel() == 0 or all(
        size == 1 or stride == want
        for size, stride, want in zip(tensor.shape, tensor.stride(), wanted, strict=True)
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ac.DTYPES)
def test_random_calls_match_pytorch(name: str, seed: int, nan_memory) -> None:
    dtype = ac.DTYPES[name]
    rng = random.Random(f"{name} {seed}")
    generator = ac.generator(seed)
    judges = ar.Judges(dtype)
    for index in range(CASES):
        case = ac.random_case(rng, backward=index % 4 == 0)
        label = f"seed {seed}, {name}, case {index}: {case}"
        try:
            args = ac.inputs(case, dtype, generator)
            mask = ac.random_mask(case, dtype, generator)
            options = case.options()
            out = ar.cubin(*args, None, mask, **options)[0]
            torch.cuda.synchronize()  # a fault of ours must not look like one of PyTorch's
            grad = ac.gradient(out, generator) if case.backward else None
            own = ar.pytorch(*args, grad, mask, **options)
            want = ar.reference(*args, grad, mask, **options)
            # Every other backward runs without torch's deterministic switch, so unfilled memory.
            if case.backward and index % 8 == 0:
                torch.use_deterministic_algorithms(False)
                ac.poison_pools(1)
            ours = ar.cubin(*args, grad, mask, **options) if case.backward else [out]
            torch.use_deterministic_algorithms(True, warn_only=True)
            assert (out.dtype, out.device) == (dtype, own[0].device)
            for result, like in zip(ours, (args[0], *args), strict=False):
                assert _same_strides(result, like), f"strides {result.stride()}"
            judges.add(label, ours, own, want)
        except Exception as error:
            raise AssertionError(f"{label} raised {error!r}") from error
    judges.finish()


def test_random_cases_cover_ranks_sizes_and_layouts() -> None:
    """The generator draws what it claims to."""
    total = CASES * len(ac.DTYPES) * 2
    rng = random.Random(0)
    drawn = [ac.random_case(rng, backward=index % 4 == 0) for index in range(total)]
    assert len(drawn) >= 2000
    assert sum(case.backward for case in drawn) >= 500
    assert {len(case.q_shape) for case in drawn} == {1 + n for n in range(1, 5)}
    assert sum(0 in case.q_shape + case.k_shape for case in drawn) > 50
    for kind in ac.MASKS:
        assert sum(case.mask == kind for case in drawn) > 200, kind
    assert sum(case.is_causal for case in drawn) > 200
    assert sum(case.enable_gqa and case.q_shape[-3] != case.k_shape[-3] for case in drawn) > 200
    assert sum(case.q_shape[-1] % 8 != 0 for case in drawn) > 200
    assert sum(case.q_shape[-1] != case.v_shape[-1] for case in drawn) > 200
    assert sum((case.scale or 1.0) < 0 for case in drawn) > 50
    assert sum(case.scale == 0 for case in drawn) > 50
    layouts = [layout for case in drawn for layout in (*case.layouts, case.mask_layout)]
    for wanted in ("pad", "offset", "expand", "negate"):
        assert sum(bool(getattr(layout, wanted)) for layout in layouts) > 50, wanted
    assert sum(layout.step > 1 for layout in layouts) > 200
