"""The sections of the page of results, in order. A new group of results is one entry here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import goals
import report_results
from report_results import Measured, Reader


@dataclass(frozen=True)
class Section:
    title: str
    results: str  # NAME of the files DATE_GPU_NAME.json
    read: Reader
    command: str
    about: str  # the meaning of the numbers
    groups: Mapping[str, str]  # group: its title
    goals: Mapping[str, goals.Goal] = field(default_factory=dict)
    plot: str = ""  # docs/<plot>.png: a function of report_plots.py
    by_case: bool = False  # one row per case instead of one per group

    def measured(self) -> dict[str, dict[str, Measured]]:
        return {
            gpu: {group: groups[group] for group in self.groups if group in groups}
            for gpu, groups in report_results.measured(self.results, self.read).items()
        }


def titles(of: Mapping[str, goals.Goal]) -> dict[str, str]:
    return {group: goal.title for group, goal in of.items()}


SECTIONS = (
    Section(
        title="Products",
        results="goals",
        read=report_results.products,
        command="benchmarks/bench_goals.py --lines",
        about="cuBLAS's time over ours, through PyTorch. `epilogues`: our plain product's time "
        "over ours with a bias, or a bias and an activation.",
        groups=titles(goals.PRODUCTS),
        goals=goals.PRODUCTS,
        plot="matmul",
    ),
    Section(
        title="Attention",
        results="attention_goals",
        read=report_results.listed,
        command="benchmarks/bench_attention_goals.py --lines",
        about="bfloat16, 16,384 tokens, heads * head_dim = 2,048, head dims 64, 128 and 256. The "
        "peer's time over ours, or the fraction of the named rate. FlashAttention-3 (FA3) runs "
        "with `--fa3`, as on the H200, forward; else its speedup over cuDNN is the script's.",
        groups=titles(goals.ATTENTION),
        goals=goals.ATTENTION,
        plot="attention",
    ),
    Section(
        title="Attention: lengths, windows and boolean masks",
        results="attention_goals",
        read=report_results.options,
        command="benchmarks/bench_attention_goals.py --only options",
        about="The fraction of our own dense rate per visible score, by direction and head_dim.",
        groups={"windows, packed, GQA": "", "boolean masks": ""},
        by_case=True,
    ),
    Section(
        title="Attention: softcap, ALiBi, sinks and dropout",
        results="attention_scores",
        read=report_results.scores,
        command="benchmarks/bench_attention_options.py --only scores",
        about="The fraction of our own causal dense rate: 8 sequences of 2,048 rows.",
        groups={"scores": ""},
        by_case=True,
    ),
    Section(
        title="Attention: additive masks",
        results="added_masks",
        read=report_results.added_masks,
        command="benchmarks/bench_added_masks.py",
        about="cuDNN's time over ours: 8 sequences of 2,048 rows, where a line names no other.",
        groups={"added masks": ""},
        by_case=True,
    ),
    Section(
        title="Attention of float8_e4m3fn",
        results="attention_e4m3",
        read=report_results.float8,
        command="benchmarks/bench_attention.py --only forward_e4m3",
        about="Our bfloat16 kernels' time over that of our float8 kernels, by rows per sequence, "
        "including the transpose of the values.",
        groups={"float8": ""},
        by_case=True,
    ),
    Section(
        title="Attention of float8_e4m3fn beside cuDNN's",
        results="attention_fp8",
        read=report_results.float8,
        command="benchmarks/bench_attention_fp8.py",
        about="cuDNN's time over ours, by rows per sequence, including the transpose of the "
        "values. cuDNN's result is float8, ours bfloat16.",
        groups={"float8": ""},
        by_case=True,
    ),
    Section(
        title="Products of models",
        results="model_products",
        read=report_results.listed,
        command="benchmarks/bench_models.py --products",
        about="The products of the blocks of 28 public models, between layer norms: cuBLAS's time "
        "over ours; on the H100 every sixth of them. dW with db: the gradients of weight and bias "
        "together.",
        groups={
            "models: forward, in context": "forward",
            "models: dX, in context": "dX",
            "models: dW, in context": "dW",
            "models: dW, db, in context": "dW with db",
        },
        goals=goals.MODELS,
    ),
    Section(
        title="Model blocks",
        results="model_blocks",
        read=report_results.listed,
        command="benchmarks/bench_models.py --blocks",
        about="One transformer block in a CUDA graph: stock PyTorch's time, with its best "
        "attention backend, over that under `drop_in()`; on the H100 every second model.",
        groups={"blocks: forward": "forward", "blocks: training": "forward and backward"},
        goals=goals.MODELS,
    ),
    Section(
        title="Whole models",
        results="whole_models",
        read=report_results.whole_models,
        command="benchmarks/bench_models.py --models",
        about="Stock PyTorch's time over that under `install()`, the host's included: a Llama of "
        "1 B, BERT-base, ViT-L, Whisper, DiT-XL/2, a Qwen3-MoE; 1 x 128 is short. Llama's long "
        "steps run at the power limit, where our products have 0.90 to 1.07 of cuBLAS's speed "
        "(NOTES.md). Stock runs in processes that never install; two of them differ by 0.2 in "
        "short calls and eager decode, by 0.02 in CUDA graphs, single rounds of long ones up to "
        "4.5 times.",
        groups={group: group for group in goals.WHOLE_MODELS},
        goals=goals.WHOLE_MODELS,
        plot="models",
    ),
    Section(
        title="Symmetric products and Muon",
        results="symmetric",
        read=report_results.listed,
        command="benchmarks/bench_symmetric.py",
        about="`x @ x.t()`, `cubin::symm_square` and `torch.optim.Muon` inside `drop_in()`: "
        "PyTorch's time over ours. Batches: `newton_schulz()`.",
        groups=titles(goals.SYMMETRIC),
        goals=goals.SYMMETRIC,
        plot="symmetric",
    ),
    Section(
        title="Training with Muon",
        results="muon_training",
        read=report_results.listed,
        command="examples/train_transformer.py --optimizer muon --size large --steps 40",
        about="PyTorch's time over that inside `drop_in()`: a transformer of 200 million "
        "parameters, the same batches. The optimizers are Muon for the matrices of the blocks and "
        "AdamW for the rest.",
        groups={"training with muon": ""},
        plot="training",
        by_case=True,
    ),
    Section(
        title="Products of 8-bit floats",
        results="fp8",
        read=report_results.scaled,
        command="benchmarks/bench_fp8.py --deep-gemm FOLDER",
        about="The better of PyTorch's products with scales of tensors or rows (of rows, to 128 "
        "rows) over ours; of blocks, of cuBLASLt and DeepGEMM.",
        groups=titles(goals.FP8),
        goals=goals.FP8,
        plot="fp8",
    ),
    Section(
        title="Training with layers of 8-bit floats",
        results="float8_training",
        read=report_results.listed,
        command="examples/train_transformer.py --float8 --steps 300",
        about="PyTorch's time in bfloat16 over that of layers of `torch_cubin.float8` inside "
        "`drop_in()`: a small transformer, which the host limits.",
        groups={"training with adamw": ""},
        plot="float8_training",
        by_case=True,
    ),
    Section(
        title="The same bits",
        results="same_bits",
        read=report_results.listed,
        command="benchmarks/bench_same_bits.py",
        about="A Llama of 1.1 B: the time under `install()` over that under "
        "`install(batch_invariant=True)` ([same_bits.md](same_bits.md)). Generation: a step in a "
        "CUDA graph, 1,024 tokens so far, batches of 1 to 128. Attention: prefill, and single "
        "tokens.",
        groups=titles(goals.SAME_BITS),
        goals=goals.SAME_BITS,
        plot="same_bits",
    ),
    Section(
        title="The same bits, over stock PyTorch",
        results="same_bits",
        read=report_results.listed,
        command="benchmarks/bench_same_bits.py",
        about="Stock PyTorch's time, with other bits in every batch, over that under "
        "`install(batch_invariant=True)`.",
        groups={f"{group}, PyTorch": group for group in goals.SAME_BITS},
    ),
    Section(
        title="Triton kernels as ops",
        results="triton_launch",
        read=report_results.triton,
        command="benchmarks/bench_triton_launch.py",
        about="The host's time for a launch by Triton over that for the same kernel as an op.",
        groups={"launch": "host cost of a call"},
    ),
)

# The table of docs/moe.md.
GROUPS = Section(
    title="Products of groups",
    results="grouped, grouped_fp8, grouped_fp8_weights, moe",
    read=report_results.groups,
    command="benchmarks/bench_grouped.py --deep-gemm FOLDER",
    about="The best other one's time over ours.",
    groups=titles(goals.GROUPS),
    goals=goals.GROUPS,
    plot="moe",
)

# The README's table: title of each row, and the source of its numbers. "-" if there is no result
# yet.
README_ROWS = (
    ("16-bit products, M from 1,024 on", "goals", "large"),
    ("16-bit products, M = 128 to 512", "goals", "middle"),
    ("16-bit products, M = 1 to 64", "goals", "few rows"),
    ("16-bit products of random sizes, half odd", "goals", "random"),
    ("products of models, forward", "model_products", "models: forward, in context"),
    ("products of models, inputs' gradients", "model_products", "models: dX, in context"),
    ("products of models, weights' gradients", "model_products", "models: dW, in context"),
    ("attention, forward", "attention_goals", "forward"),
    ("attention, backward", "attention_goals", "backward"),
    ("model block, forward", "model_blocks", "blocks: forward"),
    ("model block, training", "model_blocks", "blocks: training"),
)
