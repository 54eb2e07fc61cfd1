"""The project's goals, by group: the benchmarks and the page of results share this table."""

from __future__ import annotations

from typing import NamedTuple


class Goal(NamedTuple):
    title: str
    mean: float  # geometric, over the group's lines
    worst: float  # of any line


PRODUCTS = {
    "large": Goal("M >= 1024, squares from 2048", 1.04, 0.98),
    "middle": Goal("M = 128 to 512, 1024^3", 1.06, 0.97),
    "few rows": Goal("M = 1, 16, 64", 1.10, 0.96),
    "odd": Goal("odd rows, sizes from 1024", 4.0, 2.5),
    "random": Goal("200 random shapes, half odd", 1.5, 0.92),
    "other": Goal("TN, TT, batched, TF32", 1.00, 0.94),
    "epilogues": Goal("bias, activation / plain", 0.97, 0.95),
    "float32": Goal("IEEE float32", 0.98, 0.95),
    "float64": Goal("float64", 0.98, 0.95),
}
# The same products under batch_invariant(), of their speed without it.
BATCH_INVARIANT = {
    group: Goal(goal.title, 1.00, 0.96 if group == "few rows" else 0.98)
    for group, goal in PRODUCTS.items()
    if group != "epilogues"
}
ATTENTION = {
    "forward": Goal("forward / cuDNN", 1.12, 0.98),
    "forward, best": Goal("forward / better of cuDNN and FA3", 1.00, 0.93),
    "backward": Goal("backward / cuDNN", 1.07, 0.97),
    "backward, FA3": Goal("backward, 16,384 rows / FA3", 0.93, 0.85),
    "windows, packed, GQA": Goal("windows, packed, GQA / dense", 0.90, 0.80),
    "boolean masks": Goal("boolean masks / dense", 0.85, 0.75),
    "decode, of a copy": Goal("decode, batch 16 to 128 / a copy's rate", 0.97, 0.94),
    "decode, one sequence": Goal("decode of one sequence / best peer", 1.30, 1.00),
    "paged": Goal("pages of 16 and 64 / contiguous", 0.97, 0.95),
    # attention_e4m3.py
    "e4m3 backward": Goal("e4m3 backward / bfloat16", 1.20, 1.00),
    "e4m3 decode, of a copy": Goal("decode, e4m3 from 64 MB on / a copy", 0.90, 0.90),
    "e4m3 decode, one sequence": Goal("decode, e4m3 below / best peer", 1.00, 1.00),
    # attention_shapes.py: the faster of cuDNN and flash over ours.
    "grouped heads: forward": Goal("grouped heads, forward", 1.10, 1.00),
    "grouped heads: training": Goal("grouped heads, training", 1.10, 1.05),
    "head dims between: forward": Goal("head dims of 40 to 160, forward", 1.10, 1.03),
    "head dims between: training": Goal("head dims of 40 to 160, training", 1.10, 1.03),
    "short rows: forward": Goal("128 to 577 rows of large batches, forward", 1.10, 1.03),
    "short rows: training": Goal("128 to 577 rows of large batches, training", 1.10, 1.03),
    "views of one tensor: forward": Goal("heads as views of one tensor, forward", 1.10, 1.03),
    "views of one tensor: training": Goal("heads as views of one tensor, training", 1.10, 1.03),
    "models: forward": Goal("attention of models, forward", 1.20, 1.00),
    "models: training": Goal("attention of models, training", 1.15, 1.00),
}
# bench_fp8.py: the better peer's time over ours (few rows: PyTorch's product with row scales).
FP8 = {
    "fast": Goal("row scales, fast sums, from 512 rows on", 1.00, 0.97),
    "fast, few rows": Goal("row scales, fast sums, to 128 rows", 1.35, 0.90),
    "exact": Goal("row scales, exact sums, from 512 rows on", 1.03, 0.97),
    "exact, few rows": Goal("row scales, exact sums, to 128 rows", 1.00, 0.90),
    "block": Goal("block scales, from 512 rows on", 1.03, 0.97),
    "block, few rows": Goal("block scales, to 128 rows", 1.03, 0.97),
    "quantize": Goal("quantize / a copy's rate", 0.97, 0.95),
    "quantize, gate": Goal("quantize, silu * up / compiled", 2.0, 1.9),
}
# bench_grouped.py and bench_grouped_fp8.py: the best other one's time over ours.
GROUPS = {
    "forward": Goal("bfloat16, rows of groups", 1.03, 0.96),
    "dW": Goal("bfloat16, gradients of weights", 1.05, 0.97),
    "fast, few": Goal("e4m3, scales of rows, fast sums, to 16 groups", 1.00, 0.97),
    "fast, many": Goal("e4m3, scales of rows, fast sums, 32 to 256 groups", 1.05, 1.00),
    "exact, few": Goal("e4m3, scales of rows, exact sums, to 16 groups", 1.00, 0.97),
    "exact, many": Goal("e4m3, scales of rows, exact sums, 32 to 256 groups", 1.05, 1.00),
    "block, few": Goal("e4m3, scales of blocks, to 16 groups", 1.00, 0.97),
    "block, many": Goal("e4m3, scales of blocks, 32 to 256 groups", 1.05, 0.97),
    "dW, e4m3": Goal("e4m3, gradients of weights", 1.05, 0.97),
    "layers": Goal("layers of experts, bfloat16", 1.15, 1.15),
}
# bench_models.py: torch's time over ours.
MODELS = {
    f"models: {direction}, {context}": Goal(f"{direction} of models, {context}", 1.03, 0.96)
    for direction in ("forward", "dX", "dW", "dW, db")
    for context in ("in context", "back to back")
} | {
    "blocks: forward": Goal("a block of models, forward", 1.05, 1.00),
    "blocks: training": Goal("a block of models, training", 1.03, 0.99),
}
# bench_models.py --models: stock PyTorch's time over that under install().
WHOLE_MODELS = {
    f"{mode}, {size}": Goal(f"whole models, {mode}, {size}", mean, 0.99)
    for size, mode, mean in (
        ("long", "eager", 1.08),
        ("long", "compiled", 1.30),
        ("short", "eager", 1.00),
        ("short", "compiled", 1.00),
        ("decode", "eager", 1.00),
        ("decode", "CUDA graph", 1.10),
        ("decode", "compiled", 1.10),
    )
}
# bench_same_bits.py: the time of install() over that of install(batch_invariant=True).
SAME_BITS = {
    "generation": Goal("generation", 0.98, 0.96),
    "attention": Goal("attention", 0.92, 0.92),
    "training step": Goal("training step", 0.97, 0.97),
}
# bench_symmetric.py: PyTorch's time over ours.
SYMMETRIC = {
    "x x^T, from 4,096 rows": Goal("x x^T, from 4,096 rows on", 1.75, 1.75),
    "x x^T, fewer rows": Goal("x x^T, 256 to 3,072 rows", 1.20, 1.00),
    "x x^T, any size": Goal("x x^T, 128 to 4,096 rows", 1.20, 0.988),
    "x x^T, random": Goal("x x^T, random", 1.20, 0.988),
    "b g + c g g, from 4,096 rows": Goal("b g + c g g, from 4,096 rows on", 1.75, 1.75),
    "b g + c g g, fewer rows": Goal("b g + c g g, 256 to 3,072 rows", 1.20, 1.00),
    "Newton-Schulz, squares": Goal("Newton-Schulz, 4,096 x 4,096", 1.40, 1.40),
    "Newton-Schulz, long": Goal("Newton-Schulz, 4,096 by 16,384", 1.30, 1.30),
    "Newton-Schulz, smaller": Goal("Newton-Schulz, 512 to 2,048 rows", 1.00, 1.00),
    "Newton-Schulz, smaller, in a graph": Goal(
        "Newton-Schulz, 512 to 2,048 rows, in a graph", 1.00, 0.988
    ),
    "Muon.step(), Llama-3.2-1B": Goal("Muon.step(), Llama-3.2-1B", 1.08, 1.08),
    "Muon.step(), from 4,096 rows": Goal("Muon.step(), from 4,096 rows on", 1.30, 1.30),
    "Muon's matrices in batches, Llama-3.2-1B": Goal("batches, Llama-3.2-1B", 1.25, 1.25),
    "Muon's matrices in batches, from 4,096 rows": Goal("batches, from 4,096 rows on", 1.30, 1.30),
}
