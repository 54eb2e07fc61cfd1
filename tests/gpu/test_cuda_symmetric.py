"""syrk, symm_square, and products of a matrix with its own transpose: every kernel of
csrc/kernels/matmul/sm90_symmetric.cu in every config, and full products that are mirrored.

Exact on small integers; others within the rule of numerics.Judge; symmetric bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable

import numerics
import pytest
import torch
from gpu import cases
from gpu.repeats import count_different
from torch import Tensor
from torch.optim import _muon

import torch_cubin
from torch_cubin._native import library
from torch_cubin._tuning import measure

pytestmark = pytest.mark.usefixtures("nan_memory")

ops = torch.ops.cubin
DTYPES = [torch.bfloat16, torch.float16, torch.float32]  # the last as TF32
CONFIGS = ["128x256", "128x192", "128x128", "128x64"]
# N, K: one tile, tails of tiles, odd numbers of rows of tiles, groups of rows, short K, a last tile
# that begins a square sooner.
SIZES = [
    (8, 8),
    (64, 64),
    (136, 200),
    (192, 136),
    (392, 72),
    (520, 328),
    (1000, 136),
    (1928, 72),
    (2048, 136),
    (2184, 264),
    (2192, 72),
    (2180, 72),
    (4232, 64),
]
# N, K, batch: the last wave of tiles is streamed after none, one or several whole ones, also of
# pairs.
STREAMED = [(1000, 520, 1), (2184, 1160, 1), (712, 1160, 5), (4232, 520, 1)]
# N, K, batch: K is divided by the blocks of clusters.
SPLIT = [(136, 1032, 1), (712, 584, 1), (264, 1032, 3)]
# N, K, batch: full products in waves of tiles, and after copies of odd rows.
FULL = [(2184, 64, 2), (1637, 576, 2), (1253, 64, 3)]
# Rows that the kernels do not take: odd ones, and few.
OTHERS = [(1, 5), (2, 1), (3, 3), (33, 17), (131, 77), (513, 300), (1001, 64)]


@pytest.fixture(autouse=True)
def tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)


hopper = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9,
    reason="sm90 kernels run on Hopper alone",
)


PING_PONG = "128x128 ping_pong"  # for more tiles than multiprocessors
THIN_ROWS = f"{PING_PONG} with thin rows"  # beyond whole tiles, at most 16
EXTRA_SQUARES = "128x128 with extra squares"  # of every fourth tile at the diagonal


def configs_for(dtype: torch.dtype) -> list[str]:
    return [name for name in CONFIGS if dtype != torch.float32 or "192" not in name]


def integers(shape, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randint(-3, 4, shape, generator=generator, device="cuda").to(dtype)


def forced(config: str, call: Callable[[], Tensor]) -> Tensor:
    with measure.watching():
        library.force_config(f"sm90_symmetric {config}")
        return call()


def mirrored(full: Tensor) -> Tensor:
    return full.tril() + full.tril(-1).mT


def offered(
    n: int, k: int, batch: int, dtype: torch.dtype, symmetric: bool = True
) -> dict[str, str]:
    """The configs of this kernel, behind "sm90_symmetric ", and the kind of each."""
    math, lines = ("tf32", 32) if dtype == torch.float32 else ("16_bit", 64)
    access = "k_lines" if k % lines == 0 else "k_vectors"
    case = {"m": n, "n": n, "k": k, "batch": batch, "math": math, "a": access, "b": access,
            "symmetric": symmetric}  # fmt: skip
    (plan,) = library.planned([case], True)
    names = [config["name"].partition("sm90_symmetric ")[2] for config in plan["configs"]]
    # "128x256 in pairs streamed in 4" is one of "in pairs streamed in".
    return {name: name.partition(" ")[2].rstrip("0123456789 ") for name in names if name}


@hopper
def test_every_config_is_offered() -> None:
    """force_config() ignores the names of others."""
    for dtype in (torch.bfloat16, torch.float32):
        configs = offered(520, 328, 1, dtype)
        assert set(configs_for(dtype)) <= set(configs)
        assert set(configs.values()) >= {"", "split in"}
        kinds = offered(4232, 520, 1, dtype).values()
        assert {"in pairs streamed in", "ping_pong", "ping_pong streamed"} <= set(kinds)
        assert "ping_pong with thin rows" in kinds
        assert EXTRA_SQUARES in offered(2048, 72, 1, dtype)
        assert not offered(520, 328, 1, dtype, symmetric=False)


@hopper
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_kernel_is_exact(sizes, dtype: torch.dtype, generator: torch.Generator) -> None:
    n, k = sizes
    x, y = integers((n, k), dtype, generator), integers((k, n), dtype, generator).mT
    a, c = (integers((n, n), dtype, generator) for _ in range(2))
    gram, of_y = x.double() @ x.double().mT, y.double() @ y.double().mT
    square = a.double() @ a.double()
    for config, kind in offered(n, k, 1, dtype).items():
        if "streamed" in kind or "split" in kind:
            continue
        label = f"{sizes} {config}"
        numerics.check_exact(forced(config, lambda: ops.syrk(x)), gram, label)
        numerics.check_exact(forced(config, lambda: ops.matmul(x, x.mT)), gram, label)
        for addend in (c, c.mT, c[:, :1], integers((n, 2 * n), dtype, generator)[:, ::2]):
            expected = mirrored(2 * gram - addend.double().expand(n, n))
            out = forced(config, lambda: ops.syrk(x, addend, beta=-1, alpha=2))  # noqa: B023
            numerics.check_exact(out, expected, f"sum {label}")
        if dtype != torch.float32:
            numerics.check_exact(forced(config, lambda: ops.syrk(y)), of_y, f"tn {label}")
        # Neither is symmetric: only their lower triangles count.
        out = forced(config, lambda: ops.symm_square(a, c, beta=-1, alpha=2))
        numerics.check_exact(out, mirrored(2 * square - c.double()), f"square {label}")


def streamed_configs(n: int, k: int, batch: int, dtype: torch.dtype) -> list[str]:
    """One of each tile and kind: in equal parts, and in others; with pairs, and without."""
    first: dict[tuple[str, str], str] = {}
    for name, kind in offered(n, k, batch, dtype).items():
        if "streamed" in kind:
            first.setdefault((name.split()[0], kind), name)
    return list(first.values())


def check_exact_in_all(configs: list[str], sizes, dtype: torch.dtype, generator) -> None:
    """Products in each config, without and with an addend, of rows and, 16-bit, of columns."""
    assert {config.split()[0] for config in configs} == set(configs_for(dtype))
    n, k, batch = sizes
    shape = (n, k) if batch == 1 else (batch, n, k)
    x = integers(shape, dtype, generator)
    y = integers((*shape[:-2], k, n), dtype, generator).mT
    c = integers((n, n), dtype, generator)
    for own, addend in ((x, c),) if dtype == torch.float32 else ((x, c), (y, c.mT)):
        gram = own.double() @ own.double().mT
        expected = mirrored(2 * gram - addend.double())
        for config in configs:
            label = f"{sizes} {config}"
            numerics.check_exact(forced(config, lambda: ops.matmul(own, own.mT)), gram, label)  # noqa: B023
            out = forced(config, lambda: ops.syrk(own, addend, beta=-1, alpha=2))  # noqa: B023
            numerics.check_exact(out, expected, f"sum {label}")


@hopper
@pytest.mark.parametrize("config", CONFIGS)
def test_every_number_of_lone_tiles_is_exact(config: str, generator: torch.Generator) -> None:
    """A block finds its only tile by a square root, or column by column."""
    k = 256
    for n in range(40, 2300, 56):
        x = integers((n, k), torch.bfloat16, generator)
        full = x.double() @ x.double().mT
        for name in {config, f"{config} split in 2"} & set(offered(n, k, 1, torch.bfloat16)):
            out = forced(name, lambda: ops.syrk(x))  # noqa: B023
            numerics.check_exact(out, full, f"{n} {name}")


@hopper
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", CONFIGS)
def test_lone_tiles_of_batches_are_exact(
    config: str, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """Of one, two and three dims; of up to five squares, whose last tile begins sooner if they are
    odd, and of rows within a square."""
    if config not in configs_for(dtype):
        pytest.skip("no such kernel")
    for n in (64, 128, 184, 192, 256, 320):
        x = integers((2, 3, 2, n, 256), dtype, generator)
        c = integers((n, n), dtype, generator)
        names = [config, *(f"{config} split in {blocks}" for blocks in (2, 3, 4, 8))]
        for own in (x, x.transpose(0, 1), x.transpose(0, 2), x[:, :1], x[0, :, 0], x[:, :, :1]):
            gram = own.double() @ own.double().mT
            batch = own.numel() // (n * 256)
            for name in set(names) & set(offered(n, 256, batch, dtype)):
                label = f"{name} {tuple(own.shape)} {own.stride()}"
                numerics.check_exact(forced(name, lambda: ops.matmul(own, own.mT)), gram, label)  # noqa: B023
                out = forced(name, lambda: ops.syrk(own, c, beta=-1, alpha=2))  # noqa: B023
                numerics.check_exact(out, mirrored(2 * gram - c.double()), f"sum {label}")


@hopper
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", STREAMED, ids=str)
def test_streamed_tiles_are_exact(sizes, dtype: torch.dtype, generator: torch.Generator) -> None:
    check_exact_in_all(streamed_configs(*sizes, dtype), sizes, dtype, generator)


def split_configs(n: int, k: int, batch: int, dtype: torch.dtype) -> list[str]:
    """Of each tile: clusters of three, and of as many blocks as there can be."""
    names = [name for name, kind in offered(n, k, batch, dtype).items() if kind == "split in"]
    last = {name.split()[0]: name for name in names}
    return [name for name in names if name[-1] == "3" or name in last.values()]


@hopper
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SPLIT, ids=str)
def test_tiles_of_clusters_are_exact(sizes, dtype: torch.dtype, generator: torch.Generator) -> None:
    check_exact_in_all(split_configs(*sizes, dtype), sizes, dtype, generator)


@hopper
def test_tiles_of_several_blocks_keep_their_bits(generator: torch.Generator) -> None:
    """Whichever block completes last, the parts are added in one order."""
    n, k = 2184, 1160
    x = cases.draw((n, k), torch.bfloat16, False, generator)
    for config in streamed_configs(n, k, 1, torch.bfloat16):
        first = forced(config, lambda: ops.syrk(x))
        assert torch.equal(first, first.mT)
        numerics.check_close(first, x @ x.mT, numerics.reference_matmul(x, x.mT), config)
        with measure.watching():
            library.force_config(f"sm90_symmetric {config}")
            assert count_different(lambda: [ops.syrk(x)], [first], 300) == 0, config
    for rows in (x[:712], cases.draw((192, 4096), torch.float32, False, generator)):
        for config in split_configs(*rows.shape, 1, rows.dtype):
            first = forced(config, lambda: ops.syrk(rows))  # noqa: B023
            assert torch.equal(first, first.mT), config
            with measure.watching():
                library.force_config(f"sm90_symmetric {config}")
                different = count_different(lambda: [ops.syrk(rows)], [first], 300)  # noqa: B023
            assert different == 0, config


@hopper
@pytest.mark.parametrize("dtype", DTYPES)
def test_batches_are_exact(dtype: torch.dtype, generator: torch.Generator) -> None:
    x = integers((3, 5, 264, 128), dtype, generator)
    c = integers((5, 264, 264), dtype, generator)
    for config in configs_for(dtype):
        for own in (x, x.transpose(0, 1), x[:, ::2], x[:, :1].expand(3, 5, 264, 128)):
            addend = c if own.shape[1] == 5 else c[: own.shape[1]]
            expected = mirrored(own.double() @ own.double().mT + addend[: own.shape[1]].double())
            if own.shape[:2] == (5, 3):
                addend, expected = None, own.double() @ own.double().mT
            out = forced(config, lambda: ops.syrk(own, addend, beta=1))  # noqa: B023
            numerics.check_exact(out, expected, f"{config} {tuple(own.shape)}")


@hopper
@pytest.mark.parametrize("dtype", DTYPES)
def test_pairs_of_batches_are_exact(dtype: torch.dtype, generator: torch.Generator) -> None:
    """More than a wave of tiles; three narrow ones a matrix, so that one has no other."""
    x, a = integers((16, 520, 72), dtype, generator), integers((16, 520, 520), dtype, generator)
    c = integers((520, 520), dtype, generator)
    square = mirrored(a.double() @ a.double() + c.double())
    for config in ("128x256 in pairs", PING_PONG, THIN_ROWS):
        assert config in offered(520, 72, 16, dtype)
        for own in (x, x.mT.contiguous().mT, x[:1].expand(16, 520, 72)):
            gram = own.double() @ own.double().mT
            numerics.check_exact(forced(config, lambda: ops.syrk(own)), gram, f"{own.stride()}")  # noqa: B023
        out = forced(config, lambda: ops.symm_square(a, c, beta=1))
        numerics.check_exact(out, square, f"square {config}")


@hopper
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batch", "n"), [(9, 520), (14, 392)])
def test_extra_squares_of_batches_are_exact(
    batch: int, n: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """Four of five tiles at the diagonal, and four of four; in all more than multiprocessors."""
    x, c = integers((batch, n, 72), dtype, generator), integers((n, n), dtype, generator)
    assert EXTRA_SQUARES in offered(n, 72, batch, dtype)
    gram = x.double() @ x.double().mT
    numerics.check_exact(forced(EXTRA_SQUARES, lambda: ops.matmul(x, x.mT)), gram)
    out = forced(EXTRA_SQUARES, lambda: ops.syrk(x, c, beta=-1, alpha=2))
    numerics.check_exact(out, mirrored(2 * gram - c.double()))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("sizes", OTHERS, ids=str)
def test_mirrored_products_are_exact(sizes, dtype: torch.dtype, generator: torch.Generator) -> None:
    n, k = sizes
    for batch in ((), (3,)):
        x, a, c = (
            integers((*batch, *shape), dtype, generator) for shape in ((n, k), (n, n), (n, n))
        )
        gram, square = x.double() @ x.double().mT, a.double() @ a.double()
        numerics.check_exact(ops.syrk(x, c, beta=2), mirrored(gram + 2 * c.double()))
        numerics.check_exact(ops.symm_square(a, c, beta=2), mirrored(square + 2 * c.double()))
        numerics.check_exact(ops.symm_square(a.mT), mirrored(a.double().mT @ a.double().mT))
        numerics.check_exact(ops.symm_square(a, c, beta=2, alpha=0), mirrored(2 * c.double()))
        numerics.check_exact(ops.matmul(x, x.mT), gram)


@hopper
@pytest.mark.parametrize("layout", ["nt", "tn"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", FULL, ids=str)
def test_full_products_are_symmetric_in_bits(
    sizes, dtype: torch.dtype, layout: str, generator: torch.Generator
) -> None:
    n, k, batch = sizes
    shape = (batch, n, k) if layout == "nt" else (batch, k, n)

    def product(x: Tensor) -> Tensor:
        x = x.squeeze(0) if layout == "nt" else x.squeeze(0).mT
        return ops.matmul(x, x.mT)

    whole = integers(shape, dtype, generator)
    rows = whole.double() if layout == "nt" else whole.double().mT
    numerics.check_exact(product(whole), (rows @ rows.mT).squeeze(0), str(sizes))
    out = product(torch.randn(shape, generator=generator, device="cuda").to(dtype))
    assert torch.equal(out, out.mT)


@pytest.mark.parametrize("op", ["syrk", "symm_square"])
@pytest.mark.parametrize("n", [1, 8, 136])
def test_expanded_operands_whose_batches_become_rows(
    op: str, n: int, generator: torch.Generator
) -> None:
    row = integers((1, 1, n), torch.bfloat16, generator)
    operand, c = row.expand(5, n, n), integers((n, n), torch.bfloat16, generator)
    for addend in (None, c, c[:1].expand(n, n), c[:1]):
        full = operand.double() @ (operand.double().mT if op == "syrk" else operand.double())
        full = full if addend is None else full + addend.double()
        out = getattr(ops, op)(operand, addend, beta=1)
        numerics.check_exact(out, mirrored(full), f"{op} {n}")


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("n", [136, 131, 1024])
def test_float32_output(n: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    a = integers((n, n), dtype, generator)
    for c in (integers((n, n), dtype, generator), integers((n, n), torch.float32, generator)):
        out = ops.symm_square(a, c, beta=0.5, out_dtype=torch.float32)
        numerics.check_exact(out, mirrored(a.double() @ a.double() + 0.5 * c.double()))


SHAPES = [(1024, 333), (2048, 2048), (2056, 4096), (2, 1536, 512)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_accuracy_and_symmetry(shape, dtype: torch.dtype, generator: torch.Generator) -> None:
    x = cases.draw(shape, dtype, False, generator)
    for out in (ops.syrk(x), ops.matmul(x, x.mT)):
        numerics.check_close(out, x @ x.mT, numerics.reference_matmul(x, x.mT), f"{shape}")
    assert torch.equal(ops.syrk(x), ops.syrk(x).mT)
    gram = ops.syrk(x) / shape[-1]
    out = ops.symm_square(gram, gram, beta=-1, alpha=2)
    own = torch.baddbmm(gram.view(-1, *gram.shape[-2:]), *2 * [gram.view(-1, *gram.shape[-2:])],
                        beta=-1, alpha=2).view_as(gram)  # fmt: skip
    exact = 2 * numerics.reference_matmul(gram, gram) - gram.double()
    numerics.check_close(out, own, exact, f"square {shape}")
    assert torch.equal(out, out.mT)


@hopper
@pytest.mark.parametrize("config", [*CONFIGS, PING_PONG, THIN_ROWS, EXTRA_SQUARES])
def test_ten_thousand_repeats_beside_other_work(config: str, generator: torch.Generator) -> None:
    n = {PING_PONG: 2312, THIN_ROWS: 2312, EXTRA_SQUARES: 2040}.get(config, 1160)
    x = cases.draw((n, 264), torch.bfloat16, False, generator)
    c = cases.draw((n, n), torch.bfloat16, False, generator)
    with torch.no_grad(), measure.watching():
        library.force_config(f"sm90_symmetric {config}")
        first = ops.syrk(x, c, beta=1)
        assert count_different(lambda: [ops.syrk(x, c, beta=1)], [first]) == 0


def test_operands_that_merely_look_alike(generator: torch.Generator) -> None:
    """They take the full product, and every answer is right."""
    n = 2048
    memory = torch.randn(2 * n * n + n, generator=generator, device="cuda").bfloat16()
    x = memory[: n * n].view(n, n)
    others = {
        "other offset": memory[n : n + n * n].view(n, n).t(),
        "other stride": memory[: 2 * n * n].view(n, 2 * n)[:, :n].t(),
        "no transpose": x,
        "negated": torch._neg_view(x.t()),
        "a copy": x.t().clone(),
    }
    for label, other in others.items():
        out = ops.matmul(x, other)
        numerics.check_close(out, x @ other, numerics.reference_matmul(x, other), label)
    z = torch.randn(64, 64, dtype=torch.complex64, device="cuda")
    own = z @ z.mH
    with torch_cubin.drop_in(policy="all"):
        assert torch.equal(z @ z.mH, own)


@pytest.mark.parametrize("form", ["matmul", "mm", "bmm", "out", "linear"])
def test_torch_functions_inside_drop_in(form: str, generator: torch.Generator) -> None:
    x = cases.draw((2, 2048, 1024) if form == "bmm" else (2048, 1024), torch.bfloat16, False,
                   generator)  # fmt: skip
    calls = {
        "matmul": lambda: x @ x.mT,
        "mm": lambda: torch.mm(x, x.t()),
        "bmm": lambda: torch.bmm(x, x.mT),
        "out": lambda: torch.mm(x, x.t(), out=torch.empty(2048, 2048, device="cuda").bfloat16()),
        "linear": lambda: torch.nn.functional.linear(x, x),
    }
    own = calls[form]()
    with torch_cubin.drop_in():
        out = calls[form]()
    numerics.check_close(out, own, numerics.reference_matmul(x, x.mT), form)
    assert torch.equal(out, out.mT)


def test_gradient_is_pytorchs(generator: torch.Generator) -> None:
    x = cases.draw((2048, 512), torch.bfloat16, False, generator).requires_grad_()
    grad = cases.draw((2048, 2048), torch.bfloat16, False, generator)
    (own,) = torch.autograd.grad(x @ x.mT, x, grad)
    with torch_cubin.drop_in():
        (ours,) = torch.autograd.grad(x @ x.mT, x, grad)
    (syrk,) = torch.autograd.grad(ops.syrk(x), x, grad)
    exact = (grad.double() + grad.double().mT) @ x.detach().double()
    numerics.check_close(ours, own, exact, "gradient")
    # It rounds the sum of the gradient and its transpose, PyTorch the two products.
    assert (syrk - exact).norm() <= 1.5 * (own - exact).norm()


@hopper
def test_batch_invariant_products_keep_their_bits(generator: torch.Generator) -> None:
    x = cases.draw((2048, 1000), torch.bfloat16, False, generator)
    with torch_cubin.batch_invariant():
        whole = ops.matmul(x, x.mT)
        assert torch.equal(whole[:16], ops.matmul(x[:16], x.mT))
        assert torch.equal(whole[1999:], ops.matmul(x[1999:], x.mT))


def newton_schulz(grad: Tensor) -> Tensor:
    return _muon._zeropower_via_newtonschulz(grad, (3.4445, -4.7750, 2.0315), 5, 1e-7)


def squares_run() -> int:
    """Calls of symm_square that the process has run."""
    return sum(row.calls for row in torch_cubin.report().ran if "symm_square" in row.op)


@hopper
@pytest.mark.parametrize("shape", [(1152, 1152), (1536, 4096), (4096, 1536)], ids=str)
@pytest.mark.parametrize("door", ["drop_in", "install"])
def test_muon(shape, door: str, generator: torch.Generator) -> None:
    grad = torch.randn(shape, generator=generator, device="cuda")
    stock = newton_schulz(grad)
    with torch_cubin.drop_in() if door == "drop_in" else torch_cubin.install():
        before = squares_run()
        served = newton_schulz(grad)
        assert squares_run() == before + 5
    assert torch.equal(newton_schulz(grad), stock)  # outside nothing has changed
    assert (served - stock).float().norm() <= 0.05 * stock.float().norm()


@hopper
@pytest.mark.parametrize("door", ["drop_in", "install"])
def test_a_compiled_step_of_muon(door: str, generator: torch.Generator) -> None:
    shape, steps = (1152, 2048), []
    grad = torch.randn(shape, generator=generator, device="cuda")
    made = []
    for _ in range(2):
        made.append(torch.nn.Parameter(torch.zeros(shape, device="cuda")))
        made[-1].grad = grad.clone()
        steps.append(torch.compile(torch.optim.Muon(made[-1:], lr=0.1).step))
    for _ in range(3):
        steps[0]()
        with torch_cubin.drop_in() if door == "drop_in" else torch_cubin.install():
            before = squares_run()
            steps[1]()
            assert squares_run() == before + 5
    assert (made[0] - made[1]).norm() <= 0.05 * made[0].norm()
    torch._dynamo.reset()


def test_small_matrices_of_muon_take_the_full_product() -> None:
    grad = torch.randn(1024, 2048, device="cuda")
    with torch_cubin.drop_in():
        newton_schulz(grad)
        assert not any("symm_square" in row.op for row in torch_cubin.report().ran)
