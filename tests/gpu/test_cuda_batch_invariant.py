"""torch_cubin.batch_invariant(): a row's bits do not depend on how many other rows there are."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from pathlib import Path

import numerics
import pytest
import torch
import torch.nn.functional as F
from gpu import cases, forced_products, hopper

import torch_cubin
from torch_cubin._native import library
from torch_cubin._tuning import measure

pytestmark = pytest.mark.usefixtures("nan_memory")

MOST = 4096
# How many rows, and from which row of all of them on.
PARTS = [
    (1, 0), (1, 77), (1, MOST - 1), (2, 3), (3, 8), (4, 100), (5, 1), (7, 64), (8, 8), (9, 1000),
    (15, 2), (16, 16), (17, 5), (31, 40), (32, 1), (33, 128), (63, 9), (64, 64), (65, 2000),
    (96, 7), (127, 1), (128, 256), (129, 300), (160, 11), (192, 0), (200, 513), (255, 2),
    (256, 1024), (257, 31), (300, 3000), (513, 1), (1024, 2048), (2000, 999),
]  # fmt: skip
# (N, K): projections of a language model, small ones, ones of unaligned rows, a single column.
WEIGHTS = [
    (4096, 4096),
    (4096, 14336),
    (14336, 4096),
    (520, 1032),
    (1001, 333),
    (64, 8192),
    (1, 80),
]
FEW = [(4096, 4096), (520, 1032), (1001, 333), (1, 80)]  # for slow cases


def operands(n: int, k: int, layout: str, dtype: torch.dtype, generator: torch.Generator):
    a = cases.draw((MOST, k), dtype, False, generator)
    if layout == "nt":
        return a, cases.draw((n, k), dtype, False, generator).t()
    return a, cases.draw((k, n), dtype, False, generator)


def differing(full: torch.Tensor, part_of, parts=PARTS) -> list[str]:
    """The parts whose bits are not those of the same rows in `full`; one synchronisation."""
    same = [
        (numerics.bits(part_of(first, rows)) == numerics.bits(full[first : first + rows])).all()
        for rows, first in parts
    ]
    flags = torch.stack(same).tolist()
    return [f"rows {f} to {f + r}" for (r, f), flag in zip(parts, flags, strict=True) if not flag]


@pytest.mark.parametrize("layout", ["nt", "nn"])
@pytest.mark.parametrize("mode", cases.MODES)
def test_rows_have_the_bits_that_they_have_among_others(
    mode: str, layout: str, generator: torch.Generator, freed_memory
) -> None:
    wrong = []
    with cases.math_mode(mode) as dtype, torch.no_grad(), torch_cubin.batch_invariant():
        for n, k in WEIGHTS if dtype.itemsize == 2 else FEW:
            a, b = operands(n, k, layout, dtype, generator)
            full = torch.ops.cubin.matmul(a, b)
            found = differing(full, lambda f, r, a=a, b=b: torch.ops.cubin.matmul(a[f : f + r], b))
            wrong += [f"{n}x{k} {text}" for text in found]
            rows = a[:65]
            own, reference = torch.matmul(rows, b), numerics.reference_matmul(rows, b)
            own = cases.peer(mode, own, reference, torch.matmul, rows, b)
            # Sums of float64 are not split, and those of one column are not split over lanes:
            # up to three times PyTorch's error.
            if mode != "float64" and n > 1:
                numerics.check_close(full[:65], own, reference, f"{mode} {layout} {n}x{k}")
    assert wrong == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("n", "k"), [(2048, 8192), (2048, 2048), (512, 2048)])
def test_linear_whose_k_is_summed_in_parts(
    n: int, k: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """By clusters, by a second kernel, and in one block; with a bias and an activation."""
    x, weight = (cases.draw((rows, k), dtype, False, generator) for rows in (400, n))
    bias = cases.draw((n,), dtype, False, generator)
    x[7], x[8, : k // 2] = -0.0, -0.0  # whose products with positive weights are all negative zeros
    weight[:8].abs_()

    def layers(rows: torch.Tensor) -> torch.Tensor:
        own = [torch.ops.cubin.linear(rows, weight, each) for each in (None, bias)]
        return torch.stack([*own, torch.ops.cubin.linear(rows, weight, bias, activation="gelu")], 1)

    with torch.no_grad(), torch_cubin.batch_invariant():
        parts = [(rows, first) for rows, first in PARTS if first + rows <= len(x)]
        found = differing(layers(x), lambda first, rows: layers(x[first : first + rows]), parts)
    assert found == []


def test_results_differ_without_batch_invariant(generator: torch.Generator) -> None:
    """Outside, speed decides: the test above would fail without the switch."""
    with torch.no_grad():
        a, b = operands(4096, 4096, "nt", torch.bfloat16, generator)
        full = torch.ops.cubin.matmul(a, b)
        assert differing(full, lambda f, r: torch.ops.cubin.matmul(a[f : f + r], b))


@pytest.mark.parametrize("mode", cases.MODES)
def test_linear_and_batches(mode: str, generator: torch.Generator) -> None:
    """A bias, rows in several batch dims, batches that share a matrix or have one each."""
    k, n = 1000, 264
    with cases.math_mode(mode) as dtype, torch.no_grad(), torch_cubin.batch_invariant():
        x = cases.draw((6, 50, k), dtype, False, generator)
        weight = cases.draw((n, k), dtype, False, generator)
        bias = cases.draw((n,), dtype, False, generator)
        full = torch.ops.cubin.linear(x, weight, bias)
        for i, j in ((0, 0), (3, 17), (5, 49)):
            numerics.check_bits(torch.ops.cubin.linear(x[i, j], weight, bias), full[i, j])
            numerics.check_bits(torch.ops.cubin.linear(x[i], weight, bias), full[i])
        matrices = cases.draw((6, k, n), dtype, False, generator)
        each = torch.ops.cubin.matmul(x, matrices)
        for i in (0, 2, 5):
            numerics.check_bits(torch.ops.cubin.matmul(x[i], matrices[i]), each[i])
            numerics.check_bits(torch.ops.cubin.matmul(x[i, 7:8], matrices[i])[0], each[i, 7])
        numerics.check_bits(torch.ops.cubin.matmul(x[:2], matrices[:2]), each[:2])
        odd = cases.draw((5, 30, 67), dtype, False, generator)  # no row but the first is aligned
        own = cases.draw((5, 67, 33), dtype, False, generator)
        each = torch.ops.cubin.matmul(odd, own)
        for i in range(5):
            numerics.check_bits(torch.ops.cubin.matmul(odd[i, 3], own[i]), each[i, 3])


def bits_of_every_config(a: torch.Tensor, b: torch.Tensor) -> tuple[set[str], list[str]]:
    """Those that batch_invariant() offers, and those whose bits are not the first one's."""
    ran, wrong = set(), []
    with torch.no_grad(), torch_cubin.batch_invariant(), measure.watching():
        whole = torch.ops.cubin.matmul(a, b)
        for config in forced_products.offered("", a, b):
            library.force_config(config)
            ran.add(config)
            if not torch.equal(torch.ops.cubin.matmul(a, b), whole):
                wrong.append(f"{tuple(a.shape)} x {tuple(b.shape)} {config}")
    return ran, wrong


