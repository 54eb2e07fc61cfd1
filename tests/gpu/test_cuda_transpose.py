"""TF32 products of operands that are not contiguous along K: through registers where their rows are
aligned (csrc/kernels/matmul/sm90_registers.cuh), else copied (csrc/kernels/matmul/transpose.cu).
And large float32 products of operands that are, which are copied so that they are not."""

from __future__ import annotations

import itertools

import numerics
import pytest
import torch
from gpu import cases

from torch_cubin._native import library
from torch_cubin._tuning import measure

pytestmark = pytest.mark.usefixtures("nan_memory")

# Whole tiles of the copy, tails in every dim, rows that are not whole vectors.
SHAPES = ((1024, 1024, 1024), (520, 776, 1000), (1031, 1033, 2049), (300, 2051, 517))
LARGE = ((2048, 1024, 2048), (2051, 1033, 2053))  # float32 copies for these alone
LAYOUTS = {
    "n": cases.Layout(),
    "t": cases.Layout(order=(1, 0)),
    "padded": cases.Layout(order=(1, 0), pad=4),
    "ragged": cases.Layout(order=(1, 0), pad=1, offset=3),
}


def names_of(profile: torch.profiler.profile) -> set[str]:
    return {event.name for event in profile.events() if event.device_type.name == "CUDA"}


def test_products_are_exact_on_small_integers(generator: torch.Generator) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("kernels for compute capability 9.0")
    wrong = []
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with cases.math_mode("tf32"), torch.profiler.profile(activities=activities) as profile:
        for m, n, k in SHAPES:
            for a_name, a_layout in LAYOUTS.items():
                for b_name, b_layout in LAYOUTS.items():
                    a = cases.place(cases.draw((m, k), torch.float32, True, generator), a_layout)
                    b = cases.place(cases.draw((k, n), torch.float32, True, generator), b_layout)
                    bias = cases.draw((n,), torch.float32, True, generator)
                    expected = a.double() @ b.double()
                    cases.poison(m * n, torch.float32)
                    if not torch.equal(torch.ops.cubin.matmul(a, b), expected.float()):
                        wrong.append(f"{(m, n, k)} {a_name} {b_name}")
                    out = torch.ops.cubin.linear(a, b.t(), bias)
                    if not torch.equal(out, (expected + bias.double()).float()):
                        wrong.append(f"{(m, n, k)} {a_name} {b_name} + bias")
        torch.cuda.synchronize()
    assert wrong == []
    names = names_of(profile)
    assert "transpose_matmul_4_bytes" in names
    assert any(name.startswith("sm90_matmul_tf32_tt_") for name in names)


def test_float32_products_of_copies_have_the_bits_of_those_without(
    generator: torch.Generator,
) -> None:
    """Normal numbers, which a copy that rounds to TF32 would change."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("kernels for compute capability 9.0")
    wrong, taken = [], set()
    tile = "simt 128x128x8"  # adds up K in one chain
    with cases.math_mode("float32"), measure.watching():
        for (m, n, k), a_name, b_name in itertools.product(LARGE, LAYOUTS, LAYOUTS):
            a = cases.place(cases.draw((m, k), torch.float32, False, generator), LAYOUTS[a_name])
            b = cases.place(cases.draw((k, n), torch.float32, False, generator), LAYOUTS[b_name])
            library.force_config(tile)
            own = torch.ops.cubin.matmul(a, b)
            along_k = [name for name, is_along in (("a", a_name == "n"), ("b", b_name != "n"))
                       if is_along]  # fmt: skip
            for copied in {*along_k, "".join(along_k)} - {""}:
                library.force_config(f"transpose {copied}/{tile}")
                cases.poison(m * n, torch.float32)
                if not torch.equal(torch.ops.cubin.matmul(a, b), own):
                    wrong.append(f"{(m, n, k)} {a_name} {b_name} {copied}")
                # A product's last plan alone is recorded.
                taken |= {plan["chosen"] for plan in library.watched_plans()}
        library.force_config("")
    assert wrong == []
    assert taken >= {"transpose a", "transpose b", "transpose ab"}


def test_batches_and_broadcasts(generator: torch.Generator) -> None:
    with cases.math_mode("tf32"):
        a = cases.draw((3, 520, 1024), torch.float32, True, generator)
        b = cases.draw((1024, 776), torch.float32, True, generator)
        for right in (b, b.expand(3, -1, -1), b.expand(3, -1, -1).contiguous()):
            out = torch.ops.cubin.matmul(a.mT.contiguous().mT, right)
            assert torch.equal(out, (a.double() @ right.double()).float())


def test_batches_and_broadcasts_of_float32(generator: torch.Generator) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("kernels for compute capability 9.0")
    with cases.math_mode("float32"), measure.watching():
        a = cases.draw((3, 1040, 1024), torch.float32, True, generator)
        b = cases.draw((1552, 1024), torch.float32, True, generator)
        library.force_config("transpose ab")
        for weight in (b, b.expand(3, -1, -1), b.expand(3, -1, -1).contiguous()):
            out = torch.ops.cubin.matmul(a, weight.mT)
            assert torch.equal(out, (a.double() @ weight.mT.double()).float())
        assert "transpose ab" in {plan["chosen"] for plan in library.watched_plans()}
        library.force_config("")


def test_errors_are_those_of_rounded_operands(generator: torch.Generator) -> None:
    """As cuBLAS rounds operands to TF32."""
    with cases.math_mode("tf32"):
        a, b = (torch.randn(2048, 2048, device="cuda", generator=generator) for _ in range(2))
        exact = a.double() @ b.double()
        out, own = torch.ops.cubin.matmul(a, b), torch.matmul(a, b)
        error, theirs = ((x.double() - exact).norm() / exact.norm() for x in (out, own))
        assert not numerics.exceeds(error.item(), 3 * theirs.item())


def test_infinities_and_nan(generator: torch.Generator) -> None:
    with cases.math_mode("tf32"):
        a = cases.draw((512, 512), torch.float32, True, generator)
        b = cases.draw((512, 512), torch.float32, True, generator)
        b[3, 5], b[7, 9] = torch.inf, torch.nan
        torch.testing.assert_close(
            torch.ops.cubin.matmul(a, b), (a.double() @ b.double()).float(), equal_nan=True
        )
