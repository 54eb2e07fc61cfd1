"""csrc/kernels/matmul/sm90_parts.cu, and what has its bits: K in parts, under batch_invariant()."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import numerics
import pytest
import torch
from gpu import cases
from gpu.profiled import kernels_that_run

import torch_cubin
from torch_cubin._native import library
from torch_cubin._tuning import measure

pytestmark = [
    pytest.mark.usefixtures("nan_memory"),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
        reason="wgmma is of compute capability 9.0 alone",
    ),
]

ops = torch.ops.cubin
ROWS = (1, 7, 8, 31, 64, 65, 130, 257, 700, 2100)
# (N, K), in two and four parts, with tails of N.
WEIGHTS = ((2048, 2048), (2048, 8192), (520, 2304), (1000, 5120), (72, 4096), (200, 1024))


def configs_of(a: torch.Tensor, b: torch.Tensor) -> list[str]:
    """Those with the bits that batch_invariant() promises."""
    with measure.watching():
        ops.matmul(a, b)
        names = {config["name"] for plan in library.watched_plans() for config in plan["configs"]}
    splits = {name for name in names if name == "split" or name.startswith("sm90_skinny ")}
    return sorted(splits | {name for name in names if name.endswith((" parts", "_k"))})


def forced(config: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with measure.watching():
        library.force_config(config)
        cases.poison(a.shape[0] * b.shape[1], a.dtype)
        return ops.matmul(a, b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_kernel_is_exact_on_small_integers(dtype, generator: torch.Generator) -> None:
    wrong, r = [], random.Random(0)
    short = {torch.float16: "f16", torch.bfloat16: "bf16"}[dtype]
    with torch.no_grad(), torch_cubin.batch_invariant(), kernels_that_run() as ran:
        for m, (n, k) in itertools.product(ROWS, WEIGHTS):
            a = cases.draw((m, k), dtype, True, generator)
            b = cases.draw((n, k), dtype, True, generator).t()
            expected = (a.double() @ b.double()).to(dtype)
            configs = configs_of(a, b)
            for config in ("", *r.sample(configs, min(6, len(configs)))):
                if not torch.equal(forced(config, a, b), expected):
                    wrong.append(f"{m} of {n}x{k} {config}")
    assert wrong == []
    manifest = Path(torch_cubin.__file__).parent / "cubins" / "manifest.json"
    names = {kernel["name"] for kernel in json.loads(manifest.read_text())["kernels"]}
    assert {name for name in names if name.startswith(f"sm90_matmul_parts_{short}_")} - ran == set()


def test_all_configs_have_the_same_bits(generator: torch.Generator) -> None:
    wrong = []
    with torch.no_grad(), torch_cubin.batch_invariant():
        for n, k in WEIGHTS:
            x = cases.draw((max(ROWS), k), torch.bfloat16, False, generator)
            b = cases.draw((n, k), torch.bfloat16, False, generator).t()
            x[0] = -0.0  # negative zeros alone, in one part of K or in all
            x[1, : k // 2] = -0.0
            b[:, :8].abs_()
            whole = ops.matmul(x, b)
            for rows in ROWS:
                for config in configs_of(x[:rows], b):
                    same = numerics.bits(forced(config, x[:rows], b)) == numerics.bits(whole[:rows])
                    if not same.all():
                        wrong.append(f"{rows} of {n}x{k} {config}")
            numerics.check_bits(ops.matmul(x.roll(7, 0), b).roll(-7, 0), whole, "rows moved")
    assert wrong == []


def test_epilogues_batches_and_float32_results(generator: torch.Generator) -> None:
    """A row has the same bits by the kernels of few rows and of many, whatever follows the sum."""
    n, k = 1000, 4096
    x = cases.draw((5, 300, k), torch.bfloat16, False, generator)
    weight = cases.draw((n, k), torch.bfloat16, False, generator)
    bias = cases.draw((n,), torch.bfloat16, False, generator)
    more = cases.draw((300, n), torch.bfloat16, False, generator)
    sums = cases.draw((300, n), torch.float32, False, generator)
    each = cases.draw((5, n, k), torch.bfloat16, False, generator)
    calls = {
        "linear": lambda r: ops.linear(x[0, r], weight, bias),
        "odd bias": lambda r: ops.linear(x[0, r], weight[1:], bias[1:]),
        "gelu": lambda r: ops.linear(x[0, r], weight, bias, activation="gelu"),
        "addmm": lambda r: ops.addmm(more[r], x[0, r], weight.t(), beta=0.5, alpha=2),
        "float32": lambda r: ops.addmm(sums[r], x[0, r], weight.t(), out_dtype=torch.float32),
        "one matrix each": lambda r: ops.matmul(x[:, r], each.mT)[3],
        "a matrix of the batch": lambda r: ops.matmul(x[3, r], each[3].t()),
    }
    found = {}
    with torch.no_grad(), torch_cubin.batch_invariant():
        for name, call in calls.items():
            whole = found[name] = call(slice(0, 300))
            for rows in (slice(0, 1), slice(9, 17), slice(100, 164), slice(3, 203)):
                numerics.check_bits(call(rows), whole[rows], f"{name} {rows}")
        numerics.check_bits(*list(found.values())[-2:], "a batch of one")
        square = x[0, :64] @ x[0, :64].t()  # by the kernels of symmetric products, elsewhere
        numerics.check_bits(ops.matmul(x[0, 3:5], x[0, :64].t()), square[3:5], "own transpose")
        own = ops.matmul(x[0, :64], x[0, :64].t())
        numerics.check_bits(ops.matmul(x[0, 3:5], x[0, :64].t()), own[3:5], "own transpose")
    judge = numerics.Judge(torch.bfloat16)
    judge.add("linear", found["linear"], torch.nn.functional.linear(x[0], weight, bias),
              numerics.reference_matmul(x[0], weight.t()) + bias.double())  # fmt: skip
    judge.finish()


def test_several_layers_of_one_input(generator: torch.Generator) -> None:
    """Some of them in parts, some in one chain."""
    x = cases.draw((200, 4096), torch.bfloat16, False, generator)
    weights = [cases.draw((n, 4096), torch.bfloat16, False, generator) for n in (4096, 512, 9216)]
    with torch.no_grad(), torch_cubin.batch_invariant():
        whole = ops._linears(x, weights, [])
        for rows in (slice(0, 1), slice(64, 128)):
            for part, full, weight in zip(ops._linears(x[rows], weights, []), whole, weights,
                                          strict=True):  # fmt: skip
                numerics.check_bits(part, full[rows])
                numerics.check_bits(ops.linear(x[rows], weight), full[rows])