@hopper.for_kernels
def test_chains_of_float32_have_the_same_bits_in_every_tile(generator: torch.Generator) -> None:
    """A chain for each warp, in registers, in shared memory, in blocks of their own; ends of K
    within a chain, a k tile, a vector; underflow."""
    ran, wrong = set(), []
    sizes = [
        (64, 96, 1536), (65, 100, 2056), (130, 68, 268), (200, 260, 780), (33, 48, 4096),
        (129, 132, 256), (257, 136, 1028), (96, 100, 12), (128, 192, 2056), (64, 96, 268),
        (64, 96, 12),
    ]  # fmt: skip
    with cases.math_mode("float32") as dtype:
        for m, n, k in sizes:
            for layout in ("nn", "nt", "tn", "tt"):
                a = cases.draw((m, k), dtype, False, generator)
                b = cases.draw((n, k), dtype, False, generator)
                a[:, k // 2 :] *= 1e-25
                b[:, k // 2 :] *= 1e-16
                if layout[0] == "t":
                    a = a.t().contiguous().t()
                if layout[1] == "n":
                    b = b.t().contiguous().t()
                configs, found = bits_of_every_config(a, b.t())
                ran |= configs
                wrong += [f"{layout} {text}" for text in found]
    assert wrong == []
    assert {"sliced 64x32x16", "sliced 64x48x16", "simt 64x64x8", "simt 128x128x8"} <= ran
    assert {"simt 96x96x16", "simt 64x32x64", "simt 16x32x64"} <= ran


@hopper.for_kernels
@pytest.mark.parametrize("tokens", [1, 9, 20, 32])
def test_pairs_of_uneven_tiles_have_the_same_bits(tokens: int, generator: torch.Generator) -> None:
    ran, wrong = set(), []
    for dtype in (torch.float16, torch.bfloat16):
        for n, k in ((5568, 136), (6144, 1000), (6336, 256), (5760, 200)):
            x, w = (cases.draw(size, dtype, False, generator) for size in ((tokens, k), (k, n)))
            configs, found = bits_of_every_config(x, w)
            ran |= configs
            wrong += found
            configs, found = bits_of_every_config(w.t(), x.t())
            ran |= configs
            wrong += found
    assert wrong == []
    assert "sm90_skinny 64 rows and 32" in ran


def test_cuda_graphs_and_threads_and_compiled_code(generator: torch.Generator) -> None:
    a, b = operands(4096, 4096, "nt", torch.bfloat16, generator)
    weight = b.t()
    compiled = torch.compile(lambda x: torch.ops.cubin.linear(x, weight), backend="aot_eager")
    with torch.no_grad():
        outside = torch.ops.cubin.linear(a[:16], weight)
        compiled(a[:16])  # a graph of outside
        with torch_cubin.batch_invariant():
            full = torch.ops.cubin.linear(a, weight)
            numerics.check_bits(compiled(a[:16]), full[:16], "compiled outside, called inside")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = torch.ops.cubin.linear(a[:16], weight)
            seen = []
            thread = threading.Thread(
                target=lambda: seen.append(torch.ops.cubin.linear(a[:16], weight))
            )
            thread.start()
            thread.join()
        graph.replay()
        numerics.check_bits(captured, full[:16], "captured inside, replayed outside")
        numerics.check_bits(seen[0], outside, "another thread is outside")
        numerics.check_bits(torch.ops.cubin.linear(a[:16], weight), outside, "outside again")


def test_backward_obeys_in_autograd_s_thread(generator: torch.Generator) -> None:
    """The gradient of a row of the input; backward() is called outside, as trainers may."""
    x, b = operands(4096, 4096, "nt", torch.bfloat16, generator)
    weight, grads = b.t(), []
    up = cases.draw((MOST, 4096), torch.bfloat16, False, generator)
    for rows in (MOST, 16):
        part = x[:rows].clone().requires_grad_()
        with torch_cubin.batch_invariant():
            out = torch.ops.cubin.linear(part, weight)
        out.backward(up[:rows])
        grads.append(part.grad)
    numerics.check_bits(grads[1], grads[0][:16])


@pytest.mark.parametrize("mode", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("seqlen_q", [1, 8, 300])
def test_attention_of_a_sequence_among_others(
    mode: str, seqlen_q: int, generator: torch.Generator
) -> None:
    """Decoding splits the keys, outside of the mode by how many sequences there are."""
    with cases.math_mode(mode) as dtype, torch.no_grad(), torch_cubin.batch_invariant():
        query = cases.draw((24, 8, seqlen_q, 128), dtype, False, generator)
        key, value = (cases.draw((24, 2, 2000, 128), dtype, False, generator) for _ in range(2))
        attention = torch.ops.cubin.scaled_dot_product_attention
        full = attention(query, key, value, enable_gqa=True)
        for first, last in ((0, 1), (23, 24), (5, 9)):
            part = [x[first:last] for x in (query, key, value)]
            numerics.check_bits(attention(*part, enable_gqa=True), full[first:last])


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_packed_sequence_among_others(head_dim: int, generator: torch.Generator) -> None:
    """The longest sequence's length, which is all that the host knows, decides nothing."""
    lengths = [1, 700, 40, 2000, 9]
    at = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    query = cases.draw((at[-1], 8, head_dim), torch.bfloat16, False, generator)
    key, value = (cases.draw((at[-1], 2, head_dim), torch.bfloat16, False, generator) for _ in "kv")

    def attend(rows: slice, offsets: list[int], longest: int) -> torch.Tensor:
        cu = torch.tensor(offsets, dtype=torch.int32, device="cuda")
        return torch.ops.cubin.flash_attention(
            query[rows], key[rows], value[rows], is_causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu,
            max_seqlen_q=longest, max_seqlen_k=longest,
        )  # fmt: skip

    with torch.no_grad(), torch_cubin.batch_invariant():
        full = attend(slice(0, at[-1]), at, max(lengths))
        for begin, length in zip(at, lengths, strict=False):
            rows = slice(begin, begin + length)
            numerics.check_bits(attend(rows, [0, length], length), full[rows])


def test_drop_in_is_batch_invariant(generator: torch.Generator) -> None:
    a, b = operands(4096, 4096, "nt", torch.bfloat16, generator)
    with torch.no_grad(), torch_cubin.batch_invariant(), torch_cubin.drop_in():
        full = a @ b
        numerics.check_bits(F.linear(a[:16], b.t()), full[:16])


MANIFEST = Path(torch_cubin.__file__).resolve().parent / "cubins" / "manifest.json"
# Of the kernels for Hopper, which have one loop over K, some tiles are enough.
SM90_TILES = {
    "sm90": {"192x160", "128x256", "128x96", "64x64", "64x32"},
    "sm90_skinny": {"64x64", "64x128", "8x64"},
}


def orders() -> list[tuple[str, str]]:
    """("mma", "64x64"), ...: the tiles of the kernels for sm_90a in the package; of the portable
    ones all, whichever were built."""
    kernels = json.loads(MANIFEST.read_text())["kernels"] if MANIFEST.is_file() else []
    kernels = [k for k in kernels if (k["family"], k["arch"]) == ("matmul", "sm_90a")]
    found = {(k["kind"], "x".join(map(str, k["tile"][:2]))) for k in kernels}
    return sorted(
        (kind, tile)
        for kind, tile in found
        if kind in ("mma", "persistent") or tile in SM90_TILES.get(kind, ())
    )


def test_tiles_of_all_kinds_are_compared() -> None:
    """The package that was built for Hopper has the tiles that are named here."""
    if torch.cuda.get_device_capability() == (9, 0):
        named = {(kind, tile) for kind, tiles in SM90_TILES.items() for tile in tiles}
        assert named < set(orders())


@pytest.mark.parametrize(
    ("kind", "tile"),
    [pytest.param(*order, marks=pytest.mark.child("order", *order)) for order in orders()],
)
def test_kernels_of_all_tiles_sum_in_the_same_order(
    kind: str, tile: str, child, record_bits
) -> None:
    """What the mode rests on: a kernel that adds up otherwise would break it for some size."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels of compute capability 9.0 are compared")
    answer = child.check()
    assert answer["kernels"] > 0
    assert record_bits(f"{kind} {tile}", answer["bits"]) == []


@pytest.fixture(scope="module")
def record_bits():
    """Keeps what each kernel gave; says with which earlier one a kernel disagrees."""
    seen: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)

    def record(name: str, bits: dict[str, str]) -> list[str]:
        wrong = []
        for label, digest in bits.items():
            math, _, shape = label.split()
            others = seen[math, shape]
            wrong += [f"{name} {label}: not {other}" for other, x in others.items() if x != digest]
            others[f"{name} {label}"] = digest
        return wrong

    return record
